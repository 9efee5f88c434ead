"""Text -> documents -> rows: nothing lost, nothing twice, nothing on both sides of the split."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import lzma
import math
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from processes import Launch
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data import Data, build_data
from acc_lm.errors import DataError
from acc_lm.rows.loader import MicroBatches, build_loader
from acc_lm.rows.mixture import MixedRows
from acc_lm.rows.order import RowOrder
from acc_lm.rows.text_rows import Rows
from acc_lm.text.corpus import open_corpus, python_stdlib_files
from acc_lm.text.documents import Corpus, Document, Documents, Skipped, text_in
from acc_lm.text.encoder import token_bytes
from acc_lm.text.files import read_files
from acc_lm.text.splitting import split_documents
from acc_lm.text.synthetic import entropy_rate, transition_matrix
from acc_lm.text.tokenizer import PIECE, cut_text, id_dtype, make_tokenizer, text_encoder

BYTE = TokenizerConfig(kind="byte")


def data_of(*files: Path, tokenizer: TokenizerConfig = BYTE, batch: int = 1, **keys: Any) -> Data:
    config = DataConfig(
        source="files", files=tuple(map(str, files)), sequence_length=keys.pop("sequence_length", 16), **keys
    )
    return build_data(config, tokenizer, None, 0, batch)


def all_ids(rows: Rows) -> list[int]:
    """Tokens of a split, put together again from its rows."""
    ids: list[int] = []
    for row in range(len(rows)):
        batch = rows[row]
        targets = batch["targets"][0][batch["targets"][0] >= 0].tolist()
        ids += ([batch["input_ids"][0, 0].item()] if row == 0 else []) + targets
    return ids


def documents_of(data: Data, rows: Rows) -> list[str]:
    end = data.tokenizer.eos_token_id
    text, documents = [], []
    for token in all_ids(rows):
        if token == end:
            documents.append(data.tokenizer.decode(text))
            text = []
        else:
            text.append(token)
    assert not text, "a split ends with an end token"
    return documents


def test_every_document_comes_back_complete_on_one_side(text_file: Path, words: list[str]) -> None:
    data = data_of(text_file, eval_fraction=0.2)
    train, held_out = documents_of(data, data.train), documents_of(data, data.evaluation)
    assert sorted(train + held_out) == sorted(words)
    assert not set(train) & set(held_out)
    total = sum(len(text.encode()) for text in words)
    assert 0.2 * total <= data.facts.eval_bytes <= 0.2 * total + max(len(text.encode()) for text in words)
    assert data.facts.train_bytes + data.facts.eval_bytes == total
    assert (data.facts.train_documents, data.facts.eval_documents) == (len(train), len(held_out))


def test_rows_overlap_by_one_so_that_every_token_but_the_first_is_a_target(text_file: Path) -> None:
    data = data_of(text_file)
    for rows in (data.train, data.evaluation):
        batch = rows.__getitems__(range(len(rows)))
        assert batch["input_ids"].shape == batch["targets"].shape == (len(rows), 16)
        assert (batch["targets"][:-1] >= 0).all(), "only the last row may be short"
        assert torch.equal(batch["input_ids"][1:, 0], batch["targets"][:-1, -1])
        assert torch.equal(batch["input_ids"][:-1, 1:], batch["targets"][:-1, :-1]), "exactly one shift"
        num_targets = int((batch["targets"] >= 0).sum())
        assert num_targets == len(rows.tokens) - 1 == rows.count_targets(np.arange(len(rows)))
        for row in range(len(rows)):
            assert rows.count_targets(np.array([row])) == int((batch["targets"][row] >= 0).sum())


def test_bytes_of_the_targets_are_the_bytes_of_the_text(text_file: Path) -> None:
    for tokenizer in (BYTE, TokenizerConfig(kind="bpe", vocab_size=300), TokenizerConfig(kind="char")):
        data = data_of(text_file, tokenizer=tokenizer)
        rows = data.evaluation
        first = rows.bytes_of_token[0]
        assert rows.count_bytes(range(len(rows))) == data.facts.eval_bytes - first
        assert rows.count_bytes([-1]) == 0


def test_gzip_and_xz_see_the_held_out_text_as_one_stream(text_file: Path) -> None:
    data = data_of(text_file)
    stream = "".join(documents_of(data, data.evaluation)).encode()
    bits = data.facts.compressed_bits_per_byte
    assert bits["gzip"] == 8 * len(gzip.compress(stream, 9)) / len(stream)
    assert bits["xz"] == 8 * len(lzma.compress(stream, preset=9)) / len(stream)


def test_equal_documents_stay_on_one_side(tmp_path: Path) -> None:
    texts = [f"document number {i % 10} " * 5 for i in range(30)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = data_of(tmp_path / "x.jsonl", eval_fraction=0.3)
    assert not set(documents_of(data, data.train)) & set(documents_of(data, data.evaluation))


def test_the_split_does_not_depend_on_the_order_of_the_documents(text_file: Path, tmp_path: Path) -> None:
    lines = text_file.read_text().splitlines(keepends=True)
    (tmp_path / "backwards.jsonl").write_text("".join(reversed(lines)))
    held_out = [
        sorted(documents_of(data, data.evaluation))
        for data in (data_of(text_file), data_of(tmp_path / "backwards.jsonl"))
    ]
    assert held_out[0] == held_out[1]


def test_a_lone_document_is_cut_and_its_tail_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(300))
    (tmp_path / "book.txt").write_text(text)
    data = data_of(tmp_path / "book.txt", eval_fraction=0.1)
    (head,), (tail,) = documents_of(data, data.train), documents_of(data, data.evaluation)
    assert head + tail == text, "newlines kept"
    assert len(tail) == round(len(text) * 0.1)


def split(texts: list[str], fraction: float, **more: Any) -> tuple[list[str], list[str], dict[str, Any]]:
    corpus = Corpus("key", None, Documents(lambda skipped: (Document(text, None) for text in texts)), None)
    split = split_documents(corpus, DataConfig(eval_fraction=fraction), **more)
    train, held_out, counts = split.train, split.evaluation, split.counts
    sides = [[document.text for document in side()] for side in (train, held_out)]
    sizes = [sum(len(text.encode()) for text in side) for side in sides]
    assert [counts["train_bytes"], counts["eval_bytes"]] == sizes
    assert [counts["train_documents"], counts["eval_documents"]] == [len(side) for side in sides]
    return sides[0], sides[1], counts


def test_at_most_twice_the_requested_share_is_held_out_whatever_the_documents() -> None:
    choose = random.Random(5)
    num_as_before = 0
    for case in range(300):
        sizes = [int(10 ** choose.uniform(1, 4)) for _ in range(choose.choice([2, 3, 10, 100]))]
        texts = [f"{number} {choose.choice(['a', 'é'])}" * size for number, size in enumerate(sizes)]
        texts += [texts[0]] * choose.choice([0, 0, 1, 9])
        fraction, total = choose.choice([0.01, 0.05, 0.2, 0.6]), sum(len(text.encode()) for text in texts)
        train, held_out, counts = split(texts, fraction)
        assert sum(map(len, train + held_out)) == sum(map(len, texts)), "nothing is lost"
        assert counts["eval_bytes"] <= 2 * fraction * total, case
        if fraction < 0.5 and not counts["as_in_rows_1"]:
            assert counts["eval_bytes"] >= fraction * total / 2 * 0.99, case
        # Where the documents with the smallest hashes do not come to more, they are what is held out.
        order = sorted(set(texts), key=lambda text: xxhash.xxh3_64_intdigest(text.encode()))
        before, expected = 0, []
        for text in order[:-1]:
            if before < fraction * total:
                expected.append(text)
                before += len(text.encode()) * texts.count(text)
        assert counts["as_in_rows_1"] == (before <= 2 * fraction * total)
        if counts["as_in_rows_1"]:
            num_as_before += 1
            assert set(held_out) == set(expected)
    assert 50 < num_as_before < 250


def test_every_copy_of_a_lone_document_is_cut() -> None:
    train, held_out, counts = split(["hello world " * 20] * 100, 0.05)
    assert (train, held_out) == ([("hello world " * 20)[:228]] * 100, [("hello world " * 20)[228:]] * 100)
    assert not counts["as_in_rows_1"]
    train, held_out, _ = split(["a" * 1000] * 3, 0.6)
    assert ([*map(len, train)], [*map(len, held_out)]) == ([400] * 3, [600] * 3), "never all of it is held out"
    _, (tail,), counts = split(["a" * 950 + "日" * 50], 0.05)
    assert (len(tail.encode()), counts["as_in_rows_1"]) == (57, False), "by bytes, where characters would be too many"


def test_conversations_of_which_no_complete_one_can_be_held_out_are_refused() -> None:
    texts = [f"{number}" * 100 for number in range(5)]
    with pytest.raises(
        DataError, match=r"data.eval_fraction must be at least 0.1 to hold out one complete.*, got 0.09;"
    ):
        split(texts, 0.09, can_cut=False)
    train, held_out, _ = split(texts, 0.1, can_cut=False)
    assert (len(train), len(held_out)) == (4, 1)


def test_eval_files_are_held_out_and_shared_documents_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"one {i} " * 9}) + "\n" for i in range(9)))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"one {i} " * 9}) + "\n" for i in range(7, 12)))
    data = data_of(tmp_path / "a.jsonl", eval_files=(str(tmp_path / "b.jsonl"),))
    assert (data.facts.train_documents, data.facts.eval_documents, data.facts.shared_documents) == (9, 5, 2)


def write_all_formats(folder: Path, texts: list[str]) -> dict[str, Path]:
    import csv

    import pyarrow
    import pyarrow.parquet

    files = {suffix: folder / f"data.{suffix}" for suffix in ("jsonl", "json", "csv", "parquet", "arrow")}
    files["jsonl"].write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    files["json"].write_text(json.dumps([{"text": t, "id": i} for i, t in enumerate(texts)]))
    with files["csv"].open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"])
        writer.writeheader()
        writer.writerows({"id": i, "text": t} for i, t in enumerate(texts))
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, files["parquet"])
    with pyarrow.OSFile(str(files["arrow"]), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return files


def test_every_format_gives_the_same_documents(words: list[str], tmp_path: Path) -> None:
    expected = None
    for suffix, file in write_all_formats(tmp_path, words).items():
        data = data_of(file)
        found = (documents_of(data, data.train), documents_of(data, data.evaluation))
        expected = expected or found
        assert found == expected, suffix
        assert sorted(found[0] + found[1]) == sorted(words)


def test_only_line_breaks_end_a_csv_record(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('id,text\n1,one\u2028still one\x0cand on\n2,"two\nlines"\n' * 1, newline="")
    data = data_of(tmp_path / "x.csv", eval_fraction=0.5, sequence_length=4)
    assert sorted(documents_of(data, data.train) + documents_of(data, data.evaluation)) == [
        "one\u2028still one\x0cand on",
        "two\nlines",
    ]


def test_globs_and_mixed_formats(words: list[str], tmp_path: Path) -> None:
    write_all_formats(tmp_path, words[:3])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "page.txt").write_text("a page\nof its own")
    data = data_of(tmp_path / "**" / "*", eval_fraction=0.5)
    assert data.facts.train_documents + data.facts.eval_documents == 3 * 5 + 1


def documents_in(file: Path, content: bytes) -> list[str]:
    file.write_bytes(content)
    return [document.text for document in read_files([file], text_in("text"), Skipped(0))]


@pytest.mark.parametrize("name", ["x.JSONL", "x.ndjson", "x.NDJSON"])
def test_records_are_recognised_by_every_spelling_of_their_suffix(name: str, tmp_path: Path) -> None:
    assert documents_in(tmp_path / name, b'{"text": "one"}\n{"text": "two"}\n') == ["one", "two"]


def test_a_text_file_of_json_lines_is_refused(tmp_path: Path) -> None:
    lines = b'\n{"text": "one"}\r\n\n  {"text": "two"}\n'
    with pytest.raises(DataError, match=r"x.jsonl.txt must be text, got a JSON object on every line; rename it"):
        documents_in(tmp_path / "x.jsonl.txt", lines)
    for other in (b'{"one": 1}\n', lines + b"and more\n", b"[1]\n[2]\n", b"{\n{\n", b"{" + b"[" * 99_999 + b"\n{}\n"):
        assert documents_in(tmp_path / "x.txt", other) == [other.decode()]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"id,text\n1,Hello, world\n", "x.csv:2: must have 2 fields as the first line has, got 3; put quotes around"),
        (
            b"text,id\nfirst line\nsecond line,1\n",
            "x.csv:2: must have 2 fields as the first line has, got 1; put quotes",
        ),
        (b'id,text\n1,a\n2,"b\n3,c\n', "x.csv:3: must be CSV, got: a quote that is opened there and never closed"),
        (b'text\n"two\nlines"\n"a"b\n', "x.csv:4: must be CSV, got: ',' expected after '\"'"),
        (b"\ntext,text\na,b\n", "x.csv:2: must name each column once, got 'text' twice"),
    ],
)
def test_csv_that_would_lose_content_when_read_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(says)):
        documents_in(tmp_path / "x.csv", content)


def test_a_quote_inside_of_csv_and_empty_lines_are_fine(tmp_path: Path) -> None:
    content = b'\n\ntext,id\na "b" c,1\n\n"a ""b"", c",2\n'
    assert documents_in(tmp_path / "x.csv", content) == ['a "b" c', 'a "b", c']


def test_a_damaged_table_is_one_line(words: list[str], tmp_path: Path) -> None:
    import pyarrow.parquet

    files = write_all_formats(tmp_path, words)
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"a b {i}" * 40 for i in range(200)]}), files["parquet"])
    damaged = bytearray(files["parquet"].read_bytes())
    damaged[500:600] = bytes(byte ^ 0xFF for byte in damaged[500:600])
    with pytest.raises(DataError, match=r"x.parquet must be a Parquet file, got .*; write the file again"):
        documents_in(tmp_path / "x.parquet", bytes(damaged))
    how: dict[str, Any] = {"compression": "NONE", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some text"]}), files["parquet"], write_statistics=False, **how)
    damaged = bytearray(files["parquet"].read_bytes().replace(b"some text", b"same text"))
    with pytest.raises(DataError, match=r"x.parquet must be a Parquet file, got .*; write the file again"):
        documents_in(tmp_path / "x.parquet", bytes(damaged))
    whole = files["arrow"].read_bytes()
    with pytest.raises(
        DataError, match=r"x.arrow must be an Arrow file, got Expected to be able to read .*; write the file"
    ):
        documents_in(tmp_path / "x.arrow", whole[: len(whole) // 2])
    offsets = whole.find(np.cumsum([0, *(len(text.encode()) for text in words)]).astype("<i4").tobytes())
    assert offsets > 0
    with pytest.raises(DataError, match=r"x.arrow must be an Arrow file, got .*offset"):
        documents_in(tmp_path / "x.arrow", whole[: offsets + 8] + b"\xff\xff\xff\x7f" + whole[offsets + 12 :])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EPERM], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.parquet"])
def test_an_unreadable_file_is_named_and_not_reported_as_a_disk_error(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, because root is never refused a file."""
    import pyarrow.parquet

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), name)

    (tmp_path / name).write_text("text")
    config = DataConfig(source="files", files=(str(tmp_path / name),))
    corpus = open_corpus(config, 0)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", refuse)
    for read in (lambda: list(corpus.train(Skipped(0))), lambda: open_corpus(config, 0)):
        with pytest.raises(DataError, match=rf"{tmp_path / name} must be readable, got: {os.strerror(number)}"):
            read()


