"""`acc-lm plan --measure`: the dry run of a plan, by a real launch, and its cost next to the predicted one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc_lm.config.project import training_script
from acc_lm.errors import ConfigError, MachineError
from acc_lm.planning.calibration import keep_ratio, known_ratio
from acc_lm.planning.memory import memory_of
from acc_lm.planning.plan import Candidate, bytes_sent, compute_dtype, shape_of
from acc_lm.planning.probe import SWITCH, Probe, vocabulary_of
from acc_lm.runtime import MEASURED_FILE, launch_words, placement_of, split_global_batch
from acc_lm.studies.launching import LAUNCH_SECONDS, launch
from acc_lm.studies.parity import Case

if TYPE_CHECKING:
    from acc_lm.config import Config
    from acc_lm.planning.hardware import Gpu

WITHIN = 0.10
"""Relative error of memory, traffic and FLOP up to which a prediction holds."""


@dataclass(frozen=True)
class Compared:
    """A predicted quantity and its measurement."""

    name: str
    unit: str
    predicted: float | None
    """None: not modelled."""
    measured: float | None
    """None: not measured."""
    is_exact: bool = True
    """False: the prediction is an estimate, whose error is no defect."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where one of the two is missing."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted / self.measured - 1 if self.measured else float(self.predicted > 0)

    @property
    def holds(self) -> bool:
        return not self.is_exact or self.error is None or abs(self.error) <= WITHIN


def rehearsed(config: Config, config_file: Path, num_processes: int | None) -> tuple[Probe, Candidate]:
    """The recipe as it stands, on CPU processes under an Accelerate config; its speed is not modelled."""
    probe = Probe(config, vocabulary_of(config), on_gpu=False)
    num_machines = Case(config_file, 1).num_machines
    placement = placement_of(config_file, num_processes, num_machines if num_machines > 1 else None, config)
    if num_processes not in (None, placement.num_processes):
        raise ConfigError(
            f"--processes must be {placement.num_processes} with {config_file}, which starts no more, got {num_processes}; leave it out, or name "
            "another --config"
        )
    micro, accumulation = split_global_batch(config.training, placement.num_processes, placement.processes_of_reader)
    checkpointing = next(name for name, value in SWITCH.items() if value == config.model.gradient_checkpointing)
    memory = memory_of(probe, placement, micro, accumulation, checkpointing)
    return probe, Candidate(placement, 0, micro, accumulation, checkpointing, False, memory, "yes", None)


def compare_with_dry_run(
    config: Config, recipe: Sequence[str], file: Path, probe: Probe, candidate: Candidate, gpu: Gpu | None
) -> list[Compared]:
    """Launch `train.py --dry-run` with this candidate and compare; keep the ratio of the seconds on a GPU.

    Args:
        recipe: words of the command line that name the recipe and its overrides.
        file: Accelerate config.
        gpu: the GPUs here; None: CPU processes.

    Raises:
        MachineError: the launch failed.
    """
    found = _launch(recipe, file, candidate)
    shape, placement = shape_of(probe), candidate.placement
    length = config.data.sequence_length
    own = _as_run(config, candidate)
    sent = bytes_sent(own, shape, placement, candidate.micro_batch_size, candidate.accumulation) if shape else None
    seconds = candidate.time.total if candidate.time else None
    if gpu is not None and shape is not None and seconds and placement.processes_of_reader == 1:
        compute = compute_dtype(config, placement)
        ratio = found["seconds"] / seconds * (known_ratio(gpu, shape, length, compute) or 1.0)
        facts = {name: found["identity"][name] for name in ("strategy", "num_processes", "device")}
        keep_ratio(gpu, shape, length, compute, ratio, **facts, **_settings(candidate), time=f"{datetime.now(UTC):%F}")
    flops = shape.flops_per_token(length) if shape else None
    tensors = candidate.memory.tensors
    if gpu is None:  # offloaded tensors are in the same memory
        tensors += candidate.memory.host / (placement.num_processes // placement.num_machines)
    return [
        Compared("tensors of a process", "MB", tensors / 1e6, _millions(found["tensor_bytes"])),
        Compared("sent by a process", "MB", None if sent is None else sent / 1e6, _millions(found["sent_bytes"])),
        Compared("computed for a token", "MFLOP", _millions(flops), _millions(found["flops_per_token"])),
        Compared("a step", "s", seconds, found["seconds"], is_exact=False),
    ]


def _as_run(config: Config, candidate: Candidate) -> Config:
    """The recipe with the candidate's checkpointing."""
    model = config.model.model_copy(update={"gradient_checkpointing": SWITCH[candidate.checkpointing]})
    return config.model_copy(update={"model": model})


def _millions(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _settings(candidate: Candidate) -> dict[str, Any]:
    return {
        "micro_batch_size": candidate.micro_batch_size,
        "accumulation": candidate.accumulation,
        "gradient_checkpointing": candidate.checkpointing,
        "compile": candidate.compiled,
    }


def _launch(recipe: Sequence[str], file: Path, candidate: Candidate) -> dict[str, Any]:
    """Measurements of a dry run."""
    placement, switch = candidate.placement, SWITCH[candidate.checkpointing]
    words = [
        f"training.micro_batch_size={candidate.micro_batch_size}",
        f"model.gradient_checkpointing={switch if isinstance(switch, str) else str(switch).lower()}",
    ]
    with tempfile.TemporaryDirectory(prefix="acc-lm-measure-") as folder:
        output = Path(folder) / "measured.json"
        problem = launch(
            [str(training_script()), *recipe, *words, "--dry-run"],
            file,
            placement.num_processes,
            Path(folder) / "output",
            LAUNCH_SECONDS,
            num_machines=Case(file, placement.num_processes).num_machines,
            environment={MEASURED_FILE: str(output)},
            options=launch_words(placement, compiled=candidate.compiled) if candidate.time else (),
        )
        if problem is not None:
            raise MachineError(
                f"the dry run must succeed to be measured, got: {problem}; run train.py --dry-run under this config"
            )
        found: dict[str, Any] = json.loads(output.read_text())
    return found


def table(compared: Sequence[Compared]) -> list[str]:
    """Lines for the terminal."""
    lines = [f"{'':24}{'predicted':>14}{'measured':>14}{'error':>9}"]
    for each in compared:
        predicted, measured = (_amount(value, each.unit) for value in (each.predicted, each.measured))
        error = "" if each.error is None else f"{round(100 * each.error, 1) + 0.0:+.1f} %"
        lines.append(f"{each.name:24}{predicted:>14}{measured:>14}{error:>9}{'' if each.holds else '  too far apart'}")
    return lines


def _amount(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.2f} {unit}"
