"""Sections `training`, `optimizer` and `schedule` of a recipe."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from acc_lm.config.fields import (
    Beta,
    NotLearned,
    PositiveFloat,
    PositiveInt,
    Rate,
    Section,
    Settings,
    WarmupSteps,
    as_tuple,
    nearest_multiples,
)


class TrainingConfig(Section):
    """Length of the run, batch sizes, precision, logging, evaluation, and conditions that end the run early."""

    max_steps: PositiveInt | None = None
    """Optimizer steps; give this or `num_epochs`."""
    num_epochs: PositiveFloat | None = None
    """Passes over the training rows; give this or `max_steps`."""
    global_batch_size: PositiveInt = 16
    """Rows per optimizer step, over all processes."""
    micro_batch_size: Annotated[PositiveInt, NotLearned] = 16
    """Maximum number of rows per forward pass of one process; affects memory, never the result."""
    find_micro_batch_size: Annotated[bool, NotLearned] = False
    """Before the first step, try a full micro-batch and reduce it until it fits on all processes; the global batch stays the same."""
    mixed_precision: Literal["no", "bf16", "fp16", "fp8"] | None = None
    """Compute precision; null: that of the Accelerate config."""
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """torchao's fp8 scaling recipe: by tensor (fastest), by row, or by row with the weights' gradients in 16 bits."""
    allow_tf32: bool = False
    """Let fp32 matrix products use TF32 on GPUs that have it."""
    cudnn_attention: Annotated[bool, NotLearned] = True
    """Use cuDNN's attention on Hopper GPUs wherever it can replace another kernel; changes nothing but rounding."""
    deterministic: Annotated[bool, NotLearned] = False
    """Use only deterministic kernels (slower on a GPU)."""
    log_every: Annotated[PositiveInt, NotLearned] = 10
    """Period of the training log, in steps."""
    eval_every: Annotated[PositiveInt | None, NotLearned] = 100
    """Period of the evaluation, in steps; null: none by steps. The last step is always evaluated."""
    eval_every_epochs: Annotated[PositiveFloat | None, NotLearned] = None
    """Period of the evaluation, in passes over the training rows, in addition to `eval_every`; null: none."""
    eval_batches: Annotated[PositiveInt | None, NotLearned] = None
    """Number of batches of `global_batch_size` rows to evaluate on, also for each evaluation set; null: all held-out rows."""
    early_stopping_patience: Annotated[PositiveInt | None, NotLearned] = None
    """Number of evaluations in a row without an improvement of `checkpoint.best_metric` that end the run; null: never."""
    early_stopping_min_improvement: Annotated[Rate, NotLearned] = 0.0
    """Amount that an improvement over the best evaluation must exceed to count, in the metric's own unit."""
    max_nonfinite_steps: Annotated[PositiveInt, NotLearned] = 3
    """Number of steps in a row with a non-finite gradient that end the run; such a step is skipped and changes no weight."""
    on_spike: Literal["ignore", "warn", "rewind", "stop"] = "warn"
    """Reaction to a loss spike. rewind: return to the weights of the last checkpoint and continue with the data after the spike; rewind and stop check every step."""
    spike_threshold: PositiveFloat = 10.0
    """Threshold of a spike: a loss above the median of the last 64 steps by more than this many of their robust standard deviations, and by more than 10 %."""
    max_minutes: Annotated[PositiveFloat | None, NotLearned] = None
    """Time limit, in minutes since the start, after which the run saves and stops; run the same command to resume. null: none."""

    @model_validator(mode="after")
    def _lengths(self) -> TrainingConfig:
        if (self.max_steps is None) == (self.num_epochs is None):
            got = "neither" if self.max_steps is None else "both"
            raise ValueError(
                f"must have exactly one of max_steps and num_epochs, got {got}; set training.max_steps or training.num_epochs to null"
            )
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size must be a multiple of micro_batch_size {self.micro_batch_size}, "
                f"got {self.global_batch_size}; nearest: {nearest_multiples(self.global_batch_size, self.micro_batch_size)}"
            )
        return self


def _no_eight_bits(value: Any) -> Any:
    if isinstance(value, str) and re.search(r"[48]_?bit", value):
        raise ValueError(
            f"must be adamw or muon, got {value!r}, whose rounded moments train differently on each engine (docs/promises/exactness.md); "
            "for less memory set adamw with a config that shards its moments (fsdp2, deepspeed_zero2) or offloads them, or muon, "
            "which has one moment instead of two"
        )
    return value


