"""`final/` in EleutherAI's evaluation harness, on a task defined here; only by `pytest -m lm_eval`, with the extra lm-eval."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from processes import LAUNCH_VARIABLES
from test_conversations import write as write_exchanges
from test_evaluate_cli import adapter_run, chat_run, chats, evaluate, figures, folder, imported, rows_of, text_run  # noqa: F401
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from acc_lm.export.exported import load_exported
from acc_lm.text.tokenizer import build_encoder

TASKS = {
    # What a run learns from an answer: its tokens and the end token, after the ids of the prompt.
    "answers": """
task: answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{completion}}}}<|endoftext|>"
target_delimiter: ""
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
metadata: {{version: 1}}
""",
    # The chat template on messages, and what is generated after it.
    "chat": """
task: chat
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{messages[0].content}}}}"
doc_to_target: "{{{{messages[1].content}}}}"
generation_kwargs: {{until: ["<|endoftext|>"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
metadata: {{version: 1}}
""",
    # A question with several answers, one of which is right.
    "choices": """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{answers}}}}"
doc_to_target: "{{{{right}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 3}}
""",
    # All of a text, from its first token on.
    "text": """
task: text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
metadata: {{version: 1}}
""",
}


def harness(model: str, task: str, file: Path, here: Path, *more: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results and samples of one task, from the harness's own command."""
    here.mkdir()
    (here / f"{task}.yaml").write_text(TASKS[task].format(file=file))
    environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(here / "datasets"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", model, "--tasks", task, "--include_path", str(here), "--device", "cpu",
        "--batch_size", "4", "--output_path", str(here / "out"), "--log_samples", *more,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,), (samples,) = (list((here / "out").rglob(name)) for name in ("results_*.json", "samples_*.jsonl"))
    found = sorted(rows_of(samples), key=lambda sample: sample["doc_id"])
    return json.loads(results.read_text())["results"][task], found


