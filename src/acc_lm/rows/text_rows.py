"""Rows of plain text, cut out of a split's tokens, and the loader that hands them out.

A row holds `sequence_length + 1` ids and overlaps the next by one id, so every token but a split's first is a target.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from acc_lm.losses import IGNORE_INDEX
from acc_lm.order import MicroBatches
from acc_lm.packing import apart, shifted
from acc_lm.streaming import StreamRows

Batch = dict[str, torch.Tensor]


class Rows(Dataset[Batch]):
    """The rows of one split, cut out of its tokens when asked for.

    Args:
        tokens: ids of the whole split, uint16 or uint32 [num_tokens], memory-mapped.
        sequence_length: targets per row.
        bytes_of_token: UTF-8 bytes that each token stands for, uint32 [num_tokens]; None where nobody asks.
        end: id behind each document, at which a position sees nothing before it; None: rows are read as one text.
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

    def __len__(self) -> int:
        return math.ceil((len(self.tokens) - 1) / self.sequence_length)

    def __getitem__(self, row: int) -> Batch:
        return self.__getitems__([row])

    def __getitems__(self, rows: Iterable[int]) -> Batch:
        """input_ids and targets, int64 [B, sequence_length]; targets[t] follows input_ids[t], or is IGNORE_INDEX.

        With an `end`, position_ids and document_ids too, as `packing.apart` makes them.
        Row -1 is an empty row: it fills up the last batch of an evaluation and has no target.
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
        """Targets in these rows."""
        left = len(self.tokens) - 1 - np.asarray(rows) * self.sequence_length
        return int(np.clip(left, 0, self.sequence_length).sum())

    def count_bytes(self, rows: Iterable[int]) -> int:
        """UTF-8 bytes of the text that the targets of these rows stand for."""
        assert self.bytes_of_token is not None
        length = self.sequence_length
        spans = (slice(row * length + 1, (row + 1) * length + 1) for row in rows if row >= 0)
        return sum(int(self.bytes_of_token[span].sum(dtype=np.int64)) for span in spans)


def _keep(batch: Any) -> Any:
    return batch


def _leave_interrupts_to_the_trainer(worker: int) -> None:
    """A terminal sends Ctrl-C to workers too; only the training process decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def build_loader(
    rows: Dataset[Batch], batches: MicroBatches | list[np.ndarray], num_workers: int, *, pin_memory: bool
) -> DataLoader[Batch]:
    """A loader that reads exactly the given micro-batches, in their order; workers only read ahead."""
    if isinstance(rows, StreamRows):
        num_workers = 0  # it has readers of its own
    return DataLoader(
        rows,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=_keep,
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=_leave_interrupts_to_the_trainer if num_workers else None,
    )
