"""Hashes of the contents of files, and a memo that spares reading unchanged files at every start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from acc_lm.cache import cache_folder, make_once, read_facts, write_facts
from acc_lm.errors import DataError
from acc_lm.launcher import is_main_process
from acc_lm.text.documents import hash_text
from acc_lm.text.files import RECORD_SUFFIXES, has_records
from acc_lm.text.opening import is_compressed, opened, reading, suffix_of

SETTLED_SECONDS = 3.0
"""Age from which a file counts as unchanged if its times are: file systems round times up to two seconds."""


def remembered(
    about: str, files: list[Path], extra: str, cache_dir: str | None, compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Result of `compute` for these files, from the memo if they are as they were then.

    The memo knows a file by path, device, inode, size, and the times of the last change of content and of the file itself
    in nanoseconds. A file that changed a moment ago is always read.

    Args:
        about: kind of the result.
        extra: settings on which the result depends.
        compute: function that reads the files; its result must be JSON.
    """
    before, newest = _states(files)
    if time.time() - newest < SETTLED_SECONDS:
        return compute()
    results: list[dict[str, Any] | None] = []

    def build(work: Path) -> None:
        results.append(None)
        results[0] = found = compute()
        if _states(files)[0] != before:
            raise OSError("changed while it was read")
        write_facts(work, {"result": found})

    try:
        name = hash_text(repr((about, extra, before)))
        facts = read_facts(make_once(cache_folder(cache_dir), name, build, is_main_process()))
        return dict(facts["result"])
    except (OSError, DataError, KeyError):
        if results == [None]:  # the files cannot be read
            raise
        return results[0] if results and results[0] else compute()  # the cache is damaged, or cannot be written to


def _states(files: list[Path]) -> tuple[list[tuple[str, int, int, int, int, int]], float]:
    """Identity, size and times of each file; and the time of the last change of any."""
    found = [(file, _stat(file)) for file in files]
    states = [
        (str(file), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in found
    ]
    return states, max((max(stat.st_mtime, stat.st_ctime) for _, stat in found), default=0.0)


def _stat(file: Path) -> Any:
    with reading(file):
        return file.stat()


def content_keys(files: list[Path], extra: str, cache_dir: str | None) -> tuple[str, str | None]:
    """`read_keys`, without reading the files again if they are as they were when they were last read."""
    keys = remembered(
        "contents",
        files,
        extra,
        cache_dir,
        lambda: dict(zip(("key", "former_key"), read_keys(files, extra), strict=True)),
    )
    return keys["key"], keys["former_key"]


def read_keys(files: list[Path], extra: str) -> tuple[str, str | None]:
    """Hash of the contents and kinds of the files, and the hash of contents and names that was used up to rows-1.

    The second is None if the formats up to rows-1 did not know one of the kinds. Neither folder nor time counts, so a
    corpus can be moved.
    """
    digest, former = xxhash.xxh3_128(extra.encode()), xxhash.xxh3_128(extra.encode())
    for file in files:
        with reading(file):
            size, suffix = _content_size(file), suffix_of(file) if has_records(file) else ".txt"
        with reading(file), opened(file) as stream:
            digest.update(f"\0{'.jsonl' if suffix == '.ndjson' else suffix}\0{size}\0".encode())
            former.update(f"\0{file.name}\0{size}\0".encode())
            while block := stream.read(1 << 24):
                digest.update(block)
                former.update(block)
    return digest.hexdigest(), former.hexdigest() if were_known(files) else None


def _content_size(file: Path) -> int:
    """Bytes of a file's content, decompressed, so that a file and its compressed form have the same key."""
    if not is_compressed(file):
        return file.stat().st_size
    with opened(file) as stream:
        return sum(map(len, iter(lambda: stream.read(1 << 24), b"")))


def were_known(files: list[Path]) -> bool:
    """True if the formats up to rows-1 inferred the same kinds of content from the names of these files."""
    return all(file.suffix in RECORD_SUFFIXES and file.suffix != ".ndjson" for file in files if has_records(file))


def check_content(files: list[Path], extra: str, key: str) -> None:
    """Refuse files that changed after their key was computed, because the text read from them may mix both versions.

    Raises:
        DataError: a file has changed; the message names the file that was written last.
    """
    if read_keys(files, extra)[0] != key:
        newest = max(files, key=lambda file: file.stat().st_mtime_ns)
        raise DataError(
            f"{newest} must not change while it is read, got different content at the end; start again once it is complete"
        )


def total_size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)
