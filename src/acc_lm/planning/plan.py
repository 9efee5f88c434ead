"""A plan: every Accelerate config x micro-batch x checkpointing x compilation, what fits, and the one to take."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from acc_lm.config.project import find_accelerate_config
from acc_lm.errors import ConfigError, UserError
from acc_lm.planning.calibration import known_ratio
from acc_lm.planning.hardware import GIB, GPUS, Gpu
from acc_lm.planning.memory import MemoryEstimate, memory_of
from acc_lm.planning.probe import SWITCH, Checkpointing, Probe
from acc_lm.planning.shapes import RECOMPUTED, Layout, Shape, Work
from acc_lm.planning.speed import Range, StepTime, step_time
from acc_lm.runtime import (
    KEPT,
    NOT_PLANNED,
    WITH_LAYERS_IN_PARTS,
    WITH_ROWS_IN_PARTS,
    Placement,
    can_compile,
    configs_for,
    launch_words,
    placement_of,
)

if TYPE_CHECKING:
    from acc_lm.config import Config

MAX_POSITIONS = 2**17
"""Positions of a micro-batch beyond which a larger one is no faster."""
AS_FAST = 0.95
"""Share of the highest speed from which another candidate counts as equally fast: the model cannot tell them apart."""
ROOM = 0.85
"""Share of the memory that the recommended candidate uses at most, if another one is as fast."""
CAPABILITIES = {"bf16": (8, 0), "fp8": (8, 9)}
"""Compute capability of the first GPUs with this precision."""
COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}


@dataclass(frozen=True)
class Machine:
    """Hardware to plan for."""

    gpu: Gpu
    num_gpus: int
    network: float = 50e9
    """Bytes per second of each GPU's link to other machines."""
    host_memory: float = 1e12
    """Bytes of memory of a machine."""

    @property
    def num_machines(self) -> int:
        return max(1, math.ceil(self.num_gpus / self.gpu.per_machine))

    @property
    def memory(self) -> float:
        """Usable bytes of a GPU."""
        return self.gpu.memory_gib * GIB


@dataclass(frozen=True)
class Candidate:
    """One way to run a recipe."""

    placement: Placement
    order: int
    """Rank of its config, the simplest first."""
    micro_batch_size: int
    accumulation: int
    checkpointing: Checkpointing
    compiled: bool
    memory: MemoryEstimate
    fits: str
    """yes, tight, no, or host: the memory of the machine is too small."""
    time: StepTime | None
    """Predicted step; None for models whose speed is not modelled."""

    def hours_for(self, num_tokens: int | None) -> Range | None:
        """Duration of a run of this many tokens; None where either speed or tokens are not known."""
        if self.time is None or not num_tokens:
            return None
        n, speed = self.placement.num_processes, self.time.tokens_per_second
        return Range(*(num_tokens / (n * value) / 3600 for value in (speed.high, speed.middle, speed.low)))

    @property
    def tokens_per_second(self) -> float:
        """Most likely speed of all GPUs together; 0 if it is not known."""
        return self.time.tokens_per_second.middle * self.placement.num_processes if self.time else 0.0

    @property
    def runs(self) -> bool:
        return self.fits in ("yes", "tight")

    def most_energy(self, num_tokens: int | None, gpu: Gpu) -> float | None:
        """Energy of such a run in kWh: all GPUs at their power limit for the longest duration, and nothing else of a machine."""
        hours = self.hours_for(num_tokens)
        return None if hours is None else hours.high * self.placement.num_processes * gpu.watts / 1000

    def as_json(self, num_tokens: int | None, gpu: Gpu) -> dict[str, Any]:
        """The candidate as `acc-lm plan --json` prints it."""
        speed = self.time.tokens_per_second if self.time else None
        n, memory, hours = self.placement.num_processes, self.memory, self.hours_for(num_tokens)
        return {
            "config": self.placement.config,
            "rows_in_parts": self.placement.rows_in_parts,
            "layers_in_parts": self.placement.layers_in_parts,
            "micro_batch_size": self.micro_batch_size,
            "accumulation": self.accumulation,
            "gradient_checkpointing": self.checkpointing,
            "compile": self.compiled,
            "fits": self.fits,
            "memory_gib": {"tensors": memory.tensors / GIB, "low": memory.low / GIB, "high": memory.high / GIB},
            "host_memory_gib": memory.host / GIB,
            "tokens_per_second": {"low": n * speed.low, "middle": n * speed.middle, "high": n * speed.high}
            if speed
            else None,
            "mfu": self.time.utilization if self.time else None,
            "sent_gb_per_step": self.time.bytes_sent / 1e9 if self.time else None,
            "network_gb_per_step": self.time.network_bytes / 1e9 if self.time else None,
            "hours": hours and asdict(hours),
            "most_kwh": self.most_energy(num_tokens, gpu),
            "extrapolated": self.time.extrapolated if self.time else "",
        }


