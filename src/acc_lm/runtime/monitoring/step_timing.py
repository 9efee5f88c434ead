"""Time of a step spent on data, communication and waiting for stragglers, measured without waiting for the device."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from acc_lm.rows.batch import Batch
from acc_lm.runtime.monitoring.exposed_communication import watch_backward, watched
from acc_lm.runtime.monitoring.traffic import CountedStep
from acc_lm.runtime.settings.grid import processes_of_reader
from acc_lm.runtime.settings.strategy import requested_strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate import Accelerator

TIMES_SLOWER = 1.5
"""Factor by which a straggler takes longer than the median of the other processes."""
SHARE, LEAST_SECONDS = 0.1, 0.05
"""Least delay by a straggler: this share of a step, and this many seconds."""
LOOKS = 2
"""Number of consecutive looks in which the same process must be slow to count as a straggler."""
MOST_STEPS = 10
"""Number of steps after a look in which stalls are recorded: each stall takes two events on a GPU."""


@dataclass
class Marks:
    """Timestamps within a step: seconds of the host's clock, or events recorded on a GPU."""

    start: Any
    called: Any = None
    """Call of the first forward; until here a process needs no other process."""
    forward: Any = None
    forward_end: Any = None
    fetches: list[tuple[Any, Any]] = field(default_factory=list)
    stands: list[tuple[Any, Any]] = field(default_factory=list)
    """(start, end) of each stall of computation until other processes have sent something."""


@dataclass(frozen=True)
class Look:
    """Timings of the steps since the last look: seconds per step, as the mean over steps and processes."""

    data: float
    """Idle time until the loader has returned a batch."""
    communication: float
    """Stall until data from other processes has arrived, on the process that stalled least in each step."""
    waiting: float
    """Stall beyond `communication`, which is time spent waiting for the slowest process."""
    total: float
    """Sum over the processes of the number that each of them passed to `look`."""
    slow: str | None
    """Warning line if a process holds up the others and was not the last one reported; else None."""


