"""`acc-lm evaluate --tasks` up to the harness: what is refused, and what summary.json and the model card record.

The harness itself runs in tests/export/test_lm_eval.py.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from processes import run_training

from acc_lm.cli import main
from acc_lm.export.card import card_with_benchmarks
from acc_lm.run_files.summary import read_summary, record_benchmarks, write_failure

CARD = """---
library_name: transformers
tags: [acc-lm]
model-index:
- name: tiny
  results:
  - task: {type: text-generation}
    dataset: {name: held-out text, type: text}
    metrics: [{type: loss, value: 4.5, name: Loss (nats per token)}]
---

# tiny

## Held-out text

4.5

## Use

call it

## Recipe

a line: |
  ## Benchmarks of others
"""


def task(**metrics: float) -> dict[str, Any]:
    return {
        "metrics": metrics,
        "stderr": {"acc": 0.25},
        "num_fewshot": 5,
        "num_samples": 40,
        "version": 1,
        "dataset": "allenai/ai2_arc",
    }


def entries(card: str) -> list[tuple[str, str, float]]:
    """(data set, metric, value) of each entry of the model index, as the Hub reads it."""
    found = ModelCard(card).data.eval_results or []
    return [(entry.dataset_name, entry.metric_type, entry.metric_value) for entry in found]


def test_a_card_has_the_figures_of_each_task_once() -> None:
    first = card_with_benchmarks(CARD, {"arc": task(acc=0.5, acc_norm=0.75), "wiki": task(word_perplexity=9)}, "h 1")
    assert first
    held_out = ("held-out text", "loss", 4.5)
    wiki = ("wiki", "word_perplexity", 9)
    assert entries(first) == [held_out, ("arc", "accuracy", 0.5), ("arc", "acc_norm", 0.75), wiki]
    assert "| `arc` | acc | 0.5000 ± 0.2500 | 5 | 40 | h 1 |\n| `arc` | acc_norm | 0.7500 | 5 | 40 | h 1 |\n" in first
    again = card_with_benchmarks(first, {"arc": task(acc=0.625)}, "h 2")
    assert again
    assert entries(again) == [held_out, wiki, ("arc", "accuracy", 0.625)]
    assert again.count("\n## Benchmarks\n") == 1
    assert [line for line in again.splitlines() if line.startswith("| `")] == [
        "| `arc` | acc | 0.6250 ± 0.2500 | 5 | 40 | h 2 |",
        "| `wiki` | word_perplexity | 9.0000 | 5 | 40 | h 1 |",
    ]
    assert again.endswith(CARD[CARD.index("\n## Use\n") :]), "the rest stays"
    assert "## Held-out text\n\n4.5\n\n## Benchmarks\n" in again
    assert (ModelCard(again).data.eval_results or [])[-1].dataset_type == "allenai/ai2_arc"


@pytest.mark.parametrize(
    "card",
    [
        "",
        "no metadata",
        "---\ntags: [other]\n---\ntext",
        "---\ntags: [acc-lm\n---\ntext",
        CARD.replace("results:", "x:"),
    ],
)
def test_a_card_of_someone_else_is_left_alone(card: str) -> None:
    assert card_with_benchmarks(card, {"arc": task(acc=0.5)}, "h 1") is None


def test_no_file_of_this_machine_is_named_as_a_data_set() -> None:
    for name in ("json", "/home/me/data", None):
        card = card_with_benchmarks(CARD, {"own|task`": task(acc=0.5) | {"dataset": name}}, "h 1")
        assert card
        assert (ModelCard(card).data.eval_results or [])[-1].dataset_type == "text"
        assert "| `own task ` | acc |" in card


def test_a_summary_keeps_the_figures_of_other_tasks_and_of_a_failed_attempt(tmp_path: Path) -> None:
    assert not record_benchmarks(tmp_path, {"arc": task(acc=0.5)})
    assert not list(tmp_path.iterdir())
    (tmp_path / "summary.json").write_text('{"status": "completed", "benchmarks": "damaged"}')
    assert record_benchmarks(tmp_path, {"arc": task(acc=0.5)})
    assert record_benchmarks(tmp_path, {"wiki": task(acc=1)})
    assert record_benchmarks(tmp_path, {"arc": task(acc=0.75)})
    summary = read_summary(tmp_path)
    assert summary["status"] == "completed"
    assert {name: one["metrics"] for name, one in summary["benchmarks"].items()} == {
        "arc": {"acc": 0.75},
        "wiki": {"acc": 1},
    }
    write_failure(str(tmp_path), "failed", 1, "later")
    assert read_summary(tmp_path)["benchmarks"] == summary["benchmarks"]


def test_the_same_command_after_the_end_keeps_the_figures(tiny: list[str], tmp_path: Path) -> None:
    """It writes summary and card again, of the same weights; a longer run has others."""
    run = tmp_path / "run"
    run_training(tiny)
    figures = {"arc": task(acc=0.5), "wiki": task(word_perplexity=9)}
    assert record_benchmarks(run, {name: one | {"harness": "h 1", "step": 6} for name, one in figures.items()})
    before = read_summary(run)["benchmarks"]
    run_training(tiny)
    assert read_summary(run)["benchmarks"] == before
    assert {("arc", "accuracy", 0.5), ("wiki", "word_perplexity", 9)} < set(
        entries((run / "final/README.md").read_text())
    )
    run_training([*tiny, "training.max_steps=8"])
    assert "benchmarks" not in read_summary(run)
    assert "arc" not in (run / "final/README.md").read_text()

    edited = {"arc": {"step": 8}, "wiki": {"step": 8, "harness": "h 1", "metrics": 3}}
    (run / "summary.json").write_text(json.dumps(read_summary(run) | {"benchmarks": edited}))
    run_training([*tiny, "training.max_steps=8"])  # an edited summary costs the end of no run
    assert read_summary(run)["status"] == "completed"
    assert (run / "final/README.md").read_text().startswith("---\n"), "and not the card"


REFUSALS = {
    "--tasks a --data x.txt": "--data must be left out with --tasks",
    "--tasks a --generate": "--generate must be left out with --tasks",
    "--tasks a,,b": "--tasks must be names with commas between them, got 'a,,b'",
    "--tasks=": "--tasks must be names with commas between them, got ''",
    "--tasks a --limit 0": "--limit must be at least 1, got 0",
    "--tasks a --num-fewshot -1": "--num-fewshot must be at least 0, got -1",
    "--tasks a --include-path /nowhere": "--include-path must be a folder with YAML files of tasks, got /nowhere",
    "--tasks a data.sequence_length=9": "--tasks must come with no keys but model.dtype,",
    "--limit 3": "--limit must come with --tasks",
    "--chat": "--chat must come with --tasks",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_each_refusal_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "runs/x", *words.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {REFUSALS[words]}"), said
    assert said.count("\n") == 1


def test_without_the_harness_one_line_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["evaluate", "runs/x", "--tasks", "hellaswag,arc_easy"]) == 2
    line = "error: --tasks must have the package lm-eval, got none; pip install 'acc-lm[lm-eval]'\n"
    assert capsys.readouterr().err == line
    extras = json.dumps(importlib.metadata.metadata("acc-lm").get_all("Provides-Extra"))
    assert '"lm-eval"' in extras
