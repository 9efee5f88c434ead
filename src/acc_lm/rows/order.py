"""Which rows make up optimizer step k: a pure function of (seed, k, global batch size) and nothing else.

The epochs' permutations follow each other as one endless sequence of places; step k (first = 1) takes places
[(k-1)G, kG). So no batch is short, every row comes once per epoch, and the position of a run is one integer.

    places   0 ........ N-1 | N ....... 2N-1 | ...
    rows     permutation 0  | permutation 1  | ...
    steps    | 1 | 2 | 3 |  4 | 5 | 6 |  7 | ...         a step may span two epochs

A run whose global batch size was changed on the way goes on at the next place: its steps lag behind by some places.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache

import numpy as np

EMPTY_LEDGER = ""


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Order of the rows in one epoch, int64 [num_rows].

    Sorting the raw output of a counter-based generator is stable over numpy versions, unlike `Generator.permutation`.
    """
    keys = np.random.Philox(key=(seed << 64) | epoch).random_raw(num_rows)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


def other_permutation(seed: int, number: int, epoch: int, num_rows: int) -> np.ndarray:
    """`permutation`, another one for every `number` (from 1, below 2**32) of a seed; who asks keeps it."""
    order: np.ndarray = permutation.__wrapped__(number << 32 | seed, epoch, num_rows)
    return order


@cache
def _exact(number: float) -> Fraction:
    """The decimal that was typed: 2.2 epochs are 22/10, not the float beside it."""
    return Fraction(str(number))


@dataclass(frozen=True)
class RowOrder:
    """The endless sequence of rows of a run, and how steps cut it up."""

    seed: int
    num_rows: int
    """Rows of one epoch."""
    global_batch_size: int
    lag: int = 0
    """Places by which the run is behind one that had this global batch size from the start."""
    shuffle: bool = True
    """False: every epoch has the rows in their order."""

    def places_after(self, step: int) -> int:
        """Rows consumed by the steps up to this one."""
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
        """Passes over the rows after this many of them."""
        return samples_seen / self.num_rows

    def count_steps(self, num_epochs: float) -> int:
        """Steps after which every row was seen `num_epochs` times."""
        return math.ceil((_exact(num_epochs) * self.num_rows + self.lag) / self.global_batch_size)

    def completes_epochs(self, step: int, every: float | None) -> bool:
        """True at the first step that completes another `every` passes over the rows (None: never)."""
        if every is None:
            return False
        period = _exact(every) * self.num_rows
        return self.places_after(step) // period > self.places_after(step - 1) // period


@dataclass(frozen=True)
class StreamOrder(RowOrder):
    """Rows of streams, which nobody has counted: row `n * num_streams + s` is the n-th of stream s.

    A step takes equally many of each stream, one stream after the other, so that every process that takes an equal part of
    the batch takes whole streams.
    """

    num_streams: int = 1

    def rows_at(self, step: int) -> np.ndarray:
        numbers = np.arange(
            self.places_after(step - 1) // self.num_streams, self.places_after(step) // self.num_streams
        )
        return (numbers * self.num_streams + np.arange(self.num_streams)[:, None]).reshape(-1)

    def epochs_at(self, samples_seen: int) -> float:
        return math.nan

    def completes_epochs(self, step: int, every: float | None) -> bool:
        return False


def extend_ledger(ledger: str, rows: np.ndarray) -> str:
    """Running hash of all rows consumed so far, in order; 32 hex digits."""
    return hashlib.blake2b(bytes.fromhex(ledger) + rows.astype("<i8").tobytes(), digest_size=16).hexdigest()


def by_length(rows: np.ndarray, lengths: np.ndarray, num_processes: int, micro_batch_size: int) -> np.ndarray:
    """The rows of one global batch, dealt out anew so that rows of about the same length meet in a micro-batch.

    The processes take turns in going first, so that none has all the longest micro-batches. It is the same batch: a sum
    over it changes by its rounding only.

    Args:
        rows: int64 [global_batch_size]; process p takes the p-th of `num_processes` equal parts of what is returned.
        lengths: places that each row of the split takes, int64 [num_rows].
    """
    longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
    micro_batches = longest_first.reshape(-1, num_processes, micro_batch_size)
    micro_batches[1::2] = micro_batches[1::2, ::-1].copy()
    return micro_batches.swapaxes(0, 1).reshape(-1)


class MicroBatches:
    """For one process: the row indices of each micro-batch, from step `first_step` to `last_step`.

    Args:
        lengths: of all rows, where they are padded to the longest of a micro-batch; None: all are of one length.
    """

    def __init__(
        self,
        order: RowOrder,
        *,
        micro_batch_size: int,
        process: int,
        num_processes: int,
        first_step: int,
        last_step: int,
        lengths: np.ndarray | None = None,
    ) -> None:
        share = order.global_batch_size // num_processes
        self._order = order
        self._mine = slice(process * share, (process + 1) * share)
        self._num_micro_batches = share // micro_batch_size
        self._steps = range(first_step, last_step + 1)
        self._lengths, self._shape = lengths, (num_processes, micro_batch_size)

    def __len__(self) -> int:
        return len(self._steps) * self._num_micro_batches

    def __iter__(self) -> Iterator[np.ndarray]:
        for step in self._steps:
            rows = self._order.rows_at(step)
            if self._lengths is not None:
                rows = by_length(rows, self._lengths, *self._shape)
            yield from rows[self._mine].reshape(self._num_micro_batches, -1)


def evaluation_batches(
    num_rows: int, *, batch_size: int, process: int, num_processes: int, lengths: np.ndarray | None = None
) -> list[np.ndarray]:
    """For one process: row indices of each evaluation batch; -1 fills up, so that all processes do the same number.

    Args:
        lengths: as in `MicroBatches`.
    """
    rounds = math.ceil(num_rows / (batch_size * num_processes))
    places = np.arange(rounds * num_processes * batch_size).reshape(rounds, num_processes, batch_size)
    places = np.where(places < num_rows, places, -1)
    if lengths is not None:
        places = np.append(np.argsort(-lengths[:num_rows], kind="stable"), -1)[places]
    return list(places[:, process])
