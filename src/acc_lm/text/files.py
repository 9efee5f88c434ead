"""Text in whatever form users have it -> an iterator of documents, with every bad input named by file and line."""

from __future__ import annotations

import csv
import difflib
import glob
import io
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from acc_lm.cache import cache_folder, make_once, read_facts, write_facts
from acc_lm.config import DataConfig
from acc_lm.errors import DataError, is_main_process

SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
JSON_LINES = 20  # first lines of a text file that are looked at for JSON
LONGEST_LINE = 100_000_000  # bytes of a record; a file without line breaks would otherwise fill the memory


@dataclass(frozen=True)
class Document:
    text: str
    file: str | None
    """Absolute path when the document is a whole file."""
    place: str | None = None
    """`file:line` when it is a record, for error messages."""


@dataclass
class Skipped:
    """Counts the records without usable text, up to what the recipe tolerates."""

    allowed: int
    count: int = 0

    def reject(self, problem: str) -> None:
        self.count += 1
        if self.count > self.allowed:
            more = f" (after {self.allowed} that data.skip_bad_rows tolerates)" if self.allowed else ""
            raise DataError(f"{problem}{more}; correct it or raise data.skip_bad_rows")


@dataclass(frozen=True)
class Corpus:
    """The text of a recipe before it is tokenised."""

    key: str
    """Hash of the content; equal content, equal key, wherever it lies."""
    former_key: str | None
    """Key that acc-lm gave it up to rows-1, by names and times too; None when it was read otherwise then."""
    train: Callable[[Skipped], Iterator[Document]]
    evaluation: Callable[[Skipped], Iterator[Document]] | None
    """None: a share of `train` is held out."""
    num_bytes: int | None = None
    """Size on disk, for the progress bar."""
    facts: dict[str, Any] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    """Raises a `DataError` when the content is no longer that of the key."""


Reader = Callable[[Any, str, Skipped], str | None]
"""(record, its place, what is counted when it has none) -> text of the document that the record is."""


def text_in(column: str) -> Reader:
    """Reads the text in one column of the records."""
    return lambda record, place, skipped: _text_of(record, column, place, skipped)


def open_corpus(config: DataConfig, seed: int, read: Reader | None = None) -> Corpus:
    """Find the text that a recipe names, without reading more of it than its hash needs.

    Args:
        read: what a record's document is; None: the text in `data.text_column`.

    Raises:
        DataError: a file, column or dataset is missing or empty.
    """
    if config.source == "synthetic":
        return _synthetic_corpus(config, seed)
    if config.source == "hub":
        return _hub_corpus(config, read)
    if config.source == "python_stdlib":
        files = python_stdlib_files()
        size = _total_size(files)
        return Corpus(*content_keys(files, "utf-8"), lambda skipped: _whole_files(files), None, size)
    train_files = find_files(config.files, "data.files")
    eval_files = find_files(config.eval_files, "data.eval_files") if config.eval_files else []
    only_records, reader = read is not None, read or text_in(config.text_column)
    sides = [(side, *content_keys(side, config.text_column)) for side in (train_files, eval_files)]

    def check() -> None:
        for side, key, _ in sides:
            check_content(side, config.text_column, key)

    former_keys = [former_key for _, _, former_key in sides]
    return Corpus(
        key="".join(key for _, key, _ in sides),
        former_key=None if None in former_keys else "".join(map(str, former_keys)),
        train=lambda skipped: read_files(train_files, reader, skipped, only_records),
        evaluation=(lambda skipped: read_files(eval_files, reader, skipped, only_records)) if eval_files else None,
        num_bytes=_total_size(train_files + eval_files),
        check=check,
    )


def columns_of(config: DataConfig) -> tuple[list[str], str] | None:
    """Columns of the first record that a recipe names, and where that is; None when it names no records.

    Raises:
        DataError: a file or dataset is missing.
    """
    if config.source == "hub":
        return list(_load_split(config, config.dataset_split).column_names), str(config.dataset)
    if config.source == "files":
        for file in find_files(config.files, "data.files"):
            if has_records(file):
                place, record = next(_records(file), (str(file), {}))
                return (list(record) if isinstance(record, dict) else []), place
    return None


