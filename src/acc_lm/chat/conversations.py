"""Conversations on disk: records -> items of ids and targets, split by split, packed into rows when they are read.

    records ──► chat.read_conversation ──► chat.build_items ──► <key>/{train,eval}{,_targets,_offsets}.bin ──► PackedRows

Until they are tokenised, records travel as documents whose text is their JSON, so the code that finds, hashes, holds out
and counts documents also handles records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from acc_lm.cache import flush_file
from acc_lm.chat.items import Item, ItemCounts, build_items
from acc_lm.chat.records import (
    COLUMNS,
    Conversation,
    TrainOn,
    check_unicode,
    choose_train_on,
    detect_format,
    read_conversation,
    refuse_preferences,
    usual_columns,
    with_usual_names,
)
from acc_lm.chat.template import ChatTemplate, load_template, read_template, reads_clock
from acc_lm.config import DataConfig, Format
from acc_lm.errors import ConfigError, DataError
from acc_lm.text.corpus import columns_of
from acc_lm.text.documents import Document, Skipped
from acc_lm.text.parts import PART_OF_CONVERSATIONS, Encoded, Encoder, in_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ITEMS_FORMAT = "items-2"  # part of every cache key: raise it when the reading or writing of records changes
OPTIONAL_COLUMNS = ("conversations", "system", "tools", "input", "history")
"""Optional columns of a record, kept in addition to the required columns of its format."""


@dataclass(frozen=True)
class ChatPlan:
    """Settings that turn records into items: format, training targets, template, length and date."""

    format: Format
    train_on: TrainOn
    template_file: str | None
    max_length: int
    """Maximum number of ids of an item."""
    day: str | None = None
    """Date for a template that reads the clock, as YYYY-MM-DD; None: the date stored in the tokenizer, else today's."""
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[object, ...]:
        """Names of columns and roles in the data, for keys; empty if the data uses the usual ones."""
        mapped = sorted(self.columns.items()), sorted(self.roles.items())
        return (mapped,) if any(mapped) else ()

    def key(self, tokenizer: PreTrainedTokenizerBase | None) -> tuple[object, ...]:
        """Everything that determines the items, except the records and the tokenizer's vocabulary."""
        texts: tuple[str | None, ...] = ()
        special: dict[str, Any] = {}
        if tokenizer is not None:
            template, special = template_of(self, tokenizer), dict(tokenizer.special_tokens_map)  # templates write them
            texts = (template.text, template.tool_use)
        elif self.template_file is not None:
            texts = (read_template(self.template_file),)
        day = self.day if any(reads_clock(text or "") for text in texts) else None
        settings = (ITEMS_FORMAT, self.format, self.train_on, texts, sorted(special.items()), day, self.max_length)
        return settings + self.names

    def read(self, record: Any, place: str, skipped: Skipped) -> str | None:
        """The relevant columns of a record, as JSON; None if it is invalid and the recipe tolerates that."""
        try:
            record = with_usual_names(record, self.columns, self.roles, place)
            read_conversation(record, self.format, place)
            kept = {
                name: record[name]
                for name in (*COLUMNS[self.format], *OPTIONAL_COLUMNS)
                if record.get(name) is not None
            }
            text = json.dumps(kept, ensure_ascii=False, default=str)  # in the record's key order, which templates use
            return check_unicode(text, "everything in it", place)
        except DataError as error:
            skipped.reject(str(error))
            return None

    def open(self, document: Document) -> Conversation:
        return read_conversation(json.loads(document.text), self.format, document.place or "a record")

    def texts(self, documents: Iterable[Document]) -> Iterator[str]:
        """Content of every message, as training text for a tokenizer."""
        for document in documents:
            yield from (str(message.get("content", "")) for message in self.open(document).messages)


def plan_of(config: DataConfig, day: str | None = None) -> ChatPlan | None:
    """Plan for reading a recipe's records as conversations; None for plain text.

    Args:
        day: date for a template that reads the clock, as YYYY-MM-DD, used if the recipe sets none.

    Raises:
        DataError: the columns fit several formats, or the recipe names a format of records for a source without records.
        ConfigError: `data.train_on` does not exist for this format, or plain text has a chat template.
    """
    chosen: Format | None = config.format
    if chosen is None:
        columns, place = columns_of(config) or ([config.text_column], "")
        if config.text_column not in columns:
            refuse_preferences(columns, config.columns, place)
        columns = usual_columns(columns, config.columns, place)
        if config.text_column not in columns and not any(set(names) <= set(columns) for names in COLUMNS.values()):
            return None  # the reader of the text reports the missing column
        chosen = detect_format(columns, place, config.text_column)
    if chosen == "text":
        choose_train_on(chosen, config.train_on)
        for key, names in (("columns", config.columns), ("roles", config.roles)):
            if names:
                raise ConfigError(
                    f"data.{key} must be empty for plain text, got {names}; remove it, and name the column of the text in data.text_column"
                )
        if config.chat_template is not None:
            raise ConfigError(
                f"data.chat_template must be null for plain text, got {config.chat_template}; leave it out, or set data.format"
            )
        return None
    if columns_of(config) is None:
        raise DataError(
            f"data.format {chosen} must have records (jsonl, json, csv, parquet, arrow, or a dataset), got source {config.source} without any; "
            "set data.format to text"
        )
    train_on = choose_train_on(chosen, config.train_on)
    return ChatPlan(
        chosen,
        train_on,
        config.chat_template,
        config.sequence_length + 1,
        config.chat_template_date or day,
        config.columns,
        config.roles,
    )


