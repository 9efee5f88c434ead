"""The contract: every key of a recipe with its type, range, default and unit, once.

`--help`, `docs/recipe.md`, `recipes/schema.json` and all validation are made from these classes.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _no_number(value: Any) -> Any:
    if type(value) in (int, float):  # 1 == True
        raise ValueError(f"must be true, false or a word, got {value}; change it")
    return value


_STRING_LIST = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}
Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), WithJsonSchema(_STRING_LIST)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _at_home(value: str) -> str:
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise ValueError(
            f"must start with the home folder of a user of this machine, got {value!r}; write the path out"
        )
    return expanded


Place = Annotated[str, AfterValidator(_at_home)]
"""A path, in which ~ is the home folder, or a name on the Hub."""
Folder = Annotated[Place, AfterValidator(os.path.normpath)]


def _as_day(value: Any) -> Any:
    return value.isoformat() if type(value) is date else value  # YAML has dates of its own


def _day(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"must be a date as YYYY-MM-DD, got {value!r}; change it") from None


Day = Annotated[str, BeforeValidator(_as_day), AfterValidator(_day)]


def _name_in_tracker(value: str) -> str:
    if not 0 < len(value) <= 128:
        raise ValueError(f"must have 1 to 128 characters, got {len(value)}; trackers take no others")
    return value


def _folder_name(value: str) -> str:
    if value in (".", "..") or set(value) & set("/\\#?%:"):
        raise ValueError(
            f"must be a name without / \\ # ? % and :, got {value!r}; change it (TensorBoard makes a folder of it)"
        )
    return value


NAME_OF_SET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
LEAST_SHARE = 1e-4
"""Of the rows of a mixture: shares are exact in blocks of rows, and a block is not to be larger than this asks for."""
MOST_PROFILED = 20
"""Steps of a profile, of which each takes megabytes."""
EVALUATION_METRICS = ("loss", "perplexity", "token_accuracy", "bits_per_byte")
"""What is measured on held-out text and on each evaluation set."""
NameInTracker = Annotated[str, AfterValidator(_name_in_tracker)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class ModelConfig(Section):
    """Which model: `name_or_path` continues from existing weights, `config` starts from scratch."""

    name_or_path: Place | None = None
    """Hub id or local folder of a causal language model to continue from."""
    revision: str | None = None
    """Branch, tag or commit of the Hub id."""
    config: dict[str, Any] | None = None
    """From scratch: `model_type` of transformers and its own field names; vocab_size, bos_token_id and eos_token_id left out come from the tokenizer."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the parameters; compute precision is `training.mixed_precision`."""
    gradient_checkpointing: Annotated[Literal[False, True, "selective"], BeforeValidator(_no_number)] = False
    """Compute activations again in the backward pass, same result. true: all of a block, least memory, about a third more compute; selective: all but products and attention (not FlexAttention's), about half the memory."""
    freeze: Strings = ()
    """Parameters that are not trained, by patterns of their names, e.g. `model.embed_tokens.*`; each must match one."""
    resize_embeddings: bool = False
    """Enlarge the embeddings when the tokenizer has more ids than the model."""
    trust_remote_code: bool = False
    """Run Python code that a model repository brings along."""
    router_loss: Literal["exact", "per_micro_batch", "off"] = "exact"
    """Load-balancing loss of a mixture of experts, times the model's own coefficient (`router_aux_loss_coef`). exact: over the global batch, whatever its split, for a second forward pass under accumulation; per_micro_batch: mean over the micro-batches, as elsewhere; off: none. Nothing for other models."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.name_or_path is None) == (self.config is None):
            got = "neither" if self.config is None else "both"
            raise ValueError(
                f"must have exactly one of name_or_path and config, got {got}; "
                "set the one you do not want to null (name_or_path: existing weights, config: from scratch)"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config must name a model_type of transformers, got none; add e.g. model_type: llama")
        asked = (self.config or {}).get("output_router_logits")
        if isinstance(asked, bool) and asked != (self.router_loss != "off"):
            raise ValueError(
                f"config.output_router_logits must be left out where model.router_loss decides, got {asked} beside {self.router_loss}; "
                "set model.router_loss to exact or off"
            )
        return self


class AdapterConfig(Section):
    """Train small matrices beside a model that stays as it is, instead of the model itself."""

    kind: Literal["none", "lora"] = "none"
    """none: train the model; lora: low-rank matrices beside its linear layers (Hu et al., 2021, arXiv:2106.09685)."""
    rank: PositiveInt = 16
    """Rank of each pair of matrices."""
    alpha: PositiveFloat = 32.0
    """Their product counts alpha / rank times."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the input of the matrices."""
    target_modules: Strings = ("all-linear",)
    """Linear layers that get some, by the ends of their names, e.g. [q_proj, v_proj]; all-linear: all but the output head."""
    use_dora: bool = False
    """Train the length of each output's weights apart from their direction (Liu et al., 2024, arXiv:2402.09353)."""
    use_rslora: bool = False
    """The product counts alpha / sqrt(rank) times (Kalajdzievski, 2023, arXiv:2312.03732)."""
    quantize_base: Literal["none", "nf4"] = "none"
    """nf4: the layers that get matrices are themselves kept in 4 bits (QLoRA: Dettmers et al., 2023, arXiv:2305.14314)."""

    @model_validator(mode="after")
    def _quantized_is_beside_an_adapter(self) -> AdapterConfig:
        if self.quantize_base != "none" and self.kind == "none":
            raise ValueError(
                f"quantize_base must be none without an adapter, got {self.quantize_base}, in which nothing can be trained; "
                "set adapter.kind to lora"
            )
        return self


