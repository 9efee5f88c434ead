"""Files -> stretches that several processes read at once, each a few megabytes where the format allows it."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path

from acc_lm.text.contents import total_size
from acc_lm.text.documents import Document, Documents, Skipped, Stretch, TextReader
from acc_lm.text.files import LONGEST_LINE, read_files, records_in
from acc_lm.text.opening import is_compressed, reading, suffix_of

STRETCH = 4_000_000
"""Bytes of a stretch, at least, if its file can be cut."""


def documents_in(files: list[Path], read: TextReader, only_records: bool = False) -> Documents:
    """Documents of some files, as `read_files` reads them."""

    def read_stretch(stretch: Stretch, skipped: Skipped) -> Iterator[Document]:
        if stretch.end is None:
            yield from read_files(list(stretch.files), read, skipped, only_records)
            return
        for place, record in records_in(stretch.files[0], stretch):
            text = read(record, place, skipped)
            if text is not None:
                yield Document(text, None, place)

    return Documents(
        lambda skipped: read_files(files, read, skipped, only_records),
        lambda: stretches_of(files),
        read_stretch,
        total_size(files),
    )


def stretches_of(files: list[Path]) -> Iterator[Stretch]:
    """Stretches of the files, in order: a part of a large file of JSON lines or Parquet, or one or more whole files."""
    small: list[Path] = []
    size = 0
    for file in files:
        with reading(file):
            own = file.stat().st_size
        suffix = suffix_of(file)
        cut = {".jsonl": _cut_lines, ".ndjson": _cut_lines, ".parquet": _cut_table}.get(suffix)
        if cut is not None and own > STRETCH and not is_compressed(file):
            if small:
                yield Stretch(tuple(small), num_bytes=size)
            yield from list(cut(file)) or [Stretch((file,), num_bytes=own)]
            small, size = [], 0
            continue
        if small and size + own > STRETCH:
            yield Stretch(tuple(small), num_bytes=size)
            small, size = [], 0
        small.append(file)
        size += own
    if small:
        yield Stretch(tuple(small), num_bytes=size)


def _cut_lines(file: Path) -> Iterator[Stretch]:
    """Parts of a file of JSON lines, cut after a line; white space is left out, and counted for the number of lines."""
    begin, first = 0, 1
    with reading(file), file.open("rb") as stream:
        while block := stream.read(STRETCH):
            block += stream.readline(LONGEST_LINE + 1)
            if block.removeprefix(BOM_UTF8).strip():
                yield Stretch((file,), begin, begin + len(block), first, len(block))
            begin += len(block)
            first += block.count(b"\n")


def _cut_table(file: Path) -> Iterator[Stretch]:
    """Parts of a Parquet file, of whole row groups; nothing if it cannot be opened, which its reader reports."""
    import pyarrow.parquet

    try:
        about = pyarrow.parquet.ParquetFile(file).metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
    except (pyarrow.ArrowException, OSError):
        return
    begin, first, size, num_rows = 0, 1, 0, 0
    for number, group in enumerate(groups, start=1):
        size, num_rows = size + group.total_byte_size, num_rows + group.num_rows
        if num_rows and (size >= STRETCH or number == len(groups)):
            yield Stretch((file,), begin, number, first, size)
            begin, first, size, num_rows = number, first + num_rows, 0, 0
