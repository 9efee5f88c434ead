"""Identity of a run: strategy, engine, placement and precision, read from the live objects."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from acc_lm.config import Config
from acc_lm.errors import MachineError
from acc_lm.modeling.row_parts import RowParts
from acc_lm.redaction import redact_words
from acc_lm.runtime.engines.prepare import whole_shapes
from acc_lm.runtime.engines.shards import pieces_of
from acc_lm.runtime.engines.tensor_parallel import layer_parts
from acc_lm.runtime.settings.deepspeed import offload_device, overruled_settings
from acc_lm.runtime.settings.grid import overruled_sizes, parts_of_layers, parts_of_rows
from acc_lm.runtime.settings.strategy import bare_model, is_deepspeed, requested_strategy

if TYPE_CHECKING:
    from accelerate import Accelerator


LIBRARIES = (
    "torch",
    "accelerate",
    "transformers",
    "deepspeed",
    "tokenizers",
    "datasets",
    "peft",
    "safetensors",
    "numpy",
    "wandb",
)


@dataclass(frozen=True)
class Identity:
    """Strategy, engine, placement and precision of a run, read from the live objects."""

    strategy: str
    engine: str
    num_processes: int
    precision: str
    """Data types of the updated weights, of the computation, and of the gradient reduction over processes."""
    compute: str
    """Data type of the matrix products."""
    device: str
    threads: int
    placement: str
    num_parameters: int
    parameters_per_process: tuple[int, ...]
    """Number of model elements that each process keeps between steps."""
    updated_per_process: tuple[int, ...]
    """Number of elements whose optimizer state each process keeps."""
    is_rehearsal: bool
    rows_in_parts: int = 1
    """Number of processes that share each row."""
    layers_in_parts: int = 1
    """Number of processes that share each layer."""
    notes: tuple[str, ...] = ()


def identify(accelerator: Accelerator, model: nn.Module, optimizer: Any, config: Config) -> Identity:
    """Identify strategy, processes, placement and precision of the prepared model. Every process must call it.

    Raises:
        MachineError: the live objects are not what the launch requested.
    """
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    outer = getattr(model, "_orig_mod", model)
    strategy = _live_strategy(outer, num_processes)
    requested = requested_strategy()
    if strategy != requested:
        raise MachineError(
            f"the launch must run {requested}, as its Accelerate config requests, got {strategy} ({type(outer).__name__}, "
            f"{num_processes} processes); this is a defect of the installed versions, and nothing was trained"
        )
    pieces = pieces_of(model, optimizer)
    num_parameters = sum(math.prod(shape) for shape in whole_shapes(model).values())
    kept = sum(_kept_size(p) for p in bare_model(model).parameters())
    updated = sum(piece.length for piece in pieces if piece.is_trained)
    kept_by_all, updated_by_all = _on_all(accelerator, kept), _on_all(accelerator, updated)
    _check_shards(strategy, num_parameters, kept_by_all, updated_by_all, num_processes)
    layers = layer_parts(model)
    rows_in_parts, layers_in_parts = getattr(bare_model(model), "row_parts", RowParts()).size, layers.size
    vocabulary = f"complete: {layers.vocabulary}" if layers.vocabulary else f"in {layers_in_parts} parts"
    for what, asked, got in (("rows", parts_of_rows(), rows_in_parts), ("layers", parts_of_layers(), layers_in_parts)):
        if got != asked:
            raise MachineError(
                f"{what} must be cut into {asked} parts, as the Accelerate config requests, got {got}; nothing was trained"
            )
    _check_settings(outer, strategy, optimizer, accelerator.device)
    device = accelerator.device
    on_gpu = device.type == "cuda"
    precision, compute = _precision(accelerator, outer)
    is_rehearsal = device.type == "cpu" and (num_processes > 1 or strategy != "single")
    return Identity(
        strategy=strategy,
        engine=type(outer).__name__,
        num_processes=num_processes,
        precision=precision,
        compute="tf32" if compute == "float32" and on_gpu and config.training.allow_tf32 else compute,
        device=torch.cuda.get_device_name(device)
        if on_gpu
        else f"{device.type} ({platform.processor() or platform.machine()})",
        threads=torch.get_num_threads(),
        placement=_placement(outer, strategy, num_parameters, kept_by_all, updated_by_all)
        + (f"; rows in {rows_in_parts} parts" if rows_in_parts > 1 else "")
        + (f"; layers in {layers_in_parts} parts, vocabulary {vocabulary}" if layers_in_parts > 1 else ""),
        num_parameters=num_parameters,
        parameters_per_process=kept_by_all,
        updated_per_process=updated_by_all,
        is_rehearsal=is_rehearsal,
        rows_in_parts=rows_in_parts,
        layers_in_parts=layers_in_parts,
        notes=tuple(_notes(accelerator, config, strategy, num_processes, is_rehearsal)),
    )


def _live_strategy(model: nn.Module, num_processes: int) -> str:
    from torch.distributed.fsdp import FSDPModule

    if is_deepspeed(model):
        return f"deepspeed_zero{model.zero_optimization_stage()}"  # type: ignore[operator]
    if isinstance(model, FSDPModule):
        return "hsdp" if _mesh_of(model).ndim == 2 else "fsdp2"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "ddp"
    if num_processes > 1 and layer_parts(model).size == num_processes:
        return "tensor_parallel"
    return "single" if num_processes == 1 else "nothing that connects the processes"


def _mesh_of(model: nn.Module) -> Any:
    return next(p for p in model.parameters() if hasattr(p, "device_mesh")).device_mesh


def _kept_size(parameter: Any) -> int:
    if hasattr(parameter, "ds_tensor"):
        stays_whole = getattr(parameter, "ds_persist", False)
        return int(parameter.ds_numel if stays_whole else parameter.ds_tensor.numel())
    return int(parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel())


def _on_all(accelerator: Accelerator, number: int) -> tuple[int, ...]:
    if accelerator.num_processes == 1:
        return (number,)
    numbers = [torch.zeros((), dtype=torch.int64, device=accelerator.device) for _ in range(accelerator.num_processes)]
    dist.all_gather(numbers, torch.tensor(number, device=accelerator.device))
    return tuple(int(n) for n in numbers)


def _check_shards(
    strategy: str, num_parameters: int, kept: tuple[int, ...], updated: tuple[int, ...], num_processes: int
) -> None:
    """Check that the engine shards if it must, and that each process holds the full model under single and DDP."""
    if strategy in ("single", "ddp"):
        expected = num_parameters * num_processes
        if sum(kept) != expected:
            raise MachineError(
                f"each process must hold the full model under {strategy}, got {kept} of {num_parameters} parameters"
            )
    elif strategy == "tensor_parallel":
        if max(kept) >= num_parameters:
            raise MachineError(
                f"processes must hold parts of the layers under {strategy}, got {kept} of {num_parameters} parameters"
            )
    elif num_processes > 1 and strategy in ("fsdp2", "hsdp"):
        if min(kept) >= num_parameters:
            raise MachineError(f"{strategy} must shard the parameters, got all {num_parameters} of them on a process")
    elif num_processes > 1 and sum(updated) > num_parameters:
        raise MachineError(f"{strategy} must shard the optimizer's state, got {updated} of {num_parameters} parameters")


def _check_settings(model: Any, strategy: str, optimizer: Any, device: torch.device) -> None:
    """Check the Accelerate config's settings other than the strategy against the engine's own attributes."""

    def check(key: str, requested: Any, got: Any) -> None:
        if requested != got:
            raise MachineError(
                f"{key} must be {requested}, as the Accelerate config requests, got {got}: nothing was trained"
            )

    if strategy in ("fsdp2", "hsdp"):
        requested = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("true", "1", "full_shard")
        if len(_block_units(model)) > 0:
            check("fsdp_reshard_after_forward", requested, _reshards(model))
        offloads = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
        if device.type != "cpu":
            check("fsdp_offload_params", offloads, next(model.parameters()).device.type == "cpu")
    elif strategy.startswith("deepspeed"):
        for what in ("optimizer", "param"):
            check(f"offload_{what}_device", offload_device(what), _offload_device(model, what))
        inner = type(getattr(optimizer.optimizer, "optimizer", None)).__name__
        check("the optimizer on the CPU", offload_device("optimizer") != "none", inner == "DeepSpeedCPUAdam")


def _offload_device(model: Any, what: str) -> str:
    """Offload device from the engine's parsed config: none, cpu or nvme."""
    settings = getattr(model._config.zero_config, f"offload_{what}")
    return "none" if settings is None else str(getattr(settings.device, "value", settings.device))


