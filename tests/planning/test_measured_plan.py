"""`acc-lm plan --measure`: predicted next to measured, and the speed that later plans start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from acc_lm.cli import main
from acc_lm.planning import calibration, hardware
from acc_lm.planning.calibration import calibration_file
from acc_lm.planning.probe import Probe
from acc_lm.studies import measuring
from benchmarks.choices import llama_shape, pretraining


def small(folder: Path, length: int) -> str:
    file = folder / "small.yaml"
    file.write_text(json.dumps(pretraining(llama_shape(1024, 4096, 4, 16), 8, length)))
    return str(file)


def test_a_dry_run_on_two_processes_costs_what_was_predicted(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = [str(tiny_recipe), f"output_dir={tmp_path}/run"]
    assert main(["plan", *recipe, "--measure", "--processes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    tensors, sent, computed, step = found.values()
    assert tensors["predicted"] == pytest.approx(tensors["measured"], rel=0.02)
    assert sent["predicted"] == pytest.approx(sent["measured"], rel=0.01)
    assert sent["measured"] > 0
    assert computed["predicted"] == computed["measured"]
    assert step["predicted"] is None
    assert step["measured"] > 0
    assert not (tmp_path / "run").exists()
    assert not calibration_file().exists()  # a CPU's speed says nothing about a GPU


@pytest.fixture
def one_h100(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A made-up H100, and the measurements that a dry run on it would make."""
    measured: dict[str, Any] = {}
    words: list[list[str]] = []

    def launch(program: list[str], file: Path, count: int, *_: Any, **options: Any) -> str | None:
        words.append([*program, file.stem, *options["options"]])
        if "problem" in measured:
            return str(measured["problem"])
        identity = {"strategy": "single", "num_processes": count, "device": "NVIDIA H100 80GB HBM3"}
        values = {"identity": identity, "sent_bytes": 0.0, **measured}
        Path(options["environment"]["ACC_LM_MEASURED_FILE"]).write_text(json.dumps(values))
        return None

    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("acc_lm.runtime.has_accelerator", lambda: True)
    monkeypatch.setattr(hardware, "gpus_here", lambda: (1, hardware.GPUS["H100"]))
    monkeypatch.setattr(measuring, "launch", launch)
    return measured | {"set": measured, "words": words}


def test_a_measured_step_is_what_later_plans_on_that_gpu_start_from(
    one_h100: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small(tmp_path, 1024)
    probes: dict[int, Probe] = {}
    monkeypatch.setattr(
        "acc_lm.planning.probe.Probe",
        lambda config, size: probes.setdefault(config.data.sequence_length, Probe(config, size)),
    )

    def best(*words: str) -> dict[str, Any]:
        code = main(["plan", recipe, *words, "--config", "single_gpu", "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found["recommended"] | {"code": code, "measured": found.get("measured")}

    before = best("--gpus", "H100")
    speed = before["tokens_per_second"]
    predicted = 8 * 1024 / speed["middle"]
    tensors = before["memory_gib"]["tensors"] * 2**30
    one_h100["set"].update(seconds=1.5 * predicted, tensor_bytes=tensors * 1.04, flops_per_token=None)
    asked = best("--measure")
    assert asked["code"] == 0
    assert asked["measured"]["a step"]["measured"] == pytest.approx(1.5 * predicted)
    launched = one_h100["words"][0]
    assert "--dry-run" in launched
    assert f"training.micro_batch_size={before['micro_batch_size']}" in launched
    assert ("inductor" in launched) == before["compile"]
    after = best("--gpus", "H100")["tokens_per_second"]
    assert after["middle"] == pytest.approx(speed["middle"] / 1.5)
    assert after["high"] / after["low"] < 0.85 * speed["high"] / speed["low"]
    for words in (["--gpus", "A100"], ["--gpus", "H100", "data.sequence_length=512"]):  # nothing measured
        other = best(*words)["tokens_per_second"]
        assert other["high"] / other["low"] == pytest.approx(speed["high"] / speed["low"]), words
    # Measured again, from a plan that was calibrated: the ratio is of the model's own prediction.
    one_h100["set"].update(seconds=1.2 * predicted, tensor_bytes=tensors * 1.2)
    assert best("--measure")["code"] == 1  # the tensors are too far apart
    assert best("--gpus", "H100")["tokens_per_second"]["middle"] == pytest.approx(speed["middle"] / 1.2)
    assert main(["plan", recipe, "--gpus", "H100", "--config", "single_gpu"]) == 0
    assert f"from a step that was measured here, {calibration_file()}" in capsys.readouterr().out
    with calibration_file().open("a") as file:
        file.write("half a li")
    monkeypatch.setattr(calibration, "calibration_file", lambda: tmp_path)  # a folder
    assert best("--measure")["code"] == 1
    monkeypatch.undo()
    monkeypatch.setenv("ACC_LM_CACHE", str(tmp_path / "cache"))
    assert main(["plan", recipe, "--gpus", "H100", "--config", "single_gpu"]) == 0
    assert "must have a measured step on each line, got 'half a li'" in capsys.readouterr().err


def test_a_dry_run_that_fails_is_one_line(
    one_h100: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small(tmp_path, 64)
    one_h100["set"]["problem"] = "error: data.files must exist"
    assert main(["plan", recipe, "--measure", "--config", "single_gpu"]) == 4
    assert "got: error: data.files must exist; " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--measure", "--gpus", "8xH100"], "--gpus must be here with --measure"),
        ([], "--gpus must name the hardware, got none"),
        (["--gpus", "H100", "--processes", "2"], "--processes must be a positive number of CPU processes"),
        (["--measure", "--processes", "0"], "--processes must be a positive number of CPU processes"),
        (["--measure", "--config", "nothing"], "must be an Accelerate config"),
        (["--measure", "--html", "page.html"], "--html must come with --gpus"),
        (["--measure", "--gpus", "here", "--html", "page.html"], "--html must be left out with --measure"),
        (["--measure", "--config", "single_gpu", "--processes", "2"], "--processes must be 1 with "),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acc_lm.runtime.has_accelerator", lambda: False)
    assert main(["plan", "quickstart", *words]) == 2
    assert line in capsys.readouterr().err
