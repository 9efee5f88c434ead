"""The Accelerate config file of this launch, and the settings in it that Accelerate would silently ignore.

Accelerate refuses unknown top-level keys, but copies unknown nested keys and never reads them, so a misspelt
`fsdp_ofload_params` trains without offload. The known keys are taken from Accelerate's own code, so they stay correct.
"""

from __future__ import annotations

import difflib
import inspect
import io
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode

from acc_lm.errors import MachineError

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

CONFIG_FILE_VARIABLE = "ACC_LM_CONFIG_FILE"
OF_A_LAUNCH = re.compile(
    rf"(ACCELERATE|FSDP|PARALLELISM_CONFIG|TORCHELASTIC)_.*|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|{CONFIG_FILE_VARIABLE}"
)
"""Pattern of the environment variables that a launcher sets for its processes."""


def check_config_file(typed: Namespace | None = None) -> None:
    """Refuse settings in this launch's Accelerate config file that would have no effect.

    Args:
        typed: arguments of `accelerate launch`; None: read them from its command line.

    Raises:
        MachineError: one line for each such setting.
    """
    file = config_file()
    if file is None:
        return
    config, lines = _read(file)
    problems = [
        f"{file}:{line}: {key} must be given once, got it twice (only the last counts); remove one"
        for key, line in lines
        if line != dict(reversed(lines))[key]
    ]
    places = {key: f"{file}:{line}: " for key, line in lines}
    problems += _uneven_machines(config, places.get("num_processes", ""), typed or launch_arguments())
    for section in _sections():
        values = getattr(config, section, None) or {}
        if not isinstance(values, dict):
            problems.append(
                f"{places[section]}{section} must be a mapping of keys, got {values!r}; indent its keys below it"
            )
            continue
        if values and not _is_in_use(section, config):
            problems.append(
                f"{places[section]}{section} must be in a file of distributed_type {_strategy_of(section)}, got "
                f"{config.distributed_type.value}; change distributed_type, or remove {section}"
            )
        for key in values:
            if problem := _problem(section, str(key), values):
                problems.append(f"{places.get(f'{section}.{key}', f'{file}: ')}{section}.{problem}")
    if problems:
        raise MachineError(*problems)


def config_file() -> Path | None:
    """Path of the Accelerate config file of this process; None if there is none, as under torchrun and plain Python.

    Raises:
        MachineError: the named file does not exist.
    """
    arguments = launch_arguments()
    named = os.environ.get(CONFIG_FILE_VARIABLE) or getattr(arguments, "config_file", None)
    if named:
        if not Path(named).is_file():
            raise MachineError(f"the Accelerate config file must exist, got nothing at {named!r}; name another")
        return Path(named)
    if arguments is None:
        return None
    from accelerate.commands.config import default_config_file

    default = Path(default_config_file)
    return default if default.is_file() and not arguments.cpu else None


def shareable_config() -> str | None:
    """Text of this launch's Accelerate config without addresses and paths of its machines; None for a launch without one."""
    file = config_file()
    if file is None:
        return None
    safe = YAML(typ="safe", pure=True)
    safe.default_flow_style = False
    text = io.StringIO()
    try:
        safe.dump(_without_machine(safe.load(file.read_text(encoding="utf-8"))), text)
    except (OSError, ValueError, YAMLError):  # it may have changed since the start
        return None
    return text.getvalue()


def _without_machine(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        key: _without_machine(value)
        for key, value in values.items()
        if not re.search(r"_(ip|port|hostfile|file|path)$|^tpu_|^command", str(key))
        and not (isinstance(value, str) and "/" in value)
    }


