"""Rows of optimizer step k: a pure function of (seed, k, global batch size) and nothing else.

The permutations of the epochs form one endless sequence of places; step k (first = 1) takes places [(k-1)G, kG), where G
is the global batch size. So no batch is short, every row comes once per epoch, and the position of a run is one integer.

    places   0 ........ N-1 | N ....... 2N-1 | ...
    rows     permutation 0  | permutation 1  | ...
    steps    | 1 | 2 | 3 |  4 | 5 | 6 |  7 | ...         a step may span two epochs

A run that resumes with another global batch size continues at the next place, so its steps lag by some places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

import numpy as np

ROW_ORDER = 2
"""Version of the order of new runs; a checkpoint stores its own. Version 1 sorts an epoch of any size."""
SORTED_ROWS = 1 << 16
"""Maximum rows of an epoch whose permutation is sorted, in every version, and kept: half a megabyte, ten milliseconds."""
PLACES_TOGETHER = 1 << 12
"""Places of a larger epoch whose rows are computed together."""
NUM_ROUNDS = 8


def permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Order of the rows in one epoch, int64 [num_rows].

    Sorting the raw output of a counter-based generator is stable across numpy versions, unlike `Generator.permutation`.
    """
    keys = np.random.Philox(key=(seed << 64) | epoch).random_raw(num_rows)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


def own_seed(seed: int, number: int) -> int:
    """Seed of one of several orders (`number` from 1, below 2**32) of a run."""
    return number << 32 | seed


class Bijection:
    """A permutation of any number of rows whose single places are computed on their own, in a time that is constant.

    A Feistel network with keyed rounds permutes the numbers of the fewest bits that hold `num_rows`. A result that is
    no row is permuted again until it is one (cycle walking), fewer than twice on average.
    """

    def __init__(self, seed: int, epoch: int, num_rows: int) -> None:
        num_bits = max((num_rows - 1).bit_length(), 2)
        self.num_rows = num_rows
        self._low_bits = num_bits // 2
        self._high_bits = num_bits - self._low_bits
        self._keys = np.random.Philox(key=(seed << 64) | epoch).random_raw(NUM_ROUNDS)

    def rows_at(self, places: np.ndarray) -> np.ndarray:
        """Row at each of these places, int64 [len(places)]."""
        return self._walk(places, range(NUM_ROUNDS))

    def places_of(self, rows: np.ndarray) -> np.ndarray:
        """Place of each of these rows, int64 [len(rows)]; the inverse of `rows_at`."""
        return self._walk(rows, range(NUM_ROUNDS - 1, -1, -1))

    def _walk(self, numbers: np.ndarray, rounds: range) -> np.ndarray:
        found = self._permute(numbers.astype(np.uint64), rounds)
        outside = np.flatnonzero(found >= self.num_rows)
        while len(outside):
            found[outside] = self._permute(found[outside], rounds)
            outside = outside[found[outside] >= self.num_rows]
        return found.astype(np.int64)

    def _permute(self, numbers: np.ndarray, rounds: range) -> np.ndarray:
        high, low = numbers >> np.uint64(self._low_bits), numbers & np.uint64((1 << self._low_bits) - 1)
        for number in rounds:  # each half is changed by the other, so every round can be undone
            if number % 2:
                high ^= _mixed(low, self._keys[number], self._high_bits)
            else:
                low ^= _mixed(high, self._keys[number], self._low_bits)
        return high << np.uint64(self._low_bits) | low


def _mixed(numbers: np.ndarray, key: np.uint64, num_bits: int) -> np.ndarray:
    """Hash of numbers below 2**32 to `num_bits` bits each: two rounds of multiplication and shift, as in SplitMix64."""
    mixed = (numbers + key) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(64 - num_bits)


