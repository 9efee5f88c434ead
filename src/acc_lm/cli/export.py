"""`acc-lm export`: build another model folder, or a GGUF file, from an exported model."""

from __future__ import annotations

import argparse
from pathlib import Path

from acc_lm.cli.generate import not_loadable
from acc_lm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("final", type=Path, metavar="FINAL", help="folder of an exported model, e.g. runs/lora/final")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder, or a new file for --gguf")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--merge",
        action="store_true",
        help="merge the adapter and its base into one model, for transformers alone",
    )
    kind.add_argument(
        "--gguf",
        type=Path,
        metavar="LLAMA_CPP",
        help="write a GGUF file with the converter in this clone of llama.cpp",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="data type of the written weights (default float32)",
    )


def run(known: argparse.Namespace) -> int:
    if known.gguf is not None:
        from acc_lm.export.gguf import convert_to_gguf

        convert_to_gguf(known.final, known.output, known.gguf, known.dtype)
        print(f"wrote {known.output}: llama-server -m {known.output} serves it")
        return 0
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
