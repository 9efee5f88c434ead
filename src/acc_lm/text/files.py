"""Text files, JSON lines, JSON, CSV, Parquet and Arrow, also compressed -> records, each with its place for errors."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from acc_lm.errors import DataError
from acc_lm.text.documents import Document, Skipped, Stretch, TextReader
from acc_lm.text.opening import is_compressed, opened, read_bytes, reading, suffix_of

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
TABLES = (".parquet", ".arrow")
ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar")
BINARY = 1 << 16  # first bytes of a text file in which a zero byte is looked for
JSON_LINES = 20  # first lines of a text file that are checked for JSON
_ALL = Stretch()
LONGEST_LINE = 100_000_000  # maximum bytes of a record; a file without line breaks would otherwise fill the memory


def has_records(file: Path) -> bool:
    """True for a file of records, by its suffix; any other file is one document."""
    return suffix_of(file) in RECORD_SUFFIXES


def whole_files(files: list[Path]) -> Iterator[Document]:
    for file in files:
        try:
            with reading(file):
                yield Document(file.read_bytes().decode("utf-8"), str(file))
        except UnicodeDecodeError:
            continue  # a few library modules have an old encoding on purpose


def read_files(files: list[Path], read: TextReader, skipped: Skipped, only_records: bool = False) -> Iterator[Document]:
    """All documents of the files: a txt file is one (an error with `only_records`), elsewhere each record is one."""
    for file in files:
        before = skipped.count
        count = 0
        if has_records(file):
            for place, record in records_in(file):
                text = read(record, place, skipped)
                if text is not None:
                    count += 1
                    yield Document(text, None, place)
        elif only_records:
            raise DataError(f"{file} must hold records for this data.format, got a text file; name other files")
        else:
            text = _whole_text(file)
            if text.strip():
                count += 1
                yield Document(text, str(file))
        if count == 0:
            why = f" ({skipped.count - before} skipped)" if skipped.count > before else ""
            raise DataError(f"{file} must hold at least one record with text, got none{why}; remove it or fill it")


def read_shard(file: Path, column: str) -> Iterator[tuple[str, Any]]:
    """Pairs (place, record) of a file; a txt file is one record, with its text in `column`."""
    if has_records(file):
        yield from records_in(file)
    else:
        yield str(file), {column: _whole_text(file)}


def _whole_text(file: Path) -> str:
    if suffix_of(file) in ARCHIVES:  # the headers of tar are UTF-8
        raise DataError(f"{file} must be text or records, got an archive; unpack it, and name the folder")
    with reading(file):
        text = _decode(read_bytes(file), str(file))
    lines = (match[0] for match in islice(re.finditer(r"\S[^\r\n]*", text), JSON_LINES))
    first = [next(lines, ""), next(lines, "")]
    if all(map(_is_json_object, first)) and all(map(_is_json_object, lines)):
        raise DataError(
            f"{file} must be text, got a JSON object on every line; rename it to end in .jsonl, "
            "or store the JSON as the text of a record to train on its braces too"
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
        if b"\0" in raw[:BINARY]:
            raise DataError(
                f"{place}: must be text in UTF-8, got binary data; leave it out, e.g. with a glob such as **/*.txt"
            ) from None
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        at = place if place.rpartition(":")[2].isdigit() else f"{place}:{line}"
        raise DataError(
            f"{at}: must be UTF-8, got byte {raw[error.start]:#04x} at column {column}; convert it with iconv -t UTF-8"
        ) from None


def records_in(file: Path, part: Stretch | None = None) -> Iterator[tuple[str, Any]]:
    """Pairs (place for error messages, record) of a file, or of a part of a file of JSON lines or Parquet."""
    reader = dict(zip(RECORD_SUFFIXES, (_jsonl, _jsonl, _json, _csv, _parquet, _arrow), strict=True))
    suffix = suffix_of(file)
    if suffix in TABLES and is_compressed(file):
        raise DataError(f"{file} must be a {suffix} file as it is, got one compressed once more; decompress it")
    with reading(file):
        yield from reader[suffix](file, *([] if part is None else [part]))


def _jsonl(file: Path, part: Stretch = _ALL) -> Iterator[tuple[str, Any]]:
    with opened(file) as stream:
        if part.begin:
            stream.seek(part.begin)
        lines = iter(lambda: stream.readline(LONGEST_LINE + 1), b"")
        if part.end is not None:
            lines = _until(part.end - part.begin, lines)
        for number, raw in enumerate(lines, start=part.first):
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
                except (ValueError, RecursionError) as error:  # a number with thousands of digits, endless brackets
                    why = (
                        f"{error.msg} at column {error.colno}"
                        if isinstance(error, json.JSONDecodeError)
                        else str(error)
                    )
                    raise DataError(
                        f"{place}: must be a JSON object, got {line.strip()[:80]!r} ({why}); correct that line"
                    ) from None


def _until(size: int, lines: Iterator[bytes]) -> Iterator[bytes]:
    while size > 0 and (line := next(lines, b"")):
        size -= len(line)
        yield line


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        values = json.loads(_decode(read_bytes(file), str(file)))
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
    reader = csv.reader(io.StringIO(_decode(read_bytes(file), str(file)), newline=""), strict=True)
    columns: list[str] | None = None
    begin = 1  # line where the record begins
    try:
        for values in reader:
            if columns is None and values:
                columns = values
                _check_names(columns, f"{file}:{begin}")
            elif columns is not None and values:
                if len(values) != len(columns):  # an unquoted comma or line break cuts a text short
                    raise DataError(
                        f"{file}:{begin}: must have {len(columns)} fields as the first line has, got {len(values)}; "
                        "put quotes around a text with commas or line breaks"
                    )
                yield f"{file}:{reader.line_num}", dict(zip(columns, values, strict=True))
            begin = reader.line_num + 1
    except csv.Error as error:
        problem = str(error).replace("unexpected end of data", "a quote that is opened there and never closed")
        raise DataError(f"{file}:{begin}: must be CSV, got: {problem}; correct that line") from None


def _parquet(file: Path, part: Stretch = _ALL) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    groups = None if part.end is None else range(part.begin, part.end)
    try:
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        yield from _arrow_batches(file, table.iter_batches(batch_size=1024, row_groups=groups), part.first)
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
    """Error for a file that pyarrow cannot read; an error of the system is returned unchanged."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return DataError(f"{file} must be {kind}, got {' '.join(str(error).split())[:120]}; write the file again")


def _arrow_batches(file: Path, batches: Any, first: int = 1) -> Iterator[tuple[str, Any]]:
    number = first - 1
    for batch in batches:
        _check_names(batch.schema.names, str(file))
        batch.validate(full=True)  # offsets and lengths of a damaged file could point anywhere
        for record in batch.to_pylist():
            number += 1
            yield f"{file}: record {number}", as_written(record, batch.schema)


def as_written(record: dict[str, Any], schema: Any) -> dict[str, Any]:
    """A record of a table without the nulls that are in its structs only because all records have the same keys."""
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
