"""Text <-> ids: a tokenizer from the Hub or a folder, or one built from the training text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from acc_lm.config import ModelConfig, TokenizerConfig
from acc_lm.errors import ConfigError, first_line
from acc_lm.text.documents import Document
from acc_lm.text.encoder import TextEncoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


END_TOKEN = "<|endoftext|>"
LEAST_VOCABULARY = 257
"""Ids of a byte tokenizer; a character tokenizer has one more for each character of the text."""
PIECE = 1_000_000  # characters of one document that are encoded in one call


def read_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Read the tokenizer of an exported model or of a run.

    Raises:
        OSError, ValueError: transformers cannot load it; damaged files lead to other errors inside, which become ValueError.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"its tokenizer is damaged ({first_line(error)})") from None
    return tokenizer


def load_tokenizer(config: TokenizerConfig, model: ModelConfig) -> PreTrainedTokenizerBase | None:
    """Load the existing tokenizer that the recipe names, with the recipe's tokens; None if one is to be built from the text.

    Raises:
        ConfigError: the tokenizer cannot be loaded, is not a fast tokenizer, or has no end token.
    """
    name, revision, key = config.name_or_path, config.revision, "tokenizer.name_or_path"
    if name is None and model.name_or_path is not None:
        name, revision, key = model.name_or_path, model.revision, "model.name_or_path"
    if name is None:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # each loader raises its own kinds; each means that there is no usable tokenizer
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{key} must be a tokenizer without its own code, got {name!r}, which contains some; "
                "review it, then set model.trust_remote_code=true"
            ) from None
        raise ConfigError(
            f"{key} must have a tokenizer, got {name!r}: {first_line(error)}; check the name, or use a local folder"
        ) from None
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{key} must have a fast tokenizer (tokenizer.json), got {type(tokenizer).__name__}; convert it"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{key} must have an end token (eos_token) to separate documents, got none; add one to the tokenizer"
        )
    add_tokens(tokenizer, config)
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerBase, config: TokenizerConfig) -> None:
    """Add the recipe's tokens to a tokenizer; one that its vocabulary has keeps its id, and needs no new row.

    Raises:
        ConfigError: a new token would get the id of another one.
    """
    from tokenizers import AddedToken

    known = tokenizer.get_vocab() if config.add_tokens or config.add_special_tokens else {}
    for special, tokens in ((False, config.add_tokens), (True, config.add_special_tokens)):
        if not tokens:
            continue
        # Looked for in the text as it is, whatever a normaliser makes of it, and without the spaces around it.
        added = [AddedToken(token, special=special, normalized=False) for token in tokens]
        tokenizer.add_tokens(added, special_tokens=special)  # type: ignore[arg-type]
    new = {token: number for token, number in tokenizer.get_vocab().items() if known and token not in known}
    taken = {number: token for token, number in known.items()}
    for token, number in new.items():
        if number in taken:
            raise ConfigError(
                f"tokenizer.add_tokens must be empty for a vocabulary whose ids have gaps, got {token!r} with the id {number} of "
                f"{taken[number]!r}; renumber the vocabulary without gaps"
            )
    for token in (*config.add_tokens, *config.add_special_tokens):
        # A vocabulary writes bytes and spaces as other characters, and takes a token that consists of such for these bytes.
        decoded = _decode_after(tokenizer, int(tokenizer.convert_tokens_to_ids(token)))
        if decoded != token:
            raise ConfigError(
                f"tokenizer.add_tokens must be text that this tokenizer can decode, got {token!r}, which would become {decoded!r}; "
                "choose another token, such as one of ASCII characters"
            )
    tokenizer.new_tokens = frozenset(new)  # type: ignore[attr-defined]


def _decode_after(tokenizer: PreTrainedTokenizerBase, number: int) -> str:
    """Text that an id adds to a text that has begun."""
    begun = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("a"))
    before, after = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (begun, [*begun, number]))
    return str(after).removeprefix(str(before))


def new_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The recipe's tokens that the vocabulary of an existing tokenizer did not have before."""
    found: frozenset[str] = tokenizer.__dict__.get("new_tokens", frozenset())
    return found


def vocabulary_to_build(config: TokenizerConfig) -> int:
    """Number of ids of a tokenizer that is yet to be built, as the recipe asks for it."""
    built = config.vocab_size if config.kind == "bpe" else LEAST_VOCABULARY
    return built + len(config.add_tokens) + len(config.add_special_tokens)


