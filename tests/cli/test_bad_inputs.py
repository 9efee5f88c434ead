"""Bad input gets one clear line, the documented exit code, and nothing is lost."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import Launch, run_training

from acc_lm.checkpointing import resuming
from acc_lm.checkpointing.format import Found
from acc_lm.errors import ConfigError
from acc_lm.run_files import metrics_file, output_dir, summary
from acc_lm.run_files.output_dir import open_output_dir

GOOD = json.dumps({"text": "good words " * 40})


def lines(*texts: str) -> bytes:
    return ("\n".join(texts) + "\n").encode()


DATA: dict[str, tuple[str, bytes, list[str], str]] = {
    # name: (file, content, more arguments, what the line must contain)
    "malformed jsonl": ("x.jsonl", lines(GOOD, '{"text": "a" "b"}'), [], "x.jsonl:2: must be a JSON object, got"),
    "brackets without end": ("x.jsonl", lines(GOOD, "[" * 100_000), [], "x.jsonl:2: must be a JSON object, got '[[["),
    "a number of thousands of digits": (
        "x.jsonl",
        lines(GOOD, "9" * 5000),
        [],
        "x.jsonl:2: must be a JSON object, got '99",
    ),
    "json of brackets": ("x.json", b"[" * 100_000, [], "x.json must be JSON, got: "),
    "empty file": ("x.jsonl", b"", [], "x.jsonl must hold text, got an empty file (0 bytes)"),
    "blank lines": ("x.jsonl", b"\n\n  \n", [], "x.jsonl must hold at least one record with text, got none"),
    "blank text": ("x.txt", b"\n \n", [], "x.txt must hold at least one record with text, got none"),
    "wrong column": (
        "x.jsonl",
        lines('{"content": "a"}'),
        [],
        "x.jsonl:1: must have a column 'text', got 'content'; set data.text_column",
    ),
    "not utf-8": (
        "x.jsonl",
        lines(GOOD) + b'{"text": "\xff"}\n',
        [],
        "x.jsonl:2: must be UTF-8, got byte 0xff at column 11",
    ),
    "txt not utf-8": ("x.txt", b"fine\nbad \xe9\n", [], "x.txt:2: must be UTF-8, got byte 0xe9 at column 5"),
    "utf-16": ("x.txt", "text".encode("utf-16"), [], "x.txt: must be UTF-8, got UTF-16 (by its byte order mark)"),
    "null text": ("x.jsonl", lines(GOOD, '{"text": null}'), [], "x.jsonl:2: 'text' must be a string, got null"),
    "number as text": ("x.jsonl", lines('{"text": 5}'), [], "x.jsonl:1: 'text' must be a string, got a number"),
    "empty text": ("x.jsonl", lines(GOOD, '{"text": ""}'), [], "x.jsonl:2: 'text' must hold text, got an empty string"),
    "half a character": (
        "x.jsonl",
        lines('{"text": "a \\ud83d b"}'),
        [],
        "x.jsonl:1: 'text' must be Unicode text, got a lone surrogate",
    ),
    "a list as record": ("x.jsonl", lines("[1, 2, 3]"), [], "x.jsonl:1: must be an object with a 'text', got a list"),
    "mixed schemas": (
        "x.jsonl",
        lines(GOOD, '{"title": "t"}'),
        [],
        "x.jsonl:2: must have a column 'text', got 'title'",
    ),
    "one bad row too many": (
        "x.jsonl",
        lines(GOOD, '{"text": 1}', '{"text": 2}'),
        ["data.skip_bad_rows=1"],
        "x.jsonl:3: 'text' must be a string",
    ),
    "json that is no list": ("x.json", b'{"text": "a"}', [], "x.json must be a JSON list of objects, got dict"),
    "malformed json": ("x.json", b'[{"text": "a"},\n', [], "x.json:2: must be JSON"),
    "csv without the column": (
        "x.csv",
        b"id,body\n1,hello\n",
        [],
        "x.csv:2: must have a column 'text', got 'id', 'body'",
    ),
    "no parquet": ("x.parquet", b"not a parquet file", [], "x.parquet must be a Parquet file"),
    "no arrow": ("x.arrow", b"not an arrow file either", [], "x.arrow must be an Arrow file"),
    "too little for a row": (
        "x.txt",
        b"few words",
        [],
        "must fill a row of data.sequence_length 32 + 1 tokens, got at most",
    ),
    "too little for a batch": (
        "x.txt",
        b"some words " * 20,
        [],
        "must fill training.global_batch_size 12 rows, got at most 7 rows",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_text_is_exit_code_3_and_one_line(name: str, tiny: list[str], tmp_path: Path) -> None:
    file, content, more, says = DATA[name]
    (tmp_path / file).write_bytes(content)
    finished = run_training([*tiny, f"data.files=[{tmp_path / file}]", *more], expect=3)
    (line,) = finished.errors
    assert says in line
    assert str(tmp_path / file) in line or "the training text" in line
    assert "Traceback" not in finished.output
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "data_error"
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_missing_file_names_the_nearest(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    finished = run_training([*tiny, f"data.files={tmp_path / 'corpsu.txt'}"], expect=3)
    assert (
        f"must name an existing file or folder, got '{tmp_path / 'corpsu.txt'}'; nearest: {tmp_path / 'corpus.txt'}"
        in finished.errors[0]
    )
    finished = run_training([*tiny, f"data.files={tmp_path / '*.md'}"], expect=3)
    assert (
        f"data.files must match at least one file, got '{tmp_path / '*.md'}'; correct data.files" in finished.errors[0]
    )


def test_tolerated_bad_rows_are_counted(tiny: list[str], tmp_path: Path, words: list[str]) -> None:
    rows = [json.dumps({"text": text}) for text in words] + ['{"text": null}', '{"text": ""}']
    (tmp_path / "x.jsonl").write_bytes(lines(*rows))
    finished = run_training([*tiny, f"data.files={tmp_path / 'x.jsonl'}", "data.skip_bad_rows=2"])
    assert "2 records without usable text were skipped" in finished.output


def test_a_byte_order_mark_is_not_text(tiny: list[str], tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + "\n".join(words).encode())
    run_training([*tiny, f"data.files={tmp_path / 'x.txt'}"])


def test_held_out_documents_that_are_trained_on_are_a_warning(tiny: list[str], text_file: Path) -> None:
    finished = run_training([*tiny, f"data.eval_files={text_file}"])
    assert "40 held-out documents are in the training text too" in finished.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data.dataset=/nowhere/at/all"], "data.dataset must be a dataset that can be loaded"),
        (["data.dataset=someone/some-data-set"], "data.dataset must be a dataset that can be loaded"),
        (
            ["data.dataset=FOLDER", "data.text_column=body"],
            "must have a column 'body', got 'text'; set data.text_column",
        ),
        (["data.dataset=FOLDER", "data.dataset_split=validation"], "(split validation)"),
    ],
)
def test_an_unavailable_data_set(arguments: list[str], says: str, tiny: list[str], text_file: Path) -> None:
    arguments = [argument.replace("FOLDER", str(text_file.parent)) for argument in arguments]
    finished = run_training(
        [*tiny, "data.source=hub", "data.files=[]", *arguments], environment={"HF_HUB_OFFLINE": "1"}, expect=3
    )
    (line,) = finished.errors
    assert says in line


@pytest.fixture(scope="module")
def exported(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a run exports it."""
    run = tmp_path_factory.mktemp("exported") / "run"
    run_training(["--config", str(tiny_recipe), f"output_dir={run}", "training.max_steps=2"])
    return run / "final"


