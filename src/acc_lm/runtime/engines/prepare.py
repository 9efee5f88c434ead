"""Distribution of model and optimizer over the processes by the engine that the launch requested."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.errors import DivergedError, MachineError
from acc_lm.rows.batch import Batch
from acc_lm.runtime.engines.collectives import T, gather_objects, on_main
from acc_lm.runtime.engines.shards import broadcast_weights, pieces_of, publish_weights
from acc_lm.runtime.engines.tensor_parallel import cut_layers, layer_parts
from acc_lm.runtime.settings.deepspeed import partition
from acc_lm.runtime.settings.fp8 import check_layers
from acc_lm.runtime.settings.fsdp import block_classes, shard_over_readers
from acc_lm.runtime.settings.grid import groups_of_rows, parts_of_layers, parts_of_rows
from acc_lm.runtime.settings.strategy import bare_model, requested_strategy

if TYPE_CHECKING:
    from accelerate import Accelerator

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Unsharded shape of every parameter, by name; a tied parameter appears once."""
    whole = layer_parts(model).shape
    return {name: tuple(getattr(p, "ds_shape", whole(name, p))) for name, p in bare_model(model).named_parameters()}


def keep_libraries() -> None:
    """Exempt everything loaded so far from garbage collection (gc.freeze).

    The libraries create hundreds of thousands of objects. Scanning them again and again while they are loaded, and at
    each full collection afterwards, takes a third of the time from the start of a process to its first step.
    """
    _load_schedules()
    gc.freeze()
    gc.enable()


def _load_schedules() -> None:
    """Import transformers' schedules without peft and bitsandbytes, which the base module of its Trainer loads.

    Loading them takes a quarter of the time to the first step. A later import of that base module loads all of it.
    """
    import transformers.utils

    base, is_peft_available = "transformers.trainer_utils", transformers.utils.is_peft_available
    is_ours = base not in sys.modules
    if is_ours:
        transformers.utils.is_peft_available = lambda: False
    try:
        import transformers.optimization
    finally:
        transformers.utils.is_peft_available = is_peft_available
        if is_ours and base in sys.modules:
            del sys.modules[base], transformers.trainer_utils


