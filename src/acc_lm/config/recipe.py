"""Every key of a recipe with its type, range, default and unit, defined once.

`--help`, `docs/reference/recipe.md`, `recipes/schema.json` and all validation are generated from these classes.
"""

from __future__ import annotations

import difflib
import re
from enum import Enum
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from acc_lm.config.data import DataConfig
from acc_lm.config.fields import (
    EVALUATION_METRICS,
    Count,
    Folder,
    Learned,
    NameInTracker,
    NameOnHub,
    NotLearned,
    PositiveFloat,
    PositiveInt,
    Section,
    Settings,
    Strings,
    as_tuple,
    folder_name,
    nearest_multiples,
)
from acc_lm.config.model import AdapterConfig, ModelConfig, TokenizerConfig
from acc_lm.config.training import OptimizerConfig, ScheduleConfig, TrainingConfig

MOST_PROFILED = 20
"""Maximum number of steps in a profile, each of which takes megabytes."""


Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
"""Trackers that Accelerate knows."""


class CheckpointConfig(Section):
    """Checkpoints: when they are saved, which are kept, and how a run resumes from them."""

    every: PositiveInt | None = 100
    """Period of the checkpoints, in steps; null: none by steps. The run also saves at its last step, when stopped, and after an evaluation among the `keep_best` best."""
    every_epochs: PositiveFloat | None = None
    """Period of the checkpoints, in passes over the training rows, in addition to `every`; null: none."""
    keep_last: Annotated[int, Field(ge=2)] | None = 2
    """Number of newest checkpoints to keep, at least 2 because the newest may be damaged; null: all."""
    keep_best: Count = 1
    """Number of checkpoints to keep for the best evaluations, by `best_metric`."""
    best_metric: str = "eval/loss"
    """Metric that ranks evaluations: lowest eval/loss, eval/perplexity or eval/bits_per_byte, or highest eval/token_accuracy; eval/<set>/loss and so on for one set."""
    asynchronous: bool = False
    """Write checkpoints in the background; training waits only while its state is copied, and the copy needs host memory."""
    resume: str = "auto"
    """Checkpoint to start from. auto: the newest valid one of `output_dir`; never: none, and refuse a folder that has some; or the path of one."""
    verify: Literal["full", "size"] = "full"
    """Check of a checkpoint before a run resumes from it. full: read every byte; size: compare only the names and sizes of the files."""
    allow_changed_recipe: bool = False
    """Resume even if the recipe differs from the checkpoint's in keys that change what is learned."""


class TrackingConfig(Section):
    """Trackers that receive metrics in addition to `metrics.jsonl`, and text samples during training."""

    report_to: Annotated[
        tuple[Tracker, ...],
        BeforeValidator(as_tuple),
        WithJsonSchema({"type": "array", "items": {"enum": list(get_args(Tracker))}}),
    ] = ("wandb",)
    """Trackers to report to, of Accelerate's; without its key or address each one works offline, in the output folder."""
    project: Annotated[NameInTracker, AfterValidator(folder_name)] = "acc-lm"
    """Name of the project in the tracker."""
    run_name: NameInTracker | None = None
    """Name of the run in the tracker; null: the name of `output_dir`."""
    peak_tflops: PositiveFloat | None = None
    """Peak compute of one device in the precision of the run, in 10^12 FLOP/s, for train/mfu; null: from its data sheet, if known here."""
    sample_tokens: Count = 0
    """Number of tokens, always the likeliest, by which each evaluation continues each prompt, in samples.jsonl and the trackers; 0: no samples."""
    sample_prompts: Strings = ()
    """Prompts of the samples: text to continue, or user messages if the data are conversations; empty: the first held-out text."""


class ProfileConfig(Section):
    """Profile of a few steps, written to profile/; changes no number of the run."""

    steps: Annotated[tuple[PositiveInt, PositiveInt], BeforeValidator(as_tuple)] | None = None
    """First and last profiled step, both included, e.g. [10, 13]; null: no profile."""

    @model_validator(mode="after")
    def _few_steps(self) -> ProfileConfig:
        if self.steps is not None and not 0 <= self.steps[1] - self.steps[0] < MOST_PROFILED:
            raise ValueError(
                f"steps must be the first and the last of 1 to {MOST_PROFILED} steps, got {list(self.steps)}; for instance "
                f"[{self.steps[0]}, {self.steps[0] + 3}]"
            )
        return self


class ExportConfig(Section):
    """Export: the model in final/, and the sample of text that ends the run."""

    weights: Literal["last", "best"] | None = None
    """Weights to export to final/: those of the last step or of the best checkpoint; null: the best with early stopping, else the last."""
    sample_prompt: str | None = None
    """Start of the sample; null: the first tokens of the held-out text."""
    sample_tokens: Count = 80
    """Length of the sample, in tokens; 0: no sample."""
    push_to_hub: NameOnHub | None = None
    """Repository on the Hub, as owner/name, to which final/ is pushed at the end, private if it is new; null: none. A failed push does not fail the run."""
    license: Annotated[str, Field(min_length=1)] | None = None
    """License of the model for its card, by the Hub's identifier, e.g. apache-2.0; null: none is named."""


