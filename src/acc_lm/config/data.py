"""Section `data` of a recipe."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from acc_lm.config.fields import (
    EVALUATION_METRICS,
    NAME_OF_SET,
    Count,
    Day,
    NotLearned,
    Place,
    PositiveFloat,
    PositiveInt,
    Section,
    Strings,
    as_tuple,
)

LEAST_SHARE = 1e-4
"""Smallest weight of a source, as a share of the sum of all weights; bounds the block of rows in which shares are exact."""
Format = Literal["text", "prompt_completion", "messages", "alpaca", "sharegpt"]
COLUMN_NAMES = (
    "prompt",
    "completion",
    "messages",
    "instruction",
    "input",
    "output",
    "conversations",
    "system",
    "tools",
)
"""Columns of records of instruction data, by the names that `data.columns` maps to those of the data."""
MESSAGE_KEYS = ("role", "content")
"""Keys of a message, which `data.columns` can map too."""
ROLES = ("system", "user", "assistant", "tool")


def _columns_have_known_names(value: dict[str, str]) -> dict[str, str]:
    known = COLUMN_NAMES + MESSAGE_KEYS
    for name in value:
        if name not in known:
            way = "set data.text_column" if name == "text" else "write it as {name here: name in the data}"
            raise ValueError(f"must map some of {', '.join(known)}, got {name!r}; {way}")
    names = list(value.values())
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"must map each to a column of its own, got {twice[0]!r} twice; remove one")
    return value


def _roles_are_known(value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    for role in value:
        if role not in ROLES:
            raise ValueError(
                f"must map some of {', '.join(ROLES)}, got {role!r}; write it as {{role: its name in the data}}"
            )
    names = [name for some in value.values() for name in some]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"must map each name to one role, got {twice[0]!r} twice; remove one")
    return value


Columns = Annotated[dict[str, str], AfterValidator(_columns_have_known_names)]
Roles = Annotated[dict[str, Strings], AfterValidator(_roles_are_known)]


class SourceConfig(Section):
    """One source of a mixture; the keys of `data` that are missing here apply to all sources."""

    name: str | None = None
    """Display name in metrics and evaluation; null: the name of the dataset, file or folder."""
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
    """Layout of a record; null: `data.format`, else detected from its columns."""
    columns: Columns | None = None
    """Names of the columns in this source; null: `data.columns`."""
    roles: Roles | None = None
    """Names of the roles in this source; null: `data.roles`."""
    weight: PositiveFloat | None = None
    """Share of this source in all rows, after all weights are divided by their sum; give this or `tokens`."""
    tokens: PositiveInt | None = None
    """Targets taken from this source in each pass over the mixture, exact to about one row; give this or `weight`."""
    max_tokens: PositiveInt | None = None
    """Tokens after which reading this source ends; null: never."""

    @property
    def title(self) -> str:
        """Display name: `name`, else the name of the dataset, file or folder."""
        if self.name is not None:
            return self.name
        path = (self.dataset or self.files[0]).rstrip("/")
        while any(mark in path for mark in "*?["):
            path = os.path.dirname(path)
        name = os.path.basename(path)
        stem = (
            name if self.dataset else re.sub(r"(\.[^.]+)?(\.(gz|bz2|xz|zst))?$", "", name, count=1, flags=re.IGNORECASE)
        )
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


SOURCES_OF_TEXT = {"dataset": "hub", "files": "files", "mixture": "mixture"}
"""Keys of `data` that name a text, each with the source that it implies; the last one wins."""


def implied_source(values: dict[str, Any]) -> str | None:
    """Source of the text that these values of `data` name; None: they name no text."""
    return next((source for key, source in reversed(SOURCES_OF_TEXT.items()) if values.get(key)), None)


KEYS_OF_SOURCES = {
    "dataset_config": ("hub",),
    "dataset_split": ("hub",),
    "eval_split": ("hub",),
    "synthetic_tokens": ("synthetic",),
    "skip_bad_rows": ("files", "hub", "mixture"),
    "max_tokens": ("python_stdlib", "synthetic", "files", "hub"),
}
"""Keys of `data`, each with the only sources that read it."""
KEYS_OF_RECORDS = ("format", "text_column", "columns", "roles")
"""Keys of `data` that describe the records of a text, of any source."""


class DataConfig(Section):
    """Text to train and evaluate on, how it is split, and how it is cut into rows."""

    source: Literal["python_stdlib", "synthetic", "files", "hub", "mixture"] = "python_stdlib"
    """Source of the text. python_stdlib: the standard library of this Python; synthetic: a Markov chain of known entropy; files: `files`; hub: `dataset`, by `datasets.load_dataset`; mixture: `mixture`."""
    mixture: Annotated[tuple[SourceConfig, ...], BeforeValidator(as_tuple)] = ()
    """Sources of a mixture, e.g. [{files: wiki.jsonl, weight: 0.7}, {dataset: org/code, weight: 0.3}]; implies source `mixture`."""
    files: Annotated[Strings, NotLearned] = ()
    """Files, globs, folders or addresses (https://, s3://, hf://, ...) for source `files`: txt, jsonl or ndjson, json, csv, parquet and arrow, also mixed; all but the last two also as gz, bz2, xz or zst."""
    dataset: Annotated[Place | None, NotLearned] = None
    """Dataset on the Hub, or a local folder of data files or from `save_to_disk`, for source `hub`."""
    dataset_config: str | None = None
    """Configuration (subset) of the dataset."""
    dataset_split: str = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split to evaluate on; null: `eval_fraction` of the training split is held out."""
    format: Format | None = None
    """Layout of a record; null: detected from its columns (text, prompt + completion, messages, instruction + output, conversations)."""
    columns: Columns = {}
    """Names of the columns in the data, e.g. {prompt: question, completion: answer}; also role and content, the keys of a message."""
    roles: Roles = {}
    """Names of the roles in the data, in addition to the usual ones, e.g. {user: customer, assistant: [agent, bot]}."""
    train_on: Literal["assistant", "last_assistant", "all", "completion"] | None = None
    """Tokens of a conversation that are targets; null: those of the assistant, or of the completion."""
    chat_template: Annotated[Place | None, NotLearned] = None
    """File with a Jinja chat template; null: the tokenizer's own template, or a plain one if it has none."""
    chat_template_date: Day | None = None
    """Date, as YYYY-MM-DD, for a chat template that prints the current date; null: the date of the first start of the run."""
    max_lossy_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Tolerated share of conversations that are cut, of those without a target, and of those that lose content to the template; more is an error."""
    packing: bool = True
    """Pack several conversations into a row, each attending only to itself; false: one padded conversation per row, for models that cannot do this."""
    attend_across_documents: bool = True
    """In rows of plain text, let a position attend to the whole row before it, other documents included; false: to its own document only."""
    text_column: str = "text"
    """Column that holds the text, in all file formats but txt."""
    skip_bad_rows: Count = 0
    """Maximum number of records without usable text, which are skipped and counted; one more is an error."""
    max_tokens: PositiveInt | None = None
    """Tokens after which reading the text ends, with a complete document, before any of it is held out; null: never."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the text, in bytes, to hold out when no other key names held-out text; taken in whole documents where possible, at most twice this share."""
    eval_files: Annotated[Strings, NotLearned] = ()
    """Files or globs to evaluate on; all of `files` is then trained on."""
    evaluation_sets: Annotated[dict[str, Strings], NotLearned] = {}
    """Additional texts, each evaluated separately, e.g. {wiki: wiki.txt, code: [src/*.py]}; their metrics are eval/<name>/loss and so on."""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Targets per row, in tokens; a row holds one id more."""
    shuffle: bool = True
    """Shuffle the rows anew in every epoch; false: keep the order of the text in every epoch."""
    streaming: bool = False
    """Read and tokenise the text while the model trains on it, for text that does not fit on a disk; see docs/guides/data.md."""
    num_streams: PositiveInt = 8
    """Number of streams that the shards (files, or those of the dataset) are dealt out to; must be a multiple of the number of processes."""
    shuffle_buffer: Annotated[int, Field(ge=2)] | None = None
    """Rows of each stream that are shuffled together, block by block; the shards are then shuffled in each pass too. null: no shuffling."""
    synthetic_tokens: Annotated[int, Field(ge=1000)] = 2_000_000
    """Length of the synthetic training text, in symbols."""
    num_workers: Annotated[Count, NotLearned] = 0
    """Number of processes that read rows ahead, per training process (at least one for streams); never changes the result."""
    cache_dir: Annotated[Place | None, NotLearned] = None
    """Folder in which token rows are cached; null: $ACC_LM_CACHE, else ~/.cache/acc-lm."""

    @model_validator(mode="after")
    def _sets_have_names_and_files(self) -> DataConfig:
        for name, files in self.evaluation_sets.items():
            if not NAME_OF_SET.fullmatch(name) or name in EVALUATION_METRICS:
                raise ValueError(
                    f"evaluation_sets must have names of letters, digits, _ and - that are not metric names, got {name!r}; rename it"
                )
            if not files:
                raise ValueError(
                    f"evaluation_sets.{name} must name at least one file, got none; add some, or leave it out"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _text_implies_its_source(cls, values: Any) -> Any:
        if isinstance(values, dict) and "source" not in values:
            source = implied_source(values)
            return {**values, "source": source} if source else values
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
                    f"mixture must have names of letters, digits, _ and - that are not metric names, got {name!r}; give that source a name"
                )
            if names.count(name) > 1 or name in self.evaluation_sets:
                other = "another source" if names.count(name) > 1 else "one of data.evaluation_sets"
                raise ValueError(
                    f"mixture must have unique names, got {name!r}, also the name of {other}; give it another name"
                )
        return self

    @model_validator(mode="after")
    def _stream_fits_together(self) -> DataConfig:
        if self.shuffle_buffer is not None and not (self.streaming and self.shuffle):
            other = "without data.streaming" if not self.streaming else "with data.shuffle=false"
            raise ValueError(f"shuffle_buffer must be null {other}, got {self.shuffle_buffer}; remove it")
        if not self.streaming:
            return self
        if self.source not in ("files", "hub"):
            raise ValueError(f"streaming must have source files or hub, got {self.source}; set data.streaming to false")
        if not (self.eval_files if self.source == "files" else self.eval_split):
            key = "eval_files" if self.source == "files" else "eval_split"
            raise ValueError(
                f"{key} must name held-out text for a stream, because no share of a stream can be held out, got none; add data.{key}"
            )
        if self.format not in (None, "text"):
            raise ValueError(f"format must be text for a stream, got {self.format}; set data.streaming to false")
        if self.max_tokens is not None:
            raise ValueError(
                f"max_tokens must be null for a stream, which is read as far as the run goes, got {self.max_tokens}; remove it"
            )
        for key in ("columns", "roles"):
            if getattr(self, key):
                raise ValueError(
                    f"{key} must be empty for a stream, which is text, got {getattr(self, key)}; remove it"
                )
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
                way = "give each source of the mixture its own" if self.mixture else "remove it"
                raise ValueError(
                    f"{key} must be {kept} for source {self.source}, got {getattr(self, key)!r}, which is only for "
                    f"{' and '.join(sources)}; {way}"
                )
        return self