@dataclass(frozen=True)
class RunPlan:
    """All candidates of a recipe on some hardware."""

    candidates: list[Candidate]
    recommended: Candidate | None
    shape: Shape | None
    """Sizes that the speed was computed with; None for models whose speed is not modelled."""
    num_tokens: int | None
    """Tokens of the run; None: it ends by epochs, whose tokens are not known before."""
    micro_batch_size: int
    """Micro-batch of the recipe, which decides where speed is not modelled."""

    def best_of_each_config(self) -> list[Candidate]:
        """One candidate of each config: the recommended one, else the simplest of the fastest, else the smallest."""
        names = dict.fromkeys(each.placement.config for each in self.candidates)
        return [self._best([each for each in self.candidates if each.placement.config == name]) for name in names]

    def _best(self, candidates: list[Candidate]) -> Candidate:
        if self.recommended in candidates and self.recommended is not None:
            return self.recommended
        return _simplest_of_fastest(candidates, self.micro_batch_size) or min(
            candidates, key=lambda each: each.memory.tensors
        )


def make_plan(
    config: Config,
    probe: Probe,
    machine: Machine,
    micro_batch_size: int | None,
    only: str | None,
    *,
    every: bool = False,
) -> RunPlan:
    """Plan a recipe.

    Args:
        micro_batch_size: the only one to consider; None: every divisor of a process's rows.
        only: name or file of the only Accelerate config to consider.
        every: measure candidates, too, that are slower than one of the same config that fits, which takes several times as long.

    Raises:
        ConfigError: the GPUs are uneven, the global batch cannot be divided among them, or no plan is made for `only`.
        MachineError: no config, or not `only`, can be launched with this recipe on so many GPUs.
    """
    if machine.num_gpus % machine.num_machines:
        raise ConfigError(
            f"--gpus must fill every machine equally, got {machine.num_gpus} on {machine.num_machines} machines of up to "
            f"{machine.gpu.per_machine}; plan for a multiple of {machine.num_machines}"
        )
    if only in NOT_PLANNED:
        raise ConfigError(
            f"--config must be one that a plan is made for, got {only}: {NOT_PLANNED[only]}; leave it out"
        )
    shape = shape_of(probe)
    found: list[Candidate] = []
    refused: UserError | None = None
    for order, (name, parts) in enumerate(_launches(config, machine, only)):
        running = [each.placement for each in found if each.runs]
        if parts > 1 and any(each.processes_of_reader == 1 or each.config == name for each in running):
            continue  # fewer parts fit too, and send less
        try:
            probe.in_layers(parts) if name in WITH_LAYERS_IN_PARTS else probe.in_parts(parts)
            placement = _placed(config, machine, name, parts)
        except UserError as error:  # heads that do not divide over so many, or a recipe that this engine cannot train
            if only and parts == 1:
                raise
            refused = refused or error
            continue
        found += _of_launch(config, probe, machine, shape, order, placement, micro_batch_size, every)
    if not found and refused is not None:
        raise refused if config.training.global_batch_size % machine.num_gpus == 0 else _uneven(config, machine)
    steps, wanted = config.training.max_steps, config.training.micro_batch_size
    tokens = steps and steps * config.training.global_batch_size * config.data.sequence_length
    return RunPlan(found, _simplest_of_fastest(found, wanted, machine.memory), shape, tokens, wanted)


