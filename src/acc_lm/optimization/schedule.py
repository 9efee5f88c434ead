"""Learning rate as a function of the optimizer step, from transformers' schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from acc_lm.config import OptimizerConfig, ScheduleConfig
from acc_lm.errors import ConfigError


def build_schedule(
    config: ScheduleConfig,
    optimizer: OptimizerConfig,
    num_steps: int,
    global_batch_size: int | None = None,
    lag: int = 0,
) -> Callable[[int], float]:
    """Build the learning rate as a function of step k (first = 1); after `num_steps` the last rate holds.

    The rate of step k is the peak times the schedule's factor at k - 1, as in transformers' Trainer. The recipe's rates
    are scaled to `global_batch_size` if it is given and the recipe says how.

    Args:
        lag: in rows, as in `RowOrder`. With a lag, a step has the rate of a run that used this global batch size from the
            start and has seen as many rows. Such a run has `num_steps` - `lag` / `global_batch_size` steps, possibly a
            fraction.

    Raises:
        ConfigError: the schedule rejects or lacks some of `schedule.arguments`, or gives an unusable rate at some step.
    """
    import torch
    from transformers import get_scheduler

    scale = config.scale(global_batch_size) if global_batch_size else 1.0
    lag_steps = lag / global_batch_size if lag and global_batch_size else 0
    length = num_steps - lag_steps
    warmup = config.count_warmup_steps(length)
    name, arguments = _name_and_arguments(config, scale, length, warmup)
    peak = optimizer.learning_rate * scale
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    try:
        scheduler = get_scheduler(
            name,
            carrier,
            num_warmup_steps=warmup,
            num_training_steps=cast(int, length),  # a fraction works too
            scheduler_specific_kwargs=arguments,
        )
        factor: Callable[[float], float] = scheduler.lr_lambdas[0]

        def learning_rate_at(step: int) -> float:
            return peak * float(factor(min(step, num_steps) - lag_steps - 1))

        first = 1 + max(0, math.ceil(lag_steps))
        _check_rates(learning_rate_at, peak, range(first, num_steps + 1), first + warmup)
    except Exception as error:  # each schedule raises its own error types, some only in the middle of a run
        reason = str(error).split(") ")[-1]
        raise ConfigError(
            f"schedule.arguments must fit schedule {config.name}, got {config.arguments}: {reason}; correct them"
        ) from None
    return learning_rate_at


def _name_and_arguments(config: ScheduleConfig, scale: float, length: float, warmup: int) -> tuple[str, dict[str, Any]]:
    """Name of transformers' schedule, and the arguments of its own.

    Args:
        scale: factor on the recipe's rates.
        length: steps of the run, possibly a fraction.
        warmup: steps of the warmup.

    Raises:
        ConfigError: warmup and decay do not fit into the run, or a constant schedule has arguments.
    """
    name, arguments = config.name, dict(config.arguments)
    if warmup > length:
        raise ConfigError(
            f"schedule.warmup_steps must be at most the run's {length:g} steps, got {warmup}; lower it, or write a share like 0.03"
        )
    if name.startswith("constant") and arguments:
        raise ConfigError(f"schedule.arguments must be empty for schedule {name}, got {arguments}; remove them")
    if name == "cosine" and config.min_learning_rate > 0:
        name = "cosine_with_min_lr"
    if name.endswith("min_lr") and "min_lr_rate" not in arguments:
        arguments.setdefault("min_lr", config.min_learning_rate * scale)
    decay = arguments.get("num_decay_steps", 0)
    if isinstance(decay, (int, float)) and arguments.get("num_stable_steps") is None and decay > length - warmup:
        raise ConfigError(
            f"schedule.arguments.num_decay_steps must be at most the {length - warmup:g} steps after the warmup, got {decay:g}, "
            "so the run would begin in the middle of the decay; lower it"
        )
    return name, arguments


def _check_rates(learning_rate_at: Callable[[int], Any], peak: float, steps: range, after_warmup: int) -> None:
    """Check the rates at the first and last steps, around the end of the warmup, and at up to two thousand other steps.

    Raises:
        ValueError: a rate is non-finite, negative, or above the peak.
    """
    borders = (*steps[:1], *range(after_warmup - 1, after_warmup + 2), *steps[-2:])
    for step in (*steps[:: max(1, len(steps) // 1000)], *(step for step in borders if step in steps)):
        rate = learning_rate_at(step)
        if not math.isfinite(rate) or not 0 <= rate <= peak * (1 + 1e-9):
            raise ValueError(f"the rate of step {step} would be {rate:g}, with a peak of {peak:g}")
