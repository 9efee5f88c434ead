"""Commands of the course's pages in forked processes, with what makes them short: a lab in seconds instead of half an hour."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pages import Command, commands_of
from processes import ROOT, Launch, launcher_environment

FEW_STEPS = (
    "training.max_steps=3", "training.num_epochs=null", "training.eval_every=2", "training.eval_batches=1", "training.log_every=1",
    "schedule.warmup_steps=1", "tracking.report_to=[]", "export.sample_tokens=4",
)  # fmt: skip


def folder_of_a_learner(folder: Path) -> Path:
    """The project in `folder`, by links, with places of its own for runs and for programs that a learner changes."""
    own = {ROOT, ROOT / "docs", ROOT / "docs/course", ROOT / "docs/course/code"}
    for path in (path for parent in sorted(own) for path in parent.iterdir()):
        if path.name not in ("runs", ".git", "__pycache__") and not path.name.startswith("my_"):
            place = folder / path.relative_to(ROOT)
            place.mkdir() if path in own else place.symlink_to(path)
    return folder


def run_short(page: Path, folder: Path, changes: dict[str, str], left_out: tuple[str, ...] = ()) -> dict[str, str]:
    """Run every command of a page with the changes {regular expression: replacement}; returns what each printed.

    A change that changes nothing and an expression in `left_out` that leaves nothing out are errors: the page has moved on.
    """
    printed, unused = {}, {*changes, *left_out}
    for command in commands_of(page):
        if out := [pattern for pattern in left_out if re.search(pattern, command.text)]:
            unused -= {*out}
            continue
        text = command.text
        for pattern, replacement in changes.items():
            if re.search(pattern, text):
                unused.discard(pattern)
                text = re.sub(pattern, replacement, text)
        printed[command.text] = run_here(replace(command, text=text), folder)
    assert not unused, f"{page.name} has no command for {unused}"
    return printed


def run_here(command: Command, folder: Path, overrides: tuple[str, ...] | list[str] = ()) -> str:
    """Run a command in forked processes, with at most two of them; returns what it printed. `overrides` are for train.py."""
    run, num_processes, environment = parts_of(command, list(overrides))
    if run is None:
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == command.code, f"{command.text}\n{done.stdout}"
        return done.stdout

    def there() -> int | None:
        os.chdir(folder)
        return run()

    finished = Launch(there, num_processes, environment).wait(180)
    shown = f"{command.text}\n{finished.output}"
    if command.code and num_processes > 1:  # a launcher turns every code into 1
        assert all(finished.codes), shown
    else:
        assert finished.codes == [command.code] * num_processes, shown
    return finished.output


def parts_of(
    command: Command, overrides: list[str]
) -> tuple[Callable[[], int | None] | None, int, dict[str, str] | None]:
    """(function, number of processes, environment) of a command; no function for one that is not a program of ours."""
    if command.is_python:
        return (lambda: exec(compile(command.text, "page", "exec"), {"__name__": "__main__"})), 1, {}
    if command.kind == "script" or "$(" in command.text or "|" in command.text:
        return None, 1, None
    words, environment, num_processes = shlex.split(command.text), {}, 1
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if words[0] in ("accelerate", "torchrun"):
        programs = [i for i, word in enumerate(words) if word.endswith(".py")]
        launcher, words = words[: programs[0]], ["python", *words[programs[0] :]]
        num_processes, added = launch(launcher)
        environment |= added
    if words == ["make", "train"]:
        return main_of(overrides), 1, environment
    if words[:2] == ["python", "-c"]:
        return (lambda: exec(compile(words[2], "page", "exec"), {"__name__": "__main__"})), 1, environment
    if words[0] == "python" and words[1] == "train.py":
        return main_of([*words[2:], *overrides]), num_processes, environment
    if words[0] == "python" and words[1].endswith(".py"):
        return program(words[1:]), num_processes, environment
    if words[0] == "acc-lm":
        from acc_lm import cli

        return (lambda: cli.main(words[1:])), 1, environment
    return None, 1, None


def launch(words: list[str]) -> tuple[int, dict[str, str]]:
    """(number of processes, environment) that a launcher's options ask for; never more than two processes."""
    joined = [part for word in words for part in word.split("=", 1)] if words[0] == "torchrun" else words
    options = dict(itertools.pairwise(joined))
    if words[0] == "torchrun":
        return min(int(options.get("--nproc_per_node", 1)), 2), {}
    num_processes = min(int(options.get("--num_processes", 2)), 2)
    if "--config_file" not in options:
        return (num_processes if "--num_processes" in options else 1), {}
    environment = launcher_environment(ROOT / options["--config_file"], num_processes)
    if num_processes == 1:  # which torchrun starts like several ones
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return num_processes, environment


def main_of(arguments: list[str]) -> Callable[[], int]:
    def run() -> int:
        import train

        sys.argv = ["train.py", *arguments]
        return train.main(arguments)

    return run


def program(words: list[str]) -> Callable[[], None]:
    def run() -> None:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")

    return run
