"""What can always be made again, kept on disk: found by the hash of its content, made by one process, whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acc_lm.errors import DataError

FACTS = "facts.json"


def cache_folder(chosen: str | None = None) -> Path:
    """Where things are kept that can always be made again: token rows, compiled extensions."""
    return Path(os.path.expanduser(chosen or os.environ.get("ACC_LM_CACHE") or "~/.cache/acc-lm"))


def make_once(cache: Path, key: str, build: Callable[[Path], None], is_main_process: bool) -> Path:
    """The folder of that name in the cache; made by one process, under a file lock, when it is not there whole.

    Args:
        build: writes everything into the folder it is given, `write_facts` last.

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
        if not is_main_process:
            time.sleep(1)  # let the main process, which shows the progress bar, take the lock
        with (cache / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel gives it up when its holder dies
            if not _is_complete(folder):
                for leftover in cache.glob(f".{key}.*"):
                    shutil.rmtree(leftover)
                work = cache / f".{key}.{os.getpid()}"
                work.mkdir()
                try:
                    build(work)
                    shutil.rmtree(folder, ignore_errors=True)
                    work.rename(folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    return folder


def _is_complete(folder: Path) -> bool:
    """True when every file listed in `facts.json`, which is written last, has the size it should have."""
    try:
        sizes = json.loads((folder / FACTS).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_facts(work: Path, facts: dict[str, Any]) -> None:
    """What is known about a folder; last, with the size of everything that belongs to it."""
    files = {str(path.relative_to(work)): path.stat().st_size for path in work.rglob("*") if path.is_file()}
    with (work / FACTS).open("w") as file:
        json.dump({**facts, "files": files}, file)
        flush(file)


def read_facts(folder: Path) -> dict[str, Any]:
    """What `write_facts` was given, lists for tuples."""
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
    del facts["files"]
    return facts


def flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