# --- files ---------------------------------------------------------------------------------------------------------


def find_files(patterns: tuple[str, ...], key: str) -> list[Path]:
    """The files that paths and globs name, each once, in order."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        with reading(pattern):
            found |= dict.fromkeys(_matches(pattern, key))
    empty = [file for file in found if file.stat().st_size == 0]
    if empty:
        raise DataError(
            *(f"{file} must hold text, got an empty file (0 bytes); remove it from {key}" for file in empty)
        )
    return list(found)


def _matches(pattern: str, key: str) -> list[Path]:
    full = os.path.expanduser(pattern)
    matches = (
        [full] if os.path.isfile(full) else sorted(p for p in glob.glob(full, recursive=True) if os.path.isfile(p))
    )
    if not matches:
        folder = os.path.dirname(full) or "."
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        near = difflib.get_close_matches(os.path.basename(full), names, n=1)
        hint = f"paths are relative to {os.getcwd()}" if not os.path.isabs(pattern) else f"correct {key}"
        hint = f"nearest: {os.path.join(folder, near[0])}" if near else hint
        if os.path.isdir(full):
            wanted = f"name a file; a folder is named with a glob such as {os.path.join(pattern, '*.txt')}"
        else:
            wanted = "fit at least one file" if glob.has_magic(full) else "name an existing file"
        raise DataError(f"{key} must {wanted}, got {pattern!r}; {hint}")
    return [Path(match).absolute() for match in matches]


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
            f"data.source python_stdlib must find the library's source, got no .py file in {root}; "
            "use another Python, or set data.source to files"
        )
    return files


def has_records(file: Path) -> bool:
    """Whether a file is of records, by its name; any other is one document."""
    return file.suffix.lower() in RECORD_SUFFIXES


@contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Name the file when the system refuses to read it, which says nothing about any disk that is written to.

    Raises:
        DataError: it cannot be opened or read.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise DataError(f"{file} must be readable, got: {reason}; repair it or its permissions") from None


def _whole_files(files: list[Path]) -> Iterator[Document]:
    for file in files:
        try:
            with reading(file):
                yield Document(file.read_bytes().decode("utf-8"), str(file))
        except UnicodeDecodeError:
            continue  # a handful of library modules are kept in an old encoding on purpose


def read_files(files: list[Path], read: Reader, skipped: Skipped, only_records: bool = False) -> Iterator[Document]:
    """All documents of the files; a txt file is one (unless there may be only records), elsewhere a record is one."""
    for file in files:
        before = skipped.count
        count = 0
        if has_records(file):
            for place, record in _records(file):
                text = read(record, place, skipped)
                if text is not None:
                    count += 1
                    yield Document(text, None, place)
        elif only_records:
            raise DataError(f"{file} must hold records for this data.format, got a text file; name others")
        else:
            text = _whole_text(file)
            if text.strip():
                count += 1
                yield Document(text, str(file))
        if count == 0:
            why = f" ({skipped.count - before} skipped)" if skipped.count > before else ""
            raise DataError(f"{file} must hold at least one record with text, got none{why}; remove it or fill it")


def read_shard(file: Path, column: str) -> Iterator[tuple[str, Any]]:
    """(place, record) of each record of a file; a txt file is one, with its text in `column`."""
    if has_records(file):
        yield from _records(file)
    else:
        yield str(file), {column: _whole_text(file)}


def _whole_text(file: Path) -> str:
    with reading(file):
        text = _decode(file.read_bytes(), str(file))
    lines = (match[0] for match in islice(re.finditer(r"\S[^\r\n]*", text), JSON_LINES))
    first = [next(lines, ""), next(lines, "")]
    if all(map(_is_json_object, first)) and all(map(_is_json_object, lines)):
        raise DataError(
            f"{file} must be text, got a JSON object on every line; give it a name that ends in .jsonl, "
            "or make the JSON the text of a record to learn the braces too"
        )
    return text


def _is_json_object(line: str) -> bool:
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _decode(raw: bytes, place: str) -> str:
    for mark, name in ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")):
        if raw.startswith(mark):
            raise DataError(
                f"{place}: must be UTF-8, got {name} (by its byte order mark); convert it with iconv -f {name} -t UTF-8"
            )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        at = place if place.rpartition(":")[2].isdigit() else f"{place}:{line}"
        raise DataError(
            f"{at}: must be UTF-8, got byte {raw[error.start]:#04x} at column {column}; convert it with iconv -t UTF-8"
        ) from None


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """(place for error messages, record) of each record of a file."""
    reader = dict(zip(RECORD_SUFFIXES, (_jsonl, _jsonl, _json, _csv, _parquet, _arrow), strict=True))
    with reading(file):
        yield from reader[file.suffix.lower()](file)


def _jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, raw in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
            place = f"{file}:{number}"
            if len(raw) > LONGEST_LINE:
                raise DataError(
                    f"{place}: must be a line of at most {LONGEST_LINE // 10**6} MB, got a longer one; split its text into records, "
                    "or use a txt file, which is one document"
                )
            line = _decode(raw, place)
            if line.strip():
                try:
                    yield place, json.loads(line)
                except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
                    why = (
                        f"{error.msg} at column {error.colno}"
                        if isinstance(error, json.JSONDecodeError)
                        else str(error)
                    )
                    raise DataError(
                        f"{place}: must be a JSON object, got {line.strip()[:80]!r} ({why}); correct that line"
                    ) from None


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        values = json.loads(_decode(file.read_bytes(), str(file)))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{error.lineno}: must be JSON, got {error.msg} at column {error.colno}; correct that line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} must be JSON, got: {error}; correct it") from None
    if not isinstance(values, list):
        raise DataError(
            f"{file} must be a JSON list of objects, got {type(values).__name__}; use jsonl for one object per line"
        )
    for number, value in enumerate(values, start=1):
        yield f"{file}: record {number}", value


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(io.StringIO(_decode(file.read_bytes(), str(file)), newline=""), strict=True)
    columns: list[str] | None = None
    begin = 1  # line on which the record begins
    try:
        for values in reader:
            if columns is None and values:
                columns = values
                _check_names(columns, f"{file}:{begin}")
            elif columns is not None and values:
                if len(values) != len(columns):  # a comma or a line break in a text without quotes cuts it short
                    raise DataError(
                        f"{file}:{begin}: must have {len(columns)} fields as the first line has, got {len(values)}; "
                        "put quotes around a text with commas or line breaks"
                    )
                yield f"{file}:{reader.line_num}", dict(zip(columns, values, strict=True))
            begin = reader.line_num + 1
    except csv.Error as error:
        problem = str(error).replace("unexpected end of data", "a quote that is opened there and never closed")
        raise DataError(f"{file}:{begin}: must be CSV, got: {problem}; correct that line") from None


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        yield from _arrow_batches(file, table.iter_batches(batch_size=1024))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # a corrupt page is an OSError
        raise _no_table(file, "a Parquet file", error) from None


def _arrow(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(file)) as source:
            is_stream = source.read(6) != b"ARROW1"
            source.seek(0)
            if is_stream:
                yield from _arrow_batches(file, iter(pyarrow.ipc.open_stream(source)))
            else:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
                yield from _arrow_batches(file, batches)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # a corrupt page is an OSError
        raise _no_table(file, "an Arrow file", error) from None


def _no_table(file: Path, kind: str, error: Exception) -> Exception:
    """The error of a file that pyarrow cannot read; the system's own stays what it is."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return DataError(f"{file} must be {kind}, got {' '.join(str(error).split())[:120]}; write it again")


