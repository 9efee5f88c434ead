"""What a model makes of each document of a text: the rows of `evaluation`, with their losses added up by document.

    documents ──► rows (cut or packed as in a run) ──► losses by position ──► sums by document ──► EvaluationResult

A document's sums do not depend on which process had which of its rows, so neither does anything made of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from acc_lm.adapter import open_adapter
from acc_lm.chat import Conversation, ItemCounts, build_items, check, describe
from acc_lm.config import DataConfig, ModelConfig
from acc_lm.conversations import ChatPlan, bytes_of_targets, plan_of, template_of
from acc_lm.data import text_key
from acc_lm.documents import encode_each, split_documents
from acc_lm.errors import CheckpointError, ConfigError, DataError
from acc_lm.evaluation import EvaluationResult
from acc_lm.export import load_exported, written_aside
from acc_lm.losses import IGNORE_INDEX
from acc_lm.model import build_empty_model, build_model, make_ready
from acc_lm.order import evaluation_batches
from acc_lm.packing import PackedRows, one_per_row, pack
from acc_lm.rows import Batch, Rows, build_loader
from acc_lm.runtime import initialise_once, release_gathered
from acc_lm.sources import Document, Skipped, kind_of, open_corpus
from acc_lm.step import to_device

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ScoredText:
    """Documents, the rows that they are in, and what a document answers for."""

    rows: Rows | PackedRows
    starts: np.ndarray
    """First token of each document in `Rows`, first item of each in `PackedRows`, and the end: int64 [num_documents + 1]."""
    num_bytes: np.ndarray
    """UTF-8 bytes of the text that each document's targets stand for, int64 [num_documents]."""
    places: tuple[str | None, ...]
    """`file:line` of each document, or its file."""
    conversations: tuple[Conversation, ...] = ()
    """One a document; none for plain text."""
    references: tuple[tuple[str, ...], ...] = ()
    """Answers that count as right, of each conversation."""
    plan: ChatPlan | None = None
    about: str = ""
    """For people."""

    @property
    def packs(self) -> bool:
        """Whether rows hold several documents that must not see each other."""
        return not self.rows.padded if isinstance(self.rows, PackedRows) else self.rows.end is not None

    def document_of(self, row_numbers: np.ndarray, batch: Batch) -> np.ndarray:
        """The document that each target of a batch belongs to, int64 [B, L]; anything where there is no target."""
        if isinstance(self.rows, PackedRows):
            filled = np.maximum(row_numbers, 0)  # row -1 has no target
            begin, end = (self.rows.packing.row_offsets[filled + more] for more in (0, 1))
            number_BL = batch["document_ids"].numpy() if "document_ids" in batch else np.zeros((1, 1), dtype=np.int64)
            places_BL = np.minimum(begin[:, None] + number_BL, end[:, None] - 1)
            units = self.rows.packing.items[places_BL]
        else:
            length = self.rows.sequence_length
            units = row_numbers[:, None] * length + 1 + np.arange(length)
        found: np.ndarray = np.searchsorted(self.starts, units, side="right") - 1
        return np.broadcast_to(found, batch["targets"].shape)


