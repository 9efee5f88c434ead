"""Text cut into stretches: every process reads its own, and documents, errors and rows are those of one process."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data import Data, build_data, one_source
from acc_lm.errors import UserError
from acc_lm.text import corpus, files, splitting, stretches
from acc_lm.text.documents import Document, Skipped, text_in
from acc_lm.text.files import read_files
from acc_lm.text.parts import NO_PREPARATION, Preparation
from acc_lm.text.stretches import documents_in, stretches_of

TEXTS = [f"text {number}: " + "red tree sings, naïve as 日本. " * (1 + number % 9) for number in range(160)]


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "STRETCH", 3000)
    monkeypatch.setattr(one_source, "PART_OF_TEXT", 1000)
    monkeypatch.setattr(splitting, "PART_OF_TEXT", 1000)
    monkeypatch.setattr(corpus, "RECORDS", 50)


def write(folder: Path, form: str, texts: list[str] = TEXTS) -> list[str]:
    """The texts in a form, as `data.files` or `data.dataset`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    if form == "jsonl":
        (folder / "a.jsonl").write_text("\n".join(lines))
        return [str(folder / "a.jsonl")]
    if form == "gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
        return [str(folder / "a.jsonl.gz")]
    if form == "parquet":
        pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=7)
        return [str(folder / "a.parquet")]
    if form == "dataset":
        import datasets

        datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved")
        return [str(folder / "saved")]
    if form == "csv":
        for begin in range(0, len(texts), 20):
            (folder / f"{begin:03}.csv").write_text(
                "\n".join(["text", *(f'"{one}"' for one in texts[begin : begin + 20])])
            )
        return [str(folder / "*.csv")]
    for begin in range(0, len(texts), 20):  # many files of every kind
        if begin % 40:
            (folder / f"{begin:03}.jsonl").write_text("\n".join(lines[begin : begin + 20]))
        else:
            pq.write_table(pa.table({"text": texts[begin : begin + 20]}), folder / f"{begin:03}.parquet", 3)
    return [str(folder / "*.*")]


def build(where: list[str], cache: Path, preparation: Preparation = NO_PREPARATION, **keys: Any) -> Data:
    source = {"dataset": where[0], "source": "hub"} if where[0].endswith("saved") else {"files": where}
    given = source | {"sequence_length": 64, "eval_fraction": 0.1, "cache_dir": str(cache)} | keys
    return build_data(
        DataConfig.model_validate(given), TokenizerConfig(kind="byte"), None, 0, 1, preparation=preparation
    )


def contents(cache: Path, data: Data) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (cache / data.key).rglob("*") if file.is_file()}


