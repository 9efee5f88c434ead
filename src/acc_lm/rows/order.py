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
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Order of the rows in one epoch, int64 [num_rows].

    Sorting the raw output of a counter-based generator is stable across numpy versions, unlike `Generator.permutation`.
    """
    keys = np.random.Philox(key=(seed << 64) | epoch).random_raw(num_rows)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


def other_permutation(seed: int, number: int, epoch: int, num_rows: int) -> np.ndarray:
    """`permutation`, but another one for every `number` (from 1, below 2**32) of a seed; not cached."""
    order: np.ndarray = permutation.__wrapped__(number << 32 | seed, epoch, num_rows)
    return order


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

    def places_after(self, step: int) -> int:
        """Number of rows consumed by the steps up to and including this one."""
        return step * self.global_batch_size - self.lag

    def rows_at(self, step: int) -> np.ndarray:
        """Rows of optimizer step `step` (first = 1), int64 [global_batch_size]."""
        place, end = self.places_after(step - 1), self.places_after(step)
        pieces = []
        while place < end:
            epoch, offset = divmod(place, self.num_rows)
            count = min(self.num_rows - offset, end - place)
            if self.shuffle:
                pieces.append(permutation(self.seed, epoch, self.num_rows)[offset : offset + count])
            else:
                pieces.append(np.arange(offset, offset + count))
            place += count
        return np.concatenate(pieces)

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