@pytest.mark.lm_eval
def test_the_harness_finds_our_loglikelihoods(chat_run: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("lm_eval")
    # Prompts that end with a letter: the harness counts white space there with the answer.
    file, out = write_exchanges(tmp_path / "pairs.jsonl", "prompt_completion"), tmp_path / "ours.jsonl"
    evaluate([chat_run, "--data", file, "--predictions", out])
    ours = rows_of(out)
    _, samples = harness(f"pretrained={chat_run}/final,dtype=float32", "answers", file, tmp_path / "whole")
    assert len(samples) == len(ours) == 60
    for sample, row in zip(samples, ours, strict=True):
        log_p, is_greedy = sample["filtered_resps"][0]
        assert float(log_p) == pytest.approx(-row["nll"], rel=1e-5)
        assert (str(is_greedy) == "True") == (row["correct"] == row["targets"])


@pytest.mark.lm_eval
@pytest.mark.parametrize("kind", ["chat_run", "adapter_run"])
def test_the_harness_chats_with_final(kind: str, chats: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:  # noqa: F811
    pytest.importorskip("lm_eval")
    run = request.getfixturevalue(kind)
    model = f"pretrained={run}/final,dtype=float32"
    if kind == "adapter_run":
        base = json.loads((run / "final/adapter_config.json").read_text())["base_model_name_or_path"]
        model = f"pretrained={base},peft={run}/final,dtype=float32"
    found = figures(
        [run, "--data", chats, "--generate", "--max-new-tokens", 12, "--predictions", tmp_path / "ours.jsonl"]
    )
    results, samples = harness(model, "chat", chats, tmp_path / "chat", "--apply_chat_template")
    assert results["exact_match,none"] == pytest.approx(found["generation"]["exact_match"])
    assert found["generation"]["exact_match"] > 0.9, "it has learned to answer"
    ours = [row["completion"] for row in rows_of(tmp_path / "ours.jsonl")]
    assert [sample["filtered_resps"][0] for sample in samples] == ours


def nll(model: Any, context: list[int], answer: list[int]) -> float:
    """Sum of -log p of the answer's tokens, in nats."""
    with torch.no_grad():
        logits = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
    return -float(log_softmax(logits.double(), dim=-1)[range(len(answer)), answer].sum())


@pytest.mark.lm_eval
@pytest.mark.parametrize("kind", ["text_run", "adapter_run"])
def test_the_verb_finds_our_figures_and_records_them(
    kind: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    run = request.getfixturevalue(kind)
    # Each question ends with a colon: the harness counts white space there with the answer.
    questions = [
        (f"{text[:20].strip()}:", [text[20:27], text[30:47], text[50:53]], n % 3) for n, text in enumerate(words)
    ]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows: dict[str, list[dict[str, Any]]] = {
        "choices": [dict(zip(("question", "answers", "right"), row, strict=True)) for row in questions],
        "text": [{"text": text[:60]} for text in words],
    }
    for name, of_task in rows.items():
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_task))
        (tasks / f"{name}.yaml").write_text(TASKS[name].format(file=tasks / f"{name}.jsonl"))
    found = figures([run, "--tasks", "choices,text", "--include-path", tasks, "--batch-size", 4])["tasks"]

    model, tokenizer = load_exported(run / "final").eval(), AutoTokenizer.from_pretrained(run / "final")
    encoder = build_encoder(tokenizer)
    right = right_by_length = 0
    for question, answers, place in questions:
        ids = [encoder.encode([text])[0].tolist() for text in (question, *answers)]
        scores = [nll(model, ids[0], answer) for answer in ids[1:]]
        by_length = [score / len(answer) for score, answer in zip(scores, answers, strict=True)]
        right += scores.index(min(scores)) == place
        right_by_length += by_length.index(min(by_length)) == place
    count = len(questions)
    assert found["choices"]["metrics"] == {"acc": right / count, "acc_norm": right_by_length / count}
    assert 0 < right < count
    assert right != right_by_length, "the two figures can be told apart"
    assert (found["choices"]["num_samples"], found["choices"]["version"]) == (count, 3)
    texts = [row["text"] for row in rows["text"]]
    nats = sum(nll(model, [tokenizer.bos_token_id], encoder.encode([text])[0].tolist()) for text in texts)
    bits = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert found["text"]["metrics"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)

    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert {name: task["metrics"] for name, task in summary["benchmarks"].items()} == {
        name: task["metrics"] for name, task in found.items()
    }
    assert summary["benchmarks"]["text"]["step"] == summary["exported_step"]
    index = {
        (entry.dataset_name, entry.metric_name): entry.metric_value
        for entry in ModelCard.load(run / "final/README.md").data.eval_results
    }
    assert index["choices", "acc"] == right / count
    assert index["text", "bits_per_byte"] == pytest.approx(bits, abs=1e-5)
    assert "Loss (nats per token)" in {metric for _, metric in index}, "the run's own figures stay"

    before = (run / "final/README.md").read_text()
    few = figures([run, "--tasks", "choices", "--include-path", tasks, "--limit", 3])["tasks"]
    assert few["choices"]["num_samples"] == 3
    assert (run / "final/README.md").read_text() == before, "a trial is not recorded"
    AutoModelForCausalLM.from_pretrained(run / "final")


@pytest.mark.lm_eval
def test_names_data_and_launches_that_the_verb_cannot_use_are_one_line(
    text_run: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    refusals = {
        ("hellaswg",): (2, "got 'hellaswg'; did you mean hellaswag?"),
        ("no such task at all",): (2, "list them with: lm-eval ls tasks"),
        ("hellaswag",): (3, "the data of the tasks hellaswag must be within reach, got: "),
        ("hellaswag", "--chat"): (2, "--chat must have a model with a chat template"),
    }
    before = (text_run / "summary.json").read_text()
    for words, (code, line) in refusals.items():
        done = evaluate([text_run, "--tasks", *words], expect=code)
        assert len(done.errors) == 1
        assert line in done.errors[0]
        assert "Traceback" not in done.output
    done = evaluate([text_run, "--tasks", "hellaswag"], 2, expect=4)
    assert "--tasks must run in one process, got 2" in done.output
    (tmp_path / "bad.yaml").write_text("task: [1\n")
    done = evaluate([text_run, "--tasks", "bad", "--include-path", tmp_path], expect=2)
    assert len(done.errors) == 1, done.output
    assert (text_run / "summary.json").read_text() == before
