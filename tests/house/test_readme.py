"""Everything that README and docs name exists, and this version accepts their commands."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest
from processes import ROOT

from acc_lm import cli
from acc_lm.cli.train import parse_train_arguments
from acc_lm.config.loading import load_config

PAGES = [ROOT / "README.md", ROOT / "README.zh-TW.md", ROOT / "cloud/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[str]:
    """The lines of all code blocks that call a program of ours."""
    text = re.sub(
        r"^<!-- exit code \d+ -->\n```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )  # refused
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [
        re.sub(r" [|&>].*", "", line.split("  #")[0]).strip()
        for line in lines
        if re.match(r"(accelerate|torchrun|python|make|acc-lm|sbatch|\.venv)", line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for path in re.findall(
        r"`((?:src|tests|docs|recipes|accelerate_configs|benchmarks)/[\w./-]+\.\w+)`", page.read_text()
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [*PAGES, ROOT / "slurm/README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in (verb for verbs in cli.VERBS.values() for verb in verbs):
        module = importlib.import_module(f"acc_lm.cli.{verb.replace('-', '_')}")
        monkeypatch.setattr(module, "run", lambda known: 0, raising=False)  # everything is done except the work
        monkeypatch.setattr(module, "main", lambda arguments: 0, raising=False)
    monkeypatch.chdir(ROOT)
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        words = shlex.split(command)
        launcher, arguments = take_launcher(words)
        for word in launcher:
            assert not word.endswith(".yaml") or (ROOT / word).is_file(), command
        if words[0] == "make":
            assert words[1] in targets, command
        elif arguments[0].endswith("acc-lm"):
            assert cli.main(arguments[1:]) == 0, command
            if "--" in arguments:
                take_launcher(arguments[arguments.index("--") + 1 :])
        elif Path(arguments[0]).name in ("train.py", "train.sbatch"):
            if "--help" not in arguments:
                parse_train_arguments(arguments[1:], ROOT / "recipes/quickstart.yaml")
        else:
            is_written = f"> {arguments[0]}\n" in page.read_text()  # by a command of the page
            assert arguments[0] in ("-c", "-m") or (ROOT / arguments[0]).is_file() or is_written, command


def take_launcher(words: list[str]) -> tuple[list[str], list[str]]:
    """Check the launcher's options with its own parser, and what it starts with the arguments for that."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    if words[:2] == ["accelerate", "launch"] or words[0] == "torchrun":
        parser, given = (
            (get_args_parser(), words[1:]) if words[0] == "torchrun" else (launch_command_parser(), words[2:])
        )
        known = parser.parse_args(given)
        started = [known.training_script, *known.training_script_args]
        name = {"acc_lm": "acc-lm"}.get(started[0], started[0])
        return words[: len(words) - len(started)], [name, *started[1:]]
    if words[0] == "sbatch":
        first = words.index("slurm/train.sbatch")
        return words[:first], words[first:]
    return ([words[0]], words[1:]) if words[0].startswith("python") else ([], words)


@pytest.mark.parametrize(
    ("page", "at_least"), [("README.md", 15), ("docs/course/06_alpaca_deepspeed.md", 15), ("slurm/README.md", 1)]
)
def test_the_commands_of_a_page_are_found(page: str, at_least: int) -> None:
    assert len(commands(ROOT / page)) >= at_least


def test_the_table_names_every_recipe_and_config() -> None:
    readme = (ROOT / "README.md").read_text()
    for file in [*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "accelerate_configs").glob("*.yaml")]:
        assert f"({file.relative_to(ROOT)})" in readme, file.name


@pytest.mark.parametrize("language", ["", ".zh-TW"])
@pytest.mark.parametrize("table", ["recipe_table", "parity_table", "room_table"])
def test_the_tables_are_fresh(table: str, language: str) -> None:
    made = runpy.run_path(str(ROOT / "docs/update_readme.py"))[table](language)
    assert made in (ROOT / f"README{language}.md").read_text(), "run `make docs`"


@pytest.mark.parametrize("page", ["README.md", "README.zh-TW.md"])
def test_the_readme_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= 150


def test_the_shown_output_comes_from_this_quickstart() -> None:
    shown = re.search(r"<!-- quickstart.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown, "run `make readme`"
    config = load_config(ROOT / "recipes/quickstart.yaml")
    assert f"step {config.training.max_steps}/{config.training.max_steps}  eval loss" in shown[1]
    assert f"global batch  {config.training.global_batch_size} = " in shown[1]
    scores = {name: float(bits) for name, bits in re.findall(r"^  (\S.*?) +(\d\.\d+)$", shown[1], re.MULTILINE)}
    assert scores["this model"] < scores["xz -9"] < scores["gzip -9"]


def test_every_exit_code_is_documented() -> None:
    from acc_lm import errors

    page = (ROOT / "docs/reference/files.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UserError)]
    for kind in kinds:
        assert f"| {kind.exit_code} | {kind.status} |" in page
    for code, status in (
        (errors.EXIT_PREEMPTED, "preempted"),
        (errors.EXIT_INTERRUPTED, "interrupted"),
        (0, "completed"),
    ):
        assert f"| {code} | {status} |" in page