class Pace:
    """Monitor of how long each process waits for communication; it names stragglers. Use as a context manager.

    Early arrivals at a collective wait longer than late ones, so the minimum over processes is the communication itself.
    Each process then takes as long as the slowest. A straggler therefore shows only before the first forward of a step
    (data, host) and in that forward, as until then no process waits. Engines that fetch weights from other processes,
    and processes that share rows, also wait in the forward, so under them only the time before it counts. Events on a GPU are read when a step is
    logged, so nothing waits for them, and data that is late while the device still has work costs nothing.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator = accelerator
        self._on_gpu = accelerator.device.type == "cuda"
        self._steps: list[Marks] = []
        self._slow, self._times, self._reported = -1, 0, -1
        strategy = requested_strategy()
        self._copies_buffers = strategy == "ddp"  # between the two hooks below
        self._meets_in_forward = strategy in ("fsdp2", "hsdp", "deepspeed_zero3") or processes_of_reader() > 1
        self._counted = CountedStep.asked()
        self._is_in_step = False
        self._watched: AbstractContextManager[None] = nullcontext()
        if accelerator.num_processes > 1:
            self._watched = watched(self._standing, self._on_gpu)
            watch_backward(model, self._standing)
            inner = getattr(model, "module", model)
            # A model compiled as a whole includes its hooks: without this an event would become part of the graph.
            mark = torch.compiler.disable(self._mark)
            # Runs before the engine's own hook, in which the processes may wait for each other.
            model.register_forward_pre_hook(lambda module, inputs: mark("start", "called"), prepend=True)
            inner.register_forward_pre_hook(lambda module, inputs: mark("called", "forward"))
            inner.register_forward_hook(lambda module, inputs, output: mark("forward", "forward_end"))

    def __enter__(self) -> Pace:
        self._watched.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._watched.__exit__(*raised)

    def start_step(self) -> None:
        if self._counted is not None:
            self._counted.start_step()
        self._is_in_step = True
        self._steps.append(Marks(self._now()))

    def end_step(self) -> None:
        """Mark the end of a step: time from here on (an evaluation, say) belongs to no step."""
        self._is_in_step = False

    def reading(self, loader: Iterable[Batch], span: Callable[[str], AbstractContextManager[Any]]) -> Iterator[Batch]:
        """Yield the loader's batches and record the wait for each; `span` names a section of a profile."""
        batches = iter(loader)
        while True:
            requested = self._now()
            with span("data"):
                batch = next(batches, None)
            if batch is None:
                return
            self._steps[-1].fetches.append((requested, self._now()))
            yield batch

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _mark(self, after: str, place: str) -> None:
        if self._steps and getattr(self._steps[-1], place) is None and getattr(self._steps[-1], after) is not None:
            setattr(self._steps[-1], place, self._now())  # only in the first forward of a step

    @contextmanager
    def _standing(self) -> Iterator[None]:
        thread = threading.current_thread()
        # Autograd computes on threads that Python did not start. One that it did start may be saving in the background.
        computes = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
        if not computes or not self._is_in_step or not 0 < len(self._steps) <= MOST_STEPS:
            yield
            return
        step, start = self._steps[-1], self._now()
        yield
        step.stands.append((start, self._now()))

    def _between(self, one: Any, other: Any) -> float:
        seconds: float = one.elapsed_time(other) / 1000 if self._on_gpu else other - one
        return seconds

    def _own(self, step: Marks) -> float:
        """Seconds that this process needs for itself before it first waits for the others; the first batch precedes `called`."""
        if step.forward_end is None:
            return 0.0
        forward = 0.0 if self._meets_in_forward else self._between(step.forward, step.forward_end)
        later = sum(self._between(*fetch) for fetch in step.fetches[1:])
        return self._between(step.start, step.called) + forward + later

    def _stood(self, step: Marks) -> float:
        copying = [(step.called, step.forward)] if self._copies_buffers and step.forward is not None else []
        return sum(self._between(*stand) for stand in (*step.stands, *copying))

    def look(self, seconds: float, local: float) -> Look:
        """Summarize the steps since the last look. Every process must call it.

        Call it after a log, when the device has finished all queued work.

        Args:
            seconds: time that these steps took.
            local: number of this process, to be summed over all processes.
        """
        steps, self._steps = self._steps, []
        count = max(len(steps), 1)
        data = sum(self._between(*fetch) for step in steps for fetch in step.fetches) / count
        if not steps or self._accelerator.num_processes == 1:
            return Look(data, 0.0, 0.0, local, None)
        device = self._accelerator.device
        seen = steps[:MOST_STEPS]
        numbers = [data, local, *(self._stood(step) for step in seen), *(self._own(step) for step in steps)]
        dtype = torch.float32 if device.type == "mps" else torch.float64
        everyone = self._accelerator.gather(torch.tensor([numbers], device=device, dtype=dtype)).tolist()
        stood = [numbers[2 : 2 + len(seen)] for numbers in everyone]
        own = [numbers[2 + len(seen) :] for numbers in everyone]
        least = statistics.fmean(min(of_step) for of_step in zip(*stood, strict=True))
        return Look(
            data=statistics.fmean(numbers[0] for numbers in everyone),
            communication=least,
            waiting=statistics.fmean(statistics.fmean(of_process) for of_process in stood) - least,
            total=sum(numbers[1] for numbers in everyone),
            slow=self._compare([statistics.median(of_process) for of_process in own], seconds / count),
        )

    def _compare(self, times: list[float], step: float) -> str | None:
        slowest = max(range(len(times)), key=times.__getitem__)
        usual = statistics.median(times[:slowest] + times[slowest + 1 :])
        lost = times[slowest] - usual
        is_slow = times[slowest] > TIMES_SLOWER * usual and lost > max(SHARE * step, LEAST_SECONDS)
        self._times = self._times + 1 if is_slow and slowest == self._slow else int(is_slow)
        self._slow = slowest if is_slow else -1
        if self._times < LOOKS or self._reported == slowest:
            return None
        self._reported = slowest
        everyone = ", ".join(f"{seconds:.2f}" for seconds in times)
        return (
            f"warning: process {slowest} holds up the others by {lost:.2f} of {step:.2f} s in each step; "
            f"before they first wait for each other in a step, the processes take {everyone} s"
        )