def read_documents(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    held_out: bool,
    trained_on: str | None = None,
    references_column: str | None = None,
    progress: Callable[[int], object] = lambda num_bytes: None,
    day: str | None = None,
) -> ScoredText:
    """The text of a recipe as rows, exactly as a run would make them of it.

    Args:
        day: date for a chat template that reads the clock where the recipe names none, as YYYY-MM-DD.
        held_out: only what the recipe holds out from training; else everything.
        trained_on: `Data.text_key` of the run whose held-out text this must be; None: no run's.
        references_column: of the records, with one right answer or a list of them; None: the answer of the conversation.
        progress: called with the bytes of each document.

    Raises:
        DataError, ConfigError: it cannot be read, or holds nothing to score.
        CheckpointError: it is not the text of that run.
    """
    plan = plan_of(config, day)
    references: dict[str, tuple[str, ...]] = {}
    if references_column is not None and plan is None:
        raise ConfigError(
            f"--references-column must be of records with prompts, got {references_column!r} for plain text; leave it out, or set data.format"
        )

    def read(record: Any, place: str, skipped: Skipped) -> str | None:
        assert plan is not None
        text = plan.read(record, place, skipped)
        if text is not None and references_column is not None:
            references[place] = _references_in(record, references_column, place)
        return text

    corpus = open_corpus(config, seed, read if plan else None)
    if trained_on is not None and text_key(corpus, config, plan) != trained_on:
        raise CheckpointError(
            "the run must have been trained on this text, got other text (its content or what is held out of it changed); "
            "put back what it was trained on, or name what to score with --data"
        )
    if held_out:
        _, evaluation, _ = split_documents(corpus, config, can_cut=plan is None)
        documents = evaluation()
    else:
        documents = corpus.train(Skipped(config.skip_bad_rows))
    documents = _counted(documents, progress)
    if plan is None:
        return _text(documents, tokenizer, config)
    return _conversations(documents, plan, tokenizer, config, references)


def _counted(documents: Iterator[Document], progress: Callable[[int], object]) -> Iterator[Document]:
    for document in documents:
        yield document
        progress(len(document.text.encode()))


def _references_in(record: dict[str, Any], column: str, place: str) -> tuple[str, ...]:
    value = record.get(column)
    if value is None:
        columns = ", ".join(map(repr, record))
        raise DataError(f"{place}: must have a column {column!r}, got {columns}; change --references-column")
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(text, str) for text in found):
        raise DataError(f"{place}: {column!r} must be a string or a list of some, got {kind_of(value)}; correct it")
    return tuple(found)


