"""Profile of a few steps: a trace of each process for a viewer, and a summary of one page.

    profile/trace-process-00000.json.gz      all events, in Chrome's format
    profile/summary.txt                      where the time of a step went, by process; operators; memory

Five parts add up to a step. *data*: the loader has not delivered a batch yet; on a GPU, only while the device is idle.
*compute*: an operator or a kernel runs, with or without communication at the same time. Communication that these do not
hide is split in two: *communication* is its time on the process that it delayed least, *waiting* (for other processes) is
the rest. *host*: none of these, which is Python between the operators.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from acc_lm.config import ProfileConfig
from acc_lm.errors import ConfigError
from acc_lm.reporting.trace import STEP, look_at, operators, summarize_steps
from acc_lm.runtime import Memory, gather_objects

if TYPE_CHECKING:
    from accelerate import Accelerator

FOLDER, PAGE = "profile", "summary.txt"
NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Profile:
    """torch's profiler over the steps that the recipe names; it costs nothing in other steps.

    Args:
        step: number of steps that the run has done; steps of the recipe among them are skipped.

    Raises:
        ConfigError: the run has fewer steps than the recipe names.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: ProfileConfig,
        output_dir: Path,
        step: int,
        num_steps: int,
        memory: Memory,
    ) -> None:
        first, last = config.steps or (1, 0)
        if last > num_steps:
            raise ConfigError(f"profile.steps must be within the {num_steps} steps of the run, got {[first, last]}")
        self._accelerator, self._memory, self._folder = accelerator, memory, output_dir / FOLDER
        self._on_gpu = accelerator.device.type == "cuda"
        self._first, self._last = max(first, step + 1), last
        self._profiler: Any = None
        self._is_on = False
        self._span: Any = None
        self._is_seen = False

    def begin(self, step: int) -> None:
        """Begin a training step, and start the profiler if the recipe names the step."""
        if not self._first - 1 <= step <= self._last or self._first > self._last:
            return
        if self._profiler is None:
            from torch.profiler import profile

            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it prints when it begins and ends
            self._profiler = profile(activities=self._activities())
            self._profiler.prepare_trace()  # one step early where possible, so that it has ended by the first profiled step
        if step >= self._first and not self._is_on:
            self._synchronize()
            self._profiler.start_trace()
            self._is_on = True
        if self._is_on:
            self._span = torch.profiler.record_function(f"{STEP}{step}")
            self._span.__enter__()

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Context with a name in the trace."""
        return NOTHING if self._span is None else torch.profiler.record_function(name)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Pause the profiler outside training steps: an evaluation can be longer than all steps together."""
        if not self._is_on:
            yield
            return
        self._synchronize()
        self._profiler.toggle_collection_dynamic(False, self._activities())
        try:
            yield
        finally:
            self._synchronize()
            self._profiler.toggle_collection_dynamic(True, self._activities())

    def end(self, step: int) -> None:
        """End a step, before evaluating and saving. Every process calls; the last profiled step writes the files."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span, self._is_seen = None, True
            if step == self._last:
                self.finish()

    def finish(self) -> None:
        """Write the trace and the summary, if anything was recorded. Every process calls."""
        self._synchronize()
        self.stop()
        if not self._is_seen:
            return
        self._is_seen = False
        local: dict[str, Any] = {"memory": self._memory.phases}
        trace = self._folder / f"trace-process-{self._accelerator.process_index:05d}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(trace))
            with gzip.open(trace, "rt") as file:
                events = json.load(file)["traceEvents"]
            local["steps"] = look_at(events)
        except OSError as error:  # no reason to end a run
            local["problem"] = f"{error.strerror} ({error.filename or trace})"
        everyone = gather_objects(self._accelerator, local)
        if not self._accelerator.is_main_process:
            return
        if problem := next((of["problem"] for of in everyone if "problem" in of), None):
            print(f"warning: no profile was written: {problem}", flush=True)
            return
        (self._folder / PAGE).write_text(summarize_steps(everyone, operators(events), self._first, self._folder))
        last = self._first + len(local["steps"]) - 1
        print(f"profile of steps {self._first} to {last}: {self._folder / PAGE}", flush=True)

    def stop(self) -> None:
        """Stop the profiler without writing anything."""
        if self._is_on:
            self._is_on = False
            self._profiler.stop_trace()

    def _activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._accelerator.device)
