"""`acc-lm recipe`: print the reference of all recipe keys."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "format", choices=("schema", "markdown"), help="schema: recipes/schema.json; markdown: docs/reference/recipe.md"
    )


def run(known: argparse.Namespace) -> int:
    from acc_lm.config.reference import json_schema, markdown

    print(json_schema() if known.format == "schema" else markdown(), end="")
    return 0
