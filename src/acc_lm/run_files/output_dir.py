"""`summary.json`: how a run ended, for scripts and people; written whole on success, failure and preemption alike."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from acc_lm import history
from acc_lm.config import EVALUATION_METRICS
from acc_lm.errors import UNSUPPORTED, ConfigError, is_main_process, process_index, warn_once
from acc_lm.redaction import redact

FILE = "summary.json"
LOCK = ".lock"
WRITTEN = re.compile(r"\.?(\w+\.jsonl?|config\.yaml|training_curves\.png)|tokenizer|(tmp-)?final")
"""What a run writes beside its checkpoints and its trackers' folders, which may be links to another disk."""
ENVIRONMENT = "environment.json"
"""The first file that a run writes into its folder; by it the folder is known as a run's."""
FILES = ("config.yaml", ENVIRONMENT, history.FILE, history.SAMPLES, FILE, history.PICTURE, LOCK)
FOLDERS = ("checkpoints", "final", "tmp-final", "tokenizer", "profile")
MADE = ("num_steps", "eval_files", "exported_step", "bits_per_byte", "final")
"""Facts of an attempt that remain true when a later one fails."""


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Replace a JSON file in one go; after a power cut it is the old one or the new one."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(history.to_json(values, indent=1) + "\n")
    flush(temporary)
    os.replace(temporary, file)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk, if its file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        what = "folders" if path.is_dir() else "files"
        warn_once(
            f"output_dir is on a file system that cannot flush {what} ({error.strerror}): a power cut may cost the newest checkpoint"
        )
    finally:
        os.close(descriptor)


def write_summary(output_dir: Path, *, status: str, exit_code: int, reason: str | None = None, **facts: Any) -> None:
    """Status and figures of the run; the losses come from `metrics.jsonl`."""
    attempt = read_summary(output_dir).get("attempt")
    entries = history.read(output_dir)
    _, train = history.series(entries, "train/loss")
    write_json(
        output_dir / FILE,
        {
            "status": status,
            "exit_code": exit_code,
            "reason": reason,
            "attempt": (attempt if isinstance(attempt, int) else 0) + 1,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "rank": process_index(),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
            "train_loss": {"first": train[0], "last": train[-1], "best": min(train)} if train else None,
            "eval_loss": _course(entries, "eval/loss"),
            "evaluation_sets": {
                name: {metric: _course(entries, f"eval/{name}/{metric}") for metric in EVALUATION_METRICS}
                for name in history.sets(entries)
            },
            "epochs": history.epochs(entries),
            **facts,
        },
    )


def _course(entries: list[dict[str, Any]], metric: str) -> dict[str, float] | None:
    """The first, the last and the best value of a metric; None when it was never measured."""
    _, values = history.series(entries, metric)
    best = history.best(entries, metric)
    return best and {"first": values[0], "last": values[-1], "best": best["value"], "best_step": best["step"]}


def write_failure(
    output_dir: str | None,
    status: str,
    exit_code: int,
    reason: str,
    speaks: bool | None = None,
    began: float | None = None,
) -> None:
    """Note how an attempt failed, wherever that can be written, and where the run stands by its newest checkpoint.

    Args:
        speaks: whether this process is to write it; None: the main one is.
        began: when this attempt did, by `time.time()`: what the main process has written since is left as it is.
    """
    if output_dir is None or not (is_main_process() if speaks is None else speaks):
        return
    folder = Path(output_dir)
    with contextlib.suppress(Exception):  # nothing, a full disk for instance, may hide the error that led here
        file = folder / FILE
        is_said = began is not None and not is_main_process() and file.exists() and file.stat().st_mtime > began
        if folder.is_dir() and not is_said:
            made = {key: value for key, value in read_summary(folder).items() if key in MADE}
            facts = made | _standing(folder)
            write_summary(folder, status=status, exit_code=exit_code, reason=redact(reason), **facts)