def _arrow_batches(file: Path, batches: Any) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in batches:
        _check_names(batch.schema.names, str(file))
        batch.validate(full=True)  # offsets and lengths of a damaged file would be followed anywhere
        for record in batch.to_pylist():
            number += 1
            yield f"{file}: record {number}", _as_written(record, batch.schema)


def _as_written(record: dict[str, Any], schema: Any) -> dict[str, Any]:
    """A record of a table without the nulls that stand in its structs only because all records have equal keys."""
    import pyarrow.types as kinds

    def without(value: Any, kind: Any) -> Any:
        if value is not None and kinds.is_struct(kind):
            return {
                field.name: without(value[field.name], field.type) for field in kind if value[field.name] is not None
            }
        if value is not None and (kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)):
            return [without(inner, kind.value_type) for inner in value]
        return value

    return {field.name: without(record[field.name], field.type) for field in schema}


def _check_names(columns: list[str], place: str) -> None:
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise DataError(f"{place}: must name each column once, got {twice[0]!r} twice; rename one")


def _text_of(record: Any, column: str, place: str, skipped: Skipped) -> str | None:
    """The text of a record; None when it has none and the recipe tolerates that."""
    if not isinstance(record, dict):
        skipped.reject(f"{place}: must be an object with a {column!r}, got {kind_of(record)}")
    elif column not in record:
        columns = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{place}: must have a column {column!r}, got {columns}; set data.text_column")
    elif not isinstance(record[column], str):
        skipped.reject(f"{place}: {column!r} must be a string, got {kind_of(record[column])}")
    elif not is_unicode(record[column]):
        skipped.reject(f"{place}: {column!r} must be Unicode text, got half of a character (a lone surrogate)")
    elif not record[column].strip():
        skipped.reject(f"{place}: {column!r} must hold text, got an empty string")
    else:
        return str(record[column])
    return None


