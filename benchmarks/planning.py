"""Accuracy of the planner on published runs: fit of its constants, errors, and the tables of docs/planning.md.

    python -m benchmarks.planning [docs/planning.md]

`benchmarks/published.csv` has a line per published run. Errors that are called held out are of a source that the constants
were not fitted on. With a page, the constants in src/acc_lm/planning/constants.py and the page's tables are written anew.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from acc_lm.planning.closed_form import peak_memory
from acc_lm.planning.constants import FITTED
from acc_lm.planning.hardware import GPUS, Gpu
from acc_lm.planning.shapes import Layout, Recomputed, Shape, Work
from acc_lm.planning.speed import CALIBRATED_SPREAD, SPREAD, StepTime, step_time

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "benchmarks/published.csv"
CONSTANTS = ROOT / "src/acc_lm/planning/constants.py"

PRIOR: dict[str, tuple[float, float]] = {
    "products_hopper": (0.68, 0.25),
    "products_ampere": (0.80, 0.25),
    "width_hopper": (250.0, 0.8),
    "width_ampere": (250.0, 0.8),
    "tokens": (150.0, 0.8),
    "attention_hopper": (0.33, 0.25),
    "attention_ampere": (0.45, 0.25),
    "traffic": (0.8, 0.25),
    "eager": (2.5, 0.5),
    "power": (0.7, 0.25),
    "fp8": (1.5, 0.25),
}
"""Expected value of each fitted constant before any row is seen, and the standard deviation of its logarithm.

From kernels alone: large products reach 80 % of an H100's peak and 87 % of an A100's (stas00/ml-engineering, MAMF), whole
models less; FlashAttention-2 reaches 35 % of an H100's peak and 50 % of an A100's forward, less backward.
"""
FIXED = {"jitter": 0.006, "interference": 0.10, "hop": 3e-6, "far_hop": 16e-6}
"""Scale-out: fitted earlier on 31 ratios of runs that differ in the number of GPUs only, which `scale_out` repeats."""
NOISE = 0.10
"""Relative error that is expected of a published row."""
EQUAL = 0.6
"""Power by which the weight of a row falls with the number of rows of its source: 0 all rows alike, 1 all sources alike."""

OWN_GPUS = {
    **GPUS,
    "H100-500W": replace(GPUS["H100"], name="H100-500W", memory_gib=94.0, memory_bandwidth=2.4e12, power_share=5 / 7),
}
"""With the H100 of 96 GB of HBM2e and a limit of 500 W, on which torchtitan's team measures."""
RECOMPUTED = {
    "none": Recomputed(),
    "selective": Recomputed(elementwise=1.0),
    "sac-op2": Recomputed(0.5, 0.0, 1.0),
    "sac-layer2": Recomputed(0.5, 0.5, 0.5),
    "full": Recomputed(1.0, 1.0, 1.0),
}
CHECKPOINTING = {"none": "no", "full": "yes", "sac-op2": "every_second_product", "sac-layer2": "every_second_block"}
LOGIT_BYTES = {"full": 12, "full-kept": 14, "full-compiled": 5, "full-hf": 16, "chunked8": 4}
"""Bytes per logit at the backward pass of the loss: log-softmax, its gradient and that of the picked entry are fp32."""
RESERVED = {True: 1.1, False: 1.2}
"""Reserved over allocated memory, compiled or eager."""
FULL_SHARDING = Layout(regathers=True, reduces_each_micro_batch=True, scatters_gradients=True)


@dataclass(frozen=True)
class Row:
    """One published run."""

    source: str
    shape: Shape
    gpu: Gpu
    layout: Layout
    work: Work
    network: float
    """Bytes per second of a GPU's link to other machines; where the source is silent, 400 Gb/s for Hopper, 200 for Ampere."""
    speed: float
    """Tokens per second of one GPU."""
    facts: dict[str, str]

    @property
    def utilization(self) -> float:
        return self.speed * self.shape.flops_per_token(self.work.length) / self.gpu.peak()


def read_published() -> list[dict[str, str]]:
    with PUBLISHED.open(newline="") as file:
        return list(csv.DictReader(file))


