"""Evaluation independent of batch size and number of processes: sums, reduced once, divided once."""

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
from acc_lm.rows.batch import HeldOutRows, to_device
from acc_lm.rows.loader import build_loader, evaluation_batches
from acc_lm.runtime import readers, release_gathered, repeats_losses

if TYPE_CHECKING:
    from accelerate import Accelerator


PAUSE_BATCHES = 8
"""Number of batches between two calls of `between`."""


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of a model on held-out text; each is a ratio of sums over all targets."""

    loss: float
    """Mean loss, in nats per target."""
    token_accuracy: float
    """Share of targets that had the highest logit."""
    bits_per_byte: float | None
    """Bits per UTF-8 byte of the targets' text; None where the targets stand for no text, as in empty answers."""
    num_targets: int
    num_bytes: int
    """Number of UTF-8 bytes of the targets' text."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def metrics(self, name: str = "") -> dict[str, float]:
        """Scores under the names of metrics.jsonl; `name` is the evaluation set, empty for the held-out text."""
        prefix = f"eval/{name}/" if name else "eval/"
        metrics = {
            f"{prefix}loss": self.loss,
            f"{prefix}perplexity": self.perplexity,
            f"{prefix}token_accuracy": self.token_accuracy,
        }
        return metrics if self.bits_per_byte is None else metrics | {f"{prefix}bits_per_byte": self.bits_per_byte}


@dataclass(frozen=True)
class Evaluation:
    """Results on the held-out text and on every evaluation set, for the same weights."""

    held_out: EvaluationResult
    sets: dict[str, EvaluationResult]

    def metrics(self) -> dict[str, float]:
        by_set = {key: value for name, result in self.sets.items() for key, value in result.metrics(name).items()}
        return self.held_out.metrics() | by_set


def check_best_metric(data: Data, metric: str, num_rows: int | None = None) -> None:
    """Refuse a `checkpoint.best_metric` that evaluations of this text never report.

    Args:
        num_rows: maximum number of rows of each set, as in `evaluate_all`.

    Raises:
        ConfigError: the metric is bits per byte, but the targets stand for no text.
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
    """Evaluate each evaluation set, then the held-out text, on at most `num_rows` rows each.

    With a mixture, the held-out result is pooled from the results of its sources.
    """
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
    """Combine results into the result on all of their targets together."""
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
    """Context for forward passes without dropout and gradients; restores the model's mode afterwards."""
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
    rows: HeldOutRows,
    batch_size: int,
    num_rows: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Exact evaluation of the first `num_rows` rows (None: all), divided among the processes.

    Args:
        batch_size: rows per forward pass of one process; never changes the result.
        between: called by every process after every few batches; an exception from it ends the evaluation.
    """
    num_rows = len(rows) if num_rows is None else min(num_rows, len(rows))
    reader, num_readers = readers(accelerator)
    batches = evaluation_batches(
        num_rows,
        batch_size=batch_size,
        process=reader,
        num_processes=num_readers,
        lengths=rows.padded_lengths,
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
            if number % PAUSE_BATCHES == 0:
                between()
    if accelerator.process_index % (accelerator.num_processes // num_readers) == 0:  # its readers count the same rows
        sums[3] = sum(rows.count_bytes(batch.tolist()) for batch in batches)
    if repeats_losses(accelerator):
        sums.zero_()
    nll, num_targets, num_correct, num_bytes = accelerator.reduce(sums, reduction="sum").tolist()
    return EvaluationResult(
        loss=nll / num_targets,
        token_accuracy=num_correct / num_targets,
        bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else None,
        num_targets=int(num_targets),
        num_bytes=int(num_bytes),
    )
