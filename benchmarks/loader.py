"""Tokens per second that the loader delivers from memory-mapped rows, on one core.

    python benchmarks/loader.py

Goal: at least 100 million tokens per second of CPU time at rows of 1024 tokens, 16 rows a batch.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import numpy as np
import torch

from acc_lm.data import Rows, build_loader
from acc_lm.order import MicroBatches, RowOrder

TOKENS, LENGTH, BATCH, STEPS, ROUNDS = 50_000_000, 1024, 16, 1000, 5


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        np.random.RandomState(0).randint(0, 50_000, TOKENS).astype(np.uint16).tofile(file.name)
        rows = Rows(np.memmap(file.name, dtype=np.uint16, mode="r"), LENGTH)
        order = RowOrder(0, len(rows), BATCH)
        speeds = []
        for round_ in range(ROUNDS):
            batches = MicroBatches(
                order,
                micro_batch_size=BATCH,
                process=0,
                num_processes=1,
                first_step=round_ * STEPS + 1,
                last_step=(round_ + 1) * STEPS,
            )
            start = time.process_time()
            tokens = sum(batch["targets"].numel() for batch in build_loader(rows, batches, 0, pin_memory=False))
            speeds.append(tokens / (time.process_time() - start))
    speed = statistics.median(speeds)
    print(
        f"loader: {speed / 1e6:.0f} million tokens per CPU second, goal at least 100: {'met' if speed >= 1e8 else 'NOT met'}"
    )


if __name__ == "__main__":
    main()
