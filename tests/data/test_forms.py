"""Data in the forms that people have: each gives the ids of its plain form, or one line that says what to do."""

from __future__ import annotations

import bz2
import csv
import gzip
import http.server
import json
import lzma
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.config.data import SourceConfig
from acc_lm.data import Data, build_data
from acc_lm.errors import DataError, UserError
from acc_lm.rows.packing import PackedRows
from acc_lm.text.locations import find_files

BYTE = TokenizerConfig(kind="byte")
TEXTS = [f"{number} " + "one line of text " * (3 + number % 5) for number in range(40)]
RECORDS = [{"text": text} for text in TEXTS]
PAIRS = [(f"what is {number} plus {number}?", f"it is {2 * number}.") for number in range(30)]


def build(**keys: Any) -> Data:
    given: dict[str, Any] = {"sequence_length": 64, "eval_fraction": 0.2} | keys
    return build_data(DataConfig.model_validate(given), BYTE, None, 0, 1)


def ids(data: Data) -> list[tuple[bytes, ...]]:
    """Everything that the rows of both splits are made of."""
    found = []
    for rows in (data.train, data.evaluation):
        assert hasattr(rows, "tokens") or isinstance(rows, PackedRows)
        batch = [rows[row] for row in range(len(rows))]  # type: ignore[index, arg-type]
        found += [tuple(tensor.numpy().tobytes() for tensor in row.values()) for row in batch]
    assert len(found) > 2
    return found


def lines_of(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    file = tmp_path / "plain.jsonl"
    file.write_text(lines_of(RECORDS))
    return file


# --- places --------------------------------------------------------------------------------------------------------


def zstandard(raw: bytes) -> bytes:
    half = len(raw) // 2  # several frames, as parallel compressors write
    return b"".join(pyarrow.compress(part, codec="zstd", asbytes=True) for part in (raw[:half], raw[half:]))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard,
    "GZ": gzip.compress,
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compressed_file_is_its_content(tmp_path: Path, plain: Path, suffix: str) -> None:
    packed = tmp_path / f"packed.jsonl.{suffix}"
    packed.write_bytes(COMPRESSORS[suffix](plain.read_bytes()))
    before, after = build(files=[str(plain)]), build(files=[str(packed)])
    assert ids(after) == ids(before)
    assert after.key == before.key, "a checkpoint of one goes on with the other"


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.json", "a.ndjson"])
def test_every_format_but_tables_can_be_compressed(tmp_path: Path, name: str) -> None:
    contents = {
        "a.txt": "\n".join(TEXTS),
        "a.csv": "text\n" + "\n".join(TEXTS),
        "a.json": json.dumps(RECORDS),
        "a.ndjson": lines_of(RECORDS),
    }
    (tmp_path / name).write_text(contents[name])
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(contents[name].encode()))
    assert ids(build(files=[str(tmp_path / f"{name}.gz")])) == ids(build(files=[str(tmp_path / name)]))


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_compressed_file_is_one_line(tmp_path: Path, plain: Path, suffix: str, damage: str) -> None:
    raw = COMPRESSORS[suffix](plain.read_bytes())
    packed = tmp_path / f"packed.jsonl.{suffix}"
    packed.write_bytes(raw[:-9] if damage == "cut" else b"no such data" * 9)
    with pytest.raises(DataError, match=rf"packed.jsonl.{suffix} must be a complete .{suffix} file, got: .*again$"):
        build(files=[str(packed)])


def test_an_error_in_a_compressed_file_names_its_line(tmp_path: Path) -> None:
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress((lines_of(RECORDS[:3]) + "{oops\n").encode()))
    with pytest.raises(DataError, match=r"packed.jsonl.gz:4: must be a JSON object"):
        build(files=[str(packed)])


def test_a_compressed_table_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_list(RECORDS).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    with pytest.raises(DataError, match=r"a.parquet.gz must be a .parquet file as it is, .*; decompress it"):
        build(files=[str(tmp_path / "a.parquet.gz")])