def left_out(facts: dict[str, str]) -> str | None:
    """Reason why the speed of a run is not fitted; None: it is."""
    if not facts["tokens_s_gpu"]:
        return "publishes memory only"
    if facts["checkpointing"] == "unknown":
        return "does not say what is recomputed"
    if "offload" in facts["strategy"]:
        return "offload: an order of magnitude only, not fitted"
    if facts["source"] == "nanogpt":
        return "says days of a whole run, with evaluations, not the time of a step"
    if facts["source"] == "modded" and "PyTorch25" not in facts["where"]:
        return "the same run before its last kernels"
    return None


def layout_of(facts: dict[str, str]) -> Layout:
    count, name = int(facts["gpus"]), facts["strategy"].partition("-offload")[0]
    offload = facts["strategy"].partition("-offload")[2]
    sent = 2 if facts["precision"] == "bf16-pure" or "PURE" in facts["note"] else 4
    per_machine = OWN_GPUS[facts["gpu"]].per_machine
    shards = per_machine if name == "hsdp" else count
    sharded = replace(FULL_SHARDING, weight_shards=shards, gradient_shards=shards, moment_shards=shards)
    found = {
        "single": Layout(),
        "ddp": Layout(replicas=count),
        "zero1": Layout(moment_shards=count, overlap=0.0),
        "zero2": Layout(moment_shards=count, gradient_shards=count, reduces_each_micro_batch=True, overlap=0.0),
        "zero3": replace(sharded, overlap=0.5),
        "fsdp": sharded,
        "fsdp_grad_op": replace(sharded, regathers=False),
        "hsdp": replace(sharded, replicas=count // per_machine),
    }[name]
    return replace(
        found,
        gradient_bytes=sent,
        casts_weights=facts["precision"] == "bf16-amp",
        offloads_moments="opt" in offload,
        offloads_weights="param" in offload,
    )


def shape_of(facts: dict[str, str]) -> Shape:
    layers, hidden, ffn, heads, kv_heads, head_size, vocab, tied = (
        int(facts[key]) for key in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tied")
    )
    return Shape(layers, hidden, ffn, facts["mlp"] == "swiglu", heads, kv_heads, head_size, vocab, bool(tied))


def row_of(facts: dict[str, str]) -> Row:
    gpu = OWN_GPUS[facts["gpu"]]
    work = Work(
        int(facts["seq"]),
        int(facts["micro_batch"]),
        int(facts["accumulation"]),
        RECOMPUTED.get(facts["checkpointing"], Recomputed()),
        facts["compile"] == "1",
        "fp8" if facts["precision"].startswith("fp8") else "bfloat16",
    )
    network = float(facts["network_gbits"] or (400 if gpu.family == "hopper" else 200)) / 8 * 1e9
    speed = float(facts["tokens_s_gpu"] or 0)
    return Row(facts["source"], shape_of(facts), gpu, layout_of(facts), work, network, speed, facts)


def speed_rows() -> list[Row]:
    """Runs whose speed is fitted."""
    return [row_of(facts) for facts in read_published() if left_out(facts) is None]


def predicted(row: Row, constants: dict[str, float]) -> StepTime:
    return step_time(row.shape, row.gpu, row.layout, row.work, row.network, constants=constants)


def ratio(row: Row, constants: dict[str, float]) -> float:
    """Predicted over published speed."""
    return predicted(row, constants).tokens_per_second.middle / row.speed


def fit(rows: Sequence[Row], start: dict[str, float] | None = None, rounds: int = 12) -> dict[str, float]:
    """Fit the constants: least absolute relative errors by reweighted Gauss-Newton steps, drawn to PRIOR."""
    names = list(PRIOR)
    center = np.log([PRIOR[name][0] for name in names])
    stiffness = np.array([PRIOR[name][1] for name in names]) ** -2.0
    count: dict[str, int] = defaultdict(int)
    for row in rows:
        count[row.source] += 1
    weight = np.array([count[row.source] ** -EQUAL for row in rows]) / NOISE

    def constants(at: np.ndarray) -> dict[str, float]:
        return {**FIXED, **dict(zip(names, np.exp(at).tolist(), strict=True))}

    def errors(at: np.ndarray) -> np.ndarray:
        c = constants(at)
        return np.log([ratio(row, c) for row in rows])

    at = center.copy() if start is None else np.log([start[name] for name in names])
    here = errors(at)
    for _ in range(rounds):
        slope = np.stack([(errors(at + step) - here) / 0.01 for step in np.eye(len(names)) * 0.01], axis=1)
        weights = weight / np.maximum(np.abs(here), 0.02)
        left = slope.T @ (slope * weights[:, None]) + np.diag(stiffness)
        move = np.clip(np.linalg.solve(left, -slope.T @ (weights * here) - stiffness * (at - center)), -0.3, 0.3)
        at = at + move
        here = errors(at)
        if np.abs(move).max() < 0.003:
            break
    return constants(at)


def sources(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.source for row in rows))


