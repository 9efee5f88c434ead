"""Several sources in one run: the rows of each source in step k, again a pure function of (seed, k).

blocks   | b b a b b b a c | b a b b c b a b | ...     every block has the same number of each source's places
source a | epoch 0's permutation | epoch 1's | ...     and each source runs through its own epochs
rows     0 ... | n_a ... | n_a + n_b ...               under one numbering, so nothing else knows of sources
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np
import torch
from torch.utils.data import Dataset

from acc_lm.rows.batch import IGNORE_INDEX, KEPT_APART, HeldOutRows
from acc_lm.rows.order import RowOrder, SourceOrder, keep_two, own_seed, permutation
from acc_lm.rows.text_rows import Rows

BLOCK = 256
"""Minimum rows of a block: small enough that every few steps have the exact shares, large enough to be cheap."""
COUNTED_TOGETHER = 1 << 20
"""Rows whose targets are counted together."""
LARGEST_BLOCK = 1 << 14
"""Maximum rows of a block; weights that no block up to this size has exactly are rounded to a block of this size."""


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of each source in every block; exact for the weights as typed, if a block up to `LARGEST_BLOCK` can be exact.

    Otherwise the counts are rounded down, and the largest remainders get the places that are left.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = math.gcd(*whole)
    whole = [number // common for number in whole]
    total = sum(whole)
    if total <= LARGEST_BLOCK:
        return tuple(number * math.ceil(BLOCK / total) for number in whole)
    counts = [number * LARGEST_BLOCK // total for number in whole]
    remainders = [number * LARGEST_BLOCK % total for number in whole]
    by_remainder = sorted(range(len(whole)), key=lambda i: (-remainders[i], i))
    for i in by_remainder[: LARGEST_BLOCK - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


@dataclass(frozen=True)
class MixedOrder(RowOrder):
    """`RowOrder` of several sources; `num_rows` is the number of rows in one pass over the mixture."""

    sizes: tuple[int, ...] = ()
    """Number of rows of each source."""
    counts: tuple[int, ...] = ()
    """Number of rows of each source in every block."""
    _kept: dict[str, dict[int, np.ndarray]] = field(
        default_factory=lambda: {"rows": {}, "sources": {}}, repr=False, compare=False
    )
    """Rows and sources of the newest two blocks."""
    _counted: dict[int, tuple[int, int, int]] = field(default_factory=dict, repr=False, compare=False)
    """(epoch, number of its rows, their targets) of each source as last counted, so that only later rows are counted."""

    @cached_property
    def _sources_epochs(self) -> list[SourceOrder]:
        return [
            SourceOrder(own_seed(self.seed, number + 2), size, self.shuffle, self.version)
            for number, size in enumerate(self.sizes)
        ]

    def rows_at(self, step: int) -> np.ndarray:
        place, end = self.places_after(step - 1), self.places_after(step)
        block_size = sum(self.counts)
        pieces = []
        while place < end:
            block, offset = divmod(place, block_size)
            count = min(block_size - offset, end - place)
            pieces.append(self._block(block)[offset : offset + count])
            place += count
        return np.concatenate(pieces)

    def _block(self, block: int) -> np.ndarray:
        """Rows of one block: the places of the sources are shuffled, the rows of each source follow its own order."""
        kept = self._kept["rows"]
        if block not in kept:
            source = self._sources(block)
            rows = np.empty(len(source), dtype=np.int64)
            first = 0
            for number, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
                rows[source == number] = first + self._sources_epochs[number].rows_at(block * count, count)
                first += size
            keep_two(kept, block, rows)
        return kept[block]

    def _sources(self, block: int) -> np.ndarray:
        """Source of each place of a block, int64 [block size]."""
        kept = self._kept["sources"]
        if block not in kept:
            places = permutation(own_seed(self.seed, 1), block, sum(self.counts))
            keep_two(kept, block, np.repeat(np.arange(len(self.counts)), self.counts)[places])
        return kept[block]

    def count_rows(self, num_places: int) -> list[int]:
        """Number of rows of each source at the first `num_places` places."""
        block, offset = divmod(num_places, sum(self.counts))
        inside = np.bincount(self._sources(block)[:offset], minlength=len(self.counts))
        return [block * count + int(more) for count, more in zip(self.counts, inside, strict=True)]

    def count_targets(self, rows: MixedRows, num_places: int) -> list[int]:
        """Number of targets of each source at the first `num_places` places."""
        counts = []
        for number, num_rows in enumerate(self.count_rows(num_places)):
            epoch, rest = divmod(num_rows, self.sizes[number])
            full = epoch * rows.parts[number].num_all_targets
            counts.append(full + self._count_targets(number, rows.parts[number], epoch, rest))
        return counts

    def _count_targets(self, source: int, part: HeldOutRows, epoch: int, count: int) -> int:
        """Number of targets of the first `count` rows of a source's epoch."""
        epochs = self._sources_epochs[source]
        if isinstance(part, Rows):  # every row but the last one is full
            missing = len(part) * part.sequence_length - part.num_all_targets
            return count * part.sequence_length - missing * (epochs.place_of(epoch, len(part) - 1) < count)
        done, total = 0, 0
        if source in self._counted and self._counted[source][0] == epoch and self._counted[source][1] <= count:
            _, done, total = self._counted[source]
        for place in range(done, count, COUNTED_TOGETHER):
            rows = epochs.rows_at(epoch * epochs.num_rows + place, min(COUNTED_TOGETHER, count - place))
            total += part.count_targets(rows)
        self._counted[source] = epoch, count, total
        return total