def test_a_folder_is_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git/config").write_bytes(b"\xff hidden")
    (folder / "__init__.py").write_text("")
    names = ("a.txt", "b/c.jsonl", "d.txt")
    for name, content in zip(names, ("\n".join(TEXTS), lines_of(RECORDS), TEXTS[0]), strict=True):
        (folder / name).write_text(content)
    assert find_files((str(folder),), "data.files") == [folder / name for name in names]
    assert ids(build(files=[str(folder)])) == ids(build(files=[str(folder / name) for name in names]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data.files must name a folder with files, got '.*/empty' without any"):
        find_files((str(tmp_path / "empty"),), "data.files")


@pytest.mark.parametrize("key", ["files", "dataset"])
def test_a_folder_from_save_to_disk(tmp_path: Path, key: str) -> None:
    order = np.random.default_rng(0).permutation(40)
    dataset = datasets.Dataset.from_list(RECORDS).select(order)
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "shuffled.jsonl").write_text(lines_of([RECORDS[number] for number in order]))
    given = str(tmp_path / "saved")
    assert ids(build(**{key: [given] if key == "files" else given})) == ids(
        build(files=[str(tmp_path / "shuffled.jsonl")])
    )


def test_a_link_to_a_folder_around_it_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "corpus/inner").mkdir(parents=True)
    (tmp_path / "corpus/inner/a.txt").write_text("a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/b.txt").write_text("b")
    (tmp_path / "corpus/inner/around").symlink_to(tmp_path / "corpus")
    (tmp_path / "corpus/inner/self").symlink_to(tmp_path / "corpus/inner")
    (tmp_path / "corpus/linked").symlink_to(tmp_path / "other")
    found = find_files((str(tmp_path / "corpus"),), "data.files")
    assert [str(file.relative_to(tmp_path / "corpus")) for file in found] == ["inner/a.txt", "linked/b.txt"]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.zip"])
def test_an_archive_is_no_text(name: str, tmp_path: Path) -> None:
    """The headers of an archive by tar are valid UTF-8, and would be learned."""
    import tarfile

    (tmp_path / "a.txt").write_text("words " * 99)
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as archive:
        archive.add(tmp_path / "a.txt")
    with pytest.raises(DataError, match="must be text or records, got an archive; unpack it"):
        build(files=[str(tmp_path / name)])


def test_a_binary_file_in_a_folder_is_named(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(DataError, match=r"picture.png: must be text in UTF-8, got binary data; leave it out"):
        build(files=[str(tmp_path)])


def test_saved_datasets_of_several_splits(tmp_path: Path, plain: Path) -> None:
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(RECORDS), test=datasets.Dataset.from_list([{"text": "held out " * 20}])
    )
    both.save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"must name one split of the saved datasets in .*saved, got all .*test, train"):
        build(files=[str(tmp_path / "saved")])
    (tmp_path / "held_out.jsonl").write_text(lines_of([{"text": "held out " * 20}]))
    wanted = ids(build(files=[str(plain)], eval_files=[str(tmp_path / "held_out.jsonl")]))
    assert ids(build(files=[str(tmp_path / "saved/train")], eval_files=[str(tmp_path / "saved/test")])) == wanted
    assert ids(build(dataset=str(tmp_path / "saved"), eval_split="test")) == wanted


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_remote_file_is_fetched_once_per_version(tmp_path: Path, plain: Path, server: str) -> None:
    served = tmp_path / "served/data.jsonl.gz"
    served.write_bytes(gzip.compress(plain.read_bytes()))
    address = f"{server}/data.jsonl.gz"
    assert ids(build(files=[address])) == ids(build(files=[str(plain)]))
    first, again = (find_files((address,), "data.files") for _ in range(2))
    assert first == again
    assert first[0].read_bytes() == served.read_bytes()
    served.write_bytes(gzip.compress(lines_of(RECORDS[:-1]).encode()))
    assert find_files((address,), "data.files")[0].read_bytes() == served.read_bytes()
    with pytest.raises(DataError, match=r"data.files must name remote files that can be read, got '.*/none.jsonl'"):
        build(files=[f"{server}/none.jsonl"])


