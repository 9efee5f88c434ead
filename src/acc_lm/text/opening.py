"""Files opened for reading, compressed ones too; what goes wrong is an error that names the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from acc_lm.errors import DataError


def _open_zstandard(file: Path) -> IO[bytes]:
    import pyarrow

    raw: Any = pyarrow.CompressedInputStream(
        pyarrow.OSFile(str(file)), "zstd"
    )  # several frames, and a cut file is an error
    return io.BufferedReader(raw, 1 << 20)


COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}


def is_compressed(file: Path) -> bool:
    return file.suffix.lower() in COMPRESSED


def suffix_of(file: Path) -> str:
    """Suffix of the content, in lower case: ".jsonl" for a.jsonl and for A.JSONL.gz."""
    return Path(file.stem if is_compressed(file) else file.name).suffix.lower()


@contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Turn a system error on reading into one that names the file, so it is not taken for a failure of an output disk.

    Raises:
        DataError: the file cannot be opened or read.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise DataError(f"{file} must be readable, got: {reason}; repair it or its permissions") from None


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading its bytes, decompressed if it is compressed.

    Raises:
        DataError: the compressed content is damaged or incomplete.
        OSError: the file cannot be opened or read.
    """
    if not is_compressed(file):
        with file.open("rb") as stream:
            yield stream
        return
    try:
        with COMPRESSED[file.suffix.lower()](file) as stream:
            yield stream
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{file} must be a complete {file.suffix} file, got: {reason}; compress it again, or copy it again"
        ) from None


def read_bytes(file: Path) -> bytes:
    """The content of a file, decompressed; errors as in `opened`."""
    with opened(file) as stream:
        return stream.read()
