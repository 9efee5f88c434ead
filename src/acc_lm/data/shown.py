"""Rows taken apart into the documents in them, for `acc-lm data show`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from acc_lm.data.dataset import Data
from acc_lm.rows.batch import IGNORE_INDEX, Batch
from acc_lm.rows.mixture import MixedRows
from acc_lm.rows.packing import PackedRows

Flagged = tuple[list[int], list[bool]]
"""Ids of a document, and the target flag of each."""


@dataclass(frozen=True)
class ShownRow:
    number: int
    source: str
    """Name of its source in a mixture; empty without one."""
    documents: list[Flagged]
    notes: list[str]
    """Facts about its ends: cut, continued, padded."""

    @property
    def title(self) -> str:
        num_ids, num_targets = (
            sum(len(ids) for ids, _ in self.documents),
            sum(sum(flags) for _, flags in self.documents),
        )
        number = len(self.documents)
        documents = f"{number} document{'s' * (number != 1)}"
        source = f" of {self.source}" if self.source else ""
        return f"row {self.number:,}{source}: {documents}, {num_ids:,} ids, {num_targets:,} of them targets"


def shown_rows(data: Data, numbers: Sequence[int], batch: Batch, ends: set[int]) -> Iterator[ShownRow]:
    """Rows of a batch, with the documents in them.

    Args:
        numbers: number of each row.
        ends: ids that end a turn; a conversation without one at its end was cut within a turn.
    """
    train = data.train
    part = train.parts[0] if isinstance(train, MixedRows) else train
    end = data.tokenizer.eos_token_id
    assert isinstance(end, int)
    for i, number in enumerate(numbers):
        row = {name: values[i].tolist() for name, values in batch.items()}
        documents, notes = _items(row, ends) if isinstance(part, PackedRows) else _texts(row, end)
        source = ""
        if isinstance(train, MixedRows) and data.mixture is not None:
            source = data.mixture.names[int(np.searchsorted(train.offsets, number, side="right")) - 1]
        yield ShownRow(number, source, documents, notes)


def _items(row: dict[str, list[int]], ends: set[int]) -> tuple[list[Flagged], list[str]]:
    """Items of a row of conversations, and notes about it."""
    ids, targets = row["input_ids"], row["targets"]
    numbers = row.get("document_ids", [0] * len(ids))
    items, padding = [], 0
    for number in dict.fromkeys(numbers):
        places = [place for place, other in enumerate(numbers) if other == number]
        learned = [place for place in places if targets[place] != IGNORE_INDEX]
        if not learned:
            padding += len(places)
            continue
        used = range(places[0], learned[-1] + 1)  # an item ends with its last target
        padding += places[-1] - learned[-1]
        flags = [targets[place] != IGNORE_INDEX for place in used]
        following = [targets[place] if flag else ids[place + 1] for place, flag in zip(used, flags, strict=True)]
        items.append(([ids[used[0]], *following], [False, *flags]))
    cut = sum(item[-1] not in ends for item, _ in items) if ends else 0
    notes = [f"{padding} places of padding"] if padding else []
    return items, notes + ([f"{cut} cut within a turn, at data.sequence_length"] if cut else [])


def _texts(row: dict[str, list[int]], end: int) -> tuple[list[Flagged], list[str]]:
    """Documents, or parts of them, in a row of text, and notes about it."""
    targets = [target for target in row["targets"] if target != IGNORE_INDEX]
    documents: list[Flagged] = [([], [])]
    for token, flag in zip([row["input_ids"][0], *targets], [False] + [True] * len(targets), strict=True):
        documents[-1][0].append(token)
        documents[-1][1].append(flag)
        if token == end:
            documents.append(([], []))
    padding, is_complete = len(row["targets"]) - len(targets), not documents[-1][0]
    notes = [] if is_complete or padding else ["its last document continues in the next row"]
    notes += [f"{padding} places of padding"] if padding else []
    return [document for document in documents if document[0]], notes