FORMS = ["jsonl", "gz", "parquet", "dataset", "many", "csv"]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_same_bytes_and_is_read_by_the_processes(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").mkdir()
    where = write(tmp_path / "text", form)
    plain = build(where, tmp_path / "plain")
    readers = tmp_path / "readers"
    real = corpus.text_in

    def noted(column: str) -> Any:
        def read(*arguments: Any) -> Any:
            with readers.open("a") as file:
                file.write(f"{os.getpid()}\n")
            return real(column)(*arguments)

        return read

    monkeypatch.setattr(corpus, "text_in", noted)
    prepared = build(where, tmp_path / "prepared", Preparation(3, tmp_path / "unfinished"))
    assert contents(tmp_path / "prepared", prepared) == contents(tmp_path / "plain", plain)
    pids = readers.read_text().split()
    assert len(pids) == 2 * len(TEXTS), "each record is read once to be hashed, once to be encoded"
    assert (str(os.getpid()) in pids) == (form == "gz"), "only what cannot be cut is read here"
    assert form == "gz" or len(set(pids)) > 2


def test_texts_held_out_by_name_are_read_by_the_processes_too(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        (tmp_path / name).mkdir()
    train, held_out = write(tmp_path / "train", "jsonl"), write(tmp_path / "eval", "parquet")
    plain = build(train, tmp_path / "plain", eval_files=held_out)
    prepared = build(train, tmp_path / "prepared", Preparation(2, tmp_path / "unfinished"), eval_files=held_out)
    assert plain.facts.shared_documents == len(TEXTS)
    assert contents(tmp_path / "prepared", prepared) == contents(tmp_path / "plain", plain)


def test_names_of_whole_files_and_their_compressed_size_are_kept(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(TEXTS[number] * 2)
    where = [str(tmp_path / "*.txt")]
    plain = build(where, tmp_path / "plain", eval_fraction=0.4)
    prepared = build(where, tmp_path / "prepared", Preparation(2, tmp_path / "unfinished"), eval_fraction=0.4)
    assert len(plain.facts.eval_files) > 5
    assert plain.facts.xz_bytes
    assert prepared.facts == plain.facts


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
@pytest.mark.parametrize("num_bad", [1, 3])
def test_bad_records_are_counted_and_reported_as_in_one_process(
    form: str, num_bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {40: "", 90: "   ", 150: ""}
    texts = [bad.get(number, text) if number in list(bad)[:num_bad] else text for number, text in enumerate(TEXTS)]
    where = write(tmp_path, form, texts)
    found: list[Any] = []
    for name, preparation in (("plain", NO_PREPARATION), ("prepared", Preparation(3, tmp_path / "unfinished"))):
        for tolerated in (num_bad, num_bad - 1):
            try:
                data = build(where, tmp_path / name, preparation, skip_bad_rows=tolerated)
                found.append((data.facts.skipped_records, contents(tmp_path / name, data)))
            except UserError as refusal:
                found.append(str(refusal))
    assert found[:2] == found[2:]
    assert found[0][0] == num_bad
    assert "must hold text, got an empty string" in found[1]


@pytest.mark.parametrize(
    "damage",
    {
        "no JSON": lambda raw: raw.replace(b'{"text": "text 77', b'{"text" "text 77'),
        "no UTF-8": lambda raw: raw.replace(b"text 99", b"text \xff"),
        "no column": lambda raw: raw.replace(b'{"text": "text 120', b'{"other": "text 120'),
        "no object": lambda raw: raw.replace(b'{"text": "text 50', b'7\n{"text": "text 50'),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_an_error_names_the_line_wherever_the_file_is_cut(damage: Any, tmp_path: Path) -> None:
    (name,) = write(tmp_path, "jsonl")
    Path(name).write_bytes(damage[1](Path(name).read_bytes()))
    problems = []
    for preparation in (NO_PREPARATION, Preparation(3, tmp_path / "unfinished")):
        with pytest.raises(UserError) as refusal:
            build([name], tmp_path / "cache", preparation)
        problems.append(str(refusal.value))
    assert problems[0] == problems[1]
    assert f"{name}:" in problems[0]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lines=st.lists(st.sampled_from(["", " \t", '{"text": "a"}', '{"text": "' + "naïve 日本 " * 9 + '"}']), max_size=60),
    end=st.sampled_from(["\n", "\r\n"]),
    size=st.integers(1, 400),
    mark=st.booleans(),
    is_open=st.booleans(),
)
def test_the_parts_of_a_file_of_lines_hold_its_documents(
    lines: list[str], end: str, size: int, mark: bool, is_open: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    text = end.join(lines) + ("" if is_open else end)
    file.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    documents = documents_in([file], text_in("text"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretches, "STRETCH", size)
        patch.setattr(files, "BINARY", 10)
        cut = list(stretches_of([file]))
    assert documents.read_stretch is not None
    try:
        expected: list[Document] | str = list(read_files([file], text_in("text"), Skipped(0)))
        found: list[Document] | str = [one for part in cut for one in documents.read_stretch(part, Skipped(0))]
    except UserError as refusal:
        expected = str(refusal)
        with pytest.raises(UserError) as problem:
            [one for part in cut for one in documents.read_stretch(part, Skipped(0))]
        found = str(problem.value)
    assert found == expected
    assert len(cut) <= 1 + file.stat().st_size // size


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_parts_of_a_file_number_its_records(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "STRETCH", 400)
    (name,) = write(tmp_path, form, ["a", "b"] * 200)
    documents = documents_in([Path(name)], text_in("text"))
    assert documents.stretches is not None
    assert documents.read_stretch is not None
    cut = list(documents.stretches())
    assert len(cut) > 5
    found = [one for part in cut for one in documents.read_stretch(part, Skipped(0))]
    assert found == list(documents(Skipped(0)))


def test_a_line_that_is_too_long_is_refused_in_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (files, stretches):
        monkeypatch.setattr(room, "LONGEST_LINE", 5000)
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in [*TEXTS, "x" * 20_000, "end"]))
    problems = []
    for preparation in (NO_PREPARATION, Preparation(2, tmp_path / "unfinished")):
        with pytest.raises(UserError) as refusal:
            build([str(file)], tmp_path / "cache", preparation)
        problems.append(str(refusal.value))
    assert problems[0] == problems[1]
    assert f"{file}:161: must be a line of at most" in problems[0]


def test_small_files_share_a_stretch_and_large_ones_are_cut(tmp_path: Path) -> None:
    for name, size in (("a.txt", 1000), ("b.txt", 1500), ("c.txt", 900), ("d.txt", 9000), ("e.txt", 100)):
        (tmp_path / name).write_text("x" * size)
    cut = [[file.name for file in part.files] for part in stretches_of(sorted(tmp_path.iterdir()))]
    assert cut == [["a.txt", "b.txt"], ["c.txt"], ["d.txt"], ["e.txt"]]
    write(tmp_path, "jsonl")
    write(tmp_path, "parquet")
    for name in ("a.jsonl", "a.parquet"):
        parts = list(stretches_of([tmp_path / name]))
        assert len(parts) > 2
        assert [part.begin for part in parts[1:]] == [part.end for part in parts[:-1]]
