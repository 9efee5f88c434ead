"""`acc-lm parity`: one recipe under many Accelerate configs, each by a real launch, and how much the curves differ."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from acc_lm.config import Config
from acc_lm.config.loading import load_config
from acc_lm.config.project import find_accelerate_config, training_script
from acc_lm.errors import ConfigError
from acc_lm.run_files.differences import COMPARED, largest_differences, read_metrics, tolerance_of
from acc_lm.run_files.names import ENVIRONMENT, SUMMARY
from acc_lm.runtime import refusal, shares_layers
from acc_lm.studies.launching import launch, num_accelerators
from acc_lm.studies.tables import machine_line, replace_block

CPU_CASES = (
    "single:1",
    "ddp:2",
    "ddp:3",
    "multi_node_ddp:2",
    "fsdp2:2",
    "fsdp2_grad_op:2",
    "fsdp2_offload:2",
    "hsdp:4",
    "deepspeed_zero1:2",
    "deepspeed_zero2:2",
    "deepspeed_zero2_offload:2",
    "deepspeed_zero3:2",
    "deepspeed_zero3_offload:2",
    "ddp_sequence:2",
    "sequence_parallel:4",
    "deepspeed_zero3_sequence:2",
    "tensor_parallel:2",
    "fsdp2_tensor_parallel:4",
)
CASE_SECONDS = 900


@dataclass(frozen=True)
class Case:
    """An Accelerate config and a number of processes."""

    file: Path | None
    """Accelerate config; None: plain `python train.py`."""
    num_processes: int

    @property
    def name(self) -> str:
        return f"{self.file.stem if self.file else 'single'} x{self.num_processes}"

    @property
    def num_machines(self) -> int:
        return 2 if self.file is not None and self.file.stem.startswith("multi_node_") else 1


@dataclass(frozen=True)
class ParityRow:
    """Result of one launch, and its differences from the first."""

    name: str
    strategy: str
    engine: str
    differences: dict[str, float]
    """Largest relative difference over all steps, by metric."""
    same_ledger: bool
    peak_memory_gb: float
    """Peak memory of the process that used most, in GB (1e9 bytes)."""
    seconds: float
    """Duration of the entire launch in seconds, imports included."""
    problem: str | None = None

    def is_within(self, tolerance: dict[str, float]) -> bool:
        return (
            self.problem is None
            and self.same_ledger
            and all(self.differences.get(name, float("inf")) <= tolerance[name] for name in COMPARED)
        )


def parity(
    recipe: Path,
    overrides: Sequence[str],
    cases: Sequence[str],
    steps: int,
    output: Path | None,
) -> int:
    """Run every case, print the table as it grows, and write it; return 0 when all are within the tolerance, else 1.

    Args:
        output: Markdown file to write, and a JSON file of the same name next to it; None: neither.
    """
    config = load_config(recipe, overrides)
    chosen, left_out = _cases(cases, config)
    settings = [*overrides, *short_run(config, steps)]
    tolerance = tolerance_of(config)
    print(f"{recipe}: {steps} steps, {len(chosen)} launches; tolerance {_list(tolerance)}", flush=True)
    names = " ".join(f"{name.split('/')[1]:>8.8}" for name in COMPARED)
    print(f"{'config x processes':28} {'strategy':16} {names}  against the first row")
    for line in left_out:
        print(f"left out: {line}")
    rows: list[ParityRow] = []
    reference: tuple[dict[int, dict[str, float]], str] | None = None
    with tempfile.TemporaryDirectory(prefix="acc-lm-parity-") as folder:
        for case in chosen:
            row, measured = _run(case, recipe, settings, Path(folder), reference)
            reference = reference or measured
            rows.append(row)
            print(_line(row, tolerance), flush=True)
            if reference is None:
                raise ConfigError(
                    f"the first case must run, got: {row.problem}; it is what the others are compared with"
                )
            shutil.rmtree(Path(folder) / case.name.replace(" ", "-"), ignore_errors=True)
    ok = all(row.is_within(tolerance) for row in rows)
    print("all within the tolerance" if ok else "NOT within the tolerance")
    if output is not None:
        _write(output, recipe, overrides, steps, tolerance, rows, left_out)
        print(f"written: {output}, {output.with_suffix('.json')}")
    return 0 if ok else 1


def _cases(names: Sequence[str], config: Config) -> tuple[list[Case], list[str]]:
    chosen, left_out = [], []
    for name in names or _default_cases():
        stem, _, count = name.rpartition(":") if ":" in name else (name, "", "")
        if stem == "single":
            chosen.append(Case(None, 1))
            continue
        file = find_accelerate_config(stem)
        if not count.isdigit() or int(count) < 1:
            raise ConfigError(f"--cases must be written NAME:PROCESSES, got {name}; for example fsdp2:2")
        case = Case(file, int(count))
        # Processes that share rows count as one, which the launch itself knows.
        if config.training.global_batch_size % case.num_processes and refusal(file, case.num_processes, config):
            left_out.append(
                f"{case.name}, because {case.num_processes} processes do not divide training.global_batch_size {config.training.global_batch_size}"
            )
            continue
        may_be_left_out = config.optimizer.name != "adamw" or shares_layers(file)
        if may_be_left_out and (why := refusal(file, case.num_processes, config)):
            left_out.append(f"{case.name}, because {why}")
            continue
        chosen.append(case)
    return chosen, left_out


def _default_cases() -> Sequence[str]:
    count = num_accelerators()
    if count == 0:
        return CPU_CASES
    return [name for name in CPU_CASES if int(name.partition(":")[2]) <= count and not name.startswith("multi_node")]


def short_run(config: Config, steps: int) -> list[str]:
    """Overrides that shorten the recipe without changing the computation of a step."""
    warmup = min(config.schedule.warmup_steps, steps // 5 or 0.5)
    micro = config.training.micro_batch_size
    return [
        f"training.max_steps={steps}",
        "training.num_epochs=null",
        "training.log_every=1",
        f"training.eval_every={max(1, steps // 2)}",
        f"training.eval_batches={min(config.training.eval_batches or 4, 4)}",
        f"schedule.warmup_steps={warmup}",
        f"training.micro_batch_size={max(1, micro)}",
        "checkpoint.every=null",
        "checkpoint.keep_best=0",
        "tracking.report_to=[]",
        "export.sample_tokens=0",
    ]


def _run(
    case: Case,
    recipe: Path,
    settings: list[str],
    folder: Path,
    reference: tuple[dict[int, dict[str, float]], str] | None,
) -> tuple[ParityRow, tuple[dict[int, dict[str, float]], str] | None]:
    output_dir = folder / case.name.replace(" ", "-")
    script = [str(training_script()), "--config", str(recipe), *settings, f"output_dir={output_dir}"]
    started = time.monotonic()
    problem = launch(
        script, case.file, case.num_processes, folder / "output", CASE_SECONDS, num_machines=case.num_machines
    )
    seconds = time.monotonic() - started
    if problem is not None:
        return ParityRow(case.name, "", "", {}, False, 0.0, seconds, problem), None
    metrics = read_metrics(output_dir)
    summary = json.loads((output_dir / SUMMARY).read_text())
    environment = json.loads((output_dir / ENVIRONMENT).read_text())
    if environment["num_processes"] != case.num_processes:
        problem = f"{environment['num_processes']} processes ran instead of {case.num_processes}"
    expected, ledger = reference or (metrics, summary["ledger"])
    row = ParityRow(
        case.name,
        environment["strategy"],
        environment["engine"],
        largest_differences(expected, metrics),
        summary["ledger"] == ledger,
        max(summary["peak_memory_gb"]),
        seconds,
        problem,
    )
    return row, (metrics, summary["ledger"])


# --- the table -----------------------------------------------------------------------------------------------------


def _list(tolerance: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in tolerance.items())


def _line(row: ParityRow, tolerance: dict[str, float]) -> str:
    if row.problem is not None:
        return f"{row.name:28} {row.problem}"
    cells = " ".join(f"{row.differences.get(name, float('inf')):8.1e}" for name in COMPARED)
    verdict = "ok" if row.is_within(tolerance) else "DIFFERS"
    ledger = "same rows" if row.same_ledger else "OTHER ROWS"
    return f"{row.name:28} {row.strategy:16} {cells}  {ledger}  {row.peak_memory_gb:5.2f} GB  {row.seconds:4.0f} s  {verdict}"


def _write(
    output: Path,
    recipe: Path,
    overrides: Sequence[str],
    steps: int,
    tolerance: dict[str, float],
    rows: list[ParityRow],
    left_out: list[str],
) -> None:
    command = " ".join(["acc-lm parity", "--config", str(recipe), *overrides])
    lines = [
        f"`{command}`: {steps} steps; each row is a separate launch, compared step by step with the first row.",
        "",
        machine_line(),
        "",
        "| case | strategy | engine | loss | gradient norm | learning rate | evaluation | rows | memory per process | duration |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.problem is not None:
            lines.append(f"| {row.name} | {row.problem} | | | | | | | | |")
            continue
        cells = " | ".join(f"{row.differences.get(name, float('inf')):.1e}" for name in COMPARED)
        same = "the same" if row.same_ledger else "OTHER"
        lines.append(
            f"| {row.name} | {row.strategy} | {row.engine} | {cells} | {same} | {row.peak_memory_gb:.2f} GB | {row.seconds:.0f} s |"
        )
    lines += ["", f"Largest relative difference over all steps. Tolerance: {_list(tolerance)}."]
    lines += [f"Left out: {line}." for line in left_out]
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_block(output, "parity", "\n".join(lines))
    values: dict[str, Any] = {
        "command": command,
        "made": machine_line(),
        "steps": steps,
        "tolerance": tolerance,
        "rows": [asdict(row) for row in rows],
        "left_out": left_out,
    }
    output.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")