class OptimizerConfig(Section):
    """AdamW or Muon, with weight decay on all weights but biases and norms, and clipping by the global norm."""

    name: Annotated[Literal["adamw", "muon"], BeforeValidator(_no_eight_bits)] = "adamw"
    """Optimizer: adamw, or muon for the weights of the hidden layers with AdamW for embeddings, head, norms and biases."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate; Muon's updates are as large as AdamW's, so one rate serves both."""
    adamw_learning_rate: PositiveFloat | None = None
    """Peak learning rate of the parameters that muon leaves to AdamW, on the same schedule; null: `learning_rate`."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(as_tuple)] = (0.9, 0.95)
    """Decay of AdamW's first and second moment, per step."""
    epsilon: PositiveFloat = 1e-8
    """Constant added to the square root of AdamW's second moment."""
    momentum: Beta = 0.95
    """Decay of Muon's momentum (Nesterov's), per step."""
    weight_decay: Rate = 0.1
    """Decoupled weight decay, per unit of learning rate; not on biases and norms."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Global norm to which larger gradients are scaled down; null: no clipping."""

    @model_validator(mode="after")
    def _two_rates_need_two_optimizers(self) -> OptimizerConfig:
        if self.name == "adamw" and self.adamw_learning_rate is not None:
            raise ValueError(
                f"adamw_learning_rate must be null for adamw, got {self.adamw_learning_rate}; set learning_rate, or name=muon"
            )
        if "name" not in self.model_fields_set and self.momentum != type(self).model_fields["momentum"].default:
            raise ValueError(
                f"name must be set with momentum, got {self.momentum} without it, which AdamW does not read; set optimizer.name to muon, or "
                "AdamW's own optimizer.betas"
            )
        return self


SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "linear",
    "polynomial",
    "warmup_stable_decay",
)


class ScheduleConfig(Section):
    """Learning rate as a function of the optimizer step, by transformers' schedules."""

    name: Literal[SCHEDULES] = "cosine"  # type: ignore[valid-type]
    """Name of a schedule in transformers; `cosine` with a `min_learning_rate` becomes `cosine_with_min_lr`."""
    warmup_steps: WarmupSteps = 0.03
    """Number of steps over which the rate rises linearly from 0; a number below 1 is a share of the run's steps, rounded up."""
    min_learning_rate: Rate = 0.0
    """Learning rate at the end of the schedule, for the cosine schedules that take one."""
    arguments: Settings = {}
    """Further arguments of the schedule, e.g. num_decay_steps, num_cycles, power."""
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of the learning rates by `training.global_batch_size` / `reference_batch_size` (linear), or by its square root (sqrt)."""
    reference_batch_size: PositiveInt | None = None
    """Global batch size, in rows, for which `optimizer.learning_rate` was chosen; set only with `scale_learning_rate`."""

    @model_validator(mode="after")
    def _scale_has_a_reference(self) -> ScheduleConfig:
        if (self.scale_learning_rate == "none") != (self.reference_batch_size is None):
            raise ValueError(
                f"reference_batch_size must be set with scale_learning_rate, and only then, got {self.reference_batch_size} with "
                f"{self.scale_learning_rate}; set it to the global batch size for which optimizer.learning_rate was chosen, or remove both"
            )
        return self

    def count_warmup_steps(self, num_steps: float) -> int:
        """Number of steps of the warmup, in a run of `num_steps` steps; a share is rounded up, as transformers does."""
        return self.warmup_steps if isinstance(self.warmup_steps, int) else math.ceil(self.warmup_steps * num_steps)

    def scale(self, global_batch_size: int) -> float:
        """Factor of the learning rates for this global batch size."""
        ratio = global_batch_size / (self.reference_batch_size or global_batch_size)
        return math.sqrt(ratio) if self.scale_learning_rate == "sqrt" else ratio

    @model_validator(mode="after")
    def _minimum_is_used(self) -> ScheduleConfig:
        served = ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr")
        if self.min_learning_rate > 0 and self.name not in served:
            raise ValueError(
                f"min_learning_rate must be 0 for schedule {self.name}, got {self.min_learning_rate}; "
                f"it belongs to {', '.join(served)}; others take schedule.arguments"
            )
        given = [key for key in ("min_lr", "min_lr_rate") if key in self.arguments]
        if self.min_learning_rate > 0 and given:
            raise ValueError(
                f"min_learning_rate must be 0 with arguments.{given[0]}, got {self.min_learning_rate}; remove one of them"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _constant_has_no_warmup(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") == "constant":
            return {"warmup_steps": 0, **values}
        return values

    @model_validator(mode="after")
    def _warmup_is_used(self) -> ScheduleConfig:
        if self.name == "constant" and self.warmup_steps:
            raise ValueError(
                f"warmup_steps must be 0 for schedule constant, got {self.warmup_steps}; set it to 0, or name=constant_with_warmup"
            )
        return self
