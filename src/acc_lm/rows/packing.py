"""Items (documents, conversations) -> rows that hold several items, none of which attends to another.

    items    aaaaaa  bbb  ccccc  dd          lengths differ a lot: 52,000 Alpaca items fill a quarter of their rows
    rows     |aaaaaadd|  |cccccbbb|          best fit decreasing: 0.1 % of the places stay empty

An item of n ids takes n - 1 places: its last id is predicted but never an input. `position_ids` restart with each item
and `document_ids` number the items of a row, so the loss and gradient of a row are the sums over its items.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from acc_lm.config import DataConfig
from acc_lm.rows.batch import IGNORE_INDEX, Batch

WIDTH = 64
"""Multiple to which the width of a padded batch, its longest item, is rounded up: a compiled model gets few shapes."""
CHUNK_TOKENS = 1 << 22


class Packing(NamedTuple):
    """Items of each row: row r has `items[row_offsets[r]:row_offsets[r + 1]]`."""

    items: np.ndarray
    """Item numbers, int64 [num_items]: every item once; ascending within a row."""
    row_offsets: np.ndarray
    """Start of each row in `items`, and the end: int64 [num_rows + 1]."""


def pack(lengths: np.ndarray, capacity: int) -> Packing:
    """Best fit decreasing: each item, the longest first, goes to the fullest row that still has room for it.

    The result depends on the arguments alone. Rows are ordered by their first item, so the first rows of a split hold both
    short and long items.

    Args:
        lengths: places that each item takes, int [num_items], 1 to `capacity`.
        capacity: places of a row.

    Raises:
        ValueError: an item does not fit into a row, or takes no place.
    """
    lengths = _checked(lengths, capacity)
    row_of = np.empty(len(lengths), dtype=np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(-lengths, return_counts=True)
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r of this integer: some row has exactly r places left. The lowest bit that is high enough is the best fit.
    rooms = 0
    num_rows = place = 0
    for length, count in zip((-distinct).tolist(), counts.tolist(), strict=True):
        while count:
            fits = rooms >> length
            if fits:
                room = length + (fits & -fits).bit_length() - 1
                row = rows_with_room[room].pop()
                if not rows_with_room[room]:
                    rooms ^= 1 << room
            else:
                room, row = capacity, num_rows
                num_rows += 1
            # With this item added, the row is the fullest one, so it also takes the next items of the same length.
            taken = min(count, room // length)
            row_of[longest_first[place : place + taken]] = row
            room -= taken * length
            rows_with_room[room].append(row)
            rooms |= 1 << room
            place, count = place + taken, count - taken
    first_items = np.unique(row_of, return_index=True)[1]
    rank = np.empty(num_rows, dtype=np.int64)
    rank[np.argsort(first_items)] = np.arange(num_rows)
    row_of = rank[row_of]
    return Packing(np.argsort(row_of, kind="stable"), _offsets(np.bincount(row_of, minlength=num_rows)))


def one_per_row(lengths: np.ndarray, capacity: int) -> Packing:
    """Packing for an architecture that cannot keep items apart: each item has its own row, padded at its end."""
    num_items = len(_checked(lengths, capacity))
    return Packing(np.arange(num_items), np.arange(num_items + 1))


def _checked(lengths: np.ndarray, capacity: int) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if len(wrong):
        raise ValueError(f"item {wrong[0]} must take 1 to {capacity} places of a row, got {lengths[wrong[0]]}")
    return lengths


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def shifted(ids: np.ndarray) -> dict[str, torch.Tensor]:
    """input_ids and targets of rows of text, int64 [B, L] each, from ids [B, L + 1].

    Each owns its memory: a view of a larger tensor is copied to a GPU through unpinned memory, and the host waits.
    """
    return {"input_ids": torch.from_numpy(ids[:, :-1].copy()), "targets": torch.from_numpy(ids[:, 1:].copy())}


def apart(ids: np.ndarray, end: int) -> dict[str, torch.Tensor]:
    """position_ids and document_ids of rows of text, int64 [B, L] each, so that no document attends to another.

    An end token is position 0 of the next document, so the first token of a document is predicted from the end token
    alone and no target is lost.
    """
    begins = ids == end
    places = np.arange(ids.shape[1])
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return {"position_ids": torch.from_numpy(positions), "document_ids": torch.from_numpy(begins.cumsum(axis=1))}


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """The rows of one split, assembled from its items on request; the same contract as `Rows`.

    Args:
        tokens: ids of all items, one after the other, uint16 or uint32 [num_tokens], memory-mapped.
        is_target: one bit per token, uint8 [ceil(num_tokens / 8)], lowest bit first; an item's first token never counts.
        item_offsets: start of each item in `tokens`, and the end: int64 [num_items + 1].
        packing: items of each row.
        sequence_length: places of a row.
        padded: rows hold one item each and are only as wide as a batch needs; a batch has no position_ids and
            document_ids, so any causal model can take it.
        bytes_of_token: UTF-8 bytes that each token stands for, uint32 [num_tokens]; None if they are not needed.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        is_target: np.ndarray,
        item_offsets: np.ndarray,
        packing: Packing,
        sequence_length: int,
        *,
        padded: bool = False,
        bytes_of_token: np.ndarray | None = None,
    ) -> None:
        # Plain arrays, because every slice of a numpy memory map costs a microsecond.
        self.tokens, self.is_target, self.item_offsets = map(np.asarray, (tokens, is_target, item_offsets))
        self.bytes_of_token = None if bytes_of_token is None else np.asarray(bytes_of_token)
        self.packing = packing
        self.sequence_length = sequence_length
        self.padded = padded
        item_lengths = np.diff(self.item_offsets)[packing.items] - 1
        self.lengths = np.add.reduceat(item_lengths, packing.row_offsets[:-1])
        """Number of places taken in each row, int64 [num_rows]."""
        if self.lengths.max() > sequence_length or (padded and len(packing.items) != len(self.lengths)):
            raise ValueError(f"packing must be for rows of {sequence_length} places, got {self.lengths.max()}")
        targets_of_item = _count_bits(self.is_target, self.item_offsets)
        self.num_targets = np.add.reduceat(targets_of_item[packing.items], packing.row_offsets[:-1])
        """Number of targets in each row, int64 [num_rows]."""

    @property
    def num_all_targets(self) -> int:
        return int(self.num_targets.sum())

    @property
    def packs(self) -> bool:
        return not self.padded

    @property
    def padded_lengths(self) -> np.ndarray | None:
        return self.lengths if self.padded else None

    @property
    def fill(self) -> tuple[str, str]:
        empty = 1 - self.lengths.sum() / (len(self) * self.sequence_length)
        return "packing", f"{len(self.packing.items) / len(self):.1f} items a row, {empty:.1%} of the places empty"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([row])

    def __getitems__(self, rows: Iterable[int]) -> dict[str, torch.Tensor]:
        """input_ids, targets and, unless padded, position_ids and document_ids, each int64 [B, L].

        targets[t] follows input_ids[t] in its item, or is IGNORE_INDEX. position_ids count from 0 in each item and in
        the padding after the last item, which has its own number in document_ids. L is `sequence_length`; if padded, L is
        as small as the batch allows. Row -1 is an empty row without a target that fills the last batch of an evaluation.
        """
        rows = np.asarray(list(rows), dtype=np.int64)
        item_B, begin_B = self._items_of(rows)
        num_items_B = np.diff(begin_B)
        length_I = self.item_offsets[item_B + 1] - self.item_offsets[item_B] - 1
        taken_I = _offsets(length_I)
        length_B = np.diff(taken_I[begin_B])
        width = self.sequence_length
        if self.padded:
            width = min(width, max(WIDTH, -(-int(length_B.max()) // WIDTH) * WIDTH))
        # P: the taken places, row after row; the position of each in its item, in its row and on disk.
        position_P = np.arange(taken_I[-1]) - np.repeat(taken_I[:-1], length_I)
        row_P = np.repeat(np.arange(len(rows)), length_B)
        column_P = np.arange(taken_I[-1]) - np.repeat(taken_I[begin_B[:-1]], length_B)
        source_P = np.repeat(self.item_offsets[item_B], length_I) + position_P
        ids = np.zeros((len(rows), width), dtype=np.int64)
        targets = np.full((len(rows), width), IGNORE_INDEX, dtype=np.int64)
        ids[row_P, column_P] = self.tokens[source_P]
        targets[row_P, column_P] = np.where(
            self._is_target(source_P + 1), self.tokens[source_P + 1].astype(np.int64), IGNORE_INDEX
        )
        batch = {"input_ids": torch.from_numpy(ids), "targets": torch.from_numpy(targets)}
        if self.padded:
            return batch
        positions = np.arange(width) - length_B[:, None]
        positions[row_P, column_P] = position_P
        documents = np.repeat(num_items_B[:, None], width, axis=1)
        number_I = np.arange(len(item_B)) - np.repeat(begin_B[:-1], num_items_B)
        documents[row_P, column_P] = np.repeat(number_I, length_I)
        return batch | {"position_ids": torch.from_numpy(positions), "document_ids": torch.from_numpy(documents)}

    def _items_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Items of these rows one after the other, and the start of each row among them: [num_items], [B + 1]."""
        offsets = self.packing.row_offsets
        spans = [self.packing.items[offsets[row] : offsets[row + 1]] if row >= 0 else offsets[:0] for row in rows]
        return np.concatenate(spans), _offsets(np.array([len(span) for span in spans]))

    def _is_target(self, places: np.ndarray) -> np.ndarray:
        bits: np.ndarray = self.is_target[places >> 3] >> (places & 7) & 1
        return bits.astype(bool)

    def count_targets(self, rows: np.ndarray) -> int:
        """Number of targets in these rows."""
        rows = np.asarray(rows)
        return int(self.num_targets[rows[rows >= 0]].sum())

    def count_bytes(self, rows: Iterable[int]) -> int:
        """UTF-8 bytes of the text that the targets of these rows stand for."""
        assert self.bytes_of_token is not None
        total = 0
        for item in self._items_of(np.asarray(list(rows), dtype=np.int64))[0]:
            places = np.arange(self.item_offsets[item] + 1, self.item_offsets[item + 1])
            total += int(self.bytes_of_token[places][self._is_target(places)].sum(dtype=np.int64))
        return total

    def units_of(self, rows: np.ndarray, batch: Batch) -> np.ndarray:
        """Number of the item that each target of a batch belongs to, int64 [B, L] or [B, 1]."""
        filled = np.maximum(rows, 0)  # row -1 has no target
        begin, end = (self.packing.row_offsets[filled + more] for more in (0, 1))
        number_BL = batch["document_ids"].numpy() if "document_ids" in batch else np.zeros((1, 1), dtype=np.int64)
        items: np.ndarray = self.packing.items[np.minimum(begin[:, None] + number_BL, end[:, None] - 1)]
        return items


def _count_bits(bits: np.ndarray, item_offsets: np.ndarray) -> np.ndarray:
    """Number of bits set in each item after its first token, int64 [num_items]; reads `CHUNK_TOKENS` bits at a time."""
    begin, end = item_offsets[:-1] + 1, item_offsets[1:]
    before_begin, before_end = np.zeros(len(begin), dtype=np.int64), np.zeros(len(end), dtype=np.int64)
    total = 0
    for start in range(0, int(item_offsets[-1]) + 1, CHUNK_TOKENS):
        chunk = np.unpackbits(bits[start // 8 : (start + CHUNK_TOKENS) // 8], bitorder="little")
        before = _offsets(chunk)
        for places, counts in ((begin, before_begin), (end, before_end)):
            inside = slice(*np.searchsorted(places, [start, start + CHUNK_TOKENS]))
            counts[inside] = total + before[places[inside] - start]
        total += int(before[-1])
    return before_end - before_begin


def open_rows(folder: Path, split: str, dtype: type[np.unsignedinteger], config: DataConfig) -> PackedRows:
    """Open the rows of a split that `ItemWriter` wrote, with several items or one in each, as the recipe says."""

    def load(name: str, kind: Any) -> np.ndarray:
        return np.memmap(folder / name, dtype=kind, mode="r")

    offsets = np.fromfile(folder / f"{split}_offsets.bin", dtype=np.int64)
    lengths = np.diff(offsets) - 1  # an item's last id is predicted but never an input
    packing = (pack if config.packing else one_per_row)(lengths, config.sequence_length)
    has_bytes = (folder / f"{split}_bytes.bin").stat().st_size > 0
    return PackedRows(
        load(f"{split}.bin", dtype),
        load(f"{split}_targets.bin", np.uint8),
        offsets,
        packing,
        config.sequence_length,
        padded=not config.packing,
        bytes_of_token=load(f"{split}_bytes.bin", np.uint32) if has_bytes else None,
    )
