"""`acc-lm recipes`: list the recipes, or print one."""

from __future__ import annotations

import argparse
import shutil
import textwrap

from acc_lm.config.project import RECIPES, find_recipe, project_folder, read_headers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--show", metavar="NAME", help="print this recipe, with its comments")


def run(known: argparse.Namespace) -> int:
    if known.show:
        print(find_recipe(known.show).read_text(encoding="utf-8"), end="")
        return 0
    width = min(shutil.get_terminal_size((120, 24)).columns, 120) - 2
    for header in read_headers(project_folder() / RECIPES):
        print(header.file.stem)
        for line in (header.what, f"hardware: {header.hardware}", f"memory: {header.memory}"):
            print(textwrap.fill(line, width, initial_indent="  ", subsequent_indent="    "))
    return 0