def test_a_permission_error_on_a_file_is_not_a_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.runtime import explain

    (tmp_path / "x").touch()
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "x"))
    assert getattr(explain(error, None), "exit_code", None) == 8, "who may read it could not write it"
    monkeypatch.setattr(os, "access", lambda file, mode: False)
    explained = explain(error, None)
    assert (type(explained), getattr(explained, "exit_code", None)) == (DataError, 3)
    assert str(explained).startswith(f"{tmp_path / 'x'} must be readable, got:")


def test_every_bad_record_is_refused_or_counted_as_the_recipe_says(tmp_path: Path) -> None:
    bad = [
        '{"text": null}',
        '{"text": 5}',
        '{"text": ["a"]}',
        '{"text": ""}',
        '{"text": "\\ud800"}',
        "[1]",
        "7",
        "null",
    ]
    for line in bad:
        content = ('{"text": "good"}\n' + line + "\n").encode()
        with pytest.raises(DataError, match=r"x.jsonl:2: .*; correct it or raise data.skip_bad_rows"):
            documents_in(tmp_path / "x.jsonl", content)
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n' + "\n".join(bad) + "\n")
    skipped = Skipped(len(bad))
    assert [d.text for d in read_files([tmp_path / "x.jsonl"], text_in("text"), skipped)] == ["good"]
    assert skipped.count == len(bad)