class TokenizerConfig(Section):
    """How text becomes ids: an existing tokenizer, or one made from the training split."""

    name_or_path: Place | None = None
    """Hub id or local folder; wins over `kind`. null: the tokenizer of `model.name_or_path`, else `kind`."""
    revision: str | None = None
    """Branch, tag or commit of the Hub id."""
    kind: Literal["bpe", "char", "byte"] = "bpe"
    """Tokenizer made here: byte-level BPE trained on the training split, characters, or bytes."""
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    """Number of ids of a BPE trained here, the 256 bytes and the end token included."""


Format = Literal["text", "prompt_completion", "messages", "alpaca", "sharegpt"]


class SourceConfig(Section):
    """One source of a mixture; keys that are not here are those of `data`, for all of them."""

    name: str | None = None
    """In metrics and evaluation; null: the name of its dataset, file or folder."""
    files: Strings = ()
    """Files or globs; give this or `dataset`."""
    dataset: Place | None = None
    """Dataset on the Hub or a local folder of data files; give this or `files`."""
    dataset_config: str | None = None
    """Configuration (subset) of the dataset."""
    dataset_split: str = "train"
    """Split to train on."""
    eval_files: Strings = ()
    """Files or globs to evaluate on; none: `data.eval_fraction` of the files is held out."""
    eval_split: str | None = None
    """Split to evaluate on; null: `data.eval_fraction` of the training split is held out."""
    text_column: str | None = None
    """Column that holds the text; null: `data.text_column`."""
    format: Format | None = None
    """What a record is; null: `data.format`, else what its columns say."""
    weight: PositiveFloat | None = None
    """Its rows are this share of all rows, once all weights are divided by their sum; give this or `tokens`."""
    tokens: PositiveInt | None = None
    """Targets taken from it in each pass over the mixture, to about a row; give this or `weight`."""

    @property
    def title(self) -> str:
        """What it is called."""
        if self.name is not None:
            return self.name
        path = self.dataset or self.files[0]
        while any(mark in path for mark in "*?["):
            path = os.path.dirname(path)
        stem = os.path.basename(path if self.dataset else os.path.splitext(path)[0])
        return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:64]

    @model_validator(mode="after")
    def _is_one_source(self) -> SourceConfig:
        for key, other, given in (
            ("files", "dataset", (bool(self.files), bool(self.dataset))),
            ("weight", "tokens", (self.weight is not None, self.tokens is not None)),
        ):
            if sum(given) != 1:
                raise ValueError(
                    f"must have exactly one of {key} and {other}, got {'both' if all(given) else 'neither'}"
                )
        of_files, of_datasets = ("eval_files",), ("dataset_config", "dataset_split", "eval_split")
        for key in of_datasets if self.files else of_files:
            if getattr(self, key) != type(self).model_fields[key].default:
                kind = "dataset" if self.files else "files"
                raise ValueError(f"{key} must be left out without {kind}, got {getattr(self, key)!r}; remove it")
        return self


