"""DeepSpeed: its settings from the Accelerate config, completed with all settings that the recipe owns."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from acc_lm.errors import MachineError
from acc_lm.runtime.settings.config_file import resolved_deepspeed_config
from acc_lm.runtime.settings.grid import parts_of_rows

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    from acc_lm.config import Config

CONFIG_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


def deepspeed_config() -> dict[str, Any]:
    """Read the DeepSpeed config that the launch requests, from its file or from the launcher's variables.

    Raises:
        MachineError: the file cannot be read, or does not configure ZeRO.
    """
    if not _is_by_hand():
        zero: dict[str, Any] = {"stage": int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
        for what in ("optimizer", "param"):
            device = os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE", "none")
            zero |= {f"offload_{what}": {"device": device}}
        return {"zero_optimization": zero}
    file = resolved_deepspeed_config(os.environ[CONFIG_VARIABLE])
    try:
        config: dict[str, Any] = json.loads(Path(file).read_text())
    except OSError:
        raise MachineError(
            f"deepspeed_config_file must exist, got {file!r}; give its path relative to where you launch, or to the yaml"
        ) from None
    except ValueError as error:
        raise MachineError(f"{file} must be JSON, got: {error}; correct it") from None
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise MachineError(f"{file} must be a mapping with a zero_optimization section, got none; add it")
    for section, settings in (("", config), ("zero_optimization.", config["zero_optimization"])):
        for key in ("fp16", "bf16", "torch_autocast", "offload_optimizer", "offload_param"):
            if not isinstance(settings.get(key), dict | None):
                raise MachineError(
                    f"{file}: {section}{key} must be a mapping, got {json.dumps(settings[key])}; write its keys below it"
                )
    os.environ[CONFIG_VARIABLE] = file  # Accelerate resolves it from the current folder only
    return config


def _is_by_hand() -> bool:
    """Return whether the launch names a DeepSpeed config file of its own."""
    return os.environ.get(CONFIG_VARIABLE, "none") != "none"


def offload_device(what: str) -> str:
    """Device on which the launch asks to keep `what` (`optimizer` or `param`): none, cpu or nvme."""
    section = deepspeed_config()["zero_optimization"].get(f"offload_{what}") or {}
    return str(section.get("device") or "none")


def deepspeed_plugin(
    config: Config, micro_batch_size: int, accumulation: int, precision: str, has_accelerator: bool
) -> DeepSpeedPlugin:
    """Build Accelerate's plugin, with all settings that the recipe owns taken from the recipe.

    Raises:
        MachineError: DeepSpeed is not installed, or a hand-written config of it contradicts the recipe.
    """
    owned: dict[str, Any] = {
        "train_batch_size": config.training.global_batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.max_grad_norm or 0.0,
    }
    plugin = requested_plugin(precision, owned)
    settings = plugin.deepspeed_config
    # The engine counts processes, not those that read different rows.
    settings |= owned | {"train_batch_size": config.training.global_batch_size * parts_of_rows()}
    plugin.gradient_accumulation_steps = accumulation
    zero = settings["zero_optimization"]
    bytes_per_gradient = 4
    zero.setdefault("reduce_bucket_size", int(config.distributed.bucket_cap_mb * 2**20) // bytes_per_gradient)
    if not has_accelerator:
        # Small tensors would stay unsharded, which in a small rehearsal is all of them.
        zero.setdefault("stage3_param_persistence_threshold", 0)
    if precision != "no":
        # As under the other engines: compute in 16 bits, accumulate and reduce gradients in 32 bits.
        settings.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        settings.setdefault("communication_data_type", "fp32")
    return plugin


def requested_plugin(precision: str, owned: dict[str, Any]) -> DeepSpeedPlugin:
    """Build Accelerate's plugin, as the launch requests it.

    Args:
        owned: settings of a recipe, by DeepSpeed's names.

    Raises:
        MachineError: DeepSpeed is not installed, or a hand-written config of it contradicts these settings.
    """
    from accelerate.utils import DeepSpeedPlugin

    if find_spec("deepspeed") is None:
        raise MachineError(
            "deepspeed must be installed for this Accelerate config, got no such package; pip install deepspeed"
        )
    if _is_by_hand():
        _refuse_contradictions(deepspeed_config(), owned, precision)
    os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"  # weights are drawn once and distributed from there
    return DeepSpeedPlugin(zero3_init_flag=False)


def build_models_whole(accelerator: Accelerator) -> None:
    """Unset the global state that makes transformers draw each weight in shards, from another random sequence."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    accelerator.deepspeed_plugin.dschf = None


def _refuse_contradictions(settings: dict[str, Any], owned: dict[str, Any], precision: str) -> None:
    file = os.environ[CONFIG_VARIABLE]
    keys = {
        "train_batch_size": "training.global_batch_size",
        "train_micro_batch_size_per_gpu": "training.micro_batch_size",
        "gradient_accumulation_steps": "training.global_batch_size / (micro_batch_size x processes)",
        "gradient_clipping": "optimizer.max_grad_norm",
    }
    problems = [
        f"{file}: {key} must be auto or the recipe's value ({keys[key]}: {value}), got {settings[key]}; set it to auto"
        for key, value in owned.items()
        if settings.get(key, "auto") not in ("auto", value)
    ]
    problems += [
        f"{file}: {key} must be left out, got one; the recipe's {key} section is used instead"
        for key in ("optimizer", "scheduler")
        if key in settings
    ]
    for name in ("fp16", "bf16"):
        enabled = settings.get(name, {}).get("enabled", "auto")
        if enabled not in ("auto", precision == name):
            problems.append(
                f"{file}: {name}.enabled must be auto or {str(precision == name).lower()}, got {str(enabled).lower()}; "
                "precision comes from the recipe (training.mixed_precision); set it to auto"
            )
    if settings.get("torch_autocast", {}).get("enabled"):
        problems.append(
            f"{file}: torch_autocast must be left out; precision comes from the recipe (training.mixed_precision)"
        )
    if problems:
        raise MachineError(*problems)


def overruled_settings(config: Config, accumulation: int) -> list[str]:
    """List the settings of the launch that the recipe overrides, one line each."""
    if _is_by_hand():
        return []
    requested = {
        "gradient_accumulation_steps": (os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"), accumulation),
        "gradient_clipping": (
            os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto"),
            config.optimizer.max_grad_norm or 0,
        ),
    }
    written = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")  # the launcher fills in the others by itself
    return [
        f"{key} {value} of the Accelerate config is overridden: the recipe sets it to {ours}"
        for key, (value, ours) in requested.items()
        if key in written and value not in ("auto", "none") and float(value) != float(ours)
    ]


def partition(accelerator: Accelerator, model: nn.Module) -> None:
    """Replace each parameter, one after the other, by this process's share of the main process's values."""
    import deepspeed

    settings = accelerator.deepspeed_plugin.deepspeed_config
    zero = {key: value for key, value in settings["zero_optimization"].items() if value != "auto"}
    deepspeed.zero.Init(
        module=model,
        config_dict_or_path={
            **{key: settings[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu")},
            "gradient_accumulation_steps": settings["gradient_accumulation_steps"],
            "zero_optimization": zero,
            **{name: settings[name] for name in ("bf16", "fp16") if name in settings},
        },
        dtype=next(model.parameters()).dtype,
    )
