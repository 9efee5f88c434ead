"""Documents, and the corpus that they form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from acc_lm.errors import DataError


@dataclass(frozen=True)
class Document:
    text: str
    file: str | None
    """Absolute path if the document is an entire file."""
    place: str | None = None
    """`file:line` if the document is a record, for error messages."""


@dataclass
class Skipped:
    """Counter of the records without usable text, up to the number that the recipe tolerates."""

    allowed: int
    count: int = 0

    def reject(self, problem: str) -> None:
        self.count += 1
        if self.count > self.allowed:
            more = f" (after {self.allowed} that data.skip_bad_rows tolerates)" if self.allowed else ""
            raise DataError(f"{problem}{more}; correct it or raise data.skip_bad_rows")


@dataclass(frozen=True)
class Stretch:
    """Consecutive documents that one process can read: some files of a corpus, or a part of one."""

    files: tuple[Path, ...] = ()
    begin: int = 0
    """First byte, row group or record of a part."""
    end: int | None = None
    """End of a part; None: all of the files."""
    first: int = 1
    """Number of the first line or record, for error messages."""
    num_bytes: int = 0
    """Size on disk."""


@dataclass(frozen=True)
class Documents:
    """Documents of a text, to be read in one pass, or stretch by stretch in several processes."""

    read: Callable[[Skipped], Iterator[Document]]
    stretches: Callable[[], Iterator[Stretch]] | None = None
    """Function that cuts the text, in order; None if only one process can read it."""
    read_stretch: Callable[[Stretch, Skipped], Iterator[Document]] | None = None
    num_bytes: int = 0
    """Size on disk."""

    def __call__(self, skipped: Skipped) -> Iterator[Document]:
        return self.read(skipped)


@dataclass(frozen=True)
class Corpus:
    """Text of a recipe before it is tokenised."""

    key: str
    """Hash of the content: equal content has an equal key, wherever it is stored."""
    former_key: str | None
    """Key in the formats up to rows-1, which also hashed names and times; None if they read the text differently."""
    train: Documents
    evaluation: Documents | None
    """The held-out documents; None: a share of `train` is held out."""
    num_bytes: int | None = None
    """Size on disk, for the progress bar."""
    facts: dict[str, Any] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    """Function that raises a `DataError` if the content no longer matches the key."""


TextReader = Callable[[Any, str, Skipped], str | None]
"""Function: (record, its place, counter of skipped records) -> text of its document; None if the record is skipped."""


def text_in(column: str) -> TextReader:
    """Reader of the text in one column of the records."""
    return lambda record, place, skipped: _text_of(record, column, place, skipped)


def _text_of(record: Any, column: str, place: str, skipped: Skipped) -> str | None:
    """The text of a record; None if it has no usable text and the recipe tolerates that."""
    if not isinstance(record, dict):
        skipped.reject(f"{place}: must be an object with a {column!r}, got {kind_of(record)}")
    elif column not in record:
        columns = ", ".join(map(repr, record)) or "none"
        raise DataError(
            f"{place}: must have a column {column!r}, got {columns}; set data.text_column, or name questions and answers in data.columns"
        )
    elif not isinstance(record[column], str):
        skipped.reject(f"{place}: {column!r} must be a string, got {kind_of(record[column])}")
    elif not is_unicode(record[column]):
        skipped.reject(f"{place}: {column!r} must be Unicode text, got a lone surrogate")
    elif not record[column].strip():
        skipped.reject(f"{place}: {column!r} must hold text, got an empty string")
    else:
        return str(record[column])
    return None


def is_unicode(text: str) -> bool:
    """False for text with a lone surrogate, which JSON can spell but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: Any) -> str:
    names = {"NoneType": "null", "list": "a list", "dict": "an object", "str": "a string", "bool": "a boolean"}
    return names.get(type(value).__name__, "a number")


def hash_text(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
