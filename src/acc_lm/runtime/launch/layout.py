"""Placement of a model's training state under an Accelerate config, in numbers: bytes of a parameter, and what is shared."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from acc_lm.config.project import CONFIGS, find_accelerate_config
from acc_lm.errors import ConfigError
from acc_lm.runtime.launch.doctor import launched
from acc_lm.runtime.launch.request import check_planned
from acc_lm.runtime.settings.config_file import read_config
from acc_lm.runtime.settings.deepspeed import offload_device
from acc_lm.runtime.settings.fsdp import mesh
from acc_lm.runtime.settings.grid import parts_of_layers, parts_of_rows, processes_of_reader, requested_grid
from acc_lm.runtime.settings.strategy import flag, requested_precision, requested_strategy, world_size

if TYPE_CHECKING:
    from acc_lm.config import Config

Compute = Literal["autocast", "cast", "own"]
"""autocast: stored weights under autocast; cast: 16-bit copies of the weights; own: weights in the dtype that they have."""
MAX_FLAT = 5e8
"""Gradients of a model that ZeRO-1 copies into one tensor at most, in bf16; DeepSpeed's constant."""
MAX_LIVE, PREFETCHED = 1e9, 5e7
"""Elements that ZeRO-3 has gathered at most, and those that it gathers at a time: DeepSpeed's defaults."""
KEPT = 5e8
"""Elements that stay gathered from forward to backward, because they are used again within 1e9 others, its default."""
STORED = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Placement:
    """Bytes of a parameter on each device of a launch, and how they are shared.

    Frozen parameters have weights only.
    """

    config: str
    """Name of the Accelerate config."""
    num_processes: int
    num_machines: int
    compute: Compute
    precision: str
    weights: float
    """Bytes of a parameter that are always on the device."""
    state: float
    """Bytes of a trained parameter that are always there in addition: moments, fp32 weights, DDP's buckets."""
    gradients: float
    """Bytes of a trained parameter's gradient at the end of the backward passes of a step."""
    held: float
    """Bytes of a trained parameter's gradient between micro-batches."""
    updates: float
    """Bytes of a trained parameter's gradient and of its copies at the update."""
    file: str = ""
    """Path of that config."""
    file_processes: int | None = None
    """Number of processes in that file, which holds where the command names no other; None: it has none."""
    file_machines: int = 1
    """Number of machines in that file."""
    file_compiles: bool = False
    """True if that file asks for compilation."""
    stored: int = 4
    """Bytes of a parameter in the dtype that it has."""
    trained: int = 4
    """Those of a trained parameter: an adapter has float32 on a model of 16 bits."""
    at_once: bool = False
    """True if the memory of all of a process's gradients is taken when the first is reduced."""
    apart: bool = False
    """True if the sum of earlier micro-batches is held in addition to the gradients."""
    reduces: float = 0.0
    """Bytes of an element that the reduction of a gradient takes in addition to it."""
    flattens: float = 0.0
    """Bytes of a trained parameter that the reduction of all gradients at once takes, up to MAX_FLAT of them."""
    staged: float = 0.0
    """Bytes of an element of the largest tensor, for its transfer between device and host."""
    gathers: Literal["nothing", "blocks", "all blocks", "limited"] = "nothing"
    """Weights that are gathered: block by block, all until the backward pass, or up to a number of elements."""
    buffers: float = 0.0
    """Bytes of buffers for communication, whatever the size of the model."""
    host: float = 0.0
    """Bytes of a trained parameter in the memory of the machine."""
    shards: int = 1
    """Processes that share one copy of what is sharded."""
    shards_weights: bool = False
    shards_gradients: bool = False
    shards_moments: bool = False
    overlap: float = 0.9
    """Share of the computation that communication can run next to."""
    offloads_moments: bool = False
    offloads_weights: bool = False
    rows_in_parts: int = 1
    """Processes that share each row."""
    layers_in_parts: int = 1
    """Processes that share each layer."""

    @property
    def processes_of_reader(self) -> int:
        """Processes that read the same rows."""
        return self.rows_in_parts * self.layers_in_parts

    @property
    def replicas(self) -> int:
        return self.num_processes // self.layers_in_parts // self.shards