class SourceOrder:
    """Rows of one source, epoch after epoch: every row once per epoch, in an order that each epoch has of its own.

    Args:
        shuffle: False: every epoch has the rows in their order.
        version: of the order; see `ROW_ORDER`.
    """

    def __init__(self, seed: int, num_rows: int, shuffle: bool = True, version: int = ROW_ORDER) -> None:
        self.seed, self.num_rows, self.shuffle = seed, num_rows, shuffle
        self._is_sorted = version == 1 or num_rows <= SORTED_ROWS
        self._size = num_rows if self._is_sorted else PLACES_TOGETHER
        self._kept: dict[tuple[int, int], np.ndarray] = {}

    def rows_at(self, place: int, count: int) -> np.ndarray:
        """Rows at `count` places of the endless sequence of epochs, int64 [count]."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self._pieces(place, count)])

    def _pieces(self, place: int, count: int) -> Iterator[np.ndarray]:
        while count:
            epoch, offset = divmod(place, self.num_rows)
            taken = min(self.num_rows - offset, count)
            if self.shuffle:
                number, start = divmod(offset, self._size)
                taken = min(self._size - start, taken)
                yield self._block(epoch, number)[start : start + taken]
            else:
                yield np.arange(offset, offset + taken)
            place, count = place + taken, count - taken

    def place_of(self, epoch: int, row: int) -> int:
        """Place of a row in an epoch."""
        if not self.shuffle:
            return row
        if self._is_sorted:
            return int(np.flatnonzero(self._block(epoch, 0) == row)[0])
        return int(Bijection(self.seed, epoch, self.num_rows).places_of(np.array([row]))[0])

    def _block(self, epoch: int, number: int) -> np.ndarray:
        """Rows at the places of one block of an epoch, from the newest two: a step may span two."""
        key = epoch, number
        if key not in self._kept:
            if self._is_sorted:
                rows = permutation(self.seed, epoch, self.num_rows)
            else:
                places = np.arange(number * PLACES_TOGETHER, min((number + 1) * PLACES_TOGETHER, self.num_rows))
                rows = Bijection(self.seed, epoch, self.num_rows).rows_at(places)
            keep_two(self._kept, key, rows)
        return self._kept[key]


def keep_two(kept: dict[Any, np.ndarray], key: Any, value: np.ndarray) -> None:
    """Add an entry and keep the newest two: reading ahead is never further ahead for long."""
    if len(kept) == 2:
        del kept[next(iter(kept))]
    kept[key] = value


@cache
def _exact(number: float) -> Fraction:
    """The decimal number as typed: 2.2 epochs are 22/10, not the nearest float."""
    return Fraction(str(number))


@dataclass(frozen=True)
class RowOrder:
    """The endless sequence of rows of a run, and its division into steps."""

    seed: int
    num_rows: int
    """Number of rows of one epoch."""
    global_batch_size: int
    lag: int = 0
    """Places by which the run lags a run that had this global batch size from the start."""
    shuffle: bool = True
    """True: every epoch has a permutation of its own; False: every epoch has the rows in their order."""
    version: int = ROW_ORDER

    def places_after(self, step: int) -> int:
        """Number of rows consumed by the steps up to and including this one."""
        return step * self.global_batch_size - self.lag

    def rows_at(self, step: int) -> np.ndarray:
        """Rows of optimizer step `step` (first = 1), int64 [global_batch_size]."""
        place = self.places_after(step - 1)
        return self._epochs.rows_at(place, self.places_after(step) - place)

    @cached_property
    def _epochs(self) -> SourceOrder:
        return SourceOrder(self.seed, self.num_rows, self.shuffle, self.version)

    def epochs_at(self, samples_seen: int) -> float:
        """Number of passes over the rows after `samples_seen` of them."""
        return samples_seen / self.num_rows

    def count_steps(self, num_epochs: float) -> int:
        """Number of steps after which every row was seen `num_epochs` times."""
        return math.ceil((_exact(num_epochs) * self.num_rows + self.lag) / self.global_batch_size)

    def completes_epochs(self, step: int, every: float | None) -> bool:
        """True at the first step that completes another `every` passes over the rows (None: never)."""
        if every is None:
            return False
        period = _exact(every) * self.num_rows
        return self.places_after(step) // period > self.places_after(step - 1) // period


@dataclass(frozen=True)
class StreamOrder(RowOrder):
    """Rows of streams of unknown length: row `n * num_streams + s` is the n-th of stream s.

    A step takes equally many rows of each stream, one stream after the other, so a process that takes an equal part of
    the batch takes complete streams.
    """

    num_streams: int = field(kw_only=True)

    def rows_at(self, step: int) -> np.ndarray:
        numbers = np.arange(
            self.places_after(step - 1) // self.num_streams, self.places_after(step) // self.num_streams
        )
        return (numbers * self.num_streams + np.arange(self.num_streams)[:, None]).reshape(-1)

    def epochs_at(self, samples_seen: int) -> float:
        return math.nan

    def completes_epochs(self, step: int, every: float | None) -> bool:
        return False