def without_launch(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy of an environment without the variables of another launch, but with the user's ACCELERATE_USE_CPU."""
    return {
        name: value
        for name, value in environment.items()
        if name == "ACCELERATE_USE_CPU" or not OF_A_LAUNCH.fullmatch(name)
    }


def requested_processes(typed: Namespace | None = None) -> int:
    """Number of processes requested by `accelerate launch`'s command line, else by its config; 1 if neither sets it.

    Args:
        typed: as for `check_config_file`.
    """
    arguments = typed or launch_arguments()
    if number := getattr(arguments, "num_processes", None):
        return int(number)
    file = config_file()
    return int(getattr(_read(file)[0], "num_processes", 1)) if file else 1


def resolved_deepspeed_config(path: str) -> str:
    """Path of a `deepspeed_config_file` from the current folder, else the Accelerate config's; unchanged if missing."""
    file = config_file()
    if not Path(path).exists() and file is not None and (file.parent / path).is_file():
        return str(file.parent / path)
    return path


def lost_settings() -> dict[str, str]:
    """Environment variables for requested settings that Accelerate's processes read but its launcher does not set.

    The DeepSpeed launcher passes on neither the folders of an NVMe offload nor anything in dynamo_config. Every
    launcher takes `enable_cpu_affinity` from the command line only.
    """
    file = config_file()
    config = _read(file)[0] if file else None
    dynamo = {
        f"dynamo_{key.removeprefix('dynamo_')}": value for key, value in getattr(config, "dynamo_config", {}).items()
    }
    typed = launch_arguments()
    from_command_line = {key: getattr(typed, key) for key in getattr(typed, "nondefault", ())}
    settings: dict[str, str] = {}
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        for key, value in {**getattr(config, "deepspeed_config", {}), **dynamo, **from_command_line}.items():
            if re.fullmatch(r"offload_\w+_nvme_path", key):
                settings[f"ACCELERATE_DEEPSPEED_{key.upper()}"] = str(value)
            elif key.startswith("dynamo_"):
                settings[f"ACCELERATE_{key.upper()}"] = str(value)
    if getattr(config, "enable_cpu_affinity", False):
        settings["ACCELERATE_CPU_AFFINITY"] = "1"
    return {name: value for name, value in settings.items() if name not in os.environ}


def launch_with(file: Path, *options: str) -> tuple[Namespace, dict[str, str]]:
    """Return what `accelerate launch --config_file FILE OPTIONS` passes to torchrun and adds to the environment.

    Raises:
        MachineError: Accelerate cannot start this launch.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import clear_environment
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    arguments = launch_command_parser().parse_args(["--config_file", str(file), *options, "train.py"])
    environment: dict[str, str]
    try:
        with clear_environment():
            arguments, config, takes_precision = _validate_launch_command(arguments)
            if arguments.num_processes < 1:
                raise MachineError(
                    f"num_processes must be at least 1, got {arguments.num_processes}; give --num_processes N, or set it in {file}"
                )
            if arguments.num_processes < (arguments.num_machines or 1):
                raise MachineError(
                    f"num_processes must be at least num_machines {arguments.num_machines}, got {arguments.num_processes}; give --num_processes "
                    f"N, the processes of all machines, or set it in {file}"
                )
            if arguments.use_deepspeed and not arguments.cpu:
                named = [*config.deepspeed_config, *(["mixed_precision"] if takes_precision else [])]
                arguments.deepspeed_fields_from_accelerate_config = ",".join(named)
                _, environment = prepare_deepspeed_cmd_env(arguments)
            elif (arguments.use_fsdp or arguments.multi_gpu or arguments.use_megatron_lm) and not arguments.cpu:
                environment = prepare_multi_gpu_env(arguments)
            else:
                _, environment = prepare_simple_launcher_cmd_env(arguments)
    except (ValueError, OSError, ImportError, TypeError, RuntimeError) as error:
        raise MachineError(
            f"{file} must be one that Accelerate can launch, got: {' '.join(str(error).split())}; correct it"
        ) from None
    return arguments, environment


def rendezvous_backend() -> str:
    """Rendezvous backend, from the launcher's command line or the config: static (every launcher's default) or c10d."""
    import psutil

    for process in psutil.Process().parents():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if re.search(r"--standalone\b|--rdzv[-_]backend[ =]c10d\b", words):
            return "c10d"
    file = config_file()
    return str(getattr(_read(file)[0], "rdzv_backend", None) or "static") if file else "static"


# --- what Accelerate reads -----------------------------------------------------------------------------------------


def _sections() -> list[str]:
    from accelerate.commands.config.config_args import ClusterConfig

    return [field.name for field in fields(ClusterConfig) if field.type == Optional[dict]]  # noqa: UP045


def _strategy_of(section: str) -> str | None:
    """Return the only distributed type that reads a section (FSDP for fsdp_config); None if there is no such type."""
    from accelerate.utils import DistributedType

    name = section.removesuffix("_config").upper()
    return name if name in [str(kind.value) for kind in DistributedType] else None


def _is_in_use(section: str, config: ClusterConfig) -> bool:
    strategy = _strategy_of(section)
    by_command_line = os.environ.get(f"ACCELERATE_USE_{strategy}", "false").lower() == "true"
    return strategy is None or config.distributed_type.value == strategy or by_command_line


@cache
def known_keys(section: str) -> frozenset[str]:
    """Nested keys that Accelerate uses: its launcher's options, and the keys that its questionnaire writes."""
    from accelerate.commands import launch
    from accelerate.commands.config import cluster
    from accelerate.utils import launch as environment

    prefix = section.removesuffix("config")  # fsdp_, megatron_lm_, parallelism_, ...
    parser = launch.launch_command_parser()
    names = {action.dest for action in parser._actions}
    names |= set(re.findall(r'getattr\(args, "(\w+)"', inspect.getsource(environment)))  # read, but not an option
    options = {name for name in names if name.startswith(prefix)}
    for group in parser._action_groups:  # DeepSpeed's options share a group instead of a prefix
        if re.sub(r"\W", "", group.title or "").lower().startswith(prefix.replace("_", "")):
            options |= {action.dest for action in group._group_actions}
    without_prefix: set[str] = set()
    if section in re.findall(r'name == "(\w+)" and not key.startswith', inspect.getsource(launch)):
        without_prefix = {name.removeprefix(prefix) for name in options}
    asked = set(re.findall(rf'{section}\["(\w+)"\]', inspect.getsource(cluster)))
    return frozenset(options | without_prefix | asked)