class DistributedConfig(Section):
    """Settings of the process group and of DDP that an Accelerate config cannot express."""

    find_unused_parameters: bool = False
    """Let DDP search for parameters without a gradient (slower)."""
    gradient_as_bucket_view: bool = True
    """Let gradients share the memory of DDP's buckets."""
    bucket_cap_mb: PositiveInt = 25
    """Size of a gradient bucket, in MiB."""
    static_graph: bool = False
    """Declare to DDP that every step uses the same parameters."""
    comm_hook: Annotated[Literal["none", "fp16", "bf16", "power_sgd", "batched_power_sgd"], Learned] = "none"
    """Compression of the gradient all-reduce; every choice but none changes the numbers."""
    comm_hook_arguments: Annotated[Settings, Learned] = Field(default_factory=dict)
    """Arguments of the PowerSGD hooks, by torch's names: matrix_approximation_rank, start_powerSGD_iter, ..."""
    broadcast_buffers: bool = True
    """Let DDP copy the main process's buffers to all processes before each forward pass."""
    backend: Literal["nccl", "gloo"] | None = None
    """Backend of the process group; null: nccl on GPUs, gloo on CPUs."""
    timeout_seconds: PositiveInt = 600
    """Seconds that a process waits for the others in a collective."""
    step_timeout_seconds: PositiveFloat | None = 300.0
    """Seconds after which a process warns that a step is still running, with a stack trace; null: never."""
    check_parameters_every: PositiveInt | None = None
    """Period, in steps, of comparing checksums of the processes' copies of the weights, which reads all weights; null: never."""

    @model_validator(mode="after")
    def _arguments_are_of_a_hook(self) -> DistributedConfig:
        if self.comm_hook_arguments and "comm_hook" not in self.model_fields_set:
            raise ValueError(
                f"comm_hook must be set with comm_hook_arguments, got {self.comm_hook_arguments} without it; set distributed.comm_hook to "
                "power_sgd or batched_power_sgd, or leave them out"
            )
        return self


