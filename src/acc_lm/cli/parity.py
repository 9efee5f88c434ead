"""`acc-lm parity`: run one recipe with many Accelerate configs and compare the curves, step by step."""

from __future__ import annotations

import argparse
from pathlib import Path

from acc_lm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default="quickstart",
        metavar="FILE",
        help="recipe (default: quickstart)",
    )
    parser.add_argument(
        "--cases",
        default="",
        metavar="NAME:N,...",
        help="configs (names in accelerate_configs/, or files) and their numbers of processes; default: all that fit here",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="optimizer steps of each run (default 20)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table as Markdown, with JSON next to it")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys of the recipe to override")


def run(known: argparse.Namespace) -> int:
    from acc_lm.studies.parity import parity

    if known.steps < 2:
        raise ConfigError(f"--steps must be at least 2, got {known.steps}; raise it")
    cases = [case for case in known.cases.split(",") if case]
    return parity(known.config, known.overrides, cases, known.steps, known.output)