KEYS_OF_SOURCES = {
    "dataset_config": ("hub",), "dataset_split": ("hub",), "eval_split": ("hub",), "synthetic_tokens": ("synthetic",),
    "skip_bad_rows": ("files", "hub", "mixture"),
}  # fmt: skip
"""Keys of `data` that other sources would not read."""


class DataConfig(Section):
    """Which text, how it is split and cut into rows."""

    source: Literal["python_stdlib", "synthetic", "files", "hub", "mixture"] = "python_stdlib"
    """python_stdlib: the standard library of this Python; synthetic: a Markov chain of known entropy; files; hub: `datasets.load_dataset`; mixture."""
    mixture: Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_tuple)] = ()
    """Several sources, for source `mixture` (which it implies), e.g. [{files: wiki.jsonl, weight: 0.7}, {dataset: org/code, weight: 0.3}]."""
    files: Strings = ()
    """Files or globs (txt, jsonl or ndjson, json, csv, parquet, arrow, mixed), for source `files`."""
    dataset: Place | None = None
    """Dataset on the Hub or a local folder of data files, for source `hub`."""
    dataset_config: str | None = None
    """Configuration (subset) of the dataset."""
    dataset_split: str = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split to evaluate on; null: `eval_fraction` of the training split is held out."""
    format: Format | None = None
    """What a record is; null: what its columns say (text, prompt + completion, messages, instruction + output, conversations)."""
    train_on: Literal["assistant", "last_assistant", "all", "completion"] | None = None
    """Which tokens of a conversation are targets; null: the assistant's, or the completion's."""
    chat_template: Place | None = None
    """File with a Jinja chat template; null: the tokenizer's own, or a plain one for a tokenizer that has none."""
    chat_template_date: Day | None = None
    """Date that a chat template which reads the clock writes, as YYYY-MM-DD; null: that of the first start of the run."""
    max_lossy_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the conversations that may be cut, have no target, or lose content to the template; more is an error."""
    packing: bool = True
    """Rows of conversations hold several, none of which sees another; false: one a row, padded, for models that cannot."""
    attend_across_documents: bool = True
    """Rows of plain text: a position sees the whole row before it, other documents too; false: its own document only."""
    text_column: str = "text"
    """Column that holds the text in everything but txt files."""
    skip_bad_rows: Count = 0
    """Records without usable text that are tolerated, skipped and counted; one more is an error."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text (by bytes, whole documents; at most twice as much) that is held out, when nothing else names the held-out text."""
    eval_files: Strings = ()
    """Files or globs to evaluate on; then all of `files` is trained on."""
    evaluation_sets: dict[str, Strings] = {}
    """More text to evaluate on, each for itself, e.g. {wiki: wiki.txt, code: [src/*.py]}; its metrics are eval/<name>/loss and so on."""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Targets per row, in tokens; a row holds one id more."""
    shuffle: bool = True
    """Rows come in another order in every epoch; false: as the text has them, epoch after epoch."""
    streaming: bool = False
    """Text is read and tokenised while the model trains on it, for what does not fit on a disk; see docs/data.md."""
    num_streams: PositiveInt = 8
    """Streams that the shards (files, or those of the dataset) are dealt out to; a multiple of any number of processes."""
    shuffle_buffer: Annotated[int, Field(ge=2)] | None = None
    """Rows of each stream that are shuffled among each other, one such block after the other, and shards in each pass; null: nothing is."""
    synthetic_tokens: Annotated[int, Field(ge=1000)] = 2_000_000
    """Length of the synthetic training text, in symbols."""
    num_workers: Count = 0
    """Processes that read rows ahead, per training process (streams: at least one); never changes the result."""
    cache_dir: Place | None = None
    """Where token rows are kept; null: $ACC_LM_CACHE, else ~/.cache/acc-lm."""

    @model_validator(mode="after")
    def _sets_have_names_and_files(self) -> DataConfig:
        for name, files in self.evaluation_sets.items():
            if not NAME_OF_SET.fullmatch(name) or name in EVALUATION_METRICS:
                raise ValueError(
                    f"evaluation_sets must have names of letters, digits, _ and -, and none that is a metric, got {name!r}; rename it"
                )
            if not files:
                raise ValueError(
                    f"evaluation_sets.{name} must name at least one file, got none; add some, or leave it out"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _mixture_is_a_source(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mixture") and "source" not in values:
            return {**values, "source": "mixture"}
        return values

    @model_validator(mode="after")
    def _mixture_fits_together(self) -> DataConfig:
        if self.source == "mixture" and not self.mixture:
            raise ValueError("mixture must name at least one source for source mixture, got none; add some")
        if self.source != "mixture" and self.mixture:
            raise ValueError(
                f"mixture must be empty for source {self.source}, got {len(self.mixture)}; set data.source to mixture"
            )
        by_weight = [source.weight for source in self.mixture if source.weight is not None]
        if by_weight and len(by_weight) < len(self.mixture):
            raise ValueError("mixture must have weight in all sources or tokens in all, got some of each; choose one")
        if by_weight and min(by_weight) < LEAST_SHARE * sum(by_weight):
            raise ValueError(
                f"mixture must have no weight below {LEAST_SHARE:g} of their sum, got {min(by_weight):g} of {sum(by_weight):g}; "
                "raise it, or leave that source out"
            )
        names = [source.title for source in self.mixture]
        for name in names:
            if not NAME_OF_SET.fullmatch(name) or name in EVALUATION_METRICS:
                raise ValueError(
                    f"mixture must have names of letters, digits, _ and -, and none that is a metric, got {name!r}; give that source a name"
                )
            if names.count(name) > 1 or name in self.evaluation_sets:
                other = "another source" if names.count(name) > 1 else "one of data.evaluation_sets"
                raise ValueError(
                    f"mixture must have names of their own, got {name!r}, as {other}; give it another name"
                )
        return self

    @model_validator(mode="after")
    def _stream_fits_together(self) -> DataConfig:
        if self.shuffle_buffer is not None and not (self.streaming and self.shuffle):
            other = "without data.streaming" if not self.streaming else "with data.shuffle=false"
            raise ValueError(f"shuffle_buffer must be null {other}, got {self.shuffle_buffer}; change one of them")
        if not self.streaming:
            return self
        if self.source not in ("files", "hub"):
            raise ValueError(
                f"streaming must be of source files or hub, got {self.source}; set data.streaming to false"
            )
        if not (self.eval_files if self.source == "files" else self.eval_split):
            key = "eval_files" if self.source == "files" else "eval_split"
            raise ValueError(
                f"{key} must name the held-out text of a stream, of which no share can be held out, got none; add data.{key}"
            )
        if self.format not in (None, "text"):
            raise ValueError(f"format must be text for a stream, got {self.format}; set data.streaming to false")
        return self

    @model_validator(mode="after")
    def _source_is_named(self) -> DataConfig:
        if self.source == "files" and not self.files:
            raise ValueError("files must name at least one file for source files, got none; add data.files")
        if self.source == "hub" and not self.dataset:
            raise ValueError("dataset must name a dataset for source hub, got none; add data.dataset")
        if self.source != "files" and (self.files or self.eval_files):
            key = "files" if self.files else "eval_files"
            way = "give each source of the mixture its own" if self.mixture else "set data.source to files"
            raise ValueError(f"{key} must be empty for source {self.source}, got {list(getattr(self, key))}; {way}")
        if self.source != "hub" and self.dataset:
            raise ValueError(
                f"dataset must be null for source {self.source}, got {self.dataset!r}; set data.source to hub"
            )
        for key, sources in KEYS_OF_SOURCES.items():
            default = type(self).model_fields[key].default
            if self.source not in sources and getattr(self, key) != default:
                kept = "null" if default is None else default
                way = "give each source of the mixture its own" if self.mixture else "it would change nothing"
                raise ValueError(
                    f"{key} must be {kept} for source {self.source}, got {getattr(self, key)!r}, which is of "
                    f"{' and '.join(sources)}; {way}"
                )
        return self


class TrainingConfig(Section):
    """How long, in which batches, and what is reported when."""

    max_steps: PositiveInt | None = None
    """Optimizer steps; give this or `num_epochs`."""
    num_epochs: PositiveFloat | None = None
    """Passes over the training rows; give this or `max_steps`."""
    global_batch_size: PositiveInt = 16
    """Rows per optimizer step, over all processes."""
    micro_batch_size: PositiveInt = 16
    """Most rows per forward pass of one process; decides memory, never the result."""
    find_micro_batch_size: bool = False
    """Before the first step, try a full micro-batch and take smaller ones of the same global batch until it fits on all processes."""
    mixed_precision: Literal["no", "bf16", "fp16", "fp8"] | None = None
    """Compute precision; null: what the Accelerate config says."""
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How torchao scales what has 8 bits under fp8: by tensor (fastest), by row, by row with the weights' gradients in 16 bits."""
    allow_tf32: bool = False
    """Let fp32 matrix products use TF32 on GPUs that have it."""
    cudnn_attention: bool = True
    """On Hopper GPUs, cuDNN's attention wherever it can take the place of another kernel; never changes more than rounding."""
    deterministic: bool = False
    """Only deterministic kernels (slower on a GPU)."""
    log_every: PositiveInt = 10
    """Period of the training log, in steps."""
    eval_every: PositiveInt | None = 100
    """Period of the evaluation, in steps; the last step is always evaluated."""
    eval_every_epochs: PositiveFloat | None = None
    """Period of the evaluation, in passes over the training rows, beside `eval_every`."""
    eval_batches: PositiveInt | None = None
    """Evaluate on this many batches of `global_batch_size` rows, of each set too; null: on all held-out rows."""
    early_stopping_patience: PositiveInt | None = None
    """The run ends after this many evaluations in a row that did not improve `checkpoint.best_metric`; null: never."""
    early_stopping_min_improvement: Rate = 0.0
    """What counts as one: better than the best by more than this, in the metric's own unit."""
    max_nonfinite_steps: PositiveInt = 3
    """The run ends at this many steps in a row whose gradient is not finite; such a step changes no weight."""
    on_spike: Literal["ignore", "warn", "rewind", "stop"] = "warn"
    """When the loss jumps. rewind: back to the weights of the last checkpoint, on with the data after the jump; it and stop look at every step."""
    spike_threshold: PositiveFloat = 10.0
    """A jump: above the median loss of the 64 steps before by this many of their (robust) standard deviations, and by a tenth."""
    max_minutes: PositiveFloat | None = None
    """Save and stop after this time, in minutes since the start; the same command goes on."""

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