def _launches(config: Config, machine: Machine, only: str | None) -> list[tuple[str, int]]:
    """Configs to compare, and the parts of a row with each: complete rows first, rows in parts in case none of these fits.

    Raises:
        ConfigError: the global batch cannot be divided among the GPUs.
    """
    rows, count = config.training.global_batch_size, machine.num_gpus
    here = count // machine.num_machines  # neighbours in one machine share rows
    sizes = [n for n in range(2, here + 1) if here % n == 0 and rows * n % count == 0]
    complete = [only] if only else [*configs_for(count, machine.num_machines)]
    in_parts = [] if only else [*WITH_ROWS_IN_PARTS, *WITH_LAYERS_IN_PARTS]
    if only in (*WITH_ROWS_IN_PARTS, *WITH_LAYERS_IN_PARTS):
        complete, in_parts = in_parts, complete
    if only and complete:
        return [(only, 1)]  # with the parts that a file asks for
    if rows % count and not (sizes and in_parts):
        raise _uneven(config, machine)
    if not complete and not sizes:
        raise ConfigError(
            f"--config must be one that runs on {count} GPU, got {only}, whose processes share rows or layers; leave it out"
        )
    found = [(name, 1) for name in complete if rows % count == 0]
    return found + [(name, size) for name in in_parts for size in sizes if _has_sizes(name, count, size)]


def _has_sizes(name: str, num_gpus: int, parts: int) -> bool:
    """Test whether a config divides this number of GPUs into groups that share layers: all, or several groups."""
    return name not in WITH_LAYERS_IN_PARTS or (name == WITH_LAYERS_IN_PARTS[0]) == (parts == num_gpus)


def _uneven(config: Config, machine: Machine, parts: int = 1) -> ConfigError:
    groups = (
        f"{machine.num_gpus // parts} groups of GPUs that share rows or layers"
        if parts > 1
        else f"{machine.num_gpus} GPUs"
    )
    return ConfigError(
        f"training.global_batch_size must be a multiple of the {groups}, got "
        f"{config.training.global_batch_size}; change it, or plan for another number of GPUs"
    )


def _placed(config: Config, machine: Machine, name: str, parts: int) -> Placement:
    """Placement under one config with one division of the rows.

    Raises:
        UserError: it cannot be launched like that, or not with this recipe.
    """
    file = find_accelerate_config(name)
    placement = placement_of(file, machine.num_gpus, machine.num_machines, config, parts if parts > 1 else None)
    if placement.num_processes != machine.num_gpus:
        raise ConfigError(
            f"--config must use all GPUs, got {name}, which uses {placement.num_processes} of {machine.num_gpus}; plan for "
            f"--gpus {placement.num_processes}x..., or leave it out"
        )
    if machine.gpu.capability < CAPABILITIES.get(placement.precision, (0, 0)):
        raise ConfigError(
            f"training.mixed_precision must be {machine.gpu.precision} or no for the GPU {machine.gpu.name}, got {placement.precision}, which it "
            f"cannot compute; set training.mixed_precision={machine.gpu.precision}"
        )
    if config.training.global_batch_size * placement.processes_of_reader % machine.num_gpus:
        raise _uneven(config, machine, placement.processes_of_reader)
    return placement


