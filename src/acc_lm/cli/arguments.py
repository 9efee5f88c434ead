"""The command line of `train.py`: a recipe, `dotted.key=value` overrides, and nothing that could be misread."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from acc_lm.config import Config
from acc_lm.errors import ConfigError
from acc_lm.recipe import FOREIGN_NAMES, dump_config, help_text, load_config

USAGE = "train.py [--config FILE] [--dry-run | --eval-only] [--print-config] [section.key=value ...]"


class Mode(Enum):
    """What train.py is to do with a recipe."""

    TRAIN = "train"
    DRY_RUN = "dry run"
    EVAL_ONLY = "eval only"


def parse_train_arguments(arguments: Sequence[str], default_recipe: Path) -> tuple[Config, Mode] | None:
    """The recipe of this command line and what to do with it; None when it asked for text, which was printed.

    Raises:
        ConfigError: an argument that is not one, or any problem of the recipe.
    """
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage=USAGE,
        description="Train a causal language model: the recipe says what to learn, the Accelerate config only where.",
        epilog="Keys of a recipe; each can be set on the command line as section.key=value:\n" + help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", type=Path, default=default_recipe, metavar="FILE", help="recipe (default: recipes/quickstart.yaml)"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved recipe, which reproduces the run, and exit"
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--dry-run",
        action="store_const",
        const=Mode.DRY_RUN,
        default=Mode.TRAIN,
        dest="mode",
        help="one step, one evaluation, one save and one load on this launch's engine, then exit; nothing is kept",
    )
    modes.add_argument(
        "--eval-only",
        action="store_const",
        const=Mode.EVAL_ONLY,
        dest="mode",
        help="evaluate the newest checkpoint of output_dir, else model.name_or_path, add a line to metrics.jsonl, and exit",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="laid over the recipe; the last one wins"
    )
    known, unknown = parser.parse_known_intermixed_args(list(arguments))
    strange = [argument for argument in unknown if argument.startswith("-")]
    if strange:
        raise ConfigError(*(_explain_option(option) for option in strange))
    config = load_config(known.config, known.overrides)
    if known.print_config:
        print(dump_config(config), end="")
        return None
    return config, known.mode


def _explain_option(option: str) -> str:
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    if name in FOREIGN_NAMES:
        hint = f"{name} is another tool's name, here it is {FOREIGN_NAMES[name]}=VALUE"
    else:
        hint = "keys are written without dashes, as section.key=value"
    return f"command line: must be --config, --dry-run, --eval-only, --print-config or section.key=value, got {option!r}; {hint}"
