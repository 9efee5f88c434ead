"""Threads of a process that computes on a CPU: as many as the machine can give now, by a trial of the model's own products."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from acc_lm.config import Config
from acc_lm.runtime.launch.request import split_global_batch

if TYPE_CHECKING:
    from accelerate import Accelerator

TRIAL_SECONDS = 0.2
TRIAL_FLOPS = 2e8
"""Maximum floating-point operations of a product: two milliseconds of one core."""
TRIED_SECONDS = 0.05
"""Seconds of each trial, at least: several turns of the scheduler."""
FREE = 0.8
"""Share of their time that all threads must really have had a core. If one waits for a core, all others wait for it."""
FASTER = 1.1
"""Factor by which more threads must be faster."""


def keep_threads(accelerator: Accelerator, recorded: int | None) -> list[str]:
    """Use the number of threads that a checkpoint records, on which the bits of a run depend; the user's own number wins.

    Returns:
        A line, if this machine would have given another number.
    """
    usual = torch.get_num_threads()
    if not recorded or recorded == usual or not _may_choose(accelerator):
        return []
    torch.set_num_threads(recorded)
    threads = f"{recorded} thread{'s' * (recorded > 1)}"
    return [
        f"{threads}, as in the checkpoint; OMP_NUM_THREADS={usual} takes this machine's, with results equal to rounding"
    ]


def choose_threads(accelerator: Accelerator, model: nn.Module, config: Config, recorded: int | None) -> list[str]:
    """Set the fastest number of threads for this model on this machine now; return a line about it.

    Only a run of one process chooses, at its start. A launcher sets the threads of several processes.

    Args:
        recorded: number of threads that the run already has, from its checkpoint; None at its first start.
    """
    shape = _usual_shape(model)
    if recorded or shape is None or accelerator.num_processes > 1 or not _may_choose(accelerator):
        return []
    num_cores = _num_cores()
    counts = sorted({*(1 << power for power in range(num_cores.bit_length()) if 1 << power <= num_cores), num_cores})
    if len(counts) == 1:
        return []
    micro_batch_size, _ = split_global_batch(config.training, accelerator.num_processes)
    trials = _try(counts, shape, micro_batch_size * config.data.sequence_length)
    chosen = counts[0]
    for count in counts[1:]:
        if trials[count].share >= FREE and trials[count].speed > FASTER * trials[chosen].speed:
            chosen = count
    torch.set_num_threads(chosen)
    tried = ", ".join(f"{1e3 / trial.speed:.2g} ms with {count}" for count, trial in trials.items())
    free = "" if trials[counts[-1]].share >= FREE else ", and other programs use the cores"
    threads = f"{chosen} thread{'s' * (chosen > 1)}"
    return [
        f"{threads}, the best here and now: one product of the model takes {tried}{free}; resumed runs keep it, OMP_NUM_THREADS sets it"
    ]


def _may_choose(accelerator: Accelerator) -> bool:
    """False on a GPU, and where the user or the launcher has decided."""
    return accelerator.device.type == "cpu" and not any(
        os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    )


def _num_cores() -> int:
    """Cores that this process may use, as many as torch would take at most."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, torch.get_num_threads())


def _usual_shape(model: nn.Module) -> tuple[int, int] | None:
    """Shape of the weights in which the model has most of its parameters; None: it has no matrices."""
    sizes: Counter[tuple[int, int]] = Counter()
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.device.type == "cpu":
            sizes[parameter.shape[0], parameter.shape[1]] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else None


class _Trial(NamedTuple):
    speed: float
    """Products per second."""
    share: float
    """Share of the time of all threads for which they had a core."""


def _try(counts: list[int], shape: tuple[int, int], num_tokens: int) -> dict[int, _Trial]:
    """Try products of `num_tokens` rows with weights of this shape, by number of threads."""
    rows = max(1, min(num_tokens, int(TRIAL_FLOPS / (2 * shape[0] * shape[1]))))
    inputs, weights = torch.ones(rows, shape[0]), torch.ones(shape)
    trials = {}
    for count in counts:
        torch.set_num_threads(count)
        inputs @ weights  # the first product with other threads begins them
        began, used, done = time.perf_counter(), time.process_time(), 0
        while (seconds := time.perf_counter() - began) < max(TRIAL_SECONDS / len(counts), TRIED_SECONDS):
            inputs @ weights
            done += 1
        trials[count] = _Trial(done / seconds, (time.process_time() - used) / (seconds * count))
    return trials
