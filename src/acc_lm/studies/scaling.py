"""`acc-lm scaling`: one recipe on increasing numbers of processes, by real launches: time, bytes sent, equal losses."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from acc_lm.config import nearest_multiples
from acc_lm.config.loading import load_config
from acc_lm.config.project import find_accelerate_config, training_script
from acc_lm.errors import ConfigError
from acc_lm.run_files.differences import largest_differences, read_metrics, tolerance_of
from acc_lm.run_files.names import ENVIRONMENT, SUMMARY
from acc_lm.studies.launching import (
    LAUNCH_SECONDS,
    check_num_processes,
    launch,
    num_accelerators,
    shared_cores,
)
from acc_lm.studies.parity import Case, short_run
from acc_lm.studies.scaling_plan import PlannedRow, add_plan
from acc_lm.studies.tables import machine_line, replace_block

LOGS, LOGS_LEFT_OUT, LEAST_STEPS = 10, 3, 6
"""Planned number of logs of a launch, number of first logs left out as start-up, and smallest number of steps."""
STRONG, WEAK = "strong", "weak"


@dataclass(frozen=True)
class ScalingRow:
    """Measurements of one number of processes, compared with the smallest number."""

    kind: str
    num_processes: int
    global_batch_size: int
    strategy: str = ""
    step_seconds: float = 0.0
    """Seconds of one step, median over the logs after start-up."""
    tokens_per_second: float = 0.0
    speed_up: float = 0.0
    """Ratio of `tokens_per_second` to that of the smallest number of processes."""
    efficiency: float = 0.0
    """Share of the ideal speed-up, which is the ratio of the numbers of processes."""
    serial_share: float | None = None
    """Karp-Flatt metric: share of the work that did not get faster; None for weak scaling and the smallest number."""
    collectives: dict[str, dict[str, float]] | None = None
    """Communication of one process in one step, by kind of collective: calls, bytes, ring_bytes."""
    tcp_bytes: int | None = None
    """Bytes received over TCP in that step, by the system's count; None where it is not counted."""
    backend: str | None = None
    peak_memory_gb: float = 0.0
    num_parameters: int = 0
    largest_difference: dict[str, float] | None = None
    """Largest relative difference from the smallest number of processes over the steps, by metric; None: weak scaling."""
    same_rows: bool | None = None
    problem: str | None = None
    planned: PlannedRow | None = None
    """Prediction of the plan; None: there is none."""

    @property
    def num_bytes(self) -> float:
        return sum(entry["bytes"] for entry in (self.collectives or {}).values())

    @property
    def ring_bytes(self) -> float:
        return sum(entry["ring_bytes"] for entry in (self.collectives or {}).values())

    def is_the_same(self, tolerance: dict[str, float]) -> bool:
        return (
            self.problem is None
            and self.same_rows is not False
            and all(d <= tolerance[name] for name, d in (self.largest_difference or {}).items())
        )