def _block_units(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    names = set(getattr(bare_model(model), "_no_split_modules", None) or [])
    return [m for m in model.modules() if isinstance(m, FSDPModule) and type(m).__name__.removeprefix("FSDP") in names]


def _placement(model: Any, strategy: str, num_parameters: int, kept: tuple[int, ...], updated: tuple[int, ...]) -> str:
    if strategy in ("single", "ddp"):
        return f"complete on each process: {num_parameters:,} parameters"
    if strategy == "tensor_parallel":
        return f"{num_parameters:,} parameters: {min(kept):,} to {max(kept):,} on a process"
    if strategy in ("fsdp2", "hsdp"):
        mesh = _mesh_of(model)
        shards = mesh.size(mesh.ndim - 1)
        copies = f", in {mesh.size(0)} copies" if mesh.ndim == 2 else ""
        blocks = len(_block_units(model))
        reshard = (
            f"{blocks} blocks, gathered again for backward"
            if _reshards(model)
            else f"{blocks} blocks, kept gathered from forward to backward"
        )
        return f"{num_parameters:,} parameters in {shards} shards{copies}: {min(kept):,} to {max(kept):,} on a process, {reshard}"
    stage = strategy[-1]
    offload = {what: device for what in ("optimizer", "param") if (device := _offload_device(model, what)) != "none"}
    text = {
        "1": "optimizer state sharded, gradients and parameters replicated",
        "2": "optimizer state and gradients sharded, parameters replicated",
        "3": "optimizer state, gradients and parameters sharded",
    }[stage]
    places = "".join(f", {what} offloaded to {device}" for what, device in offload.items())
    return f"{text}: {max(kept):,} of {num_parameters:,} parameters kept, {max(updated):,} updated on a process{places}"


def _reshards(model: Any) -> bool:
    """Return whether the transformer blocks reshard after forward; torch keeps the last unit gathered either way."""
    groups = [group for unit in _block_units(model) or [model] for group in _groups(unit)]
    return any(group.post_forward_mesh_info is not None for group in groups)


def _groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    group = getattr(state, "_fsdp_param_group", None)
    return [group] if group is not None else list(getattr(state, "_fsdp_param_groups", []))


def _precision(accelerator: Accelerator, model: Any) -> tuple[str, str]:
    """Return the display name of the precision, and the data type of the matrix products."""

    def name(dtype: Any) -> str:
        return str(dtype).removeprefix("torch.")

    weights = sorted({name(p.dtype) for p in model.parameters()})
    updated = compute = reduce = "/".join(weights)
    requested = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}.get(accelerator.mixed_precision)
    if is_deepspeed(model):
        if requested:
            updated, compute = "float32", requested
        reduce = name(model.communication_data_type or compute)
    elif hasattr(model, "_get_fsdp_state"):
        policy = model._get_fsdp_state()._mp_policy
        compute = name(policy.param_dtype or compute)
        reduce = name(policy.reduce_dtype or reduce)
    elif accelerator.native_amp and requested:
        compute = f"{requested} autocast"
    sums = ""
    if (
        requested and layer_parts(model).size > 1
    ):  # what one matrix product returns, and the gradient of another's input
        own = " forward, float32 backward" if compute.endswith("autocast") else ""
        sums = f", {requested}{own} sums over parts of layers"
    products = compute.removesuffix(" autocast")
    if any(type(module).__name__ == "Float8Linear" for module in model.modules()):
        compute = f"fp8 products, else {compute}"
    if updated == compute == reduce:
        return updated, products
    return f"{updated} weights, {compute} compute, {reduce} reduction{sums}", products


