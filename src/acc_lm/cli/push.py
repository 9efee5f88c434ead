"""`acc-lm push FOLDER owner/name`: upload a model folder to the Hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from acc_lm.errors import MachineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="model folder, e.g. runs/quickstart/final")
    parser.add_argument("name", metavar="NAME", help="repository on the Hub, as owner/name; created if it is missing")
    parser.add_argument("--public", action="store_true", help="make a new repository public (default: private)")


def run(known: argparse.Namespace) -> int:
    from acc_lm.export.hub import check_push, push_folder

    check_push(known.folder, known.name)
    try:
        print(push_folder(known.folder, known.name, public=known.public))
    except MachineError:
        print(file=sys.stderr)  # ends the line of a progress bar
        raise
    return 0
