"""The report that ends each pass over the training rows: its loss over all targets, the evaluation, the rate, the time.

A step that begins in one pass and ends in the next counts for the one that it ends.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from acc_lm import history
from acc_lm.divergence import Watch
from acc_lm.order import RowOrder
from acc_lm.retention import Checkpoint


class Epochs:
    """Knows which steps end a pass, and what is to be told of it.

    Args:
        watch: whose sums a checkpoint keeps through `state`, so that an interruption changes nothing.
        checkpoint: that the run goes on from.
    """

    def __init__(self, order: RowOrder, watch: Watch, output_dir: Path, checkpoint: Checkpoint | None) -> None:
        self._order, self._watch, self._output_dir = order, watch, output_dir
        kept = checkpoint.state.get("epoch") if checkpoint else None
        self._first_step = kept["first_step"] if kept else (checkpoint.progress.step if checkpoint else 0) + 1
        watch.sums = (kept["nll"], kept["targets"]) if kept else (0.0, 0)
        self._began = time.monotonic() - (kept["seconds"] if kept else 0.0)

    @property
    def state(self) -> dict[str, Any]:
        """For the checkpoint; the watch must have looked at the last step."""
        nll, targets = self._watch.sums
        seconds = time.monotonic() - self._began
        return {"epoch": {"first_step": self._first_step, "nll": nll, "targets": targets, "seconds": seconds}}

    def end(self, step: int, learning_rate: float) -> dict[str, float]:
        """What is to be told of the pass that this step completes; nothing when it completes none, or that was told.

        Only the steps since the last report count, and of those only the ones with a finite loss. Every process calls.
        """
        if not self._order.completes_epochs(step, 1) or self._first_step > step:
            return {}
        self._watch.look(step)
        nll, targets = self._watch.sums
        number = self._order.places_after(step) // self._order.num_rows
        metrics = {"epoch/number": float(number), "epoch/learning_rate": learning_rate}
        if targets:
            metrics["epoch/train_loss"] = nll / targets
        record = history.read(self._output_dir)
        steps, losses = history.series(record, "eval/loss")
        if steps and steps[-1] >= self._first_step:
            metrics["epoch/eval_loss"] = losses[-1]
        metrics["epoch/seconds"] = time.monotonic() - self._began
        self._first_step, self._watch.sums, self._began = step + 1, (0.0, 0), time.monotonic()
        # Told when the run that this one repeats had gone on to here, and was killed before it saved.
        return {} if any(entry["step"] == step for entry in record if "epoch/number" in entry) else metrics
