"""Tables in documents: the line about the machine, and the block that a command regenerates."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path


def machine_line() -> str:
    """Date, commit, machine and library versions, as shown with every generated table."""
    from importlib.metadata import version

    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    where = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    if torch.cuda.is_available():
        where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "transformers", "deepspeed"))
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {commit or 'unknown'}, {where}, {versions}"


def replace_block(file: Path, name: str, text: str) -> None:
    """Replace the text between the two marks of a partly generated page; a page without marks gets them at its end."""
    first, last = f"<!-- {name}: generated -->", f"<!-- {name}: end -->"
    page = file.read_text() if file.exists() else ""
    if first not in page:
        page = f"{page.rstrip()}\n\n{first}\n{last}\n".lstrip()
    before, _, rest = page.partition(first)
    _, _, after = rest.partition(last)
    file.write_text(f"{before}{first}\n{text}\n{last}{after}")


def replace_rows(file: Path, name: str, rows: list[str], num_keys: int, what: str) -> None:
    """Replace rows of the first table in a generated block; new ones follow the last row, and a line says when they were made.

    Args:
        num_keys: number of a row's first cells that identify it.
        what: description of the rows for that line.
    """
    first, last = f"<!-- {name}: generated -->\n", f"\n<!-- {name}: end -->"
    lines = file.read_text().partition(first)[2].partition(last)[0].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|---")) + 1
    end = next((index for index, line in enumerate(lines) if index >= start and not line.startswith("|")), len(lines))
    new = {tuple(row.split("|")[1 : 1 + num_keys]): row for row in rows}
    kept = [new.pop(tuple(line.split("|")[1 : 1 + num_keys]), line) for line in lines[start:end]]
    note = f"Measured on its own, {what}: "
    others = [line for line in lines[end:] if not line.startswith(note)]
    lines = [*lines[:start], *kept, *new.values(), "", note + machine_line(), *others]
    replace_block(file, name, "\n".join(lines))
