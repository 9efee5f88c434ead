"""A look at a few steps in detail: a trace of each process for a viewer, and what it says in one page.

    profile/trace-process-00000.json.gz      all that happened, in Chrome's format
    profile/summary.txt                      where the time of a step went, by process; operators; memory

Five parts add up to a step. *data*: the loader has not given a batch yet; on a GPU only while the device has nothing to do.
*compute*: an operator, or a kernel, runs, whether something is communicated meanwhile or not. What is communicated and not
hidden so is *communication* for as long as it held up the process that it held up least, and *waiting* for the others in the
rest. *host*: none of these, which is Python between the operators.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from acc_lm.config import ProfileConfig
from acc_lm.errors import ConfigError
from acc_lm.runtime import Memory, gather_objects

if TYPE_CHECKING:
    from accelerate import Accelerator

FOLDER, SUMMARY = "profile", "summary.txt"
STEP, DATA = "train step ", "data"
PARTS = ("data", "compute", "communication", "waiting", "host")
COMPUTES = ("aten::", "Torch-Compiled Region", "CompiledFunction")
"""What computes on a CPU. Engines, autograd and the calls of collectives do not: they wait inside."""
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
MOST_OPERATORS, MOST_PROCESSES = 15, 8
NOTHING: AbstractContextManager[None] = contextlib.nullcontext()

Intervals = list[tuple[float, float]]
"""In order, and none touches another."""


class Profile:
    """torch's profiler over the steps that the recipe names; it costs nothing in all others.

    Args:
        step: the run has done so many; steps of the recipe that are among them are not looked at.

    Raises:
        ConfigError: the run has fewer steps.
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
        """A step of the training begins."""
        if not self._first - 1 <= step <= self._last or self._first > self._last:
            return
        if self._profiler is None:
            from torch.profiler import profile

            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it prints where it begins and ends
            self._profiler = profile(activities=self._activities())
            self._profiler.prepare_trace()  # where a step comes before the first, this is over by then
        if step >= self._first and not self._is_on:
            self._synchronize()
            self._profiler.start_trace()
            self._is_on = True
        if self._is_on:
            self._span = torch.profiler.record_function(f"{STEP}{step}")
            self._span.__enter__()

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A name in the trace."""
        return NOTHING if self._span is None else torch.profiler.record_function(name)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """What is no step is not seen: an evaluation can be longer than all steps together."""
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
        """It is over, but for evaluating and saving. Every process calls; the last of the steps writes the files."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span, self._is_seen = None, True
            if step == self._last:
                self.finish()

    def finish(self) -> None:
        """Write what was seen, if anything was. Every process calls."""
        self._synchronize()
        self.stop()
        if not self._is_seen:
            return
        self._is_seen = False
        mine: dict[str, Any] = {"memory": self._memory.phases}
        trace = self._folder / f"trace-process-{self._accelerator.process_index:05d}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(trace))
            with gzip.open(trace, "rt") as file:
                events = json.load(file)["traceEvents"]
            mine["steps"] = look_at(events)
        except OSError as error:  # no reason to end a run
            mine["problem"] = f"{error.strerror} ({error.filename or trace})"
        everyone = gather_objects(self._accelerator, mine)
        if not self._accelerator.is_main_process:
            return
        if problem := next((of["problem"] for of in everyone if "problem" in of), None):
            print(f"warning: there is no profile: {problem}", flush=True)
            return
        (self._folder / SUMMARY).write_text(summary(everyone, operators(events), self._first, self._folder))
        last = self._first + len(mine["steps"]) - 1
        print(f"profile of steps {self._first} to {last}: {self._folder / SUMMARY}", flush=True)

    def stop(self) -> None:
        """Look no longer, and write nothing."""
        if self._is_on:
            self._is_on = False
            self._profiler.stop_trace()

    def _activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._accelerator.device)


# --- what a trace says ---------------------------------------------------------------------------------------------