def make_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Build a byte-level BPE trained on `texts`, a tokenizer of their characters, or a tokenizer of bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if config.kind == "char":
        # Characters that occur only in held-out text are encoded as bytes, so nothing is ever lost.
        characters = sorted(set().union(*map(set, texts)))
        names = [END_TOKEN, *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
        backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n"), "isolated")  # type: ignore[assignment]
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
        backend.add_special_tokens([END_TOKEN])
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(
            vocab_size=257 if config.kind == "byte" else config.vocab_size,
            special_tokens=[END_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(iter(()) if config.kind == "byte" else iter(texts), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        bos_token=END_TOKEN,
        pad_token=END_TOKEN,
        padding_side="left",  # generation continues from the last token of a row
    )
    add_tokens(tokenizer, config)
    return tokenizer


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The tokenizer's backend for plain text: a special token that is spelled in the text is text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def build_encoder(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    """TextEncoder of plain text whose documents end with the tokenizer's end token."""
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    return TextEncoder(text_encoder(tokenizer), end)


def cut_text(text: str, encoder: Tokenizer) -> list[str]:
    """Cut a document into pieces to encode one by one; a tokenizer that marks the start of a text gets one piece.

    The cut is before a line break that follows a letter or digit, where byte-level pre-tokenizers cut anyway, or after
    `PIECE` characters if there is no such line break.
    """
    if len(text) <= PIECE or not encodes_pieces(encoder):
        return [text]
    pieces, start = [], 0
    while len(text) - start > PIECE:
        end = start + PIECE
        cut = end
        while cut > start + 1:
            cut = text.rfind("\n", start + 1, cut)
            if cut == -1 or text[cut - 1].isalnum():
                break
        end = cut if cut > start else end
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def encodes_pieces(encoder: Tokenizer) -> bool:
    """True if the pieces of a text have the same ids as in the full text; sentencepiece adds its prefix to each piece."""

    def ids(text: str) -> list[int]:
        return list(encoder.encode(text, add_special_tokens=False).ids)

    return all(ids(head + tail) == ids(head) + ids(tail) for head, tail in (("word", "\nword"), ("1", "\n\n  a")))


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Smallest vocabulary size that covers every id of the tokenizer."""
    return max(len(tokenizer), 1 + max(int(i) for i in tokenizer.get_vocab().values()))


def id_dtype(num_ids: int) -> type[np.unsignedinteger]:
    """Smaller of uint16 and uint32 that holds every id of a vocabulary of this size."""
    return np.uint16 if num_ids <= 1 << 16 else np.uint32


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    tokenizer.save_pretrained(folder)


def encode_part(
    documents: list[Document], encoder: TextEncoder, *, with_bytes: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, bytes of each id, number of ids of each document) of a few documents, each followed by the end token."""
    pieces = [marked for document in documents for marked in _marked(document.text, encoder)]
    ids: list[np.ndarray] = []
    byte_counts: list[np.ndarray] = []
    ends: list[int] = []
    num_ids = 0
    texts, last_id, no_bytes = (
        [piece for piece, _ in pieces],
        np.array([encoder.end], dtype=np.uint32),
        np.zeros(1, np.uint32),
    )
    encoded = encoder.encode_with_bytes(texts) if with_bytes else [(own, no_bytes[:0]) for own in encoder.encode(texts)]
    for (_, is_last), (own, own_bytes) in zip(pieces, encoded, strict=True):
        ids.append(own)
        num_ids += len(own) + is_last
        byte_counts.append(own_bytes)
        if is_last:
            ids.append(last_id)
            byte_counts.append(no_bytes)
            ends.append(num_ids)
    return np.concatenate(ids), np.concatenate(byte_counts), np.diff(ends, prepend=0)


def encode_each(
    documents: Iterator[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:
    """Triples (document, its ids with the end token last, bytes of each id): the material that rows are cut from."""
    encoder = build_encoder(tokenizer)
    for document in documents:
        ids, byte_counts, _ = encode_part([document], encoder, with_bytes=True)
        yield document, ids, byte_counts


def _marked(text: str, encoder: TextEncoder) -> list[tuple[str, bool]]:
    """Pairs (piece, True if it is the last) of a document."""
    *pieces, last = cut_text(text, encoder.backend)
    return [(piece, False) for piece in pieces] + [(last, True)]