def template_of(plan: ChatPlan, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    return load_template(tokenizer, plan.template_file, plan.day)


def count_conversations(plan: ChatPlan, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Function that counts the ids of each conversation, those of all its items."""
    template = template_of(plan, tokenizer)

    def count(part: list[Document]) -> Encoded:
        counts = [
            build_items(plan.open(document), tokenizer, template, plan.train_on, plan.max_length)[1].ids
            for document in part
        ]
        return {"lengths": np.array(counts, dtype=np.int64)}

    return count


class ItemWriter:
    """Writer of the items of one split; `encode` runs in any process, `add` in order in one.

    Args:
        folder: place of the files `<split>{,_targets,_offsets,_bytes}.bin`.
        dtype: type of an id on disk.
        with_bytes: also write the UTF-8 bytes of text in each run of targets, at the first target of the run.
    """

    def __init__(
        self,
        plan: ChatPlan,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        split: str,
        dtype: type[np.unsignedinteger],
        *,
        with_bytes: bool = False,
    ) -> None:
        self._plan, self._tokenizer, self._template = plan, tokenizer, template_of(plan, tokenizer)
        self._folder, self._split, self._dtype, self._with_bytes = folder, split, dtype, with_bytes
        self._ids, self._bytes = ((folder / f"{split}{kind}.bin").open("wb") for kind in ("", "_bytes"))
        self._lengths, self._targets = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=bool)]
        self.counts = ItemCounts()

    def encode(self, part: list[Document]) -> Encoded:
        """Arrays of some conversations, for `add`.

        Raises:
            DataError: the template cannot write a conversation in a form that can be learned exactly.
        """
        items: list[Item] = []
        counts = ItemCounts()
        plan, tokenizer = self._plan, self._tokenizer
        for document in part:
            more, count = build_items(plan.open(document), tokenizer, self._template, plan.train_on, plan.max_length)
            items, counts = items + more, counts + count
        is_target = [np.asarray(item.is_target, dtype=bool) for item in items]
        sizes = [
            bytes_of_targets(item.ids, flags, tokenizer)
            for item, flags in zip(items if self._with_bytes else [], is_target, strict=False)
        ]
        encoded = {
            "ids": np.array([number for item in items for number in item.ids], dtype=self._dtype),
            "is_target": np.concatenate(is_target) if items else np.zeros(0, dtype=bool),
            "lengths": np.array([len(item.ids) for item in items], dtype=np.int64),
            "counts": np.array(astuple(counts), dtype=np.int64),
            "num_bytes": np.array(sum(len(document.text.encode()) for document in part)),
        }
        return encoded | ({"bytes": np.concatenate(sizes)} if sizes else {})

    def add(self, encoded: Encoded) -> None:
        """Write the arrays of some conversations."""
        self._ids.write(encoded["ids"].tobytes())
        if "bytes" in encoded:
            self._bytes.write(encoded["bytes"].tobytes())
        self._targets.append(encoded["is_target"])
        self._lengths.append(encoded["lengths"])
        self.counts += ItemCounts(*encoded["counts"].tolist())

    def finish(self) -> ItemCounts:
        """Close the files once their content is on disk; return the counts of the split."""
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(self._lengths))]).astype(np.int64)
        bits = np.packbits(np.concatenate(self._targets), bitorder="little")
        for file in (self._ids, self._bytes):
            flush_file(file)
            file.close()
        for name, array in ((f"{self._split}_targets.bin", bits), (f"{self._split}_offsets.bin", offsets)):
            with (self._folder / name).open("wb") as file:
                file.write(array.tobytes())
                flush_file(file)
        return self.counts

    def write(self, documents: Iterable[Document]) -> ItemCounts:
        """Write all conversations of a split and return their counts."""
        for part in in_parts(documents, PART_OF_CONVERSATIONS):
            self.add(self.encode(part))
        return self.finish()


def bytes_of_targets(ids: list[int], is_target: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """UTF-8 bytes of each run of targets, stored at its first target: uint32 [len(ids)]. Special tokens have no bytes."""
    counts = np.zeros(len(ids), dtype=np.uint32)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_target, [False]]).astype(np.int8)))
    for first, end in edges.reshape(-1, 2):
        text = tokenizer.decode(ids[first:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        counts[first] = len(str(text).encode())
    return counts
