"""The house: modules import from lower floors only, strategies have names in one room, nothing heavy is imported early."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from processes import ROOT

SOURCE = ROOT / "src" / "acc_lm"
FLOORS = {
    "redaction": 0, "cache": 0, "errors": 0, "losses": 0, "activations": 0, "packing": 0, "order": 0, "mixture": 0, "progress": 0, "history": 0, "stop": 0, "throughput": 0,
    "config": 1, "recipe": 1, "timetable": 1,
    "sources": 2, "tokenizer": 2, "chat": 2, "conversations": 2, "stream_reader": 2, "streaming": 2, "rows": 2, "documents": 2, "data": 2, "attention": 2, "adapter": 2, "router": 2, "experts": 2,
    "model": 2, "muon": 2, "optimizer": 2, "schedule": 2, "runtime": 2, "tracking": 2,
    "step": 3, "evaluation": 3, "checkpoint": 3, "saving": 3, "divergence": 3, "resuming": 3, "retention": 3,
    "epochs": 3, "samples": 3, "early_stopping": 3, "dry_run": 3, "export": 3, "profiling": 3, "speed": 3, "scoring": 3, "completions": 3, "summary": 3, "console": 3,
    "cli": 4,
}  # fmt: skip
MODULES = sorted(SOURCE.rglob("*.py"))


def room(file: Path) -> str:
    return file.relative_to(SOURCE).with_suffix("").parts[0]


def imports(file: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top level and outside of TYPE_CHECKING) of every import."""
    tree = ast.parse(file.read_text())
    found = []
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "acc_lm":
            found += [(f"acc_lm.{alias.name}", id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
        elif isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
    return found


def test_every_module_has_a_floor() -> None:
    assert {room(file) for file in MODULES} - {"__init__", "evaluate_modules"} == set(FLOORS)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_modules_import_from_their_own_or_lower_floors(file: Path) -> None:
    if room(file) in ("__init__", "evaluate_modules"):
        assert not [name for name, _ in imports(file) if name.startswith("acc_lm")]
        return
    for name, _ in imports(file):
        if name.startswith("acc_lm."):
            other = name.split(".")[1]
            assert FLOORS[other] <= FLOORS[room(file)], f"{room(file)} imports {other} from a higher floor"


def test_strategies_have_names_in_the_runtime_only() -> None:
    for file in [*MODULES, ROOT / "train.py"]:
        if file.is_relative_to(SOURCE / "runtime"):
            continue
        # `acc-lm parity` compares the files in accelerate_configs/, so it holds their names; it decides nothing by them.
        kinds = (
            (ast.Name, ast.Attribute) if file == SOURCE / "cli/parity.py" else (ast.Name, ast.Attribute, ast.Constant)
        )
        words = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
        text = " ".join(
            str(getattr(w, "id", getattr(w, "attr", getattr(w, "value", ""))))
            for w in words
            if not is_docstring(w, file)
        )
        for word in ("deepspeed", "fsdp", "distributed_type", "distributeddataparallel"):
            assert word not in text.lower(), f"{file.name} names {word}"


def test_the_inside_of_the_runtime_is_imported_by_itself_only() -> None:
    """Everybody else gets what `acc_lm.runtime` offers, so a strategy's name cannot leave through a side door."""
    for file in [*MODULES, ROOT / "train.py"]:
        if not file.is_relative_to(SOURCE / "runtime"):
            assert not [name for name, _ in imports(file) if name.startswith("acc_lm.runtime.")], file.name


def is_docstring(node: ast.AST, file: Path) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 60


@pytest.mark.parametrize("file", [*MODULES, ROOT / "train.py"], ids=lambda file: file.name)
def test_nothing_heavy_is_imported_before_it_is_used(file: Path) -> None:
    early = {name.split(".")[0] for name, top in imports(file) if top}
    assert (
        not early
        & {
            "transformers",
            "accelerate",
            "datasets",
            "deepspeed",
            "wandb",
            "evaluate",
            "matplotlib",
            "peft",
            "pandas",
            "pyarrow",
        }
        or "evaluate_modules" in file.parts
    )


@pytest.mark.parametrize("file", [*MODULES, ROOT / "train.py"], ids=lambda file: file.name)
def test_nothing_is_executed_that_came_from_a_file(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in (
                "eval",
                "exec",
                "torch.load",
                "yaml.load",
                "yaml.unsafe_load",
                "os.system",
                "os.popen",
                "input",
            ), called
            assert not called.startswith(("pickle.", "dill.", "joblib.", "shelve.", "marshal.")), called
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            for name in ("trust_remote_code", "shell", "allow_pickle"):
                assert given.get(name) != "True", f"{called}({name}=True)"
            if called.endswith("YAML"):
                assert given["typ"] == "'safe'"
            # Left out, it would mean a question on the terminal.
            if called.startswith("Auto") and called.endswith(("from_pretrained", "from_config")):
                assert given["trust_remote_code"] == "False" or given["trust_remote_code"].endswith("trust_remote_code")
    assert not {name.split(".")[0] for name, _ in imports(file)} & {"pickle", "dill", "joblib", "shelve", "marshal"}


def test_train_reads_in_one_sitting() -> None:
    lines = (ROOT / "train.py").read_text().splitlines()
    assert len(lines) <= 320