def initialise_once(
    accelerator: Accelerator,
    build: Callable[[], tuple[nn.Module, T]],
    build_empty: Callable[[T], nn.Module],
) -> tuple[nn.Module, T]:
    """Build the model for `prepare`, and return it with the facts about it.

    An engine that shards parameters gets its weights from the main process. The other processes build the same model
    over memory that is reserved and never touched, so only one process ever holds all of a large model. If layers are to
    be cut, every process builds the model, and keeps its part.
    """
    if parts_of_layers() > 1 or requested_strategy() not in ("fsdp2", "hsdp", "deepspeed_zero3"):
        return build()
    built: list[nn.Module] = []

    def build_here() -> T:
        model, facts = build()
        built.append(model)
        return facts

    facts = on_main(accelerator, build_here, takes_long=True)
    return (built[0] if built else build_empty(facts)), facts


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Call `accelerator.prepare` so that every engine starts from the main process's weights in full precision.

    From here on the model divides rows or layers, if the launch requests that. Every process calls.
    """
    timeout = accelerator.init_handler.timeout if accelerator.init_handler else None
    if parts_of_layers() > 1:  # on the host, so that no device ever holds complete layers
        cut_layers(model, parts_of_layers(), timeout)
    model, optimizer = _prepare(accelerator, model, optimizer)
    if parts_of_rows() > 1:
        group, _ = dist.new_subgroups_by_enumeration(groups_of_rows(dist.get_world_size()), timeout=timeout)
        bare_model(model).row_parts.begin(group)  # type: ignore[operator, union-attr]
    return model, optimizer


def _prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    strategy = requested_strategy()
    if not strategy.startswith("deepspeed"):
        if strategy in ("fsdp2", "hsdp"):
            plugin = vars(accelerator.state).get("fsdp_plugin")
            if plugin is not None:  # else Accelerate fell back to another strategy; `identify` reports it
                plugin.transformer_cls_names_to_wrap = block_classes(model)
                shard_over_readers(accelerator)
        if accelerator.mixed_precision == "fp8":
            check_layers(model)
        if strategy == "tensor_parallel":  # without DDP: the processes have different parameters
            model = accelerator.prepare_model(model, evaluation_mode=True)
            return model, accelerator.prepare_optimizer(optimizer)
        prepared = accelerator.prepare(model, optimizer)
        gc.collect()
        if strategy == "ddp":
            ddp = accelerator.ddp_handler
            size = sum(p.numel() * p.element_size() for p in prepared[0].parameters() if p.requires_grad)
            refuse_buckets_that_mix(ddp.comm_hook.value, ddp.bucket_cap_mb, size, accelerator.device.type == "cpu")
        return prepared[0], prepared[1]
    # DeepSpeed builds its fp32 master weights from 16-bit ones; they are replaced by the original values.
    originals: dict[str, Tensor] = {}
    if accelerator.mixed_precision in COMPUTE:
        for name, parameter in model.named_parameters():
            # On all but the main process only the shape and dtype matter.
            originals[name] = parameter.detach().to("cpu" if accelerator.is_main_process else "meta")
            parameter.data = parameter.data.to(COMPUTE[accelerator.mixed_precision])
    if strategy == "deepspeed_zero3":
        partition(accelerator, model)
    engine, optimizer = accelerator.prepare(model, optimizer)
    if originals:
        broadcast_weights(accelerator, pieces_of(engine, optimizer), originals)
        publish_weights(engine)
    gc.collect()
    return engine, optimizer


def refuse_buckets_that_mix(comm_hook: str, bucket_cap_mb: float, size: int, on_cpu: bool) -> None:
    """Refuse PowerSGD on gloo with more than one bucket.

    It sends from several threads there: with more than one bucket the processes send in different orders, and die or
    hang.

    Args:
        size: size of all gradients, in bytes.

    Raises:
        MachineError: the gradients do not fit into one bucket.
    """
    if not on_cpu or "power_sgd" not in comm_hook:
        return
    # With torch's default of 25 MiB the first bucket is smaller than the others.
    cap = dist._DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb == 25 else bucket_cap_mb * 2**20  # type: ignore[attr-defined]
    if size >= cap:
        enough = size // 2**20 + 1
        raise MachineError(
            "distributed.bucket_cap_mb must put all gradients into one bucket when PowerSGD runs on CPU processes, where several "
            f"interfere with each other, got a first bucket of {cap / 2**20:g} MiB for {size / 2**20:.1f} MiB; set "
            f"distributed.bucket_cap_mb={enough + (enough == 25)}"
        )


def release_gathered(model: nn.Module) -> None:
    """Release the weights that were gathered for forward passes without a backward.

    FSDP2 keeps its last units gathered for the backward that usually follows; until then the model's parameters are not
    the ones that the optimizer updates.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_replicas(accelerator: Accelerator, model: nn.Module, step: int) -> None:
    """Compare checksums of the weights that several processes hold as copies.

    Every process must call it; it reads all weights.

    Raises:
        DivergedError: the copies differ, which happens in no correct run: suspect memory, driver or network.
    """
    import xxhash

    local: dict[str, str] = {}
    parts = layer_parts(model)
    for name, parameter in bare_model(model).named_parameters():
        place = f"part {parts.index}" if name in parts.dimension else "whole"
        tensor: Any = parameter.detach()
        if hasattr(parameter, "device_mesh"):
            coordinate = parameter.device_mesh.get_coordinate() or [0]
            place, tensor = f"{place} shard {coordinate[-1]}", tensor.to_local()
        elif hasattr(parameter, "ds_tensor") and not getattr(parameter, "ds_persist", False):
            continue  # every process has a different part
        values = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        local[f"{place}/{name}"] = xxhash.xxh3_128(values.numpy()).hexdigest()
    first: dict[str, tuple[int, str]] = {}
    for process, digests in enumerate(gather_objects(accelerator, local)):
        for key, digest in digests.items():
            owner, expected = first.setdefault(key, (process, digest))
            if digest != expected:
                raise DivergedError(
                    f"parameters must be equal on every process, got a different {key.partition('/')[2]} on process {process} "
                    f"than on process {owner} after step {step}; this step was not saved; check the hardware"
                )


def warm_up(accelerator: Accelerator, model: nn.Module, batch: Batch) -> None:
    """Prepare for the first step: exempt all existing objects from garbage collection, and settle DDP's buckets.

    A full collection in the middle of a step would scan all objects of libraries and model, for half a second. DDP
    regroups its buckets after the first backward: without a throw-away one, the first step after a resume would sum in
    another order than the same step of an uninterrupted run, and the run would no longer be bit-identical.

    Args:
        batch: as large as a micro-batch, so that a compiled model is compiled once, for that size.
    """
    gc.collect()
    gc.freeze()
    if requested_strategy() != "ddp":
        return
    with accelerator.autocast():
        loss = model(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()})
    (loss * 0.0).backward()
    model.zero_grad()
