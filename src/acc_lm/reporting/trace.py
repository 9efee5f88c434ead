"""Table of where the time of a step goes, from traces of torch.profiler."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

STEP, DATA = "train step ", "data"
STEP_PARTS = ("data", "compute", "communication", "waiting", "host")
COMPUTES = ("aten::", "Torch-Compiled Region", "CompiledFunction")
"""Names of events that compute on a CPU; engines, autograd and calls of collectives are not, as they wait inside."""
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
MOST_OPERATORS, MOST_PROCESSES = 15, 8
Intervals = list[tuple[float, float]]
"""Intervals in order, of which none touches another."""


def look_at(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of each step in a process's trace: total, data, compute, host, and the exposed part of each collective."""
    complete = [event for event in events if event.get("ph") == "X"]
    spans = sorted(_place(e) for e in complete if e.get("cat") == "user_annotation" and e["name"].startswith(STEP))
    fetches = joined(_place(e) for e in complete if e.get("cat") == "user_annotation" and e["name"] == DATA)
    kernels = [event for event in complete if event.get("cat") in KERNELS]
    if not kernels:
        busy = joined(_place(e) for e in complete if e.get("cat") == "cpu_op" and e["name"].startswith(COMPUTES))
        talk = sorted(_place(e) for e in complete if e["name"].startswith("gloo:"))
        return [_parts(window, without([window], without([window], fetches)), busy, talk) for window in spans]
    windows = device_windows(spans, complete, kernels)
    busy = joined(_place(e) for e in kernels if "nccl" not in e["name"].lower())
    talk = sorted(_place(e) for e in kernels if "nccl" in e["name"].lower())
    at_work = joined(_place(e) for e in kernels)
    return [_parts(window, without(within(fetches, window), at_work), busy, talk) for window in windows]


def operators(events: Iterable[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """Name, calls and seconds (without callees) of each operator, or of each kernel if there are any; longest first."""
    complete = [event for event in events if event.get("ph") == "X"]
    steps = joined(_place(e) for e in complete if e.get("cat") == "user_annotation" and e["name"].startswith(STEP))
    found: dict[str, list[float]] = {}

    def add(name: str, calls: int, time: float) -> None:
        row = found.setdefault(name, [0, 0.0])
        row[0] += calls
        row[1] += time / 1e6

    kernels = [event for event in complete if event.get("cat") in KERNELS]
    for event in kernels:
        add(event["name"], 1, event["dur"])
    above: dict[Any, list[dict[str, Any]]] = {}
    for event in sorted(complete, key=lambda e: (e["ts"], -e["dur"])) if not kernels else ():
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
    """Times at which a GPU worked on the steps: the host runs ahead, so a step ends with its last launched work."""
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})
    }
    ends = sorted((launched.get(e["args"].get("correlation"), e["ts"]), e["ts"] + e["dur"]) for e in kernels)
    latest, over = -1.0, []
    for _, end in ends:
        latest = max(latest, end)
        over.append(latest)

    def over_by(time: float) -> float:
        """Time at which everything launched before `time` is over."""
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
    parts = {
        "seconds": seconds,
        "data": length(data),
        "compute": length(compute),
        "host": host,
        "communicated": length(joined(within(talk, window))),
    }
    return {**{name: value / 1e6 for name, value in parts.items()}, "exposed": [value / 1e6 for value in exposed]}


def split(everyone: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, float]]:
    """Five parts of a step on each process, and its hidden communication; mean seconds over the steps.

    Args:
        everyone: result of `look_at` for each process.
    """
    result = [dict.fromkeys((*STEP_PARTS, "step", "hidden"), 0.0) for _ in everyone]
    for of_step in zip(*everyone, strict=True):
        exposed = [one["exposed"] for one in of_step]
        if len({len(one) for one in exposed}) > 1:  # different collectives: only the sums can be compared
            exposed = [[sum(one)] for one in exposed]
        least = [min(of_collective) for of_collective in zip(*exposed, strict=True)]
        for parts, one, local in zip(result, of_step, exposed, strict=True):
            values = {
                "data": one["data"],
                "compute": one["compute"],
                "host": one["host"],
                "step": one["seconds"],
                "communication": sum(least),
                "waiting": sum(local) - sum(least),
                "hidden": one["communicated"] - sum(local),
            }
            for name, value in values.items():
                parts[name] += value / len(everyone[0])
    return result


def summarize_steps(
    everyone: Sequence[dict[str, Any]], operators: Sequence[tuple[str, int, float]], first: int, folder: Path
) -> str:
    """Text of `summary.txt`."""
    parts, num_steps = split([of["steps"] for of in everyone]), len(everyone[0]["steps"])
    shown = range(min(len(parts), MOST_PROCESSES))
    names = {"waiting": "waiting for others", "host": "host, none of these", "hidden": "hidden communication"}
    lines = [f"Steps {first} to {first + num_steps - 1}, milliseconds per step", ""]
    lines.append(f"{'':22}{'mean':>10}{'share':>8}" + "".join(f"{f'process {i}':>12}" for i in shown))
    step = statistics.fmean(of["step"] for of in parts)
    for name in (*STEP_PARTS, "step", "hidden"):
        mean = statistics.fmean(of[name] for of in parts)
        share = f"{mean / step:8.1%}" if name != "hidden" else f"{'':8}"
        cells = "".join(f"{1e3 * parts[i][name]:12.2f}" for i in shown)
        lines.append(f"{names.get(name, name):22}{1e3 * mean:10.2f}{share}{cells}")
    if len(parts) > len(shown):
        lines.append(f"and {len(parts) - len(shown)} more processes")
    lines += ["", "Operators of process 0 in a step, without the operators that they call", ""]
    lines.append(f"{'':60}{'calls':>8}{'ms':>10}")
    for name, calls, seconds in operators[:MOST_OPERATORS]:
        lines.append(f"{name[:58]:60}{calls / num_steps:8.1f}{1e3 * seconds / num_steps:10.3f}")
    lines += ["", "Memory, GB: peak of each phase so far, on the process with the highest", ""]
    for phase in everyone[0]["memory"]:
        lines.append(f"{phase:22}{max(of['memory'].get(phase, 0.0) for of in everyone):10.3f}")
    lines += [
        "",
        f"The traces in {folder} open at https://ui.perfetto.dev, which uploads nothing, or in chrome://tracing.",
    ]
    return "\n".join(lines) + "\n"


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
    """Parts of the intervals inside the window."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if end > low and start < high]


def without(intervals: Iterable[tuple[float, float]], taken: Intervals) -> Intervals:
    """Parts of the intervals that are not in `taken`."""
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
