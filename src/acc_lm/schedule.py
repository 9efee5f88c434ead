"""The learning rate as a function of the optimizer step, by transformers' schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

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
        ConfigError: `schedule.arguments` that the schedule does not take, or that it misses.
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
        factor(0)
    except (TypeError, ValueError) as error:
        reason = str(error).split(") ")[-1]
        raise ConfigError(
            f"schedule.arguments must fit schedule {config.name}, got {config.arguments}: {reason}; change them"
        ) from None

    def learning_rate_at(step: int) -> float:
        return peak * float(factor(min(step, num_steps) - behind - 1))

    return learning_rate_at
