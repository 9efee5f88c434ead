"""Rules of docs/architecture.md: rooms import from rooms below, strategies have names in one room, nothing heavy is imported early."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

SOURCE = ROOT / "src" / "acc_lm"
TABLE = re.findall(r"^\| \[`(\w+)(/?)`\]\(\S+\) \| (.*) \|$", (ROOT / "docs/architecture.md").read_text(), re.M)
ROOMS = [name for name, is_room, _ in TABLE if is_room]
GROUND = [name for name, is_room, _ in TABLE if not is_room]
FRONTS = ("config", "data", "training", "runtime")
INSIDE = {"config": ("loading", "messages", "project", "reference"), "training": ("step",)}
"""Modules of a room with a front that others may import directly: a front with them would load more than they need."""
MODULES = sorted(SOURCE.rglob("*.py"))
PARTS_OF_RUNTIME = re.findall(
    r"^    (\w+)/ ", ast.get_docstring(ast.parse((SOURCE / "runtime/__init__.py").read_text())) or "", re.M
)
PROGRAMS = [*MODULES, ROOT / "train.py", *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").rglob("*.py")]


def room(file: Path) -> str:
    name = file.relative_to(SOURCE).with_suffix("").parts[0]
    return "cli" if name == "__main__" else name


def height(name: str) -> int:
    """Height of a room above the ground."""
    return len(ROOMS) - ROOMS.index(name) if name in ROOMS else 0


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


def test_the_table_of_rooms_matches_the_folders_and_their_docstrings() -> None:
    assert {room(file) for file in MODULES} - {"__init__"} == {*ROOMS, *GROUND}
    assert len(list(SOURCE.glob("[a-z]*"))) <= 24  # besides __init__ and __main__
    for name, is_room, line in TABLE:
        file = SOURCE / name / "__init__.py" if is_room else SOURCE / f"{name}.py"
        assert (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0] == line, name


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_rooms_import_from_rooms_below(file: Path) -> None:
    if room(file) == "__init__" or file.is_relative_to(SOURCE / "evaluation/metrics"):
        assert not [name for name, _ in imports(file) if name.startswith("acc_lm")]
        return
    for name, _ in imports(file):
        if name.startswith("acc_lm."):
            other = name.split(".")[1]
            assert height(other) <= height(room(file)), f"{room(file)} imports {other}, which stands above it"


def test_the_parts_of_the_runtime_import_from_those_below() -> None:
    assert {file.parent.name for file in (SOURCE / "runtime").glob("*/*.py")} == {*PARTS_OF_RUNTIME}
    for file in (SOURCE / "runtime").glob("*/*.py"):
        for name, _ in imports(file):
            if name.startswith("acc_lm.runtime."):
                part = name.split(".")[2]
                assert PARTS_OF_RUNTIME.index(part) >= PARTS_OF_RUNTIME.index(file.parent.name), f"{file.name}: {name}"


def test_every_file_of_a_room_has_a_line_in_its_docstring() -> None:
    for name in [*ROOMS, *(f"runtime/{part}" for part in PARTS_OF_RUNTIME)]:
        text = ast.get_docstring(ast.parse((SOURCE / name / "__init__.py").read_text())) or ""
        files = {file.stem for file in (SOURCE / name).glob("[a-z]*.py")}
        lines = [line.strip() for line in text.splitlines()]
        named = {word for line in lines for word in re.split(r"  +", line)[0].split(", ")}
        assert files <= named or name == "cli", f"{name}: {files - named}"


def test_the_ground_loads_no_library_of_models() -> None:
    """This keeps --help, a misspelt key and a reader of a stream fast."""
    names = [*(f"acc_lm.{name}" for name in GROUND), "acc_lm.config.loading", "acc_lm.rows.stream_reader"]
    code = f"import sys; import {', '.join(names)}; print({{'torch', 'transformers', 'accelerate', 'datasets'}} & set(sys.modules))"
    path = {"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"]}
    run = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_strategies_have_names_in_the_runtime_only() -> None:
    for file in [*MODULES, ROOT / "train.py"]:
        if file.is_relative_to(SOURCE / "runtime"):
            continue
        # Tables compare the files in accelerate_configs/ and name versions, so they hold such names; nothing is decided by them.
        kinds = (
            (ast.Name, ast.Attribute)
            if file.is_relative_to(SOURCE / "studies")
            else (ast.Name, ast.Attribute, ast.Constant)
        )
        words = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
        text = " ".join(
            str(getattr(w, "id", getattr(w, "attr", getattr(w, "value", ""))))
            for w in words
            if not is_docstring(w, file)
        )
        for word in ("deepspeed", "fsdp", "distributed_type", "distributeddataparallel"):
            assert word not in text.lower(), f"{file.name} names {word}"


def test_launchers_and_process_groups_are_known_to_the_runtime_and_to_launcher_only() -> None:
    """Muon reads and writes parts of tensors that FSDP2 cuts, as torch's own optimizers do."""
    variables = re.compile(r"(TORCHELASTIC|TORCH_ELASTIC|ACCELERATE|FSDP|MASTER)_\w+|(LOCAL_)?(RANK|WORLD_SIZE)")
    calls = ("new_group", "init_process_group", "to_local", "full_tensor", "device_mesh", "distribute_tensor", "prctl")
    known = {SOURCE / "launcher.py", SOURCE / "optimization/muon.py"}
    for file in [*MODULES, ROOT / "train.py"]:
        if file in known or file.is_relative_to(SOURCE / "runtime"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not variables.fullmatch(node.value), f"{file.name} names {node.value}"
            elif isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                assert name not in calls, f"{file.name} names {name}"


def test_a_public_name_means_one_thing() -> None:
    """Verbs of the command line all have `add_arguments` and `run`, programs have `main`, metrics their own modules."""
    places: dict[str, list[str]] = {}
    for file in MODULES:
        if file.is_relative_to(SOURCE / "evaluation/metrics"):
            continue
        for name in public_names(file):
            places.setdefault(name, []).append(str(file.relative_to(SOURCE)))
    repeated = {name for name, files in places.items() if len(files) > 1}
    assert repeated <= {"add_arguments", "run", "main"}, {name: places[name] for name in repeated}
    assert not places.keys() & {"found", "asked", "given", "known", "told", "own", "there"}


def public_names(file: Path) -> list[str]:
    """Names that the top level of a module defines."""
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def test_the_files_of_a_run_are_named_in_one_place() -> None:
    """For arguments of functions and parts of paths; messages may name a file as the user sees it."""
    names = ast.parse((SOURCE / "run_files/names.py").read_text())
    files = {node.value for node in ast.walk(names) if isinstance(node, ast.Constant) and "." in str(node.value)[:-1]}
    assert "state.json" in files
    for file in [*MODULES, ROOT / "train.py"]:
        if file != SOURCE / "run_files/names.py":
            constants = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
            assert not constants & (files - {ast.get_docstring(names)}), file.name


@pytest.mark.parametrize("front", FRONTS)
def test_the_inside_of_a_room_with_a_front_is_imported_by_itself_only(front: str) -> None:
    """Other rooms get only what the front lists, so that the name of a strategy, for one, cannot leak past it."""
    allowed = {f"acc_lm.{front}.{name}" for name in INSIDE.get(front, ())}
    for file in [*MODULES, ROOT / "train.py"]:
        if not file.is_relative_to(SOURCE / front):
            inside = {name for name, _ in imports(file) if name.startswith(f"acc_lm.{front}.")}
            part = {name: SOURCE / front / name.split(".")[2] for name in inside}
            modules = {name for name in inside if part[name].is_dir() or part[name].with_suffix(".py").exists()}
            assert modules <= allowed, file.name


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
        or "metrics" in file.parts
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
            # If it is left out, the library asks on the terminal.
            if called.startswith("Auto") and called.endswith(("from_pretrained", "from_config")):
                assert given["trust_remote_code"] == "False" or given["trust_remote_code"].endswith("trust_remote_code")
    assert not {name.split(".")[0] for name, _ in imports(file)} & {"pickle", "dill", "joblib", "shelve", "marshal"}


def test_train_can_be_read_in_one_sitting() -> None:
    text = (ROOT / "train.py").read_text()
    lengths = {n.name: n.end_lineno - n.lineno + 1 for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}  # type: ignore[operator]
    assert set(lengths) == {"train", "build", "fit", "main"}
    assert max(lengths.values()) <= 60
    assert len(text.splitlines()) <= 160


def test_the_formatter_has_no_exceptions() -> None:
    assert [file.name for file in PROGRAMS if "# fmt:" in file.read_text()] == []


@pytest.mark.parametrize("file", [*MODULES, ROOT / "train.py"], ids=lambda file: file.name)
def test_only_the_rooms_rows_and_data_check_what_kind_rows_are(file: Path) -> None:
    """Others use the contract of `rows.batch`."""
    if file.is_relative_to(SOURCE) and room(file) in ("rows", "data"):
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            assert not re.search(r"\b\w*Rows\b", ast.unparse(node.args[1])), ast.unparse(node)


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.name)
def test_no_function_is_longer_than_two_screens(file: Path) -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}