@pytest.mark.parametrize("key", ["dataset_config", "dataset_split", "eval_split", "synthetic_tokens"])
def test_a_key_of_another_source_is_refused(key: str, text_file: Path) -> None:
    values: dict[str, Any] = {"source": "python_stdlib", key: 5000 if key == "synthetic_tokens" else "other"}
    with pytest.raises(ValidationError, match=f"{key} must be .* for source python_stdlib, got .*remove it"):
        DataConfig(**values)
    if key.endswith("_split"):
        part = {"files": str(text_file), "weight": 1}
        with pytest.raises(ValidationError, match=f"{key} must be .*; give each source of the mixture its own"):
            DataConfig.model_validate({"mixture": [part], key: "other"})
        with pytest.raises(ValidationError, match=f"{key} must be left out without dataset"):
            DataConfig.model_validate({"mixture": [part | {key: "other"}]})


def test_hub_takes_a_local_folder_as_a_data_set(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in words))
    config = DataConfig(source="hub", dataset=str(tmp_path), sequence_length=16)
    data = build_data(config, BYTE, None, 0, 1)
    assert sorted(documents_of(data, data.train) + documents_of(data, data.evaluation)) == sorted(words)


def test_a_local_data_set_is_identified_by_its_records_not_by_place_or_time(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def data_in(name: str, texts: list[str]) -> Data:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "train.jsonl").write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in texts))
        os.utime(tmp_path / name / "train.jsonl", (len(os.listdir(tmp_path)), next(times)))
        return build_data(DataConfig(source="hub", dataset=str(tmp_path / name), sequence_length=16), BYTE, None, 0, 1)

    times = iter(range(1000, 2000, 100))
    first = data_in("here", words)
    monkeypatch.setattr("acc_lm.data.one_source._build", lambda *_: pytest.fail("built again"))
    assert data_in("here", words).key == data_in("there", words).key == first.key
    monkeypatch.undo()
    assert data_in("here", words[::-1]).key != first.key
    assert data_in("here", [*words[1:], words[0] + "."]).key != first.key


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_tokenizers_lose_nothing_even_of_unseen_text(kind: str, words: list[str]) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind=kind, vocab_size=320), words)
    encoder = text_encoder(tokenizer)
    for text in (words[0], "Ω new\t 字 👩‍👩‍👧 \n\n end", "a <|endoftext|> inside is text"):
        encoding = encoder.encode(text, add_special_tokens=False)
        assert tokenizer.eos_token_id not in encoding.ids
        assert tokenizer.decode(encoding.ids, clean_up_tokenization_spaces=False) == text
        assert token_bytes(text, encoding.offsets).sum() == len(text.encode())
    if kind == "byte":
        assert len(tokenizer) == 257
    if kind == "bpe":
        assert len(tokenizer) == 320
        assert len(encoder.encode(words[0]).ids) < len(words[0].encode()) / 2


