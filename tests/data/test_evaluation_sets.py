"""Evaluation sets by name: each has the value that it has alone, on every engine, and is reported wherever a loss is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from backends import STRATEGY
from processes import ROOT, launcher_environment, run_training
from test_conversations import write as write_conversations

from acc_lm.config import EVALUATION_METRICS, DataConfig
from acc_lm.config.loading import load_config
from acc_lm.errors import ConfigError, DataError
from acc_lm.run_files.metrics_file import read


@pytest.fixture(scope="module")
def files(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A text file, and records, some of which are in the training text."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "novel.txt").write_text("A tree by the river sings, naïve as 日本.\n" * 9)
    (folder / "seen.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words[:5]))
    return {"novel": folder / "novel.txt", "seen-before": folder / "seen.jsonl"}


@pytest.fixture(scope="module")
def model(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("model") / "run"
    run_training(["--config", str(tiny_recipe), f"output_dir={run}", "training.eval_every=null"])
    return run / "final"


def named(files: dict[str, Path]) -> str:
    return f"data.evaluation_sets={{{', '.join(f'{name}: [{file}]' for name, file in files.items())}}}"


def evaluate(
    tiny: list[str], model: Path, run: Path, *more: str, config: str = "", num_processes: int = 1
) -> dict[str, float]:
    """Values that `--eval-only` measures."""
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes) if config else {}
    existing = ["model.config=null", f"model.name_or_path={model}", "tokenizer.kind=byte"]
    finished = run_training(
        [*tiny, *existing, f"output_dir={run}", *more, "--eval-only"], num_processes, environment=environment
    )
    strategy = next(line.split()[1] for line in finished.output.splitlines() if line.startswith("strategy"))
    assert strategy.rstrip(",") == STRATEGY[config or "single"][0]
    (entry,) = read(run)
    return entry


@pytest.fixture(scope="module")
def alone(
    tiny_recipe: Path, files: dict[str, Path], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, float]]:
    """Each set as the only held-out text, on one process."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = ["--config", str(tiny_recipe)]
    return {name: evaluate(recipe, model, folder / name, f"data.eval_files={file}") for name, file in files.items()}


@pytest.mark.parametrize(
    ("config", "num_processes", "micro"),
    [("", 1, 4), ("ddp", 2, 3), ("fsdp2", 2, 1), pytest.param("deepspeed_zero3", 2, 6, marks=pytest.mark.slow)],
)
def test_a_set_has_the_value_that_it_has_alone(
    config: str,
    num_processes: int,
    micro: int,
    tiny: list[str],
    files: dict[str, Path],
    model: Path,
    alone: dict[str, dict[str, float]],
    tmp_path: Path,
) -> None:
    size = f"training.micro_batch_size={micro}"
    found = evaluate(tiny, model, tmp_path / "run", named(files), size, config=config, num_processes=num_processes)
    for name in files:
        for metric in EVALUATION_METRICS:
            expected = alone[name][f"eval/{metric}"]
            assert found[f"eval/{name}/{metric}"] == pytest.approx(expected, rel=1e-6), (name, metric)
    assert len({found["eval/loss"], *(found[f"eval/{name}/loss"] for name in files)}) == 3