class MixedRows(Dataset[dict[str, torch.Tensor]]):
    """The rows of several sources under one numbering; the same contract as `Rows`, or as `PackedRows` for packed parts.

    Args:
        parts: rows of each source, all of text or all of conversations.
    """

    def __init__(self, parts: Sequence[HeldOutRows]) -> None:
        self.parts, self.sequence_length = parts, parts[0].sequence_length
        self.offsets = np.cumsum([0, *(len(part) for part in parts)])
        self.num_targets = [part.num_all_targets for part in parts]
        """Number of targets of each source."""

    @property
    def num_all_targets(self) -> int:
        return sum(self.num_targets)

    @property
    def packs(self) -> bool:
        return self.parts[0].packs

    @property
    def padded_lengths(self) -> np.ndarray | None:
        lengths = [part.padded_lengths for part in self.parts]
        padded = [part for part in lengths if part is not None]
        return np.concatenate(padded) if padded else None

    @property
    def fill(self) -> tuple[str, str]:
        return KEPT_APART

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([row])

    def __getitems__(self, rows: Iterable[int]) -> dict[str, torch.Tensor]:
        """Batch of these rows, in this order, as their sources return them; narrower rows are padded to the widest."""
        rows = np.asarray(list(rows), dtype=np.int64)
        order, batches = [], []
        for places, part, local in self._by_part(rows):
            order.append(places)
            batches.append(part.__getitems__(local))
        if len(batches) == 1:
            return batches[0]
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        width = max(batch["targets"].shape[1] for batch in batches)
        return {
            name: torch.cat([_widen(batch[name], width, IGNORE_INDEX * (name == "targets")) for batch in batches])[back]
            for name in batches[0]
        }

    def _by_part(self, rows: np.ndarray) -> list[tuple[np.ndarray, HeldOutRows, np.ndarray]]:
        """Triples (places among `rows`, part, rows within it) of each part in use; the empty row is of the first part."""
        number = np.maximum(np.searchsorted(self.offsets, rows, side="right") - 1, 0)
        found = [np.flatnonzero(number == part) for part in range(len(self.parts))]
        return [
            (places, self.parts[part], np.where(rows[places] < 0, -1, rows[places] - self.offsets[part]))
            for part, places in enumerate(found)
            if len(places)
        ]

    def count_targets(self, rows: np.ndarray) -> int:
        """Number of targets in these rows."""
        return sum(part.count_targets(local) for _, part, local in self._by_part(np.asarray(rows)))

    def count_bytes(self, rows: Iterable[int]) -> int:
        """UTF-8 bytes of the text that the targets of these rows stand for."""
        return sum(part.count_bytes(local.tolist()) for _, part, local in self._by_part(np.asarray(list(rows))))


def _widen(tensor: torch.Tensor, width: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)
