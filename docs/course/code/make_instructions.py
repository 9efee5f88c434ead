"""Instruction data from the documentation strings of the Python that runs this: Alpaca's columns, one record a line.

    python docs/course/code/make_instructions.py runs/lab/data

Each documented function becomes two records, one with an `input` and one without. Whole modules are held out, by a hash of their
names, so that a model is never examined on a neighbour of a function it was trained on. Same Python, same files; nothing is imported or run.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "lib-dynload"}
HELD_OUT = 12
"""One module of so many."""
LONGEST = 160
"""Characters of a signature or a summary."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """(dotted name, syntax tree) of each module of the standard library that can be read."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED.isdisjoint(parts) and not parts[0].startswith("config-"):
            try:
                yield ".".join(parts).removesuffix(".__init__"), ast.parse(file.read_bytes())
            except (SyntaxError, ValueError):
                continue


def functions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, str, str]]:
    """(name, arguments, first sentence of its documentation) of the functions and methods that have one."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            paragraph = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            summary = paragraph.partition(". ")[0].rstrip(".")
            arguments = ast.unparse(node.args)
            if len(summary.split()) > 2 and max(len(summary), len(arguments)) <= LONGEST:
                yield owner + node.name, arguments, summary


def names(arguments: str) -> str:
    """`a, *, b=1, **c` -> `a, b, c`."""
    found = ast.parse(f"def f({arguments}): ...").body[0]
    assert isinstance(found, ast.FunctionDef)
    given = found.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return ", ".join(argument.arg for argument in every if argument) or "none"


def records(module: str, name: str, arguments: str, summary: str) -> Iterator[dict[str, str]]:
    *_, last = name.split(".")
    kind = "method" if "." in name else "function"
    described = f"- kind: {kind}\n- name: {last}\n- arguments: {names(arguments)}\n- summary: {summary}."
    source = f'def {name}({arguments}):\n    """{summary}."""'
    yield {"instruction": "Describe this function.", "input": source, "output": described}
    placed = f"- kind: {kind}\n- name: {last}\n- module: {module}"
    yield {"instruction": f"What is `{module}.{name}`?", "input": "", "output": placed}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    count = {"train": 0, "held-out": 0}
    with (folder / "train.jsonl").open("w") as train, (folder / "held-out.jsonl").open("w") as held_out:
        for module, tree in modules():
            is_held_out = int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT == 0
            for found in functions(tree.body):
                for record in records(module, *found):
                    print(json.dumps(record, ensure_ascii=False), file=held_out if is_held_out else train)
                    count["held-out" if is_held_out else "train"] += 1
    print(f"wrote {count['train']} records to {folder}/train.jsonl and {count['held-out']} to {folder}/held-out.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
