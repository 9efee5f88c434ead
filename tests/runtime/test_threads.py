"""Threads on a CPU: as many as the machine can give at the start of a run, kept by every resumed one; the user's number wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import ROOT, run_everywhere, run_training
from torch import nn

from acc_lm.runtime import choose_threads, keep_threads
from acc_lm.runtime.launch import threads
from acc_lm.runtime.launch.threads import _Trial

MODEL = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def accelerator(device: str = "cpu", num_processes: int = 1) -> Any:
    return SimpleNamespace(device=torch.device(device), num_processes=num_processes)


def plant(monkeypatch: pytest.MonkeyPatch, trials: dict[int, tuple[float, float]]) -> list[Any]:
    calls: list[Any] = []

    def found(counts: list[int], shape: tuple[int, int], num_tokens: int) -> dict[int, _Trial]:
        calls.append((counts, shape, num_tokens))
        return {count: _Trial(*trials[count]) for count in counts}

    monkeypatch.setattr(threads, "_num_cores", lambda: max(trials))
    monkeypatch.setattr(threads, "_try", found)
    return calls


def choose(recorded: int | None = None, **launch: Any) -> tuple[int, list[str]]:
    training = SimpleNamespace(global_batch_size=4, micro_batch_size=2)
    config: Any = SimpleNamespace(training=training, data=SimpleNamespace(sequence_length=16))
    lines = choose_threads(accelerator(**launch), MODEL, config, recorded)
    return torch.get_num_threads(), lines


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ({1: (100, 1.0), 2: (190, 0.99)}, 2),
        ({1: (40, 0.4), 2: (70, 0.3)}, 1),  # faster by the luck of a moment, but no core was free
        ({1: (100, 1.0), 2: (105, 0.99)}, 1),
        ({1: (100, 1.0), 2: (190, 1.0), 4: (300, 0.95), 6: (310, 0.9)}, 4),
        ({1: (100, 1.0), 2: (190, 1.0), 4: (300, 0.6)}, 2),
        ({1: (100, 1.0), 2: (90, 1.0), 4: (250, 1.0)}, 4),
    ],
)
def test_the_fastest_number_that_has_its_cores_is_chosen(
    trials: dict[int, tuple[float, float]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = plant(monkeypatch, trials)
    assert choose()[0] == expected
    assert calls == [(sorted(trials), (8, 8), 32)]


def test_the_line_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, {1: (100, 0.4), 2: (50, 0.3)})
    assert choose()[1] == [
        "1 thread, the best here and now: one product of the model takes 10 ms with 1, 20 ms with 2, and other programs use the cores; "
        "resumed runs keep it, OMP_NUM_THREADS sets it"
    ]


@pytest.mark.parametrize(
    "launch",
    [{"num_processes": 2}, {"device": "meta"}, {"recorded": 3}, {"OMP_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "1"}],
)
def test_a_decision_of_others_is_kept(launch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plant(monkeypatch, {1: (100, 1.0), 2: (190, 1.0)})
    before = torch.get_num_threads()
    for name in [name for name in launch if name.isupper()]:
        monkeypatch.setenv(name, launch.pop(name))
    assert choose(**launch) == (before, [])
    assert not calls


def test_a_real_trial_ends_with_one_of_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: a process that has begun threads can no longer be forked."""
    monkeypatch.setattr(threads, "_num_cores", lambda: 3)
    (((number, lines), trials),) = run_everywhere(lambda: (choose(), threads._try([1, 2], (8, 8), 32)))
    assert number in (1, 2, 3)
    assert len(lines) == 1
    assert all(speed > 0 and 0 < share < 1.5 for speed, share in trials.values())


def test_a_checkpoint_s_number_is_kept_unless_the_user_sets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    assert keep_threads(accelerator(), None) == keep_threads(accelerator("meta"), 3) == []
    assert keep_threads(accelerator(), before) == []
    assert torch.get_num_threads() == before
    (line,) = keep_threads(accelerator(), 3)
    assert line.startswith(f"3 threads, as in the checkpoint; OMP_NUM_THREADS={before} takes this machine's")
    assert torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keep_threads(accelerator(), 2)
    assert torch.get_num_threads() == 3


def test_a_resumed_run_keeps_the_threads_of_its_first_start(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    calls = plant(monkeypatch, {1: (100, 1.0), 2: (190, 1.0)})
    first = run_training([*tiny, "training.max_steps=2"])
    assert "2 threads, the best here and now" in first.output
    assert json.loads((run / "checkpoints/step-00000002/state.json").read_text())["threads"] == 2
    plant(monkeypatch, {1: (100, 1.0), 2: (50, 0.2)})  # the machine is busy now
    second = run_training([*tiny, "training.max_steps=4"])
    assert "threads, the best" not in second.output
    assert "2 threads, as in the checkpoint" in second.output
    assert "threads per process, now" not in second.output
    assert json.loads((run / "checkpoints/step-00000004/state.json").read_text())["threads"] == 2
    assert not calls, "the trials were in the processes of the runs"


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's OpenMP")
def test_openmp_is_bounded_before_torch_is_loaded(tiny: list[str]) -> None:
    def loaded(**more: str) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
        environment |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(ROOT / "src")} | more
        command = [sys.executable, str(ROOT / "train.py"), *tiny, "--dry-run"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr

    assert "GOMP_SPINCOUNT = '10000'" in loaded()
    assert "GOMP_SPINCOUNT = '77'" in loaded(GOMP_SPINCOUNT="77")
