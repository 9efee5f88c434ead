"""The end of a run, and what it used: signals, memory, and a process group that no process leaves too early."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from acc_lm.errors import EXIT_INTERRUPTED, is_main_process

if TYPE_CHECKING:
    from accelerate import Accelerator


class StopRequest:
    """Ctrl-C and SIGTERM as a flag that all processes agree on after a step.

    A second Ctrl-C leaves at once. Launchers pass a Ctrl-C on to processes that have already seen it, so two within a
    second are one.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._first_interrupt: float | None = None
        self._group: Any = None

    @contextmanager
    def listening(self, accelerator: Accelerator) -> Iterator[StopRequest]:
        """Flag the signals for as long as the context lasts."""
        if accelerator.num_processes > 1:
            # A group on the CPU: agreeing must not wait for the device.
            self._group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else dist.group.WORLD
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._first_interrupt is not None and now - self._first_interrupt > 1.0:
                os.write(2, b"\ninterrupted twice: leaving at once, nothing saved since the last checkpoint\n")
                os._exit(EXIT_INTERRUPTED)
            self._first_interrupt = self._first_interrupt or now
        if self.reason is None:
            self.reason = signal.Signals(number).name
            if is_main_process():
                os.write(
                    2, f"\n{self.reason}: finishing the step, then saving (Ctrl-C again leaves at once)\n".encode()
                )

    def agreed(self) -> str | None:
        """The reason to stop if any process has one; the same answer on every process. Called once a step by all."""
        if self._group is None:
            return self.reason
        numbers = torch.tensor([signal.Signals[self.reason].value if self.reason else 0])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        number = int(numbers.numpy()[0])
        return signal.Signals(number).name if number else None


def peak_memory_gb(device: torch.device) -> float:
    """Most memory this process has used so far, in GB (1e9 bytes): of the accelerator, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def close(accelerator: Accelerator) -> None:
    """End the process group so that no process leaves while another still uses it."""
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    accelerator.end_training()
