"""Complete runs of `train.py`, as a user sees them."""

from __future__ import annotations

import json
import logging.handlers
import math
import re
import stat
from pathlib import Path

import pytest
from processes import Launch, run_everywhere, run_training
from test_resume import different, tensors_of

GOLDEN = Path(__file__).parent / "golden_losses.json"


def read_metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_that_the_docs_promise(tiny: list[str], tmp_path: Path) -> None:
    finished = run_training(tiny)
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    assert {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "training_curves.png",
        "summary.json",
        "checkpoints",
        "final",
        "tokenizer",
        "train.log",
    } == names
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["step"], summary["samples_seen"]) == (
        "completed",
        0,
        6,
        72,
    )
    assert summary["train_loss"]["last"] < summary["train_loss"]["first"]
    assert set(summary["bits_per_byte"]) == {"model", "gzip", "xz"}
    assert len(summary["ledger"]) == 32
    assert (run / "training_curves.png").stat().st_size > 10_000
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["strategy"], environment["num_processes"], environment["threads"]) == ("single", 1, 1)
    assert "global batch  12 = 12 micro x 1 processes x 1 accumulation" in finished.output
    assert "\r" not in finished.output, "a progress bar is for terminals"
    assert not list(run.rglob("tmp-*"))


def test_metrics_have_the_fixed_names_each_step_once(tiny: list[str], tmp_path: Path) -> None:
    run_training(tiny)
    metrics = read_metrics(tmp_path / "run")
    training = [entry for entry in metrics if "train/loss" in entry]
    evaluation = [entry for entry in metrics if "eval/loss" in entry]
    assert [entry["step"] for entry in training] == [1, 2, 4, 6]
    assert [entry["step"] for entry in evaluation] == [3, 6]
    timed = {
        "tokens_per_second",
        "seconds_per_step",
        "seconds_data",
        "seconds_compute",
        "seconds_communication",
        "seconds_waiting",
        "memory_gb",
    }
    named = {"loss", "grad_norm", "learning_rate", "tokens", "epoch", "skipped_steps"} | timed
    assert set(training[0]) == {"step"} | {f"train/{name}" for name in named}
    assert set(evaluation[0]) == {"step", "eval/loss", "eval/perplexity", "eval/token_accuracy", "eval/bits_per_byte"}
    assert all(isinstance(value, (int, float)) for entry in metrics for value in entry.values())
    assert math.isclose(evaluation[0]["eval/perplexity"], math.exp(evaluation[0]["eval/loss"]))


def test_the_saved_config_reproduces_the_run(tiny: list[str], tmp_path: Path) -> None:
    run_training(tiny)
    run_training(["--config", str(tmp_path / "run" / "config.yaml"), f"output_dir={tmp_path / 'again'}"])
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "again"))
    assert first["ledger"] == second["ledger"]
    assert first["eval_loss"] == second["eval_loss"]
    assert first["train_loss"] == second["train_loss"]


