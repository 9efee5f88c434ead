"""Notebooks of the labs: made from the pages as they are, valid, and their cells run."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from course import FEW_STEPS, folder_of_a_learner
from processes import ROOT

BUILD = runpy.run_path(str(ROOT / "docs/notebooks/build.py"))
OVERRIDES = " ".join(FEW_STEPS).replace("max_steps=3", "max_steps=4")  # as in test_course_labs.py
SMALL = "tokenizer.vocab_size=400 model.config.hidden_size=32 model.config.intermediate_size=32"
SHORTER = {
    "02_train": {r"(?m)^(!(?:python|torchrun|accelerate).* output_dir=runs/\S+)$": rf"\1 {OVERRIDES}"},
    "06_alpaca_deepspeed": {
        r"(?m)^!python train.py$": rf"!python train.py {OVERRIDES} {SMALL}",
        r"(?m)^(!head .*)$": r"!sed -i 301,100000d runs/lab-data/*.jsonl\n\1",
        r"--cases \S+ --steps 5": f"--cases single:1 --steps 2 {OVERRIDES} data.sequence_length=512",
        r"(?m)^(!.* train.py --config .*)$": rf"\1 {OVERRIDES} data.sequence_length=512",
        r"(?s)^.*check\.py.*$": "",  # answers of complete runs
    },
}
"""Changes of a lab's cells that make it short: {regular expression: replacement}."""


@pytest.mark.parametrize("lab", BUILD["LABS"])
def test_a_notebook_is_that_of_its_page(lab: str) -> None:
    made = BUILD["notebook_of"](BUILD["COURSE"] / f"{lab}.md")
    assert json.loads((ROOT / f"docs/notebooks/{lab}.ipynb").read_text()) == made, "run `make docs`"


def test_commands_become_cells(tmp_path: Path) -> None:
    page = ROOT / "docs/course/page.md"  # never written: only its place counts
    file = tmp_path / "page.md"
    file.write_text(
        "# Lab\n\n[繁體中文](page.zh-TW.md)\n\nText with a [link](code/a.py).\n<!-- hidden -->\n"
        "```bash\nmake train\nsource .venv/bin/activate\npython a.py \\\n  --b\n```\n\n```bash\nfor i in 1 2; do echo $i; done\n```\n"
        "```python\nprint(1)\n```\n```text\noutput\n```\n"
    )
    cells = BUILD["notebook_of"](page, file.read_text())["cells"]
    assert ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"][1:] == [
        "!python train.py\n!python a.py    --b", "%%bash\nfor i in 1 2; do echo $i; done", "print(1)",
    ]  # fmt: skip
    text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert text[1:] == ["Text with a [link](../course/code/a.py).", "```text\noutput\n```"]


@pytest.mark.slow
@pytest.mark.parametrize("lab", BUILD["LABS"])
def test_the_cells_of_a_notebook_run(lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "is not installed; pip install -e '.[site-test]'"
    nbformat = pytest.importorskip("nbformat", reason=f"nbformat {reason}")
    client = pytest.importorskip("nbclient", reason=f"nbclient {reason}")
    pytest.importorskip("ipykernel", reason=f"ipykernel {reason}")
    notebook = nbformat.read(ROOT / f"docs/notebooks/{lab}.ipynb", as_version=4)
    nbformat.validate(notebook)
    folder = folder_of_a_learner(tmp_path)
    (folder / "docs/notebooks").unlink()  # a link, from which a kernel would find its way to this clone
    (folder / "docs/notebooks").mkdir()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for pattern, replacement in SHORTER[lab].items():
        assert any(re.search(pattern, cell.source) for cell in cells), f"no cell has {pattern}"
        for cell in cells:
            cell.source = re.sub(pattern, replacement, cell.source)
    for cell in cells:  # IPython shows a failed command and continues
        cell.source = re.sub(r"(?m)^(!.*)$", r"\1\nassert not _exit_code, _exit_code", cell.source)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    client.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(folder / "docs/notebooks")}}
    ).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "step 4/4" in printed
    assert "Traceback" not in printed
    assert (folder / "runs").is_dir()