def test_sets_are_reported_wherever_the_held_out_loss_is(
    tiny: list[str], files: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finished = run_training([*tiny, named(files), "tracking.report_to=[tensorboard]"])
    plain = tmp_path / "plain"
    run_training([*tiny, f"output_dir={plain}"])
    assert "novel: 0.00 MB, 1 documents, " in finished.output
    entries = [entry for entry in read(run) if "eval/loss" in entry]
    assert [entry["step"] for entry in entries] == [3, 6]
    assert all(f"eval/{name}/{metric}" in e for e in entries for name in files for metric in EVALUATION_METRICS)
    assert f"step 6/6  novel loss {entries[1]['eval/novel/loss']:.4f}  perplexity " in finished.output
    summary = json.loads((run / "summary.json").read_text())
    losses = [entry["eval/novel/loss"] for entry in entries]
    assert summary["evaluation_sets"]["novel"]["loss"] == {
        "first": losses[0], "last": losses[1], "best": min(losses), "best_step": entries[losses.index(min(losses))]["step"],
    }  # fmt: skip
    accuracy = summary["evaluation_sets"]["seen-before"]["token_accuracy"]
    assert accuracy["best"] == max(accuracy["first"], accuracy["last"])
    from test_tracking import scalars_of

    assert scalars_of(run)["eval/novel/loss"] == [3, 6]
    # They are only evaluated: the run is the one without them, and may be resumed with others.
    assert (run / "final/model.safetensors").read_bytes() == (plain / "final/model.safetensors").read_bytes()
    only = {"novel": files["novel"]}
    finished = run_training([*tiny, f"output_dir={plain}", named(only), "training.max_steps=8"])
    assert "resumed from" in finished.output
    assert "eval/novel/loss" in read(plain)[-1]


@pytest.mark.parametrize("packing", [True, False])
def test_conversations_are_read_as_the_run_reads_its_own(packing: bool, tiny: list[str], tmp_path: Path) -> None:
    """The same file as a set and as the held-out text, packed and padded: the same number."""
    file = write_conversations(tmp_path / "chats.jsonl", "messages")
    arguments = [
        *tiny, f"data.files={file}", f"data.eval_files={file}", f"data.evaluation_sets={{same: {file}}}", "data.sequence_length=96",
        "training.max_steps=2", "training.micro_batch_size=3", "training.global_batch_size=6", f"data.packing={str(packing).lower()}",
    ]  # fmt: skip
    finished = run_training(arguments)
    entry = read(tmp_path / "run")[-1]
    for metric in EVALUATION_METRICS:
        assert entry[f"eval/same/{metric}"] == entry[f"eval/{metric}"]
    assert "same: 0.01 MB, 60 documents" in finished.output
    assert " 0 cut (0 targets lost)" in finished.output.split("same: ")[1].splitlines()[0]


def test_a_set_is_tokenised_once(tiny_recipe: Path, files: dict[str, Path], tmp_path: Path) -> None:
    from acc_lm.data import Data, build_data

    config = load_config(tiny_recipe, [named(files), f"data.cache_dir={tmp_path}"])

    def build(data: DataConfig) -> Data:
        return build_data(data, config.tokenizer, None, config.seed, 12)

    first = build(config.data)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")}
    again = build(config.data)
    assert again.set_facts == first.set_facts
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")} == made
    assert build(config.data.model_copy(update={"evaluation_sets": {}})).key == first.key, "it is no part of the text"
    whole = "".join(str(first.tokenizer.decode([int(token) for token in first.evaluation_sets["novel"].tokens[:-1]])))
    assert whole == files["novel"].read_text()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            "{'a/b': x.txt}",
            r"data\.evaluation_sets must have names of letters, digits, _ and - .*got 'a/b'; rename it",
        ),
        ("{loss: x.txt}", r"data\.evaluation_sets must have names .* not metric names, got 'loss'; rename it"),
        ("{wiki: []}", r"data\.evaluation_sets\.wiki must name at least one file, got none; add some, or leave it out"),
        ("{wiki: 3}", r"data\.evaluation_sets\.wiki must be a list, got 3 \(a whole number\)"),
        ("[wiki.txt]", r"data\.evaluation_sets must be a mapping, got \['wiki\.txt'\]"),
    ],
)
def test_a_bad_set_is_one_line(sets: str, message: str, tiny_recipe: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(tiny_recipe, [f"data.evaluation_sets={sets}"])
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "text", "format", "message"),
    [
        ("nowhere.txt", None, "text", r"data\.evaluation_sets\.wiki must name an existing file or folder, got '.*nowhere\.txt'"),
        ("empty.txt", "", "text", r"empty\.txt must hold text, got an empty file .*; remove it from data\.evaluation_sets\.wiki"),
        ("blank.txt", "\n \n", "text", r"blank\.txt must hold at least one record with text, got none"),
        ("columns.jsonl", '{"body": "x"}\n', "text", r"columns\.jsonl:1: must have a column 'text', got 'body'"),
        ("plain.txt", "words", "messages", r"plain\.txt must hold records for this data\.format, got a text file; name other files"),
        ("turns.jsonl", '{"messages": [{"role": "user"}]}\n', "messages", r"turns\.jsonl:1: "),
    ],
)  # fmt: skip
def test_text_that_cannot_be_a_set_is_named(
    name: str, text: str | None, format: str, message: str, tiny_recipe: Path, tmp_path: Path
) -> None:
    from acc_lm.data import build_data

    if text is not None:
        (tmp_path / name).write_text(text)
    chosen = [f"data.evaluation_sets={{wiki: {tmp_path / name}}}", f"data.cache_dir={tmp_path / 'cache'}"]
    if format == "messages":
        chosen += [f"data.files={write_conversations(tmp_path / 'chats.jsonl', format)}", "data.sequence_length=96"]
    config = load_config(tiny_recipe, chosen)
    with pytest.raises(DataError, match=message) as error:
        build_data(config.data, config.tokenizer, None, config.seed, 4)
    assert len(error.value.problems) == 1