def _problem(section: str, key: str, values: dict[str, Any]) -> str | None:
    """Describe what is wrong with a nested key, without its section's name in front; None if nothing is."""
    from accelerate.commands.to_fsdp2 import ARGUMENT_KEY_MAPPING

    known = known_keys(section)
    if key not in known:
        others = [other for other in _sections() if other != section and key in known_keys(other)]
        near = [name for name in sorted(known) if name.endswith(f"_{key}")]
        near += difflib.get_close_matches(key, sorted(known), n=1)
        if key in _top_keys():
            hint = "it belongs to the top of the file, without a section around it"
        elif others:
            hint = f"it belongs in {others[0]}"
        else:
            hint = f"did you mean {near[0]}?" if near else "remove it"
        return f"{key} must be a key that Accelerate reads there (it ignores others), got {key!r}; {hint}"
    name = key if key.startswith("fsdp_") else f"fsdp_{key}"
    if section == "fsdp_config" and str(values.get("fsdp_version", values.get("version", 1))) == "2":
        now = ARGUMENT_KEY_MAPPING.get(name, name)
        if now != name:
            hint = f"use {now}" if isinstance(now, str) else "remove it"
            return f"{key} must not be set with fsdp_version 2, which ignores it, got {values[key]!r}; {hint}"
    return None


def _uneven_machines(config: ClusterConfig, place: str, typed: Namespace | None) -> list[str]:
    """Report a process count that is no multiple of the number of machines: Accelerate would round it down."""
    machines = getattr(typed, "num_machines", None) or config.num_machines
    processes = getattr(typed, "num_processes", None) or getattr(config, "num_processes", machines)
    is_known = processes > 0  # -1 where the file leaves it to the command line
    if not is_known or processes % machines == 0:
        return []
    return [
        f"{place}num_processes must be a multiple of num_machines {machines}, got {processes}; "
        f"Accelerate would start {processes // machines * machines}: change one of them"
    ]


def _top_keys() -> set[str]:
    from accelerate.commands.config.config_args import ClusterConfig

    return {field.name for field in fields(ClusterConfig)}


# --- reading -------------------------------------------------------------------------------------------------------


def _read(file: Path) -> tuple[ClusterConfig, list[tuple[str, int]]]:
    """Return the file as Accelerate itself reads it, and the line number of every dotted key."""
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        config = load_config_from_file(str(file))
        return config, list(_key_lines(YAML(typ="safe", pure=True).compose(file.read_text(encoding="utf-8"))))
    except (YAMLError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise MachineError(
            f"{file}{f':{mark.line + 1}' if mark else ''}: must be YAML, got {problem}; correct it"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise MachineError(f"{file} must be a config file of Accelerate, got: {text}; correct it") from None


def read_config(file: Path) -> ClusterConfig:
    """Read an Accelerate config as Accelerate itself does.

    Raises:
        MachineError: the file is not an Accelerate config.
    """
    return _read(file)[0]


def _key_lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _key_lines(value, f"{prefix}{key.value}.")


def launch_arguments() -> Namespace | None:
    """Arguments of the `accelerate launch` that started this process; None if it was started in another way."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # set by every launch, whatever the strategy
        return None
    import psutil
    from accelerate.commands.launch import launch_command_parser

    for process in psutil.Process().parents():
        try:
            words = _after_launch(process.cmdline())
        except psutil.Error:  # another user's process
            continue
        if words is not None:
            arguments: Namespace = launch_command_parser().parse_args(words)
            return arguments
    return None


def _after_launch(words: list[str]) -> list[str] | None:
    """Return the arguments after `accelerate launch`, however it is spelled; None for another command."""
    for position, word in enumerate(words):
        name = word.removesuffix(".py").replace(".", "/")
        if name.endswith("accelerate-launch") or name.endswith("accelerate/commands/launch"):
            return words[position + 1 :]
        is_tool = name.rsplit("/", 1)[-1] in ("accelerate", "accelerate_cli")
        if is_tool and words[position + 1 : position + 2] == ["launch"]:
            return words[position + 2 :]
    return None
