"""`final/` in EleutherAI's evaluation harness, on a task defined here; only by `pytest -m lm_eval`, with the extra lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import LAUNCH_VARIABLES
from test_conversations import write as write_exchanges
from test_evaluate_cli import adapter_run, chat_run, chats, evaluate, figures, folder, imported, rows_of  # noqa: F401

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
