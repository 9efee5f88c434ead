"""Rows of plain text, cut out of a split's tokens.

A row holds `sequence_length + 1` ids and overlaps the next by one id, so every token but a split's first is a target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from torch.utils.data import Dataset

from acc_lm.rows.batch import IGNORE_INDEX, KEPT_APART, Batch
from acc_lm.rows.packing import apart, shifted


class Rows(Dataset[Batch]):
    """The rows of one split, cut out of its tokens on request.

    Args:
        tokens: ids of the entire split, uint16 or uint32 [num_tokens], memory-mapped.
        sequence_length: targets per row.
        bytes_of_token: UTF-8 bytes that each token stands for, uint32 [num_tokens]; None if they are not needed.
        end: id of the token after each document, before which later positions see nothing; None: a row is one text.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence_length: int,
        bytes_of_token: np.ndarray | None = None,
        end: int | None = None,
    ) -> None:
        self.tokens = np.asarray(tokens)
        self.sequence_length = sequence_length
        self.bytes_of_token = bytes_of_token
        self.end = end

    @property
    def num_all_targets(self) -> int:
        return len(self.tokens) - 1

    @property
    def packs(self) -> bool:
        return self.end is not None

    @property
    def padded_lengths(self) -> None:
        return None

    @property
    def fill(self) -> tuple[str, str]:
        return KEPT_APART

    def __len__(self) -> int:
        return math.ceil((len(self.tokens) - 1) / self.sequence_length)

    def __getitem__(self, row: int) -> Batch:
        return self.__getitems__([row])

    def __getitems__(self, rows: Iterable[int]) -> Batch:
        """input_ids and targets, int64 [B, sequence_length]; targets[t] follows input_ids[t], or is IGNORE_INDEX.

        With an `end`, the batch also has position_ids and document_ids, as `packing.apart` builds them.
        Row -1 is an empty row without a target that fills the last batch of an evaluation.
        """
        rows = rows.tolist() if isinstance(rows, np.ndarray) else list(rows)  # Python's own integers index faster
        length = self.sequence_length
        ids = np.empty((len(rows), length + 1), dtype=np.int64)
        short: list[tuple[int, int]] = []
        for i, row in enumerate(rows):
            start = row * length
            piece = self.tokens[start : start + length + 1] if row >= 0 else self.tokens[:0]
            ids[i, : len(piece)] = piece
            if len(piece) <= length:
                ids[i, len(piece) :] = 0
                short.append((i, max(len(piece), 1)))
        batch = shifted(ids)
        for i, count in short:
            batch["targets"][i, count - 1 :] = IGNORE_INDEX
        return batch if self.end is None else batch | apart(ids[:, :-1], self.end)

    def count_targets(self, rows: np.ndarray) -> int:
        """Number of targets in these rows."""
        missing = len(self) * self.sequence_length - self.num_all_targets  # of the last row
        return len(rows) * self.sequence_length - missing * int(np.count_nonzero(rows == len(self) - 1))

    def count_bytes(self, rows: Iterable[int]) -> int:
        """UTF-8 bytes of the text that the targets of these rows stand for."""
        assert self.bytes_of_token is not None
        length = self.sequence_length
        spans = (slice(row * length + 1, (row + 1) * length + 1) for row in rows if row >= 0)
        return sum(int(self.bytes_of_token[span].sum(dtype=np.int64)) for span in spans)

    def units_of(self, rows: np.ndarray, batch: Batch) -> np.ndarray:
        """Number of the token that each target of a batch is, int64 [B, sequence_length]."""
        return rows[:, None] * self.sequence_length + 1 + np.arange(self.sequence_length)