class Config(Section):
    """Complete recipe."""

    output_dir: Annotated[Folder, NotLearned] = "runs/quickstart"
    """Folder of the run, relative to the folder in which the command is run."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the initial weights, the order of the rows and dropout."""
    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: Annotated[CheckpointConfig, NotLearned] = CheckpointConfig()
    tracking: Annotated[TrackingConfig, NotLearned] = TrackingConfig()
    profile: Annotated[ProfileConfig, NotLearned] = ProfileConfig()
    export: Annotated[ExportConfig, NotLearned] = ExportConfig()
    distributed: Annotated[DistributedConfig, NotLearned] = DistributedConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        steps = self.training.max_steps
        if steps is not None and self.schedule.warmup_steps > steps:
            raise ValueError(
                f"schedule.warmup_steps must be at most training.max_steps {steps}, got {self.schedule.warmup_steps}; lower it, or write a share "
                "of the run: schedule.warmup_steps=0.03"
            )
        profiled = self.profile.steps
        if steps is not None and profiled is not None and profiled[1] > steps:
            raise ValueError(
                f"profile.steps must be within training.max_steps {steps}, got {list(profiled)}; lower them"
            )
        if self.schedule.min_learning_rate > self.optimizer.learning_rate:
            raise ValueError(
                f"schedule.min_learning_rate must be at most optimizer.learning_rate {self.optimizer.learning_rate}, "
                f"got {self.schedule.min_learning_rate}; lower it"
            )
        if self.adapter.kind != "none":
            self._base_can_be_found_again()
        if self.data.streaming:
            self._stream_needs_no_end()
        self._best_is_known()
        if self.tracking.sample_tokens >= self.data.sequence_length:
            raise ValueError(
                f"tracking.sample_tokens must be less than data.sequence_length {self.data.sequence_length}, "
                f"got {self.tracking.sample_tokens}; lower it"
            )
        if self.tracking.sample_prompts and not self.tracking.sample_tokens:
            raise ValueError(
                f"tracking.sample_tokens must be at least 1 for {len(self.tracking.sample_prompts)} sample_prompts, got 0; raise it"
            )
        return self

    def _stream_needs_no_end(self) -> None:
        """Refuse settings that need the length or the text of a stream in advance."""
        size, streams = self.training.global_batch_size, self.data.num_streams
        if size % streams:
            raise ValueError(
                f"training.global_batch_size must be a multiple of data.num_streams {streams}, got {size}; "
                f"nearest: {nearest_multiples(size, streams)}; or lower data.num_streams"
            )
        for key, value in (
            ("training.num_epochs", self.training.num_epochs),
            ("checkpoint.every_epochs", self.checkpoint.every_epochs),
            ("training.eval_every_epochs", self.training.eval_every_epochs),
        ):
            if value is not None:
                raise ValueError(
                    f"{key} must be null for a stream, whose number of rows is unknown, got {value}; set a number of steps instead"
                )
        if not (self.tokenizer.name_or_path or self.model.name_or_path or self.tokenizer.kind == "byte"):
            raise ValueError(
                f"tokenizer.name_or_path must be an existing tokenizer for a stream, got none, and {self.tokenizer.kind} cannot be trained on a stream; "
                "name one, or set tokenizer.kind to byte"
            )

    @property
    def exports_best(self) -> bool:
        """True if final/ holds the weights of the best checkpoint."""
        return (self.export.weights or ("last" if self.training.early_stopping_patience is None else "best")) == "best"

    @property
    def evaluation_metrics(self) -> list[str]:
        """Names of all metrics of an evaluation."""
        names = [*(source.title for source in self.data.mixture), *self.data.evaluation_sets]
        places = ["eval", *(f"eval/{name}" for name in names)]
        return [f"{place}/{metric}" for place in places for metric in EVALUATION_METRICS]

    def _best_is_known(self) -> None:
        metric, training = self.checkpoint.best_metric, self.training
        if metric not in self.evaluation_metrics:
            near = difflib.get_close_matches(metric, self.evaluation_metrics, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(self.evaluation_metrics)}"
            raise ValueError(f"checkpoint.best_metric must be a metric of the evaluation, got {metric!r}; {hint}")
        if training.early_stopping_patience and not training.eval_every and not training.eval_every_epochs:
            raise ValueError(
                "training.early_stopping_patience must be null without evaluations during training, got "
                f"{training.early_stopping_patience}; set training.eval_every or training.eval_every_epochs"
            )
        if self.exports_best and not self.checkpoint.keep_best:
            raise ValueError(
                "checkpoint.keep_best must be at least 1 when final/ gets the best weights, got 0; raise it, or set export.weights=last"
            )

    def _base_can_be_found_again(self) -> None:
        """Refuse settings that do not fit an adapter, which needs the unchanged base model that it was trained with."""
        model, ways = self.model, "or train the model itself (adapter.kind=none)"
        if model.name_or_path is None:
            raise ValueError(
                f"model.name_or_path must be the model that the adapter is for, got null; name one, {ways}"
            )
        if self.adapter.quantize_base != "none" and model.dtype == "float64":
            raise ValueError(
                f"adapter.quantize_base must be none for model.dtype float64, got {self.adapter.quantize_base}, which computes in 16 or 32 bits; "
                "set it to none, or model.dtype to float32"
            )
        if self.optimizer.name == "muon":
            raise ValueError(
                "optimizer.name must be adamw with an adapter, got muon, which is designed for the update of a full weight matrix, not of "
                f"its two thin factors; set it to adamw, {ways}"
            )
        if model.freeze:
            raise ValueError(
                f"model.freeze must be empty with an adapter, which freezes the entire model, got {list(model.freeze)}; leave it out, {ways}"
            )
        if model.resize_embeddings:
            raise ValueError(
                f"model.resize_embeddings must be false with an adapter, got true, whose new rows would be neither trained nor saved; name new tokens in tokenizer.add_tokens and train their rows with adapter.also_train, {ways}"
            )


class Mode(Enum):
    """Task of train.py for a recipe."""

    TRAIN = "train"
    DRY_RUN = "dry run"
    EVAL_ONLY = "eval only"


def is_learned(key: str) -> bool:
    """Check whether the value of a key, or of a section, changes what is learned; the nearest marker decides."""
    section: type[Section] = Config
    learned = True
    for name in key.split("."):
        field = section.model_fields.get(name)
        if field is None:
            break
        learned = Learned in field.metadata or (learned and NotLearned not in field.metadata)
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section)):
            break
        section = field.annotation
    return learned


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten mappings: {'a': {'b': 1}} -> {'a.b': 1}, {'a': [{'b': 1}]} -> {'a.0.b': 1}; empty mappings stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list | tuple) and value and all(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def learned_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ in what is learned: {key: (old, new)}; a longer run does not count.

    Args:
        old, new: two resolved recipes as plain mappings (`Config.model_dump(mode="json")`).
    """
    before, after = flatten(old), flatten(new)
    changes = {}
    for key in sorted(before.keys() | after.keys()):
        name = re.sub(r"^data\.mixture\.\d+\.", "data.", key)
        if not is_learned(name):
            continue
        was, now = before.get(key), after.get(key)
        if key == "data.mixture":  # a filled one is flattened: None and empty are the same
            was, now = (
                [{k: v for k, v in part.items() if is_learned(f"data.{k}")} for part in parts or ()]
                for parts in (was, now)
            )
        longer = key in ("training.max_steps", "training.num_epochs") and was and now and now > was
        if was != now and not longer:
            changes[key] = (was, now)
    return changes
