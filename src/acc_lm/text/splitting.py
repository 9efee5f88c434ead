"""Split of documents, by their content, into training and held-out ones."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from acc_lm.config import DataConfig
from acc_lm.errors import DataError
from acc_lm.text.documents import Corpus, Document, Skipped


def split_documents(
    corpus: Corpus, config: DataConfig, can_cut: bool = True
) -> tuple[Callable[[], Iterator[Document]], Callable[[], Iterator[Document]], dict[str, Any]]:
    """Split a corpus into training and held-out documents: (train, evaluation, counts).

    If the corpus has no separate held-out text, the documents with the smallest content hashes are held out until
    `eval_fraction` of the bytes is reached, so equal documents stay in one split and neither order nor seed matters.
    A document that would bring the total above twice that size is skipped. If the other documents reach less than half
    of that size, the first skipped document is cut and its tail is held out.

    Raises:
        DataError: there is no document, or no document can be held out.
    """
    skipped = Skipped(config.skip_bad_rows)
    hashes, sizes = _hash_documents(corpus.train(skipped))
    if len(hashes) == 0:
        raise DataError("data: the text must have at least one document, got none; add text")

    def again(read: Callable[[Skipped], Iterator[Document]]) -> Iterator[Document]:
        return read(Skipped(config.skip_bad_rows))

    shared, as_in_rows_1 = 0, True
    if corpus.evaluation is not None:
        read_evaluation = corpus.evaluation
        eval_skipped = Skipped(config.skip_bad_rows)
        eval_hashes, eval_sizes = _hash_documents(read_evaluation(eval_skipped))
        skipped.count += eval_skipped.count
        shared = int(np.isin(eval_hashes, hashes).sum())
        train = lambda: again(corpus.train)  # noqa: E731
        evaluation = lambda: again(read_evaluation)  # noqa: E731
        train_sizes = sizes
    else:
        train, evaluation, train_sizes, eval_sizes, as_in_rows_1 = _hold_out(
            lambda: again(corpus.train), hashes, sizes, config.eval_fraction, can_cut
        )
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
    return train, evaluation, counts


def _hold_out(
    documents: Callable[[], Iterator[Document]],
    hashes: np.ndarray,
    sizes: np.ndarray,
    eval_fraction: float,
    can_cut: bool,
) -> tuple[Callable[[], Iterator[Document]], Callable[[], Iterator[Document]], np.ndarray, np.ndarray, bool]:
    """Training and held-out documents, their sizes in bytes, and True if the format rows-1 had the same split.

    Args:
        hashes, sizes: content hashes and bytes of all documents, uint64 and int64 [num_documents].
    """
    chosen, left_out, share = _choose(hashes, sizes, eval_fraction, can_cut)
    held_out, as_in_rows_1 = set(chosen), not left_out
    is_held_out = np.isin(hashes, np.array(chosen, dtype=np.uint64))
    cut, place, is_cut = None, 0, np.zeros(len(hashes), dtype=bool)
    if share:
        cut = left_out[0]
        is_cut = hashes == cut
        text = next((one.text for one in documents() if _content_hash(one.text)[0] == cut), "")
        place, by_characters = _place_to_cut(text, share)
        as_in_rows_1 = len(hashes) == 1 and by_characters

    def only(held: bool) -> Iterator[Document]:
        for document in documents():
            content = _content_hash(document.text)[0]
            if content == cut:
                yield replace(document, text=document.text[place:] if held else document.text[:place])
            elif (content in held_out) == held:
                yield document

    train_sizes, eval_sizes = sizes[~is_held_out], sizes[is_held_out | is_cut]
    if cut is not None:
        train_sizes[is_cut[~is_held_out]] = len(text[:place].encode())
        eval_sizes[is_cut[is_held_out | is_cut]] = len(text[place:].encode())
    return lambda: only(False), lambda: only(True), train_sizes, eval_sizes, as_in_rows_1


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


def _hash_documents(documents: Iterator[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Content hash and size in bytes of each document: uint64 [n], int64 [n]."""
    hashes, sizes = array("Q"), array("q")  # 16 bytes for each document
    for document in documents:
        content, size = _content_hash(document.text)
        hashes.append(content)
        sizes.append(size)
    return np.array(hashes, dtype=np.uint64), np.array(sizes, dtype=np.int64)
