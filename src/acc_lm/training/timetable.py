"""Timetable of a run: logs, evaluations and saves that are due after a step."""

from __future__ import annotations

from dataclasses import dataclass

from acc_lm.config import Config
from acc_lm.progress import is_due
from acc_lm.rows.order import RowOrder


@dataclass(frozen=True)
class Timetable:
    """Due events as pure functions of the step: the same on every process and in a resumed run."""

    config: Config
    order: RowOrder
    num_steps: int

    def logs(self, step: int) -> bool:
        return is_due(step, self.config.training.log_every, self.num_steps) or step == 1

    def evaluates(self, step: int) -> bool:
        training = self.config.training
        by_steps = is_due(step, training.eval_every, self.num_steps)
        return by_steps or self.order.completes_epochs(step, training.eval_every_epochs)

    def saves(self, step: int) -> bool:
        checkpoint = self.config.checkpoint
        by_steps = is_due(step, checkpoint.every, self.num_steps)
        return by_steps or self.order.completes_epochs(step, checkpoint.every_epochs)

    def metrics(self, step: int) -> set[str]:
        """Name of one metric for each record that a step has in addition to its training metrics."""
        ends_epoch = self.order.completes_epochs(step, 1)
        return {name for name, due in (("eval/loss", self.evaluates(step)), ("epoch/number", ends_epoch)) if due}