def held_out(rows: Sequence[Row], start: dict[str, float]) -> dict[str, dict[str, float]]:
    """Constants fitted without each source."""
    return {name: fit([row for row in rows if row.source != name], start, rounds=8) for name in sources(rows)}


def median_error(ratios: Iterable[float]) -> float:
    return statistics.median(abs(value - 1) for value in ratios)


def inside(ratios: Sequence[float], spread: float) -> float:
    """Share of predictions whose printed range of speeds holds the published one."""
    return sum(1 - spread <= 1 / value <= 1 + spread for value in ratios) / len(ratios)


def one_utilization(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Baseline, held out: the median MFU of all other sources on the same family of GPUs."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        others = [r.utilization for r in rows if r.source != row.source and r.gpu.family == row.gpu.family]
        found[row.source].append(statistics.median(others) / row.utilization)
    return found


def configuration(row: Row) -> tuple[object, ...]:
    """Everything that one measured step is said to calibrate: source, GPU, model, row length and dtype."""
    return row.source, row.gpu.name, row.shape, row.work.length, row.work.compute


def anchored(rows: Sequence[Row], constants_of: Callable[[Row], dict[str, float]]) -> list[float]:
    """Predicted over published speed of each run, calibrated by each other one of its configuration."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[configuration(row)].append(row)
    ratios = {id(row): ratio(row, constants_of(row)) for row in rows}
    return [
        ratios[id(row)] / ratios[id(anchor)]
        for group in groups.values()
        for anchor in group
        for row in group
        if row is not anchor
    ]


def right_orders(rows: Sequence[Row], constants_of: Callable[[Row], dict[str, float]]) -> tuple[int, int]:
    """(right, all) pairs of runs of one source, GPU, model and length whose speeds differ by more than 5 %."""
    right = total = 0
    predictions = [ratio(row, constants_of(row)) * row.speed for row in rows]
    for i, one in enumerate(rows):
        for j, other in enumerate(rows[:i]):
            if configuration(one)[:4] == configuration(other)[:4] and abs(math.log(one.speed / other.speed)) > 0.05:
                total += 1
                right += (predictions[i] > predictions[j]) == (one.speed > other.speed)
    return right, total


SCALED = {
    ("llm-foundry", "H100"): (128, (2048, 2560, 4096, 5120, 7168, 8192)),
    ("llm-foundry", "A100-40"): (16, (768, 1024, 1536, 2048, 2560, 4096)),
    ("torchtitan", "H100-500W"): (8, (4096,)),
    ("trainy", "H200"): (32, (4096,)),
}
"""Least number of GPUs, and hidden sizes, of the tables that vary the number of GPUs only."""


def scale_out(rows: Sequence[Row]) -> list[float]:
    """Predicted over published ratio of the speeds on more and on the least GPUs; computation is solved from the latter."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        least, widths = SCALED.get((row.source, row.gpu.name), (0, ()))
        is_outlier = row.speed == 15555  # 18 % below the same runs on half and on twice as many GPUs
        if (
            row.shape.hidden in widths
            and row.layout.processes >= least
            and row.work.length in (2048, 8192)
            and not is_outlier
        ):
            groups[(*configuration(row), row.work.compiled)].append(row)
    found = []
    for group in groups.values():
        first, *more = sorted(group, key=lambda row: row.layout.processes)
        if first.source == "llm-foundry" and first.shape.hidden != 2560:  # 3b on 16 GPUs has 5 rows instead of 6
            same = [row for row in group if row.work.rows == max(r.work.rows for r in group)]
            first, *more = sorted(same, key=lambda row: row.layout.processes)
        solved = _with_computation_of(first)
        found += [ratio(row, solved) / ratio(first, solved) for row in more]
    return found


def _with_computation_of(row: Row) -> dict[str, float]:
    """Constants with all efficiencies scaled by one factor, so that this run's predicted speed is the published one."""
    low, high = 0.3, 3.0
    for _ in range(40):
        factor = math.sqrt(low * high)
        scaled = {k: v * factor if k.startswith(("products", "attention", "traffic")) else v for k, v in FITTED.items()}
        low, high = (low, factor) if ratio(row, scaled) > 1 else (factor, high)
    return scaled


def memory_ratios() -> list[tuple[dict[str, str], float, str | None]]:
    """(facts, closed form over published peak memory, reason why it is no test or None) of each run that publishes memory."""
    found = []
    for facts in read_published():
        if not facts["peak_memory_gib"] or facts["checkpointing"] not in CHECKPOINTING:
            continue
        row = row_of(facts)
        peak = peak_memory(
            row.shape,
            row.layout,
            row.work.tokens,
            CHECKPOINTING[facts["checkpointing"]],
            accumulates=row.work.accumulation > 1,
            compiled=row.work.compiled,
            logit_bytes=LOGIT_BYTES[facts["loss_head"]],
            separate_weights=facts["strategy"].startswith("zero"),
            all_bf16=facts["precision"] == "bf16-pure",
        )
        factor = RESERVED[row.work.compiled] if facts["memory_kind"] == "reserved" else 1.0
        reason = "contradicts the other rows of its table" if "contradicts" in facts["note"] else None
        reason = reason or ("an offload's buffers are not modelled" if "offload" in facts["strategy"] else None)
        reason = reason or ("fp8 copies of weights are not modelled" if row.work.compute == "fp8" else None)
        found.append((facts, peak.total * factor / 2**30 / float(facts["peak_memory_gib"]), reason))
    return found


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


@dataclass(frozen=True)
class Figure:
    """One line of the table of accuracy."""

    name: str
    value: str
    goal: str
    is_met: bool | None


def error_figure(name: str, value: float, goal: float | None = None) -> Figure:
    """Figure that is better when it is smaller."""
    return Figure(name, percent(value), "" if goal is None else percent(goal), None if goal is None else value <= goal)


def figures(rows: Sequence[Row], constants: dict[str, float], without: dict[str, dict[str, float]]) -> list[Figure]:
    """All figures of accuracy, next to their goals."""
    blind = {name: [ratio(row, without[name]) for row in rows if row.source == name] for name in without}
    every = [value for values in blind.values() for value in values]
    with_anchor = anchored(rows, lambda row: without[row.source])
    right, pairs = right_orders(rows, lambda row: without[row.source])
    scaling = scale_out(rows)
    memory = [value for _, value, reason in memory_ratios() if reason is None]
    shares = {
        f"rows inside the printed range (+-{SPREAD:.0%})": inside(every, SPREAD),
        "the same, every source with the same weight": statistics.mean(inside(v, SPREAD) for v in blind.values()),
        f"pairs inside the calibrated range (+-{CALIBRATED_SPREAD:.0%})": inside(with_anchor, CALIBRATED_SPREAD),
    }
    over_sources = [statistics.median(map(median_error, of.values())) for of in (blind, one_utilization(rows))]
    return [
        error_figure("speed, fitted on all rows: median error", median_error(ratio(r, constants) for r in rows)),
        error_figure("speed, held out: median over sources of their median errors", over_sources[0], 0.10),
        error_figure("the same of the baseline, one MFU per family of GPUs", over_sources[1]),
        error_figure("speed, held out: median error of all rows", median_error(every)),
        *(Figure(name, percent(value), "80 %", value >= 0.8) for name, value in shares.items()),
        error_figure(
            f"after one measured step: median error ({len(with_anchor)} pairs)", median_error(with_anchor), 0.05
        ),
        Figure(
            "order of two runs of one model that differ by more than 5 %",
            f"{right} of {pairs} right",
            "80 %",
            right >= 0.8 * pairs,
        ),
        error_figure(
            f"scale-out: RMS error of {len(scaling)} ratios",
            math.sqrt(statistics.mean((v - 1) ** 2 for v in scaling)),
            0.02,
        ),
        error_figure("scale-out: worst error", max(abs(value - 1) for value in scaling), 0.04),
        error_figure(f"memory, closed form: median error of {len(memory)} rows", median_error(memory), 0.05),
        error_figure("memory, closed form: worst error", max(abs(value - 1) for value in memory), 0.20),
    ]


def page(rows: Sequence[Row], constants: dict[str, float], without: dict[str, dict[str, float]]) -> str:
    """Generated part of docs/planning.md."""
    from acc_lm.studies.tables import machine_line

    lines = ["`python -m benchmarks.planning docs/planning.md`; no GPU takes part.", "", machine_line(), ""]
    lines += ["| accuracy | found | goal | |", "|---|---|---|---|"]
    for figure in figures(rows, constants, without):
        met = "" if figure.is_met is None else "met" if figure.is_met else "**missed**"
        lines.append(f"| {figure.name} | {figure.value} | {figure.goal} | {met} |")
    lines += [
        "",
        "| source | rows | median error, held out | bias | worst | published in |",
        "|---|---|---|---|---|---|",
    ]
    for name in sources(rows):
        own = [row for row in rows if row.source == name]
        values = [ratio(row, without[name]) for row in own]
        where = "; ".join(dict.fromkeys(row.facts["where"].split(": ")[0].split(" table ")[0] for row in own))
        worst = max(values, key=lambda value: abs(value - 1)) - 1
        lines.append(
            f"| {name} | {len(own)} | {percent(median_error(values))} | {100 * (statistics.median(values) - 1):+.1f} % "
            f"| {100 * worst:+.1f} % | {where} |"
        )
    reasons: dict[tuple[str, str], int] = defaultdict(int)
    for facts in read_published():
        reason = left_out(facts)
        if reason:
            reasons[facts["source"], f"speed: {reason}"] += 1
    for facts, _, reason in memory_ratios():
        if reason:
            reasons[facts["source"], f"memory: {reason}"] += 1
    lines += ["", "| left out | rows | reason |", "|---|---|---|"]
    lines += [f"| {name} | {count} | {reason} |" for (name, reason), count in reasons.items()]
    lines += ["", "| constant | fitted |", "|---|---|"]
    lines += [f"| {name} | {value:.3g} |" for name, value in constants.items()]
    return "\n".join(lines)


def write_constants(constants: dict[str, float]) -> None:
    lines = [
        '"""Efficiencies of the speed model, fitted on published figures; written by `python -m benchmarks.planning`."""',
        "",
        "from __future__ import annotations",
        "",
        f'FITTED_ON = "{datetime.now(UTC):%Y-%m-%d}"',
        '"""Date of the fit."""',
        "FITTED = {",
        *(f'    "{name}": {value:.4g},' for name, value in constants.items()),
        "}",
        '"""Constants by name; `acc_lm.planning.speed` says what each is."""',
    ]
    CONSTANTS.write_text("\n".join(lines) + "\n")


def main(file: Path | None) -> None:
    from acc_lm.studies.tables import replace_block
    from benchmarks.whole_runs import recipes_page

    rows = speed_rows()
    constants = fit(rows)
    without = held_out(rows, constants)
    if file:
        write_constants(constants)
        FITTED.update(constants)
        replace_block(file, "planning", page(rows, constants, without))
        replace_block(file, "whole runs", recipes_page())
    print(page(rows, constants, without))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
