"""Tokens per second that the loader delivers from memory-mapped rows, on one core.

    python benchmarks/loader.py

Goal: at least 100 million tokens per second of CPU time at rows of 1024 tokens, 16 rows per batch.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch

from acc_lm.rows.loader import MicroBatches, build_loader
from acc_lm.rows.order import RowOrder
from acc_lm.rows.text_rows import Rows

TOKENS, LENGTH, BATCH, STEPS, ROUNDS = 50_000_000, 1024, 16, 1000, 5


def rounds(tokens: int = TOKENS, length: int = LENGTH, batch_size: int = BATCH, steps: int = STEPS) -> Iterator[float]:
    """Yield the tokens per CPU second of one round after the other, without end."""
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        np.random.RandomState(0).randint(0, 50_000, tokens).astype(np.uint16).tofile(file.name)
        rows = Rows(np.memmap(file.name, dtype=np.uint16, mode="r"), length)
        order = RowOrder(0, len(rows), batch_size)
        for first_step in itertools.count(1, steps):
            batches = MicroBatches(
                order,
                micro_batch_size=batch_size,
                process=0,
                num_processes=1,
                first_step=first_step,
                last_step=first_step + steps - 1,
            )
            start = time.process_time()
            count = sum(batch["targets"].numel() for batch in build_loader(rows, batches, 0, pin_memory=False))
            yield count / (time.process_time() - start)


def main() -> None:
    speed = statistics.median(itertools.islice(rounds(), ROUNDS))
    print(
        f"loader: {speed / 1e6:.0f} million tokens per CPU second, goal at least 100: {'met' if speed >= 1e8 else 'NOT met'}"
    )


if __name__ == "__main__":
    main()
