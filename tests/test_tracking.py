"""Trackers observe: with them, without them or with broken ones, the training is the same."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from processes import run_training
from test_resume import metrics_of

from acc_lm import tracking


def offline_runs(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*"))


def test_without_a_key_wandb_is_offline_and_keeps_its_id_over_a_resume(tiny: list[str], tmp_path: Path) -> None:
    arguments = [*tiny, "tracking.report_to=[wandb]", "tracking.run_name=my-run"]
    finished = run_training(arguments, environment={"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")})
    assert "wandb offline (no key; `wandb login`, then `wandb sync`)" in finished.output
    run = tmp_path / "run"
    (first,) = offline_runs(run)
    run_training(
        [*arguments, "training.max_steps=8"], environment={"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    )
    identity = (run / "wandb/run_id").read_text()
    assert {folder.name.rpartition("-")[2] for folder in offline_runs(run)} == {identity}
    record = next(first.glob("run-*.wandb")).read_bytes()
    for text in (b"train/global_step", b"my-run", b"optimizer.learning_rate", b"eval/bits_per_byte", b"acc-lm"):
        assert text in record, f"{text!r} must reach W&B"


def test_a_key_without_a_network_means_offline_within_seconds(tiny: list[str], tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    variables = {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{port}", "HOME": str(tmp_path)}
    finished = run_training([*tiny, "tracking.report_to=[wandb]"], environment=variables)
    assert "wandb offline (no network; `wandb sync` later)" in finished.output
    assert "completed" in (tmp_path / "run/summary.json").read_text()
    secret = b"k" * 40
    assert not [file for file in (tmp_path / "run").rglob("*") if file.is_file() and secret in file.read_bytes()]


def test_tensorboard_by_name(tiny: list[str], tmp_path: Path) -> None:
    run_training([*tiny, "tracking.report_to=[tensorboard]"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = [file for file in (tmp_path / "run/tensorboard").rglob("events*") if file.stat().st_size]
    found: dict[str, list[int]] = {}
    for file in events:
        accumulator = EventAccumulator(str(file))
        accumulator.Reload()
        for name in accumulator.Tags()["scalars"]:
            found[name] = [event.step for event in accumulator.Scalars(name)]
    assert found["train/loss"] == [1, 2, 4, 6]
    assert found["eval/loss"] == [3, 6]


def test_a_tracker_that_raises_costs_one_warning_and_nothing_else(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.tracking import TensorBoardTracker

    def broken(self: object, values: object, step: int | None = None, **keywords: object) -> None:
        raise OSError("the tracker's disk is full")

    run_training([*tiny, f"output_dir={tmp_path / 'without'}"])
    monkeypatch.setattr(TensorBoardTracker, "log", broken)
    finished = run_training([*tiny, "tracking.report_to=[tensorboard]"])
    warnings = [line for line in finished.output.splitlines() if line.startswith("warning:")]
    assert warnings == ["warning: tracking stopped (OSError: the tracker's disk is full); metrics.jsonl goes on"]
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "without")


def test_a_broken_setting_of_a_tracker_costs_one_warning_and_nothing_else(tiny: list[str], tmp_path: Path) -> None:
    variables = {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://host:not-a-port", "HOME": str(tmp_path)}
    finished = run_training([*tiny, "tracking.report_to=[wandb]"], environment=variables)
    assert "warning: tracking stopped (ValueError" in finished.output
    assert "tracking      none (failed)" in finished.output


def test_wandb_mode_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.wandb_mode()[0] == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert tracking.wandb_mode()[0] == "offline"
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password " + "k" * 40)
        assert tracking.wandb_mode() == ("online", "")


def test_metrics_are_complete_and_plain_json(tiny: list[str], tmp_path: Path) -> None:
    run_training(tiny)
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        assert list(json.loads(line))[0] == "step"
