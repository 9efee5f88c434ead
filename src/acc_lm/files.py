"""Files that are complete or not there: written next to their place, flushed, renamed."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from acc_lm.errors import UNSUPPORTED, ConfigError, StorageError, storage_reason, warn_once


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Replace a JSON file atomically: after a power cut it is either the old one or the new one."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(to_json(values, indent=1) + "\n")
    flush(temporary)
    os.replace(temporary, file)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk; warn if the file system does not support this."""
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


def make_readable(file: Path) -> None:
    """Give a file the mode that the umask asks for, because safetensors writes 0600 whatever the umask."""
    mask = os.umask(0)
    os.umask(mask)
    try:
        file.chmod(0o666 & ~mask)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EPERM):
            raise
        warn_once(
            f"output_dir is on a file system without modes ({error.strerror}): other users may not be able to read its files"
        )


@contextlib.contextmanager
def storage_errors(root: Path, needed: int = 0) -> Iterator[None]:
    """Context that turns an error of the disk into a StorageError with the free and the needed space.

    Args:
        needed: Bytes that this process needs; 0: not mentioned.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    try:
        yield
    except Exception as error:
        reason = storage_reason(error)
        if reason is None:
            raise
        free = shutil.disk_usage(root if root.exists() else root.parent).free
        wants = f", {needed / 2**20:.1f} MiB needed by one process" if needed else ""
        raise StorageError(
            f"{root} must have room for a checkpoint, got: {reason} ({free / 2**20:.0f} MiB free{wants}); "
            "free some space, then run the same command to resume from the previous checkpoint"
        ) from None


def to_json(values: Any, indent: int | None = None) -> str:
    """JSON text, with non-finite numbers as null, because JSON cannot represent them."""
    return json.dumps(_finite(values), indent=indent, default=str, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


@contextmanager
def written_aside(output: Path) -> Iterator[Path]:
    """Path near `output` for writing a file or folder that becomes `output` at the end, completely or not at all.

    Raises:
        ConfigError: there can be no such path.
        StorageError: the disk is full or cannot be written.
    """
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            aside = tempfile.TemporaryDirectory(dir=output.parent, prefix=".acc-lm-")
        except OSError as error:
            if storage_reason(error):
                raise
            raise ConfigError(
                f"{output} must be in a folder that can be written, got: {error.strerror}; choose another path"
            ) from None
        with aside as folder:
            work = Path(folder, output.name)
            yield work
            for file in [work, *work.rglob("*")]:
                if file.is_file():
                    make_readable(file)
            work.rename(output)
    except Exception as error:
        if reason := storage_reason(error):
            raise StorageError(
                f"{output} must be writable, got: {reason}; free some space, or choose another path"
            ) from None
        raise
