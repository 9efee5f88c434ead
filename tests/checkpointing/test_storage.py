"""A full, read-only or broken disk: one line and exit code 8, and the previous checkpoint is intact and can be resumed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, Finished, Launch, launcher_environment, run_training, start_training
from test_resume import assert_equal_runs
from test_stop import wrap

from acc_lm.checkpointing.format import problem_with

LEVELS = range(5, 100, 10)
STEPS = 6


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[str | None]:
    """Mount a separate file system there; yields the reason if that is impossible here."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    try:
        yield mounted.stderr.decode().strip() if mounted.returncode else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)


def arguments_of(recipe: Path, run: Path) -> list[str]:
    """Checkpoints of a MB; a twentieth of that is room enough for everything else that a run writes."""
    return [
        "--config", str(recipe), f"output_dir={run}", "model.config.hidden_size=64", "model.config.intermediate_size=128",
        f"training.max_steps={STEPS}", "training.micro_batch_size=6", "training.eval_every=null", "training.log_every=1",
        "checkpoint.every=2", "checkpoint.keep_last=null",
    ]  # fmt: skip


def start_run(arguments: list[str], num_processes: int = 1, environment: dict[str, str] | None = None) -> Path:
    """Start a run that is killed when step 2 is saved and step 4 is not; returns the checkpoint, which must survive."""
    killed = start_training(arguments, num_processes, (environment or {}) | {"ACC_LM_CRASH_AT": "before_tmp@2"}).wait(
        60
    )
    assert -signal.SIGKILL in killed.codes, killed.outputs
    run = Path(next(word for word in arguments if word.startswith("output_dir=")).partition("=")[2])
    return run / "checkpoints/step-00000002"


def go_on_with(
    trouble: Callable[[int], None],
    arguments: list[str],
    num_processes: int = 1,
    environment: dict[str, str] | None = None,
    locked: bool = True,
) -> Finished:
    """Resume, with the fault present from the first step on: the run's own check of the disk found nothing.

    Args:
        locked: False: without the run's lock, whose open file would prevent remounting the disk by hand.
    """

    def run() -> int:
        import acc_lm.cli.train
        import train

        if not locked:
            acc_lm.cli.train.open_output_dir = lambda folder, alone: contextlib.nullcontext()  # type: ignore[assignment]

        wrap("acc_lm.training.train_step", lambda: trouble(int(os.environ.get("RANK", "0"))))
        return train.main(arguments)

    return Launch(run, num_processes, environment).wait(60)


def check_what_is_left(finished: Finished, checkpoint: Path, reason: str) -> None:
    """Check that every process ended with 8, one line says everything, and only complete checkpoints are left."""
    assert set(finished.codes) == {8}, finished.outputs
    lines = [line for output in finished.outputs for line in output.splitlines() if line.startswith("error: ")]
    assert str(checkpoint.parent) in lines[0], lines
    assert f"got: {reason} (" in lines[0]
    assert "MiB free" in lines[0]
    assert not list(checkpoint.parent.glob("tmp-*"))
    assert list(checkpoint.parent.glob("step-*")) == [checkpoint]
    assert problem_with(checkpoint) is None
    assert f"resumed from {checkpoint}" in finished.output


def summary_of(checkpoint: Path) -> tuple[str, int]:
    summary = json.loads((checkpoint.parent.parent / "summary.json").read_text())
    return summary["status"], summary["exit_code"]