def _notes(
    accelerator: Accelerator, config: Config, strategy: str, num_processes: int, is_rehearsal: bool
) -> list[str]:
    notes, cores = [], os.cpu_count() or 1
    on_cpu, has_chosen = accelerator.device.type == "cpu", num_processes == 1 and "OMP_NUM_THREADS" not in os.environ
    if on_cpu and not has_chosen and torch.get_num_threads() > 1 and (load := os.getloadavg()[0]) > cores:
        notes.append(
            f"other processes use the {cores} cores (load average {load:.1f}) and threads wait for each other: OMP_NUM_THREADS=1 is then faster"
        )
    if is_rehearsal:
        notes.append("rehearsal: the real engine on CPU processes, for correctness, not for speed")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
        if local > cores:
            notes.append(f"{local} processes share {cores} cores")
        if strategy in ("fsdp2", "hsdp") and os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
            notes.append("fsdp_offload_params has no effect here: the parameters are on the CPU already")
    if strategy.startswith("deepspeed"):
        notes += overruled_settings(config, accelerator.gradient_accumulation_steps)
    notes += overruled_sizes()
    training = config.training
    from_launch = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if training.mixed_precision and from_launch and from_launch != training.mixed_precision:
        notes.append(
            f"precision {training.mixed_precision} comes from the recipe and overrides the Accelerate config's {from_launch}"
        )
    if (
        accelerator.device.type == "cuda"
        and accelerator.mixed_precision == "no"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        notes.append("fp32 on a GPU that supports bf16: training.mixed_precision=bf16 is several times faster")
    compiler = accelerator.state.dynamo_plugin
    if compiler.backend.value.lower() != "no":
        how = "block by block" if compiler.use_regional_compilation else "as a whole"
        notes.append(f"compiled by {compiler.backend.value.lower()}, {how}")
    hook = config.distributed.comm_hook
    if strategy == "ddp" and "power_sgd" in hook:
        notes.append(f"{hook} keeps state that checkpoints do not contain: a resumed run is not bit-identical")
    if strategy != "ddp" and hook != "none":
        notes.append(f"distributed.comm_hook {hook} is for DDP and does nothing under {strategy}")
    return notes


def environment(identity: Identity) -> dict[str, Any]:
    """Contents of `environment.json`: the identity, library versions, git commit and launch of the run."""
    values = asdict(identity)
    notes = values.pop("notes")
    return {
        **values,
        "notes": list(notes),
        "versions": {"python": platform.python_version(), **library_versions()},
        "git_commit": _git_commit(),
        "launch_command": _launch_command(),
        "working_directory": os.getcwd(),
        "host": platform.node(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def library_versions() -> dict[str, str | None]:
    """Versions of the libraries that decide what a run does; None for a library that is not installed."""
    found: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _git_commit() -> str | None:
    where = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _launch_command() -> list[str]:
    """Command line of the launcher if there is one, else of this process, with secrets redacted."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
        try:
            raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
            return redact_words(raw.decode(errors="replace").strip("\0").split("\0"))
        except OSError:
            pass  # no /proc on this system
    return redact_words([sys.executable, *sys.argv])
