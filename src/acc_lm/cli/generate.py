"""`acc-lm generate`: generate text with an exported model."""

from __future__ import annotations

import argparse
import math
from datetime import date
from pathlib import Path

from acc_lm.errors import ConfigError, first_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of an exported model, e.g. runs/quickstart/final")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="treat the prompt as a question, in the model's chat template, and print only the answer",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=100, metavar="N", help="length of the text, in tokens (default 100)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 always takes the likeliest token (default 0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="choose among the K likeliest tokens (default 50)"
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    parser.add_argument(
        "--date", metavar="YYYY-MM-DD", help="for a chat template that reads the clock (default: the date of the run)"
    )


def run(known: argparse.Namespace) -> int:
    from acc_lm.text.documents import is_unicode

    if not any((known.model / name).is_file() for name in ("config.json", "adapter_config.json")):
        got = known.model if known.model.is_dir() else f"{known.model}, which does not exist"
        raise ConfigError(
            f"model must be the folder of an exported model, got {got}; name the final/ of a finished run"
        )
    for name, wrong, wanted, action in (
        ("--max-new-tokens", known.max_new_tokens < 1, "at least 1", "raise it"),
        ("--temperature", not 0 <= known.temperature < math.inf, "0 or more, and finite", "use 0.8 for instance"),
        ("--top-k", known.top_k < 1, "at least 1", "raise it"),
        (
            "--date",
            known.date is not None and not _is_day(known.date),
            "a date as YYYY-MM-DD",
            "write it like 2026-01-31",
        ),
        ("--seed", not -(2**63) <= known.seed < 2**64, "a number of 64 bits", "use 0 for instance"),
    ):
        if wrong:
            raise ConfigError(f"{name} must be {wanted}, got {getattr(known, name[2:].replace('-', '_'))}; {action}")
    if not is_unicode(known.prompt):
        raise ConfigError(f"--prompt must be UTF-8, got {known.prompt!r}; convert it with iconv -t UTF-8")
    from acc_lm.export.exported import sample_text
    from acc_lm.redaction import printable
    from acc_lm.runtime import quiet_libraries

    quiet_libraries()
    try:
        text = sample_text(
            known.model,
            known.prompt,
            max_new_tokens=known.max_new_tokens,
            temperature=known.temperature,
            top_k=known.top_k,
            seed=known.seed,
            is_question=known.chat,
            day=known.date,
        )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise not_loadable("model", known.model, error) from None
    print(printable(text, keep="\n\t"))
    return 0


def not_loadable(key: str, folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{key} must be a model that transformers loads without code of its own, got {folder}: {first_line(error)}"
    )


def _is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False
