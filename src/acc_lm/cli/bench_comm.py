"""`acc-lm bench-comm`: measure the bandwidth between processes and the cost of a step's communication."""

from __future__ import annotations

import argparse
from pathlib import Path

from acc_lm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="RECIPE",
        help="recipe whose model is used (default: a model with 45 MB of gradients)",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes (default: one for each GPU, else 2)"
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZE,...",
        help="sizes of the tensors, such as 4KiB,1MiB (default: 4 KiB to 16 MiB, on GPUs to 256 MiB)",
    )
    parser.add_argument(
        "--parts",
        default="",
        metavar="NAME,...",
        help="parts to run: collectives, buckets, memory, hooks, accumulation, data-parallel (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="timed steps of each row (default 10)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/bench-comm/bench-comm.md"),
        metavar="FILE",
        help="Markdown file; bench-comm.json is written next to it (default: runs/bench-comm/bench-comm.md)",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys of the recipe to override")


def run(known: argparse.Namespace) -> int:
    from acc_lm.studies.bandwidth import bench_comm, read_parts
    from acc_lm.studies.launching import signals_end_it

    if known.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {known.repeats}; raise it")
    with signals_end_it():
        return bench_comm(
            known.config,
            known.overrides,
            known.processes,
            known.sizes,
            read_parts(known.parts),
            known.repeats,
            known.output,
        )
