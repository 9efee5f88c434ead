"""Data of a run for training and evaluation: rows, facts about them, and their order."""

from __future__ import annotations

from collections.abc import Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from acc_lm.chat.conversations import ChatPlan
from acc_lm.config import DataConfig
from acc_lm.rows.batch import IGNORE_INDEX, HeldOutRows, RowSource
from acc_lm.rows.mixture import MixedOrder, MixedRows
from acc_lm.rows.order import ROW_ORDER, RowOrder, StreamOrder
from acc_lm.rows.packing import PackedRows
from acc_lm.rows.streams import StreamRows
from acc_lm.text.documents import Corpus, hash_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ROWS_FORMAT = "rows-2"  # part of every cache key: raise it when the files or their meaning change
FORMER = "rows-1"  # earlier format, under which a checkpoint may know the same rows


@dataclass(frozen=True)
class DataFacts:
    """Facts about the text of a run; stored next to the rows."""

    vocab_size: int
    train_documents: int
    train_bytes: int
    train_tokens: int
    eval_documents: int
    eval_bytes: int
    eval_tokens: int
    skipped_records: int = 0
    shared_documents: int = 0
    as_in_rows_1: bool = True
    """True if the format rows-1 held out the same documents."""
    longest_document: int = 0
    """Size of the longest document, in bytes."""
    eval_files: tuple[str, ...] = ()
    gzip_bytes: int | None = None
    xz_bytes: int | None = None
    source: dict[str, Any] = field(default_factory=dict)
    encoder: str = ""
    """Library that encoded the training text, and why if it is the slower one; empty for conversations and older rows."""
    format: str = "text"
    conversations: str = ""
    """Readable summary of the training conversations: items, targets and losses."""
    item_counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """`ItemCounts` of each split, for conversations."""
    has_roles: bool = False
    """True if a chat template wrote some of the text."""

    @property
    def compressed_bits_per_byte(self) -> dict[str, float]:
        """Bits per byte of gzip -9 and xz -9 on the held-out text as one stream."""
        sizes = {"gzip": self.gzip_bytes, "xz": self.xz_bytes}
        return {name: 8 * size / self.eval_bytes for name, size in sizes.items() if size is not None}

    def compared_with_compressors(self, bits_per_byte: float | None, num_targets: int) -> dict[str, float]:
        """A model's bits per byte, next to the compressors' if it covers the same text; empty without a score."""
        if bits_per_byte is None:
            return {}
        return {
            "model": bits_per_byte,
            **(self.compressed_bits_per_byte if num_targets == self.eval_tokens - 1 else {}),
        }


@dataclass(frozen=True)
class SetFacts:
    """Facts about an evaluation set; stored next to its rows."""

    documents: int
    num_bytes: int
    tokens: int
    conversations: str = ""
    """Readable summary of its conversations: items, targets and losses."""
    key: str = ""
    """Hash of text and tokenizer."""
    item_counts: dict[str, int] = field(default_factory=dict)
    """`ItemCounts`, for conversations."""


@dataclass(frozen=True)
class Mixture:
    """The sources of a mixture, in the order in which its rows are numbered."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of rows of each source."""
    counts: tuple[int, ...]
    """Number of rows of each source in every block."""
    rows_per_pass: int
    """Number of rows of all sources together, in one pass over the mixture."""


