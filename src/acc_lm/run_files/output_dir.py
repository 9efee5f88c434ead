"""Output folder of a run: locked for one run at a time, and refused when it holds files that no run wrote."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from acc_lm.errors import ConfigError, warn_once
from acc_lm.launcher import is_main_process
from acc_lm.run_files.log_file import is_own_log
from acc_lm.run_files.names import (
    CHECKPOINTS,
    ENVIRONMENT,
    FINAL,
    LOG,
    METRICS,
    PICTURE,
    RECIPE,
    SAMPLES,
    SUMMARY,
    TRACKERS,
)
from acc_lm.run_files.summary import read_json_file, read_summary

LOCK = ".lock"
SUPERVISOR_LOCK = ".keep-going"
WRITTEN = re.compile(r"\.?(\w+\.jsonl?|config\.yaml|training_curves\.png|train\.log)|tokenizer|(tmp-)?final")
"""Names that a run writes, except for the folders of checkpoints and trackers, which may be links to another disk."""
FILES = (
    RECIPE,
    ENVIRONMENT,
    METRICS,
    SAMPLES,
    SUMMARY,
    PICTURE,
    LOG,
    LOCK,
)
FOLDERS = (CHECKPOINTS, FINAL, "tmp-final", "tokenizer", "profile", TRACKERS)


@contextlib.contextmanager
def open_output_dir(output_dir: Path, *, alone: bool) -> Iterator[None]:
    """Create the run's folder, check that it is writable before anything expensive, and lock it. A context manager.

    Args:
        alone: lock the folder, so that no other run can use it until the context ends.

    Raises:
        ConfigError: the folder is a file, is not writable, is in use, holds files that no run wrote, or contains a link that
            would redirect the run's files.
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
    # A record lock: forked workers do not inherit it, and it is released when this process ends, for whatever reason.
    with (output_dir / LOCK).open("a+") as lock:
        _lock(lock, output_dir)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a disk error may have ended the run
                (output_dir / LOCK).unlink()


def check_not_in_use(output_dir: Path) -> None:
    """Refuse a folder that a run is writing to.

    Raises:
        ConfigError: names the process that writes to it.
    """
    with contextlib.suppress(OSError), (output_dir / LOCK).open("r+") as lock:
        _lock(lock, output_dir)


def is_in_use(output_dir: Path) -> bool:
    """True while a run writes to the folder; False for the lock that a killed run left.

    On a file system without locks, the lock that a run left cannot be distinguished: it counts as that of a running one.
    """
    return _is_held(output_dir / LOCK)


def is_supervised(output_dir: Path) -> bool:
    """True while `acc-lm keep-going` on this machine follows the run, also between two attempts."""
    return _is_held(output_dir / SUPERVISOR_LOCK)


def _is_held(file: Path) -> bool:
    with contextlib.suppress(OSError), file.open("rb") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class Supervision:
    """Lock in the folder of a run that is kept going: others can see that an attempt that ended is not the last."""

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir
        self._lock: IO[str] | None = None

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    def hold(self) -> None:
        """Lock the folder if a run has made it by now; a folder that cannot be locked is followed without a lock."""
        if self.is_held or not ((self._folder / LOCK).exists() or is_run_folder(self._folder)):
            return
        with contextlib.suppress(OSError):
            lock = (self._folder / SUPERVISOR_LOCK).open("a+")
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                raise
            self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self._folder / SUPERVISOR_LOCK).unlink()
            self._lock.close()
            self._lock = None


def when_taken(output_dir: Path) -> int | None:
    """Time at which a running or killed run locked the folder, in ns since 1970; None after a run that ended itself."""
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
                f"{output_dir} is on a file system without locks ({error.strerror}): a second run in it would not be refused"
            )
            return
        file.seek(0)
        raise ConfigError(
            f"output_dir must be used by one run at a time, got {output_dir}, which {file.read().strip() or 'another process'} "
            "writes to; wait for its end, or choose another"
        ) from None


def check_output_dir(output_dir: Path) -> None:
    """Refuse a folder in which a run would overwrite or delete files that no run wrote.

    Raises:
        ConfigError: one of the names that a run writes exists although the folder is not that of a run, or one of them is of
            the wrong kind.
    """
    for name in (*FOLDERS, *FILES):
        path, kind = output_dir / name, "folder" if name in FOLDERS else "file"
        if path.is_symlink() and not path.exists():
            raise ConfigError(
                f"{path} must point to a {kind}, got a link to {os.readlink(path)!r}, which does not exist; create that {kind}, or remove the link"
            )
        if path.exists() and path.is_dir() != (kind == "folder"):
            raise ConfigError(
                f"{path} must be a {kind}, got something else; move it away, or choose another output_dir"
            )
    if is_run_folder(output_dir):
        return
    own = (LOCK, LOG) if is_own_log(output_dir / LOG) else (LOCK,)
    there = [name for name in (*FILES, *FOLDERS) if _holds_something(output_dir / name) and name not in own]
    if there:
        raise ConfigError(
            f"output_dir must be a new folder or that of a run, got {output_dir}, which holds {', '.join(there)} that no run of acc-lm wrote; "
            "move that away, or choose another output_dir"
        )


def is_run_folder(output_dir: Path) -> bool:
    """True when a run, or an attempt that ended before its first step, has written there."""
    return (
        "strategy" in read_json_file(output_dir / ENVIRONMENT)
        or {"status", "exit_code", "attempt"} <= read_summary(output_dir).keys()
        or any((output_dir / CHECKPOINTS).glob("step-*"))
    )


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()
