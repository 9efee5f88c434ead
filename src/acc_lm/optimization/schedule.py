"""The learning rate as a function of the optimizer step, by transformers' schedules."""

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
    """Learning rate of step k (first = 1); past `num_steps` the last rate holds.

    The rate of step k is the schedule's factor at k - 1 times the peak, as in transformers' Trainer; the recipe's rates
    are scaled to `global_batch_size`, when it is given and the recipe says how.

    Args:
        lag: as in `RowOrder`; the rate of a step is then that of a run which had this global batch size from the start
            when it has seen as many rows. Such a run has `num_steps` less the lag, a fraction of a step perhaps.

    Raises:
        ConfigError: `schedule.arguments` that the schedule does not take or misses, or with which it has no usable rate somewhere.
    """
    import torch
    from transformers import get_scheduler

    name, arguments = config.name, dict(config.arguments)
    scale = config.scale(global_batch_size) if global_batch_size else 1.0
    behind = lag / global_batch_size if lag and global_batch_size else 0
    length = num_steps - behind
    if config.warmup_steps > length:
        raise ConfigError(
            f"schedule.warmup_steps must be at most the run's {length:g} steps, got {config.warmup_steps}; lower it"
        )
    if name.startswith("constant") and arguments:
        raise ConfigError(f"schedule.arguments must be empty for schedule {name}, got {arguments}; remove them")
    if name == "cosine" and config.min_learning_rate > 0:
        name = "cosine_with_min_lr"
    if name.endswith("min_lr") and "min_lr_rate" not in arguments:
        arguments.setdefault("min_lr", config.min_learning_rate * scale)
    decay = arguments.get("num_decay_steps", 0)
    if (
        isinstance(decay, (int, float))
        and arguments.get("num_stable_steps") is None
        and decay > length - config.warmup_steps
    ):
        raise ConfigError(
            f"schedule.arguments.num_decay_steps must be at most the {length - config.warmup_steps:g} steps after the warmup, got {decay:g}, "
            "of which the run would begin in the middle; lower it"
        )
    peak = optimizer.learning_rate * scale
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    try:
        scheduler = get_scheduler(
            name,
            carrier,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=cast(int, length),  # a fraction does too
            scheduler_specific_kwargs=arguments,
        )
        factor: Callable[[float], float] = scheduler.lr_lambdas[0]

        def learning_rate_at(step: int) -> float:
            return peak * float(factor(min(step, num_steps) - behind - 1))

        first = 1 + max(0, math.ceil(behind))
        _check_rates(learning_rate_at, peak, range(first, num_steps + 1), first + config.warmup_steps)
    except Exception as error:  # each schedule raises its own kinds, some of them first in the middle of a run
        reason = str(error).split(") ")[-1]
        raise ConfigError(
            f"schedule.arguments must fit schedule {config.name}, got {config.arguments}: {reason}; change them"
        ) from None
    return learning_rate_at


def _check_rates(learning_rate_at: Callable[[int], Any], peak: float, steps: range, after_warmup: int) -> None:
    """Evaluate the schedule all over the run: where another part of it begins, and at up to a thousand other steps.

    Raises:
        ValueError: a rate is no number, negative, or above the peak.
    """
    borders = (*steps[:1], *range(after_warmup - 1, after_warmup + 2), *steps[-2:])
    for step in (*steps[:: max(1, len(steps) // 1000)], *(step for step in borders if step in steps)):
        rate = learning_rate_at(step)
        if not math.isfinite(rate) or not 0 <= rate <= peak * (1 + 1e-9):
            raise ValueError(f"the rate of step {step} would be {rate:g}, with a peak of {peak:g}")
