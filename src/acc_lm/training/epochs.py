"""Report at the end of each pass over the training rows: training loss, evaluation, learning rate and time.

The training loss is the mean over all targets of the pass. A step that begins in one pass and ends in the next counts for
the pass that it ends.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from acc_lm.checkpointing.format import Checkpoint
from acc_lm.rows.order import RowOrder
from acc_lm.run_files import metrics_file
from acc_lm.training.divergence import Watch


class Epochs:
    """Metrics of each pass over the training rows, at the step that ends it.

    Args:
        watch: source of the loss sums; `state` keeps them in checkpoints, so that an interruption changes nothing.
        checkpoint: checkpoint that the run resumes from; None for a new run.
    """

    def __init__(self, order: RowOrder, watch: Watch, output_dir: Path, checkpoint: Checkpoint | None) -> None:
        self._order, self._watch, self._output_dir = order, watch, output_dir
        kept = checkpoint.state.get("epoch") if checkpoint else None
        self._first_step = kept["first_step"] if kept else (checkpoint.progress.step if checkpoint else 0) + 1
        watch.sums = (kept["nll"], kept["targets"]) if kept else (0.0, 0)
        self._began = time.monotonic() - (kept["seconds"] if kept else 0.0)

    @property
    def state(self) -> dict[str, Any]:
        """State to keep in the checkpoint; `watch.look` must have been called for the last step."""
        nll, targets = self._watch.sums
        seconds = time.monotonic() - self._began
        return {"epoch": {"first_step": self._first_step, "nll": nll, "targets": targets, "seconds": seconds}}

    def end(self, step: int, learning_rate: float) -> dict[str, float]:
        """Metrics of the pass that this step completes; empty when it completes none, or the pass was already reported.

        Only steps since the last report with a finite loss count. Every process calls.
        """
        if not self._order.completes_epochs(step, 1) or self._first_step > step:
            return {}
        self._watch.look(step)
        nll, targets = self._watch.sums
        number = self._order.places_after(step) // self._order.num_rows
        metrics = {"epoch/number": float(number), "epoch/learning_rate": learning_rate}
        if targets:
            metrics["epoch/train_loss"] = nll / targets
        record = metrics_file.read(self._output_dir)
        steps, losses = metrics_file.series(record, "eval/loss")
        if steps and steps[-1] >= self._first_step:
            metrics["epoch/eval_loss"] = losses[-1]
        metrics["epoch/seconds"] = time.monotonic() - self._began
        self._first_step, self._watch.sums, self._began = step + 1, (0.0, 0), time.monotonic()
        # Already reported if an earlier resume from this checkpoint did so and was killed before its next save.
        return {} if any(entry["step"] == step for entry in record if "epoch/number" in entry) else metrics