def read_counts(text: str, key: str = "--processes") -> list[int]:
    """`1,2,4` -> distinct numbers of processes, ascending.

    Raises:
        ConfigError: the text has another form.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{key} must be numbers of processes such as 1,2,4, got {text!r}; write them like these")
    return sorted({int(word) for word in words})


def scaling(
    recipe: Path, overrides: Sequence[str], config_file: Path | None, counts: Sequence[int], steps: int, output: Path
) -> int:
    """Launch, measure, compare, and write the table, its JSON and its picture.

    Returns 0 when every launch ran and strong scaling kept the rows and, within the tolerance, the losses; else 1.

    Args:
        config_file: Accelerate config for more than one process; None: ddp.yaml.
        output: Markdown file; scaling.json and scaling.png are written next to it.
    """
    config = load_config(recipe, overrides)
    file = config_file or find_accelerate_config("ddp")
    check_num_processes(counts[-1], "--processes")
    plan = _plan(config.training.global_batch_size, counts)
    for count, global_batch_size in dict.fromkeys((count, size) for _, count, size in plan):
        _check_split(recipe, overrides, count, global_batch_size)
    tolerance = tolerance_of(config)
    notes, load = shared_cores(counts), os.getloadavg()[0]
    settings = [*overrides, *short_run(config, steps), *_logged(steps)]
    launches = list(dict.fromkeys((count, size) for _, count, size in plan))
    print(f"{recipe}: {steps} steps, {len(launches)} launches; load average before {load:.2f}", flush=True)
    for note in notes:
        print(note)
    measured: dict[tuple[int, int], dict[str, Any]] = {}
    rows: list[ScalingRow] = []
    with tempfile.TemporaryDirectory(prefix="acc-lm-scaling-") as folder:
        for kind, count, size in plan:
            if (count, size) not in measured:
                print(f"launching {count} x, global batch {size} ...", flush=True)
                case = Case(file if count > 1 else None, count)
                measured[count, size] = _measure(case, recipe, settings, size, steps, Path(folder))
                problem = measured[count, size].get("problem")
                if problem and len(measured) == 1:
                    raise ConfigError(
                        f"the smallest launch must run, got: {problem}; it is what the others are compared with"
                    )
            row = _row(kind, count, size, measured[count, size], measured[plan[0][1:]], counts[0])
            rows.append(row)
            print(_line(row), flush=True)
    for doubt in doubts(rows, counts[0], load):
        notes.append(doubt)
        print(f"warning: {doubt}")
    same = all(row.is_the_same(tolerance) for row in rows)
    print(f"strong scaling: {_verdict(rows) if same else 'NOT the same losses, see above'}")
    rows, curve = add_plan(rows, config, file)
    print(curve)
    about = {
        "command": _command(recipe, config_file, counts, steps, overrides),
        "load_average_before": load,
        "steps": steps,
        "tolerance": tolerance,
        "notes": notes,
        "plan": curve,
    }
    _write(output, rows, about)
    print(f"written: {output}, scaling.json, scaling.png")
    return 0 if same else 1


def _verdict(rows: Sequence[ScalingRow]) -> str:
    """Largest difference of the losses of strong scaling."""
    apart = [
        max((row.largest_difference or {"": 0.0}).values()) for row in rows if row.kind == STRONG and not row.problem
    ]
    return f"the same losses to {max(apart):.1e}"


def _write(output: Path, rows: list[ScalingRow], about: dict[str, Any]) -> None:
    """Write table, JSON and picture."""
    values = {
        **about,
        "made": machine_line(),
        "cores": os.cpu_count(),
        "accelerators": num_accelerators(),
        "rows": [asdict(row) for row in rows],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name("scaling.json").write_text(json.dumps(values, indent=1) + "\n")
    draw_scaling(rows, values, output.with_name("scaling.png"))
    replace_block(output, "scaling", "\n".join(_page(rows, values)))


def _plan(global_batch_size: int, counts: Sequence[int]) -> list[tuple[str, int, int]]:
    """(kind, number of processes, global batch) of each row; both kinds begin with the same launch."""
    smallest = counts[0]
    for count in counts:
        if global_batch_size % count:
            raise ConfigError(
                f"training.global_batch_size must be a multiple of each of --processes, got {global_batch_size} for {count}; "
                f"nearest: {nearest_multiples(global_batch_size, count)}"
            )
    return [
        *((STRONG, count, global_batch_size) for count in counts),
        *((WEAK, count, global_batch_size // smallest * count) for count in counts),
    ]


def _check_split(recipe: Path, overrides: Sequence[str], count: int, global_batch_size: int) -> None:
    from acc_lm.runtime import split_global_batch

    config = load_config(recipe, [*overrides, f"training.global_batch_size={global_batch_size}"])
    split_global_batch(config.training, count)


def _logged(steps: int) -> list[str]:
    return [f"training.log_every={_log_every(steps)}", f"training.eval_every={steps}", "training.eval_batches=1"]


def _log_every(steps: int) -> int:
    return max(1, steps // LOGS)


def _measure(
    case: Case, recipe: Path, settings: Sequence[str], global_batch_size: int, steps: int, folder: Path
) -> dict[str, Any]:
    output_dir = folder / f"run-{case.num_processes}-{global_batch_size}"
    program = [
        str(training_script()),
        "--config",
        str(recipe),
        *settings,
        f"training.global_batch_size={global_batch_size}",
        f"output_dir={output_dir}",
    ]
    # Count a step that is neither start-up nor logged, if there are enough steps.
    counted = {"ACC_LM_COUNT_TRAFFIC": f"{folder}@{_log_every(steps) + 1}"}
    problem = launch(
        program,
        case.file,
        case.num_processes,
        folder / "output",
        LAUNCH_SECONDS,
        num_machines=case.num_machines,
        environment=counted,
    )
    if problem is not None:
        return {"problem": problem}
    metrics = read_metrics(output_dir)
    summary = json.loads((output_dir / SUMMARY).read_text())
    environment = json.loads((output_dir / ENVIRONMENT).read_text())
    if environment["num_processes"] != case.num_processes:
        return {"problem": f"{environment['num_processes']} processes ran instead of {case.num_processes}"}
    traffic = json.loads((folder / "traffic-0.json").read_text())
    shutil.rmtree(output_dir)
    return {
        "metrics": metrics,
        "summary": summary,
        "strategy": environment["strategy"],
        "num_parameters": environment["num_parameters"],
        "traffic": traffic,
    }


def seconds_of_steps(metrics: dict[int, dict[str, float]]) -> tuple[float, float]:
    """(seconds of a step, tokens per second) of a run from its own log: medians without the first logs (start-up)."""
    logs = [(step, entry) for step, entry in sorted(metrics.items()) if "train/tokens_per_second" in entry]
    pairs = list(zip(logs[LOGS_LEFT_OUT - 1 :], logs[LOGS_LEFT_OUT:], strict=False))
    rates = [entry["train/tokens_per_second"] for _, (_, entry) in pairs]
    seconds = [
        (entry["train/tokens"] - before["train/tokens"]) / entry["train/tokens_per_second"] / (step - first)
        for (first, before), (step, entry) in pairs
    ]
    return statistics.median(seconds), statistics.median(rates)


def serial_share(speed_up: float, times: float) -> float | None:
    """Share of the work that does not get faster with `times` as many processes; None for `times` = 1.

    If it is constant from row to row, it is work that is not divided. If it grows, it is the cost of more processes:
    communication, or shared cores.

    Source: Karp and Flatt, "Measuring parallel processor performance", 1990.
    """
    return (1 / speed_up - 1 / times) / (1 - 1 / times) if times > 1 else None


def doubts(rows: Sequence[ScalingRow], smallest: int, load: float) -> list[str]:
    """Reasons to distrust the times of CPU processes: on a shared machine, more processes get a larger share."""
    cores = os.cpu_count() or 1
    if num_accelerators():
        return []
    found = []
    if load > cores / 2:
        found.append(
            f"other programs used the {cores} cores before the first launch (load average {load:.2f}), which affects the times"
        )
    for row in rows:
        possible = min(row.num_processes, cores) / min(smallest, cores)
        if row.speed_up > 1.05 * possible:
            found.append(
                f"{row.kind} scaling to {row.num_processes} processes was {row.speed_up:.2f} times as fast, and {cores} cores allow "
                f"{possible:g}: other programs used them meanwhile, so the speed-ups are void"
            )
    return found


def _row(kind: str, count: int, size: int, here: dict[str, Any], first: dict[str, Any], smallest: int) -> ScalingRow:
    if "problem" in here:
        return ScalingRow(kind, count, size, problem=here["problem"])
    seconds, rate = seconds_of_steps(here["metrics"])
    speed_up, times = rate / seconds_of_steps(first["metrics"])[1], count / smallest
    is_strong = kind == STRONG
    return ScalingRow(
        kind,
        count,
        size,
        here["strategy"],
        seconds,
        rate,
        speed_up,
        speed_up / times,
        serial_share(speed_up, times) if is_strong else None,
        here["traffic"]["collectives"],
        here["traffic"]["tcp_bytes"],
        here["traffic"]["backend"],
        max(here["summary"]["peak_memory_gb"]),
        here["num_parameters"],
        largest_differences(first["metrics"], here["metrics"]) if is_strong else None,
        here["summary"]["ledger"] == first["summary"]["ledger"] if is_strong else None,
    )


# --- output --------------------------------------------------------------------------------------------------------


def _command(
    recipe: Path, config_file: Path | None, counts: Sequence[int], steps: int, overrides: Sequence[str]
) -> str:
    words = ["acc-lm scaling", "--config", str(recipe), *(["--config_file", str(config_file)] if config_file else [])]
    return " ".join([*words, "--processes", ",".join(map(str, counts)), "--steps", str(steps), *overrides])


def _line(row: ScalingRow) -> str:
    if row.problem is not None:
        return f"{row.kind:7} {row.num_processes:3} x  {row.problem}"
    loss = "" if row.largest_difference is None else f"  loss apart {row.largest_difference['train/loss']:.1e}"
    rows = "  OTHER ROWS" if row.same_rows is False else ""
    return (
        f"{row.kind:7} {row.num_processes:3} x  {1000 * row.step_seconds:8.1f} ms  {row.tokens_per_second:10,.0f} tokens/s  "
        f"speed-up {row.speed_up:5.2f}  efficiency {row.efficiency:4.0%}  {row.num_bytes / 1e6:8.2f} MB a step{loss}{rows}"
    )


def _page(rows: Sequence[ScalingRow], values: dict[str, Any]) -> list[str]:
    lines = [
        f"`{values['command']}`",
        "",
        f"{values['made']}; load average before: {values['load_average_before']:.2f}.",
        "",
        "![Speed-up over the number of processes](scaling.png)",
    ]
    for kind, title in ((STRONG, "the global batch stays the same"), (WEAK, "the rows of each process stay the same")):
        last = " serial share | loss difference |" if kind == STRONG else ""
        lines += ["", f"{kind.capitalize()} scaling: {title}.", ""]
        lines.append(
            "| processes | strategy | global batch | step | tokens/s | speed-up | by the plan | efficiency |"
            f"{last} memory per process |"
        )
        lines.append("|" + "---|" * (9 + 2 * (kind == STRONG)))
        for row in (row for row in rows if row.kind == kind):
            if row.problem is not None:
                lines.append(f"| {row.num_processes} | {row.problem} |")
                continue
            share = "-" if row.serial_share is None else f"{row.serial_share:.2f}"
            last = f" {share} | {(row.largest_difference or {})['train/loss']:.1e} |" if kind == STRONG else ""
            lines.append(
                f"| {row.num_processes} | {row.strategy} | {row.global_batch_size} | {1000 * row.step_seconds:.1f} ms | "
                f"{row.tokens_per_second:,.0f} | {row.speed_up:.2f} | {_planned_speed_up(row)} | {row.efficiency:.0%} |{last} {row.peak_memory_gb:.2f} GB |"
            )
    lines += ["", "Communication of one process in one step, counted:", ""]
    lines.append(
        "| processes | strategy | collectives | MB passed to collectives | MB sent in a ring, by formula | the same, by the plan "
        "| MB received over TCP |"
    )
    lines.append("|---|---|---|---|---|---|---|")
    for row in (row for row in rows if row.kind == STRONG and row.problem is None):
        calls = ", ".join(f"{entry['calls']:.0f} {name}" for name, entry in (row.collectives or {}).items()) or "none"
        tcp = "-" if row.tcp_bytes is None else f"{row.tcp_bytes / 1e6:.3f}"
        planned = "-" if row.planned is None else f"{row.planned.bytes_sent / 1e6:.3f}"
        lines.append(
            f"| {row.num_processes} | {row.strategy} | {calls} | {row.num_bytes / 1e6:.3f} | {row.ring_bytes / 1e6:.3f} | {planned} "
            f"| {tcp} |"
        )
    return [*lines, *(f"\n{note}." for note in [values["plan"], *values["notes"]])]


def _planned_speed_up(row: ScalingRow) -> str:
    if row.planned is None:
        return "-"
    return f"{row.planned.speed_up:.2f}" + (" (extrapolated)" if row.planned.extrapolated else "")


def draw_scaling(rows: Sequence[ScalingRow], values: dict[str, Any], file: Path) -> None:
    """Draw two panels, strong and weak: measured, planned and ideal speed-up, and on a CPU the one that its cores allow."""
    os.environ["MPLBACKEND"] = "Agg"  # that of a notebook may be unknown to a run that it starts in another environment
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.13, top=0.82, wspace=0.2)
    figure.suptitle(f"{values['command']}\n{values['made']}", fontsize=7, parse_math=False)
    for axes, kind in zip(panels, (STRONG, WEAK), strict=True):
        found = [row for row in rows if row.kind == kind and row.problem is None]
        counts = [row.num_processes for row in found]
        axes.plot(counts, [count / counts[0] for count in counts], color="tab:gray", linestyle="--", label="ideal")
        if not values["accelerators"] and values["cores"] < counts[-1]:
            limit = [min(count, values["cores"]) / min(counts[0], values["cores"]) for count in counts]
            axes.plot(counts, limit, color="tab:gray", linestyle=":", label=f"ideal on {values['cores']} cores")
        _draw_plan(axes, [row for row in found if row.planned is not None], values["plan"])
        axes.plot(counts, [row.speed_up for row in found], color="tab:blue", marker="o", label="measured")
        for row in found:
            axes.annotate(
                f"{row.efficiency:.0%}", (row.num_processes, row.speed_up), (4, -11), textcoords="offset points"
            )
        axes.set(title=f"{kind.capitalize()} scaling", xlabel="processes", xticks=counts, ylim=(0, None))
        axes.set_ylabel(f"tokens per second, as multiples of {counts[0]} x")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", fontsize=8)
    temporary = file.with_name(f".{file.name}")
    figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
    os.replace(temporary, file)


def _draw_plan(axes: Any, rows: Sequence[ScalingRow], label: str) -> None:
    """Draw the plan's curve with its range; dashed from the last number of processes that published runs support."""
    planned = [(row.num_processes, row.planned) for row in rows if row.planned is not None]
    if len(planned) < 2:
        return
    counts = [count for count, _ in planned]
    known = next((number for number, (_, each) in enumerate(planned) if each.extrapolated), len(planned))
    speed_ups = [each.speed_up for _, each in planned]
    axes.fill_between(
        counts, [each.low for _, each in planned], [each.high for _, each in planned], color="tab:orange", alpha=0.15
    )
    if known:
        axes.plot(counts[:known], speed_ups[:known], color="tab:orange", label=label.replace(": ", ":\n", 1))
    if known < len(planned):
        begin = max(0, known - 1)
        text = f"{label}, extrapolated" if not known else "the same, extrapolated"
        axes.plot(counts[begin:], speed_ups[begin:], color="tab:orange", linestyle="--", label=text)
