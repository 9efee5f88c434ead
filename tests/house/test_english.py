"""Docstrings and comments say things first and in the field's words: a few rules that a test can hold."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from processes import ROOT

FILES = [*sorted((ROOT / "src").rglob("*.py")), ROOT / "train.py"]
FIRST = re.compile(r"(What|Of|Who|Whoever|That|Where|How|Whether)\b")
"""No first word of a docstring, which begins with the thing or with an imperative verb."""
REPLACED = {
    "behind": "after, or lagging", "beside": "next to, alongside, compared with", "told": "reported, printed", "tells": "reports, prints",
    "goes on": "continues, resumes", "go on": "continue, resume", "going on": "continuing", "passed over": "skipped",
    "nobody": "no process", "everybody": "every process", "whoever": "the process that", "somebody": "a process",
}  # fmt: skip
WORDS = re.compile(rf"\b({'|'.join(REPLACED)})\b", re.IGNORECASE)


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


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_begin_with_the_thing_and_use_the_words_of_the_field(file: Path) -> None:
    text = file.read_text()
    found = [f"{line}: begins with {FIRST.match(words)[0]}" for line, words in docstrings(text) if FIRST.match(words)]  # type: ignore[index]
    for line, words in [*docstrings(text), *comments(text)]:
        found += [f"{line}: {word}; write {REPLACED[word.lower()]}" for word in WORDS.findall(words)]
    assert found == []
