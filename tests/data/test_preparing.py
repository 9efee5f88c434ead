"""`acc-lm data`: rows shown as they are trained on, text tokenised in advance as train.py would, text that ends early."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acc_lm.chat import conversations
from acc_lm.cli import main
from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data import Data, build_data, lengths_of, one_source, shown_rows
from acc_lm.errors import ConfigError, UserError
from acc_lm.evaluation.scoring import read_documents
from acc_lm.reporting.rows import as_html, as_text, histogram
from acc_lm.rows.packing import PackedRows
from acc_lm.rows.text_rows import Rows
from acc_lm.text import writing
from acc_lm.text.parts import NO_PREPARATION, Preparation

BYTE = TokenizerConfig(kind="byte")
END = 0


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    lines = [f"text {number}: " + "red tree sings, naïve as 日本. " * (1 + number % 9) for number in range(120)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    with file.open("w") as stream:
        for number in range(90):
            messages = [
                {
                    "role": role,
                    "content": f"{role} says <|endoftext|> <b>{number}</b>\n" + "more " * (number % 11),
                }
                for turn in range(1 + number % 3)
                for role in ("user", "assistant")
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")
    return file


def build(file: Path, cache: Path | None = None, preparation: Preparation = NO_PREPARATION, **keys: Any) -> Data:
    given = {"files": [str(file)], "sequence_length": 128, "eval_fraction": 0.2, "max_lossy_share": 1} | keys
    config = DataConfig.model_validate(given | ({"cache_dir": str(cache)} if cache else {}))
    return build_data(config, BYTE, None, 0, 1, preparation=preparation)


# --- show ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
def test_the_items_shown_are_those_on_disk(chats: Path, packing: bool) -> None:
    data = build(chats, packing=packing)
    rows = data.train
    assert isinstance(rows, PackedRows)
    shown = list(shown_rows(data, range(len(rows)), rows.__getitems__(range(len(rows))), {END}))
    width = rows.__getitems__(range(len(rows)))["input_ids"].shape[1]
    bits = np.unpackbits(rows.is_target, bitorder="little")
    num_cut = 0
    for number, row in enumerate(shown):
        first, last = rows.packing.row_offsets[number : number + 2]
        assert len(row.documents) == last - first > 0
        places = 0
        for item, document in zip(rows.packing.items[first:last], row.documents, strict=True):
            begin, end = rows.item_offsets[item : item + 2]
            assert document == (rows.tokens[begin:end].tolist(), bits[begin:end].astype(bool).tolist())
            num_cut += document[0][-1] != END
            places += end - begin - 1
        assert (f"{width - places} places of padding" in row.notes) == (places < width)
    cut = [re.match(r"(\d+) cut within a turn, at data.sequence_length", note) for row in shown for note in row.notes]
    assert sum(int(found[1]) for found in cut if found) == num_cut > 0
    assert num_cut <= data.facts.item_counts["train"]["cut"], "others were cut in a user's turn"


@pytest.mark.parametrize("keys", [{}, {"attend_across_documents": False}, {"sequence_length": 50}])
def test_the_texts_shown_are_those_of_the_rows(texts: Path, keys: dict[str, Any]) -> None:
    data = build(texts, **keys)
    rows = data.train
    assert isinstance(rows, Rows)
    length = rows.sequence_length
    for number, row in enumerate(shown_rows(data, range(len(rows)), rows.__getitems__(range(len(rows))), set())):
        ids = [token for document in row.documents for token in document[0]]
        assert ids == rows.tokens[number * length : (number + 1) * length + 1].tolist()
        assert [flag for _, flags in row.documents for flag in flags] == [False] + [True] * (len(ids) - 1)
        assert all(END not in document[:-1] for document, _ in row.documents)
        assert ("its last document continues in the next row" in row.notes) == (ids[-1] != END)


def test_special_tokens_are_marked_and_text_that_spells_them_is_not(chats: Path) -> None:
    data = build(chats, sequence_length=1024)
    (row,) = shown_rows(data, [0], data.train.__getitems__([0]), {END})
    text = as_text(row, data.tokenizer, with_ids=False, in_color=False)
    assert re.search(r"  given \| user says <\|endoftext\|> <b>\d+</b>", text)
    assert "‹<|endoftext|>›" in text
    assert "‹" not in as_text(row, data.tokenizer, with_ids=False, in_color=False).replace("‹<|endoftext|>›", "")
    assert text in re.sub("\033\\[\\d+m", "", as_text(row, data.tokenizer, with_ids=False, in_color=True))
    ids = re.findall(r"\| +(\d+)  '", as_text(row, data.tokenizer, with_ids=True, in_color=False))
    assert list(map(int, ids)) == [token for document, _ in row.documents for token in document]
    page = as_html("a <title>", ["facts"], [row], data.tokenizer, with_ids=False)
    assert "a &lt;title&gt;" in page
    assert "<b>" not in page
    spans = re.findall(r"<span class=(?:given|learned)>(.*?)</span>", page.split("<h2>")[1], re.DOTALL)
    whole = "".join(data.tokenizer.decode(document) for document, _ in row.documents)
    assert html.unescape("".join(spans)).replace("‹", "").replace("›", "") == whole


def test_the_histogram_counts_every_length_and_names_what_is_cut() -> None:
    lines = histogram(np.array([3, 4, 7, 8, 100]), 9, "documents")
    assert lines[0] == "documents by length in tokens: median 7, longest 100"
    counts = {tuple(map(int, line.split()[:3:2])): int(line.split()[3]) for line in lines[1:-1]}
    assert counts == {(2, 3): 1, (4, 7): 2, (8, 15): 1, (16, 31): 0, (32, 63): 0, (64, 127): 1}
    assert lines[-1] == "  data.sequence_length 8 cuts 1 of them (20.0%); 99 would fit 99%"
    assert histogram(np.array([5]), None, "documents")[1:] == ["          4 to         7          1  " + "#" * 40]


def test_the_lengths_are_those_before_any_cut(texts: Path, chats: Path) -> None:
    for file, keys in ((texts, {}), (chats, {}), (chats, {"packing": False})):
        short, long = build(file, **keys), build(file, sequence_length=4096, **keys)
        config = DataConfig.model_validate({"files": [str(file)], "sequence_length": 128, "eval_fraction": 0.2})
        lengths = lengths_of(short, config, 0)
        if isinstance(long.train, PackedRows):  # of all conversations, the held-out ones too
            own = np.diff(long.train.item_offsets)
            assert set(own.tolist()) <= set(lengths.tolist())
            assert len(lengths) == 90
        else:
            assert lengths.sum() == long.facts.train_tokens
            assert len(lengths) == long.facts.train_documents


def test_data_show_prints_rows_in_training_order(
    tiny_recipe: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "show", str(tiny_recipe), "--rows", "14"]) == 0
    text = capsys.readouterr().out
    data = build_data(
        DataConfig(source="files", files=_files(tiny_recipe), eval_fraction=0.1, sequence_length=32), BYTE, None, 7, 12
    )
    order = data.order(7, 12)
    wanted = [*order.rows_at(1), *order.rows_at(2)[:2]]
    assert [int(number.replace(",", "")) for number in re.findall(r"^row ([\d,]+): ", text, re.M)] == wanted
    assert "documents by length in tokens" in text
    page = tmp_path / "page.html"
    chosen = [str(tiny_recipe), f"data.files=[{chats}]", "data.max_lossy_share=1", "data.sequence_length=96"]
    assert main(["data", "show", *chosen, "--html", str(page), "--ids"]) == 0
    assert "acc-lm&#x27;s plain one; &#x27;&lt;|endoftext|&gt;&#x27; ends a turn" in page.read_text()
    assert "cuts " in page.read_text()
    assert main(["data", "show", *chosen, "--html", str(tmp_path / "nowhere/page.html")]) == 2
    assert main(["data", "show", "--rows", "0"]) == 2
    assert "--rows must be at least 1, got 0" in capsys.readouterr().err


def _files(recipe: Path) -> tuple[str, ...]:
    return tuple(re.findall(r"files: \[(.*?)\]", recipe.read_text()))


# --- prepare -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_source, "PART_OF_TEXT", 1000)
    monkeypatch.setattr(conversations, "PART_OF_CONVERSATIONS", 1000)


def contents(cache: Path, key: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (cache / key).rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", ["texts", "chats", "limited"])
@pytest.mark.usefixtures("small_parts")
def test_prepared_rows_are_the_same_bytes(kind: str, texts: Path, chats: Path, tmp_path: Path) -> None:
    file, keys = (chats, {}) if kind == "chats" else (texts, {"max_tokens": 4000} if kind == "limited" else {})
    plain = build(file, tmp_path / "plain", **keys)
    prepared = build(file, tmp_path / "prepared", Preparation(3, tmp_path / "unfinished"), **keys)
    assert prepared.key == plain.key
    assert contents(tmp_path / "prepared", plain.key) == contents(tmp_path / "plain", plain.key)
    assert not list((tmp_path / "unfinished").iterdir())


@pytest.mark.usefixtures("small_parts")
def test_a_preparation_that_was_killed_goes_on_with_its_finished_parts(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    encode = writing.encode_part

    def slow(*arguments: Any, **keys: Any) -> Any:
        if not keys["with_bytes"]:  # the training documents of a part
            with seen.open("a") as file:
                file.write("part\n")
            time.sleep(0.05)
        return encode(*arguments, **keys)

    monkeypatch.setattr(writing, "encode_part", slow)
    unfinished = tmp_path / "unfinished"
    pid = os.fork()
    if pid == 0:
        build(texts, tmp_path / "cache", Preparation(2, unfinished))
        os._exit(1)
    while len(list(unfinished.glob("*/text-*.npz"))) < 4:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    time.sleep(0.3)  # the processes of the pool end with their parent
    kept = list(unfinished.glob("*/text-*.npz"))
    kept[0].write_bytes(kept[0].read_bytes()[:-50])  # one of them is damaged
    seen.unlink()
    data = build(texts, tmp_path / "cache", Preparation(2, unfinished))
    again = len(seen.read_text().splitlines())
    seen.unlink()
    plain = build(texts, tmp_path / "plain")
    assert again == len(seen.read_text().splitlines()) - len(kept) + 1
    assert contents(tmp_path / "cache", data.key) == contents(tmp_path / "plain", plain.key)


@pytest.mark.usefixtures("small_parts")
def test_a_process_that_is_killed_is_one_line(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "encode_part", lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match="--processes must leave enough memory, got 2 and one was ended") as refusal:
        build(texts, tmp_path / "cache", Preparation(2, tmp_path / "unfinished"))
    assert refusal.value.exit_code == 4


@pytest.mark.usefixtures("small_parts")
def test_an_error_in_a_process_is_the_error_of_the_text(chats: Path, tmp_path: Path) -> None:
    chats.write_text(chats.read_text().replace("user says", "user \ud83d says".encode("unicode_escape").decode(), 1))
    with pytest.raises(UserError, match=r"chats.jsonl:1: .* lone surrogate"):
        build(chats, tmp_path / "cache", Preparation(2, tmp_path / "unfinished"))


def test_train_finds_what_was_prepared(
    tiny_recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"data.cache_dir={tmp_path / 'cache'}", "data.eval_fraction=0.11"]
    assert main(["data", "prepare", str(tiny_recipe), "--processes", "2", *keys]) == 0
    assert "where train.py with the same data finds it" in capfd.readouterr().out
    monkeypatch.setattr(writing, "encode_part", None)
    config = DataConfig(
        source="files",
        files=_files(tiny_recipe),
        eval_fraction=0.11,
        sequence_length=32,
        cache_dir=str(tmp_path / "cache"),
    )
    assert len(build_data(config, BYTE, None, 7, 12).train) > 0


# --- text that ends early ------------------------------------------------------------------------------------------


def test_reading_ends_with_the_document_that_reaches_the_limit(texts: Path, tmp_path: Path) -> None:
    lines = texts.read_text().splitlines(keepends=True)
    sizes = np.cumsum([len(json.loads(line)["text"].encode()) + 1 for line in lines])
    (tmp_path / "first.jsonl").write_text("".join(lines[:31]))
    wanted = build(tmp_path / "first.jsonl")
    for limit in (sizes[29] + 1, sizes[30]):
        data = build(texts, max_tokens=int(limit))
        assert data.train.tokens.tolist() == wanted.train.tokens.tolist()  # type: ignore[attr-defined]
        assert data.evaluation.tokens.tolist() == wanted.evaluation.tokens.tolist()  # type: ignore[attr-defined]
        assert (
            data.facts.source["ended"] == f"31 documents of {sizes[30]:,} tokens, because data.max_tokens is {limit:,}"
        )
        assert data.key != wanted.key
    more = build(texts, max_tokens=10**9)
    assert more.facts.train_documents + more.facts.eval_documents == len(lines)
    assert "ended" not in more.facts.source


def test_conversations_end_early_too(chats: Path, tmp_path: Path) -> None:
    lines = chats.read_text().splitlines(keepends=True)
    data = build(chats, max_tokens=3000, sequence_length=1024)
    count = data.facts.train_documents + data.facts.eval_documents
    assert 3 < count < len(lines)
    total = data.facts.train_tokens + data.facts.eval_tokens
    assert total >= 3000
    (tmp_path / "first.jsonl").write_text("".join(lines[:count]))
    wanted = build(tmp_path / "first.jsonl", sequence_length=1024)
    assert total == wanted.facts.train_tokens + wanted.facts.eval_tokens
    (tmp_path / "fewer.jsonl").write_text("".join(lines[: count - 1]))
    fewer = build(tmp_path / "fewer.jsonl", sequence_length=1024)
    assert fewer.facts.train_tokens + fewer.facts.eval_tokens < 3000


@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_the_held_out_text_that_is_scored_ends_there_too(kind: str, texts: Path, chats: Path) -> None:
    file = texts if kind == "texts" else chats
    data = build(file, max_tokens=3000, sequence_length=1024)
    given = {"files": [str(file)], "sequence_length": 1024, "eval_fraction": 0.2, "max_lossy_share": 1}
    config = DataConfig.model_validate(given | {"max_tokens": 3000})
    scored = read_documents(config, data.tokenizer, 0, held_out=True, trained_on=data.text_key)
    counts = [rows.count_targets(np.arange(len(rows))) for rows in (scored.rows, data.evaluation)]
    assert counts[0] == counts[1] > 0
    with pytest.raises(UserError, match="must have been trained on this text"):
        read_documents(
            config.model_copy(update={"max_tokens": 4000}), data.tokenizer, 0, held_out=True, trained_on=data.text_key
        )


def test_a_source_of_a_mixture_ends_on_its_own(texts: Path, chats: Path, tmp_path: Path) -> None:
    mixed = [
        {"files": [str(texts)], "weight": 1, "name": "a", "max_tokens": 3000},
        {"files": [str(texts)], "weight": 1},
    ]
    data = build_data(DataConfig.model_validate({"mixture": mixed, "sequence_length": 32}), BYTE, None, 0, 1)
    assert data.mixture is not None
    assert data.mixture.sizes[0] < 3300 / 32 < data.mixture.sizes[1]


def test_a_limit_needs_a_tokenizer_that_exists(texts: Path) -> None:
    config = DataConfig(files=(str(texts),), max_tokens=9)
    with pytest.raises(
        ConfigError, match=r"data.max_tokens must be null for a tokenizer that is built from the text, got 9"
    ):
        build_data(config, TokenizerConfig(kind="bpe", vocab_size=300), None, 0, 1)
    with pytest.raises(ValueError, match="max_tokens must be null for a stream"):
        DataConfig(files=(str(texts),), eval_files=("a",), streaming=True, max_tokens=9)
    with pytest.raises(ValueError, match="max_tokens must be null for source mixture"):
        DataConfig.model_validate({"mixture": [{"files": ["a"], "weight": 1}], "max_tokens": 9})
