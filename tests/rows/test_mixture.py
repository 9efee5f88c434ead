"""Several sources in one run: exact shares, every source through its own epochs, the same rows on any split, reported separately."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import STRATEGY
from processes import ROOT, launcher_environment, run_training, start_training
from test_conversations import curve, exchanges, record_of
from test_data import documents_of
from test_packing import make_rows
from test_resume import assert_equal_runs

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.config.loading import load_config
from acc_lm.data import Data, build_data
from acc_lm.rows.batch import IGNORE_INDEX
from acc_lm.rows.loader import MicroBatches
from acc_lm.rows.mixture import BLOCK, LARGEST_BLOCK, MixedOrder, MixedRows, shares
from acc_lm.rows.text_rows import Rows
from acc_lm.run_files.metrics_file import read

SIZES = (7, 40, 3)
ORDER = MixedOrder(5, 50, 8, sizes=SIZES, counts=(3, 5, 2))


# --- the order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([0.7, 0.2, 0.1], (7, 2, 1)), ([3, 1], (3, 1)), ([0.35, 0.65], (7, 13)), ([1e-3, 0.999], (1, 999)), ([5], (1,))],
)
def test_shares_are_exact_in_every_block(weights: list[float], expected: tuple[int, ...]) -> None:
    counts = shares(weights)
    assert BLOCK <= sum(counts) < BLOCK + sum(expected)
    assert all(count * sum(expected) == sum(counts) * wanted for count, wanted in zip(counts, expected, strict=True))


def test_shares_that_no_block_can_have_go_to_the_largest_remainders() -> None:
    weights = [0.123456789, 0.7, 0.00012345, 0.3]
    counts = shares(weights)
    assert sum(counts) == LARGEST_BLOCK
    wanted = np.array(weights) / sum(weights) * LARGEST_BLOCK
    assert (np.abs(np.array(counts) - wanted) < 1).all()
    assert min(counts) >= 1


def sequence(order: MixedOrder, num_places: int) -> np.ndarray:
    steps = -(-num_places // order.global_batch_size)
    return np.concatenate([order.rows_at(step) for step in range(1, steps + 1)])[:num_places]


def test_every_block_has_the_shares_and_every_source_goes_through_its_own_epochs() -> None:
    rows, first = sequence(ORDER, 400), np.cumsum([0, *SIZES])
    source = np.searchsorted(first, rows, side="right") - 1
    for block in source.reshape(-1, 10):
        assert np.bincount(block).tolist() == [3, 5, 2]
    assert len({tuple(block) for block in source.reshape(-1, 10)}) > 20, "the places are shuffled anew in every block"
    for number, size in enumerate(SIZES):
        own = rows[source == number] - first[number]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        if size > 3:
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_the_sequence_depends_on_the_seed_alone_and_any_step_is_found_directly() -> None:
    whole = sequence(ORDER, 240)
    for size in (1, 6, 24):
        other = MixedOrder(5, 50, size, sizes=SIZES, counts=(3, 5, 2))
        assert (sequence(other, 240) == whole).all()
        assert (
            MixedOrder(5, 50, size, sizes=SIZES, counts=(3, 5, 2)).rows_at(10)
            == sequence(other, 240)[9 * size : 10 * size]
        ).all()
    assert whole[:10].tolist() == GOLDEN
    assert (sequence(MixedOrder(6, 50, 8, sizes=SIZES, counts=(3, 5, 2)), 240) != whole).any()
    per_process = [
        np.concatenate(
            list(MicroBatches(ORDER, micro_batch_size=2, process=p, num_processes=2, first_step=1, last_step=30))
        )
        for p in range(2)
    ]
    assert sorted(np.concatenate(per_process)) == sorted(whole)


GOLDEN = [10, 27, 47, 37, 5, 48, 1, 38, 9, 3]


def test_how_much_was_taken_of_each_source_is_known_at_every_position() -> None:
    rows = MixedRows([text_rows(SIZES[0], 1), text_rows(SIZES[1], 2), text_rows(SIZES[2], 3)])
    order, first = MixedOrder(5, 50, 8, sizes=SIZES, counts=(3, 5, 2)), np.cumsum([0, *SIZES])
    whole = sequence(order, 208)
    for places in (0, 1, 9, 10, 33, 208):
        source = np.searchsorted(first, whole[:places], side="right") - 1
        assert order.count_rows(places) == np.bincount(source, minlength=3).tolist()
        expected = [rows.count_targets(whole[:places][source == number]) for number in range(3)]
        assert order.count_targets(rows, places) == expected


def test_without_shuffling_each_source_keeps_its_order() -> None:
    order = MixedOrder(5, 50, 10, shuffle=False, sizes=SIZES, counts=(3, 5, 2))
    rows = sequence(order, 200)
    assert [row for row in rows if row < 7] == [i % 7 for i in range(60)]


# --- the rows ------------------------------------------------------------------------------------------------------


def text_rows(num_rows: int, seed: int) -> Rows:
    """The last row is short."""
    tokens = np.random.RandomState(seed).randint(0, 99, num_rows * 16 - seed).astype(np.uint16)
    return Rows(tokens, 16, np.ones(len(tokens), dtype=np.uint32))


@pytest.mark.parametrize("kind", ["text", "packed", "padded"])
def test_mixed_rows_are_the_rows_of_their_sources(kind: str) -> None:
    parts: list[Any]
    if kind == "text":
        parts = [text_rows(4, 1), text_rows(9, 2)]
    else:
        parts = [make_rows(count, 200, 5 * count, padded=kind == "padded") for count in (24, 31)]
    mixed = MixedRows(parts)
    assert len(mixed) == len(parts[0]) + len(parts[1])
    rows = [len(parts[0]) + 1, 0, -1, len(parts[0]), 2, len(mixed) - 1]
    batch = mixed.__getitems__(rows)
    for place, row in enumerate(rows):
        part, local = (0, row) if row < len(parts[0]) else (1, row - len(parts[0]))
        alone = parts[part].__getitems__([local])
        assert alone.keys() == batch.keys()
        for name, tensor in alone.items():
            width = tensor.shape[1]
            assert torch.equal(batch[name][place, :width], tensor[0])
            assert (batch[name][place, width:] == (IGNORE_INDEX if name == "targets" else 0)).all()
    inside = np.array([row for row in rows if row >= 0])
    assert mixed.count_targets(inside) == int((batch["targets"] != IGNORE_INDEX).sum())
    assert mixed.count_targets(np.arange(len(mixed))) == sum(mixed.num_targets)


# --- the data ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, choose = tmp_path_factory.mktemp("sources"), random.Random(1)
    texts = {
        "plain": [" ".join(choose.choices(["red", "tree", "runs", "日本"], k=choose.randint(20, 60))) + f" {i}" for i in range(30)],
        "code": [" ".join(choose.choices(["def", "return", "xyzzy", "if"], k=choose.randint(10, 30))) + f" {i}" for i in range(24)],
    }  # fmt: skip
    found = {name: folder / f"{name}.jsonl" for name in texts}
    for (name, file), column in zip(found.items(), ("text", "content"), strict=True):
        file.write_text("".join(json.dumps({column: text}) + "\n" for text in texts[name]))
    for format in ("alpaca", "messages", "prompt_completion"):
        found[format] = folder / f"{format}.jsonl"
        found[format].write_text("".join(json.dumps(record_of(format, *pair)) + "\n" for pair in exchanges()))
    found["words"] = folder / "held-out.txt"
    found["words"].write_text("red tree runs " * 40)
    return found


def mixture_of(files: dict[str, Path], **more: Any) -> dict[str, Any]:
    sources = [
        {"files": str(files["plain"]), "weight": 0.7},
        {"files": str(files["code"]), "text_column": "content", "weight": 0.3},
    ]
    return {"mixture": sources, "eval_fraction": 0.2, "sequence_length": 32, **more}


def build(values: dict[str, Any], cache: Path, **tokenizer: Any) -> Data:
    config = DataConfig.model_validate(values | {"cache_dir": str(cache)})
    return build_data(config, TokenizerConfig(**(tokenizer or {"kind": "byte"})), None, 0, 4)


def test_each_source_has_the_rows_that_it_would_have_alone(files: dict[str, Path], tmp_path: Path) -> None:
    data = build(mixture_of(files, evaluation_sets={"own": str(files["words"])}), tmp_path)
    assert isinstance(data.train, MixedRows)
    assert list(data.evaluation_sets) == ["plain", "code", "own"]
    for number, (name, column) in enumerate((("plain", "text"), ("code", "content"))):
        alone = build(
            {
                "source": "files",
                "files": str(files[name]),
                "text_column": column,
                "eval_fraction": 0.2,
                "sequence_length": 32,
            },
            tmp_path,
        )
        assert documents_of(alone, data.train.parts[number]) == documents_of(alone, alone.train)  # type: ignore[arg-type]
        assert documents_of(alone, data.evaluation_sets[name]) == documents_of(alone, alone.evaluation)  # type: ignore[arg-type]
        assert data.set_facts[name].tokens == alone.facts.eval_tokens
    assert data.facts.train_documents + data.facts.eval_documents == 54


def test_a_tokenizer_trained_here_covers_every_source(files: dict[str, Path], tmp_path: Path) -> None:
    data = build(mixture_of(files), tmp_path, kind="bpe", vocab_size=300)
    assert {"Ġxyzzy", "Ġtree"} <= data.tokenizer.get_vocab().keys()
    again = build(mixture_of(files), tmp_path, kind="bpe", vocab_size=300)
    assert again.tokenizer.get_vocab() == data.tokenizer.get_vocab()
    assert again.key == data.key


@pytest.mark.parametrize("packing", [True, False])
def test_conversations_of_several_formats_are_mixed(packing: bool, files: dict[str, Path], tmp_path: Path) -> None:
    sources = [{"files": str(files[name]), "weight": 1} for name in ("alpaca", "messages", "prompt_completion")]
    data = build({"mixture": sources, "sequence_length": 128, "packing": packing}, tmp_path)
    assert data.packs is packing
    assert (data.padded_lengths is None) is packing
    assert data.tokenizer.chat_template
    order = data.order(0, 6)
    batch = data.train.__getitems__(order.rows_at(1))
    assert ("document_ids" in batch) is packing
    assert int((batch["targets"] != IGNORE_INDEX).sum()) == data.train.count_targets(order.rows_at(1))


def test_token_counts_are_of_one_pass(files: dict[str, Path], tmp_path: Path) -> None:
    values = mixture_of(files)
    for source, tokens in zip(values["mixture"], (3000, 999), strict=True):
        source.pop("weight")
        source["tokens"] = tokens
    data = build(values, tmp_path)
    order = data.order(0, 4)
    taken = data.by_source(order, order.num_rows)
    assert abs(taken["plain"]["tokens"] - 3000) < 32
    assert abs(taken["code"]["tokens"] - 999) < 32
    assert order.count_steps(1) == -(-order.num_rows // 4)


# --- complete runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tiny: list[str], files: dict[str, Path]) -> list[str]:
    data = mixture_of(files) | {"source": "mixture", "files": []}
    return [
        *tiny,
        f"data={json.dumps(data)}",
        "training.max_steps=8",
        "training.micro_batch_size=6",
        "training.log_every=1",
    ]


def test_a_mixture_is_reported_by_source_and_resumes_after_a_kill(mixed: list[str], tmp_path: Path) -> None:
    whole = run_training([*mixed, f"output_dir={tmp_path / 'whole'}"])
    assert re.search(
        r"^source +plain: [67]\d\.\d% of the tokens, 0\.\d+ passes over its 164 rows", whole.output, re.MULTILINE
    )
    assert "passes over its" in whole.output
    run = tmp_path / "run"
    killed = start_training(mixed, 1, {"ACC_LM_CRASH_AT": "before_tmp@2"}).wait(60)
    assert killed.codes == [-signal.SIGKILL]
    assert "at step 2" in run_training(mixed).output
    assert_equal_runs(tmp_path / "whole", run, 8)
    entries, summary = read(run), json.loads((run / "summary.json").read_text())
    for entry in entries:
        if "train/loss" in entry:
            assert entry["train/tokens/plain"] + entry["train/tokens/code"] == entry["train/tokens"]
    evaluated = [entry for entry in entries if "eval/loss" in entry]
    assert all({"eval/plain/loss", "eval/code/loss"} <= entry.keys() for entry in evaluated)
    last = evaluated[-1]
    assert (
        min(last["eval/plain/loss"], last["eval/code/loss"])
        < last["eval/loss"]
        < max(last["eval/plain/loss"], last["eval/code/loss"])
    )
    assert summary["sources"]["plain"]["tokens"] == entries[-2]["train/tokens/plain"]
    assert summary["sources"]["code"]["passes"] > 0
    assert summary["evaluation_sets"]["code"]["loss"]["last"] == last["eval/code/loss"]


@pytest.mark.parametrize(
    "config",
    ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("deepspeed_zero3", marks=pytest.mark.slow)],
)
def test_two_processes_learn_what_one_does(config: str, mixed: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_training([*mixed, f"output_dir={one}"])
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2)
    run_training([*mixed, f"output_dir={two}"], 2, environment)
    described = json.loads((two / "environment.json").read_text())
    assert (described["strategy"], described["num_processes"]) == (STRATEGY[config][0], 2)
    assert STRATEGY[config][1] in described["engine"]
    np.testing.assert_allclose(curve(one), curve(two), rtol=1e-5)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, two)]
    assert summaries[0]["ledger"] == summaries[1]["ledger"]
    assert summaries[0]["sources"] == summaries[1]["sources"]
    for name in ("plain", "code"):
        losses = [summary["evaluation_sets"][name]["loss"]["last"] for summary in summaries]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_another_weight_is_another_recipe(mixed: list[str], tmp_path: Path) -> None:
    run_training([*mixed, "training.max_steps=2"])
    values = json.loads(mixed[3].partition("=")[2])
    values["mixture"][0]["weight"] = 0.6
    finished = run_training([*mixed, f"data={json.dumps(values)}"], expect=5)
    assert "data.mixture.0.weight was 0.7, is 0.6" in finished.output


A = "{files: PLAIN, weight: 1}"
BAD = {
    "weight of zero": ("[{files: PLAIN, weight: 0}]", 2, "data.mixture.0.weight must be a number > 0, got 0"),
    "negative weight": (f"[{A}, {{files: CODE, weight: -1}}]", 2, "data.mixture.1.weight must be a number > 0, got -1"),
    "weight and tokens": ("[{files: PLAIN, weight: 1, tokens: 5}]", 2, "data.mixture.0 must have exactly one of weight and tokens, got both"),
    "neither": ("[{files: PLAIN}]", 2, "data.mixture.0 must have exactly one of weight and tokens, got neither"),
    "some of each": (f"[{A}, {{files: CODE, tokens: 9}}]", 2, "data.mixture must have weight in all sources or tokens in all"),
    "no text": ("[{weight: 1}]", 2, "data.mixture.0 must have exactly one of files and dataset, got neither"),
    "one name twice": (f"[{A}, {A}]", 2, "data.mixture must have unique names, got 'plain', also the name of another source"),
    "a name of a metric": ("[{files: PLAIN, weight: 1, name: loss}]", 2, "data.mixture must have names of letters"),
    "a misspelt key": ("[{files: PLAIN, wieght: 1}]", 2, "data.mixture.0.wieght must be a known key, got 'wieght'; did you mean weight?"),
    "a weight too small": (f"[{A}, {{files: CODE, weight: 1e-6}}]", 2, "data.mixture must have no weight below 0.0001 of their sum"),
    "a missing file": (f"[{A}, {{files: gone.txt, weight: 1}}]", 3, "data.mixture, source gone: data.files must name an existing file"),
    "a missing column": (f"[{A}, {{files: CODE, weight: 1}}]", 3, "data.mixture, source code: "),
    "text and conversations": (f"[{A}, {{files: ALPACA, weight: 1}}]", 3, "data.mixture must consist of text only or of conversations only, got plain: text, alpaca: alpaca"),
    "an evaluation of datasets": ("[{files: PLAIN, weight: 1, eval_split: test}]", 2, "data.mixture.0.eval_split must be left out without dataset"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_mixture_is_one_line(case: str, tiny: list[str], files: dict[str, Path]) -> None:
    mixture, code, expected = BAD[case]
    for name in ("plain", "code", "alpaca"):
        mixture = mixture.replace(name.upper(), str(files[name]))
    finished = run_training([*tiny, f"data={{source: mixture, files: [], mixture: {mixture}}}"], expect=code)
    assert len(finished.errors) == 1, finished.output
    assert expected in finished.output


def test_a_mixture_together_with_another_source_is_refused(tiny: list[str], files: dict[str, Path]) -> None:
    entry = f"[{{files: {files['plain']}, weight: 1}}]"
    finished = run_training([*tiny, "data.source=files", f"data.mixture={entry}"], expect=2)
    assert "data.mixture must be empty for source files, got 1; set data.source to mixture" in finished.output
    finished = run_training([*tiny, f"data.files=[{files['plain']}]", f"data.mixture={entry}"], expect=2)
    assert "data.files must be empty for source mixture" in finished.output


def test_the_recipes_shown_in_the_docs_are_recipes(tmp_path: Path) -> None:
    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/guides/data.md").read_text(), re.DOTALL)
    assert len(shown) == 2
    for text in shown:
        file = tmp_path / "shown.yaml"
        rest = "" if "training:" in text else "training: {max_steps: 9}\nschedule: {warmup_steps: 0}\n"
        file.write_text(text + rest + "model: {config: {model_type: gpt2, n_layer: 2}}\n")
        load_config(file)