def test_remote_folders_and_globs(plain: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    for name in ("b.jsonl", "a.jsonl", ".hidden", "sub/c.jsonl"):
        system.pipe(f"/corpus/{name}", plain.read_bytes())
    try:
        for pattern, names in (
            ("memory://corpus", ["a.jsonl", "b.jsonl", "c.jsonl"]),
            ("memory://corpus/*", ["a.jsonl", "b.jsonl"]),
        ):
            found = find_files((pattern,), "data.files")
            assert [file.name for file in found] == names
            assert all(file.read_bytes() == plain.read_bytes() for file in found)
        with pytest.raises(
            DataError, match=r"data.files must match at least one remote file, got 'memory://corpus/\*.x'"
        ):
            find_files(("memory://corpus/*.x",), "data.files")
    finally:
        system.rm("/corpus", recursive=True)
    with pytest.raises(DataError, match=r"remote files that can be read, got 'nosuch://a': .*nosuch"):
        find_files(("nosuch://a",), "data.files")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("corpus/", "corpus"),
        ("a/corpus/*.txt", "corpus"),
        ("a/wiki.jsonl.gz", "wiki"),
        ("wiki.en.jsonl", "wiki-en"),
        ("s3://bucket/code.jsonl.zst", "code"),
    ],
)
def test_a_source_of_a_mixture_has_the_name_of_its_files(path: str, name: str) -> None:
    assert SourceConfig(files=(path,), weight=1).title == name


# --- columns and roles ---------------------------------------------------------------------------------------------


def conversation(pair: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]


def other_words(pair: tuple[str, str]) -> list[dict[str, str]]:
    return [{"speaker": "customer", "said": pair[0]}, {"speaker": "bot", "said": pair[1]}]


