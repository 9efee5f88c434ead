"""Speed-ups and bytes that `acc-lm plan`'s model predicts for the launches of a scaling study.

    GPUs           all of `planning.speed`, relative to the smallest number of processes
    CPU processes  seconds = measured computation, shared by cores + bytes that the plan says are sent / speed of the link

The plan knows no CPU, so two measured steps take the place of its facts: the smallest launch gives the computation, and the
first larger one of strong scaling the speed of the link, in which everything else that processes cost is contained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.config.project import find_accelerate_config
from acc_lm.errors import UserError
from acc_lm.studies.launching import num_accelerators

if TYPE_CHECKING:
    from acc_lm.config import Config
    from acc_lm.planning.hardware import Gpu
    from acc_lm.planning.shapes import Shape
    from acc_lm.runtime import Placement
    from acc_lm.studies.scaling import ScalingRow


@dataclass(frozen=True)
class PlannedRow:
    """Prediction for one launch."""

    speed_up: float
    low: float
    """Bounds of the speed-up; equal to it where no range is known."""
    high: float
    bytes_sent: float
    """Bytes that each process sends in rings in a step."""
    extrapolated: str = ""
    """Reason why no published run supports it; empty: none, or it rests on measurements here."""


def add_plan(rows: Sequence[ScalingRow], config: Config, file: Path) -> tuple[list[ScalingRow], str]:
    """Rows with what the plan predicts for each, and a line about the curve: its calibration, or why there is none.

    Args:
        file: Accelerate config of more than one process.
    """
    from acc_lm.planning.hardware import gpus_here
    from acc_lm.planning.plan import shape_of
    from acc_lm.planning.probe import Probe, vocabulary_of

    try:
        gpu = gpus_here()[1] if num_accelerators() else None
        shape = shape_of(Probe(config, vocabulary_of(config)))
        if shape is None:
            return list(rows), "no curve of the plan: speed of this kind of model or adapter is not modelled"
        ran = [row for row in rows if row.problem is None]
        planned = _on_gpus(ran, config, file, shape, gpu) if gpu else _on_cores(ran, config, file, shape)
    except UserError as error:
        return list(rows), f"no curve of the plan: {error}"
    found = [replace(row, planned=planned.get((row.kind, row.num_processes))) for row in rows]
    return found, _about(ran, gpu)


def _about(rows: Sequence[ScalingRow], gpu: Gpu | None) -> str:
    first = rows[0].num_processes
    if gpu is not None:
        return f"plan for {gpu.name}, as multiples of its speed on {first} x"
    link = _link_of(rows)
    text = f"plan of CPU processes: computation measured on {first} x"
    return f"{text}, link on {link.num_processes} x (strong)" if link else f"{text}, communication taken as free"


def _on_gpus(
    rows: Sequence[ScalingRow], config: Config, file: Path, shape: Shape, gpu: Gpu
) -> dict[tuple[str, int], PlannedRow]:
    from acc_lm.planning.plan import layout_of, work_of
    from acc_lm.planning.probe import SWITCH
    from acc_lm.planning.speed import step_time
    from acc_lm.runtime import split_global_batch

    checkpointing = next(name for name, value in SWITCH.items() if value == config.model.gradient_checkpointing)
    first, planned = 0.0, {}
    for row in rows:
        own = _with_batch(config, row.global_batch_size)
        placement = _placement(own, file, row.num_processes)
        size, accumulation = split_global_batch(own.training, row.num_processes, placement.processes_of_reader)
        work = work_of(own, placement, size, accumulation, checkpointing, compiled=False)
        # The measured first step scales all predictions alike, so it narrows the range and changes no speed-up.
        time = step_time(shape, gpu, layout_of(placement), work, calibration=1.0)
        speed = time.tokens_per_second
        first = first or row.num_processes * speed.middle
        middle, low, high = (row.num_processes * rate / first for rate in (speed.middle, speed.low, speed.high))
        planned[row.kind, row.num_processes] = PlannedRow(middle, low, high, time.bytes_sent, time.extrapolated)
    return planned


def _on_cores(
    rows: Sequence[ScalingRow], config: Config, file: Path, shape: Shape
) -> dict[tuple[str, int], PlannedRow]:
    sent = {row.num_processes: _bytes_sent(config, file, shape, row.num_processes) for row in rows}
    link, first = _link_of(rows), rows[0]
    per_byte = 0.0
    if link is not None:
        extra = link.step_seconds - _computation(link, first)
        per_byte = extra / sent[link.num_processes]
    planned = {}
    for row in rows:
        seconds = _computation(row, first) + per_byte * sent[row.num_processes]
        speed_up = row.global_batch_size / first.global_batch_size * first.step_seconds / seconds
        planned[row.kind, row.num_processes] = PlannedRow(speed_up, speed_up, speed_up, sent[row.num_processes])
    return planned


def _link_of(rows: Sequence[ScalingRow]) -> ScalingRow | None:
    """Launch that the speed of a link is taken from: the first that costs more than its computation."""
    first = rows[0]
    if first.num_processes > 1:
        return None  # its own communication is in what counts as computation
    return next(
        (
            row
            for row in rows
            if row.kind == first.kind and row.num_processes > 1 and row.step_seconds > _computation(row, first)
        ),
        None,
    )


def _computation(row: ScalingRow, first: ScalingRow) -> float:
    """Seconds of computation of a step, from the first launch: by rows of a process, and by processes that share a core."""
    cores = os.cpu_count() or 1
    rows_each = row.global_batch_size / row.num_processes / (first.global_batch_size / first.num_processes)
    return first.step_seconds * rows_each * max(1, row.num_processes / cores) / max(1, first.num_processes / cores)


def _bytes_sent(config: Config, file: Path, shape: Shape, num_processes: int) -> float:
    """Bytes that each process sends in a step."""
    from acc_lm.planning.plan import bytes_sent
    from acc_lm.runtime import split_global_batch

    placement = _placement(config, file, num_processes)
    size, accumulation = split_global_batch(config.training, num_processes, placement.processes_of_reader)
    return bytes_sent(config, shape, placement, size, accumulation)


def _placement(config: Config, file: Path, num_processes: int) -> Placement:
    from acc_lm.runtime import placement_of

    return placement_of(
        file if num_processes > 1 else find_accelerate_config("single_gpu"), num_processes, None, config
    )


def _with_batch(config: Config, global_batch_size: int) -> Config:
    training = config.training.model_copy(update={"global_batch_size": global_batch_size})
    return config.model_copy(update={"training": training})
