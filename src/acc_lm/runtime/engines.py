"""Model and optimizer, spread over the processes by the engine that the launch asked for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.data import Batch
from acc_lm.errors import DivergedError, MachineError, UserError
from acc_lm.runtime.launch import asked_strategy
from acc_lm.runtime.pieces import broadcast_weights, pieces_of, publish_weights

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
PART_ELEMENTS = 4096
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """What the main process gets from `function`, or the user's error that it raises there, on every process."""
    from accelerate.utils import broadcast_object_list

    answer: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            answer[0] = function()
        except UserError as error:
            answer[1] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def gather_objects(accelerator: Accelerator, mine: T) -> list[T]:
    """What every process has, in their order, on all of them."""
    if accelerator.num_processes == 1:
        return [mine]
    everyone: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(everyone, mine)
    return everyone


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter as if it were on one process; a tied one once."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in bare_model(model).named_parameters()}


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

    facts = on_main(accelerator, build_here)
    return (built[0] if built else build_empty(facts)), facts


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`accelerator.prepare`, so that every engine starts from the main process's weights in full precision."""
    strategy = asked_strategy()
    if not strategy.startswith("deepspeed"):
        if strategy in ("fsdp2", "hsdp"):
            _check_block_class(accelerator, model)
        prepared = accelerator.prepare(model, optimizer)
        gc.collect()
        return prepared[0], prepared[1]
    # DeepSpeed makes its fp32 master weights from 16-bit ones; they are replaced by what they should have been.
    originals = None
    if accelerator.mixed_precision in COMPUTE:
        originals = [p.detach().clone() if accelerator.is_main_process else p.detach() for p in model.parameters()]
        shapes = [tuple(p.shape) for p in originals]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(COMPUTE[accelerator.mixed_precision])
    if strategy == "deepspeed_zero3":
        _partition(accelerator, model)
    engine, optimizer = accelerator.prepare(model, optimizer)
    if originals is not None:
        pieces = pieces_of(engine, optimizer)
        names = [name for name, _ in bare_model(engine).named_parameters()]
        broadcast_weights(accelerator, pieces, names, originals, shapes)
        publish_weights(engine)
    gc.collect()
    return engine, optimizer


def _check_block_class(accelerator: Accelerator, model: nn.Module) -> None:
    """The unit that is gathered at once is the model's own block class, unless the config names another that exists."""
    plugin = vars(accelerator.state).get("fsdp_plugin")
    if plugin is None:  # Accelerate fell back to something else; `identify` will say so
        return
    there = {type(module).__name__ for module in model.modules()}
    own = getattr(model, "_no_split_modules", None) or []
    named = plugin.transformer_cls_names_to_wrap
    for name in named or []:
        if name not in there:
            raise MachineError(
                f"fsdp_transformer_layer_cls_to_wrap must name a class of the model, got {name}; "
                f"leave it out, the model's own is {', '.join(own) or 'not known'}"
            )
    if named is None:
        # Some models list classes that only their other variants have.
        plugin.transformer_cls_names_to_wrap = [name for name in own if name in there]