def test_final_loads_in_transformers_and_has_the_same_evaluation_loss(tiny: list[str], tmp_path: Path) -> None:
    run_training(tiny)
    final = tmp_path / "run" / "final"
    expected = read_metrics(tmp_path / "run")[-1]["eval/loss"]
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} <= {
        p.name for p in final.iterdir()
    }
    for file in final.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~current_umask(), f"{file.name} cannot be read by others"

    def evaluate() -> float:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from acc_lm.config.loading import load_config
        from acc_lm.data import build_data

        config = load_config(tmp_path / "run" / "config.yaml")
        data = build_data(config.data, config.tokenizer, None, config.seed, 1)
        model = AutoModelForCausalLM.from_pretrained(final, use_safetensors=True)
        assert AutoTokenizer.from_pretrained(final).get_vocab() == data.tokenizer.get_vocab()
        total, count = 0.0, 0
        for row in range(len(data.evaluation)):
            batch = data.evaluation[row]
            logits = model(batch["input_ids"]).logits.double()
            total += torch.nn.functional.cross_entropy(logits[0], batch["targets"][0], reduction="sum").item()
            count += int((batch["targets"] >= 0).sum())
        return total / count

    assert abs(run_everywhere(evaluate)[0] - expected) < 1e-5

    def generate() -> list[str]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        seen = logging.handlers.BufferingHandler(100)
        logging.getLogger("transformers").addHandler(seen)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
        for prompts in ("red", ["red", "green tree sings"]):
            asked = tokenizer(prompts, padding=True, return_tensors="pt")
            assert model.generate(**asked, max_new_tokens=3).shape[1] == asked["input_ids"].shape[1] + 3
        return [record.getMessage() for record in seen.buffer]

    assert run_everywhere(generate) == [[]], "neither of padding nor of anything else"
    generation = json.loads((final / "generation_config.json").read_text())
    assert generation["pad_token_id"] == generation["eos_token_id"], (
        "else some versions of transformers guess it, with a warning"
    )
    config = json.loads((final / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "acc_lm" not in json.dumps(config)


def current_umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_generate_prints_text_that_starts_with_the_prompt(tiny: list[str], tmp_path: Path) -> None:
    run_training(tiny)

    def generate() -> int:
        from acc_lm.cli import main

        return main(["generate", str(tmp_path / "run" / "final"), "--prompt", "the river", "--max-new-tokens", "8"])

    first, second = Launch(generate).wait(), Launch(generate).wait()
    assert first.code == 0
    assert first.output.startswith("the river")
    assert len(first.output) > len("the river\n")
    assert first.output == second.output


def test_a_run_ends_with_a_sample_of_the_prompt(tiny: list[str]) -> None:
    finished = run_training([*tiny, "export.sample_tokens=5", "export.sample_prompt=blue"])
    assert "sample:\nblue" in finished.output


def test_the_model_learns_and_the_score_shows_it(tiny: list[str], tmp_path: Path) -> None:
    run_training(
        [
            *tiny,
            "training.max_steps=60",
            "optimizer.learning_rate=1e-2",
            "training.eval_every=60",
            "checkpoint.every=60",
        ]
    )
    metrics = read_metrics(tmp_path / "run")
    assert metrics[-1]["eval/loss"] < metrics[0]["train/loss"] - 1.5


def test_dropout_is_announced(tiny: list[str]) -> None:
    finished = run_training([*tiny, "model.config.attention_dropout=0.1"])
    assert "dropout 0.1: its masks depend on the split" in finished.output


@pytest.mark.parametrize(("load", "threads", "is_said"), [(9.0, 2, True), (9.0, 1, False), (0.5, 2, False)])
def test_slow_threads_on_a_shared_machine_are_reported(
    load: float, threads: int, is_said: bool, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    chosen = {"OMP_NUM_THREADS": str(threads)}  # without it, a trial chooses
    output = run_training([*tiny, "training.max_steps=1", "schedule.warmup_steps=0"], environment=chosen).output
    assert ("other processes use the 2 cores" in output) == is_said
    assert (f"(load average {load})" in output) == is_said


def test_two_identical_runs_are_equal_bit_for_bit(tiny: list[str], tmp_path: Path) -> None:
    dropout = "model.config={model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 32}"
    for name in ("a", "b"):
        run_training([*tiny, dropout, f"output_dir={tmp_path / name}", "training.deterministic=true"])
    assert different(*(tensors_of(tmp_path / name, 6) for name in ("a", "b"))) == []


def test_a_hundred_losses_equal_the_recorded_ones(tiny: list[str], tmp_path: Path) -> None:
    """In float64, so that neither the processor nor the version of torch decides. `PYTHONPATH=. python tests/runs/test_train.py` records them again."""
    run_training(golden_arguments(tiny[1], tmp_path / "run"))
    losses = [entry["train/loss"] for entry in read_metrics(tmp_path / "run") if "train/loss" in entry]
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-6)
    assert len(losses) == 100


def golden_arguments(recipe: str, run: Path) -> list[str]:
    model = "model.config={model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 32, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}"
    return [
        "--config", recipe, model, "model.dtype=float64", "training.max_steps=100", "training.log_every=1", "training.eval_every=null",
        "checkpoint.every=null", f"output_dir={run}",
    ]  # fmt: skip


def test_a_fractional_number_of_epochs_sees_every_row_that_often(tiny: list[str], tmp_path: Path) -> None:
    finished = run_training(
        [
            *tiny,
            "training.max_steps=null",
            "training.num_epochs=1",
            "checkpoint.every=null",
            "checkpoint.every_epochs=0.5",
            "checkpoint.keep_last=null",
            "training.eval_every=null",
        ]
    )
    rows = int(finished.output.split("rows          ")[1].split(" ")[0].replace(",", ""))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["step"] == math.ceil(rows / 12)
    half = math.ceil(rows / 2 / 12)
    assert (tmp_path / "run" / "checkpoints" / f"step-{half:08d}").is_dir()


if __name__ == "__main__":
    import tempfile

    import conftest

    with tempfile.TemporaryDirectory() as name:
        text, recipe = Path(name, "words.jsonl"), Path(name, "tiny.yaml")
        text.write_text("".join(json.dumps({"text": words}) + "\n" for words in conftest.make_words()))
        recipe.write_text(conftest.tiny_recipe_of(text))
        run_training(golden_arguments(str(recipe), Path(name, "run")))
        found = [entry["train/loss"] for entry in read_metrics(Path(name, "run")) if "train/loss" in entry]
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


def test_the_time_left_is_shown_once_it_is_known(tiny: list[str]) -> None:
    lines = re.findall(r"^step \d+/.*tokens/s.*$", run_training([*tiny, "training.log_every=1"]).output, re.MULTILINE)
    assert len(lines) > 2
    assert "left" not in lines[0], "the first step takes longer than the others"
    assert all(re.search(r"tokens/s  \d+:\d\d left$", line) for line in lines[1:])
