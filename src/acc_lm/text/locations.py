"""Paths, globs, folders and remote addresses -> files on this machine."""

from __future__ import annotations

import difflib
import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acc_lm.cache import cache_folder, make_once, write_facts
from acc_lm.errors import DataError, first_line
from acc_lm.launcher import is_main_process
from acc_lm.text.documents import hash_text
from acc_lm.text.opening import reading

VERSION_KEYS = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "md5Hash", "generation", "blob_id")
"""Entries by which the file systems of fsspec identify a version of a remote file."""


def find_files(patterns: tuple[str, ...], key: str, cache_dir: str | None = None) -> list[Path]:
    """Files that the paths, globs, folders and remote addresses name, each once, in order.

    Args:
        key: of the recipe, for error messages.
        cache_dir: folder for copies of remote files; None: the default one.

    Raises:
        DataError: a file is missing or empty, or a remote one cannot be copied.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if is_remote(pattern):
            found |= dict.fromkeys(_fetch(pattern, key, cache_dir))
            continue
        with reading(pattern):
            found |= dict.fromkeys(_matches(pattern, key))
    empty = [file for file in found if file.stat().st_size == 0]
    if empty:
        raise DataError(
            *(f"{file} must hold text, got an empty file (0 bytes); remove it from {key}" for file in empty)
        )
    return list(found)


def is_remote(path: str) -> bool:
    return "://" in path


def _matches(pattern: str, key: str) -> list[Path]:
    full = os.path.expanduser(pattern)
    if os.path.isdir(full):
        if not (files := list(_files_in(Path(full).absolute(), key))):
            raise DataError(f"{key} must name a folder with files, got {pattern!r} without any; add some")
        return files
    matches = (
        [full] if os.path.isfile(full) else sorted(p for p in glob.glob(full, recursive=True) if os.path.isfile(p))
    )
    if not matches:
        folder = os.path.dirname(full) or "."
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        near = difflib.get_close_matches(os.path.basename(full), names, n=1)
        hint = f"paths are relative to {os.getcwd()}" if not os.path.isabs(pattern) else f"correct {key}"
        hint = f"nearest: {os.path.join(folder, near[0])}" if near else hint
        wanted = "match at least one file" if glob.has_magic(full) else "name an existing file or folder"
        raise DataError(f"{key} must {wanted}, got {pattern!r}; {hint}")
    return [Path(match).absolute() for match in matches]


# --- folders -------------------------------------------------------------------------------------------------------


def saved_tables(folder: Path) -> list[Path] | None:
    """Arrow files of a folder that `Dataset.save_to_disk` wrote, in order; None for any other folder.

    Raises:
        DataError: the folder's list of files is damaged.
    """
    if not (folder / "dataset_info.json").is_file():
        return None
    from datasets.config import DATASET_STATE_JSON_FILENAME

    state = folder / DATASET_STATE_JSON_FILENAME
    if not state.is_file():
        return None
    try:
        return [folder / entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{state} must list the files of a saved dataset, got: {type(error).__name__} {error}; save the dataset again"
        ) from None


def _files_in(folder: Path, key: str) -> Iterator[Path]:
    """All files of a folder and its subfolders in order, without hidden and empty ones; of a saved dataset its tables."""
    if (splits := folder / "dataset_dict.json").is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())) or "none"
        raise DataError(
            f"{key} must name one split of the saved datasets in {folder}, got all of them ({names}); "
            f"add the name of the split to the path ({splits.name} lists them)"
        )
    tables = saved_tables(folder)
    if tables is not None:
        yield from tables
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.resolve() not in (folder.resolve(), *folder.resolve().parents):  # a link to a folder around it
                yield from _files_in(path, key)
        elif path.is_file() and path.stat().st_size:
            yield path


# --- remote files --------------------------------------------------------------------------------------------------


def _fetch(address: str, key: str, cache_dir: str | None) -> list[Path]:
    """Copies of the remote files, each fetched once per version that its server names."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(address)
        if "http" in system.protocol:  # a web server lists no folders, and ? begins a query
            paths = [path]
        elif glob.has_magic(path):
            paths = sorted(found for found in system.glob(path) if not _is_hidden(found) and system.isfile(found))
        elif system.isdir(path):
            paths = sorted(found for found in system.find(path) if not _is_hidden(found))
        else:
            paths = [path]
        files = [_copy(system, path, cache_dir) for path in paths]
    except DataError:
        raise
    except Exception as error:  # every file system of fsspec has kinds of its own; each means that it cannot be read
        reason = "not found" if isinstance(error, FileNotFoundError) else first_line(error)
        raise DataError(
            f"{key} must name remote files that can be read, got {address!r}: {reason}; "
            "check the address, the network and your credentials"
        ) from None
    if not files:
        raise DataError(f"{key} must match at least one remote file, got {address!r}; correct the address")
    return files


def _is_hidden(path: str) -> bool:
    return os.path.basename(path).startswith(".")


def _copy(system: Any, path: str, cache_dir: str | None) -> Path:
    info = system.info(path)
    version = [str(info[name]) for name in VERSION_KEYS if info.get(name) is not None]
    name = os.path.basename(path.split("?")[0].rstrip("/")) or "file"

    def download(work: Path) -> None:
        from fsspec.callbacks import TqdmCallback

        settings = {"unit": "B", "unit_scale": True, "desc": f"fetch {name}"}
        with TqdmCallback(tqdm_kwargs=settings | {"disable": None if is_main_process() else True}) as bar:
            system.get_file(path, str(work / name), callback=bar)
        write_facts(work, {"path": path})

    key = hash_text(repr(("remote", system.unstrip_protocol(path), version)))
    return make_once(cache_folder(cache_dir), key, download, is_main_process()) / name
