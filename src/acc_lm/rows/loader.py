"""Micro-batches of each step and batches of an evaluation, for one process, and the loader that reads them."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, Dataset

from acc_lm.rows.batch import Batch, RowSource
from acc_lm.rows.order import RowOrder
from acc_lm.rows.streams import StreamRows


def by_length(rows: np.ndarray, lengths: np.ndarray, num_processes: int, micro_batch_size: int) -> np.ndarray:
    """Reorder the rows of one global batch so that each micro-batch has rows of similar length.

    The processes take turns in getting the longer rows, so no process has all the longest micro-batches. The batch keeps
    its rows: a sum over it changes only by rounding.

    Args:
        rows: int64 [global_batch_size]; process p takes the p-th of `num_processes` equal parts of the result.
        lengths: places that each row of the split takes, int64 [num_rows].
    """
    longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
    micro_batches = longest_first.reshape(-1, num_processes, micro_batch_size)
    micro_batches[1::2] = micro_batches[1::2, ::-1].copy()
    return micro_batches.swapaxes(0, 1).reshape(-1)


class MicroBatches:
    """Row indices of each micro-batch of one process, from step `first_step` to `last_step`.

    Args:
        lengths: lengths of all rows, if they are padded to the longest of a micro-batch; None: all have one length.
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
    """Row indices of each evaluation batch of one process; padded with -1, so all processes have equally many batches.

    Args:
        lengths: as in `MicroBatches`.
    """
    rounds = math.ceil(num_rows / (batch_size * num_processes))
    places = np.arange(rounds * num_processes * batch_size).reshape(rounds, num_processes, batch_size)
    places = np.where(places < num_rows, places, -1)
    if lengths is not None:
        places = np.append(np.argsort(-lengths[:num_rows], kind="stable"), -1)[places]
    return list(places[:, process])


def _keep(batch: Any) -> Any:
    return batch


def _leave_interrupts_to_the_trainer(worker: int) -> None:
    """Ignore SIGINT and SIGTERM in a worker: a terminal sends Ctrl-C to workers too, but only the trainer handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def build_loader(
    rows: RowSource | Dataset[Batch],
    batches: MicroBatches | list[np.ndarray],
    num_workers: int,
    *,
    pin_memory: bool,
) -> DataLoader[Batch]:
    """Build a loader that reads exactly the given micro-batches, in their order; workers only read ahead."""
    if isinstance(rows, StreamRows):
        num_workers = 0  # streams have their own reader processes
    return DataLoader(
        cast("Dataset[Batch]", rows),
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=_keep,
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=_leave_interrupts_to_the_trainer if num_workers else None,
    )
