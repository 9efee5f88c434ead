"""`acc-lm scaling`: run one recipe on increasing numbers of processes."""

from __future__ import annotations

import argparse
from pathlib import Path

from acc_lm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="quickstart", metavar="RECIPE", help="default: quickstart")
    parser.add_argument(
        "--config_file", metavar="FILE", help="Accelerate config (default: accelerate_configs/ddp.yaml)"
    )
    parser.add_argument(
        "--processes", default="1,2", metavar="N,...", help="numbers of processes; 1 runs plain Python (default 1,2)"
    )
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="optimizer steps of a launch (default 30)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/scaling/scaling.md"),
        metavar="FILE",
        help="Markdown file; scaling.json and scaling.png are written next to it (default: runs/scaling/scaling.md)",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys of the recipe to override")


def run(known: argparse.Namespace) -> int:
    from acc_lm.studies.launching import signals_end_it
    from acc_lm.studies.scaling import LEAST_STEPS, read_counts, scaling

    if known.steps < LEAST_STEPS:
        raise ConfigError(f"--steps must be at least {LEAST_STEPS}, got {known.steps}; raise it")
    counts = read_counts(known.processes)
    with signals_end_it():
        return scaling(known.config, known.overrides, known.config_file, counts, known.steps, known.output)
