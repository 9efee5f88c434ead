"""Build everything that a run consists of, once, before the first step.

    recipe + launch ──► accelerator ──► rows ──► plan ──► model, optimizer ──► spread over the processes ──► Run

Decisions inside the loop are in `train.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from acc_lm import runtime
from acc_lm.checkpointing import resuming
from acc_lm.checkpointing.format import Found, find_checkpoint
from acc_lm.checkpointing.loading import load_checkpoint
from acc_lm.config import Config, Mode
from acc_lm.data import Data, build_data
from acc_lm.errors import ConfigError
from acc_lm.evaluation.held_out import check_best_metric
from acc_lm.modeling.build import ModelFacts, build_empty_model, build_model
from acc_lm.optimization.schedule import build_schedule
from acc_lm.planning.here import warn_of_memory
from acc_lm.progress import Progress
from acc_lm.reporting.speed import Speed
from acc_lm.rows.batch import Batch
from acc_lm.rows.loader import MicroBatches, build_loader
from acc_lm.rows.order import RowOrder
from acc_lm.training.step import in_steps
from acc_lm.training.timetable import Timetable

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Plan:
    """Rows, learning rate and due events of each step: functions of the step alone."""

    order: RowOrder
    num_steps: int
    due: Timetable
    learning_rate_at: Callable[[int], float]


@dataclass(frozen=True)
class Start:
    """Start of a run: at its first step, or after the checkpoint that it resumes from."""

    found: Found
    origin: dict[str, str]
    """Content hashes of the base model and the vocabulary, kept in every checkpoint."""
    progress: Progress
    notes: tuple[str, ...]
    """Lines to print after the start block."""


@dataclass(frozen=True)
class Run:
    """A run: the recipe on this launch's hardware, at the step that it starts or resumes from."""

    config: Config
    accelerator: Accelerator
    peers: runtime.Peers
    memory: runtime.Memory
    data: Data
    plan: Plan
    model: nn.Module
    model_facts: ModelFacts
    optimizer: Any
    identity: runtime.Identity
    start: Start
    speed: Speed

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def micro_batch_size(self) -> int:
        return runtime.split_global_batch(self.config.training, self.accelerator.num_processes)[0]

    def reading(self) -> AbstractContextManager[None]:
        """Context in which the rows of this run's steps can be read."""
        saved = self.start.found.state.get("streams")
        return self.data.reading(self.plan.order, self.start.progress.step, saved, *runtime.readers(self.accelerator))

    def micro_batches(self, last_step: int) -> MicroBatches:
        """Positions of this process's rows, for each micro-batch of this run's steps."""
        reader, num_readers = runtime.readers(self.accelerator)
        return MicroBatches(
            self.plan.order,
            micro_batch_size=self.micro_batch_size,
            process=reader,
            num_processes=num_readers,
            first_step=self.start.progress.step + 1,
            last_step=last_step,
            lengths=self.data.padded_lengths,
        )

    def steps(self, last_step: int) -> Iterator[tuple[int, Iterator[Batch]]]:
        """(number, this process's micro-batches) of each step of this run, in order; the loader reads ahead."""
        on_gpu, num_workers = self.accelerator.device.type == "cuda", self.config.data.num_workers
        loader = build_loader(self.data.train, self.micro_batches(last_step), num_workers, pin_memory=on_gpu)
        batches = in_steps(self.speed.reading(loader), self.accelerator.gradient_accumulation_steps)
        return enumerate(batches, start=self.start.progress.step + 1)


