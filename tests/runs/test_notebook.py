"""Training from Python: calls from the cell of a notebook, each time in a fresh interpreter."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import LAUNCH_VARIABLES, ROOT, run_training
from test_resume import TIMED

CELLS = """
{page}
print("the notebook continues")
notebook_launcher(train.main, ([*arguments, "training.max_steps=8"],), num_processes=2, use_port="{port}")
print("and on")
"""

REFUSALS = """
import sys
from accelerate import Accelerator, notebook_launcher
import train

def run(arguments):
    sys.exit(train.main(arguments))

def cell(*arguments, **options):
    try:
        print("returned", notebook_launcher(*arguments, **options))
    except Exception as error:
        print("raised", type(error).__name__, str(error).splitlines()[0])

arguments = [*{arguments}, "optimizer.learing_rate=1"]
cell(train.main, (arguments,), num_processes=2, use_port="{port}")
cell(run, (arguments,), num_processes=2, use_port="{port}")
cell(run, (arguments,))
Accelerator(cpu=True)
cell(run, (arguments,), num_processes=2, use_port="{port}")
"""

SPAWN = """
import os, sys
import torch.multiprocessing

def run(rank, arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import train
    sys.exit(train.main(arguments))

if __name__ == "__main__":
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
    torch.multiprocessing.spawn(run, ({arguments},), nprocs=2)
    print("the program continues")
"""


def of_the_page() -> str:
    """The cell that users copy."""
    (cell,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/guides/several_nodes.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return str(cell)


def run_python(script: str, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in the root of the repository, which is where a notebook must be to import `train`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = folder / "cells.py"
    page = of_the_page().replace("num_processes=2", f'num_processes=2, use_port="{port}"')
    page = re.sub(r"(?m)^arguments = .*$", lambda _: f"arguments = {arguments}", page)
    file.write_text(script.format(page=page, arguments=repr(arguments), port=port))
    environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
    path = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(file)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )


NOTEBOOK = ROOT / "docs/notebooks/quickstart.ipynb"
DISPLAY = "from IPython.display import Image, display"


def cells_of_the_notebook(folder: Path) -> list[str]:
    """Code cells, with four steps and runs of its own folder on few files; every change must find its place."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = sorted(Path(json.__file__).parent.glob("*.py"))
    small = "data.source=files data.eval_fraction=0.3 tokenizer.vocab_size=300 data.sequence_length=32 model.config.hidden_size=32"
    words = [
        *small.split(),
        f"data.files={[str(file) for file in files]}",
        "schedule.warmup_steps=2",
        "training.log_every=1",
    ]
    changes = {
        "STEPS = 300": "STEPS = 4",
        'Path("runs/notebook")': f"Path({str(folder / 'notebook')!r})",
        'keys = ["tracking.report_to=[]"': f'keys = [*{words!r}, "tracking.report_to=[]"',
        "num_processes=PROCESSES)": f'num_processes=PROCESSES, use_port="{port}")',
    }
    cells = ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    for old, new in changes.items():
        assert sum(cell.count(old) for cell in cells) == 1, old
        cells = [cell.replace(old, new) for cell in cells]
    return cells


def check_the_runs_of_the_notebook(folder: Path, printed: str) -> None:
    assert re.search(r"^acc-lm \d", printed, re.M)
    assert "completed after 4 steps" in printed
    assert "\ndef main(" in printed
    check_two_processes(folder / "notebook-2-processes")
    one = json.loads((folder / "notebook/environment.json").read_text())
    assert (one["strategy"], one["num_processes"]) == ("single", 1)
    (difference,) = re.findall(r"largest difference of a step's loss: (\S+)", printed)
    assert float(difference) < 1e-5


def test_the_quickstart_notebook_has_no_outputs_and_is_valid() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            compile("".join(cell["source"]), "cell", "exec")
        for link in re.findall(r"\]\(([^)]+)\)", "".join(cell["source"])):
            assert (NOTEBOOK.parent / link).is_file(), link


def test_the_cells_of_the_quickstart_notebook_train_in_one_namespace(tmp_path: Path) -> None:
    script = "\n".join(cells_of_the_notebook(tmp_path))
    assert script.count(DISPLAY) == 1
    (tmp_path / "cells.py").write_text(script.replace(DISPLAY, "Image, display = dict, print"))  # there is no IPython
    environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "cells.py")],
        cwd=tmp_path, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check_the_runs_of_the_notebook(tmp_path, done.stdout)
    assert f"{{'filename': '{tmp_path}/notebook/training_curves.png'}}" in done.stdout


@pytest.mark.slow
def test_jupyter_runs_the_quickstart_notebook(tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install nbclient ipykernel")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = iter(cells_of_the_notebook(tmp_path))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = next(cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    check_the_runs_of_the_notebook(tmp_path, "".join(output.get("text", "") for output in outputs))
    assert [output for output in outputs if "image/png" in output.get("data", {})], "the curves are shown"


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Learned values, without what depends on the clock and the machine."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMED} for line in lines]


def check_two_processes(output_dir: Path) -> None:
    environment = json.loads((output_dir / "environment.json").read_text())
    assert (environment["strategy"], environment["num_processes"]) == ("ddp", 2)
    assert json.loads((output_dir / "summary.json").read_text())["status"] == "completed"


def test_a_notebook_trains_two_processes_and_resumes_in_the_next_cell(tiny: list[str], tmp_path: Path) -> None:
    done = run_python(CELLS, tiny, tmp_path)
    assert done.returncode == 0, done.stdout
    check_two_processes(tmp_path / "run")
    assert done.stdout.count("strategy      ddp, 2 processes") == 2, "once for each cell"
    assert "the notebook continues" in done.stdout
    assert done.stdout.endswith("and on\n")

    terminal = tmp_path / "terminal"
    run_training([*tiny, f"output_dir={terminal}"], num_processes=2)
    run_training([*tiny, f"output_dir={terminal}", "training.max_steps=8"], num_processes=2)
    assert metrics(tmp_path / "run") == metrics(terminal)


@pytest.mark.slow
def test_what_a_notebook_sees_when_the_training_cannot_start(tiny: list[str], tmp_path: Path) -> None:
    done = run_python(REFUSALS, tiny, tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("did you mean learning_rate?") >= 2, done.stdout
    ends = [line for line in done.stdout.splitlines() if line.startswith(("returned", "raised"))]
    assert ends[0] == "returned None", "the launcher drops what train.main returns"
    assert ends[1].startswith("raised ChildFailedError"), "an exit code reaches the notebook"
    assert ends[2].startswith("raised ValueError You have to specify the number of devices")
    assert ends[3].startswith("raised ValueError To launch a multi-device training from your notebook")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_spawned_processes_train_too(tiny: list[str], tmp_path: Path) -> None:
    done = run_python(SPAWN, tiny, tmp_path)
    assert done.returncode == 0, done.stdout
    check_two_processes(tmp_path / "run")
    assert done.stdout.endswith("the program continues\n")
