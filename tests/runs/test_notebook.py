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
