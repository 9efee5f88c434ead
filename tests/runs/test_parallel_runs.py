"""Two runs on one machine at the same time, from the same text: each ends as it would have alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ROOT, run_training, start_training
from test_resume import assert_equal_runs


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_runs_at_once_do_not_mix(num_processes: int, tiny: list[str], tmp_path: Path) -> None:
    """They meet in the cache, which is empty, and where processes look for each other."""

    def arguments(name: str, seed: int, cache: str) -> list[str]:
        return [*tiny, f"output_dir={tmp_path / name}", f"seed={seed}", "training.micro_batch_size=6", "tokenizer.kind=bpe",
                "tokenizer.vocab_size=300", f"data.cache_dir={tmp_path / cache}", "checkpoint.keep_last=null"]  # fmt: skip

    launches = [start_training(arguments(f"run-{seed}", seed, "shared"), num_processes) for seed in (1, 2)]
    for launch in launches:
        assert launch.wait().codes == [0] * num_processes, launch.outputs()
    for seed in (1, 2):
        run_training(arguments(f"alone-{seed}", seed, "other"), num_processes)
        assert_equal_runs(tmp_path / f"alone-{seed}", tmp_path / f"run-{seed}", 6)


@pytest.mark.slow
def test_two_launches_at_once_find_their_own_processes(tiny: list[str], tmp_path: Path) -> None:
    """With port 0 each launcher takes a free one."""
    launches = [
        subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml"),
             "--main_process_port", "0", str(ROOT / "train.py"), *tiny, f"output_dir={tmp_path / str(seed)}", f"seed={seed}",
             "training.micro_batch_size=6"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    for launch in launches:
        output, _ = launch.communicate(timeout=120)
        assert launch.returncode == 0, output
    for seed in (1, 2):
        environment = json.loads((tmp_path / str(seed) / "environment.json").read_text())
        assert environment["num_processes"] == 2
        assert f"seed: {seed}\n" in (tmp_path / str(seed) / "config.yaml").read_text()


@pytest.mark.parametrize("mode", [[], ["--eval-only"]])
def test_a_second_run_in_the_same_folder_is_refused_and_touches_nothing(
    mode: list[str], tiny: list[str], tmp_path: Path
) -> None:
    """While the first lives; once it is gone, for whatever reason, the folder is free."""
    run = tmp_path / "run"
    first = start_training([*tiny, "training.max_steps=4000", "training.eval_every=null", "data.num_workers=1"])
    end = time.monotonic() + 60
    while not (run / "checkpoints/step-00000004").exists():
        assert time.monotonic() < end, first.outputs()
        time.sleep(0.01)
    second = run_training([*tiny, *mode], expect=2)
    (line,) = second.errors
    assert f"must be used by one run at a time, got {run}, which process {first.pids[0]} on " in line
    assert not (run / "summary.json").exists()
    dry_run = run_training([*tiny, "--dry-run"])
    assert "dry run: everything works" in dry_run.output
    os.kill(first.pids[0], signal.SIGKILL)
    first.wait()
    more = [*tiny, "training.max_steps=4000", "training.eval_every=null", "training.max_minutes=0.01"]
    assert "resumed from" in run_training([*more, *mode], expect=None).output
