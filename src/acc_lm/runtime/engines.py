"""Model and optimizer, spread over the processes by the engine that the launch asked for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.errors import DivergedError, MachineError, Preempted, UserError
from acc_lm.rows import Batch
from acc_lm.runtime.deepspeed import partition
from acc_lm.runtime.fp8 import check_layers
from acc_lm.runtime.fsdp import block_classes
from acc_lm.runtime.pieces import broadcast_weights, pieces_of, publish_weights
from acc_lm.runtime.strategy import asked_strategy, bare_model

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
PATIENCE = timedelta(days=1)
"""For work of the main process that takes as long as a model is large; a process that dies is noticed at once all the same."""


def on_main(accelerator: Accelerator, function: Callable[[], T], group: Any = None, *, takes_long: bool = False) -> T:
    """What the main process gets from `function`, or the user's error or stop that it raises there, on every process.

    Args:
        group: all processes, in a group of their own; None: the one that training uses.
        takes_long: reads or writes a whole model, for which the others wait longer than `distributed.timeout_seconds`.
    """
    answer: list[Any] = [None, None]
    if takes_long and accelerator.num_processes > 1:
        group = _patient_group(dist.group.WORLD)
    if accelerator.is_main_process:
        try:
            answer[0] = function()
        except (UserError, Preempted) as error:
            answer[1] = error
    if accelerator.num_processes > 1:
        dist.broadcast_object_list(answer, src=0, group=group)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


@cache
def _patient_group(world: Any) -> Any:
    """All processes of `world`, on the CPU, which wait for each other as long as `PATIENCE`. Every process calls."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def gather_objects(accelerator: Accelerator, mine: T, group: Any = None) -> list[T]:
    """What every process has, in their order, on all of them; `group` as for `on_main`."""
    if accelerator.num_processes == 1:
        return [mine]
    everyone: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter as if it were on one process; a tied one once."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in bare_model(model).named_parameters()}


def keep_libraries() -> None:
    """What exists by now stays, and the garbage collector does not look at it any more.

    The libraries make hundreds of thousands of objects. To look at them again and again while they are loaded, and at
    each full collection afterwards, takes a third of the time from the start of a process to its first step.
    """
    _load_schedules()
    gc.freeze()
    gc.enable()


def _load_schedules() -> None:
    """transformers' schedules without what comes with them: the base of its Trainer, which loads peft, and peft bitsandbytes.

    That is a quarter of the time to the first step. Whoever imports that base afterwards gets all of it.
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
    """The model before `prepare`, and what is known about it.

    An engine that shards parameters gets its weights from the main process: the others build the same model around
    memory that is reserved and never touched, so no process but one ever holds the whole of a large model.
    """
    if asked_strategy() not in ("fsdp2", "hsdp", "deepspeed_zero3"):
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
    """`accelerator.prepare`, so that every engine starts from the main process's weights in full precision."""
    strategy = asked_strategy()
    if not strategy.startswith("deepspeed"):
        if strategy in ("fsdp2", "hsdp"):
            plugin = vars(accelerator.state).get("fsdp_plugin")
            if plugin is not None:  # else Accelerate fell back to something else; `identify` will say so
                plugin.transformer_cls_names_to_wrap = block_classes(model)
        if accelerator.mixed_precision == "fp8":
            check_layers(model)
        prepared = accelerator.prepare(model, optimizer)
        gc.collect()
        if strategy == "ddp":
            ddp = accelerator.ddp_handler
            size = sum(p.numel() * p.element_size() for p in prepared[0].parameters() if p.requires_grad)
            refuse_buckets_that_mix(ddp.comm_hook.value, ddp.bucket_cap_mb, size, accelerator.device.type == "cpu")
        return prepared[0], prepared[1]
    # DeepSpeed makes its fp32 master weights from 16-bit ones; they are replaced by what they should have been.
    originals: dict[str, Tensor] = {}
    if accelerator.mixed_precision in COMPUTE:
        for name, parameter in model.named_parameters():
            # Elsewhere than on the main process only the shape and type matter.
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
    """On gloo PowerSGD sends from several threads: with more than one bucket the processes do it in different orders, and die or hang.

    Args:
        size: of all gradients, in bytes.

    Raises:
        MachineError: they do not fit into one bucket.
    """
    if not on_cpu or "power_sgd" not in comm_hook:
        return
    # By torch's own default of 25 MiB the first bucket is a small one.
    cap = dist._DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb == 25 else bucket_cap_mb * 2**20  # type: ignore[attr-defined]
    if size >= cap:
        enough = size // 2**20 + 1
        raise MachineError(
            "distributed.bucket_cap_mb must put all gradients into one bucket when PowerSGD runs on CPU processes, where several get in "
            f"each other's way, got a first bucket of {cap / 2**20:g} MiB for {size / 2**20:.1f} MiB; set "
            f"distributed.bucket_cap_mb={enough + (enough == 25)}"
        )


def release_gathered(model: nn.Module) -> None:
    """After forward passes that no backward follows: give up the weights that were gathered for them.

    FSDP2 keeps its last units whole for the backward that usually comes; until then the model's parameters are not the
    ones that the optimizer updates.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_replicas(accelerator: Accelerator, model: nn.Module, step: int) -> None:
    """Compare checksums of what several processes hold in copy. Every process calls; reads all weights.

    Raises:
        DivergedError: the copies differ, which no correct run does: memory, driver or network.
    """
    import xxhash

    mine: dict[str, str] = {}
    for name, parameter in bare_model(model).named_parameters():
        place = "whole"
        tensor: Any = parameter.detach()
        if hasattr(parameter, "device_mesh"):
            coordinate = parameter.device_mesh.get_coordinate() or [0]
            place, tensor = f"shard {coordinate[-1]}", tensor.to_local()
        elif hasattr(parameter, "ds_tensor") and not getattr(parameter, "ds_persist", False):
            continue  # every process has another part
        values = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        mine[f"{place}/{name}"] = xxhash.xxh3_128(values.numpy()).hexdigest()
    first: dict[str, tuple[int, str]] = {}
    for process, digests in enumerate(gather_objects(accelerator, mine)):
        for key, digest in digests.items():
            owner, expected = first.setdefault(key, (process, digest))
            if digest != expected:
                raise DivergedError(
                    f"parameters must be equal on every process, got another {key.partition('/')[2]} on process {process} "
                    f"than on process {owner} after step {step}; nothing of this step was saved: look at the hardware"
                )


def warm_up(accelerator: Accelerator, model: nn.Module, batch: Batch) -> None:
    """Before the first step: what exists by now is out of the garbage collector's sight, and DDP's buckets are in order.

    A full collection looks at all that libraries and model have made, in the middle of a step, half a second long. And
    DDP regroups its buckets after the first backward: without a throw-away one, the first step after a resume would add
    in another order than the same step of an uninterrupted run, and the run would not be bit-identical any more.

    Args:
        batch: as large as a micro-batch, so that a model that is compiled is compiled once, for that size.
    """
    gc.collect()
    gc.freeze()
    if asked_strategy() != "ddp":
        return
    with accelerator.autocast():
        loss = model(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()})
    (loss * 0.0).backward()
    model.zero_grad()