def placement_of(
    file: Path, num_processes: int | None, num_machines: int | None, config: Config, parts: int | None = None
) -> Placement:
    """Placement of this recipe's model under an Accelerate config.

    Args:
        num_processes, num_machines, parts: other than the numbers in the file; None: those. Parts are those of a row or a layer.

    Raises:
        MachineError: the config cannot be launched like that.
    """
    # Nothing is launched, so it does not matter whether a run on this machine uses the config's port; 0 is any free one.
    options = ["--main_process_port", "0"]
    options += [] if num_processes is None else ["--num_processes", str(num_processes)]
    options += [] if num_machines is None else ["--num_machines", str(num_machines)]
    if (num_machines or 1) > 1:
        options += ["--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    if num_processes is not None and parts is not None:
        in_layers = file.stem in WITH_LAYERS_IN_PARTS
        options += _words_for_parts(file.stem, num_processes, *((1, parts) if in_layers else (parts, 1)))
    with launched(file, options) as typed:
        check_planned(config, typed)
        machines, strategy = int(typed.num_machines or 1), requested_strategy()
        # Sizes in the file, which fit some numbers of processes only; those of copies on several machines are options.
        if strategy == "fsdp2" or (strategy == "hsdp" and (machines == 1 or processes_of_reader() > 1)):
            mesh(world_size())
        found = current_placement(config)
    written = read_config(file)
    return replace(
        found,
        config=file.stem,
        file=_as_typed(file),
        file_processes=getattr(written, "num_processes", None),
        file_machines=written.num_machines,
        file_compiles=str((written.dynamo_config or {}).get("dynamo_backend", "no")).lower() != "no",
        num_machines=machines,
    )


def _as_typed(file: Path) -> str:
    """Path of an Accelerate config as one would type it in the project's folder."""
    try:
        is_the_projects = find_accelerate_config(file.stem).samefile(file)
    except ConfigError:
        is_the_projects = False
    return f"{CONFIGS}/{file.name}" if is_the_projects else str(file)


def current_placement(config: Config) -> Placement:
    """Placement of this recipe's model under the launch of this process."""
    strategy, num_processes = requested_strategy(), world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    precision = requested_precision(config.training.mixed_precision)
    stored = STORED[config.model.dtype]
    trained = max(stored, 4) if config.adapter.kind != "none" else stored
    is_mixed = precision != "no"
    compute: Compute = (
        "own" if not is_mixed else "autocast" if strategy in ("single", "ddp", "tensor_parallel") else "cast"
    )
    found = Placement(
        strategy,
        num_processes,
        max(1, num_processes // here),
        compute,
        precision,
        weights=stored,
        state=3 * trained - stored,
        gradients=trained,
        held=trained,
        updates=trained,
        stored=stored,
        trained=trained,
        shards=num_processes // parts_of_layers(),
        rows_in_parts=parts_of_rows(),
        layers_in_parts=parts_of_layers(),
    )
    if strategy in ("single", "tensor_parallel"):
        return replace(found, shards=1)
    if strategy == "ddp":
        # Gradients are views of buckets, which always exist. Those of earlier micro-batches are outside of them until the last.
        return replace(found, shards=1, state=4 * trained - stored, gradients=0, updates=0)
    if strategy.startswith("deepspeed"):
        devices = offload_device("optimizer"), offload_device("param")
        bucket = config.distributed.bucket_cap_mb * 2**20
        return _of_deepspeed(found, int(strategy[-1]), is_mixed, devices, bucket)
    shards = _sharing(here) if strategy == "hsdp" else found.shards
    share = trained / shards
    keeps = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false"
    found = replace(found, shards=shards, shards_weights=True, shards_gradients=True, shards_moments=True)
    found = replace(found, gathers="all blocks" if keeps else "blocks", reduces=4 if is_mixed else trained)
    found = replace(
        found, apart=found.replicas > 1
    )  # sums between the copies are kept until the end of a backward pass
    if flag("FSDP_OFFLOAD_PARAMS"):
        found = replace(found, weights=0, state=0, gradients=0, held=0, updates=0, host=4 * share)
        return replace(found, offloads_weights=True, offloads_moments=True)
    return replace(
        found, weights=stored / shards, state=found.state / shards, gradients=share, held=share, updates=share
    )


def _sharing(here: int) -> int:
    """Number of processes that share one copy under HSDP: the launch's grid if it fits the processes, else a machine's."""
    grid = requested_grid()
    shards = grid.shards * grid.rows  # processes that share a row hold different shards
    return shards if grid.copies * shards == world_size() else here


def _of_deepspeed(found: Placement, stage: int, is_mixed: bool, devices: tuple[str, str], bucket: float) -> Placement:
    """Placement of ZeRO, with fp32 weights for the update next to those that are computed with, also in fp32.

    Sources: DeepSpeed 0.19.8, stage_1_and_2.py, stage3.py and bf16_optimizer.py; tests/planning/test_planned_steps.py.

    Args:
        bucket: bytes of a bucket of fp32 gradients.
    """
    n, small = found.num_processes, 2 if is_mixed else 4
    found = replace(found, weights=small, state=12 / n, buffers=bucket, overlap=0.0, shards_moments=True)
    found = replace(found, shards_gradients=stage > 1, shards_weights=stage > 2)
    share = 4 / n
    if stage == 1 and is_mixed:  # all sums of gradients are kept in fp32, next to 16-bit gradients that are set to zero
        return replace(found, state=12 / n + 4, gradients=2, held=2, updates=2, flattens=4, buffers=0)
    if stage == 1:
        return replace(found, gradients=4 + share, held=4, updates=2 * share)
    if stage == 2:
        found = replace(found, gradients=share, held=share, updates=share, at_once=True, reduces=6, buffers=bucket / 2)
        if not is_mixed:
            found = replace(found, updates=2 * share, apart=True, reduces=4, buffers=bucket)
        if devices[0] == "none":
            return found
        found = replace(found, offloads_moments=True, state=0, host=(16 + small) / n, staged=small)
        return found if is_mixed else replace(found, gradients=0, held=0, updates=0, apart=False, host=24 / n)
    # Gradients are part of the state: their sums have a buffer that always exists.
    found = replace(found, weights=small / n, state=16 / n, gradients=0, held=0, updates=share, gathers="limited")
    found = replace(found, overlap=0.5, reduces=4 if is_mixed else 0)
    if devices[0] != "none":
        found = replace(found, offloads_moments=True, state=0, updates=0, host=20 / n)
    if devices[1] != "none":
        found = replace(found, offloads_weights=True, weights=0, host=found.host + small / n)
    return found


CONFIGS_BY_SIZE = {
    "one GPU": ("single_gpu", "deepspeed_zero2_offload", "deepspeed_zero3_offload"),
    "one machine": (
        "ddp",
        "deepspeed_zero1",
        "fsdp2_grad_op",
        "deepspeed_zero2",
        "fsdp2",
        "deepspeed_zero3",
        "deepspeed_zero2_offload",
        "fsdp2_offload",
        "deepspeed_zero3_offload",
    ),
    "several machines": ("multi_node_ddp", "multi_node_hsdp", "fsdp2", "multi_node_deepspeed_zero3"),
}
"""Accelerate configs to compare, the simplest first."""
WITH_ROWS_IN_PARTS = ("ddp_sequence", "sequence_parallel", "deepspeed_zero3_sequence")
"""Those whose processes share rows, for rows that do not fit on one GPU or are fewer than the GPUs; the simplest first."""
WITH_LAYERS_IN_PARTS = ("tensor_parallel", "fsdp2_tensor_parallel")
"""Those whose processes share layers, for the same cases."""
NOT_PLANNED = {
    "cpu": "for a machine without GPUs",
    "hsdp": "for several machines; within one, FSDP2 or DDP do the same with less",
    "multi_node_sequence_parallel": "sequence_parallel with the numbers of several machines is planned",
    "multi_node_fsdp2_tensor_parallel": "fsdp2_tensor_parallel with the numbers of several machines is planned",
    "deepspeed_zero3_full": "deepspeed_zero3_offload with its settings in JSON",
    "deepspeed_zero3_nvme": "the speed of a disk is not known",
}
"""The other files of accelerate_configs/, and why no plan is made for them."""


def configs_for(num_processes: int, num_machines: int) -> tuple[str, ...]:
    """Names of the Accelerate configs to compare on this number of GPUs, the simplest first."""
    if num_processes == 1:
        return CONFIGS_BY_SIZE["one GPU"]
    return CONFIGS_BY_SIZE["one machine" if num_machines == 1 else "several machines"]


def _words_for_parts(config: str, num_processes: int, rows: int, layers: int) -> list[str]:
    """Options for the parts of rows and layers under a config of this project; another file has its own sizes in it."""
    if config not in (*WITH_ROWS_IN_PARTS, *WITH_LAYERS_IN_PARTS):
        return []
    words = []
    for name, parts in (("sp", rows), ("tp", layers)):
        words += [f"--parallelism_config_{name}_size", str(parts)] if parts > 1 else []
    if config in (
        "sequence_parallel",
        "fsdp2_tensor_parallel",
    ):  # FSDP2, whose grid must multiply to the number of processes
        words += ["--parallelism_config_dp_shard_size", str(num_processes // (rows * layers))]
    return words


def can_compile(placement: Placement) -> bool:
    """True if the layers of the model can be compiled under this config."""
    if placement.offloads_weights or placement.offloads_moments:
        return False
    is_zero1 = placement.shards_moments and not placement.shards_gradients
    return not is_zero1 and placement.gathers != "limited"  # which is ZeRO-3


def launch_words(placement: Placement, *, compiled: bool) -> list[str]:
    """Options of `accelerate launch` for this placement, besides its config."""
    words = []
    if placement.num_processes > 1 or placement.file_processes != 1:
        words = ["--num_processes", str(placement.num_processes)]
    if placement.num_machines == 1 and placement.file_machines > 1:
        words += ["--num_machines", "1"]
    if placement.num_machines > 1:
        words += ["--num_machines", str(placement.num_machines), "--machine_rank", "RANK", "--main_process_ip", "HOST"]
        if placement.shards > 1 and placement.replicas > 1:
            words += ["--parallelism_config_dp_replicate_size", str(placement.replicas)]
            words += ["--parallelism_config_dp_shard_size", str(placement.shards // placement.rows_in_parts)]
    if placement.processes_of_reader > 1 and placement.file.startswith(f"{CONFIGS}/"):
        parts = placement.rows_in_parts, placement.layers_in_parts
        words += _words_for_parts(placement.config, placement.num_processes, *parts)
    if compiled:
        words += ["--dynamo_backend", "inductor"]
        if placement.shards_weights:
            words.append("--dynamo_use_regional_compilation")
    elif placement.file_compiles:
        words += ["--dynamo_backend", "no"]
    return words
