"""`acc-lm export`: build another model folder from an exported one."""

from __future__ import annotations

import argparse
from pathlib import Path

from acc_lm.cli.generate import not_loadable
from acc_lm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("final", type=Path, metavar="FINAL", help="folder of an adapter, e.g. runs/lora/final")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    parser.add_argument(
        "--merge",
        action="store_true",
        required=True,
        help="merge the adapter and its base into one model, for transformers alone",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="data type of the written weights (default float32)",
    )


def run(known: argparse.Namespace) -> int:
    import torch

    from acc_lm.export.exported import merge
    from acc_lm.runtime import quiet_libraries

    quiet_libraries()
    try:
        merge(known.final, known.output, getattr(torch, known.dtype))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise not_loadable("FINAL", known.final, error) from None
    print(f"wrote {known.output}: AutoModelForCausalLM.from_pretrained({str(known.output)!r}) loads it")
    return 0