MESSAGES = [{"messages": conversation(pair)} for pair in PAIRS]
PLAIN_PAIRS = [{"prompt": question, "completion": answer} for question, answer in PAIRS]
FORMS: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "question and answer": (
        [{"id": 7, "question": question, "answer": answer} for question, answer in PAIRS],
        PLAIN_PAIRS,
        {"columns": {"prompt": "question", "completion": "answer"}},
    ),
    "the chosen answers": (
        [{"prompt": question, "chosen": answer, "rejected": "no"} for question, answer in PAIRS],
        PLAIN_PAIRS,
        {"columns": {"completion": "chosen"}},
    ),
    "the chosen conversations": (
        [{"prompt": pair[0], "chosen": conversation(pair), "rejected": []} for pair in PAIRS],
        MESSAGES,
        {"columns": {"messages": "chosen"}, "format": "messages"},
    ),
    "conversations of role and content": (
        [{"conversations": conversation(pair)} for pair in PAIRS],
        [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in PAIRS],
        {},
    ),
    "other keys and roles": (
        [{"messages": other_words(pair)} for pair in PAIRS],
        MESSAGES,
        {
            "columns": {"role": "speaker", "content": "said"},
            "roles": {"user": "customer", "assistant": ["agent", "bot"]},
        },
    ),
    "another column, other keys and roles": (
        [{"dialog": other_words(pair)} for pair in PAIRS],
        MESSAGES,
        {
            "columns": {"messages": "dialog", "role": "speaker", "content": "said"},
            "roles": {"user": "customer", "assistant": "bot"},
        },
    ),
    "other roles of ShareGPT": (
        [{"conversations": [{"from": "ich", "value": q}, {"from": "bot", "value": a}]} for q, a in PAIRS],
        [{"conversations": [{"from": "user", "value": q}, {"from": "assistant", "value": a}]} for q, a in PAIRS],
        {"roles": {"user": "ich", "assistant": "bot"}},
    ),
    "instruction in other columns": (
        [{"task": question, "result": answer, "output": "not this"} for question, answer in PAIRS],
        [{"instruction": question, "output": answer} for question, answer in PAIRS],
        {"columns": {"instruction": "task", "output": "result"}},
    ),
    "columns of another format": (
        [{"instruction": question, "output": answer} for question, answer in PAIRS],
        PLAIN_PAIRS,
        {"columns": {"prompt": "instruction", "completion": "output"}},
    ),
    "prompt and completion as messages of other roles": (
        [{"prompt": other_words(pair)[:1], "completion": other_words(pair)[1:]} for pair in PAIRS],
        [{"prompt": conversation(pair)[:1], "completion": conversation(pair)[1:]} for pair in PAIRS],
        {"columns": {"role": "speaker", "content": "said"}, "roles": {"user": "customer", "assistant": "bot"}},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_names_give_the_same_rows(tmp_path: Path, form: str) -> None:
    records, usual, keys = FORMS[form]
    held_out = [tmp_path / name for name in ("held_out.jsonl", "usual_held_out.jsonl")]
    files = [tmp_path / name for name in ("theirs.jsonl", "usual.jsonl")]
    for some, file, evaluation in zip((records, usual), files, held_out, strict=True):
        file.write_text(lines_of(some[:-5]))
        evaluation.write_text(lines_of(some[-5:]))
    theirs, ours = (
        build(files=[str(file)], eval_files=[str(evaluation)], sequence_length=256, **more)
        for file, evaluation, more in zip(files, held_out, (keys, {}), strict=True)
    )
    assert ids(theirs) == ids(ours)


def test_names_of_columns_apply_to_every_source_and_to_evaluation_sets(tmp_path: Path) -> None:
    theirs, ours = FORMS["question and answer"][:2]
    names = {"columns": {"prompt": "question", "completion": "answer"}}
    for name, records in (("theirs", theirs), ("ours", ours)):
        (tmp_path / f"{name}.jsonl").write_text(lines_of(records))
        datasets.Dataset.from_list(records).save_to_disk(tmp_path / name)
    a, b = (str(tmp_path / name) for name in ("theirs", "ours"))
    wanted = ids(build(files=[f"{b}.jsonl"], sequence_length=256))
    assert ids(build(files=[f"{a}.jsonl"], sequence_length=256, **names)) == wanted, "the same ones are held out"
    assert ids(build(dataset=a, sequence_length=256, **names)) == ids(build(dataset=b, sequence_length=256))
    extra = build(files=[f"{a}.jsonl"], sequence_length=256, evaluation_sets={"all": [f"{a}.jsonl"]}, **names)
    assert extra.set_facts["all"].documents == len(PAIRS)
    mixed = [{"files": [f"{a}.jsonl"], "weight": 1, **names}, {"files": [f"{b}.jsonl"], "weight": 1}]
    data = build(mixture=mixed, sequence_length=256)
    assert set(data.evaluation_sets) == {"theirs", "ours"}
    assert data.mixture is not None
    assert data.mixture.sizes[0] == data.mixture.sizes[1] > 0


def test_a_mapped_column_that_only_some_records_need_may_be_missing(tmp_path: Path) -> None:
    records = [
        {"messages": conversation(pair)} | ({"rules": "be kind"} if i % 2 else {}) for i, pair in enumerate(PAIRS)
    ]
    usual = [{("system" if key == "rules" else key): value for key, value in record.items()} for record in records]
    for name, some in (("theirs", records), ("usual", usual)):
        (tmp_path / f"{name}.jsonl").write_text(lines_of(some))
    theirs = build(files=[str(tmp_path / "theirs.jsonl")], sequence_length=256, columns={"system": "rules"})
    assert (
        theirs.facts.train_tokens
        == build(files=[str(tmp_path / "usual.jsonl")], sequence_length=256).facts.train_tokens
    )


def test_messages_as_json_in_a_cell(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text(lines_of(MESSAGES))
    with (tmp_path / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "messages"], *([7, json.dumps(record["messages"])] for record in MESSAGES)])
    table, plain = (build(files=[str(tmp_path / name)], sequence_length=256) for name in ("table.csv", "plain.jsonl"))
    assert ids(table) == ids(plain)
    (tmp_path / "table.csv").write_text('messages\n"[{""role"": ""user"", ""content"": ""a"""\n')
    with pytest.raises(DataError, match=r"table.csv:2: 'messages' must be a list of messages, or one as JSON, got '\["):
        build(files=[str(tmp_path / "table.csv")])
    (tmp_path / "table.csv").write_text('messages\n"[{""role"": ""user"", ""content"": ""\\ud800""}]"\n')
    with pytest.raises(DataError, match=r"table.csv:2: 'messages' must be Unicode text"):
        build(files=[str(tmp_path / "table.csv")])


