"""Everything that README and docs name is there, and their commands are ones that this version takes."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from processes import ROOT

from acc_lm.cli.arguments import parse_train_arguments
from acc_lm.recipe import load_config

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[str]:
    """The lines of all code blocks, and inline code, that call a program of ours."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [
        line.split("  #")[0].strip()
        for line in lines
        if re.match(r"(accelerate|torchrun|python|make|acc-lm|\.venv)", line)
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


@pytest.mark.parametrize(("page", "at_least"), [("README.md", 10), ("docs/adapters.md", 3)])
def test_the_commands_of_a_page_are_taken(page: str, at_least: int) -> None:
    found = commands(ROOT / page)
    assert len(found) >= at_least
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in found:
        program, *words = shlex.split(command)
        if program == "make":
            assert words[0] in targets, command
        elif "train.py" in words:
            launcher, arguments = words[: words.index("train.py")], words[words.index("train.py") + 1 :]
            for word in launcher:
                assert not word.endswith(".yaml") or (ROOT / word).is_file(), command
            if "--help" not in arguments:
                arguments = [
                    str(ROOT / word) if word.endswith(".yaml") and "=" not in word else word for word in arguments
                ]
                parse_train_arguments(arguments, ROOT / "recipes/quickstart.yaml")
        else:
            assert program.endswith("acc-lm"), command
            assert words[0] in (
                "generate",
                "evaluate",
                "export",
                "parity",
                "scaling",
                "bench-comm",
                "doctor",
                "keep-going",
            ), command


def test_the_table_names_every_recipe_and_config() -> None:
    readme = (ROOT / "README.md").read_text()
    for file in [*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "accelerate_configs").glob("*.yaml")]:
        assert f"({file.relative_to(ROOT)})" in readme, file.name


def test_the_table_of_recipes_is_made_of_their_headers() -> None:
    made = runpy.run_path(str(ROOT / "docs/update_readme.py"))["recipe_table"]()
    assert made in (ROOT / "README.md").read_text(), "run `make docs`"


def test_the_shown_output_is_of_this_quickstart() -> None:
    shown = re.search(r"<!-- quickstart.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown, "run `make readme`"
    config = load_config(ROOT / "recipes/quickstart.yaml")
    assert f"step {config.training.max_steps}/{config.training.max_steps}  eval loss" in shown[1]
    assert f"global batch  {config.training.global_batch_size} = " in shown[1]
    scores = {name: float(bits) for name, bits in re.findall(r"^  (\S.*?) +(\d\.\d+)$", shown[1], re.MULTILINE)}
    assert scores["this model"] < scores["xz -9"] < scores["gzip -9"]


def test_every_exit_code_is_documented() -> None:
    from acc_lm import errors

    page = (ROOT / "docs/files.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UserError)]
    for kind in kinds:
        assert f"| {kind.exit_code} | {kind.status} |" in page
    for code, status in (
        (errors.EXIT_PREEMPTED, "preempted"),
        (errors.EXIT_INTERRUPTED, "interrupted"),
        (0, "completed"),
    ):
        assert f"| {code} | {status} |" in page