def _standing(output_dir: Path) -> dict[str, Any]:
    """Progress of the newest checkpoint: where the next attempt begins, whatever ended this one."""
    newest = history.newest_checkpoint(output_dir)
    if newest is None:
        return {}
    try:
        progress = json.loads((newest / "state.json").read_text())["progress"]
        reached = {key: progress[key] for key in ("step", "samples_seen", "tokens", "ledger")}
    except (OSError, ValueError, KeyError, TypeError):  # damaged: the next attempt names it
        reached = {}
    return {**reached, "last_checkpoint": newest}


@contextlib.contextmanager
def open_output_dir(output_dir: Path, *, alone: bool) -> Iterator[None]:
    """The folder of the run, made and written to once before anything expensive.

    Args:
        alone: no other run may have it until the context ends.

    Raises:
        ConfigError: it is a file, cannot be written, is in use, holds what no run wrote, or a link in it would lead what is
            written elsewhere.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        probe = output_dir / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
        links = [path for path in output_dir.iterdir() if path.is_symlink() and WRITTEN.fullmatch(path.name)]
    except OSError as error:
        raise ConfigError(
            f"output_dir must be a folder that can be written, got {output_dir} ({error.strerror}); choose another"
        ) from None
    if links:
        raise ConfigError(
            *(f"{link} must be the run's own, got a link to {os.readlink(link)!r}; remove it" for link in links)
        )
    if is_main_process():
        check_output_dir(output_dir)
    if not alone or not is_main_process():
        yield
        return
    # A record lock, which no forked worker inherits: it ends with this process, however that ends.
    with (output_dir / LOCK).open("a+") as lock:
        _lock(lock, output_dir)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the disk may be what ended the run
                (output_dir / LOCK).unlink()


def check_not_in_use(output_dir: Path) -> None:
    """Refuse a folder that a run writes to.

    Raises:
        ConfigError: with the process that does.
    """
    with contextlib.suppress(OSError), (output_dir / LOCK).open("r+") as lock:
        _lock(lock, output_dir)


def when_taken(output_dir: Path) -> int | None:
    """Time at which the run that has the folder, or was killed there, took it; a run that ends leaves none."""
    try:
        return (output_dir / LOCK).stat().st_mtime_ns
    except OSError:
        return None


def _lock(file: IO[str], output_dir: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            warn_once(
                f"{output_dir} is on a file system without locks ({error.strerror}): no second run would be refused there"
            )
            return
        file.seek(0)
        raise ConfigError(
            f"output_dir must be in use by one run at a time, got {output_dir}, which {file.read().strip() or 'another process'} "
            "writes to; wait for its end, or choose another"
        ) from None


def read_summary(output_dir: Path) -> dict[str, Any]:
    """The summary that is there; empty when there is none, or none that can be read."""
    return _read_json(output_dir / FILE)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
        return values if isinstance(values, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def check_output_dir(output_dir: Path) -> None:
    """Refuse a folder in which a run would overwrite or delete what no run wrote.

    Raises:
        ConfigError: it holds a file or a folder under one of the names that a run writes, and is not the folder of a run; or
            one of them is of the wrong kind.
    """
    for name in (*FOLDERS, *FILES):
        path, kind = output_dir / name, "folder" if name in FOLDERS else "file"
        if path.is_symlink() and not path.exists():
            raise ConfigError(
                f"{path} must lead to a {kind}, got a link to {os.readlink(path)!r}, where there is nothing; make that {kind}, or remove the link"
            )
        if path.exists() and path.is_dir() != (kind == "folder"):
            raise ConfigError(
                f"{path} must be a {kind}, got something else; move it away, or choose another output_dir"
            )
    if _is_of_a_run(output_dir):
        return
    there = [name for name in (*FILES, *FOLDERS) if _holds_something(output_dir / name) and name != LOCK]
    if there:
        raise ConfigError(
            f"output_dir must be a new folder or that of a run, got {output_dir}, which holds {', '.join(there)} that no run of acc-lm wrote; "
            "move that away, or choose another output_dir"
        )


def _is_of_a_run(output_dir: Path) -> bool:
    """Whether a run, or an attempt that ended before its first step, has written there."""
    return (
        "strategy" in _read_json(output_dir / ENVIRONMENT)
        or {"status", "exit_code", "attempt"} <= read_summary(output_dir).keys()
        or any((output_dir / "checkpoints").glob("step-*"))
    )


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()
