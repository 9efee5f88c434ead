"""Documents: which are trained on and which are held out, and the ids of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    documents stay on one side and neither order nor seed matters. A lone document is cut, its tail held out, where it can be.
    """
    skipped = Skipped(config.skip_bad_rows)
    hashes, sizes = _hash_documents(corpus.train(skipped))
    if len(hashes) == 0:
        raise DataError("data: the text must have at least one document, got none; add text")

    def again(read: Callable[[Skipped], Iterator[Document]]) -> Iterator[Document]:
        return read(Skipped(config.skip_bad_rows))

    shared = 0
    if corpus.evaluation is not None:
        read_evaluation = corpus.evaluation
        eval_skipped = Skipped(config.skip_bad_rows)
        eval_hashes, eval_sizes = _hash_documents(read_evaluation(eval_skipped))
        skipped.count += eval_skipped.count
        shared = int(np.isin(eval_hashes, hashes).sum())
        train = lambda: again(corpus.train)  # noqa: E731
        evaluation = lambda: again(read_evaluation)  # noqa: E731
        train_sizes = sizes
    elif len(np.unique(hashes)) == 1 and not can_cut:
        raise DataError(
            "data: the conversations must be two different ones at least, got one; add some, or data.eval_files"
        )
    elif len(np.unique(hashes)) == 1:
        document = next(again(corpus.train))
        cut = max(1, min(len(document.text) - 1, round(len(document.text) * (1 - config.eval_fraction))))
        head, tail = Document(document.text[:cut], document.file), Document(document.text[cut:], document.file)
        train = lambda: iter([head])  # noqa: E731
        evaluation = lambda: iter([tail])  # noqa: E731
        train_sizes, eval_sizes = (np.array([len(part.text.encode())]) for part in (head, tail))
    else:
        by_hash = np.argsort(hashes, kind="stable")
        wanted = config.eval_fraction * sizes.sum()
        distinct, first = np.unique(hashes[by_hash], return_index=True)
        before = np.concatenate([[0], sizes[by_hash].cumsum()])[first]
        held_out = distinct[before < wanted][: len(distinct) - 1]
        is_held_out = np.isin(hashes, held_out)
        held_out_set = set(held_out.tolist())

        def only(held: bool) -> Iterator[Document]:
            for document in again(corpus.train):
                if (_content_hash(document.text)[0] in held_out_set) == held:
                    yield document

        train = lambda: only(False)  # noqa: E731
        evaluation = lambda: only(True)  # noqa: E731
        train_sizes, eval_sizes = sizes[~is_held_out], sizes[is_held_out]
    counts = {
        "train_documents": len(train_sizes),
        "train_bytes": int(train_sizes.sum()),
        "eval_documents": len(eval_sizes),
        "eval_bytes": int(eval_sizes.sum()),
        "skipped_records": skipped.count,
        "shared_documents": shared,
    }
    return train, evaluation, counts


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
        pieces = [marked for text in texts for marked in _marked(text)]
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


def _marked(text: str) -> list[tuple[str, bool]]:
    """The pieces of a document, each with whether it is the last."""
    *pieces, last = pieces_of(text)
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
