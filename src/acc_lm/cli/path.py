"""`acc-lm path NAME`: print where a recipe, an Accelerate config or train.py is."""

from __future__ import annotations

import argparse

from acc_lm.config.project import find_accelerate_config, find_recipe, training_script
from acc_lm.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of an Accelerate config or a recipe, or train.py")


def run(known: argparse.Namespace) -> int:
    if known.name == "train.py":
        print(training_script())
        return 0
    try:
        print(find_accelerate_config(known.name))
    except ConfigError as no_config:
        try:
            print(find_recipe(known.name))
        except ConfigError as no_recipe:
            raise ConfigError(*no_config.problems, *no_recipe.problems) from None
    return 0