def test_a_bpe_is_trained_on_the_training_split_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcabcabc " * 200)
    (tmp_path / "b.txt").write_text("xyzxyzxyz " * 200)
    data = data_of(
        tmp_path / "a.txt", tokenizer=TokenizerConfig(kind="bpe", vocab_size=265), eval_files=(str(tmp_path / "b.txt"),)
    )
    vocabulary = data.tokenizer.get_vocab()
    assert "abc" in vocabulary
    assert not any("xy" in token for token in vocabulary)


def test_encoding_long_documents_in_pieces_leaves_no_trace() -> None:
    text = "".join(f"word {i} of a line\n" for i in range(PIECE // 12))
    encoder = text_encoder(make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), [text[:5000]]))
    pieces = cut_text(text, encoder)
    assert len(pieces) > 1
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in encoder.encode(piece).ids] == encoder.encode(text).ids
    assert cut_text("no line break at all" * (PIECE // 10), encoder)[0]


def prefixing_tokenizer(**vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer that knows complete words, and marks where a text begins as sentencepiece does."""
    vocabulary = {"<eos>": 0, "<unk>": 1} | {name.replace("_", "▁"): number for name, number in vocabulary.items()}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


def test_a_long_document_has_one_start_mark_if_the_tokenizer_sets_one(tmp_path: Path) -> None:
    tokenizer = prefixing_tokenizer(_a=2, _b=3)
    text = "a\n b\n" * (PIECE // 4)
    encoder = text_encoder(tokenizer)
    assert cut_text(text, encoder) == [text]
    assert cut_text(text[:PIECE], encoder) == [text[:PIECE]]
    (tmp_path / "x.txt").write_text(text)
    config = DataConfig(source="files", files=(str(tmp_path / "x.txt"),))
    assert build_data(config, BYTE, tokenizer, 0, 1).former_key is None, "a checkpoint may have learned other ids"
    (tmp_path / "x.txt").write_text(text[:PIECE])
    assert build_data(config, BYTE, tokenizer, 0, 1).former_key is not None


@pytest.mark.parametrize("how", ["rows", "streaming", "evaluation set", "conversations"])
def test_ids_above_16_bits_are_kept_exactly_in_a_vocabulary_with_holes(how: str, tmp_path: Path) -> None:
    assert [id_dtype(size) for size in (65536, 65537)] == [np.uint16, np.uint32]
    tokenizer = prefixing_tokenizer(_red=70_000, _green=70_001, _blue=2, red=5)
    length = 16 if how == "conversations" else 4
    file, config = tmp_path / "x.jsonl", {"source": "files", "sequence_length": length}
    if how == "conversations":
        tokenizer.chat_template = (
            "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"
        )
        record: dict[str, str] = {"prompt": "red green", "completion": " green blue red"}
    else:
        record = {"text": "red green blue " * 9}
    file.write_text((json.dumps(record) + "\n") * 2 + json.dumps({key: f"{text} red" for key, text in record.items()}))
    if how == "streaming":
        config |= {"streaming": True, "num_streams": 1}
    sets = {"set": str(file)} if how == "evaluation set" else {}
    fraction = {"eval_fraction": 0.5} if how == "conversations" else {"eval_files": str(file)}
    data = build_data(
        DataConfig.model_validate(config | fraction | {"files": str(file), "evaluation_sets": sets}),
        BYTE,
        tokenizer,
        0,
        1,
    )
    assert data.facts.vocab_size == 70_002
    assert data.former_key is None, "a checkpoint learned other ids"
    rows: list[Any] = [data.evaluation, *data.evaluation_sets.values()]
    if how == "streaming":
        order = data.order(0, 1)
        with data.reading(order, 0, None, 0, 1):
            rows.append([data.train.__getitems__([0])])
            found = [set(part[0]["input_ids"].flatten().tolist()) for part in rows]
    else:
        rows.append(data.train)
        found = [{i for row in range(len(part)) for i in part[row]["input_ids"].flatten().tolist()} for part in rows]
    assert all({70_000, 70_001} & ids and ids <= {0, 1, 2, 5, 70_000, 70_001} for ids in found), found


def test_the_cache_is_found_again_wherever_the_files_are(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    first = data_of(text_file)
    (tmp_path / text_file.name).write_bytes(text_file.read_bytes())
    monkeypatch.setattr("acc_lm.data.one_source._build", lambda *_: pytest.fail("built again"))
    second = data_of(tmp_path / text_file.name)
    assert first.key == second.key
    assert np.array_equal(first.train.tokens, second.train.tokens)


@pytest.mark.parametrize(
    "change", [{"eval_fraction": 0.3}, {"text_column": "text2"}, {"tokenizer": TokenizerConfig(kind="char")}]
)
def test_everything_that_decides_the_rows_is_in_the_key(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": f"a {i} b" * 9, "text2": f"c {i}" * 9}) + "\n" for i in range(9))
    )
    assert data_of(tmp_path / "x.jsonl").key != data_of(tmp_path / "x.jsonl", **change).key


def test_changed_content_changes_the_key(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_text("one text " * 100)
    before = data_of(file).key
    file.write_text("two text " * 100)
    assert data_of(file).key != before


@pytest.mark.parametrize("kind", ["rows", "tokenizer", "evaluation set", "stream"])
def test_a_file_written_to_while_it_is_read_leaves_nothing_in_the_cache(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"text": f"some text {i} " * 9}) + "\n" for i in range(40)))
    original = file.read_bytes()
    values: dict[str, Any] = {"source": "files", "files": str(file), "sequence_length": 16}
    tokenizer = None if kind == "tokenizer" else make_tokenizer(BYTE, [])
    if kind == "tokenizer":
        values = {"mixture": [{"files": str(file), "weight": 1}], "sequence_length": 16}
    if kind in ("evaluation set", "stream"):
        (tmp_path / "train.txt").write_text("train on this " * 99)
        values |= {"files": str(tmp_path / "train.txt")}
    if kind == "evaluation set":
        build_data(DataConfig.model_validate(values), BYTE, tokenizer, 0, 1)  # only the set is left to be read
        values |= {"evaluation_sets": {"set": str(file)}}
    if kind == "stream":
        values |= {"eval_files": str(file), "streaming": True, "num_streams": 1}

    def build() -> Data:
        made_of_text = TokenizerConfig(kind="char")
        return build_data(DataConfig.model_validate(values), made_of_text, tokenizer, 0, 1)

    def grow(self: Skipped, allowed: int, count: int = 0) -> None:
        """Called when reading begins."""
        if file.read_bytes() == original:
            file.write_bytes(original + b'{"text": "more"}\n')
        self.allowed, self.count = allowed, count

    with monkeypatch.context() as planted:
        planted.setattr(Skipped, "__init__", grow)
        with pytest.raises(
            DataError, match=f"{file} must not change while it is read, got different content at the end"
        ):
            build()
    file.write_bytes(original)
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "other"))
    expected = build()
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    assert (build().facts, build().set_facts) == (expected.facts, expected.set_facts)


def test_rows_made_by_an_earlier_version_are_found_by_the_key_that_it_gave_them(tmp_path: Path) -> None:
    """Keys recorded with that version: a run that it began resumes."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(40)))
    (tmp_path / "b.txt").write_text("a book " * 200)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.txt"
    assert data_of(a).former_key == "c488f9ab00ef8974a52eab0732e28b4d"
    assert data_of(b).former_key == "5717e8d6a56ee7641047526b6521296e"
    assert data_of(a, eval_files=(str(b),)).former_key == "c1a650e08ae753e51944b5f015dd963f"
    synthetic = DataConfig(source="synthetic", synthetic_tokens=5000, sequence_length=16)
    assert build_data(synthetic, BYTE, None, 0, 1).former_key == "40cfa95eb84848b754bd996eae67553b"
    parts = [{"files": str(file), "weight": 1} for file in (a, b)]
    mixture = build_data(DataConfig.model_validate({"mixture": parts, "sequence_length": 16}), BYTE, None, 0, 1)
    assert mixture.former_key == "2b9d8b09207f41235ed491c4449a3ef6"
    assert data_of(a).key != data_of(a).former_key
    a.rename(tmp_path / "a.ndjson")
    assert data_of(tmp_path / "a.ndjson").former_key is None, "it was one text for that version"
    (tmp_path / "big.txt").write_text("very long " * 200)
    assert data_of(b, tmp_path / "big.txt", eval_fraction=0.1).former_key is None, "half of it was held out"


def test_a_renamed_file_is_the_same_text(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "renamed.jsonl").write_bytes(text_file.read_bytes())
    (tmp_path / "renamed.txt").write_bytes(b"start\n" + text_file.read_bytes())
    assert data_of(tmp_path / "renamed.jsonl").key == data_of(text_file).key
    assert data_of(tmp_path / "renamed.txt").key != data_of(text_file).key


def test_a_cache_without_locks_and_flushes_costs_a_line_each(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from acc_lm.cache import make_once, write_facts

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    expected = data_of(text_file)
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    data = data_of(text_file)
    assert np.array_equal(data.train.tokens, expected.train.tokens)  # type: ignore[union-attr]
    notes = capsys.readouterr().err.splitlines()
    assert [note.split(" (")[0] for note in notes] == [
        f"note: {tmp_path / 'cache'} has no file locks", "note: the cache is on a file system that cannot flush",
    ]  # fmt: skip

    def build(work: Path) -> None:
        """While another process has reached the same point."""
        (work / "mine").touch()
        if not (tmp_path / "cache/key").exists():
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(os, "getpid", lambda: 0)
                make_once(tmp_path / "cache", "key", lambda other: write_facts(other, {"of": "other"}), True)
        assert (work / "mine").exists(), "without a lock nothing is a leftover for certain"
        write_facts(work, {"of": "mine"})

    folder = make_once(tmp_path / "cache", "key", build, True)
    assert json.loads((folder / "facts.json").read_text())["of"] == "other"
    assert [path.name for path in (tmp_path / "cache").glob(".key*")] == []
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        make_once(tmp_path / "cache", "other", lambda work: write_facts(work, {}), True)


def test_a_cache_that_is_killed_while_built_or_damaged_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "x.txt"
    file.write_text("".join(f"some text {i}\n" for i in range(300_000)))

    def build() -> None:
        data_of(file, tokenizer=TokenizerConfig(kind="bpe", vocab_size=600))

    def complete() -> list[Path]:
        found = (path.parent for path in (tmp_path / "cache").glob("*/facts.json"))
        return [folder for folder in found if (folder / "train.bin").exists()]  # the memo of the text has only facts

    for delay in (0.02, 0.1, 0.25):
        launch = Launch(build)  # type: ignore[arg-type]
        end = time.monotonic() + 20
        while not list((tmp_path / "cache").glob(".*/*")) and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(delay)
        os.kill(launch.pids[0], signal.SIGKILL)
        os.waitpid(launch.pids[0], 0)
    assert not complete(), "killed too late to show anything"
    whole = data_of(file, tokenizer=TokenizerConfig(kind="bpe", vocab_size=600))
    assert not list((tmp_path / "cache").glob(".*")), "leftovers are removed"
    tokens = np.array(whole.train.tokens)
    (folder,) = complete()
    with (folder / "train.bin").open("ab") as damaged:
        damaged.truncate(100)
    again = data_of(file, tokenizer=TokenizerConfig(kind="bpe", vocab_size=600))
    assert np.array_equal(tokens, again.train.tokens)


def test_the_loader_reads_exactly_the_requested_rows_with_and_without_workers(text_file: Path) -> None:
    data = data_of(text_file)
    batches = MicroBatches(
        RowOrder(0, len(data.train), 8), micro_batch_size=4, process=0, num_processes=1, first_step=2, last_step=6
    )
    loaded = [list(build_loader(data.train, batches, workers, pin_memory=False)) for workers in (0, 2)]
    assert len(loaded[0]) == len(batches) == 10
    for rows, one, other in zip(batches, *loaded, strict=True):
        expected = data.train.__getitems__(rows)
        for name in ("input_ids", "targets"):
            assert torch.equal(one[name], expected[name])
            assert torch.equal(other[name], expected[name])


def test_too_little_text_is_refused_before_a_tokenizer_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acc_lm.data.one_source.make_tokenizer", lambda *_: pytest.fail("trained a tokenizer"))
    (tmp_path / "x.txt").write_text("tiny text, really")
    with pytest.raises(
        DataError,
        match=r"must fill a row of data.sequence_length 64 \+ 1 tokens, got at most 1[0-9]; lower it or add text",
    ):
        data_of(tmp_path / "x.txt", sequence_length=64)
    with pytest.raises(
        DataError, match=r"must fill training.global_batch_size 8 rows, got at most 1 row of 16 tokens; lower it"
    ):
        data_of(tmp_path / "x.txt", batch=8)


def test_the_standard_library_is_found_without_its_tests() -> None:
    files = python_stdlib_files()
    assert len(files) > 300
    assert any(file.name == "argparse.py" for file in files)
    assert not any(
        {"test", "tests", "site-packages"} & set(file.parts) for file in files if "lib2to3" not in file.parts
    )
    split = split_documents(open_corpus(DataConfig(), 0), DataConfig())
    train, held_out, sizes = split.train, split.evaluation, split.counts
    names = [{document.file for document in side()} for side in (train, held_out)]
    assert not names[0] & names[1]
    assert sizes["eval_documents"] == len(names[1])


def test_the_synthetic_source_has_the_entropy_it_claims() -> None:
    config = DataConfig(source="synthetic", synthetic_tokens=300_000, eval_fraction=0.2)
    corpus = open_corpus(config, 3)
    transitions = transition_matrix(3)
    assert np.allclose(transitions.sum(axis=1), 1)
    from acc_lm.text.documents import Skipped
    from acc_lm.text.synthetic import SYMBOLS

    (train,) = corpus.train(Skipped(0))
    (held_out,) = corpus.evaluation(Skipped(0))  # type: ignore[misc]
    assert len(train.text) == 300_000
    assert len(held_out.text) == 60_000
    assert held_out.text[:1000] not in train.text
    states = np.array([SYMBOLS.index(c) for c in train.text])
    empirical = -np.log(transitions[states[:-1], states[1:]])
    assert abs(empirical.mean() - entropy_rate(transitions)) < 4 * empirical.std() / math.sqrt(len(empirical))
    assert 1.5 < entropy_rate(transitions) < math.log(64) - 0.5


def test_both_splits_keep_documents_apart_on_request(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(40)))
    apart = data_of(tmp_path / "text.jsonl", attend_across_documents=False)
    together = data_of(tmp_path / "text.jsonl")
    assert (apart.packs, together.packs) == (True, False)
    for split in ("train", "evaluation"):
        batch, plain = getattr(apart, split)[0], getattr(together, split)[0]
        assert set(batch) - set(plain) == {"position_ids", "document_ids"}
        assert all(torch.equal(plain[key], batch[key]) for key in plain), "the same rows"
        assert batch["document_ids"].max() > 0


def test_after_the_end_of_the_text_a_row_holds_the_first_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what the memory held before, which may be no id."""
    monkeypatch.setattr("acc_lm.rows.text_rows.np.empty", lambda shape, dtype: np.full(shape, 10**9, dtype))
    rows = Rows(np.arange(1, 11, dtype=np.uint16), 4)
    batch = rows.__getitems__([1, 2, -1])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0], [0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[6, 7, 8, 9], [10, *[-100] * 3], [-100] * 4]


@pytest.mark.parametrize("kind", ["text", "documents apart", "stream", "mixture"])
def test_every_tensor_of_a_batch_has_its_own_memory(kind: str, text_file: Path) -> None:
    """A part of a larger tensor would be copied to a GPU through memory that is not pinned, and the host would wait."""
    end = 0 if kind == "documents apart" else None
    rows: Any = Rows(np.arange(1, 15, dtype=np.uint16), 4, end=end)  # the last row is short
    if kind == "stream":
        rows = data_of(text_file, streaming=True, num_streams=1, eval_files=(str(text_file),)).train
    elif kind == "mixture":
        rows = MixedRows([rows, rows])
    for numbers in ([0, 1, 2, 3], [3]):
        batch = rows.__getitems__(numbers)
        assert all(tensor.is_contiguous() for tensor in batch.values())
        storages = {tensor.untyped_storage().data_ptr() for tensor in batch.values()}
        assert len(storages) == len(batch)
