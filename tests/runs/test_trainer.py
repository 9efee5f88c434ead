"""Comparison with HF Trainer and TRL: the same model, rows, optimizer and schedule in theirs; targets of the same conversations.

Where they differ, docs/guides/coming_from.md says which is right and why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_recipe_of
from processes import run_everywhere, run_training
from test_chat import FAMILIES, LONG, decoded, tokenizer_of, turns

from acc_lm.chat.items import build_items
from acc_lm.chat.records import read_conversation
from acc_lm.chat.template import load_template
from acc_lm.config.loading import load_config
from acc_lm.data import build_data
from acc_lm.modeling.build import build_model
from acc_lm.modeling.pretrained import scratch_config
from acc_lm.run_files.metrics_file import read

STEPS, ACCUMULATION = 20, 3
SIZES = "hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1"
MODELS = {
    "gpt2": "{model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}",
    "llama": f"{{model_type: llama, {SIZES}}}",
    "qwen3": f"{{model_type: qwen3, {SIZES}, head_dim: 8}}",
    "mixtral": f"{{model_type: mixtral, {SIZES}, num_local_experts: 4}}",
}
RECIPE = [
    "model.dtype=float64", f"training.max_steps={STEPS}", f"training.micro_batch_size={12 // ACCUMULATION}", "training.log_every=1",
    "training.eval_every=null", "checkpoint.every=null", "optimizer.learning_rate=0.01", "optimizer.weight_decay=0.1",
    "optimizer.max_grad_norm=0.5", "schedule.warmup_steps=4",
]  # fmt: skip


def with_trainer(
    arguments: list[str], folder: Path, output_router_logits: bool
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of transformers' Trainer on the rows and the first weights of our run."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    config = load_config(arguments[1], arguments[2:])
    data = build_data(config.data, config.tokenizer, None, config.seed, config.training.global_batch_size)
    ours, _ = build_model(config.model, data.tokenizer, config.data.sequence_length, config.seed)
    model = AutoModelForCausalLM.from_config(scratch_config(config.model, data.tokenizer), dtype=torch.float64)
    model.set_experts_implementation("eager")  # the other implementation has no float64
    model.load_state_dict(ours.state_dict())
    model.config.output_router_logits = output_router_logits
    order = data.order(config.seed, config.training.global_batch_size)
    rows = [data.train[int(row)] for step in range(1, STEPS + 1) for row in order.rows_at(step)]
    dataset = [
        {"input_ids": row["input_ids"][0], "labels": row["targets"][0], "shift_labels": row["targets"][0]}  # shifted already
        for row in rows
    ]  # fmt: skip

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    optimizer = config.optimizer
    trainer = InOrder(
        model,
        TrainingArguments(
            str(folder), max_steps=STEPS, per_device_train_batch_size=config.training.micro_batch_size,
            gradient_accumulation_steps=ACCUMULATION, learning_rate=optimizer.learning_rate, weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1], adam_epsilon=optimizer.epsilon,
            max_grad_norm=optimizer.max_grad_norm, lr_scheduler_type="cosine", warmup_steps=config.schedule.warmup_steps,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, remove_unused_columns=False, disable_tqdm=True,
        ),
        train_dataset=dataset,
    )  # fmt: skip
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == STEPS
    return [entry["loss"] for entry in logs], [float(entry["grad_norm"]) for entry in logs], model.state_dict()


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict())


def both(
    model_type: str,
    text_file: Path,
    tmp_path: Path,
    *more: str,
    theirs: tuple[str, ...] = (),
    output_router_logits: bool = False,
    few: int = STEPS,
) -> tuple[dict[str, float], float]:
    """Largest relative differences of losses and gradient norms, and of any weight to the largest of its tensor."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(tiny_recipe_of(text_file))
    arguments = ["--config", str(recipe), f"model.config={MODELS[model_type]}", *RECIPE, *more]
    run_training([*arguments, f"output_dir={tmp_path / 'run'}"])
    entries = [entry for entry in read(tmp_path / "run") if "train/loss" in entry]
    ((losses, norms, weights),) = run_everywhere(
        lambda: with_trainer([*arguments, *theirs], tmp_path / "trainer", output_router_logits)
    )
    assert max(norms) > 0.5, "clipping must be at work"
    off = {
        name: max(
            abs(entry[f"train/{name}"] / other - 1) for entry, other in zip(entries[:few], values[:few], strict=True)
        )
        for name, values in (("loss", losses), ("grad_norm", norms))
    }
    (ours,) = run_everywhere(lambda: final_weights(tmp_path / "run/final"))
    assert ours.keys() == weights.keys()
    weight = max(float((ours[name] - weights[name]).abs().max() / weights[name].abs().max()) for name in ours)
    print(model_type, off, weight)
    return off, weight