def look_at(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each step in the trace of one process: seconds, data, compute, host, and of each collective what was not hidden."""
    whole = [event for event in events if event.get("ph") == "X"]
    spans = sorted(_place(e) for e in whole if e.get("cat") == "user_annotation" and e["name"].startswith(STEP))
    asked = joined(_place(e) for e in whole if e.get("cat") == "user_annotation" and e["name"] == DATA)
    kernels = [event for event in whole if event.get("cat") in KERNELS]
    if not kernels:
        busy = joined(_place(e) for e in whole if e.get("cat") == "cpu_op" and e["name"].startswith(COMPUTES))
        talk = sorted(_place(e) for e in whole if e["name"].startswith("gloo:"))
        return [_parts(window, without([window], without([window], asked)), busy, talk) for window in spans]
    windows = device_windows(spans, whole, kernels)
    busy = joined(_place(e) for e in kernels if "nccl" not in e["name"].lower())
    talk = sorted(_place(e) for e in kernels if "nccl" in e["name"].lower())
    at_work = joined(_place(e) for e in kernels)
    return [_parts(window, without(within(asked, window), at_work), busy, talk) for window in windows]


def operators(events: Iterable[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """Name, calls, and seconds without what else it calls, in the steps: kernels where there are some; most first."""
    whole = [event for event in events if event.get("ph") == "X"]
    steps = joined(_place(e) for e in whole if e.get("cat") == "user_annotation" and e["name"].startswith(STEP))
    found: dict[str, list[float]] = {}

    def add(name: str, calls: int, time: float) -> None:
        row = found.setdefault(name, [0, 0.0])
        row[0] += calls
        row[1] += time / 1e6

    kernels = [event for event in whole if event.get("cat") in KERNELS]
    for event in kernels:
        add(event["name"], 1, event["dur"])
    above: dict[Any, list[dict[str, Any]]] = {}
    for event in sorted(whole, key=lambda e: (e["ts"], -e["dur"])) if not kernels else ():
        if (
            event.get("cat") != "cpu_op"
            or not event["name"].startswith(COMPUTES)
            or not within(steps, (event["ts"], event["ts"]))
        ):
            continue
        callers = above.setdefault(event["tid"], [])
        while callers and _place(callers[-1])[1] <= event["ts"]:
            callers.pop()
        if callers:
            add(callers[-1]["name"], 0, -event["dur"])
        add(event["name"], 1, event["dur"])
        callers.append(event)
    return sorted(((name, int(calls), seconds) for name, (calls, seconds) in found.items()), key=lambda row: -row[2])


def device_windows(
    spans: Sequence[tuple[float, float]], events: Iterable[dict[str, Any]], kernels: Iterable[dict[str, Any]]
) -> list[tuple[float, float]]:
    """When a GPU was at the steps: the host runs ahead, so it is at one until what was launched in it is over."""
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})}  # fmt: skip
    ends = sorted((launched.get(e["args"].get("correlation"), e["ts"]), e["ts"] + e["dur"]) for e in kernels)
    latest, over = -1.0, []
    for _, end in ends:
        latest = max(latest, end)
        over.append(latest)

    def over_by(time: float) -> float:
        """When all is over that was launched before."""
        index = bisect.bisect_left(ends, (time, 0.0))
        return max(time, over[index - 1]) if index else time

    return [(over_by(start), over_by(end)) for start, end in spans]


def _parts(window: tuple[float, float], data: Intervals, busy: Intervals, talk: Intervals) -> dict[str, Any]:
    compute = without(within(busy, window), data)
    taken = joined([*data, *compute])
    exposed, reached = [], window[0]
    for start, end in within(talk, window):
        exposed.append(length(without([(max(start, reached), end)], taken)) if end > reached else 0.0)
        reached = max(reached, end)
    seconds = window[1] - window[0]
    host = seconds - length(taken) - sum(exposed)
    parts = {"seconds": seconds, "data": length(data), "compute": length(compute), "host": host,
             "communicated": length(joined(within(talk, window)))}  # fmt: skip
    return {**{name: value / 1e6 for name, value in parts.items()}, "exposed": [value / 1e6 for value in exposed]}


def split(everyone: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, float]]:
    """The five parts of a step on each process, and of what was communicated how much was hidden; mean over the steps.

    Args:
        everyone: of each process, what `look_at` found.
    """
    result = [dict.fromkeys((*PARTS, "step", "hidden"), 0.0) for _ in everyone]
    for of_step in zip(*everyone, strict=True):
        exposed = [one["exposed"] for one in of_step]
        if len({len(one) for one in exposed}) > 1:  # they took part in different ones: only the sums can be compared
            exposed = [[sum(one)] for one in exposed]
        least = [min(of_collective) for of_collective in zip(*exposed, strict=True)]
        for parts, one, mine in zip(result, of_step, exposed, strict=True):
            values = {
                "data": one["data"], "compute": one["compute"], "host": one["host"], "step": one["seconds"],
                "communication": sum(least), "waiting": sum(mine) - sum(least), "hidden": one["communicated"] - sum(mine),
            }  # fmt: skip
            for name, value in values.items():
                parts[name] += value / len(everyone[0])
    return result


def summary(
    everyone: Sequence[dict[str, Any]], operators: Sequence[tuple[str, int, float]], first: int, folder: Path
) -> str:
    """`summary.txt`."""
    parts, num_steps = split([of["steps"] for of in everyone]), len(everyone[0]["steps"])
    shown = range(min(len(parts), MOST_PROCESSES))
    names = {"waiting": "waiting for others", "host": "host, none of these", "hidden": "hidden communication"}
    lines = [f"Steps {first} to {first + num_steps - 1}, milliseconds per step", ""]
    lines.append(f"{'':22}{'mean':>10}{'share':>8}" + "".join(f"{f'process {i}':>12}" for i in shown))
    step = statistics.fmean(of["step"] for of in parts)
    for name in (*PARTS, "step", "hidden"):
        mean = statistics.fmean(of[name] for of in parts)
        share = f"{mean / step:8.1%}" if name != "hidden" else f"{'':8}"
        cells = "".join(f"{1e3 * parts[i][name]:12.2f}" for i in shown)
        lines.append(f"{names.get(name, name):22}{1e3 * mean:10.2f}{share}{cells}")
    if len(parts) > len(shown):
        lines.append(f"and {len(parts) - len(shown)} more processes")
    lines += ["", "Operators of process 0 in a step, without what else they call", ""]
    lines.append(f"{'':60}{'calls':>8}{'ms':>10}")
    for name, calls, seconds in operators[:MOST_OPERATORS]:
        lines.append(f"{name[:58]:60}{calls / num_steps:8.1f}{1e3 * seconds / num_steps:10.3f}")
    lines += ["", "Memory, GB: the most of each phase so far, on the process that had most", ""]
    for phase in everyone[0]["memory"]:
        lines.append(f"{phase:22}{max(of['memory'].get(phase, 0.0) for of in everyone):10.3f}")
    lines += [
        "",
        f"The traces in {folder} open at https://ui.perfetto.dev, which uploads nothing, or in chrome://tracing.",
    ]
    return "\n".join(lines) + "\n"


# --- intervals -----------------------------------------------------------------------------------------------------


def _place(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def joined(intervals: Iterable[tuple[float, float]]) -> Intervals:
    result: Intervals = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def within(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> Intervals:
    """Their parts in the window."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if end > low and start < high]


def without(intervals: Iterable[tuple[float, float]], taken: Intervals) -> Intervals:
    """Their parts that are not in `taken`."""
    result = []
    for start, end in intervals:
        index = max(bisect.bisect_right(taken, (start, float("inf"))) - 1, 0)
        while index < len(taken) and taken[index][0] < end:
            low, high = taken[index]
            if low > start:
                result.append((start, low))
            start = max(start, high)
            index += 1
        if start < end:
            result.append((start, end))
    return result


def length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
