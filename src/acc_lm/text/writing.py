"""Ids of plain text on disk: encoded in any process, written in order by one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from acc_lm.cache import flush_file
from acc_lm.text.documents import Document
from acc_lm.text.encoder import TextEncoder
from acc_lm.text.parts import PART_OF_TEXT, Encoded, in_parts
from acc_lm.text.tokenizer import encode_part


class Writer(Protocol):
    """Writer of one split: `encode` runs in any process, `add` in order in one."""

    def encode(self, part: list[Document]) -> Encoded: ...

    def add(self, encoded: Encoded) -> None: ...


class TextWriter:
    """Writer of plain text, each document followed by the end token.

    Args:
        folder: place of the files `<split>.bin` and `<split>_bytes.bin`.
        dtype: type of an id on disk.
        with_bytes: also write the UTF-8 bytes of each id, and keep the names of documents that are whole files.
        keep_text: keep the text.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        folder: Path,
        split: str,
        dtype: type[np.unsignedinteger],
        *,
        with_bytes: bool = False,
        keep_text: bool = False,
    ) -> None:
        self._encoder, self._dtype, self._keep_text = encoder, dtype, keep_text
        self._ids: IO[bytes] = (folder / f"{split}.bin").open("wb")
        self._bytes = (folder / f"{split}_bytes.bin").open("wb") if with_bytes else None
        self.num_tokens = 0
        self.text = b""
        self.files: list[str] = []

    def encode(self, part: list[Document]) -> Encoded:
        """Arrays of some documents, for `add`."""
        ids, byte_counts, _ = encode_part(part, self._encoder, with_bytes=self._bytes is not None)
        raw = [document.text.encode() for document in part]
        encoded = {"ids": ids.astype(self._dtype), "num_bytes": np.array(sum(map(len, raw)))}
        if self._bytes:
            encoded["bytes"] = byte_counts
            encoded["files"] = np.array([document.file for document in part if document.file], dtype=np.str_)
        if self._keep_text:
            encoded["text"] = np.frombuffer(b"".join(raw), dtype=np.uint8)
        return encoded

    def add(self, encoded: Encoded) -> None:
        """Write the arrays of some documents."""
        self._ids.write(encoded["ids"].tobytes())
        if self._bytes:
            self._bytes.write(encoded["bytes"].tobytes())
            self.files += encoded["files"].tolist()
        if self._keep_text:
            self.text += encoded["text"].tobytes()
        self.num_tokens += len(encoded["ids"])

    def finish(self) -> int:
        """Close the files once their content is on disk; return the number of ids."""
        for file in (self._ids, self._bytes):
            if file:
                flush_file(file)
                file.close()
        return self.num_tokens

    def write(self, documents: Iterable[Document]) -> int:
        """Write all documents of a split and return the number of ids."""
        for part in in_parts(documents, PART_OF_TEXT):
            self.add(self.encode(part))
        return self.finish()