def find_start(accelerator: Accelerator, config: Config, mode: Mode) -> tuple[Found, list[str]] | None:
    """Find the checkpoint to resume from, and lines about it; None when the run was finished before, which is printed.

    Raises:
        CheckpointError: every checkpoint is damaged, or the recipe differs.
        ConfigError: there is nothing to evaluate, or `checkpoint.resume` forbids resuming.
    """
    if mode == Mode.DRY_RUN:
        return Found(None), []
    output_dir = Path(config.output_dir)
    found = find_checkpoint(accelerator, output_dir, config.checkpoint)
    if mode == Mode.TRAIN and resuming.is_complete(accelerator, output_dir, config):
        return None
    kept = runtime.keep_threads(accelerator, found.state.get("threads"))
    evaluates = mode == Mode.EVAL_ONLY
    if evaluates and not found.checkpoint and not config.model.name_or_path:
        raise ConfigError(f"--eval-only must have model.name_or_path or a checkpoint in {output_dir}, got neither")
    notes = [*(f"{folder} was skipped: {problem}" for folder, problem in found.damaged), *kept]
    if found.checkpoint:
        precision, num_processes = accelerator.mixed_precision, accelerator.num_processes
        notes += resuming.check_same_recipe(found.checkpoint, config, precision, num_processes, evaluates=evaluates)
    return found, notes


def build_rows(accelerator: Accelerator, config: Config, found: Found, mode: Mode) -> tuple[Config, Data]:
    """Check that the model can run, then build its rows; return them and the recipe with its chat template's date."""
    tokenizer = runtime.check_run(config)
    warn_of_memory(accelerator, config)
    runtime.keep_libraries()
    day = resuming.day_of_run(accelerator, config, found, tokenizer if mode == Mode.EVAL_ONLY else None)
    global_batch_size, is_main = config.training.global_batch_size, accelerator.is_main_process
    data = build_data(config.data, config.tokenizer, tokenizer, config.seed, global_batch_size, is_main, day)
    check_best_metric(data, config.checkpoint.best_metric, num_evaluated_rows(config))
    return resuming.with_day(config, data.template_day), data


def num_evaluated_rows(config: Config) -> int | None:
    """Number of rows of an evaluation; None: all."""
    training = config.training
    return training.eval_batches and training.eval_batches * training.global_batch_size


def plan_steps(config: Config, data: Data, found: Found) -> Plan:
    """Plan the run: the number of steps, and the rows, learning rate and due events of each."""
    training = config.training
    lag = found.progress.lag(training.global_batch_size)
    order = data.order(config.seed, training.global_batch_size, lag, found.row_order)
    num_steps = training.max_steps or order.count_steps(training.num_epochs or 1)
    schedule = build_schedule(config.schedule, config.optimizer, num_steps, order.global_batch_size, lag)
    return Plan(order, num_steps, Timetable(config, order, num_steps), schedule)


def build_on_all(accelerator: Accelerator, config: Config, data: Data) -> tuple[nn.Module, ModelFacts]:
    """Build the model; where the engine shards the weights, only the main process draws or reads them."""
    tokenizer, length = data.tokenizer, config.data.sequence_length
    options = config.adapter, data.packs, accelerator.device.type
    return runtime.initialise_once(
        accelerator,
        lambda: build_model(config.model, tokenizer, length, config.seed, *options, runtime.parts_of_rows()),
        lambda facts: build_empty_model(config.model, tokenizer, length, facts, *options),
    )


def load_start(
    accelerator: Accelerator,
    found: Found,
    notes: list[str],
    config: Config,
    data: Data,
    base: str,
    model: nn.Module,
    optimizer: Any,
) -> Start:
    """Load the checkpoint, if there is one, into model and optimizer.

    Args:
        base: checksum of the base model's weights; empty for a model from scratch.

    Raises:
        CheckpointError: the checkpoint was trained on other text or from another base, or does not fit the model.
    """
    origin = resuming.origin_of(data.tokenizer, base)
    if found.checkpoint is None:
        return Start(found, origin, Progress(), tuple(notes))
    resuming.check_same_origin(found.checkpoint, config, data.key, origin, data.former_key)
    progress = load_checkpoint(accelerator, found.checkpoint, model, optimizer)
    resumed = f"resumed from {found.checkpoint.folder} at step {progress.step} ({found.checked})"
    return Start(found, origin, progress, (*notes, resumed))
