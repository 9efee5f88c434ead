"""Text in any supported form -> an iterator of documents; errors name the file and line of a bad input."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from acc_lm.cache import cache_folder, make_once, read_facts, write_facts
from acc_lm.config import DataConfig
from acc_lm.errors import DataError, first_line
from acc_lm.launcher import is_main_process
from acc_lm.text.contents import check_content, content_keys, remembered, total_size
from acc_lm.text.documents import Corpus, Document, Documents, Skipped, Stretch, TextReader, hash_text, text_in
from acc_lm.text.files import (
    as_written,
    has_records,
    records_in,
    whole_files,
)
from acc_lm.text.locations import find_files, saved_tables
from acc_lm.text.stretches import documents_in, stretches_of
from acc_lm.text.synthetic import synthetic_corpus

RECORDS = 2_000
"""Records of a dataset that one process reads at a time."""


def open_corpus(config: DataConfig, seed: int, read: TextReader | None = None) -> Corpus:
    """Find the text that a recipe names, without reading more of it than its hash needs.

    Args:
        read: turns a record into the text of its document; None: the text in `data.text_column`.

    Raises:
        DataError: a file, column or dataset is missing or empty.
    """
    if config.source == "synthetic":
        return synthetic_corpus(config, seed)
    if config.source == "hub":
        return _hub_corpus(config, read)
    if config.source == "python_stdlib":
        files = python_stdlib_files()
        size = total_size(files)
        modules = Documents(
            lambda _: whole_files(files),
            lambda: stretches_of(files),
            lambda stretch, _: whole_files(list(stretch.files)),
            size,
        )
        return Corpus(*content_keys(files, "utf-8", config.cache_dir), modules, None, size)
    train_files = find_files(config.files, "data.files", config.cache_dir)
    eval_files = find_files(config.eval_files, "data.eval_files", config.cache_dir) if config.eval_files else []
    only_records, reader = read is not None, read or text_in(config.text_column)
    sides = [(side, *content_keys(side, config.text_column, config.cache_dir)) for side in (train_files, eval_files)]

    def check() -> None:
        for side, key, _ in sides:
            check_content(side, config.text_column, key)

    former_keys = [former_key for _, _, former_key in sides]
    return Corpus(
        key="".join(key for _, key, _ in sides),
        former_key=None if None in former_keys else "".join(map(str, former_keys)),
        train=documents_in(train_files, reader, only_records),
        evaluation=documents_in(eval_files, reader, only_records) if eval_files else None,
        num_bytes=total_size(train_files + eval_files),
        check=check,
    )


def columns_of(config: DataConfig) -> tuple[list[str], str] | None:
    """Columns of the first record that a recipe names, and its place; None if the recipe names no records.

    Raises:
        DataError: a file or dataset is missing.
    """
    if config.source == "hub":
        return list(_load_split(config, config.dataset_split).column_names), str(config.dataset)
    if config.source == "files":
        for file in find_files(config.files, "data.files", config.cache_dir):
            if has_records(file):
                first = remembered("columns", [file], "", config.cache_dir, lambda: _first_record(file))  # noqa: B023
                return first["columns"], first["place"]
    return None


def _first_record(file: Path) -> dict[str, Any]:
    place, record = next(records_in(file), (str(file), {}))
    return {"columns": list(record) if isinstance(record, dict) else [], "place": place}


# --- files ---------------------------------------------------------------------------------------------------------


def python_stdlib_files() -> list[Path]:
    """The modules of this Python's standard library, without its tests and without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip", "lib-dynload"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("config-"))
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    files = [file for file in files if file.stat().st_size]
    if not files:
        raise DataError(
            f"data.source python_stdlib must find the standard library's source, got no .py file in {root}; "
            "use another Python, or set data.source to files"
        )
    return files


# --- hub -----------------------------------------------------------------------------------------------------------


def stream_dataset(config: DataConfig, split: str) -> Any:
    """Open a split of `data.dataset` as an iterable with shards, without reading any of them.

    Raises:
        DataError: the dataset cannot be loaded.
    """
    return _load_split(config, split, streaming=True)


def _load_split(config: DataConfig, split: str, *, streaming: bool = False) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        tables = saved_tables(Path(str(config.dataset)))
        if tables is not None:  # of Dataset.save_to_disk, which load_dataset refuses
            files = {"train": [str(table) for table in tables]}
            return datasets.load_dataset("arrow", data_files=files, split=split, streaming=streaming)
        return datasets.load_dataset(config.dataset, config.dataset_config, split=split, streaming=streaming)
    except DataError:
        raise
    except Exception as error:  # datasets raises a dozen kinds; each means that the dataset cannot be loaded
        raise DataError(
            f"data.dataset must be a dataset that can be loaded (split {split}), got {config.dataset!r}: {first_line(error)}; "
            "check name, split and network, or give a local folder"
        ) from None


def _hub_corpus(config: DataConfig, read: TextReader | None) -> Corpus:
    reader = read or text_in(config.text_column)

    def load(split: str) -> Any:
        dataset = _load_split(config, split)
        if read is not None:
            return dataset
        if config.text_column not in dataset.column_names:
            columns = ", ".join(map(repr, dataset.column_names))
            raise DataError(
                f"{config.dataset}: must have a column {config.text_column!r}, got {columns}; "
                "set data.text_column, or name questions and answers in data.columns"
            )
        return dataset.select_columns([config.text_column])

    def documents(dataset: Any, split: str) -> Documents:
        schema = dataset.features.arrow_schema

        def read_records(skipped: Skipped, records: Any, first: int = 1) -> Iterator[Document]:
            for number, record in enumerate(records, start=first):
                place = f"{config.dataset} ({split}): record {number}"
                text = reader(as_written(record, schema), place, skipped)
                if text is not None:
                    yield Document(text, None, place)

        def stretches() -> Iterator[Stretch]:
            for begin in range(0, len(dataset), RECORDS):
                yield Stretch((), begin, min(begin + RECORDS, len(dataset)), begin + 1)

        return Documents(
            lambda skipped: read_records(skipped, dataset),
            stretches,
            lambda part, skipped: read_records(skipped, dataset.select(range(part.begin, part.end or 0)), part.first),
        )

    train = load(config.dataset_split)
    evaluation = load(config.eval_split) if config.eval_split else None
    sides = [train] if evaluation is None else [train, evaluation]
    return Corpus(
        key=hash_text(repr(([_records_key(side, config) for side in sides], config.text_column))),
        former_key=hash_text("".join(side._fingerprint for side in sides) + config.text_column),
        train=documents(train, config.dataset_split),
        evaluation=documents(evaluation, config.eval_split) if evaluation is not None and config.eval_split else None,
    )


def _records_key(dataset: Any, config: DataConfig) -> str:
    """Hash of the records, computed once per fingerprint, which on this machine identifies a location and its time."""

    def build(work: Path) -> None:
        digest = xxhash.xxh3_128()
        for batch in dataset.with_format("arrow").iter(batch_size=1024):
            for record in batch.to_pylist():
                digest.update(json.dumps(record, default=str).encode())
        write_facts(work, {"key": digest.hexdigest()})

    name = hash_text(f"records {dataset._fingerprint}")
    return str(read_facts(make_once(cache_folder(config.cache_dir), name, build, is_main_process()))["key"])