def fill_levels(recipe: Path, folder: Path, levels: range = LEVELS) -> str:
    """End runs on a disk that has room for this many percent of a checkpoint; returns how that was done.

    Each resumes from the checkpoint that the previous one must have left intact, the last one to the end.
    """
    with small_disk(folder / "disk", "size=24m") as not_mounted:
        run = folder / "disk/run"
        arguments = arguments_of(recipe, run)
        checkpoint = start_run(arguments)
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        assert size > 2**20
        filler = folder / "disk/filler"
        for level in levels:

            def fill(_: int, room: int = size * level // 100) -> None:
                if not_mounted:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
                else:
                    filler.write_bytes(bytes(shutil.disk_usage(run).free - room))

            finished = go_on_with(fill, arguments)
            filler.unlink(missing_ok=True)
            reason = os.strerror(errno.EFBIG if not_mounted else errno.ENOSPC)
            check_what_is_left(finished, checkpoint, reason)
            assert summary_of(checkpoint) == ("storage_error", 8), level
        run_training(arguments)
        run_training(arguments_of(recipe, folder / "whole"))
        assert summary_of(checkpoint) == ("completed", 0)
        assert_equal_runs(folder / "whole", run, STEPS)
    return f"RLIMIT_FSIZE ({not_mounted})" if not_mounted else "a tmpfs"


@pytest.mark.slow
def test_at_every_fill_level_the_previous_checkpoint_is_intact_and_used(tiny_recipe: Path, tmp_path: Path) -> None:
    print(f"{len(LEVELS)} fill levels of {fill_levels(tiny_recipe, tmp_path)}")


@pytest.mark.parametrize(
    "config", ["ddp", *(pytest.param(other, marks=pytest.mark.slow) for other in ("fsdp2", "deepspeed_zero2"))]
)
def test_when_one_process_of_two_cannot_write_all_report_it(config: str, tiny_recipe: Path, tmp_path: Path) -> None:
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2)
    arguments = [*arguments_of(tiny_recipe, tmp_path / "run"), "distributed.timeout_seconds=20"]
    checkpoint = start_run(arguments, 2, environment)

    def limit(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    finished = go_on_with(limit, arguments, 2, environment)
    check_what_is_left(finished, checkpoint, os.strerror(errno.EFBIG))
    assert len(finished.errors) == 1, "of the main process, although it was another that could not write"
    assert summary_of(checkpoint) == ("storage_error", 8)
    assert f"resumed from {checkpoint}" in run_training(arguments, 2, environment).output


def failing(number: int, name: str) -> Callable[[int], None]:
    """Make this system call fail from now on, for everything below a folder of checkpoints."""

    def trouble(_: int) -> None:
        original = getattr(os, name)

        def fail(what: object, *more: object) -> object:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            if "/checkpoints" in path:
                raise OSError(number, os.strerror(number), path)
            return original(what, *more)

        setattr(os, name, fail)

    return trouble


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fsync", errno.EDQUOT), ("mkdir", errno.EROFS), ("rename", errno.EXDEV),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in [
                ("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("mkdir", errno.EACCES), ("mkdir", errno.ENOSPC),
                ("rename", errno.EDQUOT), ("rename", errno.ESTALE),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else errno.errorcode[value],
)  # fmt: skip
def test_every_error_of_a_file_system_is_the_same_kind_of_error(
    call: str, number: int, tiny_recipe: Path, tmp_path: Path
) -> None:
    arguments = arguments_of(tiny_recipe, tmp_path / "run")
    checkpoint = start_run(arguments)
    check_what_is_left(go_on_with(failing(number, call), arguments), checkpoint, os.strerror(number))
    assert summary_of(checkpoint) == ("storage_error", 8)
    assert f"resumed from {checkpoint}" in run_training(arguments).output


def test_running_out_of_inodes_is_the_same_kind_of_error(tiny_recipe: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=24m,nr_inodes=80") as not_mounted:
        if not_mounted:
            pytest.skip(f"a file system with few inodes cannot be mounted here: {not_mounted}")
        arguments = arguments_of(tiny_recipe, tmp_path / "disk/run")
        checkpoint = start_run(arguments)

        def use_up(_: int) -> None:
            left = os.statvfs(tmp_path / "disk").f_ffree
            for number in range(left - 1):  # the folder can still be made, not a file in it
                (tmp_path / f"disk/{number}").touch()

        finished = go_on_with(use_up, arguments)
        check_what_is_left(finished, checkpoint, os.strerror(errno.ENOSPC))


def test_a_disk_that_turns_read_only_is_the_same_kind_of_error(tiny_recipe: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=24m") as not_mounted:
        if not_mounted:
            pytest.skip(f"a file system cannot be mounted here: {not_mounted}")
        arguments = arguments_of(tiny_recipe, tmp_path / "disk/run")
        checkpoint = start_run(arguments)

        def turn(_: int) -> None:
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)

        finished = go_on_with(turn, arguments, locked=False)
        assert finished.codes == [8], finished.output
        (line,) = finished.errors
        assert os.strerror(errno.EROFS) in line
        assert str(tmp_path / "disk/run") in line
        assert [problem_with(folder) for folder in checkpoint.parent.glob("step-*")] == [None]
        subprocess.run(["mount", "-o", "remount,rw", str(tmp_path / "disk")], check=True)
        assert f"resumed from {checkpoint}" in run_training(arguments).output


def test_a_missing_file_system_feature_costs_a_line_and_not_the_run(tiny: list[str], tmp_path: Path) -> None:
    """Locks, links, modes, flushed folders: Lustre, SMB, exFAT and some user-space file systems lack one or another."""
    command = [*tiny, "checkpoint.keep_last=2", "checkpoint.keep_best=0"]

    def run() -> int:
        import fcntl

        import train

        def lacks(number: int) -> Callable[..., None]:
            def call(*_: object, **__: object) -> None:
                raise OSError(number, os.strerror(number))

            return call

        flush = os.fsync

        def files_only(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            flush(descriptor)

        fcntl.lockf, os.symlink, os.fsync = lacks(errno.ENOSYS), lacks(errno.EPERM), files_only  # type: ignore[assignment]
        os.chmod = lacks(errno.EOPNOTSUPP)  # type: ignore[assignment]
        return train.main(command)

    finished = Launch(run).wait()
    assert finished.code == 0, finished.output
    warnings = [line for line in finished.output.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 4, finished.output
    for lack in ("without locks", "without links", "without modes", "that cannot flush folders"):
        assert sum(lack in line for line in warnings) == 1, lack
    folders = sorted((tmp_path / "run/checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-00000004", "step-00000006"]
    assert "resumed from" in run_training([*command, "training.max_steps=7"]).output


def test_free_space_is_measured_on_the_disk_of_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`checkpoints` may be a link to a larger disk, or to a smaller one."""
    import torch

    from acc_lm.checkpointing import writing
    from acc_lm.config import CheckpointConfig
    from acc_lm.errors import StorageError

    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "other")
    free = {tmp_path / "run": 0, tmp_path / "other": 1 << 30}

    def usage(path: Path) -> Any:
        return shutil._ntuple_diskusage(1 << 40, 0, free[Path(path).resolve()])  # type: ignore[attr-defined]

    monkeypatch.setattr(writing.shutil, "disk_usage", usage)
    model = torch.nn.Linear(64, 64)
    writing.check_disk_space(tmp_path / "run", model, CheckpointConfig(), 100)
    free[tmp_path / "run"], free[tmp_path / "other"] = 1 << 30, 0
    with pytest.raises(StorageError, match=r"must have room for 3 checkpoints of .* got 0\.0 MiB free"):
        writing.check_disk_space(tmp_path / "run", model, CheckpointConfig(), 100)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077], ids=oct)
def test_every_file_of_a_run_has_the_mode_that_the_user_set(mask: int, tiny: list[str], tmp_path: Path) -> None:
    """safetensors writes 0600 by itself: another user could read neither the model nor a checkpoint."""

    def run() -> int:
        import train

        os.umask(mask)
        return train.main([*tiny, "training.micro_batch_size=6"])

    assert Launch(run, 2).wait().codes == [0, 0]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and not path.is_symlink()]
    parts = {path.relative_to(tmp_path / "run").parts[0] for path in files}
    assert {"checkpoints", "final", "tokenizer", "summary.json", "metrics.jsonl", "config.yaml"} <= parts
    assert {str(path): oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        str(path): oct(0o666 & ~mask) for path in files
    }


def test_an_unwritable_folder_is_found_in_seconds_before_anything_is_loaded(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "output_dir=/proc/run", "model.config=null", "model.name_or_path=/nowhere/model"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    seconds = time.monotonic() - began
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: output_dir must be a folder that can be written, got /proc/run")
    print(f"{seconds:.1f} s, most of it imports")
    assert seconds < 5


def test_a_slow_disk_changes_nothing(tiny_recipe: Path, tmp_path: Path) -> None:
    """Every flush takes a tenth of a second, as over a network; the checkpoints are the same."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    run_training(arguments_of(tiny_recipe, fast))

    def run() -> int:
        import train

        flush = os.fsync

        def late(descriptor: int) -> None:
            time.sleep(0.1)
            flush(descriptor)

        os.fsync = late
        return train.main(arguments_of(tiny_recipe, slow))

    assert Launch(run).wait(60).codes == [0]
    assert_equal_runs(fast, slow, 6)
