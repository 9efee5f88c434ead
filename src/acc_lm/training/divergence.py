"""Divergence: skip steps with a non-finite gradient, detect loss spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acc_lm.config import TrainingConfig
from acc_lm.errors import DivergedError
from acc_lm.files import write_json
from acc_lm.rows.order import RowOrder
from acc_lm.training.step import StepResult

if TYPE_CHECKING:
    from accelerate import Accelerator

    from acc_lm.runtime import Gradients

WINDOW, ENOUGH = 64, 16
"""Largest and smallest number of recent losses that a new one is compared with."""
LEAST_JUMP = 0.1
"""Smallest spike, as a share of the median: a loss above the median by less is no spike, however quiet the run is."""
MOST_REWINDS = 3
DIVERGENCE_ADVICE = (
    "lower optimizer.learning_rate or raise schedule.warmup_steps; the checkpoints are from before the divergence"
)


class Watch:
    """Monitor of the losses and gradients of all steps.

    `look` checks the steps since its last call, and only `look` waits for the device.

    Args:
        num_skipped: steps so far that were skipped or rewound.
        before: contents of `state` when the checkpoint was saved.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        gradients: Gradients,
        config: TrainingConfig,
        order: RowOrder,
        output_dir: Path,
        num_skipped: int = 0,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        before = before or {}
        self.num_skipped = num_skipped
        """Number of steps without effect on the weights: skipped, or rewound."""
        self.sums = (0.0, 0)
        """(summed loss, targets) of all steps with a finite loss since `Epochs` last reset it, added in order."""
        self._accelerator, self._gradients, self._config = accelerator, gradients, config
        self._order, self._output_dir = order, output_dir
        self._unread: list[tuple[Tensor, int]] = []
        """(this process's summed loss, targets of the global batch) of each step."""
        self._skipped_in_a_row = before.get("skipped_in_a_row", 0)
        self._recent = deque(before.get("recent_losses", ()), maxlen=WINDOW)
        self._loss = math.nan
        self._in_spike = False
        self._rewinds = (0, 0)
        """(step that was rewound to, number of rewinds to it in a row)."""
        self._lines: list[str] = []

    @property
    def state(self) -> dict[str, Any]:
        """Losses that the next one is compared with, and the number of steps skipped in a row.

        A checkpoint keeps both, so that a resumed run detects the same events.
        """
        return {"recent_losses": list(self._recent), "skipped_in_a_row": self._skipped_in_a_row}

    def news(self) -> list[str]:
        """Lines about unusual events since the last call: skipped steps, spikes, rewinds."""
        lines, self._lines = self._lines, []
        return lines

    def note(self, step: int, outcome: StepResult) -> bool:
        """Record a step; return True when its loss spiked and the run must rewind. Every process calls.

        Raises:
            DivergedError: the loss spiked and the recipe says stop, or one of the errors of `look`.
        """
        self._unread.append((outcome.nll, outcome.num_targets))
        if self._config.on_spike in ("ignore", "warn"):
            return False
        self.look(step)
        if self._in_spike and self._config.on_spike == "stop":
            raise DivergedError(
                f"the loss must not spike, got {self._loss:.4f} at step {step} (training.on_spike is stop); {DIVERGENCE_ADVICE}"
            )
        return self._in_spike

    def look(self, step: int) -> float:
        """Check all unread steps; return the loss of the global batch of `step`, the last one noted.

        Waits for the device; every process calls.

        Raises:
            DivergedError: too many steps in a row were skipped, or a loss is non-finite although its gradient is finite.
        """
        if not self._unread:
            return self._loss
        sums = self._accelerator.reduce(torch.stack([nll for nll, _ in self._unread]), reduction="sum").tolist()
        losses = [nll / max(num_targets, 1) for nll, (_, num_targets) in zip(sums, self._unread, strict=True)]
        for nll, (_, num_targets) in zip(sums, self._unread, strict=True):
            if math.isfinite(nll):
                self.sums = (self.sums[0] + nll, self.sums[1] + num_targets)
        self._unread = []
        by_step = self._gradients.not_finite()
        # The fp16 loss scaler finds its scale through gradients that overflow: no error while the scale is at least 1.
        finds_scale = self._accelerator.mixed_precision == "fp16" and any(by_step) and self._gradients.loss_scale >= 1
        for number, loss, names in zip(range(step + 1 - len(losses), step + 1), losses, by_step, strict=True):
            self._loss = loss
            if names and finds_scale and math.isfinite(loss):
                self.num_skipped += 1
                names = []
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if names else 0
            if names:
                self._skip(number, names)
            elif math.isfinite(loss):
                self._compare(number, loss)
            else:
                raise DivergedError(
                    f"the loss must stay finite, got {loss} under a finite gradient; {DIVERGENCE_ADVICE}"
                )
        return self._loss

    def _skip(self, step: int, names: list[str]) -> None:
        self.num_skipped += 1
        self._lines.append(f"step {step} was skipped: the gradient of {names[0]} is not finite")
        self._dump(f"nonfinite_step_{step}.json", step, parameters=names)
        if self._skipped_in_a_row >= self._config.max_nonfinite_steps:
            raise DivergedError(
                f"the gradient must be finite, got {self._skipped_in_a_row} of {self._config.max_nonfinite_steps} tolerated non-finite steps in a "
                f"row, in step {step} first in {names[0]} ({len(names)} parameters in all); "
                f"these steps changed no weight; {DIVERGENCE_ADVICE}"
            )

    def _compare(self, step: int, loss: float) -> None:
        was_in_spike, self._in_spike = self._in_spike, False
        if self._config.on_spike != "ignore" and len(self._recent) >= ENOUGH:
            median = statistics.median(self._recent)
            # The median absolute deviation, scaled to the standard deviation of a normal distribution.
            spread = 1.4826 * statistics.median(abs(other - median) for other in self._recent)
            jump = loss - median
            self._in_spike = jump > max(self._config.spike_threshold * spread, LEAST_JUMP * median)
            if self._in_spike and not was_in_spike:
                self._lines.append(
                    f"warning: the loss spiked to {loss:.4f} at step {step}; the median of the previous {len(self._recent)} is {median:.4f}"
                )
                self._dump(f"spike_step_{step}.json", step, loss=loss, median_before=median)
        self._recent.append(loss)

    def rewound(self, step: int, to: int, num_skipped: int, recent_losses: Iterable[float]) -> None:
        """Record that the weights are those of step `to` again, while the position in the data stays at `step`.

        Every process calls.

        Raises:
            DivergedError: more than `MOST_REWINDS` rewinds to this step have not helped.
        """
        self._rewinds = (to, self._rewinds[1] + 1 if self._rewinds[0] == to else 1)
        self.num_skipped, self._in_spike = num_skipped, False
        self._recent = deque(recent_losses, maxlen=WINDOW)
        self._lines.append(f"rewound to the weights of step {to}; the updates of steps {to + 1} to {step} are undone")
        if self._rewinds[1] > MOST_REWINDS:
            raise DivergedError(
                f"the loss must not spike again after a rewind, got a spike after each of {MOST_REWINDS} rewinds to step {to}; {DIVERGENCE_ADVICE}"
            )

    def _dump(self, name: str, step: int, **facts: object) -> None:
        if self._accelerator.is_main_process:
            rows = self._order.rows_at(step).tolist()
            write_json(self._output_dir / name, {"step": step, "rows": rows, **facts})
