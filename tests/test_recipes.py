"""Every recipe is run from its own file; only sizes and sources are overridden, with small data of the same schema."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from processes import ROOT, run_training

from acc_lm.recipe import load_config

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FEW_STEPS = [
    "training.max_steps=4",
    "training.num_epochs=null",
    "schedule.warmup_steps=1",
    "training.eval_every=2",
    "tracking.report_to=[]",
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


def test_the_recipes_are_the_promised_ones() -> None:
    assert {file.stem for file in RECIPES} == {
        "quickstart", "pretrain_synthetic", "pretrain_gpt2-124m_fineweb-edu", "finetune_smollm2-135m_files",
    }  # fmt: skip


def run_recipe(name: str, run: Path, *overrides: str) -> dict[str, float]:
    run_training(["--config", str(ROOT / f"recipes/{name}.yaml"), f"output_dir={run}", *FEW_STEPS, *overrides])
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("completed", 4)
    assert (run / "final/model.safetensors").is_file()
    return dict(summary["bits_per_byte"])


def test_quickstart(tmp_path: Path) -> None:
    bits = run_recipe("quickstart", tmp_path / "run", "model.config.hidden_size=16", "model.config.intermediate_size=16",
                      "tokenizer.vocab_size=300", "training.eval_batches=2", "training.global_batch_size=8")  # fmt: skip
    assert set(bits) == {"model"}, "compressors are shown beside an evaluation of all the text only"


def test_pretrain_gpt2(tmp_path: Path, words: list[str]) -> None:
    """The Hub data set has columns text, id, dump, url, ...; the Hub tokenizer is a byte-level BPE like the one made here."""
    folder = tmp_path / "fineweb"
    folder.mkdir()
    records = [
        {"text": text, "id": str(i), "dump": "CC", "url": "http://x", "score": 3.1} for i, text in enumerate(words)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    from acc_lm.config import TokenizerConfig
    from acc_lm.tokenizer import make_tokenizer

    make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), words).save_pretrained(tmp_path / "gpt2")
    run_recipe(
        "pretrain_gpt2-124m_fineweb-edu", tmp_path / "run", f"data.dataset={folder}", "data.dataset_config=null",
        f"tokenizer.name_or_path={tmp_path / 'gpt2'}", "model.config={n_embd: 16, n_layer: 2, n_head: 2}", "data.eval_fraction=0.1",
        "data.sequence_length=32", "training.global_batch_size=8", "training.micro_batch_size=4",
    )  # fmt: skip
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["precision"] == "float32 weights, bfloat16 autocast compute, float32 reduction"


def test_finetune_smollm2(tmp_path: Path, words: list[str]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from acc_lm.config import TokenizerConfig
    from acc_lm.tokenizer import make_tokenizer

    config = AutoConfig.for_model("llama", hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
                                  num_key_value_heads=1, tie_word_embeddings=True, vocab_size=320, max_position_embeddings=64)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "smollm2")
    make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=300), words).save_pretrained(tmp_path / "smollm2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("\n".join(words[:20]))
    (tmp_path / "data/b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words[20:]))
    run_recipe(
        "finetune_smollm2-135m_files", tmp_path / "run", f"model.name_or_path={tmp_path / 'smollm2'}",
        f"data.files=[{tmp_path}/data/**/*.txt, {tmp_path}/data/**/*.jsonl]", "data.sequence_length=32",
        "training.global_batch_size=8", "training.micro_batch_size=4",
    )  # fmt: skip
    card = (tmp_path / "run/final/README.md").read_text()
    assert "base_model:" in card
    assert "fine-tuned from" in card


def test_pretrain_synthetic_reaches_the_entropy_rate_and_never_goes_below(tmp_path: Path) -> None:
    """The whole recipe, unchanged: its loss is within 3 % of what no model can beat, and not below what chance allows."""
    from acc_lm.config import DataConfig
    from acc_lm.sources import SYMBOLS, Skipped, entropy_rate, open_corpus, transition_matrix

    recipe = ROOT / "recipes/pretrain_synthetic.yaml"
    config = load_config(recipe)
    assert (config.training.max_steps, config.training.global_batch_size, config.data.sequence_length) == (2000, 16, 64)
    finished = run_training(
        ["--config", str(recipe), f"output_dir={tmp_path / 'run'}", "tracking.report_to=[]"], timeout=400
    )
    loss = json.loads((tmp_path / "run/summary.json").read_text())["eval_loss"]["last"]
    transitions = transition_matrix(config.seed)
    rate = entropy_rate(transitions)
    assert f"{rate:.4f} nats per symbol" in finished.output
    corpus = open_corpus(
        DataConfig(
            source="synthetic", synthetic_tokens=config.data.synthetic_tokens, eval_fraction=config.data.eval_fraction
        ),
        config.seed,
    )
    assert corpus.evaluation is not None
    (held_out,) = corpus.evaluation(Skipped(0))
    states = np.array([SYMBOLS.index(c) for c in held_out.text])
    truth = -np.log(transitions[states[:-1], states[1:]])  # what the source itself would say of the held-out text
    error = truth.std() / math.sqrt(len(truth))
    print(
        f"loss {loss:.4f}, entropy rate {rate:.4f} ({loss / rate:.4f}), truth on the held-out text {truth.mean():.4f} +- {error:.4f}"
    )
    assert loss < 1.03 * rate
    assert loss > truth.mean() - 4 * error
