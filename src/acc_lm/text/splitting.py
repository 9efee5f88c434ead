"""Documents: which are trained on and which are held out, and the ids of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from acc_lm.config import DataConfig
from acc_lm.errors import DataError
from acc_lm.sources import Corpus, Document, Skipped
from acc_lm.tokenizer import pieces_of, text_encoder, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 4_000_000  # of text that are encoded in one call


def split_documents(
    corpus: Corpus, config: DataConfig, can_cut: bool = True
) -> tuple[Callable[[], Iterator[Document]], Callable[[], Iterator[Document]], dict[str, Any]]:
    """Training and held-out documents, disjoint: (train, evaluation, counts).

    Held out are the documents with the smallest content hashes until `eval_fraction` of the bytes is reached, so equal
    documents stay on one side and neither order nor seed matters. A document with which it would be more than twice that
    is passed over; where the others make less than half of it, that document is cut, and its tail held out.

    Raises:
        DataError: there is no document, or none that can be held out.
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
        chosen, left_out, share = _choose(hashes, sizes, config.eval_fraction, can_cut)
        held_out, as_in_rows_1 = set(chosen), not left_out
        is_held_out = np.isin(hashes, np.array(chosen, dtype=np.uint64))
        cut, place, is_cut = None, 0, np.zeros(len(hashes), dtype=bool)
        if share:
            cut = left_out[0]
            is_cut = hashes == cut
            text = next((one.text for one in again(corpus.train) if _content_hash(one.text)[0] == cut), "")
            place, by_characters = _place_to_cut(text, share)
            as_in_rows_1 = len(hashes) == 1 and by_characters

        def only(held: bool) -> Iterator[Document]:
            for document in again(corpus.train):
                content = _content_hash(document.text)[0]
                if content == cut:
                    yield replace(document, text=document.text[place:] if held else document.text[:place])
                elif (content in held_out) == held:
                    yield document

        train = lambda: only(False)  # noqa: E731
        evaluation = lambda: only(True)  # noqa: E731
        train_sizes, eval_sizes = sizes[~is_held_out], sizes[is_held_out | is_cut]
        if cut is not None:
            train_sizes[is_cut[~is_held_out]] = len(text[:place].encode())
            eval_sizes[is_cut[is_held_out | is_cut]] = len(text[place:].encode())
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


def _choose(
    hashes: np.ndarray, sizes: np.ndarray, fraction: float, can_cut: bool
) -> tuple[list[int], list[int], float]:
    """(content hashes that are held out, those passed over, share of the first of these that is to be held out too)."""
    distinct, inverse = np.unique(hashes, return_inverse=True)
    weights = np.bincount(inverse, weights=sizes)  # of all copies of a document
    wanted, total = fraction * float(sizes.sum()), 0.0
    chosen: list[int] = []
    left_out: list[int] = []
    for content, weight in zip(distinct.tolist(), weights.tolist(), strict=True):
        if total >= wanted or len(chosen) == max(len(distinct) - 1, 1):
            break
        if len(distinct) == 1 or total + weight > 2 * wanted:
            left_out.append(content)
        else:
            chosen.append(content)
            total += weight
    if not can_cut and len(distinct) == 1:
        raise DataError(
            "data: the conversations must be two different ones at least, got one; add some, or data.eval_files"
        )
    if not can_cut and not chosen:
        least = math.ceil(1000 * weights.min() / weights.sum() / 2) / 1000
        raise DataError(
            f"data.eval_fraction must be at least {least:g} to hold out a whole one of these conversations, got {fraction:g}; "
            "raise it, or add data.eval_files"
        )
    if not (can_cut and left_out and total < wanted / 2):
        return chosen, left_out, 0.0
    share = (wanted - total) / weights[distinct == left_out[0]].item() if len(distinct) > 1 else fraction
    return chosen, left_out, share


def _place_to_cut(text: str, share: float) -> tuple[int, bool]:
    """Start of this share of a text's characters, or of its bytes if those characters are long: (place, by characters)."""
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
    pairs = [_content_hash(document.text) for document in documents]
    return np.array([p[0] for p in pairs], dtype=np.uint64), np.array([p[1] for p in pairs], dtype=np.int64)


def encode_documents(
    documents: Iterator[Document], encoder: Any, end: int, *, with_bytes: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(ids, bytes of each token, bytes of text) of a few documents at a time, each document followed by the end token."""
    encode = encoder.encode_batch if with_bytes else encoder.encode_batch_fast
    for texts in _in_batches(documents):
        pieces = [marked for text in texts for marked in _marked(text, encoder)]
        ids: list[np.ndarray] = []
        byte_counts: list[np.ndarray] = []
        encoded = encode([piece for piece, _ in pieces], add_special_tokens=False)  # parallel over pieces, in threads
        for (piece, is_last), encoding in zip(pieces, encoded, strict=True):
            ids.append(np.array(encoding.ids, dtype=np.uint32))
            if with_bytes:
                byte_counts.append(token_bytes(piece, encoding.offsets))
            if is_last:
                ids.append(np.array([end], dtype=np.uint32))
                byte_counts.append(np.zeros(1, dtype=np.uint32))
        num_bytes = sum(len(text.encode()) for text in texts)
        yield np.concatenate(ids), np.concatenate(byte_counts), num_bytes


def encode_each(
    documents: Iterator[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:
    """Each document with its ids, the end token last, and the bytes that each of them stands for: what a row is cut from."""
    encoder, end = text_encoder(tokenizer), tokenizer.eos_token_id
    assert isinstance(end, int)
    for document in documents:
        ((ids, byte_counts, _),) = encode_documents(iter([document]), encoder, end, with_bytes=True)
        yield document, ids, byte_counts


def _marked(text: str, encoder: Any) -> list[tuple[str, bool]]:
    """The pieces of a document, each with whether it is the last."""
    *pieces, last = pieces_of(text, encoder)
    return [(piece, False) for piece in pieces] + [(last, True)]


def _in_batches(documents: Iterator[Document]) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for document in documents:
        texts.append(document.text)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts
