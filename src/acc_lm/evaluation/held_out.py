"""Evaluation that no batch size and no number of processes can change: sums, reduced once, divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from acc_lm.data import Data
from acc_lm.errors import ConfigError
from acc_lm.mixture import MixedRows
from acc_lm.order import evaluation_batches
from acc_lm.packing import PackedRows
from acc_lm.rows import Rows, build_loader
from acc_lm.runtime import release_gathered
from acc_lm.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator


PAUSE = 8
"""Batches between two calls of `between`."""


@dataclass(frozen=True)
class EvaluationResult:
    """What held-out text says about a model; everything is a ratio of sums over all of its targets."""

    loss: float
    """Nats per target."""
    token_accuracy: float
    """Share of targets with the highest logit."""
    bits_per_byte: float | None
    """Bits per UTF-8 byte of the text that the targets stand for; None where they stand for none, as in empty answers."""
    num_targets: int
    num_bytes: int
    """Of that text."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def metrics(self, name: str = "") -> dict[str, float]:
        """Under the names of metrics.jsonl; `name` is that of an evaluation set."""
        prefix = f"eval/{name}/" if name else "eval/"
        metrics = {
            f"{prefix}loss": self.loss,
            f"{prefix}perplexity": self.perplexity,
            f"{prefix}token_accuracy": self.token_accuracy,
        }
        return metrics if self.bits_per_byte is None else metrics | {f"{prefix}bits_per_byte": self.bits_per_byte}


@dataclass(frozen=True)
class Evaluation:
    """The held-out text and every evaluation set, on the same weights."""

    held_out: EvaluationResult
    sets: dict[str, EvaluationResult]

    def metrics(self) -> dict[str, float]:
        by_set = {key: value for name, result in self.sets.items() for key, value in result.metrics(name).items()}
        return self.held_out.metrics() | by_set


def check_best_metric(data: Data, metric: str, num_rows: int | None = None) -> None:
    """Refuse a `checkpoint.best_metric` that no evaluation of this text will have.

    Args:
        num_rows: most rows of each set, as in `evaluate_all`.

    Raises:
        ConfigError: bits per byte of targets that stand for no text.
    """
    *names, kind = metric.split("/")[1:]
    if kind != "bits_per_byte":
        return
    if names or data.mixture:
        parts = [data.evaluation_sets[name] for name in names or (data.mixture.names if data.mixture else ())]
    else:
        parts = [data.evaluation]
    rows_of = [(rows, len(rows) if num_rows is None else min(num_rows, len(rows))) for rows in parts]
    if not any(rows.count_bytes([row]) for rows, count in rows_of for row in range(count)):
        raise ConfigError(
            f"checkpoint.best_metric must be a metric that the held-out text has, got {metric} of targets that stand for no text "
            "(empty answers); set it to a loss"
        )


def evaluate_all(
    accelerator: Accelerator,
    model: nn.Module,
    data: Data,
    batch_size: int,
    num_rows: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> Evaluation:
    """`evaluate_rows` of the held-out text, then of each evaluation set; `num_rows` is the most of each."""
    sets = {
        name: evaluate_rows(accelerator, model, rows, batch_size, num_rows, between)
        for name, rows in data.evaluation_sets.items()
    }
    if data.mixture:
        held_out = pool([sets[name] for name in data.mixture.names])
    else:
        held_out = evaluate_rows(accelerator, model, data.evaluation, batch_size, num_rows, between)
    return Evaluation(held_out, sets)


def pool(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """The result on all of their targets together."""
    targets, num_bytes = sum(result.num_targets for result in results), sum(result.num_bytes for result in results)
    nll = sum(result.loss * result.num_targets for result in results)
    return EvaluationResult(
        loss=nll / targets,
        token_accuracy=sum(result.token_accuracy * result.num_targets for result in results) / targets,
        bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else None,
        num_targets=targets,
        num_bytes=num_bytes,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Forward passes without dropout and gradients; afterwards the model is as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        release_gathered(model)
        model.train(was_training)


def evaluate_rows(
    accelerator: Accelerator,
    model: nn.Module,
    rows: Rows | PackedRows | MixedRows,
    batch_size: int,
    num_rows: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Exact evaluation of the first `num_rows` rows (None: all), shared out over the processes.

    Args:
        batch_size: rows per forward pass of one process; never changes the result.
        between: called by every process after every few batches; what it raises ends the evaluation.
    """
    num_rows = len(rows) if num_rows is None else min(num_rows, len(rows))
    batches = evaluation_batches(
        num_rows,
        batch_size=batch_size,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
        lengths=rows.lengths if isinstance(rows, PackedRows) and rows.padded else None,
    )
    device = accelerator.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.zeros(4, dtype=dtype, device=device)
    with evaluating(model):
        for number, batch in enumerate(build_loader(rows, batches, 0, pin_memory=device.type == "cuda"), start=1):
            nll, num_targets, num_correct = model(**to_device(batch, device))
            sums[0] += nll
            sums[1] += num_targets
            sums[2] += num_correct
            if number % PAUSE == 0:
                between()
    sums[3] = sum(rows.count_bytes(batch.tolist()) for batch in batches)
    nll, num_targets, num_correct, num_bytes = accelerator.reduce(sums, reduction="sum").tolist()
    return EvaluationResult(
        loss=nll / num_targets,
        token_accuracy=num_correct / num_targets,
        bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else None,
        num_targets=int(num_targets),
        num_bytes=int(num_bytes),
    )