class OptimizerConfig(Section):
    """AdamW or Muon, with weight decay on matrices only and clipping by the global norm."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the weights of the hidden layers with AdamW for embeddings, head, norms and biases."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate; Muon's updates are as large as AdamW's, so that one rate serves both."""
    adamw_learning_rate: PositiveFloat | None = None
    """Peak learning rate of what muon leaves to AdamW, on the same schedule; null: `learning_rate`."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_as_tuple)] = (0.9, 0.95)
    """Decay of AdamW's first and second moment, per step."""
    epsilon: PositiveFloat = 1e-8
    """Added to the square root of AdamW's second moment."""
    momentum: Beta = 0.95
    """Decay of Muon's momentum (Nesterov's), per step."""
    weight_decay: Rate = 0.1
    """Decoupled weight decay, per unit of learning rate; not on biases and norms."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this global norm; null: no clipping."""

    @model_validator(mode="after")
    def _two_rates_need_two_optimizers(self) -> OptimizerConfig:
        if self.name == "adamw" and self.adamw_learning_rate is not None:
            raise ValueError(
                f"adamw_learning_rate must be null for adamw, got {self.adamw_learning_rate}; set learning_rate, or name=muon"
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
    """The learning rate as a function of the optimizer step, by transformers' names."""

    name: Literal[SCHEDULES] = "cosine"  # type: ignore[valid-type]
    """Schedule of transformers; `cosine` with a minimum is `cosine_with_min_lr`."""
    warmup_steps: Count = 30
    """Steps over which the rate rises linearly from 0."""
    min_learning_rate: Rate = 0.0
    """Rate at the end of the schedule, for those that have one."""
    arguments: dict[str, Any] = {}
    """More arguments of the schedule, e.g. num_decay_steps, num_cycles, power."""
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the rates by `training.global_batch_size` / `reference_batch_size`, or by its square root."""
    reference_batch_size: PositiveInt | None = None
    """Global batch size, in rows, that `optimizer.learning_rate` was chosen for."""

    @model_validator(mode="after")
    def _scale_has_a_reference(self) -> ScheduleConfig:
        if (self.scale_learning_rate == "none") != (self.reference_batch_size is None):
            raise ValueError(
                f"reference_batch_size must be set with scale_learning_rate, and only then, got {self.reference_batch_size} with "
                f"{self.scale_learning_rate}; it is the global batch size that optimizer.learning_rate was chosen for"
            )
        return self

    def scale(self, global_batch_size: int) -> float:
        """What the rates are multiplied by for this global batch size."""
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
                f"min_learning_rate must be 0 beside arguments.{given[0]}, got {self.min_learning_rate}; leave one of them out"
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


class CheckpointConfig(Section):
    """When the state of the run is saved, what is kept, and how a run goes on."""

    every: PositiveInt | None = 100
    """Period, in steps; null: only at the end (and when stopped)."""
    every_epochs: PositiveFloat | None = None
    """Period, in passes over the training rows, beside `every`."""
    keep_last: Annotated[int, Field(ge=2)] | None = 2
    """Newest checkpoints kept; at least 2, for the newest may be damaged; null: all."""
    keep_best: Count = 1
    """Checkpoints kept for the best evaluations, by `best_metric`."""
    best_metric: str = "eval/loss"
    """Which evaluation is best: the least eval/loss, eval/perplexity, eval/bits_per_byte, the highest eval/token_accuracy; or eval/<set>/loss, ..."""
    asynchronous: bool = False
    """Write behind the training, which waits only while its state is copied; needs memory of the host for that copy."""
    resume: str = "auto"
    """auto: go on from the newest valid checkpoint of `output_dir`; never: refuse a folder that has some; or a path to start from."""
    verify: Literal["full", "size"] = "full"
    """What is read of a checkpoint before a run goes on from it: every byte, or only which files are there and how long they are."""
    allow_changed_recipe: bool = False
    """Go on although the recipe differs from the checkpoint's in what is learned."""


class TrackingConfig(Section):
    """Where metrics go beside `metrics.jsonl`."""

    report_to: Annotated[
        tuple[Literal["wandb", "tensorboard"], ...],
        BeforeValidator(_as_tuple),
        WithJsonSchema({"type": "array", "items": {"enum": ["wandb", "tensorboard"]}}),
    ] = ("wandb",)
    """Trackers; wandb works offline by itself when there is no key or no network."""
    project: Annotated[NameInTracker, AfterValidator(_folder_name)] = "acc-lm"
    """Project in the tracker."""
    run_name: NameInTracker | None = None
    """Name in the tracker; null: the name of `output_dir`."""
    peak_tflops: PositiveFloat | None = None
    """What one device can do in the precision of the run, in 10^12 FLOP/s, for train/mfu; null: by its data sheet, if it is known here."""
    sample_tokens: Count = 0
    """At each evaluation continue each prompt by this many tokens, always the likeliest, in samples.jsonl and the trackers; 0: none."""
    sample_prompts: Strings = ()
    """What is continued: text, or what a user says in conversations; none: the first held-out text."""


class ProfileConfig(Section):
    """A look at a few steps in detail, in profile/; changes no number of the run."""

    steps: Annotated[tuple[PositiveInt, PositiveInt], BeforeValidator(_as_tuple)] | None = None
    """The first and the last step of it, both included, e.g. [10, 13]; null: none."""

    @model_validator(mode="after")
    def _few_steps(self) -> ProfileConfig:
        if self.steps is not None and not 0 <= self.steps[1] - self.steps[0] < MOST_PROFILED:
            raise ValueError(
                f"steps must be the first and the last of 1 to {MOST_PROFILED} steps, got {list(self.steps)}; for instance "
                f"[{self.steps[0]}, {self.steps[0] + 3}]"
            )
        return self


class ExportConfig(Section):
    """What comes out: the model in final/, and the sample of text that ends the run."""

    weights: Literal["last", "best"] | None = None
    """Of final/: those of the last step or of the best checkpoint; null: the best with early stopping, else the last."""
    sample_prompt: str | None = None
    """Start of the sample; null: the first tokens of the held-out text."""
    sample_tokens: Count = 80
    """Length of the sample, in tokens; 0: none."""


class DistributedConfig(Section):
    """Settings of the process group and of DDP that an Accelerate config cannot express."""

    find_unused_parameters: bool = False
    """Let DDP look for parameters without a gradient (slower)."""
    gradient_as_bucket_view: bool = True
    """Gradients share the memory of DDP's buckets."""
    bucket_cap_mb: PositiveInt = 25
    """Size of a gradient bucket, in MiB."""
    static_graph: bool = False
    """Tell DDP that every step uses the same parameters."""
    comm_hook: Literal["none", "fp16", "bf16", "power_sgd", "batched_power_sgd"] = "none"
    """Compression of the gradient all-reduce; changes the numbers, except none."""
    comm_hook_arguments: dict[str, Any] = Field(default_factory=dict)
    """Of the PowerSGD hooks, by torch's names: matrix_approximation_rank, start_powerSGD_iter, ..."""
    broadcast_buffers: bool = True
    """DDP copies the main process's buffers to all before each forward."""
    backend: Literal["nccl", "gloo"] | None = None
    """Of the process group; null: nccl on GPUs, gloo on CPUs."""
    timeout_seconds: PositiveInt = 600
    """How long a process waits for the others in a collective."""
    step_timeout_seconds: PositiveFloat | None = 300.0
    """A step that takes longer is told, with the place in the code where the process is; null: never."""
    check_parameters_every: PositiveInt | None = None
    """Compare checksums of the processes' copies of the weights, period in steps; reads all weights."""


class Config(Section):
    """A whole recipe."""

    output_dir: Folder = "runs/quickstart"
    """Folder of the run; relative to where the command is typed."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Decides initial weights, order of the rows and dropout."""
    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    profile: ProfileConfig = ProfileConfig()
    export: ExportConfig = ExportConfig()
    distributed: DistributedConfig = DistributedConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        steps = self.training.max_steps
        if steps is not None and self.schedule.warmup_steps > steps:
            raise ValueError(
                f"schedule.warmup_steps must be at most training.max_steps {steps}, got {self.schedule.warmup_steps}; for instance schedule.warmup_steps={steps // 10}"
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
        """Nobody has counted or read what a stream will give."""
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
                    f"{key} must be null for a stream, whose rows nobody has counted, got {value}; count in steps"
                )
        if not (self.tokenizer.name_or_path or self.model.name_or_path or self.tokenizer.kind == "byte"):
            raise ValueError(
                f"tokenizer.name_or_path must be an existing tokenizer for a stream, got none to make {self.tokenizer.kind} from; "
                "name one, or set tokenizer.kind to byte"
            )

    @property
    def exports_best(self) -> bool:
        """Whether final/ holds the weights of the best checkpoint."""
        return (self.export.weights or ("last" if self.training.early_stopping_patience is None else "best")) == "best"

    @property
    def evaluation_metrics(self) -> list[str]:
        """The names of all that an evaluation measures."""
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
                "training.early_stopping_patience must be null without evaluations on the way, got "
                f"{training.early_stopping_patience}; set training.eval_every or training.eval_every_epochs"
            )
        if self.exports_best and not self.checkpoint.keep_best:
            raise ValueError(
                "checkpoint.keep_best must be at least 1 where final/ gets the best weights, got 0; raise it, or set export.weights=last"
            )

    def _base_can_be_found_again(self) -> None:
        """An adapter is used beside the very model that it was trained beside."""
        model, ways = self.model, "or train the model itself (adapter.kind=none)"
        if model.name_or_path is None:
            raise ValueError(
                f"model.name_or_path must be the model that the adapter is for, got null; name one, {ways}"
            )
        if self.adapter.quantize_base != "none" and model.dtype == "float64":
            raise ValueError(
                f"adapter.quantize_base must be none for model.dtype float64, got {self.adapter.quantize_base}, which computes in 16 or 32 bits; "
                "change one of them"
            )
        if self.optimizer.name == "muon":
            raise ValueError(
                "optimizer.name must be adamw beside an adapter, got muon, which is made for the update of a whole weight and not for "
                f"each of its two thin factors; change it, {ways}"
            )
        if model.freeze:
            raise ValueError(
                f"model.freeze must be empty beside an adapter, which freezes all of the model, got {list(model.freeze)}; leave it out, {ways}"
            )
        if model.resize_embeddings:
            raise ValueError(
                f"model.resize_embeddings must be false beside an adapter, got true; the new rows would be neither trained nor saved: use the model's own tokenizer, {ways}"
            )


