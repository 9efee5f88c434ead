"""Every command of the labs, as a learner types it: for a few steps in the fast test, unchanged in `make test-all`."""

from __future__ import annotations

import json
import re
import shlex
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from course import FEW_STEPS, folder_of_a_learner, run_here
from pages import Command, commands_of, copy_project, learner_environment, run_commands
from processes import KEPT_CACHE, ROOT, build_extensions_once

from acc_lm.config import Config
from acc_lm.run_files.metrics_file import read

LAB = ROOT / "docs/course/06_alpaca_deepspeed.md"
# `make train` on some modules of the library, with a smaller model.
SMALL_BASE = (
    f"data.files=[{sysconfig.get_path('stdlib')}/json/*.py]", "data.source=files", "tokenizer.vocab_size=400",
    "model.config.hidden_size=32", "model.config.intermediate_size=32",
)  # fmt: skip


def all_commands() -> list[Command]:
    """Commands of the lab, and those for GPUs at its end, which only a test with stand-ins runs."""
    on_gpus = LAB.read_text().partition("## On GPUs")[2].partition("```\n")[2].partition("```")[0]
    return [*commands_of(LAB), *(Command("On GPUs", line, "line", 0, -1) for line in on_gpus.splitlines())]


def stand_ins(text: str, hub: Path) -> list[str]:
    """Overrides that replace what a command would download with small local models and data sets."""
    recipe = re.search(r"--config (recipes/\S+)", text)
    if recipe is None or "dataset:" not in (ROOT / recipe[1]).read_text():
        return []
    found = config_of(recipe[1])
    return [
        f"model.name_or_path={hub}/{found.model.name_or_path}", f"data.dataset={hub}/{found.data.dataset}",
        "data.sequence_length=224", "data.eval_fraction=0.2", *FEW_STEPS,
    ]  # fmt: skip


def config_of(recipe: str) -> Config:
    from acc_lm.config.loading import load_config

    return load_config(ROOT / recipe)


def shorten(folder: Path, lines: int = 60) -> None:
    """Keep the first lines of each file: enough for a few steps."""
    for file in folder.glob("*.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))


@pytest.mark.slow
def test_the_commands_of_the_lab_for_a_few_steps(hub: Path, tmp_path: Path) -> None:
    folder_of_a_learner(tmp_path)
    # A shell's substitution, and an answer that is that of the larger model, are for the complete lab.
    found = [command for command in all_commands() if not re.search(r"\$\(|06\.2", command.text)]
    assert len(found) > 15
    printed = {}
    for command in found:
        overrides = stand_ins(command.text, hub)
        if not overrides and ("train.py" in command.text or command.text.startswith(("make", "acc-lm parity"))):
            overrides = [*FEW_STEPS, "data.sequence_length=512", *(SMALL_BASE if command.text == "make train" else ())]
        shorter = command
        if command.text.startswith("acc-lm parity"):  # real launches, each of which takes some time
            cases = re.sub(r"--cases \S+", "--cases single:1", command.text)
            shorter = replace(command, text=shlex.join([*shlex.split(cases), *overrides]))
        printed[command.text] = run_here(shorter, tmp_path, overrides)
        if "make_instructions.py" in command.text:
            shorten(tmp_path / "runs/lab-data")

    def text_of(*parts: str) -> str:
        (text,) = [text for name, text in printed.items() if all(part in name for part in parts)]
        return text

    assert '"instruction"' in text_of("head")
    assert text_of("check.py", "06.3").startswith("right: ")
    assert "strategy      deepspeed_zero2, 2 processes" in text_of("zero2_offload.yaml", "quickstart")
    assert "strategy      deepspeed_zero3, 2 processes" in text_of("zero3.yaml", "quickstart")
    assert "strategy      deepspeed_zero2, 1 process" in text_of("--num_processes 1", "--dry-run")
    assert re.findall(r"^\d+", text_of("runs/lab/metrics.jsonl"), re.MULTILINE) == ["0", "2", "3"]
    evaluations = [entry for entry in read(tmp_path / "runs/lab") if "eval/loss" in entry]
    assert [entry["step"] for entry in evaluations] == [0, 2, 3], "before, and after"
    assert (tmp_path / "runs/lab-merged/model.safetensors").is_file()
    assert (tmp_path / "runs/smollm2-alpaca-lora/final/adapter_model.safetensors").is_file()


def test_the_lab_agrees_with_its_recipes() -> None:
    page = LAB.read_text()
    header = (ROOT / "recipes/chat_smollm2-360m_alpaca.yaml").read_text()
    figures = re.findall(r"([\d.]+ to [\d.]+ GiB) with deepspeed_zero", header)
    assert len(figures) == 2
    assert all(figure in page for figure in figures)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_complete_lab_from_a_clean_clone(hub: Path, tmp_path: Path) -> None:
    """Typed word for word, except the installation and what the last section would download."""
    build_extensions_once(needs_nvme=False)
    clone = tmp_path / "clone"
    copy_project(clone)
    environment = learner_environment(clone)
    environment |= {"ACC_LM_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}  # tests run in parallel
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/torch_extensions").symlink_to(KEPT_CACHE / "torch_extensions")
    printed, seconds, processor_seconds = {}, 0.0, 0.0

    def with_stand_ins(command: Command) -> Command:
        return replace(command, text=" ".join([command.text, *map(shlex.quote, stand_ins(command.text, hub))]))

    for done in run_commands(all_commands(), clone, environment, with_stand_ins):
        text = done.command.text
        assert done.code == 0, f"{text}\n{done.output}"
        printed[text] = done.output
        print(f"$ {text}    # {done.seconds:.0f} s, {done.cpu_seconds:.0f} s of processors\n{done.output[-1500:]}")
        if "smollm2" not in text:
            seconds, processor_seconds = seconds + done.seconds, processor_seconds + done.cpu_seconds

    answers = [text for name, text in printed.items() if "check.py" in name]
    assert [answer.partition(":")[0] for answer in answers] == ["right"] * 3

    (start, *full), lora = (
        [entry["eval/loss"] for entry in read(clone / "runs" / run) if "eval/loss" in entry]
        for run in ("lab", "lab-lora")
    )
    print(f"held-out loss before {start}, after {full[-1]}, with LoRA {lora[-1]}")
    assert full[-1] < 2 / 3 * start
    assert lora[-1] < 2 / 3 * start
    summary = json.loads((clone / "runs/lab/summary.json").read_text())
    assert summary["status"] == "completed"
    (before,), (after,) = (
        [text for name, text in printed.items() if f"generate runs/{run}/final" in name]
        for run in ("quickstart", "lab")
    )
    form = r"- kind: (function|method)\n- name: \S+\n- module: \S+\n"
    assert re.search(rf"^{form}\Z", after, re.MULTILINE), after
    assert not re.match(form, before), before
    assert printed[next(name for name in printed if "parity" in name)].count("same rows") == 3
    print(f"\nthe laptop's part took {seconds:.0f} s, {processor_seconds:.0f} s of processors")