def is_unicode(text: str) -> bool:
    """False for text that JSON can spell but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: Any) -> str:
    names = {"NoneType": "null", "list": "a list", "dict": "an object", "str": "a string", "bool": "a boolean"}
    return names.get(type(value).__name__, "a number")


def content_keys(files: list[Path], extra: str) -> tuple[str, str | None]:
    """Hash of contents and kinds of files, and as up to rows-1 of their names too, None where a kind was not known then.

    Neither folder nor time counts, so that a corpus can be moved.
    """
    digest, former = xxhash.xxh3_128(extra.encode()), xxhash.xxh3_128(extra.encode())
    for file in files:
        with reading(file), file.open("rb") as stream:
            size, suffix = os.fstat(stream.fileno()).st_size, file.suffix.lower() if has_records(file) else ".txt"
            digest.update(f"\0{'.jsonl' if suffix == '.ndjson' else suffix}\0{size}\0".encode())
            former.update(f"\0{file.name}\0{size}\0".encode())
            while block := stream.read(1 << 24):
                digest.update(block)
                former.update(block)
    return digest.hexdigest(), former.hexdigest() if were_known(files) else None


def were_known(files: list[Path]) -> bool:
    """Whether up to rows-1 the names of these files said the same of what they hold."""
    return all(file.suffix in RECORD_SUFFIXES and file.suffix != ".ndjson" for file in files if has_records(file))


def check_content(files: list[Path], extra: str, key: str) -> None:
    """Refuse files that were written to after their key was made, for what was read of them is of neither content.

    Raises:
        DataError: naming the file that was written to last.
    """
    if content_keys(files, extra)[0] != key:
        newest = max(files, key=lambda file: file.stat().st_mtime_ns)
        raise DataError(
            f"{newest} must stay as it is while it is read, got other content at the end; start again once it is complete"
        )


def hash_text(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _total_size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


# --- hub -----------------------------------------------------------------------------------------------------------


def stream_dataset(config: DataConfig, split: str) -> Any:
    """A split of `data.dataset` as an iterable with shards, of which nothing has been read.

    Raises:
        DataError: it cannot be had.
    """
    return _load_split(config, split, streaming=True)


def _load_split(config: DataConfig, split: str, *, streaming: bool = False) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(config.dataset, config.dataset_config, split=split, streaming=streaming)
    except Exception as error:  # datasets raises a dozen kinds; each means that the recipe's dataset cannot be had
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"data.dataset must be a dataset that can be loaded (split {split}), got {config.dataset!r}: {reason}; "
            "check name, split and network, or give a local folder"
        ) from None


def _hub_corpus(config: DataConfig, read: Reader | None) -> Corpus:
    reader = read or text_in(config.text_column)

    def load(split: str) -> Any:
        dataset = _load_split(config, split)
        if read is not None:
            return dataset
        if config.text_column not in dataset.column_names:
            columns = ", ".join(map(repr, dataset.column_names))
            raise DataError(
                f"{config.dataset}: must have a column {config.text_column!r}, got {columns}; set data.text_column"
            )
        return dataset.select_columns([config.text_column])

    def documents(dataset: Any, split: str) -> Callable[[Skipped], Iterator[Document]]:
        def iterate(skipped: Skipped) -> Iterator[Document]:
            schema = dataset.features.arrow_schema
            for number, record in enumerate(dataset, start=1):
                place = f"{config.dataset} ({split}): record {number}"
                text = reader(_as_written(record, schema), place, skipped)
                if text is not None:
                    yield Document(text, None, place)

        return iterate

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
    """Hash of the records, made once for each fingerprint, which on this machine stands for a place and its time."""

    def build(work: Path) -> None:
        digest = xxhash.xxh3_128()
        for batch in dataset.with_format("arrow").iter(batch_size=1024):
            for record in batch.to_pylist():
                digest.update(json.dumps(record, default=str).encode())
        write_facts(work, {"key": digest.hexdigest()})

    name = hash_text(f"records {dataset._fingerprint}")
    return str(read_facts(make_once(cache_folder(config.cache_dir), name, build, is_main_process()))["key"])


# --- synthetic -----------------------------------------------------------------------------------------------------


def transition_matrix(seed: int, num_symbols: int = len(SYMBOLS)) -> np.ndarray:
    """Transition probabilities of the synthetic chain, float64 [num_symbols, num_symbols]; rows sum to 1."""
    weights: np.ndarray = np.random.RandomState(seed).gamma(0.3, size=(num_symbols, num_symbols)) + 1e-3
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def entropy_rate(transitions: np.ndarray) -> float:
    """Nats per symbol that no model can go below, of a first-order chain in its stationary state."""
    values, vectors = np.linalg.eig(transitions.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    return float(-(stationary[:, None] * transitions * np.log(transitions)).sum())


def _synthetic_corpus(config: DataConfig, seed: int) -> Corpus:
    """One chain, two independent walks over it: one to train on, one held out."""
    transitions = transition_matrix(seed)
    cumulative = transitions.cumsum(axis=1)

    def walk(salt: int, length: int) -> Iterator[Document]:
        uniform = np.random.RandomState([seed, salt]).random_sample(length)
        state, states = 0, np.empty(length, dtype=np.int64)
        for i in range(length):
            state = min(int(np.searchsorted(cumulative[state], uniform[i])), len(SYMBOLS) - 1)
            states[i] = state
        yield Document("".join(np.array(list(SYMBOLS))[states]), None)

    held_out = max(1000, int(config.synthetic_tokens * config.eval_fraction))
    key = hash_text(f"synthetic-1 {seed} {config.synthetic_tokens} {held_out}")
    return Corpus(
        key=key,
        former_key=key,
        train=lambda skipped: walk(0, config.synthetic_tokens),
        evaluation=lambda skipped: walk(1, held_out),
        facts={"entropy_rate": entropy_rate(transitions)},
    )