# Keys that say where and how a run is carried out, not what it learns: they may change on resume.
NOT_LEARNED = (
    "output_dir",
    "checkpoint",
    "tracking",
    "profile",
    "export",
    "distributed",
    "data.files",  # what they hold is compared instead
    "data.eval_files",
    "data.dataset",
    "data.evaluation_sets",
    "data.num_workers",
    "data.cache_dir",
    "training.micro_batch_size",
    "training.find_micro_batch_size",
    "training.log_every",
    "training.eval_every",
    "training.eval_every_epochs",
    "training.eval_batches",
    "training.early_stopping_patience",
    "training.early_stopping_min_improvement",
    "training.max_minutes",
    "training.max_nonfinite_steps",
    "training.deterministic",
    "training.cudnn_attention",
    "model.gradient_checkpointing",
    # Places: what is found there is known by its content, the text and the tokenizer by the key of the rows, the base
    # model by the checksum of its weights.
    "data.files",
    "data.eval_files",
    "data.dataset",
    "data.chat_template",
    "tokenizer.name_or_path",
    "model.name_or_path",
    "model.revision",
    "model.trust_remote_code",
)
LEARNED = ("distributed.comm_hook", "distributed.comm_hook_arguments")
"""Keys in a section of those that change the numbers all the same."""


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}, {'a': [{'b': 1}]} -> {'a.0.b': 1}; empty mappings stay values."""
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
    """Keys whose values differ in what is learned: {key: (old, new)}; a longer run is no change.

    Args:
        old, new: two resolved recipes as plain mappings (`Config.model_dump(mode="json")`).
    """
    before, after = flatten(old), flatten(new)
    changes = {}
    for key in sorted(before.keys() | after.keys()):
        name = re.sub(r"^data\.mixture\.\d+\.", "data.", key)
        is_free, is_learned = (any(f"{name}.".startswith(f"{k}.") for k in keys) for keys in (NOT_LEARNED, LEARNED))
        if is_free and not is_learned:
            continue
        was, now = before.get(key), after.get(key)
        if key == "data.mixture":  # places, as above
            places = ("files", "eval_files", "dataset")
            was, now = (
                [{k: v for k, v in part.items() if k not in places} for part in parts or ()] for parts in (was, now)
            )
        longer = key in ("training.max_steps", "training.num_epochs") and was and now and now > was
        if was != now and not longer:
            changes[key] = (was, now)
    return changes


def nearest_multiples(number: int, of: int) -> str:
    """The multiples of `of` just below and above `number`, for an error message."""
    below = number // of * of
    return ", ".join(str(n) for n in (below, below + of) if n > 0)
