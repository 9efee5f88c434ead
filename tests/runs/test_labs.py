"""Every command of the labs, as a learner types it: for a few steps in the fast test, unchanged in `make test-all`."""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import LAUNCH_VARIABLES, ROOT, Launch, build_extensions_once, launcher_environment

from acc_lm.config import Config
from acc_lm.run_files.metrics_file import read

LAB = ROOT / "docs/labs/alpaca_deepspeed.md"
FEW_STEPS = (
    "training.max_steps=3", "training.num_epochs=null", "training.eval_every=2", "training.eval_batches=1", "training.log_every=1",
    "schedule.warmup_steps=1", "tracking.report_to=[]", "export.sample_tokens=4",
)  # fmt: skip
# `make train` on some modules of the library, with a smaller model.
SMALL_BASE = (
    f"data.files=[{sysconfig.get_path('stdlib')}/json/*.py]", "data.source=files", "tokenizer.vocab_size=400",
    "model.config.hidden_size=32", "model.config.intermediate_size=32",
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    section: str
    text: str
    is_python: bool


def commands(page: Path) -> list[Command]:
    """Lines of the shell blocks and the complete Python blocks of a page, in order."""
    found = []
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
        title = section.partition("\n")[0]
        for language, block in re.findall(r"^```(bash|python)\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
            lines = [block] if language == "python" else block.splitlines()
            found += [Command(title, line, language == "python") for line in lines]
    return found


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


def run_here(command: Command, overrides: list[str], folder: Path) -> str:
    """Run the command in forked processes, with at most two of them; returns what it printed."""
    environment, num_processes = {}, 1
    words = [] if command.is_python else shlex.split(command.text)
    if command.is_python:
        run: Callable[[], int | None] = lambda: exec(compile(command.text, str(LAB), "exec"), {})  # noqa: E731
    elif words == ["make", "train"]:
        run = main_of(overrides)
    elif "train.py" in words:
        launcher, arguments = words[: words.index("train.py")], words[words.index("train.py") + 1 :]
        if launcher[:2] == ["accelerate", "launch"]:
            options = dict(zip(launcher[2::2], launcher[3::2], strict=True))
            num_processes = min(int(options.get("--num_processes", 2)), 2)
            environment = launcher_environment(ROOT / options["--config_file"], num_processes)
            if num_processes == 1:  # which torchrun starts like several ones
                ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
                environment |= ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        run = main_of([*arguments, *overrides])
    elif words[0] == "acc-lm":
        from acc_lm import cli

        if words[1] == "parity":  # real launches, each of which takes some time
            words[words.index("--cases") + 1] = "single:1"
            words += overrides
        run = lambda: cli.main(words[1:])  # noqa: E731
    elif words[0] == "python":

        def run() -> None:
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
    else:
        return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout

    def there() -> int | None:
        os.chdir(folder)
        return run()

    finished = Launch(there, num_processes, environment).wait(180)
    assert finished.codes == [0] * num_processes, f"{command.text}\n{finished.output}"
    return finished.output


def main_of(arguments: list[str]) -> Callable[[], int]:
    def run() -> int:
        import train

        sys.argv = ["train.py", *arguments]
        return train.main(arguments)

    return run


def shorten(folder: Path, lines: int = 60) -> None:
    """Keep the first lines of each file: enough for a few steps."""
    for file in folder.glob("*.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))


@pytest.mark.slow
def test_the_commands_of_the_lab_for_a_few_steps(hub: Path, tmp_path: Path) -> None:
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    found = commands(LAB)
    assert len(found) > 15
    printed = {}
    for command in found:
        overrides = stand_ins(command.text, hub)
        if not overrides and ("train.py" in command.text or command.text.startswith(("make", "acc-lm parity"))):
            overrides = [*FEW_STEPS, "data.sequence_length=512", *(SMALL_BASE if command.text == "make train" else ())]
        before = children_seconds()
        printed[command.text] = run_here(command, overrides, tmp_path)
        if "make_instructions.py" in command.text:
            shorten(tmp_path / "runs/lab-data")
        print(f"{children_seconds() - before:.1f} s of processors  {command.text[:150]}")

    def text_of(*parts: str) -> str:
        (text,) = [text for name, text in printed.items() if all(part in name for part in parts)]
        return text

    assert '"instruction"' in text_of("head")
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
    files = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, files.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    binaries = Path(sys.executable).parent
    environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
    environment |= {"PATH": f"{binaries}:{environment['PATH']}", "PYTHONPATH": str(clone / "src")}
    environment |= {"ACC_LM_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}  # tests run in parallel
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/torch_extensions").symlink_to(Path(os.environ["ACC_LM_CACHE"]) / "torch_extensions")
    printed, seconds, processor_seconds = {}, 0.0, 0.0
    for command in commands(LAB):
        text = command.text
        if command.is_python:
            words = [sys.executable, "-c", text]
        else:
            text = re.sub(r"^make ", f"make -o .venv/installed BIN={binaries} ", text)
            words = ["bash", "-c", " ".join([text, *map(shlex.quote, stand_ins(text, hub))])]
        started, before = time.monotonic(), children_seconds()
        done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=1200)
        spent, processor = time.monotonic() - started, children_seconds() - before
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        printed[text] = done.stdout
        print(f"$ {text}    # {spent:.0f} s, {processor:.0f} s of processors\n{done.stdout[-1500:]}")
        if "smollm2" not in text:
            seconds, processor_seconds = seconds + spent, processor_seconds + processor

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
    assert re.fullmatch(form, after), after
    assert not re.match(form, before), before
    assert printed[next(name for name in printed if "parity" in name)].count("same rows") == 3
    print(f"\nthe laptop's part took {seconds:.0f} s, {processor_seconds:.0f} s of processors")


def children_seconds() -> float:
    """Processor time of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
