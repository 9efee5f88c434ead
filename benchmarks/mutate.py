"""Mutation testing: plant single faults in the modules that decide numbers, and check whether their tests notice.

python benchmarks/mutate.py docs/promises/reliability.md              (make mutate) a sample of each module
python benchmarks/mutate.py --only losses --sample 0         all of one module

Each fault changes one operator, comparison, number, condition or statement. A fault that no test notices is listed with its line:
either a test is missing, or the fault has no visible effect.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]
TESTS = {
    "rows/order": "order epochs mixture elastic",
    "rows/text_rows": "rows data epochs",
    "rows/loader": "order rows elastic",
    "rows/packing": "packing conversations",
    "modeling/losses": "losses model step packing",
    "training/step": "step router nonfinite",
    "training/divergence": "nonfinite spike epochs fp16 engines",
    "runtime/engines/gradients": "step nonfinite spike fp16 engines",
    "runtime/engines/shards": "saving checkpoint muon matrix engines",
    "evaluation/held_out": "evaluation evaluation_sets eval_only mixture",
    "chat/records": "chat forms",
    "chat/template": "chat",
    "chat/items": "chat conversations",
    "optimization/schedule": "schedule muon config",
}
"""Test files of each module, the fastest to notice a fault first; tests that noticed earlier faults run before them."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SECONDS = 900
"""Time limit for the tests of a module without a fault. With a fault it is three times what they took, at least a minute."""
IMPORTED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "accelerate",
    "datasets",
    "deepspeed",
    "hypothesis",
    "matplotlib.pyplot",
    "pydantic",
    "pytest",
    "wandb",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
)
PASSED, FAILED, ENDLESS, BROKEN = "not noticed", "noticed", "hung", "could not be imported"
OUTCOME_NAMES = (PASSED, FAILED, ENDLESS, BROKEN)
OUTCOMES = {0: PASSED, 1: FAILED}
"""Outcome by pytest's exit code; any other code means that no test was run."""


@dataclass(frozen=True)
class Fault:
    module: str
    line: int
    what: str
    source: str
    """Source of the complete module, with the fault."""
    seconds: float = SECONDS
    """Time limit of its tests."""


def faults_of(module: str) -> list[Fault]:
    """All faults that can be planted in a module."""
    tree = ast.parse((ROOT / f"src/acc_lm/{module}.py").read_text())
    number = sum(1 for _ in _changes(copy.deepcopy(tree)))
    found = []
    for index in range(number):
        changed = copy.deepcopy(tree)
        line, what = next(change for i, change in enumerate(_changes(changed, index)) if i == index)
        found.append(Fault(module, line, what, ast.unparse(ast.fix_missing_locations(changed))))
    return found


