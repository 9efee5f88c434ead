"""Which process holds up the others: the time that each needs for itself."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from accelerate import Accelerator

TIMES_SLOWER = 1.5
"""A process is slow that takes so much longer than the others..."""
SHARE, LEAST_SECONDS = 0.1, 0.05
"""...and holds them up for this share of a step, and for this long..."""
LOOKS = 2
"""...each time it was looked at, so often in a row."""


class Pace:
    """What comes before the first forward of a step (data, host), and that forward itself.

    Later all processes take the same time, since each waits for the slowest. Engines that fetch weights from the others
    wait in the forward too, so that under them only what comes before it stands out. Events on a GPU are read when a step
    is logged, so nothing waits for it.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator = accelerator
        self._on_gpu = accelerator.device.type == "cuda"
        self._marks: list[Any] | None = None
        self._steps: list[list[Any]] = []
        """Of each: its start, the call of the engine, the start and the end of the forward."""
        self._since = time.monotonic()
        self._slow, self._times, self._told = -1, 0, -1
        if accelerator.num_processes > 1:
            inner = getattr(model, "module", model)  # DDP first copies the main process's buffers
            model.register_forward_pre_hook(lambda module, inputs: self._mark(1))
            inner.register_forward_pre_hook(lambda module, inputs: self._mark(2))
            inner.register_forward_hook(lambda module, inputs, output: self._mark(3))

    def start_step(self) -> None:
        self._marks = [self._now()]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _mark(self, place: int) -> None:
        if self._marks is None or len(self._marks) != place:  # only in the first forward of a step
            return
        self._marks.append(self._now())
        if place == 3:
            self._steps.append(self._marks)
            self._marks = None

    def _between(self, one: Any, other: Any) -> float:
        seconds: float = one.elapsed_time(other) / 1000 if self._on_gpu else other - one
        return seconds

    def compare(self) -> str | None:
        """A line when one process has held the others up since the last call, once for each. Every process calls.

        After a log, when the device has done all that was asked of it.
        """
        steps, self._steps = self._steps, []
        since, self._since = self._since, time.monotonic()
        if not steps or self._accelerator.num_processes == 1:
            return None
        own = statistics.median(self._between(a, b) + self._between(c, d) for a, b, c, d in steps)
        mine = torch.tensor([own], device=self._accelerator.device)
        times = self._accelerator.gather(mine).tolist()
        slowest = max(range(len(times)), key=times.__getitem__)
        usual = statistics.median(times[:slowest] + times[slowest + 1 :])
        lost = times[slowest] - usual
        step = max((self._since - since) / len(steps), 1e-9)
        is_slow = times[slowest] > TIMES_SLOWER * usual and lost > max(SHARE * step, LEAST_SECONDS)
        self._times = self._times + 1 if is_slow and slowest == self._slow else int(is_slow)
        self._slow = slowest if is_slow else -1
        if self._times < LOOKS or self._told == slowest:
            return None
        self._told = slowest
        everyone = ", ".join(f"{seconds:.2f}" for seconds in times)
        return (
            f"warning: process {slowest} holds up the others by {lost:.2f} of {step:.2f} s in each step; "
            f"up to the end of their first forward the processes take {everyone} s"
        )
