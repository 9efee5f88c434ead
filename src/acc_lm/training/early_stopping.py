"""When a run ends before its last step: no evaluation was better than the best one for a while."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from acc_lm.config import TrainingConfig
from acc_lm.history import gain
from acc_lm.retention import Checkpoint


@dataclass(frozen=True)
class Standing:
    """What a checkpoint remembers of the evaluations before it."""

    metric: str
    best: float = math.nan
    """Value that others must improve on; nan: none yet."""
    best_step: int = 0
    num_worse: int = 0
    """Evaluations in a row that did not."""
    step: int = 0
    """Of the last evaluation that was counted."""


class EarlyStopping:
    """Counts the evaluations that brought no improvement; a function of their values alone, so of no interruption.

    Args:
        metric: that says what is better, as in `checkpoint.best_metric`.
        checkpoint: that the run goes on from; one of another metric counts from here on.
    """

    def __init__(self, config: TrainingConfig, metric: str, checkpoint: Checkpoint | None) -> None:
        self._patience, self._least = config.early_stopping_patience, config.early_stopping_min_improvement
        self._standing = Standing(metric)
        kept = checkpoint.state.get("early_stopping") if checkpoint else None
        if kept and kept["metric"] == metric:
            self._standing = Standing(**kept | {"best": math.nan if kept["best"] is None else kept["best"]})

    @property
    def state(self) -> dict[str, Any]:
        """For the checkpoint; JSON has no nan."""
        best = None if math.isnan(self._standing.best) else self._standing.best
        return {"early_stopping": asdict(self._standing) | {"best": best}}

    def count(self, step: int, metrics: dict[str, float]) -> None:
        """Take in the evaluation at this step, once."""
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
        """Why the run is over; None while it is not."""
        now = self._standing
        if self._patience is None or now.num_worse < self._patience:
            return None
        by = f" by more than {self._least:g}" if self._least else ""
        times = "evaluation has" if now.num_worse == 1 else "evaluations have"
        return f"stopped early: {now.num_worse} {times} not improved {now.metric}{by} on {now.best:.6g} of step {now.best_step}"