QUESTIONS = FORMS["question and answer"][0]
PREFERENCES = FORMS["the chosen answers"][0]
REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "questions without names": (
        QUESTIONS,
        {},
        r"must have a column 'text', .*name questions and answers in data.columns",
    ),
    "a column that is missing": (
        QUESTIONS,
        {"columns": {"prompt": "question", "completion": "reply"}},
        r"must have a column 'reply', got 'id', 'question', 'answer'; correct data.columns.completion",
    ),
    "preferences": (
        PREFERENCES,
        {},
        r"preference data \(chosen and rejected\).*data.columns=\{completion: chosen\}, or data.columns=\{messages: chosen\}",
    ),
    "preferences without a prompt": (
        [{"chosen": conversation(pair), "rejected": []} for pair in PAIRS],
        {},
        r"preference data .*train on the chosen ones with data.columns=\{messages: chosen\}$",
    ),
    "names of the columns of text": (
        RECORDS,
        {"columns": {"prompt": "text"}, "format": "text"},
        r"data.columns must be empty for plain text, .*data.text_column",
    ),
    "a role that nobody named": (
        FORMS["other keys and roles"][0],
        {"columns": {"role": "speaker", "content": "said"}},
        r"messages\[0\].role must be system, user, assistant, tool or named in data.roles, got 'customer'",
    ),
    "conversations cut before their first target": (
        [{"messages": conversation(("why? " * 40, "because"))} for _ in range(2)] + MESSAGES[:0],
        {"sequence_length": 32, "eval_files": ["{file}"]},
        r"must have a target, got none in 2, 2 of them cut before their first target; raise data.sequence_length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_gets_one_line_with_the_way_out(tmp_path: Path, name: str) -> None:
    records, keys, message = REFUSED[name]
    file = tmp_path / "data.jsonl"
    file.write_text(lines_of(records))
    keys = {key: [str(file)] if value == ["{file}"] else value for key, value in keys.items()}
    with pytest.raises(UserError, match=message):
        build(files=[str(file)], **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"columns": {"text": "body"}}, "got 'text'; set data.text_column"),
        ({"columns": {"question": "prompt"}}, "got 'question'; write it as"),
        ({"columns": {"prompt": "a", "completion": "a"}}, "got 'a' twice"),
        ({"roles": {"bot": "assistant"}}, "must map some of system, user, assistant, tool, got 'bot'"),
        ({"roles": {"user": "a", "assistant": ["b", "a"]}}, "got 'a' twice"),
        ({"streaming": True, "eval_files": ["b.txt"], "roles": {"user": "a"}}, "roles must be empty for a stream"),
    ],
)
def test_names_that_cannot_be_meant_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"files": ["a.txt"], **keys})
