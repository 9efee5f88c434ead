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
from typing import Any

from acc_lm import history
from acc_lm.config import EVALUATION_METRICS
from acc_lm.errors import ConfigError, is_main_process, process_index
from acc_lm.redaction import redact

FILE = "summary.json"
LOCK = ".lock"
WRITTEN = re.compile(r"\.?(\w+\.jsonl?|config\.yaml|training_curves\.png)|tokenizer|(tmp-)?final")
"""What a run writes beside its checkpoints and its trackers' folders, which may be links to another disk."""


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Replace a JSON file in one go."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(values, indent=1, default=str) + "\n")
    os.replace(temporary, file)


def write_summary(output_dir: Path, *, status: str, exit_code: int, reason: str | None = None, **facts: Any) -> None:
    """Status and figures of the run; the losses come from `metrics.jsonl`."""
    previous = _previous(output_dir)
    entries = history.read(output_dir)
    _, train = history.series(entries, "train/loss")
    write_json(
        output_dir / FILE,
        {
            "status": status,
            "exit_code": exit_code,
            "reason": reason,
            "attempt": previous.get("attempt", 0) + 1,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "rank": process_index(),
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
    """Note how an attempt failed, wherever that can be written; what earlier attempts reached stays.

    Args:
        speaks: whether this process is to write it; None: the main one is.
        began: when this attempt did, by `time.time()`: what the main process has written since is left as it is.
    """
    if output_dir is None or not (is_main_process() if speaks is None else speaks):
        return
    own = (
        "status",
        "exit_code",
        "reason",
        "attempt",
        "time",
        "host",
        "rank",
        "train_loss",
        "eval_loss",
        "evaluation_sets",
        "epochs",
    )
    with contextlib.suppress(OSError):  # a disk that is full must not hide the error that led here
        file = Path(output_dir) / FILE
        is_said = began is not None and not is_main_process() and file.exists() and file.stat().st_mtime > began
        if Path(output_dir).is_dir() and not is_said:
            facts = {key: value for key, value in _previous(Path(output_dir)).items() if key not in own}
            write_summary(Path(output_dir), status=status, exit_code=exit_code, reason=redact(reason), **facts)


@contextlib.contextmanager
def open_output_dir(output_dir: Path, *, alone: bool) -> Iterator[None]:
    """The folder of the run, made and written to once before anything expensive.

    Args:
        alone: no other run may have it until the context ends.

    Raises:
        ConfigError: it is a file, cannot be written, is in use, or a link in it would lead what is written elsewhere.
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
    if not alone or not is_main_process():
        yield
        return
    # A record lock, which no forked worker inherits: it ends with this process, however that ends.
    with (output_dir / LOCK).open("a+") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                lock.seek(0)
                raise ConfigError(
                    f"output_dir must be in use by one run at a time, got {output_dir}, which {lock.read().strip() or 'another process'} "
                    "writes to; wait for its end, or choose another"
                ) from None
        else:  # a file system without locks is no reason not to train
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}")
            lock.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the disk may be what ended the run
                (output_dir / LOCK).unlink()


def _previous(output_dir: Path) -> dict[str, Any]:
    try:
        values = json.loads((output_dir / FILE).read_text())
        return values if isinstance(values, dict) else {}
    except (OSError, ValueError):
        return {}
