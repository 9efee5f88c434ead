"""`acc-lm doctor`: describe this machine, and check whether an Accelerate config can run on it."""

from __future__ import annotations

import argparse
import json
import sys

from acc_lm.cli import stdout_on_stderr
from acc_lm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config_file", metavar="FILE", help="Accelerate config to check, e.g. accelerate_configs/ddp.yaml"
    )
    parser.add_argument(
        "--num_processes", type=int, metavar="N", help="total number of processes, as for accelerate launch"
    )
    parser.add_argument("--config", metavar="RECIPE", help="recipe to check as well: whether it can be trained there")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys of the recipe to override")


def run(known: argparse.Namespace) -> int:
    from acc_lm.config.loading import load_config
    from acc_lm.planning.here import memory_here
    from acc_lm.runtime import check_config, machine

    if known.config_file is None and (known.config or known.overrides or known.num_processes is not None):
        raise ConfigError(
            "command line: --config and --num_processes must come with --config_file, got none; name the Accelerate config to check, "
            "e.g. accelerate_configs/ddp.yaml"
        )
    if known.overrides and not known.config:
        raise ConfigError(
            f"overrides must come with --config, got {' '.join(known.overrides)}; name the recipe that they belong to"
        )
    with stdout_on_stderr(known.json):
        found = machine()
    if known.json:
        print(json.dumps(found, indent=1))
    else:
        devices = [
            f"{each['name']}, {each['memory_gb']} GB, compute capability {each['capability']}"
            for each in found["devices"]
        ]
        lines = {
            "python": f"{found['python']}, {found['system']}, {found['cpu_cores']} cores, {found['memory_gb']} GB",
            "libraries": ", ".join(f"{name} {version or '-'}" for name, version in found["libraries"].items()),
            "cuda": f"built for {found['cuda']['built_for'] or 'none'}, {'available' if found['cuda']['available'] else 'not available'}",
            "devices": "; ".join(devices) or "no accelerator",
            "connects": ", ".join(
                f"{name} {'yes' if there else 'no'}" for name, there in found["process_groups"].items()
            ),
            "precision": found["precision"],
            "C++": f"{found['cpp_compiler'] or 'no compiler'}, {'libaio' if found['libaio'] else 'no libaio'}, for extensions that are built here",
        }
        for name, text in lines.items():
            print(f"{name:10}{text}")
    if known.config_file:
        recipe = load_config(known.config, known.overrides) if known.config else None
        with stdout_on_stderr(known.json):
            notes = check_config(known.config_file, known.num_processes, recipe)
            planned = memory_here(recipe, known.config_file, known.num_processes) if recipe else None
            notes += [planned] if planned else []
        print(*notes, sep="\n", file=sys.stderr if known.json else sys.stdout)
    return 0
