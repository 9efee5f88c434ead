"""Early stopping: end a run when evaluations have not improved on the best one for a while."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from acc_lm.checkpointing.format import Checkpoint
from acc_lm.config import TrainingConfig
from acc_lm.run_files.metrics_file import gain


@dataclass(frozen=True)
class Standing:
    """State that a checkpoint keeps of the evaluations before it."""

    metric: str
    best: float = math.nan
    """Best value so far, which a later one must improve on; nan: none yet."""
    best_step: int = 0
    num_worse: int = 0
    """Number of evaluations in a row without an improvement."""
    step: int = 0
    """Step of the last evaluation that was counted."""


class EarlyStopping:
    """Counter of evaluations in a row without an improvement, which depends on their values alone, not on interruptions.

    Args:
        metric: name of the metric to improve, as in `checkpoint.best_metric`.
        checkpoint: checkpoint that the run resumes from; a count of another metric is dropped.
    """

    def __init__(self, config: TrainingConfig, metric: str, checkpoint: Checkpoint | None) -> None:
        self._patience, self._least = config.early_stopping_patience, config.early_stopping_min_improvement
        self._standing = Standing(metric)
        kept = checkpoint.state.get("early_stopping") if checkpoint else None
        if kept and kept["metric"] == metric:
            self._standing = Standing(**kept | {"best": math.nan if kept["best"] is None else kept["best"]})

    @property
    def state(self) -> dict[str, Any]:
        """State to keep in the checkpoint; a best value of nan becomes None, because JSON has no nan."""
        best = None if math.isnan(self._standing.best) else self._standing.best
        return {"early_stopping": asdict(self._standing) | {"best": best}}

    def count(self, step: int, metrics: dict[str, float]) -> None:
        """Count the evaluation at this step; a step that was counted before is ignored."""
        now = self._standing
        if step <= now.step:
            return
        value = metrics[now.metric]
        is_first = math.isnan(now.best) and math.isfinite(value)
        if is_first or gain(now.metric, value) > gain(now.metric, now.best) + self._least:
            self._standing = Standing(now.metric, value, step, 0, step)
        else:
            self._standing = Standing(now.metric, now.best, now.best_step, now.num_worse + 1, step)

    @property
    def reason(self) -> str | None:
        """Reason why the run ends; None while it continues."""
        now = self._standing
        if self._patience is None or now.num_worse < self._patience:
            return None
        by = f" by more than {self._least:g}" if self._least else ""
        times = "evaluation has" if now.num_worse == 1 else "evaluations have"
        return f"stopped early: {now.num_worse} {times} not improved {now.metric}{by} on {now.best:.6g} of step {now.best_step}"