def _changes(tree: ast.Module, wanted: int | None = None) -> Iterator[tuple[int, str]]:
    """(line, description) of each possible change, in order; the change with number `wanted` is applied."""
    number = -1

    def is_wanted() -> bool:
        nonlocal number
        number += 1
        return number == wanted

    for parent, field, index, node in _nodes(tree):
        before = ast.unparse(node) if isinstance(node, ast.expr | ast.stmt) else ""
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            if is_wanted():
                node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
            yield node.lineno, f"`{before}`: comparison changed"
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
            if is_wanted():
                node.op = SWAPS[type(node.op)]()  # type: ignore[call-overload]
            yield node.lineno, f"`{before}`: operator changed"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            if is_wanted():
                _put(parent, field, index, node.operand)
            yield node.lineno, f"`{before}`: sign removed"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, bool | int | float)
            and not isinstance(node.value, str)
        ):
            value, where = node.value, ast.unparse(parent).splitlines()[0][:60]
            if is_wanted():
                node.value = not value if isinstance(value, bool) else value + 1
            yield node.lineno, f"`{value}` in `{where}`: value changed"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if is_wanted():
                _put(parent, field, index, ast.Pass())
            yield node.lineno, f"`{before.splitlines()[0][:60]}`: removed"
        if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(
            node.test, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):
            test = ast.unparse(node.test)
            if is_wanted():
                node.test = ast.UnaryOp(ast.Not(), node.test)
            yield node.lineno, f"`if {test}`: condition negated"


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _nodes(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index in it, node) of all code that decides something: no annotations, messages or assertions."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "defaults"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.Raise | ast.JoinedStr | ast.Assert | ast.ImportFrom
            ):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            yield node, field, index, child
            yield from _nodes(child)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="page whose block `mutate` is replaced")
    parser.add_argument("--only", choices=list(TESTS))
    parser.add_argument("--sample", type=int, default=20, help="number of faults per module; 0: all (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    chosen: list[Fault] = []
    planted: dict[str, int] = {}
    for module in [arguments.only] if arguments.only else TESTS:
        every = faults_of(module)
        planted[module] = len(every)
        few = random.Random(arguments.seed).sample(every, min(arguments.sample or len(every), len(every)))
        chosen += sorted(few, key=lambda fault: fault.line)

    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in IMPORTED:
        importlib.import_module(name)  # once, before forking; no module of acc_lm
    from tqdm import tqdm

    os.environ["NOTICED"] = tempfile.mkdtemp(prefix="acc-lm-noticed-")
    with multiprocessing.get_context("fork").Pool(arguments.workers, maxtasksperchild=1) as pool:
        sound = [
            Fault(module, 0, "", ast.unparse(ast.parse((ROOT / f"src/acc_lm/{module}.py").read_text())))
            for module in planted
        ]
        seconds = {}
        for fault, outcome, took in pool.imap_unordered(_try, sound):
            if outcome != PASSED:
                sys.exit(f"error: the tests of {fault.module} must pass before a fault is planted, got: {outcome}")
            seconds[fault.module] = max(60, 3 * took)
        chosen = [replace(fault, seconds=seconds[fault.module]) for fault in chosen]
        found = []
        for fault, outcome, _ in tqdm(pool.imap_unordered(_try, chosen), total=len(chosen), unit="fault"):
            found.append((fault, outcome))
            if outcome == PASSED:
                tqdm.write(f"not noticed: {fault.module}.py:{fault.line} {fault.what}")
    from acc_lm.studies.tables import replace_block

    lines = report(found, planted, f"--sample {arguments.sample} --seed {arguments.seed}")
    print(*lines, sep="\n")
    if arguments.page:
        replace_block(arguments.page, "mutate", "\n".join(lines))


def report(found: list[tuple[Fault, str]], planted: dict[str, int], options: str) -> list[str]:
    """Markdown lines: a table of the modules, and a list of the faults that were not noticed."""
    from acc_lm.studies.tables import machine_line

    def count(module: str, *outcomes: str) -> int:
        return sum(fault.module == module and outcome in (outcomes or OUTCOME_NAMES) for fault, outcome in found)

    killed = sum(outcome != PASSED for _, outcome in found)
    rows = [
        f"| `{module}.py` | {possible} | {count(module)} | {count(module, FAILED)} | {count(module, ENDLESS, BROKEN)} | {count(module, PASSED)} |"
        for module, possible in planted.items()
    ]
    alive = sorted(
        (fault for fault, outcome in found if outcome == PASSED), key=lambda fault: (fault.module, fault.line)
    )
    return [
        f"`make mutate`, that is `python benchmarks/mutate.py {options} docs/promises/reliability.md`: "
        f"{len(found)} faults planted, {killed} noticed ({killed / len(found):.1%}).",
        "",
        machine_line(),
        "",
        "| module | possible | planted | failed a test | hung or could not be imported | not noticed |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        *(f"- `{fault.module}.py:{fault.line}` {fault.what}" for fault in alive),
    ]


def _try(fault: Fault) -> tuple[Fault, str, float]:
    """Run the tests of the fault's module with the fault in place; return the outcome and the seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="acc-lm-mutate-", ignore_cleanup_errors=True) as folder:
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in files.split("\0"):
            if name and (ROOT / name).is_file():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder, name))
        Path(folder, f"src/acc_lm/{fault.module}.py").write_text(fault.source)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _run_tests(folder, fault.module, Path(folder, "output"))
        end = start + fault.seconds
        outcome = ENDLESS
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                outcome = OUTCOMES.get(os.waitstatus_to_exitcode(status), BROKEN)
                break
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and every process it left running
        if outcome == ENDLESS:
            os.waitpid(pid, 0)
        if outcome != PASSED and not fault.line:
            print(Path(folder, "output").read_text()[-4000:])
        return fault, outcome, time.monotonic() - start


class _Noticed:
    """Pytest plugin: run the tests that noticed earlier faults of a module first, the most recent one before all others."""

    def __init__(self, module: str) -> None:
        self.file = Path(os.environ["NOTICED"], module.replace("/", "."))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        earlier = self.file.read_text().splitlines() if self.file.exists() else []
        last = {name: place for place, name in enumerate(earlier)}
        items.sort(key=lambda item: -last.get(item.nodeid, -1))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            with self.file.open("a") as file:
                file.write(report.nodeid + "\n")


def _run_tests(folder: str, module: str, output: Path) -> None:
    code = 1
    try:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon could not start a data loader's workers
        os.chdir(folder)
        with output.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        sys.path[:] = [f"{folder}/src", folder, f"{folder}/tests", *(path for path in sys.path if path != str(ROOT))]
        os.environ["PYTHONPATH"] = f"{folder}/src"
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        import pytest

        files = [str(next(Path("tests").rglob(f"test_{name}.py"))) for name in TESTS[module].split()]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", folder]
        code = int(pytest.main([*options, *files], plugins=[_Noticed(module)]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
