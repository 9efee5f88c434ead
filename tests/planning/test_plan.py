"""`acc-lm plan`: an expert's choices, its table and JSON, and refusals of one line."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT

from acc_lm.cli import main
from acc_lm.config import Config
from acc_lm.planning.hardware import GIB
from acc_lm.planning.probe import Probe
from acc_lm.runtime import CONFIGS_BY_SIZE, NOT_PLANNED


def llama(folder: Path, name: str, hidden: int, inner: int, layers: int, heads: int, **training: Any) -> Path:
    model = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": layers == 16, "max_position_embeddings": 8192,
    }  # fmt: skip
    length = training.pop("sequence_length", 8192)
    recipe = {
        "output_dir": "runs/x", "model": {"config": model}, "tokenizer": {"kind": "byte"},
        "data": {"sequence_length": length},
        "training": {"max_steps": 1000, "mixed_precision": "bf16", "micro_batch_size": 1, **training},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(recipe))
    return file


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("recipes")
    gpt2 = [str(ROOT / "recipes/pretrain_gpt2-124m_fineweb-edu.yaml"), "model.config.vocab_size=50257"]
    return {
        "124M": [*gpt2, "training.mixed_precision=bf16"],
        "1B": [str(llama(folder, "1b", 2048, 8192, 16, 32, global_batch_size=256, sequence_length=2048))],
        "8B": [str(llama(folder, "8b", 4096, 14336, 32, 32, global_batch_size=128))],
        "70B": [str(llama(folder, "70b", 8192, 28672, 80, 64, global_batch_size=256))],
    }


@pytest.fixture(autouse=True)
def one_probe_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one model measure it once, because a probe takes seconds."""

    def cached(config: Config, vocab_size: int) -> Probe:
        key = config.model_copy(update={"training": None}).model_dump_json()
        if key not in PROBES:
            PROBES[key] = Probe(config, vocab_size)
        return PROBES[key]

    monkeypatch.setattr("acc_lm.planning.probe.Probe", cached)


PROBES: dict[str, Probe] = {}


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_config_is_planned_or_says_why_not() -> None:
    names = {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert names == {name for group in CONFIGS_BY_SIZE.values() for name in group} | set(NOT_PLANNED)


EXPERT = {
    ("124M", "H100"): ("single_gpu", "no"),
    ("124M", "8xH100"): ("ddp", "no"),
    ("1B", "H100"): ("single_gpu", "no"),
    ("1B", "8xH100"): ("ddp", "no"),
    ("1B", "64xH100"): ("multi_node_hsdp", "no"),
    ("8B", "H100"): ("deepspeed_zero2_offload", "full"),
    ("8B", "8xH100"): ("fsdp2", "selective"),
    ("8B", "64xH100"): ("multi_node_hsdp", "selective"),
    ("70B", "H100"): None,
    ("70B", "8xH100"): None,
    ("70B", "64xH100"): ("fsdp2", "full"),
}


@pytest.mark.parametrize(("model", "gpus"), EXPERT)
def test_the_recommendation_is_an_experts(
    model: str, gpus: str, recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = planned([*recipes[model], "--gpus", gpus], capsys)
    best, expected = found["recommended"], EXPERT[model, gpus]
    assert code == (0 if expected else 4)
    assert (best and (best["config"], best["gradient_checkpointing"])) == expected
    for row in found["rows"]:
        memory, speed = row["memory_gib"], row["tokens_per_second"]
        assert memory["tensors"] < memory["low"] < memory["high"]
        assert speed["low"] < speed["middle"] < speed["high"]
        if row["fits"] == "yes":
            assert memory["high"] <= 79.1
        assert (row["network_gb_per_step"] > 0) == (gpus == "64xH100")


def test_a_plan_takes_seconds_and_little_memory(recipes: dict[str, list[str]]) -> None:
    command = [sys.executable, "-m", "acc_lm", "plan", *recipes["70B"], "--gpus", "64xH100", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["recommended"]
    assert after.ru_maxrss * 1024 < 2 * GIB
    assert after.ru_utime - before.ru_utime < 60, "half a minute too slow would be a probe of every depth"


def test_the_table_says_what_to_take_and_why(recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *recipes["8B"], "--gpus", "8xH100", "--price", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (taken,) = (line for line in lines if line.startswith("*"))
    assert taken.split()[1] == "fsdp2"
    assert any(line.startswith("  ddp ") and "does not fit: weights and moments" in line for line in lines)
    assert sum(line.startswith("  not ") for line in lines) == 2
    (command,) = (line for line in lines if "accelerate launch" in line)
    assert "--num_processes 8" in command
    assert "model.gradient_checkpointing=selective" in command
    assert "cost" in lines[5]
    assert any(line.startswith("  energy ") and "kWh at most" in line for line in lines)


def test_pins_choose_one_config_and_micro_batch(
    recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    pins = ["--gpus", "8xH100", "--config", "fsdp2", "training.micro_batch_size=2", "--all"]
    _, found = planned([*recipes["8B"], *pins], capsys)
    assert {(row["config"], row["micro_batch_size"]) for row in found["rows"]} == {("fsdp2", 2)}
    assert len(found["rows"]) == 6  # three kinds of checkpointing, compiled or not
    for row in found["rows"]:
        hours = 1000 * 128 * 8192 / row["tokens_per_second"]["low"] / 3600
        assert row["hours"]["high"] == pytest.approx(hours)
        assert row["most_kwh"] == pytest.approx(hours * 8 * 0.7)
    by_kind = {row["gradient_checkpointing"]: row["memory_gib"]["tensors"] for row in found["rows"]}
    assert by_kind["no"] > by_kind["selective"] > by_kind["full"]


def test_nothing_fits_is_exit_4_with_ways_out(
    recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *recipes["70B"], "--gpus", "8xH100"]) == 4
    text = capsys.readouterr().out
    assert "nothing fits" in text
    assert "32 x H100 fit" in text
    assert "GB of memory in each machine" in text


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--gpus", "8xH10O"], "nearest: 8xH100", 2),
        (["--gpus", "0xH100"], "positive number", 2),
        (["--gpus", "7xH100"], "training.global_batch_size must be a multiple of the 7 GPUs, got 128", 2),
        (["--gpus", "8xH100", "--config", "fsdp3"], "nearest: fsdp2", 2),
        (["--gpus", "8xH100", "--config", "cpu"], "got cpu: for a machine without GPUs", 2),
        (["--gpus", "9xH100"], "must fill every machine equally, got 9 on 2 machines", 2),
        (["--gpus", "64xH100", "--network", "0"], "--network must be a positive number, got 0", 2),
        (["--gpus", "H100", "--machine-memory", "-1"], "--machine-memory must be a positive number, got -1", 2),
        (["--gpus", "H100", "--price", "nan"], "--price must be a positive number, got nan", 2),
        (["--gpus", "8xH100", "training.micro_batch_size=3", "training.global_batch_size=24"], "", 0),
        (["--gpus", "8xH100", "model.config.hidden_size=4097"], "model", 2),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, code: int, recipes: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipes["8B"][0], *arguments]) == code
    error = capfd.readouterr().err.strip()
    assert message in error
    assert code == 0 or len(error.splitlines()) == 1
