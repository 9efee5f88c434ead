"""Content-addressed cache on disk: one process builds an entry, completely or not at all."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acc_lm.errors import DataError

FACTS = "facts.json"


def cache_folder(chosen: str | None = None) -> Path:
    """Folder for files that can always be built again: token rows, compiled extensions."""
    return Path(os.path.expanduser(chosen or os.environ.get("ACC_LM_CACHE") or "~/.cache/acc-lm"))


def make_once(cache: Path, key: str, build: Callable[[Path], None], is_main_process: bool) -> Path:
    """Folder `key` of the cache; if it is missing or incomplete, one process builds it under a file lock.

    Args:
        build: writes everything into the folder that it receives, `write_facts` last.

    Raises:
        DataError: the cache cannot be written to.
    """
    folder = cache / key
    if not _is_complete(folder):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            (cache / f"{key}.lock").touch()
        except OSError as error:
            raise DataError(
                f"data.cache_dir must be a writable folder, got {cache} ({error.strerror}); choose another"
            ) from None
        with (cache / f"{key}.lock").open("a+") as lock:  # NFS needs a file open for reading for a shared lock
            if not is_main_process:
                _let_the_main_process_begin(lock, folder)
            is_locked = _take(lock, cache)
            if not _is_complete(folder):
                for leftover in cache.glob(f".{key}.*") if is_locked else ():
                    shutil.rmtree(leftover)
                work = cache / f".{key}.{platform.node()}.{os.getpid()}"
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                try:
                    build(work)
                    _put(work, folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    return folder


def _let_the_main_process_begin(lock: Any, folder: Path) -> None:
    """Wait up to a second for the main process to take the lock, because it shows the progress bar."""
    end = time.monotonic() + 1
    while time.monotonic() < end and not _is_complete(folder):
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: waiting processes do not detect each other
            fcntl.flock(lock, fcntl.LOCK_UN)
        except BlockingIOError:
            return
        except OSError:
            pass  # a file system without locks
        time.sleep(0.01)


def _take(lock: Any, cache: Path) -> bool:
    """Wait for the lock, which the kernel releases when its holder dies; False on a file system without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        _note_once(
            f"{cache} has no file locks ({error.strerror}), so each process builds its own copy of the missing data"
        )
        return False
    return True


def _put(work: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, unless another process was faster."""
    try:
        work.rename(folder)
    except OSError:
        if not _is_complete(folder):  # a damaged folder has this name
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)


@functools.cache
def _note_once(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _is_complete(folder: Path) -> bool:
    """True when every file listed in `facts.json`, which is written last, has the size it should have."""
    try:
        sizes = json.loads((folder / FACTS).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_facts(work: Path, facts: dict[str, Any]) -> None:
    """Write the facts about a folder, as its last file, with the size of every other file in it."""
    files = {str(path.relative_to(work)): path.stat().st_size for path in work.rglob("*") if path.is_file()}
    with (work / FACTS).open("w") as file:
        json.dump({**facts, "files": files}, file)
        flush_file(file)


def read_facts(folder: Path) -> dict[str, Any]:
    """Facts as passed to `write_facts`, with lists in place of tuples."""
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
    del facts["files"]
    return facts


def flush_file(file: Any) -> None:
    """Flush a file to the disk itself, if the file system can."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        _note_once(
            f"the cache is on a file system that cannot flush ({error.strerror}); remove the cache after a power cut"
        )
