"""Scores of a model on each document of a text: the rows of an evaluation, with their losses summed by document.

    documents ──► rows (cut or packed as in a run) ──► losses by position ──► sums by document ──► EvaluationResult

A document's sums do not depend on which process had which of its rows, so neither does any score computed from them.
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

from acc_lm.chat.conversations import ChatPlan, bytes_of_targets, plan_of, template_of
from acc_lm.chat.items import ItemCounts, build_items, check, describe
from acc_lm.chat.records import Conversation
from acc_lm.config import DataConfig, ModelConfig
from acc_lm.data import text_key, until_limit
from acc_lm.errors import CheckpointError, ConfigError, DataError
from acc_lm.evaluation.held_out import EvaluationResult
from acc_lm.export.exported import load_exported, with_trained_modules
from acc_lm.files import written_aside
from acc_lm.modeling.adapter import ADAPTER_NAME, open_adapter
from acc_lm.modeling.build import DTYPES, build_empty_model, build_model, make_ready
from acc_lm.rows.batch import IGNORE_INDEX, Batch, ScoredRows, to_device
from acc_lm.rows.loader import build_loader, evaluation_batches
from acc_lm.rows.packing import PackedRows, one_per_row, pack
from acc_lm.rows.text_rows import Rows
from acc_lm.runtime import initialise_once, parts_of_layers, readers_of_whole_rows, release_gathered, repeats_losses
from acc_lm.text.corpus import open_corpus
from acc_lm.text.documents import Document, Skipped, kind_of
from acc_lm.text.splitting import split_documents
from acc_lm.text.tokenizer import encode_each

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ScoredText:
    """Documents, the rows that hold them, and the text and reference answers of each document."""

    rows: ScoredRows
    starts: np.ndarray
    """First token (`Rows`) or first item (`PackedRows`) of each document, and the end: int64 [num_documents + 1]."""
    num_bytes: np.ndarray
    """Number of UTF-8 bytes of each document's targets, int64 [num_documents]."""
    places: tuple[str | None, ...]
    """`file:line` of each document, or its file."""
    conversations: tuple[Conversation, ...] = ()
    """Conversation of each document; empty for plain text."""
    references: tuple[tuple[str, ...], ...] = ()
    """Answers that count as right, for each conversation."""
    plan: ChatPlan | None = None
    about: str = ""
    """Description of the text, for display."""

    @property
    def packs(self) -> bool:
        """True if rows hold several documents that must not attend to each other."""
        return self.rows.packs

    def document_of(self, row_numbers: np.ndarray, batch: Batch) -> np.ndarray:
        """Index of the document of each target in a batch, int64 [B, L]; arbitrary where there is no target."""
        units = self.rows.units_of(row_numbers, batch)
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
    """Read the text of a recipe into rows, exactly as a run would build them.

    Args:
        day: date for a chat template that reads the clock where the recipe names none, as YYYY-MM-DD.
        held_out: True: only the text that the recipe holds out from training; False: everything.
        trained_on: `Data.text_key` of the run whose text this must be; None: any text.
        references_column: column of the records with one right answer or a list of them; None: the conversation's answer.
        progress: called with the number of bytes of each document.

    Raises:
        DataError, ConfigError: the text cannot be read, or holds nothing to score.
        CheckpointError: the text is not that of the run.
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
            "put back the text that it was trained on, or name the text to score with --data"
        )
    corpus = until_limit(corpus, config, tokenizer, plan)
    if held_out:
        documents = split_documents(corpus, config, can_cut=plan is None).evaluation()
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
        raise DataError(f"{place}: {column!r} must be a string or a list of strings, got {kind_of(value)}; correct it")
    return tuple(found)


def _text(documents: Iterator[Document], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> ScoredText:
    encoded = list(encode_each(documents, tokenizer))
    tokens, byte_counts = (np.concatenate([entry[n] for entry in encoded] or [np.zeros(0, np.uint32)]) for n in (1, 2))
    if len(tokens) < 2:
        raise DataError("data: the text must have at least one target, got none; add text")
    starts = np.cumsum([0, *(len(ids) for _, ids, _ in encoded)])
    end = None if config.attend_across_documents else tokenizer.eos_token_id
    byte_counts[0] = 0  # the very first token is not a target
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
    """Build an existing model, complete or an adapter with its base, ready to be prepared; every process calls.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the tokenizer or the rows.
    """
    folder, device_type = Path(str(config.name_or_path)), accelerator.device.type
    if open_adapter(folder) is not None:
        if (size := parts_of_layers()) > 1:
            raise ConfigError(
                f"MODEL must be complete with layers in {size} parts, got an adapter; merge it first (acc-lm export {folder} merged --merge), or "
                "use an Accelerate config that divides no layers"
            )
        adapted = load_exported(folder, config.trust_remote_code, dtype=DTYPES[config.dtype])
        adapted.set_adapter(ADAPTER_NAME)  # trainable, as engines require; this one is never trained
        model: PreTrainedModel = with_trained_modules(adapted)
        make_ready(model, config, tokenizer, sequence_length, packs, device_type)
        scored: nn.Module = model.train()
        return scored
    built, _ = initialise_once(
        accelerator,
        lambda: build_model(config, tokenizer, sequence_length, 0, packs=packs, device_type=device_type),
        lambda facts: build_empty_model(
            config, tokenizer, sequence_length, facts, packs=packs, device_type=device_type
        ),
    )
    return built


# --- scores --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Sums for each document, each array [num_documents], equal on all processes."""

    nll: np.ndarray
    """Sum of -log p of the targets, in nats, float64."""
    num_targets: np.ndarray
    num_correct: np.ndarray
    num_bytes: np.ndarray

    def result(self) -> EvaluationResult:
        """Result on all documents together: sums, divided once."""
        nll, num_targets, num_bytes = math.fsum(self.nll), int(self.num_targets.sum()), int(self.num_bytes.sum())
        return EvaluationResult(
            loss=nll / num_targets,
            token_accuracy=int(self.num_correct.sum()) / num_targets,
            bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else None,
            num_targets=num_targets,
            num_bytes=num_bytes,
        )

    def of(self, document: int) -> dict[str, float | int | None]:
        """Scores of one document."""
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
    """Score a prepared model on all rows, divided among the processes; every process calls and gets all scores.

    Args:
        batch_size: rows per forward pass of one process; never changes the result.
        progress: called with the rows of each batch of this process.
    """
    rows, device = text.rows, accelerator.device
    reader, num_readers = readers_of_whole_rows(accelerator)
    batches = evaluation_batches(
        len(rows),
        batch_size=batch_size,
        process=reader,
        num_processes=num_readers,
        lengths=rows.padded_lengths,
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
    if repeats_losses(accelerator):
        sums.zero_()
    dtype = torch.float32 if device.type == "mps" else torch.float64
    nll, num_targets, num_correct = accelerator.reduce(sums.to(device, dtype), reduction="sum").cpu().numpy()
    return Scores(nll.astype(np.float64), num_targets.astype(np.int64), num_correct.astype(np.int64), text.num_bytes)


def write_rows(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write one line of JSON per row to a new file, which appears complete or not at all."""
    with written_aside(file) as work, work.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
