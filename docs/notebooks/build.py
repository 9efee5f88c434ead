"""Make a notebook of each lab in LABS from its page: text as text, commands and programs as cells.

python docs/notebooks/build.py            writes docs/notebooks/NAME.ipynb for each
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COURSE = ROOT / "docs/course"
LABS = ("02_train", "06_alpaca_deepspeed")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
FIRST = """\
# Colab and other machines: the address of your copy of the repository. In a clone: leave it empty.
REPOSITORY = ""

import os
import sys
from pathlib import Path

if REPOSITORY:
    !git clone --depth 1 {REPOSITORY} acc-lm
    %cd acc-lm
    %pip install --quiet --editable .
else:
    os.chdir(next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "train.py").exists()))
sys.path.insert(0, str(Path.cwd()))
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"\
"""
"""First cell of each notebook: after it, the working directory is the root of a clone whose package is installed."""
MADE = "This notebook is made from [{page}]({link}) by `python docs/notebooks/build.py`. Run the cells in their order."
NOT_NEEDED = re.compile(r"source \.venv/bin/activate")


def notebook_of(page: Path, text: str | None = None) -> dict[str, Any]:
    """Notebook of a lab's page, in nbformat 4.5; `text` replaces what the file holds."""
    text = re.sub(r"<!--.*?-->\n?", "", page.read_text() if text is None else text, flags=re.DOTALL)
    text = re.sub(
        r"</?details[^>]*>\n?", "", re.sub(r"<summary>(.*?)</summary>", r"**\1**", text)
    )  # cells cannot be folded
    text = re.sub(r"^\[繁體中文\]\([^)]*\)\n+", "", text, flags=re.MULTILINE)
    title, _, text = text.partition("\n")
    link = os.path.relpath(page, ROOT / "docs/notebooks")
    cells = [_cell("markdown", f"{title}\n\n{MADE.format(page=page.name, link=link)}"), _cell("code", FIRST)]
    parts = BLOCK.split(text)
    for prose, language, code in zip(parts[0::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
        if prose.strip():
            cells.append(_cell("markdown", _with_links(prose.strip(), page)))
        if source := code.rstrip() if language == "python" else shell_cell(code):
            cells.append(_cell("code", source))
    for number, cell in enumerate(cells):
        cell["id"] = f"{page.stem}-{number}".replace("_", "-")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "colab": {"provenance": []}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def shell_cell(code: str) -> str:
    """Each line after an exclamation mark; a script, or a line in which IPython would replace something, in a cell of bash."""
    lines = [line for line in code.replace("\\\n", " ").splitlines() if line.strip() and not NOT_NEEDED.match(line)]
    if any(re.search(r"[${]|&\s*(#.*)?$|^\s|<<", line) for line in lines):
        return "\n".join(["%%bash", *lines])
    return "\n".join(line if line.startswith("#") else f"!{in_this_kernel(line)}" for line in lines)


def in_this_kernel(line: str) -> str:
    """The command without the virtual environment of make: the notebook's kernel has the package."""
    return re.sub(r"^make train\b", "python train.py", line)


def _cell(kind: str, source: str) -> dict[str, Any]:
    lines = source.splitlines(keepends=True)
    extra = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": "", "metadata": {}, "source": lines, **extra}


def _with_links(text: str, page: Path) -> str:
    """Text whose links lead from the folder of the notebooks to where they lead from the page."""

    def moved(link: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#", link[1]):
            return link[0]
        path, mark, anchor = link[1].partition("#")
        return f"]({os.path.relpath(page.parent / path, ROOT / 'docs/notebooks')}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, text)


def main() -> None:
    for lab in LABS:
        content = json.dumps(notebook_of(COURSE / f"{lab}.md"), indent=1, ensure_ascii=False)
        (ROOT / f"docs/notebooks/{lab}.ipynb").write_text(f"{content}\n")


if __name__ == "__main__":
    main()