@pytest.mark.parametrize("model_type", MODELS)
def test_the_run_is_that_of_transformers_trainer(model_type: str, text_file: Path, tmp_path: Path) -> None:
    """With accumulation, clipping, weight decay and warm-up, to the end."""
    off, weight = both(model_type, text_file, tmp_path, "model.router_loss=off")
    assert off["loss"] < 1e-6
    assert off["grad_norm"] < 1e-6
    assert weight < 1e-5


def test_with_accumulation_trainer_multiplies_the_router_loss_by_the_micro_batches(
    text_file: Path, tmp_path: Path
) -> None:
    """Ours is the mean over them where it is not exact: three times the coefficient gives Trainer's steps.

    Both add router probabilities in float32, so that only the first steps are compared: AdamW makes the difference larger.
    """
    theirs, few = ("model.config.router_aux_loss_coef=0.1",), 3
    for times, is_equal in ((ACCUMULATION, True), (1, False)):
        ours = ["model.router_loss=per_micro_batch", f"model.config.router_aux_loss_coef={0.1 * times}"]
        folder = tmp_path / str(times)
        folder.mkdir()
        off, _ = both("mixtral", text_file, folder, *ours, theirs=theirs, output_router_logits=True, few=few)
        assert (off["grad_norm"] < 1e-6) == is_equal, off


# --- TRL -----------------------------------------------------------------------------------------------------------

RECORDS: list[dict[str, Any]] = [
    {"messages": turns("hello", "hello there")},
    {"messages": turns("a", "b", "c", "d")},
    {"messages": turns({"role": "system", "content": "be kind"}, "naïve 日本", " 🙂 ", "again", "\n\nindeed\n")},
]


def trl_targets(name: str, records: list[dict[str, Any]], folder: Path) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each record as SFTTrainer hands them to the model, with the loss on what assistants say."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = tokenizer_of("byte", name)
    tokenizer.chat_template = FAMILIES[name].template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    arguments = SFTConfig(
        str(folder), assistant_only_loss=True, max_length=LONG, packing=False, use_cpu=True, bf16=False, report_to=[], dataset_num_proc=None,
    )  # fmt: skip
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
    found = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        found.append((batch["input_ids"][0].tolist(), batch["labels"][0].tolist()))
    return found


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_targets_are_those_of_trl(name: str, tmp_path: Path) -> None:
    """Except for templates that render an earlier answer differently from how it was given: TRL then learns the rendered one."""
    pytest.importorskip("trl", reason="pip install 'acc-lm[dev]'")
    records = [record for record in RECORDS if name != "gemma" or record["messages"][0]["role"] != "system"]
    (theirs,) = run_everywhere(lambda: trl_targets(name, records, tmp_path))
    tokenizer = tokenizer_of("byte", name)
    template = load_template(tokenizer)
    for record, (ids, labels) in zip(records, theirs, strict=True):
        items, _ = build_items(
            read_conversation(record, "messages", "x.jsonl:1"), tokenizer, template, "assistant", LONG
        )
        learned = [label for label in labels if label != -100]
        ours = [each for item in items for each, is_target in zip(item.ids, item.is_target, strict=True) if is_target]
        print(name, repr(decoded(tokenizer, learned)), repr(decoded(tokenizer, ours)))
        if name == "qwen3" and len(items) > 1:
            thought = "<think>\n\n</think>\n\n"
            assert decoded(tokenizer, learned).count(thought) == 1, "the last answer's alone"
            assert decoded(tokenizer, ours).replace(thought, "") == decoded(tokenizer, learned).replace(thought, "")
            continue
        assert decoded(tokenizer, ours) == decoded(tokenizer, learned)
        if len(items) == 1:
            (item,) = items
            assert item.ids == ids[: len(item.ids)]
            assert [i if t else -100 for i, t in zip(item.ids, item.is_target, strict=True)] == labels[: len(item.ids)]
