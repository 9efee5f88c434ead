"""Samples at each evaluation: what generation gives on every engine; they change no step."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from backends import STRATEGY
from processes import ROOT, launcher_environment, run_training
from test_conversations import write as write_conversations
from test_epochs import kill
from test_resume import assert_equal_runs
from test_stop import tell, train_with, wrap

from acc_lm.config.loading import load_config
from acc_lm.errors import ConfigError
from acc_lm.run_files.metrics_file import read
from acc_lm.run_files.names import SAMPLES

DROPOUT = "model.config={model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 128, resid_pdrop: 0.7, embd_pdrop: 0.7}"
PROMPTS = ["red green", "the river\nsings", "日本"]
ASKED = ["tracking.sample_tokens=9", f"tracking.sample_prompts={json.dumps(PROMPTS, ensure_ascii=False)}", "optimizer.learning_rate=3e-2"]  # fmt: skip


def samples(run: Path) -> dict[int, list[tuple[str, str]]]:
    found: dict[int, list[tuple[str, str]]] = {}
    for entry in read(run, SAMPLES):
        assert set(entry) == {"step", "prompt", "text"}
        found.setdefault(entry["step"], []).append((entry["prompt"], entry["text"]))
    return found


def generated(run: Path, prompts: list[Any], num_tokens: int) -> list[str]:
    """Text that transformers' own generation makes with the exported weights; a list is a conversation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(run / "final", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(run / "final", trust_remote_code=False).eval()
    texts = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=False)  # fmt: skip
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        end = tokenizer.eos_token_id
        texts.append(tokenizer.decode(made[: made.index(end)] if end in made else made))
    return texts


@pytest.mark.parametrize(
    ("config", "micro"),
    [("", 2), ("fsdp2", 1), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("ddp", "deepspeed_zero2", "deepspeed_zero3", "ddp_sequence"))],
)  # fmt: skip
def test_samples_are_what_generation_gives(config: str, micro: int, tiny: list[str], tmp_path: Path) -> None:
    run, num_processes = tmp_path / "run", 2 if config else 1
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2) if config else {}
    trackers = "tracking.report_to=[tensorboard]"
    run_training([*tiny, *ASKED, f"training.micro_batch_size={micro}", trackers], num_processes, environment)
    assert json.loads((run / "environment.json").read_text())["strategy"] == STRATEGY[config or "single"][0]
    found = samples(run)
    assert sorted(found) == [3, 6]
    assert [prompt for prompt, _ in found[6]] == PROMPTS
    assert [text for _, text in found[6]] == generated(run, PROMPTS, 9)
    assert found[3] != found[6], "the weights of that moment"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard/acc-lm"))
    accumulator.Reload()
    shown = accumulator.Tensors("samples/text_summary")
    assert [event.step for event in shown] == [3, 6]
    assert "red green ⟶ " in shown[1].tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("packing", [True, False])
def test_in_conversations_a_prompt_is_a_users_turn(packing: bool, tiny: list[str], tmp_path: Path) -> None:
    file = write_conversations(tmp_path / "chats.jsonl", "messages")
    chat = [*tiny, f"data.files={file}", "data.sequence_length=96", "training.global_batch_size=6", "training.micro_batch_size=3",
            f"data.packing={str(packing).lower()}", "optimizer.learning_rate=3e-2"]  # fmt: skip
    run_training([*chat, "tracking.sample_tokens=9", "tracking.sample_prompts=[what does Ada say?]"])
    run = tmp_path / "run"
    ((prompt, text),) = samples(run)[6]
    question = [{"role": "user", "content": "what does Ada say?"}]
    assert [text] == generated(run, [question], 9)
    assert "what does Ada say?" in prompt
    assert prompt != "what does Ada say?", "the template stands around it"
    # Without prompts: the first question that was held out, up to where the answer begins.
    run_training([*chat, "tracking.sample_tokens=9", f"output_dir={tmp_path / 'other'}"])
    ((first, _),) = samples(tmp_path / "other")[6]
    assert "say?" in first
    assert first.endswith(prompt.split("Ada say?")[1])


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_samples_change_no_step(num_processes: int, tiny: list[str], tmp_path: Path) -> None:
    """With dropout, which draws random numbers; and a prompt that is longer than a row."""
    dropout = [
        *tiny,
        DROPOUT,
        "optimizer.learning_rate=3e-2",
        "training.micro_batch_size=6",
        "training.log_every=1",
        "data.sequence_length=128",
    ]
    run_training([*dropout, f"output_dir={tmp_path / 'without'}"], num_processes)
    long = f"tracking.sample_prompts={json.dumps(['tree ' * 99, 'blue'])}"
    run_training([*dropout, "tracking.sample_tokens=5", long, f"output_dir={tmp_path / 'with'}"], num_processes)
    assert_equal_runs(tmp_path / "without", tmp_path / "with", 6)
    ((cut, _), (whole, text)) = samples(tmp_path / "with")[6]
    assert (len(cut), whole) == (128 - 5, "blue")
    assert [text] == generated(tmp_path / "with", ["blue"], 5)
    assert not (tmp_path / "without" / SAMPLES).exists()


def test_each_sample_is_recorded_once_whatever_interrupts(tiny: list[str], tmp_path: Path) -> None:
    """Stopped where an evaluation is due, killed between its samples and its line, and again before the next checkpoint."""
    arguments = [*tiny, *ASKED, "training.eval_every=1", "checkpoint.every=3", "checkpoint.keep_best=0"]
    run_training([*arguments, f"output_dir={tmp_path / 'whole'}"])
    for action, place, call in (
        (tell, "acc_lm.training.train_step", 3),
        (kill, "acc_lm.run_files.metrics_file.append", 1),
        (kill, "acc_lm.training.train_step", 3),
    ):
        finished = train_with(arguments, lambda: wrap(place, action, call))  # noqa: B023
        assert finished.codes == [75 if action is tell else -signal.SIGKILL]
    run_training(arguments)
    assert samples(tmp_path / "run") == samples(tmp_path / "whole")
    assert all(len(of_step) == 3 for of_step in samples(tmp_path / "run").values())


def test_weights_and_biases_gets_a_table() -> None:
    from acc_lm.reporting.tracking import _shown

    table = _shown({"samples": [{"step": 3, "prompt": "a", "text": "b"}]}, "wandb")["samples"]
    assert (table.columns, table.data) == (["step", "prompt", "text"], [[3, "a", "b"]])
    assert _shown({"eval/loss": 1.0}, "wandb") == {"eval/loss": 1.0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tracking.sample_tokens=32"], r"tracking\.sample_tokens must be less than data\.sequence_length 32, got 32; lower it"),
        (["tracking.sample_prompts=[a, b]"], r"tracking\.sample_tokens must be at least 1 for 2 sample_prompts, got 0; raise it"),
        (["tracking.sample_tokens=-1"], r"tracking\.sample_tokens must be a number >= 0, got -1"),
        (["tracking.sample_tokens=3", "tracking.sample_prompts=[3]"], r"tracking\.sample_prompts\.0 must be a string, got 3"),
    ],
)  # fmt: skip
def test_each_refusal_is_one_line(overrides: list[str], message: str, tiny_recipe: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(tiny_recipe, overrides)
    assert len(error.value.problems) == 1
