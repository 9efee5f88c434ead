"""A batch of rows, and the contract of everything that rows are taken from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

IGNORE_INDEX = -100


Batch = dict[str, torch.Tensor]


class RowSource(Protocol):
    """Rows of a split, whether of text, of packed items, of a mixture or of streams."""

    sequence_length: int

    @property
    def packs(self) -> bool:
        """True if a row holds several documents that must not attend to each other."""

    @property
    def padded_lengths(self) -> np.ndarray | None:
        """Places taken in each row, int64 [num_rows], if a batch is only as wide as its longest row; None: all rows are full."""

    @property
    def fill(self) -> tuple[str, str]:
        """(name, text) for the start block: how rows are filled, if they pack documents."""

    def __getitems__(self, rows: Iterable[int]) -> Batch:
        """input_ids and targets, int64 [B, L], and position_ids and document_ids where rows pack; row -1 is empty."""

    def count_targets(self, rows: np.ndarray) -> int:
        """Number of targets in these rows."""


class HeldOutRows(RowSource, Protocol):
    """Rows that can be counted and evaluated: all but those of streams."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Batch: ...

    @property
    def num_all_targets(self) -> int:
        """Number of targets in all rows."""

    def count_bytes(self, rows: Iterable[int]) -> int:
        """UTF-8 bytes of the text that the targets of these rows stand for."""


class ScoredRows(HeldOutRows, Protocol):
    """Rows that are scored document by document."""

    def units_of(self, rows: np.ndarray, batch: Batch) -> np.ndarray:
        """Number of the token, or of the item, that each target of a batch belongs to, int64 [B, L] or broadcastable to it."""


KEPT_APART = ("documents", "none sees another")


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
