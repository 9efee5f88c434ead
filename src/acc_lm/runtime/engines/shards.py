"""Pieces: the parts of each tensor that this process holds under any engine; checkpoints and exports consist of them.

Each tensor of a model, and of its optimizer's state, is treated as one-dimensional; a process owns contiguous pieces of
it, or of a block of its columns. All engines here shard in this way, so one format serves them all: any engine can read
what any engine wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.errors import MachineError
from acc_lm.optimization.muon import MOMENTS, local, moments
from acc_lm.runtime.engines.rectangles import rectangles
from acc_lm.runtime.engines.tensor_parallel import LayerParts, layer_parts
from acc_lm.runtime.settings.strategy import bare_model, is_deepspeed

if TYPE_CHECKING:
    from accelerate import Accelerator

WEIGHT = "param"


@dataclass(frozen=True)
class Piece:
    """Contiguous part of one named tensor, and of the optimizer's moments of the same shape."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    start: int
    length: int
    get: Callable[[str], Tensor]
    """Function: kind (`WEIGHT` or a moment) -> 1-D tensor of `length` elements in full precision."""
    put: Callable[[str, Tensor], None]
    is_trained: bool = True
    replica: tuple[int, int] = (0, 1)
    """(index of this process among those that hold this same piece, their number)."""
    moments: tuple[str, ...] = MOMENTS
    columns: tuple[int, int] | None = None
    """(first, number) of the tensor's columns that the elements are counted in and taken from; None: all of them."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return (WEIGHT, *self.moments) if self.is_trained else (WEIGHT,)

    def share(self) -> tuple[int, int]:
        """Return (first, past the last) element of the piece that this process writes: replicas share the work."""
        index, count = self.replica
        size = -(-self.length // count)
        return min(index * size, self.length), min((index + 1) * size, self.length)


def pieces_of(model: nn.Module, optimizer: Any) -> list[Piece]:
    """List the pieces of a prepared model and its optimizer on this process."""
    inner = getattr(optimizer, "optimizer", optimizer)
    named = list(bare_model(model).named_parameters())
    if not is_deepspeed(model):
        return list(_torch_pieces(named, inner, layer_parts(model)))
    if hasattr(inner, "fp32_partitioned_groups_flat"):
        return list(_zero3_pieces(named))
    return list(_zero12_pieces(named, inner))


def _torch_pieces(
    named: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, parts: LayerParts
) -> Iterator[Piece]:
    """Yield the pieces for torch's optimizer (single, DDP, FSDP2, HSDP, tensor parallel).

    Engines hold full parameters, or cut along dimension 0; parts of layers are also cut along dimension 1.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kept = {parameter: moments(group) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in named:
        start, replica = 0, (rank, world)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
            if any(offset[1:]):
                raise MachineError(
                    f"parameters must be cut along their first dimension, got another for {name}; use accelerate_configs/fsdp2.yaml"
                )
            start = offset[0] * math.prod(parameter.shape[1:]) if offset else 0
            coordinate = mesh.get_coordinate()
            replica = (coordinate[0], mesh.size(0)) if mesh.ndim == 2 and coordinate else (parts.index, parts.size)
        columns = None
        if name in parts.dimension:
            replica = (0, 1)
            if parts.dimension[name] == 0:
                start += parts.first[name] * math.prod(parameter.shape[1:])
            else:
                columns = (parts.first[name], parameter.shape[1])
        length = local(parameter).numel()
        if length == 0:
            continue

        def view(kind: str, parameter: nn.Parameter = parameter) -> Tensor:
            if kind != WEIGHT and kind not in optimizer.state[parameter]:  # it never had a gradient
                return torch.zeros_like(local(parameter.detach())).view(-1)
            tensor = parameter if kind == WEIGHT else optimizer.state[parameter][kind]
            return local(tensor.detach()).view(-1)

        def put(kind: str, values: Tensor, view: Callable[[str], Tensor] = view) -> None:
            view(kind).copy_(values)

        yield Piece(
            name,
            parts.shape(name, parameter),
            start,
            length,
            view,
            put,
            parameter.requires_grad,
            replica,
            kept.get(parameter, ()),
            columns,
        )


def _of(flat: Tensor) -> tuple[Callable[[str], Tensor], Callable[[str, Tensor], None]]:
    """Build `get` and `put` for a tensor without optimizer state."""

    def put(kind: str, values: Tensor) -> None:
        flat.copy_(values)

    return (lambda kind: flat), put


def _zero12_pieces(named: list[tuple[str, nn.Parameter]], optimizer: Any) -> Iterator[Piece]:
    """Yield the pieces of ZeRO-1 and 2: 16- or 32-bit weights on every process, fp32 weights and moments partitioned.

    The flat partitions are private attributes of DeepSpeed 0.19, whose own `safe_get_full_optimizer_state` fails for all
    parameter groups but the first.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    flats = _flat_partitions(optimizer) or []
    parameter: Any
    for name, parameter in named:
        shape = tuple(parameter.shape)
        if not parameter.requires_grad:
            flat = parameter.data.view(-1)
            yield Piece(name, shape, 0, flat.numel(), *_of(flat), is_trained=False, replica=(rank, world))
            continue
        mapping = parameter._hp_mapping
        if mapping is None:  # none of it on this process
            continue

        def view(kind: str, mapping: Any = mapping) -> Tensor:
            flat = flats[mapping.param_group_index]
            tensor = flat.detach() if kind == WEIGHT else optimizer.optimizer.state[flat][kind]
            address = mapping.hp_fragment_address
            part: Tensor = tensor.narrow(0, address.start, address.numel)
            return part

        def put(kind: str, values: Tensor, view: Callable[[str], Tensor] = view) -> None:
            view(kind).copy_(values)

        address = mapping.lp_fragment_address
        yield Piece(name, shape, address.start, address.numel, view, put)


def _flat_partitions(optimizer: Any) -> list[Tensor] | None:
    """DeepSpeed's flat full-precision weights of this process, one tensor for each parameter group; else None."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return None


def _zero3_pieces(named: list[tuple[str, nn.Parameter]]) -> Iterator[Piece]:
    """Yield the pieces of ZeRO-3: every parameter is cut into equal shares, the last one padded."""
    from deepspeed.utils import (
        safe_get_local_fp32_param,
        safe_get_local_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    rank = dist.get_rank()
    parameter: Any
    for name, parameter in named:
        padded = parameter.ds_tensor.numel()
        start = rank * padded
        length = min(padded, parameter.ds_numel - start)
        if length <= 0:
            continue

        def get(kind: str, parameter: Any = parameter, length: int = length) -> Tensor:
            if not parameter.requires_grad:
                frozen: Tensor = parameter.ds_tensor.data[:length]
                return frozen
            full = (
                safe_get_local_fp32_param(parameter)
                if kind == WEIGHT
                else safe_get_local_optimizer_state(parameter, kind)
            )
            part: Tensor = full.detach().view(-1)[:length]
            return part

        def put(
            kind: str, values: Tensor, parameter: Any = parameter, padded: int = padded, length: int = length
        ) -> None:
            if not parameter.requires_grad:
                parameter.ds_tensor.data[:length].copy_(values)
                return
            if padded != length:
                values = torch.cat([values, values.new_zeros(padded - length)])
            if kind == WEIGHT:
                safe_set_local_fp32_param(parameter, values)
            else:
                safe_set_local_optimizer_state(parameter, values, kind)

        yield Piece(name, tuple(parameter.ds_shape), start, length, get, put, parameter.requires_grad)


def full_precision(model: nn.Module, parameter: nn.Parameter) -> torch.dtype:
    """Data type of the weights that the engine updates: DeepSpeed keeps fp32 weights next to those it computes with."""
    return torch.float32 if is_deepspeed(model) and parameter.requires_grad else parameter.dtype


# --- the optimizer's state as a whole ------------------------------------------------------------------------------


def _state_tensors(optimizer: Any) -> tuple[Any, list[Tensor]]:
    """Return (the inner torch or CPU optimizer, the tensors that it holds state for)."""
    wrapped = getattr(optimizer, "optimizer", optimizer)
    flats = _flat_partitions(wrapped)
    if flats is not None:
        return wrapped.optimizer, flats
    return wrapped, [p for group in wrapped.param_groups for p in group["params"]]


def count_updates(optimizer: Any) -> int:
    """Number of updates that the optimizer has made, on which its bias correction depends."""
    inner, tensors = _state_tensors(optimizer)
    steps = [inner.state[t]["step"] for t in tensors if t in inner.state and "step" in inner.state[t]]
    if steps and isinstance(steps[0], Tensor):  # one wait for the device instead of one for each
        steps = torch.stack(steps).tolist()
    return int(max(steps, default=0))


def start_state(optimizer: Any, num_updates: int) -> None:
    """Give the optimizer its state after `num_updates` updates, with zero moments that are to be filled in later."""
    inner, tensors = _state_tensors(optimizer)
    of_torch = isinstance(inner, torch.optim.AdamW)
    groups = {p: group for group in inner.param_groups for p in group["params"]}
    for tensor in tensors:
        step: Any = num_updates
        group = groups.get(tensor, {})
        if of_torch:
            where = local(tensor).device if group.get("fused") or group.get("capturable") else "cpu"
            step = torch.tensor(float(num_updates), device=where)
        inner.state[tensor] = {
            "step": step,
            **{kind: torch.zeros_like(tensor.detach()) for kind in moments(group)},
        }
    if hasattr(inner, "ds_opt_adam"):
        # Its C++ side keeps beta^t as a running product: replay the updates on a throw-away element.
        group = inner.param_groups[0]
        nothing = [torch.zeros(1) for _ in range(4)]
        for i in range(1, num_updates + 1):
            inner.ds_opt_adam.adam_update(inner.opt_id, i, 0.0, *group["betas"], group["eps"], 0.0, True, *nothing)


def publish_weights(model: nn.Module) -> None:
    """Make the engine compute with the weights that were written with `put`."""
    if not is_deepspeed(model):
        return
    optimizer: Any = model.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    else:
        optimizer.update_lp_params()


# --- full tensors, one at a time ----------------------------------------------------------------------------------


def gather_tensor(
    accelerator: Accelerator, pieces: list[Piece], kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Gather the full tensor from its pieces: all of one name, or none on a process that holds no part of it.

    The result is exact to the bit: processes sum bytes, and all but one of them add zero. Every process must call it.
    """
    full = torch.zeros(math.prod(shape), dtype=dtype, device=accelerator.device)
    for piece in pieces:
        first, last = piece.share()
        values = piece.get(kind)[first:last]
        if piece.columns is None:
            full[piece.start + first : piece.start + last] = values
            continue
        for each in rectangles(piece.start + first, last - first, *piece.columns):
            block = full.view(shape)[each.top : each.bottom, each.left : each.right]
            block.copy_(values[each.at : each.at + each.size].view_as(block))
    if accelerator.num_processes > 1:
        dist.all_reduce(full.view(torch.uint8))
    return full.view(shape)


def broadcast_weights(accelerator: Accelerator, pieces: list[Piece], weights: dict[str, Tensor]) -> None:
    """Put the main process's weights into all processes' pieces, tensor by tensor; elsewhere `weights` is on `meta`."""
    by_name: dict[str, list[Piece]] = {name: [] for name in weights}
    for piece in pieces:
        by_name[piece.name].append(piece)
    for name, tensor in weights.items():
        if accelerator.is_main_process:
            full = tensor.to(accelerator.device)
        else:
            full = torch.empty_like(tensor, device=accelerator.device)
        dist.broadcast(full, 0)
        for piece in by_name[name]:
            piece.put(WEIGHT, full.view(-1)[piece.start : piece.start + piece.length].float())
