"""The token ring: every contender is a separate process that trains while it holds the token and otherwise waits.

    driver ──token──► ours ──► bare ──► Trainer ──► ... ──► ours again       one round; the next one starts one further

A contender runs its own unchanged loop. It is stopped and timed from outside, by torch's global hook after an optimizer's step, so
a step is everything between two updates: fetching, forward, backward, clipping, updating, logging. Before anything is timed, losses
and gradient norms of the first steps must agree with those of the hand-written loop.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

CHECKED_STEPS = 5
TOLERANCE = {"no": 1e-4, "bf16": 2e-2}
"""Largest relative difference of a loss or a gradient norm in the checked steps."""
NOISE = {"cpu": 0.02, "gpu": 0.01}
"""Largest relative difference between our two copies (A/A control); a run with a larger one is void."""
START_SECONDS = 300
LEAST_SECONDS = 45
"""A contender is not started with less time than this left, because it would not be timed."""
NOT_REACHED = "not reached: the time of this command was up"
RESAMPLES = 2000


class Done(BaseException):
    """Raised to leave a contender's loop."""


@dataclass
class Gate:
    """Counts the updates of this process and holds it between two rounds.

    Args:
        connection: connection to the driver, which sends a number of steps, or None to end.
        base_memory: memory of this process before its work, in bytes.
    """

    connection: Connection
    base_memory: int
    losses: list[list[float]] = field(default_factory=lambda: [[]])
    """Values on which backward was called, by step."""
    norms: list[float] = field(default_factory=list)
    count: int = 0
    until: int = CHECKED_STEPS
    timed: int = 0
    """Number of steps to time after the warm-up steps."""
    began: tuple[float, ...] = ()
    events: list[Any] = field(default_factory=list)

    def open(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        backward = torch.Tensor.backward

        def noted(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
            if not tensor.is_meta:  # litgpt counts its operations on a meta tensor
                self.losses[-1].append(float(tensor.detach()))
            backward(tensor, *arguments, **keywords)

        def norm(
            optimizer: torch.optim.Optimizer, *_: Any
        ) -> None:  # after the step, because Lightning runs backward inside it
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            local = [
                getattr(g, "_local_tensor", g).detach() for g in gradients
            ]  # a sharded gradient is complete on one process
            parts = [torch.linalg.vector_norm(g.double()) for g in local]
            self.norms.append(float(torch.linalg.vector_norm(torch.stack(parts))))
            self.losses.append([])

        torch.Tensor.backward = noted  # type: ignore[method-assign]
        hook = register_optimizer_step_post_hook(norm)

        def stop_checking() -> None:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            hook.remove()

        self._stop_checking = stop_checking
        register_optimizer_step_post_hook(lambda *_: self.step_done())

    def step_done(self) -> None:
        self.count += 1
        if self.count < self.until:
            return
        if self.timed:  # the warm-up is done
            self._time()
            return
        if self.count == CHECKED_STEPS:
            self._stop_checking()
            # Leave out backward passes before the first step (ours makes one under DDP).
            size = len(self.losses[CHECKED_STEPS - 1])
            losses = [sum(step[-size:]) for step in self.losses[:CHECKED_STEPS]]
            self.connection.send({"losses": losses, "norms": self.norms, "threads": _threads()})
        else:
            self.connection.send(self._elapsed())
        _free_device()
        token = self.connection.recv()
        if token is None:
            raise Done
        self.timed, warm_up = token
        self.until += warm_up
        if not warm_up:
            self._time()

    def _time(self) -> None:
        self.until += self.timed
        self.timed = 0
        self.began = self._start()

    def _start(self) -> tuple[float, ...]:
        import torch

        if torch.cuda.is_initialized():
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            self.events[0].record()
        return time.process_time(), time.perf_counter()

    def _elapsed(self) -> dict[str, float]:
        import torch

        took: dict[str, float] = {}
        if self.events:
            self.events[1].record()
            torch.cuda.synchronize()
            took["gpu"] = self.events[0].elapsed_time(self.events[1]) / 1000
            took["memory"] = torch.cuda.max_memory_allocated() / 2**20
        took["cpu"], took["wall"] = time.process_time() - self.began[0], time.perf_counter() - self.began[1]
        took.setdefault("memory", (_memory("VmHWM") - self.base_memory) / 2**20)
        return took


def _free_device() -> None:
    """Free the GPU memory that torch caches, for the contender whose turn is next."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _memory(name: str) -> int:
    """Memory of this process in bytes, by its name in /proc: VmRSS (now) or VmHWM (peak)."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


class Worker:
    """Forked process that executes `run`: a training that reports through a gate, or without a gate any other work."""

    def __init__(
        self,
        name: str,
        run: Callable[[], None],
        folder: Path,
        environment: dict[str, str] | None = None,
        gated: bool = True,
    ) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True, exist_ok=True)
        mine, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            mine.close()
            _live(run, Connection(theirs.detach()), folder, environment or {}, gated)
        theirs.close()
        self.connection = Connection(mine.detach())

    def ask(self, steps: int, warm_up: int) -> None:
        with suppress(OSError):
            self.connection.send((steps, warm_up))

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next report, or `{"failed": why}` if the process died or did not answer in time."""
        try:
            if not self.connection.poll(seconds):
                return {"failed": f"no answer in {seconds:.0f} s"}
            report: dict[str, Any] = self.connection.recv()
            return report
        except (EOFError, OSError):
            return {"failed": f"died: {self.last_line()}"}

    def last_line(self) -> str:
        with suppress(OSError):
            lines = (self.folder / "output").read_text(errors="replace").strip().splitlines()
            return lines[-1][:300] if lines else ""
        return ""

    def end(self) -> None:
        import signal

        with suppress(OSError):
            self.connection.send(None)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            with suppress(ChildProcessError):
                if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.02)
                    continue
            break
        else:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self.connection.close()


def _live(
    run: Callable[[], None], connection: Connection, folder: Path, environment: dict[str, str], gated: bool
) -> None:
    """Body of a forked process; never returns."""
    code = 1
    try:
        gc.freeze()  # exempt everything imported from garbage collection, in every contender
        if torch := sys.modules.get("torch"):  # rebuild the thread pool before several threads ask for it at once
            torch.set_num_threads(torch.get_num_threads())
        with (folder / "output").open("wb", buffering=0) as file, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ |= environment
        os.chdir(folder)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
        gate = Gate(connection, _memory("VmRSS"))
        if gated:
            gate.open()
        run()
        connection.send({"failed": f"ended by itself after {gate.count} steps: {_last_output(folder)}"})
    except Done:
        code = 0
    except BaseException as error:
        traceback.print_exc()
        with suppress(OSError):
            connection.send({"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _last_output(folder: Path) -> str:
    sys.stdout.flush()
    lines = (folder / "output").read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def in_a_process(work: Callable[[], Any], folder: Path, seconds: float = 300) -> Any:
    """Execute `work` in a forked process and return its result, so that nothing of it remains in this one."""
    sent: list[Any] = []

    def run() -> None:
        import multiprocessing.connection

        sent.append(multiprocessing.connection)
        connection.send({"result": work()})
        raise Done

    connection: Connection
    mine, theirs = socket.socketpair()
    connection = Connection(theirs.detach())
    worker = Worker("process", run, folder, gated=False)
    connection.close()
    answers = Connection(mine.detach())
    try:
        if not answers.poll(seconds):
            raise RuntimeError(f"{folder.name}: {worker.last_line() or 'no answer'}")
        return answers.recv()["result"]
    except (EOFError, OSError):
        raise RuntimeError(f"{folder.name}: {worker.last_line()}") from None
    finally:
        answers.close()
        worker.end()


# --- a race --------------------------------------------------------------------------------------------------------


@dataclass
class Race:
    """Result of a race: samples of seconds per step, and the contenders that failed, with the reason."""

    samples: dict[str, list[dict[str, float]]]
    failed: dict[str, str]
    checks: dict[str, dict[str, float]]
    """Largest relative difference of losses and of gradient norms from the reference in the checked steps."""
    started: dict[str, float]
    """Wall seconds until the checked steps were done; contenders start at the same time."""

    def values(self, contender: str, clock: str) -> list[float]:
        return [sample[clock] for sample in self.samples.get(contender, [])]


def race(
    contenders: dict[str, Callable[[], None]],
    folder: Path,
    *,
    steps: int,
    rounds: int,
    reference: str,
    tolerance: float,
    say: Callable[[str], None] = print,
    environments: dict[str, dict[str, str]] | None = None,
    tolerances: dict[str, float] | None = None,
    together: int = 4,
    warm_up: int = 0,
    deadline: float = math.inf,
) -> Race:
    """Let the contenders take turns, `rounds` times `steps` steps each.

    Args:
        contenders: name -> the loop, run in a separate process.
        reference: the contender whose losses and gradient norms the others must match.
        tolerances: tolerances of single contenders.
        together: number of contenders that start at the same time.
        warm_up: number of steps at the start of each turn that are not timed.
        deadline: value of `time.monotonic()` after which no contender starts and no round begins; contenders that were not timed
            are listed.
    """

    def patience() -> float:
        return min(START_SECONDS, max(1.0, deadline - time.monotonic()))

    names = list(contenders)
    workers, reports, failed, started = _start(contenders, folder, environments or {}, together, deadline, patience)
    checks, wrong = _check(reports, reference, {name: (tolerances or {}).get(name, tolerance) for name in reports})
    for name in wrong:
        workers.pop(name).end()
    failed |= wrong
    if reference in failed:
        for worker in workers.values():
            worker.end()
        return Race(
            {},
            failed | {n: f"no reference to compare with: {failed[reference]}" for n in names if n not in failed},
            checks,
            started,
        )
    samples = _take_turns(workers, failed, steps, rounds, warm_up, deadline, patience, say)
    for name, why in failed.items():
        say(f"  {name}: failed, {why}")
    return Race(samples, failed, checks, started)


def _take_turns(
    workers: dict[str, Worker],
    failed: dict[str, str],
    steps: int,
    rounds: int,
    warm_up: int,
    deadline: float,
    patience: Callable[[], float],
    say: Callable[[str], None],
) -> dict[str, list[dict[str, float]]]:
    """Measure every worker once in each round, the first place rotating; a worker that fails leaves `workers`."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    took = 0.0
    for round_ in range(-1, rounds):  # round -1 warms up and does not count
        began = time.monotonic()
        if round_ > 0 and began + took > deadline:
            say(f"  {round_} rounds of {rounds}: the time was up")
            break
        order = list(workers)
        shift = round_ % max(len(order), 1)
        for name in order[shift:] + order[:shift]:
            workers[name].ask(steps, warm_up)
            report = workers[name].answer(max(patience(), LEAST_SECONDS))
            if "failed" in report:
                failed[name] = report["failed"]
                workers.pop(name).end()
                samples.pop(name)
            elif round_ >= 0:
                samples[name].append({k: v if k == "memory" else v / steps for k, v in report.items()})
        took = time.monotonic() - began
    for worker in workers.values():
        worker.end()
    return samples


def _start(
    contenders: dict[str, Callable[[], None]],
    folder: Path,
    environments: dict[str, dict[str, str]],
    together: int,
    deadline: float,
    patience: Callable[[], float],
) -> tuple[dict[str, Worker], dict[str, dict[str, Any]], dict[str, str], dict[str, float]]:
    """Workers, their first reports, those that were not reached and why, and the seconds that each took to start."""
    workers: dict[str, Worker] = {}
    reports: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    started: dict[str, float] = {}
    waiting: list[str] = []
    for name in [*contenders, *[None] * together]:  # type: ignore[list-item]
        if name is not None and time.monotonic() > deadline - LEAST_SECONDS:
            failed[name] = NOT_REACHED
        elif name is not None:
            began = time.perf_counter()
            place = folder / "".join(c if c.isalnum() else "-" for c in name)
            workers[name] = Worker(name, contenders[name], place, environments.get(name))
            started[name] = began
            waiting.append(name)
        if waiting and (name is None or len(waiting) >= together):
            first = waiting.pop(0)
            reports[first] = workers[first].answer(patience())
            started[first] = time.perf_counter() - started[first]
    return workers, reports, failed, started


def _check(
    reports: dict[str, dict[str, Any]], reference: str, tolerances: dict[str, float]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Differences of each contender from the reference, and the contenders that failed or differ, with the reason."""
    expected = reports.get(reference, {})
    failed: dict[str, str] = {}
    checks: dict[str, dict[str, float]] = {}
    for name in reports:
        report = reports[name]
        why = report.get("failed")
        if why is None and "failed" not in expected:
            checks[name] = {what: _difference(report[what], expected[what]) for what in ("losses", "norms")}
            bound = tolerances[name]
            # A difference of nan is no agreement either.
            wrong = [f"{what} differ by {d:.1e}" for what, d in checks[name].items() if not d <= bound]
            if wrong:
                why = f"{' and '.join(wrong)} from {reference} in the first {CHECKED_STEPS} steps, allowed {bound:.0e}"
        if why is not None:
            failed[name] = why
    return checks, failed


def why_void(race: Race, bound: float, clock: str = "cpu") -> tuple[str | None, tuple[float, float, float] | None]:
    """Return why this race is void (None: it is valid), and the ratio of ours to ours again with its interval."""
    for name in ("ours", "ours again"):
        if name in race.failed:
            return f"{name} failed, {race.failed[name]}", None
    noise = ratio_of_medians(race.values("ours", clock), race.values("ours again", clock))
    if abs(noise[0] - 1) > bound:
        return f"ours took {noise[0]:.3f} times as long as ours again, allowed {1 - bound:g} to {1 + bound:g}", noise
    return None, noise


def _difference(values: Sequence[float], expected: Sequence[float]) -> float:
    if len(values) != len(expected):
        return float("nan")
    a, b = np.array(values), np.array(expected)
    return float(np.abs((a - b) / b).max())


# --- figures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A bound on a number: `Goal("ratio", at_most=0.97)`."""

    of: str = "ratio"
    """Number of the figure that is bounded: `ratio` or `median`."""
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        bound = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        return f"{self.of} {bound}"

    def is_met(self, value: float | None) -> bool | None:
        if value is None:
            return None
        return value <= self.at_most if self.at_most is not None else value >= (self.at_least or 0.0)


def figure(
    id: str,
    what: str,
    contender: str,
    *,
    ours: Sequence[float],
    theirs: Sequence[float] | None = None,
    unit: str,
    goal: Goal | None = None,
    higher_is_better: bool = False,
    scale: float = 1.0,
    note: str = "",
) -> dict[str, Any]:
    """One row of the results: a contender's median, and ours over theirs with a 95 % interval.

    Args:
        ours, theirs: one sample per round; samples of one round belong together. Without `theirs` the median is ours.
        scale: factor from samples to `unit`.
    """
    ratio = low = high = None
    shown = ours if theirs is None else theirs
    if theirs is not None:
        ratio, low, high = ratio_of_medians(ours, theirs) if statistics.median(theirs) else (None, None, None)
    median = statistics.median(shown) * scale
    value = ratio if goal is not None and goal.of == "ratio" else median
    return {
        "id": id,
        "what": what,
        "contender": contender,
        "median": median,
        "unit": unit,
        "ratio": ratio,
        "low": low,
        "high": high,
        "goal": str(goal) if goal else None,
        "met": goal.is_met(value) if goal else None,
        "higher_is_better": higher_is_better,
        "note": note,
    }


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """ours / theirs, and its bootstrap 95 % interval over rounds; with equal numbers of rounds, both are drawn together."""
    a, b = np.array(ours, dtype=float), np.array(theirs, dtype=float)
    draw = np.random.default_rng(0)
    rounds_a = draw.integers(0, len(a), (RESAMPLES, len(a)))
    rounds_b = rounds_a if len(a) == len(b) else draw.integers(0, len(b), (RESAMPLES, len(b)))
    ratios = np.median(a[rounds_a], axis=1) / np.median(b[rounds_b], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(a) / np.median(b)), float(low), float(high)
