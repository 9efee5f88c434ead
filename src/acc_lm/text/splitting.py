"""Split of documents, by their content, into training and held-out ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from acc_lm.config import DataConfig
from acc_lm.errors import DataError
from acc_lm.text.documents import Corpus, Document, Documents, Skipped
from acc_lm.text.parts import NO_PREPARATION, PART_OF_TEXT, Encoded, Preparation, in_parts


@dataclass(frozen=True)
class Split:
    """Training and held-out documents of a corpus."""

    corpus: Corpus
    num_skipped: int
    counts: dict[str, Any]
    held_out: frozenset[int] = frozenset()
    """Content hashes of the held-out documents."""
    cut: int | None = None
    """Content hash of the document whose tail is held out."""
    place: int = 0
    """First character of that tail."""

    def train(self) -> Iterator[Document]:
        """The training documents."""
        return self._side(0, self.corpus.train)

    def evaluation(self) -> Iterator[Document]:
        """The held-out documents."""
        return self._side(1, self.corpus.evaluation or self.corpus.train)

    def _side(self, side: int, documents: Documents) -> Iterator[Document]:
        for document in documents(Skipped(self.num_skipped)):
            part = self.divide([document], documents)[side]
            yield from part

    @property
    def texts(self) -> dict[str, Documents]:
        """Texts that have to be read for both sides."""
        evaluation = {} if self.corpus.evaluation is None else {"held-out": self.corpus.evaluation}
        return {"text": self.corpus.train} | evaluation

    def divide(self, documents: list[Document], text: Documents) -> tuple[list[Document], list[Document]]:
        """Training and held-out documents among some of one of the `texts`."""
        if self.corpus.evaluation is not None:
            return ([], documents) if text is self.corpus.evaluation else (documents, [])
        train, held_out = [], []
        for document in documents:
            content = _content_hash(document.text)[0]
            if content == self.cut:
                train.append(replace(document, text=document.text[: self.place]))
                held_out.append(replace(document, text=document.text[self.place :]))
            else:
                (held_out if content in self.held_out else train).append(document)
        return train, held_out


def split_documents(
    corpus: Corpus, config: DataConfig, can_cut: bool = True, preparation: Preparation = NO_PREPARATION
) -> Split:
    """Split a corpus into training and held-out documents.

    If the corpus has no separate held-out text, the documents with the smallest content hashes are held out until
    `eval_fraction` of the bytes is reached, so equal documents stay in one split and neither order nor seed matters.
    A document that would bring the total above twice that size is skipped. If the other documents reach less than half
    of that size, the first skipped document is cut and its tail is held out.

    Raises:
        DataError: there is no document, or no document can be held out.
    """
    skipped = Skipped(config.skip_bad_rows)
    hashes, sizes = _hash_documents("hash", corpus.train, skipped, preparation)
    if len(hashes) == 0:
        raise DataError("data: the text must have at least one document, got none; add text")
    if corpus.evaluation is None:
        split, train_sizes, eval_sizes, as_in_rows_1 = _hold_out(corpus, hashes, sizes, config, can_cut)
        shared = 0
    else:
        eval_skipped = Skipped(config.skip_bad_rows)
        eval_hashes, eval_sizes = _hash_documents("hash-held-out", corpus.evaluation, eval_skipped, preparation)
        skipped.count += eval_skipped.count
        split, train_sizes, as_in_rows_1 = Split(corpus, config.skip_bad_rows, {}), sizes, True
        shared = int(np.isin(eval_hashes, hashes).sum())
    counts = {
        "train_documents": len(train_sizes),
        "train_bytes": int(train_sizes.sum()),
        "eval_documents": len(eval_sizes),
        "eval_bytes": int(eval_sizes.sum()),
        "skipped_records": skipped.count,
        "shared_documents": shared,
        "as_in_rows_1": as_in_rows_1,
        "longest_document": int(np.concatenate([train_sizes, eval_sizes]).max()),
    }
    return replace(split, counts=counts)


def _hold_out(
    corpus: Corpus, hashes: np.ndarray, sizes: np.ndarray, config: DataConfig, can_cut: bool
) -> tuple[Split, np.ndarray, np.ndarray, bool]:
    """Split by content, sizes in bytes of training and held-out documents, and True if rows-1 had the same split.

    Args:
        hashes, sizes: content hashes and bytes of all documents, uint64 and int64 [num_documents].
    """
    chosen, left_out, share = _choose(hashes, sizes, config.eval_fraction, can_cut)
    as_in_rows_1 = not left_out
    is_held_out = np.isin(hashes, np.array(chosen, dtype=np.uint64))
    cut, place, is_cut = None, 0, np.zeros(len(hashes), dtype=bool)
    if share:
        cut = left_out[0]
        is_cut = hashes == cut
        documents = corpus.train(Skipped(config.skip_bad_rows))
        text = next((one.text for one in documents if _content_hash(one.text)[0] == cut), "")
        place, by_characters = _place_to_cut(text, share)
        as_in_rows_1 = len(hashes) == 1 and by_characters
    train_sizes, eval_sizes = sizes[~is_held_out], sizes[is_held_out | is_cut]
    if cut is not None:
        train_sizes[is_cut[~is_held_out]] = len(text[:place].encode())
        eval_sizes[is_cut[is_held_out | is_cut]] = len(text[place:].encode())
    split = Split(corpus, config.skip_bad_rows, {}, frozenset(chosen), cut, place)
    return split, train_sizes, eval_sizes, as_in_rows_1


def _choose(
    hashes: np.ndarray, sizes: np.ndarray, fraction: float, can_cut: bool
) -> tuple[list[int], list[int], float]:
    """Choice by content hash: (hashes held out, hashes skipped, share of the first skipped one that is held out too)."""
    distinct, inverse = np.unique(hashes, return_inverse=True)
    weights = np.bincount(inverse, weights=sizes)  # bytes of all copies of a document
    wanted, total = fraction * float(sizes.sum()), 0.0
    chosen: list[int] = []
    left_out: list[int] = []
    for content, weight in zip(map(int, distinct), map(float, weights), strict=True):
        if total >= wanted or len(chosen) == max(len(distinct) - 1, 1):
            break
        if len(distinct) == 1 or total + weight > 2 * wanted:
            left_out.append(content)
        else:
            chosen.append(content)
            total += weight
    if not can_cut and len(distinct) == 1:
        raise DataError(
            "data: the conversations must include at least two different ones, got one; add some, or data.eval_files"
        )
    if not can_cut and not chosen:
        least = math.ceil(1000 * weights.min() / weights.sum() / 2) / 1000
        raise DataError(
            f"data.eval_fraction must be at least {least:g} to hold out one complete conversation, got {fraction:g}; "
            "raise it, or add data.eval_files"
        )
    if not (can_cut and left_out and total < wanted / 2):
        return chosen, left_out, 0.0
    share = (wanted - total) / weights[distinct == left_out[0]].item() if len(distinct) > 1 else fraction
    return chosen, left_out, share


def _place_to_cut(text: str, share: float) -> tuple[int, bool]:
    """Start of the last `share` of a text's characters, or of its bytes if those characters take more than twice as much.

    Returns:
        (place in the text, True if the share is of characters).
    """
    place, raw = max(1, min(len(text) - 1, round(len(text) * (1 - share)))), text.encode()
    if len(text) - place == 1 or len(text[place:].encode()) <= 2 * share * len(raw):
        return place, True
    place = len(raw[: round(len(raw) * (1 - share))].decode(errors="ignore"))
    return max(1, min(len(text) - 1, place)), False


def _content_hash(text: str) -> tuple[int, int]:
    raw = text.encode()
    return xxhash.xxh3_64_intdigest(raw), len(raw)


def _hash_documents(
    name: str, documents: Documents, skipped: Skipped, preparation: Preparation
) -> tuple[np.ndarray, np.ndarray]:
    """Content hash and size in bytes of each document: uint64 [n], int64 [n]; 16 bytes for each document."""
    if preparation.num_processes:
        try:
            parts = list(preparation.encode(name, documents, 0, _hash_part, PART_OF_TEXT))
            return _joined(parts)
        except DataError:  # read in order: only then is the number of skipped records known, and the first bad one
            pass
    return _joined([_hash_part(part) for part in in_parts(documents(skipped), PART_OF_TEXT)])


def _hash_part(part: list[Document]) -> Encoded:
    found = [_content_hash(document.text) for document in part]
    hashes, sizes = zip(*found, strict=True)
    return {"hashes": np.array(hashes, dtype=np.uint64), "sizes": np.array(sizes, dtype=np.int64)}


def _joined(parts: list[Encoded]) -> tuple[np.ndarray, np.ndarray]:
    empty = {"hashes": np.zeros(0, dtype=np.uint64), "sizes": np.zeros(0, dtype=np.int64)}
    hashes, sizes = (np.concatenate([part[key] for part in [empty, *parts]]) for key in ("hashes", "sizes"))
    return hashes, sizes
