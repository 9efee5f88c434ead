"""`acc-lm bench-comm`: bandwidth between processes, and the effect of buckets, hooks and accumulation on a step."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from acc_lm.config.loading import load_config
from acc_lm.config.project import find_accelerate_config
from acc_lm.errors import ConfigError, MachineError
from acc_lm.studies.launching import (
    LAUNCH_SECONDS,
    check_num_processes,
    launch,
    num_accelerators,
    shared_cores,
)
from acc_lm.studies.tables import machine_line, replace_block

PARTS = ("collectives", "buckets", "memory", "hooks", "accumulation", "data-parallel")
UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
CPU_SIZES, GPU_SIZES = "4KiB,64KiB,1MiB,16MiB", "4KiB,64KiB,1MiB,16MiB,64MiB,256MiB"
BUCKETS = (1, 5, 25, 100)
DEFAULT_RECIPE = "quickstart"
PASSED_BY = (
    "All gradients are in one bucket. The error is the relative error of one gradient, for PowerSGD the first that it compresses; later "
    "steps make up for what it leaves out. On gloo, PowerSGD sends from callbacks that the counter does not see; the system's count over TCP "
    "includes them."
)
# A model with 45 MB of gradients and a short computation, used when no recipe is named.
DEFAULT_SHAPE = (
    "model.config={hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 6, num_attention_heads: 6, num_key_value_heads: 6}",
    "data.sequence_length=32",
    "training.micro_batch_size=1",
    "training.global_batch_size=1",
)


def read_sizes(text: str) -> list[int]:
    """`4KiB,1MiB` -> bytes, ascending.

    Raises:
        ConfigError: the text has another form, or a size is below 4 bytes.
    """
    found = [re.fullmatch(r"(\d+) ?(B|KiB|MiB|GiB)?", word.strip(), re.IGNORECASE) for word in text.split(",")]
    sizes = [int(match[1]) * UNITS[(match[2] or "B").upper()] for match in found if match]
    if len(sizes) != len(found) or min(sizes, default=0) < 4:
        raise ConfigError(
            f"--sizes must be sizes of 4 bytes or more such as 4KiB,1MiB,256MiB, got {text!r}; write them like these"
        )
    return sorted(set(sizes))


def read_parts(text: str) -> list[str]:
    """Names of the parts in the text, in the order of `PARTS`; all when it names none.

    Raises:
        ConfigError: a part does not exist.
    """
    named = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [name for name in named if name not in PARTS]:
        raise ConfigError(f"--parts must be among {', '.join(PARTS)}, got {unknown[0]!r}; choose from these")
    return [part for part in PARTS if part in named] if named else list(PARTS)


def bench_comm(
    recipe: Path | None,
    overrides: Sequence[str],
    num_processes: int | None,
    sizes: str | None,
    parts: Sequence[str],
    repeats: int,
    output: Path,
) -> int:
    """Launch, measure, and write the tables and their JSON; return the exit code.

    Args:
        recipe: recipe whose model and micro-batch are measured; None: a small model on the quickstart recipe.
        num_processes: number of processes; None: one for each GPU, or 2 with fewer than two GPUs.
        output: Markdown file; bench-comm.json is written next to it.
    """
    devices = num_accelerators()
    count = num_processes or (devices if devices > 1 else 2)
    if count < 2:
        raise ConfigError(f"--processes must be at least 2 to exchange something, got {count}; raise it")
    check_num_processes(count, "--processes")
    shape = [*(DEFAULT_SHAPE if recipe is None else ()), *overrides, "tracking.report_to=[]"]
    load_config(recipe or DEFAULT_RECIPE, shape)
    notes, load = shared_cores([count]), os.getloadavg()[0]
    plan: dict[str, Any] = {
        "recipe": str(recipe or DEFAULT_RECIPE),
        "overrides": shape,
        "repeats": repeats,
        "buckets": BUCKETS,
        "devices": devices,
        "sizes": read_sizes(sizes or (GPU_SIZES if devices else CPU_SIZES)),
    }
    print(f"{count} processes; load average before {load:.2f}", *notes, sep="\n", flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="acc-lm-bench-comm-") as folder:
        for file, number, wanted in _launches(count, devices, parts):
            found = _run(file, number, {**plan, "parts": wanted}, Path(folder))
            facts = facts or found["facts"]
            for part, measured in found["rows"].items():
                rows.setdefault(part, []).extend(measured)
    values = {
        "command": _command(recipe, num_processes, sizes, parts, repeats, overrides),
        "made": machine_line(),
        "load_average_before": load,
        "num_processes": count,
        "devices": devices,
        **facts,
        "sizes": plan["sizes"],
        "repeats": repeats,
        "notes": notes,
        "parts": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name("bench-comm.json").write_text(json.dumps(values, indent=1) + "\n")
    replace_block(output, "bench-comm", "\n".join(page(values, parts)))
    print(f"written: {output}, bench-comm.json")
    return 0


def _launches(count: int, devices: int, parts: Sequence[str]) -> list[tuple[Path | None, int, list[str]]]:
    """(Accelerate config, number of processes, parts) of each launch."""
    from acc_lm.runtime import BUCKETED_CONFIGS

    first, *others = (find_accelerate_config(name) for name in BUCKETED_CONFIGS)
    launches: list[tuple[Path | None, int, list[str]]] = [(first, count, [p for p in parts if p != "data-parallel"])]
    if "buckets" in parts:
        launches += [(file, count, ["buckets"]) for file in others]
    if "data-parallel" in parts and devices > 1:
        launches.append((None, 1, ["data-parallel"]))
    return [entry for entry in launches if entry[2]]


def _run(file: Path | None, count: int, plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    plan_file, result_file = folder / "plan.json", folder / "result.json"
    plan_file.write_text(json.dumps(plan))
    result_file.unlink(missing_ok=True)
    print(f"launching {count} x {file.stem if file else 'plain Python'} ...", flush=True)
    program = ["-m", "acc_lm.studies.bandwidth_worker", str(plan_file), str(result_file)]
    problem = launch(program, file, count, folder / "output", LAUNCH_SECONDS, shows_output=True)
    if problem is not None:
        raise MachineError(f"the launch must finish, got: {problem.removeprefix('error: ')}")
    result: dict[str, Any] = json.loads(result_file.read_text())
    return result


# --- output --------------------------------------------------------------------------------------------------------


def _command(
    recipe: Path | None,
    num_processes: int | None,
    sizes: str | None,
    parts: Sequence[str],
    repeats: int,
    overrides: Sequence[str],
) -> str:
    words = ["acc-lm bench-comm", *(["--config", str(recipe)] if recipe else [])]
    words += ["--processes", str(num_processes)] if num_processes else []
    words += ["--sizes", sizes] if sizes else []
    words += ["--parts", ",".join(parts)] if list(parts) != list(PARTS) else []
    return " ".join([*words, "--repeats", str(repeats), *overrides])


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def _sent(row: dict[str, Any]) -> str:
    found = row["collectives"]
    calls = ", ".join(f"{entry['calls']:.0f} {name}" for name, entry in found.items()) or "none"
    tcp = "-" if row["tcp_bytes"] is None else f"{row['tcp_bytes'] / 1e6:.3f}"
    return f"{calls} | {sum(entry['bytes'] for entry in found.values()) / 1e6:.3f} | {tcp}"


def _milliseconds(row: dict[str, Any]) -> str:
    return f"{1000 * row['seconds']:.2f} ({1000 * row['fastest_seconds']:.2f}) ms"


def _head(names: str) -> list[str]:
    return ["", f"| {names} |", "|" + "---|" * len(names.split(" | "))]


SENT = "collectives | MB passed to collectives | MB received over TCP"


def page(values: dict[str, Any], parts: Sequence[str]) -> list[str]:
    """Lines of the page with all tables, as Markdown."""
    rows = values["parts"]
    model = ""
    if "num_parameters" in values:
        model = f" A step trains a model of {values['num_parameters']:,} parameters; its communication is counted in one step."
    lines = [
        f"`{values['command']}`",
        "",
        f"{values['made']}; load average before: {values['load_average_before']:.2f}.",
        "",
        f"{values['num_processes']} processes on {values.get('device', 'cpu')}; medians of the slowest process, in brackets the "
        f"fastest repeat.{model}",
    ]
    if rows.get("collectives"):
        lines += _head("collective | tensor | time | algorithm bandwidth | bus bandwidth")
        lines += [
            f"| {row['kind']} | {_size(row['bytes'])} | {1000 * row['seconds']:.3f} ({1000 * row['fastest_seconds']:.3f}) ms | {row['algorithm_bandwidth'] / 1e9:.3f} GB/s | "
            f"{row['bus_bandwidth'] / 1e9:.3f} GB/s |"
            for row in rows["collectives"]
        ]
    if rows.get("buckets"):
        lines += _head(f"strategy | `distributed.bucket_cap_mb` | step | {SENT}")
        for row in rows["buckets"]:
            size = row["bucket_cap_mb"]
            shown = "nothing is sent" if size is None else f"{size:g} ({size * 2**18:,} elements)"
            lines.append(f"| {row['strategy']} | {shown} | {_milliseconds(row)} | {_sent(row)} |")
    if rows.get("memory"):
        lines += _head(
            "`gradient_as_bucket_view` | memory of weights, gradients and buckets | above the minimum | gradients alone"
        )
        least = min(row["held_bytes"] or 0 for row in rows["memory"])
        for row in rows["memory"]:
            held, gradients = row["held_bytes"], f"{row['gradient_bytes'] / 1e6:.1f} MB"
            shown = "not measured here | -" if held is None else f"{held / 1e6:.1f} MB | {(held - least) / 1e6:.1f} MB"
            lines.append(f"| {str(row['gradient_as_bucket_view']).lower()} | {shown} | {gradients} |")
    if rows.get("hooks"):
        lines += _head(f"`distributed.comm_hook` | step | {SENT} | gradient error")
        for row in rows["hooks"]:
            if "problem" in row:
                lines.append(f"| {row['hook']} | refused: {row['problem']} | | | | |")
                continue
            rank = f", rank {row['arguments']['matrix_approximation_rank']}" if row["arguments"] else ""
            lines.append(f"| {row['hook']}{rank} | {_milliseconds(row)} | {_sent(row)} | {row['error']:.1e} |")
        lines += ["", PASSED_BY]
    if rows.get("accumulation"):
        lines += _head(f"micro-batches of a step | step | {SENT}")
        lines += [f"| {row['accumulation']} | {_milliseconds(row)} | {_sent(row)} |" for row in rows["accumulation"]]
    if "data-parallel" in parts:
        lines += _compare_with_data_parallel(values)
    return [*lines, *(f"\n{note}." for note in values["notes"])]


def _compare_with_data_parallel(values: dict[str, Any]) -> list[str]:
    found = values["parts"].get("data-parallel")
    lines = _head("the same rows | step | memory of each GPU")
    if not found:
        return [
            *lines,
            f"| DataParallel | not measured: one process that copies its model to several GPUs in each step needs at least two, found {values['devices']} | - |",
        ]
    default = [row for row in values["parts"].get("buckets", []) if row["bucket_cap_mb"] == 25][:1]
    for name, row in (("DataParallel, one process", found[0]), *(("DDP, one process per GPU", row) for row in default)):
        lines.append(f"| {name} | {_milliseconds(row)} | {', '.join(f'{gb:.2f} GB' for gb in row['peak_memory_gb'])} |")
    return lines
