"""train.log: what the terminal says, with time and rank, over all starts; ranks and figures of GPUs in the summary."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import sys
import termios
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Launch, run_training

from acc_lm.run_files import log_file
from acc_lm.runtime import Gpus, Ranks
from acc_lm.runtime.monitoring import gpus

STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 rank (\d+)(?:  (.*))?$")


def log_of(run: Path) -> list[tuple[int, str]]:
    """Rank and text of each line of the log."""
    found = [STAMP.match(line) for line in (run / "train.log").read_text().splitlines()]
    return [(int(match[1]), match[2] or "") for match in found if match] if all(found) else []


def test_the_log_has_every_line_of_the_terminal_over_all_starts(tiny: list[str], tmp_path: Path) -> None:
    first = run_training([*tiny, "training.max_steps=4"])
    second = run_training(tiny)
    said = (first.output + second.output).splitlines()
    assert log_of(tmp_path / "run") == [(0, line.rstrip()) for line in said]
    assert any(line.startswith("resumed from") for line in said)
    for output in (first.output, second.output):
        assert re.search(r"^processes +world size 1, no process group; this is rank 0, local rank 0$", output, re.M)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["world_size"], summary["backend"], summary["rank"], summary["local_rank"]) == (1, None, 0, 0)
    error = run_training([*tiny, "optimizer.learning_rate=7"], expect=5)
    assert log_of(tmp_path / "run")[len(said) :] == [(0, line) for line in error.output.splitlines()]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "checkpoint_error"
    run_training([*tiny, "--dry-run"])
    assert len(log_of(tmp_path / "run")) == len(said) + len(error.output.splitlines()), "a dry run keeps nothing"


def test_ranks_are_in_the_start_block_and_in_the_summary(tiny: list[str], tmp_path: Path) -> None:
    finished = run_training(tiny, 2)
    assert re.search(r"^processes +world size 2, backend gloo; this is rank 0, local rank 0$", finished.output, re.M)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["world_size"], summary["backend"], summary["rank"], summary["local_rank"]) == (2, "gloo", 0, 0)
    assert [(place["rank"], place["local_rank"]) for place in summary["processes"]] == [(0, 0), (1, 1)]
    assert {rank for rank, _ in log_of(tmp_path / "run")} == {0}, "the other process has printed nothing"
    assert "energy_wh" not in summary


def test_ranks_of_several_machines_are_named_by_machine() -> None:
    places = (("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2))
    assert Ranks(0, 0, "nccl", places).description == (
        "world size 5, backend nccl; this is rank 0, local rank 0; ranks 0-1, 4 on a; ranks 2-3 on b"
    )
    assert Ranks(0, 0, None, (("a", 0),)).description == "world size 1, no process group; this is rank 0, local rank 0"


def test_each_stream_and_thread_has_whole_lines_and_secrets_stay_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "very-secret-value")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    with log_file.copied_to_log(tmp_path):
        sys.stdout.write("first ")
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()
        print("second\r\nvery-secret-value \x1b[2J")
        sys.stderr.write("\r 10% | bar\r 20% | bar\r          \r")
        print("a warning", file=sys.stderr)
        print("without an end", end="")
        kept = sys.stdout
    assert sys.stdout is terminal
    kept.write("after the run\n")
    assert log_of(tmp_path) == [
        (3, "from a thread"),
        (3, "first second"),
        (3, "*** \\x1b[2J"),
        (3, "a warning"),
        (3, "without an end"),
    ]
    assert terminal.getvalue().endswith("without an endafter the run\n")


def test_a_log_that_cannot_be_written_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_file.copied_to_log(tmp_path / "gone"):
        print("said")
    os.mkfifo(tmp_path / "train.log")
    with log_file.copied_to_log(tmp_path):
        print("to a pipe that has no reader")
    assert capsys.readouterr().out == "said\nto a pipe that has no reader\n"


def test_a_log_that_another_process_or_a_killed_start_has_begun_is_no_reason_to_refuse(
    tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    log_file.append_lines(tmp_path / "run", ["of a start that was killed before it wrote anything else"])
    run_training([*tiny, "training.max_steps=2"])
    lines = log_of(tmp_path / "run")
    assert lines[0] == (0, "of a start that was killed before it wrote anything else")
    assert len(lines) > 10


def test_a_users_file_of_that_name_is_left_alone(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/train.log").write_text("mine")
    finished = run_training(tiny, expect=2)
    assert "which holds train.log that no run of acc-lm wrote" in finished.errors[0]
    assert (tmp_path / "run/train.log").read_text() == "mine"


def test_a_bar_on_a_terminal_leaves_lines_in_the_log(tiny: list[str], tmp_path: Path) -> None:
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 40, 150, 0, 0))

    def function() -> int:
        import train

        sys.stdout, sys.stderr = (os.fdopen(other, "w", buffering=1, closefd=False) for _ in range(2))
        return train.main([*tiny, "training.max_steps=4"])

    launch, shown = Launch(function), b""
    os.close(other)
    while select.select([main], [], [], 60)[0]:
        try:
            shown += os.read(main, 65536)
        except OSError:  # the other end is closed
            break
    os.close(main)
    assert launch.wait(60).codes == [0], shown.decode()
    assert b"\r" in shown.replace(b"\r\n", b"\n")
    assert b"4/4" in shown
    assert re.search(rb"loss \d\.\d{4}, lr \d\.\d\de-\d\d, [\d,]+ tok/s", shown)
    lines = [text for _, text in log_of(tmp_path / "run")]
    assert [line.split()[1] for line in lines if line.startswith("step") and " lr " in line] == ["1/4", "2/4", "4/4"]
    assert len([line for line in lines if "%|" in line and "loss" in line]) == 1, "the bar as it ends"


class FakeNvml:
    """Driver with one GPU, which has used 7.2 kJ when it is asked again."""

    def __init__(self, **broken: bool) -> None:
        self._broken, self._joules = broken, 0

    def __getattr__(self, name: str) -> Any:
        if self._broken.get(name):
            raise RuntimeError("Not Supported")
        return super().__getattribute__(f"_{name}")

    def _nvmlInit(self) -> None: ...

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-abc"
        return uuid

    def _nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=5_000_000_000)

    def _nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=97, memory=40)

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._joules += 7200
        return self._joules * 1000


def seen_by(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    accelerator: Any = SimpleNamespace(device=torch.device("cuda", 0), num_processes=1)
    return Gpus(accelerator)


def test_memory_utilization_and_energy_come_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_by(FakeNvml(), monkeypatch)
    assert found.metrics() == {"gpu_memory_gb/0": 5.0, "gpu_utilization/0": 0.97}
    assert found.energy_wh() == 2.0

    def as_two(accelerator: Any, mine: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return [mine, (None, 0.5)] if isinstance(mine[0], float) else [mine, ("GPU-other", 3600.0), mine]

    monkeypatch.setattr(gpus, "gather_objects", as_two)
    assert found.metrics() == {"gpu_memory_gb/0": 5.0, "gpu_utilization/0": 0.97, "gpu_utilization/1": 0.5}
    assert found.energy_wh() == 5.0, "a GPU that two processes share counts once"


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_does_not_answer_costs_the_figures_only(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_by(FakeNvml(**{broken: True}), monkeypatch)
    assert (found.metrics(), found.energy_wh()) == ({}, None)


def test_an_old_gpu_has_no_energy_but_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen_by(FakeNvml(nvmlDeviceGetTotalEnergyConsumption=True), monkeypatch)
    assert found.energy_wh() is None
    assert found.metrics() == {"gpu_memory_gb/0": 5.0, "gpu_utilization/0": 0.97}


def test_without_nvml_nothing_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = seen_by(None, monkeypatch)  # None in sys.modules: importing it fails
    assert (found.metrics(), found.energy_wh()) == ({}, None)
    assert capsys.readouterr() == ("", "")
