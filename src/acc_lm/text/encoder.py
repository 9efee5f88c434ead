"""Plain text -> ids, by tiktoken where it gives the ids of `tokenizers`, at several times its speed.

The structure of a tokenizer decides. Byte-level BPE merges the pair with the first rule in the list; tiktoken merges the
pair whose result has the lowest id. Both give the same ids if the ids of the results rise along the list and each token
is what its own text becomes: then a place between two tokens at any time separates them forever, so the neighbours that
form a token are always the pair that its rule names. (A token that its own text does not become is left out; if whole
words are looked up first, it may stay where its text becomes three tokens or more, which two neighbours never form.)
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from acc_lm.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAGE_BITS = 8
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern of a `ByteLevel` pre-tokenizer that splits by itself."""
CLASS = r"\\p\{[A-Z][a-z]?\}|\\[sdw]"
SAFE_PATTERN = re.compile(
    rf"(?:{CLASS}|\\[SDWrnt]|\[\^?(?:{CLASS}|\\[SDWrnt]|[^\\\[\]&])+\]"
    r"|\(\?(?:i:|:|!|=)|[()|]|\{\d+(?:,\d*)?\}(?![+?])|[?*+]|[^\\\[\](){}.^$])+"
)
"""Patterns with the same meaning in both engines, apart from the characters of their classes, which are compared."""
CHECKED_FIRST = 1 << 16
"""Characters at the start of a text that are encoded by `tokenizers` too."""
CHECKED_LATER, CHECKED_EVERY = 1 << 14, 1 << 22
"""The same later on: so many characters of one document after each so many characters of text."""
WORTH = 40
"""Characters for each entry of the vocabulary from which tiktoken is worth its start: half a second for GPT-2's."""
LONGEST_SPACE = 1 << 12
"""Characters of a window that is not all white space: tiktoken's engine follows `\\s+(?!\\S)` back one by one."""
MOST_TO_FIND = 256
"""Added tokens that are looked for in each text, one by one, before tiktoken encodes it."""
LITTLE_TEXT = "tokenizers, because there is little text"