def _of_launch(
    config: Config,
    probe: Probe,
    machine: Machine,
    shape: Shape | None,
    order: int,
    placement: Placement,
    micro_batch_size: int | None,
    every: bool,
) -> list[Candidate]:
    """Candidates of one placement, without those that cannot be chosen unless `every`."""
    length, parts = config.data.sequence_length, placement.processes_of_reader
    rows = config.training.global_batch_size * parts // machine.num_gpus
    most = MAX_POSITIONS * parts // length  # of a GPU
    sizes = [b for b in range(1, rows + 1) if rows % b == 0 and (b == 1 or b <= most)]
    if micro_batch_size is not None:
        sizes = [min(micro_batch_size, rows)]
        if rows % sizes[0]:
            raise ConfigError(
                f"training.micro_batch_size must divide the {rows} rows of a process, got {micro_batch_size}; choose a divisor"
            )
    ratio = None
    if shape is not None and placement.processes_of_reader == 1:
        ratio = known_ratio(machine.gpu, shape, length, compute_dtype(config, placement))
    found: dict[int, Candidate] = {}
    enough, names = 0.0, list(SWITCH)
    roomy: set[int] = set()  # kinds of checkpointing of faster candidates with room
    for index, (time, checkpointing, size, compiled) in _timed(config, machine, shape, placement, sizes, rows, ratio):
        speed = time.tokens_per_second.middle if time else 0.0
        if speed < AS_FAST * enough and not every:
            break  # all that follow are slower still
        if any(kind < names.index(checkpointing) for kind in roomy) and not every:
            continue  # slower and less simple
        memory = memory_of(probe, placement, size, rows // size, checkpointing)
        fits = memory.verdict(machine.memory)
        if fits != "no" and memory.host > machine.host_memory:
            fits = "host"
        if time is not None and fits == "yes":
            enough = max(enough, speed)
            roomy |= {names.index(checkpointing)} if memory.middle <= ROOM * machine.memory else set()
        found[index] = Candidate(placement, order, size, rows // size, checkpointing, compiled, memory, fits, time)
    return [found[index] for index in sorted(found)]


def _timed(
    config: Config,
    machine: Machine,
    shape: Shape | None,
    placement: Placement,
    sizes: list[int],
    rows: int,
    ratio: float | None,
) -> list[tuple[int, tuple[StepTime | None, Checkpointing, int, bool]]]:
    """Combinations of checkpointing, micro-batch and compilation with their step, numbered, the fastest first."""
    found: list[tuple[StepTime | None, Checkpointing, int, bool]] = []
    for checkpointing in SWITCH:
        for size in sizes:
            for compiled in (False, True) if can_compile(placement) else (False,):
                time = None
                if shape is not None:
                    work = work_of(config, placement, size, rows // size, checkpointing, compiled=compiled)
                    time = step_time(shape, machine.gpu, layout_of(placement), work, machine.network, ratio)
                found.append((time, checkpointing, size, compiled))
    return sorted(enumerate(found), key=lambda each: -(each[1][0].tokens_per_second.middle if each[1][0] else 0.0))


def compute_dtype(config: Config, placement: Placement) -> str:
    """Dtype of the products, as `modeling.flops.peak_of` names it."""
    if placement.precision == "no" and config.model.dtype == "bfloat16":
        return "bfloat16"
    return COMPUTE_DTYPES.get(placement.precision, "tf32" if config.training.allow_tf32 else "float32")


def bytes_sent(config: Config, shape: Shape, placement: Placement, size: int, accumulation: int) -> float:
    """Bytes that each process sends in a step, in rings; they do not depend on the hardware.

    Args:
        size: rows of a micro-batch.
    """
    checkpointing = next(name for name, value in SWITCH.items() if value == config.model.gradient_checkpointing)
    work = work_of(config, placement, size, accumulation, checkpointing, compiled=False)
    return step_time(shape, GPUS["H100"], layout_of(placement), work).bytes_sent


def work_of(
    config: Config, placement: Placement, size: int, accumulation: int, checkpointing: Checkpointing, *, compiled: bool
) -> Work:
    """Step of one process as the speed model takes it."""
    again = RECOMPUTED["yes" if checkpointing == "full" else checkpointing]
    compute = compute_dtype(config, placement)
    parts = placement.rows_in_parts, placement.layers_in_parts
    return Work(config.data.sequence_length, size, accumulation, again, compiled, compute, *parts)


def layout_of(placement: Placement) -> Layout:
    """The placement as the speed model takes it."""
    n = placement.shards
    is_sharded = placement.shards_weights
    return Layout(
        weight_shards=n if is_sharded else 1,
        gradient_shards=n if placement.shards_gradients else 1,
        moment_shards=n if placement.shards_moments else 1,
        replicas=placement.replicas,
        regathers=placement.gathers in ("blocks", "limited"),
        keeps=KEPT if placement.gathers == "limited" else 0.0,
        keeps_head=placement.gathers in ("blocks", "all blocks"),
        reduces_each_micro_batch=placement.shards_gradients,
        scatters_gradients=is_sharded,
        overlap=placement.overlap,
        weight_bytes=2 if placement.compute == "cast" else placement.stored,
        gradient_bytes=4 if placement.compute == "cast" else placement.trained,
        casts_weights=placement.compute == "autocast",
        offloads_moments=placement.offloads_moments,
        offloads_weights=placement.offloads_weights,
    )


def shape_of(probe: Probe) -> Shape | None:
    """Sizes of a decoder of equal blocks for the speed model; None for other models, adapters, and mixtures of experts."""
    sizes = probe.sizes
    return None if probe.no_speed or sizes is None else Shape(**sizes)


def _simplest_of_fastest(candidates: list[Candidate], wanted: int, memory: float = math.inf) -> Candidate | None:
    """The simplest of the candidates that run about as fast as the fastest; None if none fits.

    Args:
        wanted: micro-batch to approach where speed is not modelled; compilation is then left out.
    """
    running = [each for each in candidates if each.fits == "yes"] or [each for each in candidates if each.runs]
    if not running:
        return None
    fastest = max(each.tokens_per_second for each in running)
    near = [each for each in running if each.tokens_per_second >= AS_FAST * fastest]
    names = list(SWITCH)
    first = min(
        near,
        key=lambda each: (
            each.memory.middle > ROOM * memory,
            each.order,
            names.index(each.checkpointing),
            -each.compiled if fastest else each.compiled,
            -each.tokens_per_second,
        ),
    )
    same = [
        each
        for each in near
        if (each.order, each.checkpointing, each.compiled) == (first.order, first.checkpointing, first.compiled)
    ]
    if not fastest:
        roomy = [each for each in same if each.memory.middle <= ROOM * memory] or same
        return min(roomy, key=lambda each: (each.micro_batch_size > wanted, abs(each.micro_batch_size - wanted)))
    best = max(each.tokens_per_second for each in same)
    return min(
        (each for each in same if each.tokens_per_second >= 0.985 * best), key=lambda each: each.micro_batch_size
    )


def command_line(candidate: Candidate, recipe: str, overrides: Sequence[str] = ()) -> str:
    """Command line that runs the candidate, with the keys that the plan was made for."""
    words = ["accelerate launch", f"--config_file {shlex.quote(candidate.placement.file)}"]
    words += [
        *launch_words(candidate.placement, compiled=candidate.compiled),
        "train.py",
        "--config",
        shlex.quote(recipe),
    ]
    chosen = ("training.micro_batch_size=", "model.gradient_checkpointing=")
    words += [shlex.quote(word) for word in overrides if not word.startswith(chosen)]
    words.append(f"training.micro_batch_size={candidate.micro_batch_size}")
    switch = SWITCH[candidate.checkpointing]
    words.append(f"model.gradient_checkpointing={switch if isinstance(switch, str) else str(switch).lower()}")
    return " ".join(words)
