"""Docstrings and comments: subject first, in the field's words; the rules that a test can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from processes import ROOT

FILES = [
    *sorted((ROOT / "src").rglob("*.py")),
    ROOT / "train.py",
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "docs").rglob("*.py")),
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "slurm/README.md", "slurm/train.sbatch")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.yaml")),
    *sorted((ROOT / "accelerate_configs").iterdir()),
]
FIRST = re.compile(r"(What|Of|Who|Whoever|That|Where|How|Whether)\b")
"""First words that a docstring must not have: it begins with the thing or with an imperative verb."""
REPLACED = {
    "behind": "after, or lagging", "beside": "next to, alongside, compared with", "told": "reported, printed", "tells": "reports, prints",
    "goes on": "continues, resumes", "go on": "continue, resume", "going on": "continuing", "passed over": "skipped",
    "nobody": "no process", "everybody": "every process", "whoever": "the process that", "somebody": "a process",
}  # fmt: skip
WORDS = re.compile(rf"\b({'|'.join(REPLACED)})\b", re.IGNORECASE)
NAMES = re.compile(r"(^|_)(behind|beside|told|nobody|everybody|somebody|goes_on)($|_)")
EARLIER = {"report.py": "RENAMED"}
"""Tables of the labels that files of results from before a renaming hold."""


def docstrings(text: str) -> list[tuple[int, str]]:
    """(line, text) of every docstring, attributes' among them."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(text))]
    return [
        (statement.lineno, statement.value.value)
        for body in bodies if isinstance(body, list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    ]  # fmt: skip


def comments(text: str) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


@pytest.mark.parametrize("file", [*FILES, *TESTS], ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_begin_with_the_thing_and_use_the_words_of_the_field(file: Path) -> None:
    text = file.read_text()
    found = [f"{line}: begins with {FIRST.match(words)[0]}" for line, words in docstrings(text) if FIRST.match(words)]  # type: ignore[index]
    for line, words in [*docstrings(text), *comments(text)]:
        found += [f"{line}: {word}; write {REPLACED[word.lower()]}" for word in WORDS.findall(words)]
    assert found == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_messages_and_names_use_the_words_of_the_field(file: Path) -> None:
    found = []
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == EARLIER.get(file.name):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [
                    f"{node.lineno}: {word}; write {REPLACED[word.lower()]}" for word in WORDS.findall(node.value)
                ]
                found += [f"{node.lineno}: name the action to take"] * node.value.rstrip(".").endswith("change it")
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
            found += [f"{name} is named {part[1]}" for part in NAMES.finditer(name if isinstance(name, str) else "")]
    assert found == []


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_pages_and_settings_use_the_words_of_the_field(file: Path) -> None:
    found = [f"{word}; write {REPLACED[word.lower()]}" for word in WORDS.findall(file.read_text())]
    assert found == []