class TextEncoder:
    """TextEncoder of plain text: a special token that is spelled in the text is text.

    Args:
        backend: the tokenizer, as `text_encoder` returns it.
        end: id of the token after each document.
    """

    def __init__(self, backend: Tokenizer, end: int) -> None:
        self.backend, self.end = backend, end
        self._fast: _Fast | str = LITTLE_TEXT
        self._is_checked = False
        self._characters = self._checked_at = 0

    @property
    def engine(self) -> str:
        """Library that encodes, and why if it is the slower one."""
        return self._fast if isinstance(self._fast, str) else "tiktoken"

    def expect(self, num_characters: int) -> None:
        """Decide for one of the libraries, if there is that much more text to encode."""
        self._characters += num_characters
        if self._fast == LITTLE_TEXT and self._characters >= WORTH * self.backend.get_vocab_size():
            self._fast = _Fast.of(self.backend)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, uint32 [num_ids].

        Raises:
            DataError: tiktoken gave other ids than `tokenizers`.
        """
        return [ids for ids, _ in self._encoded(texts, with_bytes=False)]

    def encode_with_bytes(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of each text and the UTF-8 bytes that each stands for, as in `token_bytes`; uint32 [num_ids] each."""
        return self._encoded(texts, with_bytes=True)

    def _encoded(self, texts: list[str], with_bytes: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        self.expect(sum(map(len, texts)))
        self._check(texts)
        fast = self._fast
        if isinstance(fast, str) or (with_bytes and fast.moves_spaces):
            return self._encode_all(texts, with_bytes)
        found = _in_threads(fast.encode_with_bytes if with_bytes else fast.encode, texts)
        left = [number for number, ids in enumerate(found) if ids is None]
        slow = iter(self._encode_all([texts[number] for number in left], with_bytes))
        return [next(slow) if ids is None else ids for ids in found]

    def _encode_all(self, texts: list[str], with_bytes: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode by `tokenizers`, in its own threads."""
        if not texts:
            return []
        encode = self.backend.encode_batch if with_bytes else self.backend.encode_batch_fast
        encoded = encode(texts, add_special_tokens=False)
        ids = [np.array(each.ids, dtype=np.uint32) for each in encoded]
        if not with_bytes:
            return [(each, each[:0]) for each in ids]
        return [(own, token_bytes(text, each.offsets)) for text, own, each in zip(texts, ids, encoded, strict=True)]

    def _check(self, texts: list[str]) -> None:
        """Compare both libraries on the first texts, and on one text now and then."""
        fast = self._fast
        if isinstance(fast, str) or not texts:
            return
        if self._is_checked and self._characters - self._checked_at < CHECKED_EVERY:
            return
        self._checked_at = self._characters
        sample, size = [texts[len(texts) // 2][:CHECKED_LATER]], 0
        if not self._is_checked:
            sample = []
            for text in texts:
                if size >= CHECKED_FIRST:
                    break
                sample.append(text[: CHECKED_FIRST - size])
                size += len(sample[-1])
        for text, (expected, _) in zip(sample, self._encode_all(sample, with_bytes=False), strict=True):
            found = fast.encode(text)
            if found is None or np.array_equal(found[0], expected):
                continue
            if not self._is_checked:
                self._fast = "tokenizers, because tiktoken gives other ids"
                return
            raise DataError(
                f"data: tiktoken must give the ids of tokenizers, got other ones for {text[:40]!r}; uninstall tiktoken, "
                "and remove the rows in data.cache_dir that were built with it"
            )
        self._is_checked = True


class _Fast:
    """tiktoken with the ranks and the pattern of a tokenizer."""

    def __init__(self, structure: dict[str, Any], pattern: str, ranks: dict[bytes, int]) -> None:
        from tiktoken import Encoding

        self.pattern = pattern
        self.encoding = Encoding("text", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self.num_bytes = np.zeros(max(ranks.values()) + 1, dtype=np.int64)
        for token, number in ranks.items():
            self.num_bytes[number] = len(token)
        self._unsure: dict[int, set[str]] = {}
        """Characters of each page of Unicode that the pattern's classes hold in one engine only."""
        self.composes = structure["normalizer"] is not None
        """True if the tokenizer first brings text into the Unicode form NFC."""
        self.taken_out = [token["content"] for token in structure["added_tokens"] if not token["special"]]
        """Added tokens that `tokenizers` looks for in plain text."""
        self.moves_spaces = any(part["trim_offsets"] for part in _parts(structure["post_processor"], "ByteLevel"))
        """True if `tokenizers` counts the spaces at the edge of a token for its neighbours."""

    @staticmethod
    def of(backend: Tokenizer) -> _Fast | str:
        """tiktoken for this tokenizer; or the line that says why `tokenizers` encodes."""
        try:
            import tiktoken  # noqa: F401
        except ImportError:
            return "tokenizers, because tiktoken is not installed"
        structure = json.loads(backend.to_str())
        pattern = _pattern_of(structure)
        normalizer = structure["normalizer"] or {"type": "NFC"}
        if pattern is None or normalizer != {"type": "NFC"} or not _is_plain_bpe(structure["model"]):
            return "tokenizers, because this is no byte-level BPE with one pattern"
        if not SAFE_PATTERN.fullmatch(pattern) or _differing(pattern, range(128)):
            return "tokenizers, because its pattern could mean something else to tiktoken"
        to_find = sum(not token["special"] for token in structure["added_tokens"])
        if to_find > MOST_TO_FIND:
            return f"tokenizers, because {to_find:,} added tokens are to be found in text"
        ranks = _ranks_of(structure["model"])
        if ranks is None:
            return "tokenizers, because its ids are not in the order of its merges"
        return _Fast(structure, pattern, ranks)

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(ids, nothing) of a text; None if only `tokenizers` can encode it exactly."""
        return self._encode(text, text.encode(), with_bytes=False)

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(ids, bytes that each stands for) of a text; None if only `tokenizers` can encode it exactly."""
        return self._encode(text, text.encode(), with_bytes=True)

    def _encode(self, text: str, raw: bytes, with_bytes: bool) -> tuple[np.ndarray, np.ndarray] | None:
        if not text.isascii() and self._is_unsure(text):
            return None
        if any(token in text for token in self.taken_out):
            return None
        if any(text[i : i + LONGEST_SPACE].isspace() for i in range(0, len(text) - LONGEST_SPACE, LONGEST_SPACE)):
            return None
        try:
            ids = np.frombuffer(array("I", self.encoding.encode_ordinary(text)), dtype=np.uint32)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # an engine that gives up; pyo3 exports no class for it
                raise
            return None
        num_bytes = self.num_bytes[ids]
        if num_bytes.sum() != len(raw):  # the pattern leaves text out, which tiktoken drops
            return None
        if not with_bytes:
            return ids, ids[:0]
        ends = num_bytes.cumsum()
        if len(raw) != len(text):
            continues = np.append(np.frombuffer(raw, dtype=np.uint8) & 0xC0 == 0x80, False)
            for _ in range(3):  # to the end of a character that began in the token
                ends += continues[ends]
        return ids, np.diff(ends, prepend=0).astype(np.uint32)

    def _is_unsure(self, text: str) -> bool:
        """True if a character may be of different classes, because the engines know different versions of Unicode, or is composed."""
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        for page in np.flatnonzero(np.bincount(codes >> PAGE_BITS)).tolist():
            if page not in self._unsure:
                codes_of_page = range(page << PAGE_BITS, (page + 1) << PAGE_BITS)
                self._unsure[page] = _differing(self.pattern, codes_of_page)
                if self.composes:  # a character that Python's tables lack may be composed with another one
                    self._unsure[page] |= {
                        chr(code) for code in codes_of_page if unicodedata.category(chr(code)) == "Cn"
                    }
            if self._unsure[page] and not self._unsure[page].isdisjoint(text):
                return True
        return self.composes and not unicodedata.is_normalized("NFC", text)


def _in_threads(encode: Any, texts: list[str]) -> list[Any]:
    """Encode texts in as many threads as there are cores, unless `tokenizers` is restricted to one."""
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_threads == 1 or len(texts) < 2 or os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0"):
        return [encode(text) for text in texts]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(encode, texts))


# --- structure -----------------------------------------------------------------------------------------------------


def _parts(structure: dict[str, Any] | None, kind: str) -> list[dict[str, Any]]:
    """Parts of a kind in a pre-tokenizer or post-processor."""
    if structure is None:
        return []
    parts = [part for name in ("pretokenizers", "processors") for part in structure.get(name, ())]
    return [part for part in (parts or [structure]) if part["type"] == kind]


def _pattern_of(structure: dict[str, Any]) -> str | None:
    """Pattern by which a byte-level tokenizer splits text; None if it does anything else before it merges."""
    before = structure["pre_tokenizer"]
    if before is None:
        return None
    parts = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    last = parts[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(parts) > 2:
        return None
    if len(parts) == 1:
        return GPT2_PATTERN if last["use_regex"] else None
    first = parts[0]
    splits = first["type"] == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    pattern = first["pattern"].get("Regex") if splits and not last["use_regex"] else None
    return str(pattern) if pattern else None


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    changes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return model["type"] == "BPE" and not any(model.get(key) for key in changes)


def _ranks_of(model: dict[str, Any]) -> dict[bytes, int] | None:
    """Bytes of each token that merging can produce -> its id; None if tiktoken would merge in another order."""
    from tokenizers import Tokenizer, models

    byte_of, vocab = byte_of_character(), model["vocab"]
    merges: list[tuple[str, str]] = [
        tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]
    ]
    results = [vocab[left + right] for left, right in merges]
    if any(later < earlier for earlier, later in pairwise(results)):
        return None
    if not byte_of.keys() <= vocab.keys():
        return None
    tokens = [token for token in vocab if all(character in byte_of for character in token)]
    alone = Tokenizer(models.BPE(vocab=vocab, merges=merges)).encode_batch_fast(tokens, add_special_tokens=False)
    if model.get(
        "ignore_merges"
    ):  # a word that is a token needs no merge; inside a longer word it must stay unreachable
        if any(len(own.ids) == 2 for own in alone):
            return None
        reached = tokens
    else:
        reached = [token for token, own in zip(tokens, alone, strict=True) if own.ids == [vocab[token]]]
    return {bytes(map(byte_of.__getitem__, token)): vocab[token] for token in reached}


@cache
def byte_of_character() -> dict[str, int]:
    """Byte that each character of a byte-level vocabulary stands for: itself if it is printable in Latin-1, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _differing(pattern: str, codes: range) -> set[str]:
    """Characters among these codes that a class of the pattern holds in one engine only."""
    from tiktoken import Encoding
    from tokenizers import Regex, normalizers

    characters = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    differing: set[str] = set()
    for name in _classes(pattern):
        outside = set(normalizers.Replace(Regex(name), "").normalize_str(characters))
        encoding = Encoding("class", pat_str=name, mergeable_ranks=_BYTES, special_tokens={})
        inside = set(bytes(encoding.encode_ordinary(characters)).decode())  # what a pattern does not match is dropped
        differing |= (set(characters) - outside) ^ inside
    return differing


@cache
def _classes(pattern: str) -> frozenset[str]:
    """Classes of characters in a pattern; letters whose case is ignored are classes too."""
    classes = set(re.findall(CLASS, pattern.replace(r"\S", r"\s").replace(r"\D", r"\d").replace(r"\W", r"\w")))
    if "(?i:" in pattern:
        letters = re.sub(rf"{CLASS}|\\.|\(\?i:", "", pattern)
        classes |= {f"(?i:{letter})" for letter in set(re.findall("[A-Za-z]", letters))}
    return frozenset(classes)


_BYTES = {bytes([byte]): byte for byte in range(256)}


def token_bytes(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """UTF-8 bytes of `text` that each of its tokens stands for; their sum is the number of bytes of `text`.

    A character spread over several tokens counts for the first of them; text that a normaliser drops counts for the next
    token.

    Args:
        offsets: (start, end) of each token, in characters.

    Returns:
        uint32 [len(offsets)].
    """
    if not offsets:
        return np.zeros(0, dtype=np.uint32)
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    position = np.concatenate([[0], widths.cumsum()])
    ends = np.maximum.accumulate(position[np.array(offsets)[:, 1]])
    ends[-1] = position[-1]
    return np.diff(ends, prepend=0).astype(np.uint32)
