"""Text -> documents -> rows: nothing lost, nothing twice, nothing on both sides of the split."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Launch

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data import Data, build_data
from acc_lm.documents import split_documents
from acc_lm.errors import DataError
from acc_lm.mixture import MixedRows
from acc_lm.order import MicroBatches, RowOrder
from acc_lm.rows import Rows, build_loader
from acc_lm.sources import entropy_rate, open_corpus, python_stdlib_files, transition_matrix
from acc_lm.tokenizer import PIECE, make_tokenizer, pieces_of, text_encoder, token_bytes

BYTE = TokenizerConfig(kind="byte")


def data_of(*files: Path, tokenizer: TokenizerConfig = BYTE, batch: int = 1, **keys: Any) -> Data:
    config = DataConfig(
        source="files", files=tuple(map(str, files)), sequence_length=keys.pop("sequence_length", 16), **keys
    )
    return build_data(config, tokenizer, None, 0, batch)


def all_ids(rows: Rows) -> list[int]:
    """The tokens of a split, put together again from its rows."""
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


def test_every_document_comes_back_whole_on_one_side(text_file: Path, words: list[str]) -> None:
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
    data = data_of(tmp_path / "x.csv", eval_fraction=0.01, sequence_length=4)
    assert sorted(documents_of(data, data.train) + documents_of(data, data.evaluation)) == [
        "one\u2028still one\x0cand on",
        "two\nlines",
    ]


def test_globs_and_mixed_formats(words: list[str], tmp_path: Path) -> None:
    write_all_formats(tmp_path, words[:3])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "page.txt").write_text("a page\nof its own")
    data = data_of(tmp_path / "**" / "*", eval_fraction=0.01)
    assert data.facts.train_documents + data.facts.eval_documents == 3 * 5 + 1


def test_hub_takes_a_local_folder_as_a_data_set(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in words))
    config = DataConfig(source="hub", dataset=str(tmp_path), sequence_length=16)
    data = build_data(config, BYTE, None, 0, 1)
    assert sorted(documents_of(data, data.train) + documents_of(data, data.evaluation)) == sorted(words)


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_tokenizers_lose_nothing_even_of_text_they_have_not_seen(kind: str, words: list[str]) -> None:
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


def test_long_documents_are_encoded_in_pieces_without_a_trace() -> None:
    text = "".join(f"word {i} of a line\n" for i in range(PIECE // 12))
    pieces = pieces_of(text)
    assert len(pieces) > 1
    assert "".join(pieces) == text
    encoder = text_encoder(make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), [text[:5000]]))
    assert [i for piece in pieces for i in encoder.encode(piece).ids] == encoder.encode(text).ids
    assert pieces_of("no line break at all" * (PIECE // 10))[0]


def test_vocabularies_above_16_bits_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.data import _id_dtype

    assert [_id_dtype(size) for size in (65536, 65537)] == [np.uint16, np.uint32]


def test_the_cache_is_found_again_wherever_the_files_lie(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    first = data_of(text_file)
    (tmp_path / text_file.name).write_bytes(text_file.read_bytes())
    monkeypatch.setattr("acc_lm.data._build", lambda *_: pytest.fail("built again"))
    second = data_of(tmp_path / text_file.name)
    assert first.key == second.key
    assert np.array_equal(first.train.tokens, second.train.tokens)


@pytest.mark.parametrize(
    "change", [{"eval_fraction": 0.3}, {"text_column": "text2"}, {"tokenizer": TokenizerConfig(kind="char")}]
)
def test_what_decides_the_rows_decides_the_key(change: dict[str, Any], tmp_path: Path) -> None:
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


def test_a_cache_that_is_killed_while_built_or_damaged_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "x.txt"
    file.write_text("".join(f"some text {i}\n" for i in range(150_000)))

    def build() -> None:
        data_of(file, tokenizer=TokenizerConfig(kind="bpe", vocab_size=600))

    for delay in (0.05, 0.3, 0.6):
        launch = Launch(build)  # type: ignore[arg-type]
        end = time.monotonic() + 20
        while not list((tmp_path / "cache").glob(".*/*")) and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(delay)
        os.kill(launch.pids[0], signal.SIGKILL)
        os.waitpid(launch.pids[0], 0)
    assert not list((tmp_path / "cache").glob("*/facts.json")), "killed too late to show anything"
    whole = data_of(file, tokenizer=TokenizerConfig(kind="bpe", vocab_size=600))
    assert not list((tmp_path / "cache").glob(".*")), "leftovers are removed"
    tokens = np.array(whole.train.tokens)
    (folder,) = (path.parent for path in (tmp_path / "cache").glob("*/facts.json"))
    with (folder / "train.bin").open("ab") as damaged:
        damaged.truncate(100)
    again = data_of(file, tokenizer=TokenizerConfig(kind="bpe", vocab_size=600))
    assert np.array_equal(tokens, again.train.tokens)


def test_the_loader_reads_exactly_the_asked_rows_with_and_without_workers(text_file: Path) -> None:
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
    monkeypatch.setattr("acc_lm.data.make_tokenizer", lambda *_: pytest.fail("trained a tokenizer"))
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
    train, held_out, sizes = split_documents(open_corpus(DataConfig(), 0), DataConfig())
    names = [{document.file for document in side()} for side in (train, held_out)]
    assert not names[0] & names[1]
    assert sizes["eval_documents"] == len(names[1])


def test_the_synthetic_source_has_the_entropy_it_claims() -> None:
    config = DataConfig(source="synthetic", synthetic_tokens=300_000, eval_fraction=0.2)
    corpus = open_corpus(config, 3)
    transitions = transition_matrix(3)
    assert np.allclose(transitions.sum(axis=1), 1)
    from acc_lm.sources import SYMBOLS, Skipped

    (train,) = corpus.train(Skipped(0))
    (held_out,) = corpus.evaluation(Skipped(0))  # type: ignore[misc]
    assert len(train.text) == 300_000
    assert len(held_out.text) == 60_000
    assert held_out.text[:1000] not in train.text
    states = np.array([SYMBOLS.index(c) for c in train.text])
    empirical = -np.log(transitions[states[:-1], states[1:]])
    assert abs(empirical.mean() - entropy_rate(transitions)) < 4 * empirical.std() / math.sqrt(len(empirical))
    assert 1.5 < entropy_rate(transitions) < math.log(64) - 0.5


def test_both_splits_keep_documents_apart_when_asked(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(40)))
    apart = data_of(tmp_path / "text.jsonl", attend_across_documents=False)
    together = data_of(tmp_path / "text.jsonl")
    assert (apart.packs, together.packs) == (True, False)
    for split in ("train", "evaluation"):
        batch, plain = getattr(apart, split)[0], getattr(together, split)[0]
        assert set(batch) - set(plain) == {"position_ids", "document_ids"}
        assert all(torch.equal(plain[key], batch[key]) for key in plain), "the same rows"
        assert batch["document_ids"].max() > 0


def test_behind_the_end_of_the_text_a_row_holds_the_first_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not whatever the memory held: it may be no id at all."""
    monkeypatch.setattr("acc_lm.rows.np.empty", lambda shape, dtype: np.full(shape, 10**9, dtype))
    rows = Rows(np.arange(1, 11, dtype=np.uint16), 4)
    batch = rows.__getitems__([1, 2, -1])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0], [0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[6, 7, 8, 9], [10, *[-100] * 3], [-100] * 4]


@pytest.mark.parametrize("kind", ["text", "documents apart", "stream", "mixture"])
def test_every_tensor_of_a_batch_has_memory_of_its_own(kind: str, text_file: Path) -> None:
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