def damaged(folder: Path, target: Path, change: Callable[[Path], Any]) -> Path:
    shutil.copytree(folder, target)
    change(target)
    return target


def rewrite(file: str, **values: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


def only_pickle(folder: Path) -> None:
    import torch

    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def own_code(folder: Path) -> None:
    rewrite(
        "config.json",
        model_type="strange",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )(folder)
    (folder / "code.py").write_text(f"open({str(folder / 'PWNED')!r}, 'w')\n")


MODELS: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), [], "must be a folder with a config.json"),
    "no tokenizer": (lambda folder: [(folder / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")], [], "must have a tokenizer"),
    "weights in pickle": (only_pickle, [], "weights in pickle are not loaded"),
    "code of its own": (own_code, ["tokenizer.name_or_path=GOOD"], "set model.trust_remote_code=true"),
    "no end token": (rewrite("tokenizer_config.json", eos_token=None), [], "must have an end token"),
    "rows too long": (lambda folder: None, ["data.sequence_length=4096", "data.files=BIG"], "must be at most the model's max_position_embeddings 2048, got 4096"),
    "broken weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678"), [], "model.name_or_path must"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_used_is_exit_code_2_and_one_line(
    name: str, exported: Path, tiny: list[str], tmp_path: Path
) -> None:
    change, more, says = MODELS[name]
    folder = damaged(exported, tmp_path / "model", change)
    more = [argument.replace("GOOD", str(exported)).replace("BIG", str(tmp_path / "big.txt")) for argument in more]
    (tmp_path / "big.txt").write_text("many words " * 20_000)
    finished = run_training([*tiny, "model.config=null", f"model.name_or_path={folder}", *more], expect=2)
    (line,) = finished.errors
    assert says in line
    assert "Traceback" not in finished.output
    assert not (folder / "PWNED").exists()


def test_a_model_that_does_not_exist(tiny: list[str]) -> None:
    finished = run_training([*tiny, "model.config=null", "model.name_or_path=./nope"], expect=2)
    assert "'./nope'" in finished.errors[0]
    finished = run_training(
        [*tiny, "model.config=null", "model.name_or_path=gpt2"], expect=2, environment={"HF_HUB_OFFLINE": "1"}
    )
    assert "'gpt2'" in finished.errors[0]
    assert "offline" in finished.errors[0] or "could not be fetched" in finished.errors[0]


def test_a_tokenizer_larger_than_the_model(exported: Path, tiny: list[str], tmp_path: Path) -> None:
    small = "model.config.vocab_size=100"
    finished = run_training([*tiny, small], expect=2)
    assert "got 100" in finished.errors[0]
    assert "257" in finished.errors[0]


@pytest.mark.parametrize("kind", ["file", "below a file", "read-only"])
def test_an_output_folder_that_cannot_be_written(kind: str, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    target = {"file": "file", "below a file": "file/run", "read-only": "/proc/run"}[kind]
    finished = run_training([*tiny, f"output_dir={tmp_path / target}"], expect=2)
    assert "output_dir must be a folder that can be written" in finished.errors[0]


def foreign(name: str, content: str = "mine") -> Callable[[Path], Any]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return make


def dangling(folder: Path) -> None:
    folder.mkdir()
    (folder / "checkpoints").symlink_to(folder / "purged")


OUTPUT_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a model": (foreign("final/thesis.txt"), "which holds final that no run of acc-lm wrote; move that away, or choose another"),
    "a half-made model": (foreign("tmp-final/thesis.txt"), "which holds tmp-final that"),
    "a tokenizer": (foreign("tokenizer/tokenizer.json"), "which holds tokenizer that"),
    "a recipe": (foreign("config.yaml"), "which holds config.yaml that"),
    "a record": (foreign("metrics.jsonl", '{"step": 1, "loss": 2.0}\n'), "which holds metrics.jsonl that"),
    "a record of anything": (foreign("metrics.jsonl", "1\n"), "which holds metrics.jsonl that"),
    "a summary": (foreign("summary.json", '{"status": "fine"}'), "which holds summary.json that"),
    "checkpoints": (foreign("checkpoints/last.ckpt"), "which holds checkpoints that"),
    "several": (lambda folder: [foreign(name)(folder) for name in ("final/x", "config.yaml")], "which holds config.yaml, final that"),
    "a file for a folder": (foreign("checkpoints"), "checkpoints must be a folder, got something else; move it away"),
    "a folder for a file": (foreign("metrics.jsonl/x"), "metrics.jsonl must be a file, got something else"),
    "a link to nothing": (dangling, "which does not exist; create that folder, or remove the link"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUT_FOLDERS)
def test_an_output_folder_with_foreign_content_is_refused_untouched(name: str, tmp_path: Path) -> None:
    make, says = OUTPUT_FOLDERS[name]
    make(tmp_path / "run")
    before = sorted(str(path) for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(ConfigError, match=re.escape(says)), open_output_dir(tmp_path / "run", alone=True):
        pass
    assert sorted(str(path) for path in (tmp_path / "run").rglob("*")) == before


def test_a_refused_output_folder_gets_no_summary_and_other_files_are_welcome(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted: an empty folder to save in, a log of the scheduler, remains of an evaluation or a failed attempt, a kill at the start."""
    foreign("final/thesis.txt")(tmp_path / "run")
    assert len(run_training(tiny, expect=2).errors) == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["final"]
    shutil.rmtree(tmp_path / "run")
    foreign("slurm-1.out")(tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir()
    run_training([*tiny, "data.files=/nowhere.txt"], expect=3)

    def killed() -> int:
        import train
        from acc_lm.checkpointing import resuming

        resuming.dump_config = lambda config: os._exit(9)
        return train.main(tiny)

    assert Launch(killed).wait().code == 9
    (tmp_path / "run/summary.json").unlink()
    assert not (tmp_path / "run/config.yaml").exists()
    output_dir.check_output_dir(tmp_path / "run")
    (tmp_path / "evaluated").mkdir()
    nothing: Any = SimpleNamespace(text_key="", training=SimpleNamespace(eval_batches=1))
    monkeypatch.setattr(resuming, "environment", lambda identity: {"strategy": "single"})
    resuming.begin(tmp_path / "evaluated", Found(None), nothing, nothing, nothing, trains=False)
    metrics_file.append(tmp_path / "evaluated", 0, {"eval/loss": 1.0})
    output_dir.check_output_dir(tmp_path / "evaluated")


def test_a_number_that_is_not_finite_is_null_in_every_record(tmp_path: Path) -> None:
    """JSON has no NaN: other readers of metrics.jsonl and summary.json would stop there."""

    def never(name: str) -> None:
        raise AssertionError(f"{name} in a record")

    metrics_file.append(tmp_path, 1, {"eval/loss": 2.0})
    metrics_file.append(tmp_path, 2, {"eval/loss": math.nan, "eval/perplexity": math.inf})
    metrics_file.keep_until(tmp_path, 2)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line, parse_constant=never)["eval/loss"] for line in text.splitlines()] == [2.0, None]
    assert metrics_file.best(metrics_file.read(tmp_path), "eval/loss") == {
        "metric": "eval/loss",
        "value": 2.0,
        "step": 1,
    }
    known = metrics_file.evaluation_at(tmp_path, 2, "eval/loss")
    assert known is not None
    assert math.isnan(known["eval/loss"]), "it was evaluated, and is not to be again"
    summary.write_summary(tmp_path, status="completed", exit_code=0, bits_per_byte={"model": math.nan})
    written = json.loads((tmp_path / "summary.json").read_text(), parse_constant=never)
    assert written["bits_per_byte"] == {"model": None}


def test_a_terminal_that_lacks_some_letters_ends_no_run(tiny: list[str], tmp_path: Path, words: list[str]) -> None:
    """A Latin-1 locale, or PYTHONIOENCODING=ascii, with other letters in paths and texts."""
    (tmp_path / "日本.txt").write_text("\n".join(words), encoding="utf-8")

    def run() -> int:
        import locale

        import train

        locale.setlocale(locale.LC_CTYPE, "C")
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), encoding="ascii", write_through=True)
        return train.main(
            [*tiny, f"data.files={tmp_path}/日本.txt", f"output_dir={tmp_path}/é", "export.sample_tokens=4"]
        )

    finished = Launch(run).wait()
    assert finished.code == 0, finished.output
    assert "/\\xe9" in finished.output
    assert "日本" in (tmp_path / "é/config.yaml").read_text(encoding="utf-8")
    assert "日本" in (tmp_path / "é/final/README.md").read_text(encoding="utf-8")


def test_an_unexpected_error_keeps_its_traceback_and_is_recorded(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for a secret in it."""
    import acc_lm.training

    def fail(*_: object) -> None:
        raise ZeroDivisionError("with the token hf_canary_canary")

    monkeypatch.setattr(acc_lm.training.step, "to_device", fail)
    monkeypatch.setenv("HF_TOKEN", "hf_canary_canary")
    finished = run_training(tiny, expect=1)
    assert "Traceback (most recent call last)" in finished.output
    assert "ZeroDivisionError: with the token ***" in finished.output
    assert "hf_canary" not in finished.output + (tmp_path / "run/summary.json").read_text()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert "ZeroDivisionError" in summary["reason"]