@dataclass(frozen=True)
class Data:
    train: RowSource
    evaluation: HeldOutRows
    tokenizer: PreTrainedTokenizerBase
    facts: DataFacts
    key: str
    """Hash of text, tokenizer and split, by which a checkpoint identifies the data."""
    former_key: str | None = None
    """Key of the same rows in a checkpoint of an earlier version; None if that version had other rows."""
    text_key: str = ""
    """Hash of the documents and of the choice of held-out ones, for any tokenizer; empty for mixtures and streams."""
    evaluation_sets: dict[str, HeldOutRows] = field(default_factory=dict)
    """Additional evaluation text, by name; never a part of `key`, so a run may resume with other sets."""
    set_facts: dict[str, SetFacts] = field(default_factory=dict)

    mixture: Mixture | None = None
    """Sources of a mixture; None without one. `evaluation` consists of their evaluation sets, one per source name."""
    shuffle: bool = True
    template_day: str | None = None
    """Date for a chat template that reads the clock, as YYYY-MM-DD; None: no template reads it."""

    def order(self, seed: int, global_batch_size: int, lag: int = 0, version: int = ROW_ORDER) -> RowOrder:
        """The endless sequence of the training rows; `lag` and `version` as in `RowOrder`."""
        if isinstance(self.train, StreamRows):
            return StreamOrder(seed, 0, global_batch_size, lag, num_streams=self.train.num_streams)
        if self.mixture is None:
            return RowOrder(seed, self.num_rows, global_batch_size, lag, self.shuffle, version)
        sizes, counts, num_rows = self.mixture.sizes, self.mixture.counts, self.mixture.rows_per_pass
        return MixedOrder(seed, num_rows, global_batch_size, lag, self.shuffle, version, sizes, counts)

    def reading(
        self, order: RowOrder, step: int, saved: dict[str, list[int]] | None, process: int, num_processes: int
    ) -> AbstractContextManager[None]:
        """Context in which the training rows of the steps after `step` can be read; see `StreamRows.reading`."""
        if not isinstance(self.train, StreamRows):
            return nullcontext()
        assert isinstance(order, StreamOrder)
        return self.train.reading(order, step, saved, process, num_processes)

    def stream_states(self) -> dict[str, list[int]] | None:
        """States of this process's streams, for a checkpoint; None if the rows are not streamed."""
        return self.train.states() if isinstance(self.train, StreamRows) else None

    def news(self) -> list[str]:
        """Messages about the text since the last call, one line each."""
        return self.train.news() if isinstance(self.train, StreamRows) else []

    def by_source(self, order: RowOrder, samples_seen: int) -> dict[str, dict[str, float]]:
        """Number of targets and of passes of each source in the first `samples_seen` rows."""
        if self.mixture is None:
            return {}
        assert isinstance(order, MixedOrder)
        assert isinstance(self.train, MixedRows)
        tokens, rows = order.count_targets(self.train, samples_seen), order.count_rows(samples_seen)
        return {
            name: {"tokens": tokens[i], "passes": rows[i] / self.mixture.sizes[i]}
            for i, name in enumerate(self.mixture.names)
        }

    @property
    def keys(self) -> dict[str, str]:
        """Hashes that must be the same on every process, by display name."""
        return {"the text": self.key} | {f"the text of {name}": facts.key for name, facts in self.set_facts.items()}

    @property
    def num_rows(self) -> int:
        """Number of training rows; 0 for streams, whose rows nothing has counted."""
        return len(self.train) if isinstance(self.train, Sized) else 0

    @property
    def packs(self) -> bool:
        """True if rows hold several documents that must not attend to each other."""
        return self.train.packs

    @property
    def padded_lengths(self) -> np.ndarray | None:
        """Places taken in each training row, if a batch is only as wide as its longest row; None: all rows are full."""
        return self.train.padded_lengths

    def sample_prompt(self) -> str:
        return str(self.tokenizer.decode(self.prompt_ids()))

    def prompt_ids(self) -> list[int]:
        """Ids at the start of the held-out text: 16 of plain text, or those before the first target of conversations."""
        row = self.evaluation[0]
        length = 16
        first = self.train.parts[0] if isinstance(self.train, MixedRows) else self.train
        if isinstance(first, PackedRows):
            length = int((row["targets"][0] != IGNORE_INDEX).nonzero()[0, 0]) + 1
        return list(row["input_ids"][0, :length].tolist())


def text_key(corpus: Corpus, config: DataConfig, plan: ChatPlan | None) -> str:
    """Hash of the documents and of the settings that decide which of them are held out."""
    parts = (ROWS_FORMAT, corpus.key, config.text_column, config.eval_fraction, config.skip_bad_rows)
    return hash_text(repr((*parts, plan.format if plan else "text", *(plan.names if plan else ()), *limit_key(config))))


def limit_key(config: DataConfig) -> tuple[object, ...]:
    """Part of a key that says where the text ends; empty if it is used to its end."""
    return () if config.max_tokens is None else (("max_tokens", config.max_tokens),)


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    return hash_text(f"{tokenizer.backend_tokenizer.to_str()} {tokenizer.eos_token_id}")  # type: ignore[attr-defined]
