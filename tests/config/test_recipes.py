"""Every recipe is run from its own file; only sizes and sources are overridden, with small data of the same schema."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from processes import ROOT, Finished, run_training

from acc_lm.config.loading import load_config
from acc_lm.planning.hardware import GIB
from benchmarks.headers import memory_line, memory_of_recipe

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FEW_STEPS = [
    "training.max_steps=4",
    "training.num_epochs=null",
    "schedule.warmup_steps=1",
    "training.eval_every=2",
    "tracking.report_to=[]",
]
SMALL = [
    "data.sequence_length=64",
    "data.eval_fraction=0.1",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_loads_names_its_schema_and_no_hardware(file: Path) -> None:
    config = load_config(file)
    assert file.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    assert file.stem == "quickstart" or file.stem.split("_")[0] in ("pretrain", "finetune", "chat")
    assert "${" not in file.read_text()
    assert "num_processes:" not in file.read_text()
    assert config.output_dir.startswith("runs/")
    assert len({load_config(other).output_dir for other in RECIPES}) == len(RECIPES)
    if config.model.config:
        dropouts = [value for key, value in config.model.config.items() if "drop" in key]
        assert not any(dropouts), "a recipe of ours has no dropout"


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_header_states_what_to_expect_and_its_source(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("# ")][1:]
    for name in ("Reproduces", "Model", "Data", "Hardware", "Tokens", "Expected"):
        assert sum(line.startswith(f"# {name}: ") for line in header) == 1, name
    (memory,) = [line for line in header if line.startswith("# Memory")]
    line = memory_line(file)
    assert memory == line or (line is None and "measured" in memory) or file.stem == "pretrain_synthetic"


ONE_GPU = {"16 GB": 14.6, "24 GB": 23.5, "32 GB": 31.4}
"""Usable GiB of the smallest GPU with so much memory: T4, RTX 4090, RTX 5090."""


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_gpu_that_a_header_names_is_enough(file: Path) -> None:
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("# Hardware")]
    named = re.findall(r"(?:one GPU )?with (\d+ GB)(?:, (training\.\w+=\d+))?", line)
    for size, change in named:
        if size == "80 GB":
            found, usable = memory_of_recipe(file, [], "fsdp2" if "with fsdp2.yaml" in line else "ddp", 8), 79.1
        else:
            found, usable = memory_of_recipe(file, [change] if change else [], "single_gpu", 1), ONE_GPU[size]
        assert found is not None
        assert found.high < usable * GIB, f"{size}, {change}: {found.low / GIB:.1f} to {found.high / GIB:.1f} GiB"


def run_recipe(name: str, run: Path, *overrides: str) -> Finished:
    finished = run_training(
        ["--config", str(ROOT / f"recipes/{name}.yaml"), f"output_dir={run}", *FEW_STEPS, *overrides]
    )
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("completed", 4)
    weights = "adapter_model" if "lora" in name else "model"
    assert (run / f"final/{weights}.safetensors").is_file()
    assert math.isfinite(summary["bits_per_byte"]["model"])
    assert "dropout" not in finished.output, "a recipe of ours has none, and the start block does not speak of any"
    return finished


def test_quickstart(tmp_path: Path) -> None:
    run_recipe("quickstart", tmp_path / "run", "model.config.hidden_size=16", "model.config.intermediate_size=16",
               "tokenizer.vocab_size=300", "training.eval_batches=2", "training.global_batch_size=8")  # fmt: skip
    bits = json.loads((tmp_path / "run/summary.json").read_text())["bits_per_byte"]
    assert set(bits) == {"model"}, "compressors are shown only with an evaluation of all the text"


def test_the_tail_of_shakespeare_is_held_out(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "shakespeare.txt").write_text("\n".join(words))
    finished = run_recipe(
        "pretrain_gpt2_shakespeare-char", tmp_path / "run", f"data.files=[{tmp_path}/shakespeare.txt]",
        "model.config={n_embd: 16, n_layer: 2, n_head: 2}",
    )  # fmt: skip
    length = len("\n".join(words))
    assert f"1 documents, {length - int(length * 0.9):,} tokens" in finished.output


def test_finetune_on_files_of_any_kind(hub: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "a.txt").write_text("\n".join(words[:20]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words[20:]))
    run_recipe(
        "finetune_smollm2-135m_files", tmp_path / "run", f"model.name_or_path={hub}/HuggingFaceTB/SmolLM2-135M",
        f"data.files=[{tmp_path}/**/*.txt, {tmp_path}/**/*.jsonl]", *SMALL,
    )  # fmt: skip
    card = (tmp_path / "run/final/README.md").read_text()
    assert "fine-tuned from a model in a local folder" in card
    assert "base_model:" not in card, "a path of this machine is no base model"


def test_a_chat_model_learns_ones_own_conversations(hub: Path, tmp_path: Path) -> None:
    """A few dozen records with columns and roles of their own; no recipe says that it was run where it was not."""
    with (tmp_path / "mine.jsonl").open("w") as file:
        for number in range(40):
            turns = [{"who": "customer", "said": f"what is {number}?"}, {"who": "agent", "said": f"it is {number}"}]
            file.write(json.dumps({"ticket": number, "messages": turns}) + "\n")
    finished = run_recipe(
        "chat_own_files_lora", tmp_path / "run", f"model.name_or_path={hub}/Qwen/Qwen3-0.6B",
        f"data.files=[{tmp_path}/mine.jsonl]", "data.columns={role: who, content: said}",
        "data.roles={user: customer, assistant: agent}", "adapter.rank=2", *SMALL,
    )  # fmt: skip
    assert re.search(r"learned +messages, trained on assistant: (3\d) conversations in \1 items", finished.output)
    for file in RECIPES:
        (expected,) = re.findall(r"^# Expected: (.*)", file.read_text(), re.M)
        assert ("not run" in expected) == (
            file.stem in {*ON_THE_HUB, "finetune_smollm2-135m_files", "chat_own_files_lora"}
        )
        assert "not run" not in expected or "tests/config/test_recipes.py trains it" in expected, "what was run instead"


# By name: overrides other than sizes and places, and what the start block prints about the data.
ON_THE_HUB = {
    "pretrain_gpt2-124m_fineweb-edu": ("model.config={n_embd: 16, n_layer: 2, n_head: 2}", None),
    "pretrain_llama-1b_fineweb-edu": (
        "model.config={hidden_size: 24, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 3, num_key_value_heads: 1}",
        None,
    ),
    "pretrain_llama-11b_fineweb-edu": (
        "model.config={hidden_size: 24, intermediate_size: 32, num_hidden_layers: 48, num_attention_heads: 3, num_key_value_heads: 1}",
        None,
    ),
    "finetune_llama-3.2-1b_long-rows": ("data.dataset_split=train", None),
    "finetune_qwen3-0.6b_wikitext": ("data.skip_bad_rows=20", r"note +30 records without usable text were skipped"),
    "finetune_llama-3.2-1b_lora": (
        "adapter.rank=2",
        r"learned +alpaca, trained on assistant: (2\d+) conversations in \1 items",
    ),
    "chat_smollm2-360m_alpaca": (
        "data.skip_bad_rows=1",
        r"learned +alpaca, trained on assistant: (2\d+) conversations in \1 items",
    ),
    "chat_smollm2-360m_alpaca_lora": (
        "data.skip_bad_rows=1",
        r"learned +alpaca, trained on assistant: (2\d+) conversations in \1 items",
    ),
    "chat_qwen3_messages": (
        "data.max_lossy_share=0",
        r"learned +messages, trained on assistant: 40 conversations in 80 items",
    ),
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_recipe_on_the_hub(name: str, hub: Path, tmp_path: Path) -> None:
    override, says = ON_THE_HUB[name]
    config = load_config(ROOT / f"recipes/{name}.yaml")
    overrides = [f"data.dataset={hub}/{config.data.dataset}", "data.dataset_config=null", override, *SMALL]
    if config.data.format:
        overrides.append("data.sequence_length=224")
    for key, place in (("model", config.model.name_or_path), ("tokenizer", config.tokenizer.name_or_path)):
        overrides += [f"{key}.name_or_path={hub}/{place}"] * (place is not None)
    finished = run_recipe(name, tmp_path / "run", *overrides)
    assert says is None or re.search(says, finished.output), finished.output
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["precision"] == "float32 weights, bfloat16 autocast compute, float32 reduction"


def test_every_recipe_is_run() -> None:
    here = {"quickstart", "pretrain_synthetic", "pretrain_gpt2_shakespeare-char", "finetune_smollm2-135m_files",
            "chat_own_files_lora"}  # fmt: skip
    of_a_lab = {"chat_quickstart_python-docs"}
    assert {file.stem for file in RECIPES} == here | set(ON_THE_HUB) | of_a_lab


@pytest.mark.parametrize(
    ("shorter", "within"),
    [
        pytest.param(("training.max_steps=120", "data.synthetic_tokens=200000"), 1.1, id="shorter"),
        pytest.param((), 1.03, marks=pytest.mark.slow, id="the whole recipe"),
    ],
)
def test_pretrain_synthetic_reaches_the_entropy_rate_and_never_goes_below(
    shorter: tuple[str, ...], within: float, tmp_path: Path
) -> None:
    """Its loss comes close to what no model can beat, and is not below what chance allows."""
    from acc_lm.text.corpus import open_corpus
    from acc_lm.text.documents import Skipped
    from acc_lm.text.synthetic import SYMBOLS, entropy_rate, transition_matrix

    recipe = ROOT / "recipes/pretrain_synthetic.yaml"
    whole = load_config(recipe)
    assert (whole.training.max_steps, whole.training.global_batch_size, whole.data.sequence_length) == (500, 16, 64)
    arguments = ["--config", str(recipe), *shorter, f"output_dir={tmp_path / 'run'}", "tracking.report_to=[]"]
    finished = run_training(arguments, timeout=400)
    loss = json.loads((tmp_path / "run/summary.json").read_text())["eval_loss"]["last"]
    config = load_config(recipe, [*shorter])
    transitions = transition_matrix(config.seed)
    rate = entropy_rate(transitions)
    assert f"{rate:.4f} nats per symbol" in finished.output
    corpus = open_corpus(config.data, config.seed)
    assert corpus.evaluation is not None
    (held_out,) = corpus.evaluation(Skipped(0))
    states = np.array([SYMBOLS.index(c) for c in held_out.text])
    truth = -np.log(transitions[states[:-1], states[1:]])  # the source's own loss on the held-out text
    error = truth.std() / math.sqrt(len(truth))
    print(
        f"loss {loss:.4f}, entropy rate {rate:.4f} ({loss / rate:.4f}), truth on the held-out text {truth.mean():.4f} +- {error:.4f}"
    )
    assert loss < within * rate
    assert loss > truth.mean() - 4 * error
