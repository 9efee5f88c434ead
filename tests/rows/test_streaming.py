"""Streams: the rows that disk would give, however they are read and however often stopped; failures are named."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from backends import STRATEGY
from processes import ROOT, launcher_environment, run_training, start_training
from test_conversations import curve
from test_data import all_ids
from test_resume import assert_equal_runs, metrics_of

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data import build_data
from acc_lm.errors import DataError
from acc_lm.rows import stream_reader
from acc_lm.rows.loader import MicroBatches, build_loader
from acc_lm.rows.order import StreamOrder
from acc_lm.rows.stream_reader import Position, Shards, State, Stream, open_shards
from acc_lm.rows.streams import StreamReader
from acc_lm.run_files.metrics_file import read
from acc_lm.text.tokenizer import build_encoder, make_tokenizer, text_encoder

NUM_SHARDS = 6
TOKENIZER = make_tokenizer(TokenizerConfig(kind="byte"), [])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of every kind with 5 to 15 documents each, and a separate text for evaluation."""
    import pyarrow
    import pyarrow.parquet

    folder, choose = tmp_path_factory.mktemp("shards"), random.Random(2)
    words = ["red", "green", "tree", "sings", "über", "日本", "🙂", "and"]
    texts = [
        [" ".join(choose.choices(words, k=choose.randint(1, 60))) + f" {shard}.{i}" for i in range(choose.randint(5, 15))]
        for shard in range(NUM_SHARDS)
    ]  # fmt: skip
    suffixes = (".jsonl", ".parquet", ".txt", ".csv", ".json", ".arrow")
    files = [folder / f"part-{number}{suffix}" for number, suffix in enumerate(suffixes)]
    for file, own in zip(files, texts, strict=True):
        records = [{"text": text, "id": number} for number, text in enumerate(own)]
        table = pyarrow.Table.from_pylist(records)
        if file.suffix == ".jsonl":
            file.write_text("".join(json.dumps(record) + "\n" for record in records))
        elif file.suffix == ".json":
            file.write_text(json.dumps(records))
        elif file.suffix == ".txt":
            file.write_text("\n".join(own))
        elif file.suffix == ".parquet":
            pyarrow.parquet.write_table(table, file, row_group_size=3)
        elif file.suffix == ".arrow":
            with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, 4)
        else:
            with file.open("w", newline="") as out:
                writer = csv.DictWriter(out, ["text", "id"])
                writer.writeheader()
                writer.writerows(records)
    (folder / "held-out.txt").write_text("red green tree sings. " * 30)
    return files


def config_of(files: list[Path], **more: Any) -> DataConfig:
    values = {"source": "files", "files": [str(file) for file in files], "sequence_length": 16}
    return DataConfig.model_validate(values | {"eval_files": str(files[0].parent / "held-out.txt")} | more)


def stream_of(number: int, config: DataConfig, found: Shards | None = None) -> Stream:
    return Stream(number, found or open_shards(config), config, build_encoder(TOKENIZER), np.uint16, seed=3)


START = State(0, Position())