def _text(documents: Iterator[Document], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> ScoredText:
    encoded = list(encode_each(documents, tokenizer))
    tokens, byte_counts = (np.concatenate([entry[n] for entry in encoded] or [np.zeros(0, np.uint32)]) for n in (1, 2))
    if len(tokens) < 2:
        raise DataError("data: the text must have at least one target, got none; add text")
    starts = np.cumsum([0, *(len(ids) for _, ids, _ in encoded)])
    end = None if config.attend_across_documents else tokenizer.eos_token_id
    byte_counts[0] = 0  # the first token of all is no target
    return ScoredText(
        Rows(tokens, config.sequence_length, byte_counts, end),
        starts,
        np.array([int(counts.sum()) for counts in np.split(byte_counts.astype(np.int64), starts[1:-1])]),
        tuple(document.place or document.file for document, _, _ in encoded),
        about=f"{len(encoded):,} documents, {len(tokens):,} tokens",
    )


def _conversations(
    documents: Iterator[Document],
    plan: ChatPlan,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    references: dict[str, tuple[str, ...]],
) -> ScoredText:
    template = template_of(plan, tokenizer)
    counts = ItemCounts()
    conversations, items, starts, num_bytes = [], [], [0], []
    for document in documents:
        conversation = plan.open(document)
        found, count = build_items(conversation, tokenizer, template, plan.train_on, plan.max_length)
        counts += count
        conversations.append(conversation)
        items += found
        starts.append(len(items))
        num_bytes.append(
            sum(int(bytes_of_targets(i.ids, np.asarray(i.is_target, bool), tokenizer).sum()) for i in found)
        )
    check(counts, config.max_lossy_share)
    offsets = np.cumsum([0, *(len(item.ids) for item in items)])
    rows = PackedRows(
        np.concatenate([np.asarray(item.ids, dtype=np.uint32) for item in items]),
        np.packbits(np.concatenate([np.asarray(item.is_target, dtype=bool) for item in items]), bitorder="little"),
        offsets,
        (pack if config.packing else one_per_row)(np.diff(offsets) - 1, config.sequence_length),
        config.sequence_length,
        padded=not config.packing,
    )
    return ScoredText(
        rows,
        np.array(starts),
        np.array(num_bytes),
        tuple(conversation.place for conversation in conversations),
        tuple(conversations),
        tuple(references.get(c.place, (str(c.messages[-1].get("content", "")),)) for c in conversations),
        plan,
        f"{plan.format}, scored on {plan.train_on}: {describe(counts)}",
    )


# --- the model -----------------------------------------------------------------------------------------------------


def build_scored_model(
    accelerator: Accelerator,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    packs: bool,
) -> nn.Module:
    """An existing model, whole or an adapter beside its base, ready to be prepared; every process calls.

    Raises:
        ConfigError: it cannot be loaded, or does not fit the tokenizer or the rows.
    """
    folder, device_type = Path(str(config.name_or_path)), accelerator.device.type
    if open_adapter(folder) is not None:
        model: PreTrainedModel = load_exported(folder, config.trust_remote_code).get_base_model()
        make_ready(model, config, tokenizer, sequence_length, packs, device_type)
        # Engines take what could be trained only; it never is.
        beside: nn.Module = model.requires_grad_(True).train()
        return beside
    whole, _ = initialise_once(
        accelerator,
        lambda: build_model(config, tokenizer, sequence_length, 0, packs=packs, device_type=device_type),
        lambda facts: build_empty_model(
            config, tokenizer, sequence_length, facts, packs=packs, device_type=device_type
        ),
    )
    return whole


# --- scores --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Sums by document, each [num_documents], equal on all processes."""

    nll: np.ndarray
    """float64, nats."""
    num_targets: np.ndarray
    num_correct: np.ndarray
    num_bytes: np.ndarray

    def result(self) -> EvaluationResult:
        """Of all documents together: sums, divided once."""
        nll, num_targets, num_bytes = math.fsum(self.nll), int(self.num_targets.sum()), int(self.num_bytes.sum())
        return EvaluationResult(
            loss=nll / num_targets,
            token_accuracy=int(self.num_correct.sum()) / num_targets,
            bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else None,
            num_targets=num_targets,
            num_bytes=num_bytes,
        )

    def of(self, document: int) -> dict[str, float | int | None]:
        """The figures of one document."""
        nll, num_targets = float(self.nll[document]), int(self.num_targets[document])
        return {
            "nll": nll,
            "targets": num_targets,
            "correct": int(self.num_correct[document]),
            "bytes": int(self.num_bytes[document]),
            "perplexity": math.exp(min(nll / num_targets, 700.0)) if num_targets else None,
        }


def score(
    accelerator: Accelerator,
    model: nn.Module,
    text: ScoredText,
    batch_size: int,
    progress: Callable[[int], object] = lambda num_rows: None,
) -> Scores:
    """Losses of a prepared model on all rows, shared out over the processes; every process calls and gets all scores.

    Args:
        batch_size: rows per forward pass of one process; never changes the result.
        progress: called with the rows of each batch of this process.
    """
    rows, device = text.rows, accelerator.device
    batches = evaluation_batches(
        len(rows),
        batch_size=batch_size,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
        lengths=rows.lengths if isinstance(rows, PackedRows) and rows.padded else None,
    )
    sums = torch.zeros(3, len(text.places), dtype=torch.float64)
    model.eval()
    try:
        with torch.no_grad():
            loader = build_loader(rows, batches, 0, pin_memory=device.type == "cuda")
            for row_numbers, batch in zip(batches, loader, strict=True):
                losses = model(**to_device(batch, device), by_position=True)
                is_target = batch["targets"] != IGNORE_INDEX
                document = torch.from_numpy(text.document_of(row_numbers, batch)[is_target.numpy()])
                for row, values in enumerate((losses.nll, is_target, losses.is_correct)):
                    sums[row].index_add_(0, document, values.cpu()[is_target].double())
                progress(int((row_numbers >= 0).sum()))
    finally:
        release_gathered(model)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    nll, num_targets, num_correct = accelerator.reduce(sums.to(device, dtype), reduction="sum").cpu().numpy()
    return Scores(nll.astype(np.float64), num_targets.astype(np.int64), num_correct.astype(np.int64), text.num_bytes)


def write_rows(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    """One line of JSON each, in a new file that is there as a whole or not at all."""
    with written_aside(file) as work, work.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