def _partition(accelerator: Accelerator, model: nn.Module) -> None:
    """Cut each parameter into this process's share, one after the other, from the main process's values."""
    import deepspeed

    settings = accelerator.deepspeed_plugin.deepspeed_config
    zero = {key: value for key, value in settings["zero_optimization"].items() if value != "auto"}
    deepspeed.zero.Init(
        module=model,
        config_dict_or_path={
            **{key: settings[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu")},
            "gradient_accumulation_steps": settings["gradient_accumulation_steps"],
            "zero_optimization": zero,
            **{name: settings[name] for name in ("bf16", "fp16") if name in settings},
        },
        dtype=next(model.parameters()).dtype,
    )


def bare_model(model: nn.Module) -> nn.Module:
    """The model itself, without the wrappers of strategy and compiler: its parameters have their own names.

    Accelerate's `unwrap_model` does the same, but imports DeepSpeed to ask whether it is one of its engines.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel) or is_deepspeed(model):
            model = model.get_submodule("module")
        elif "_orig_mod" in model.__dict__:  # compiled by regions
            model = model.__dict__["_orig_mod"]
        elif "_orig_mod" in model._modules:  # compiled as a whole
            model = model.get_submodule("_orig_mod")
        else:
            return model


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


def is_deepspeed(model: nn.Module) -> bool:
    return type(model).__module__.startswith("deepspeed.")


def warm_up(accelerator: Accelerator, model: nn.Module, batch: Batch) -> None:
    """One throw-away forward and backward, so that the first step adds gradients in the order of all others.

    DDP regroups its buckets after the first backward. Without this, the first step after a resume would add in another
    order than the same step of an uninterrupted run, and the run would not be bit-identical any more.
    """
    if asked_strategy() != "ddp":
        return
    with accelerator.autocast():
        loss = model(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()})
    (loss * 0.0).backward()
    model.zero_grad()


class Gradients:
    """The gradients of a prepared model: their norm, clipping, and which of them was not finite first.

    Nothing here waits for the device. The norm is exact to rounding on every engine, which torch's own is not on a CPU:
    it adds a tensor's squares one by one in float32 and is off by 1e-5 for a million elements, 4e-4 for ten million.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator = accelerator
        self._named = [(name, p) for name, p in bare_model(model).named_parameters() if p.requires_grad]
        self._first_bad = torch.zeros(len(self._named), device=accelerator.device, dtype=torch.bool)
        self._has_bad = torch.zeros((), device=accelerator.device, dtype=torch.bool)
        self._by_engine = is_deepspeed(model)
        if self._by_engine:  # it clips, and its gradients are reduced and gone when backward returns
            self._seen = torch.zeros_like(self._first_bad)
            for index, (_, parameter) in enumerate(self._named):
                parameter.register_hook(self._hook(index))

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            self._seen[index] |= ~gradient.isfinite().all()

        return look

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale the gradients down to this global norm (None: never); returns the norm that they had.

        Called by every process after the last backward of a step. DeepSpeed has clipped by then, to what it was handed.
        """
        if self._by_engine:
            self._remember(self._seen)
            self._seen = torch.zeros_like(self._seen)
            of_engine = self._accelerator.clip_grad_norm_(None, 0.0)
            return torch.as_tensor(of_engine, device=self._accelerator.device)
        self._accelerator.unscale_gradients()
        # A parameter that no loss depends on has no gradient, and a process may have no row of a sharded one.
        local = [None if p.grad is None else getattr(p.grad, "_local_tensor", p.grad) for _, p in self._named]
        there = [index for index, g in enumerate(local) if g is not None and g.numel()]
        gradients = [g for g in local if g is not None and g.numel()]
        norms = gradient_norms(gradients)
        bad = ~norms.isfinite()
        if len(there) < len(local):
            fine, present = torch.zeros((), dtype=torch.bool, device=bad.device), iter(bad.unbind())
            bad = torch.stack([next(present) if index in there else fine for index in range(len(local))])
        self._remember(bad)
        square = norms.square().sum()
        group = self._shard_group()
        if group is not None:
            dist.all_reduce(square, group=group)
        norm: Tensor = square.sqrt()
        if max_norm is not None:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].dtype))
        return norm

    def _shard_group(self) -> Any:
        """The processes that each hold another part of the gradients."""
        mesh = next((p.device_mesh for _, p in self._named if hasattr(p, "device_mesh")), None)
        return None if mesh is None else mesh.get_group(mesh.ndim - 1)

    def _remember(self, bad: Tensor) -> None:
        self._first_bad = torch.where(self._has_bad, self._first_bad, bad)
        self._has_bad = self._has_bad | bad.any()

    def not_finite(self) -> list[str]:
        """Parameters whose gradient was not finite when that first happened, on any process. Every process calls."""
        bad = self._first_bad.to(torch.int32)
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return [name for (name, _), is_bad in zip(self._named, bad.tolist(), strict=True) if is_bad]


def gradient_norms(gradients: list[Tensor]) -> Tensor:
    """Norm of each tensor, float64 [P] on a CPU, float32 elsewhere, where a device adds in a tree and loses nothing."""
    if gradients[0].device.type != "cpu":
        return torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
    norms = [_norm_by_parts(g) if g.numel() > PART_ELEMENTS and g.dtype != torch.float64 else None for g in gradients]
    small = iter(
        torch._foreach_norm([g for g, n in zip(gradients, norms, strict=True) if n is None] or [gradients[0][:1]])
    )
    return torch.stack([next(small).double() if norm is None else norm for norm in norms])


def _norm_by_parts(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    end = flat.numel() // PART_ELEMENTS * PART_ELEMENTS
    parts = torch.linalg.vector_norm(flat[:end].view(-1, PART_ELEMENTS), dim=1)
    rest = torch.linalg.vector_norm(flat[end:])
    norm: Tensor = torch.linalg.vector_norm(torch.cat([parts.double(), rest.double()[None]]))
    return norm