# --- one stream ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_streams", [1, 4])
def test_a_stream_has_the_rows_that_its_shards_have_on_disk(num_streams: int, shards: list[Path]) -> None:
    config = config_of(shards, streaming=True, num_streams=num_streams)
    for number in range(num_streams):
        own = shards[number::num_streams]
        rows = build_data(
            config_of(own, eval_files=str(shards[0].parent / "held-out.txt")), TokenizerConfig(), TOKENIZER, 0, 1
        ).train
        ids = all_ids(rows)  # type: ignore[arg-type]
        streamed = [ids.tolist() for ids, _ in islice(stream_of(number, config).rows(START, 0), (len(ids) - 1) // 16)]
        assert streamed == [ids[row * 16 : row * 16 + 17] for row in range((len(ids) - 1) // 16)]
        # The rest of the pass is the beginning of the row in which the next one begins.
        both = [*ids, *ids]
        beyond = [row.tolist() for row, _ in islice(stream_of(number, config).rows(START, 0), (len(both) - 1) // 16)]
        assert beyond == [both[row * 16 : row * 16 + 17] for row in range((len(both) - 1) // 16)]


@pytest.mark.parametrize(
    ("shuffle_buffer", "every"),
    [(7, 37), pytest.param(7, 13, marks=pytest.mark.slow), pytest.param(None, 13, marks=pytest.mark.slow)],
)
def test_a_stream_resumes_from_every_state(shuffle_buffer: int | None, every: int, shards: list[Path]) -> None:
    config = config_of(shards, streaming=True, num_streams=2, shuffle_buffer=shuffle_buffer)
    count = 700  # more than two passes
    whole = list(islice(stream_of(1, config).rows(START, 0), count))
    assert whole[-1][1].position.epoch >= 2
    for number in range(0, count, every):
        state = State.unpack(whole[number - 1][1].pack()) if number else START
        assert state.row <= number < state.row + (shuffle_buffer or 1)
        again = list(islice(stream_of(1, config).rows(state, number), 20))
        for (ids, after), (expected, expected_after) in zip(again, whole[number:], strict=False):
            assert ids.tolist() == expected.tolist()
            assert after == expected_after


def test_resuming_opens_the_current_shard_and_none_before(shards: list[Path]) -> None:
    config = config_of(shards, streaming=True, num_streams=2)
    found, opened = open_shards(config), []

    def noted(number: int) -> Iterator[tuple[str, Any]]:
        opened.append(number)
        return found.open(number)

    watched = Shards(found.names, found.key, noted)
    (_, state) = next(pair for pair in stream_of(0, config).rows(START, 0) if pair[1].position.shard == 2)
    next(stream_of(0, config, watched).rows(state, state.row))
    assert opened[0] == 4
    rows = list(islice(stream_of(0, config, watched).rows(State(0, Position()), 0), 3))
    assert len(rows) == 3


def test_a_shuffle_buffer_changes_the_order_inside_its_blocks_alone(shards: list[Path]) -> None:
    def ids(**more: Any) -> list[bytes]:
        config = config_of(shards[:1], streaming=True, num_streams=1, **more)
        return [row.tobytes() for row, _ in islice(stream_of(0, config).rows(START, 0), 20)]

    plain, shuffled = ids(), ids(shuffle_buffer=10)
    assert plain != shuffled
    for block in (slice(0, 10), slice(10, 20)):
        assert sorted(plain[block]) == sorted(shuffled[block])
    orders = [[plain[block].index(row) for row in shuffled[block]] for block in (slice(0, 10), slice(10, 20))]
    assert orders[0] != orders[1], "every block has an order of its own"
    assert shuffled == ids(shuffle_buffer=10)


def test_shards_come_in_another_order_in_every_pass_of_a_shuffled_stream(shards: list[Path]) -> None:
    config = config_of(shards, streaming=True, num_streams=1, shuffle_buffer=2)
    order: dict[int, list[str]] = {}
    for position, text in stream_of(0, config)._documents(Position()):
        if position.epoch == 4:
            break
        order.setdefault(position.epoch, []).append(text)
    assert all(sorted(texts) == sorted(order[0]) for texts in order.values())
    assert len({tuple(texts) for texts in order.values()}) > 1


def test_documents_are_encoded_as_plain_text(tmp_path: Path) -> None:
    """A special token that is spelt out in a text is text, on disk and in a stream."""
    file = tmp_path / "x.jsonl"
    file.write_text(
        json.dumps({"text": "a <|endoftext|> b " * 9}) + "\n" + json.dumps({"text": "x" * 1_000_001 + "\ny"}) + "\n"
    )
    config = config_of([file], streaming=True, num_streams=1, eval_files=str(file))
    reader = StreamReader(job_of(config), (2, 17), np.dtype(np.uint16))
    try:
        _, rows = reader.next_chunk()
    finally:
        reader.close()
    assert TOKENIZER.eos_token_id not in rows


# --- what fails ----------------------------------------------------------------------------------------------------


def failing(found: Shards, shard: int, record: int, times: int) -> Shards:
    """One shard raises before one of its records, as a connection that breaks does."""
    left = [times]

    def read_it(number: int) -> Iterator[tuple[str, Any]]:
        for count, pair in enumerate(found.open(number)):
            if number == shard and count == record and left[0]:
                left[0] -= 1
                raise ConnectionResetError("the connection was reset")
            yield pair

    return Shards(found.names, found.key, read_it)


def test_a_shard_that_fails_for_a_while_changes_nothing(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stream_reader, "PAUSES", (0.0, 0.0))
    config = config_of(shards, streaming=True, num_streams=2)
    broken = failing(open_shards(config), shard=4, record=3, times=2)
    rows = [list(islice(stream_of(0, config, found).rows(START, 0), 400)) for found in (None, broken)]
    assert [row.tolist() for row, _ in rows[0]] == [row.tolist() for row, _ in rows[1]]
    assert capsys.readouterr().err.count(f"warning: {shards[4]} could not be read (the connection was reset)") == 2


def test_a_shard_that_keeps_failing_is_named(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "PAUSES", (0.0, 0.0))
    config = config_of(shards, streaming=True, num_streams=2)
    broken = failing(open_shards(config), shard=0, record=3, times=9)
    with pytest.raises(
        DataError,
        match=r"part-0.jsonl must be readable to its end, got 3 errors after record 3: the connection was reset",
    ):
        list(islice(stream_of(0, config, broken).rows(START, 0), 500))


def test_bad_records_are_counted_in_each_pass_and_across_a_stop(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    lines = [{"text": "good " * 9}, {"text": None}, {"text": "fine " * 9}, {"text": ""}, {"text": "last " * 9}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tolerant = config_of([file], streaming=True, num_streams=1, skip_bad_rows=2, eval_files=str(file))
    rows = list(islice(stream_of(0, tolerant).rows(START, 0), 40))
    assert rows[-1][1].position.epoch > 2
    strict = config_of([file], streaming=True, num_streams=1, skip_bad_rows=1, eval_files=str(file))
    state = next(state for _, state in rows if state.position.record == 2)
    assert state.position.skipped == 1
    with pytest.raises(DataError, match=r"x.jsonl:4: 'text' must hold text"):
        list(islice(stream_of(0, strict).rows(state, state.row), 5))


# --- all streams ---------------------------------------------------------------------------------------------------


def test_every_process_takes_complete_streams_of_the_same_batch() -> None:
    order = StreamOrder(0, 0, 24, num_streams=4)
    assert order.rows_at(1).tolist() == [n * 4 + s for s in range(4) for n in range(6)]
    assert (order.rows_at(3) == order.rows_at(1) + 2 * 6 * 4).all()
    for num_processes in (1, 2, 4):
        streams = [
            set(np.concatenate(list(MicroBatches(order, micro_batch_size=3, process=p, num_processes=num_processes, first_step=1, last_step=5))) % 4)
            for p in range(num_processes)
        ]  # fmt: skip
        assert sorted(s for own in streams for s in own) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_readers_deliver_what_the_streams_hold(num_workers: int, shards: list[Path]) -> None:
    config = config_of(shards, streaming=True, num_streams=4, num_workers=num_workers, attend_across_documents=False)
    data = build_data(config, TokenizerConfig(kind="byte"), None, 3, 8)
    order = data.order(0, 8)
    expected = [list(islice(stream_of(number, config).rows(START, 0), 60)) for number in range(4)]
    for process, num_processes in ((0, 1), (1, 2)):
        batches = MicroBatches(
            order, micro_batch_size=2, process=process, num_processes=num_processes, first_step=6, last_step=20
        )
        saved = {str(s): expected[s][9][1].pack() for s in range(4)}  # five steps of two rows
        with data.reading(order, 5, saved, process, num_processes):
            loader = build_loader(data.train, batches, 2, pin_memory=False)
            for rows, batch in zip(batches, loader, strict=True):
                assert batch["document_ids"].shape == batch["targets"].shape == (2, 16)
                for row, inputs, targets in zip(rows, batch["input_ids"], batch["targets"], strict=True):
                    number, stream = divmod(int(row), 4)
                    assert [*inputs.tolist(), targets[-1].item()] == expected[stream][number][0].tolist()
            states = data.stream_states()
        assert states == {str(s): expected[s][39][1].pack() for s in range(4)[process * 4 // num_processes :]}
    assert data.stream_states() is None


def job_of(config: DataConfig) -> dict[str, Any]:
    return {
        "config": config.model_dump(mode="json"), "tokenizer": text_encoder(TOKENIZER).to_str(), "end": TOKENIZER.eos_token_id,
        "dtype": "uint16", "seed": 3, "first_row": 0, "rows_per_step": 2, "parent": os.getpid(), "queued_chunks": 4,
        "streams": {"0": START.pack()},
    }  # fmt: skip


def test_a_reader_waits_for_a_consumer_that_does_not_read(shards: list[Path]) -> None:
    """Its text has no end: without back-pressure it would never pause."""
    reader = StreamReader(job_of(config_of(shards, streaming=True, num_streams=1)), (2, 17), np.dtype(np.uint16))
    try:
        reader.next_chunk()
        process, used, end = psutil.Process(reader._process.pid), -1.0, time.monotonic() + 60
        while (now := sum(process.cpu_times()[:2])) != used:
            assert time.monotonic() < end
            used = now
            time.sleep(0.5)
        assert process.memory_info().rss < 1 << 30
        for _ in range(100):
            reader.next_chunk()
    finally:
        reader.close()


def test_a_reader_that_dies_is_an_error(shards: list[Path]) -> None:
    reader = StreamReader(job_of(config_of(shards, streaming=True, num_streams=1)), (2, 17), np.dtype(np.uint16))
    reader.next_chunk()
    os.kill(reader._process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="the process that reads the streams must keep running, got its exit"):
        list(iter(reader.next_chunk, None))


# --- complete runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def streamed(tiny: list[str], shards: list[Path]) -> list[str]:
    """Twelve steps of 12 rows in 4 streams."""
    files = json.dumps([str(file) for file in shards])
    return [
        *tiny, f"data.files={files}", f"data.eval_files={shards[0].parent / 'held-out.txt'}", "data.streaming=true", "data.num_streams=4",
        "training.max_steps=12", "training.micro_batch_size=3", "training.log_every=1", "training.eval_every=6",
        "checkpoint.every=1", "checkpoint.keep_last=null",
    ]  # fmt: skip


def ledger_of(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["ledger"])


def test_one_stream_in_order_is_the_rows_on_disk_in_order(
    streamed: list[str], shards: list[Path], tmp_path: Path
) -> None:
    runs = [tmp_path / "disk", tmp_path / "stream"]
    few = ["training.max_steps=6", "data.sequence_length=48"]
    run_training([*streamed, *few, "data.streaming=false", "data.shuffle=false", f"output_dir={runs[0]}"])
    run_training([*streamed, *few, "data.num_streams=1", f"output_dir={runs[1]}"])
    for run in runs:
        assert len(curve(run)) == 6
    assert ledger_of(runs[0]) == ledger_of(runs[1])
    logged = [[{k: v for k, v in entry.items() if k != "train/epoch"} for entry in metrics_of(run)] for run in runs]
    assert logged[0] == logged[1]
    assert (runs[0] / "final/model.safetensors").read_bytes() == (runs[1] / "final/model.safetensors").read_bytes()


@pytest.mark.parametrize("shuffle_buffer", [pytest.param("null", marks=pytest.mark.slow), "10"])
def test_a_killed_stream_resumes_bit_for_bit(shuffle_buffer: str, streamed: list[str], tmp_path: Path) -> None:
    arguments = [*streamed, f"data.shuffle_buffer={shuffle_buffer}"]
    run_training([*arguments, f"output_dir={tmp_path / 'whole'}"])
    killed = start_training(arguments, 1, {"ACC_LM_CRASH_AT": "before_manifest@5"}).wait(60)
    assert killed.codes == [-signal.SIGKILL]
    end = time.monotonic() + 20
    while readers := [p.pid for p in psutil.process_iter(["cmdline"]) if is_reader_of(p, tmp_path)]:
        assert time.monotonic() < end, f"readers {readers} outlived the training"
        time.sleep(0.05)
    assert "at step 4" in run_training(arguments).output
    assert_equal_runs(tmp_path / "whole", tmp_path / "run", 12)


def is_reader_of(process: psutil.Process, folder: Path) -> bool:
    """By its environment: its parent, a process of this test, is gone."""
    try:
        return (
            "acc_lm.rows.stream_reader" in process.cmdline()
            and process.environ().get("PYTEST_CURRENT_TEST", "").find("bit_for_bit") > 0
        )
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    "config",
    ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("deepspeed_zero3", marks=pytest.mark.slow)],
)
def test_any_number_of_processes_learns_the_same_rows_and_another_can_resume(
    config: str, streamed: list[str], tmp_path: Path
) -> None:
    """Complete on one, complete on two, and six steps on two from which one resumes."""
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2)
    one, two, mixed = (tmp_path / name for name in ("one", "two", "mixed"))
    run_training([*streamed, f"output_dir={one}"])
    run_training([*streamed, f"output_dir={two}", "data.num_workers=2"], 2, environment)
    described = json.loads((two / "environment.json").read_text())
    assert (described["strategy"], described["num_processes"]) == (STRATEGY[config][0], 2)
    assert STRATEGY[config][1] in described["engine"]
    np.testing.assert_allclose(curve(one), curve(two), rtol=1e-5)
    states = [json.loads((run / "checkpoints/step-00000012/state.json").read_text())["streams"] for run in (one, two)]
    assert states[0] == states[1]
    mixed.mkdir()
    (mixed / "checkpoints").mkdir()
    (mixed / "checkpoints/step-00000006").symlink_to(two / "checkpoints/step-00000006")
    finished = run_training([*streamed, f"output_dir={mixed}", f"checkpoint.resume={two}/checkpoints/step-00000006"])
    assert "at step 6" in finished.output
    np.testing.assert_allclose(curve(one)[6:], curve(mixed), rtol=1e-5)
    assert ledger_of(one) == ledger_of(two) == ledger_of(mixed)


@pytest.mark.slow
def test_a_dataset_streams_as_its_files_do(streamed: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split, count in (("train", 4), ("test", 1)):
        for number in range(count):
            texts = [f"{split} {number} {i} " * (i + 3) for i in range(12)]
            (folder / f"{split}-{number}.jsonl").write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in texts)
            )
    few = ["training.max_steps=4"]
    files = ["data.files=" + str(folder / "train-*.jsonl"), f"data.eval_files={folder / 'test-0.jsonl'}"]
    run_training([*streamed, *few, *files, f"output_dir={tmp_path / 'files'}"])
    hub = ["data.source=hub", f"data.dataset={folder}", "data.eval_split=test", "data.files=[]", "data.eval_files=[]"]
    finished = run_training([*streamed, *few, *hub, f"output_dir={tmp_path / 'hub'}"])
    assert "4 shards in 4 streams" in finished.output
    assert metrics_of(tmp_path / "files") == metrics_of(tmp_path / "hub")


def test_a_streamed_dataset_is_identified_by_its_files_wherever_it_is(tmp_path: Path) -> None:
    def key(folder: str, *names: str) -> str:
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(json.dumps({"text": "a"}) + "\n")
        return open_shards(DataConfig(source="hub", dataset=str(tmp_path / folder), streaming=True, eval_split="x")).key

    first = key("here", "train-0.jsonl", "train-1.jsonl")
    assert (
        key("there", "train-0.jsonl", "train-1.jsonl", "README.md", ".lock", ".cache/huggingface/train.metadata")
        == first
    )
    assert key("other", "train-0.jsonl", "train-2.jsonl") != first


@pytest.mark.slow
def test_a_dead_shard_is_named_and_nothing_is_lost(streamed: list[str], shards: list[Path], tmp_path: Path) -> None:
    """The last shard of stream 1 is truncated; once it is repaired, the run resumes from what it had saved."""
    arguments = [*streamed, "training.max_steps=30", "checkpoint.every=5"]
    run_training([*arguments, f"output_dir={tmp_path / 'whole'}"])
    saved = shards[5].read_bytes()
    shards[5].write_bytes(saved[: len(saved) // 2])
    try:
        dead = run_training(arguments, expect=3)
    finally:
        shards[5].write_bytes(saved)
    (line,) = dead.errors
    assert f"{shards[5]} must be readable to its end, got 4 errors" in line
    reached = json.loads((tmp_path / "run/summary.json").read_text())
    assert (reached["status"], reached["exit_code"]) == ("data_error", 3)
    steps = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert 1 <= len(steps) < 6, "what came before it was learned"
    run_training(arguments)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run", 30)


def test_a_stream_that_reaches_its_end_begins_again_and_says_so(streamed: list[str], tmp_path: Path) -> None:
    finished = run_training([*streamed, "training.max_steps=40"])
    assert re.search(r"encoder +tiktoken", finished.output), "the readers' choice, whatever the held-out text is"
    assert "reached its end, pass 1; it continues with its first shard" in finished.output
    assert "train/epoch" not in read(tmp_path / "run")[0]


def test_a_dry_run_and_an_evaluation_work_on_streams(streamed: list[str]) -> None:
    assert "everything works" in run_training([*streamed, "--dry-run"]).output
    run_training([*streamed, "training.max_steps=2"])
    assert "eval loss" in run_training([*streamed, "--eval-only"]).output


BAD = {
    "no text to evaluate on": (["data.eval_files=[]"], 2, "data.eval_files must name held-out text for a stream"),
    "no split to evaluate on": (["data.source=hub", "data.dataset=x", "data.files=[]", "data.eval_files=[]"], 2, "data.eval_split must name"),
    "of the library": (["data.source=python_stdlib", "data.files=[]", "data.eval_files=[]"], 2, "data.streaming must have source files or hub"),
    "of conversations": (["data.format=messages"], 2, "data.format must be text for a stream, got messages"),
    "epochs": (["training.max_steps=null", "training.num_epochs=1"], 2, "training.num_epochs must be null for a stream"),
    "saved by epochs": (["checkpoint.every_epochs=1"], 2, "checkpoint.every_epochs must be null for a stream"),
    "a tokenizer to make": (["tokenizer.kind=bpe"], 2, "tokenizer.name_or_path must be an existing tokenizer for a stream"),
    "a batch that does not divide": (["data.num_streams=5"], 2, "training.global_batch_size must be a multiple of data.num_streams 5, got 12"),
    "a buffer without a stream": (["data.streaming=false", "data.shuffle_buffer=10"], 2, "data.shuffle_buffer must be null without data.streaming"),
    "a buffer that may not shuffle": (["data.shuffle_buffer=10", "data.shuffle=false"], 2, "data.shuffle_buffer must be null with data.shuffle=false"),
    "more streams than shards": (["data.num_streams=12"], 3, "data.num_streams must be at most the number of shards 6, got 12"),
    "a column that is not there": (["data.text_column=body"], 3, "must have a column 'body'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_stream_is_one_line(case: str, streamed: list[str]) -> None:
    changes, code, expected = BAD[case]
    finished = run_training([*streamed, *changes], expect=code)
    assert len(finished.errors) == 1, finished.output
    assert expected in finished.output


def test_streams_that_do_not_divide_among_the_processes_are_refused(streamed: list[str]) -> None:
    environment = launcher_environment(ROOT / "accelerate_configs/ddp.yaml", 2)
    finished = run_training([*streamed, "data.num_streams=3"], 2, environment, expect=2)
    assert "data.num_streams must be a multiple of the number of processes 2, got 3" in finished.output


def test_another_number_of_streams_is_another_recipe(streamed: list[str]) -> None:
    run_training([*streamed, "training.max_steps=2"])
    finished = run_training([*streamed, "data.num_streams=2"], expect=5)
    assert "data.num_streams was 4, is 2" in finished.output
    finished = run_training([*streamed, "data.num_streams=2", "checkpoint.allow_changed_recipe=true"], expect=5)
    assert "must match the checkpoint of 4 streams that the run resumes from" in finished.output


def test_a_folder_of_empty_records_is_no_endless_loop(streamed: list[str], tmp_path: Path) -> None:
    for number in range(4):
        text = "words " * 40 if number else ""
        (tmp_path / f"x-{number}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    finished = run_training([*streamed, f"data.files={tmp_path}/x-*.jsonl", "data.skip_bad_rows=5"], expect=3)
    assert "each of the 4 streams must have text, got none in stream 0" in finished.output


def test_rows_of_a_stream_are_available_only_while_it_is_read(shards: list[Path]) -> None:
    data = build_data(config_of(shards, streaming=True, num_streams=4), TokenizerConfig(kind="byte"), None, 3, 8)
    assert data.train[0]["targets"].shape == (1, 16)
    with pytest.raises(AssertionError):
        data.train.count_targets(np.arange(8))
