"""Gradients of a prepared model: exact norm, clipping, and the names of the non-finite ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.runtime.engines.tensor_parallel import layer_parts
from acc_lm.runtime.settings.strategy import bare_model, is_deepspeed

if TYPE_CHECKING:
    from accelerate import Accelerator

PART_ELEMENTS = 4096
HEEDS_FOUND_INF = ("cpu", "cuda")
"""Device types on which torch's fused optimizer skips a step if `found_inf` is set; others (MPS) wait for the norm."""


class Gradients:
    """Gradients of a prepared model: their norm, clipping, and the steps in which one of them was non-finite.

    Such a step updates nothing on any process: DeepSpeed skips it by itself, torch's fused optimizer if `found_inf` is
    set. Clipping gradients on a GPU does not wait for it. The norm is exact to rounding on every engine. torch's own norm is not
    exact on a CPU: it adds a tensor's squares one by one in float32, and is off by 1e-5 for a million elements and by
    4e-4 for ten million.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator = accelerator
        self._named = [(name, p) for name, p in bare_model(model).named_parameters() if p.requires_grad]
        self._unread: list[Tensor] = []
        """One tensor for each step since the last reading, bool [P]: which parameters had a non-finite gradient."""
        self._gradient_device = self._named[0][1].device  # the CPU if parameters are offloaded
        self._by_engine = is_deepspeed(model)
        self._parts = layer_parts(model)
        if self._by_engine:  # the engine clips, and its gradients are reduced and freed when backward returns
            self._engine: Any = model
            self._sums = torch.zeros(len(self._named), device=accelerator.device)
            """Sum of the elements of each gradient [P], finite only if all of them are."""
            for index, (_, parameter) in enumerate(self._named):
                parameter.register_hook(self._hook(index))

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            self._sums[index] += gradient.sum(dtype=torch.float32)  # without a temporary of the gradient's size

        return look

    def clip(self, max_norm: float | None, optimizer: Any) -> Tensor:
        """Scale the gradients down to the global norm `max_norm` (None: never), and return their norm before that.

        Every process must call it after the last backward of a step. DeepSpeed has clipped by then, to the norm in its
        own settings. If the norm is not finite, `optimizer` will skip the update that follows.
        """
        if self._by_engine:
            self._unread.append(~self._sums.isfinite())
            self._sums = torch.zeros_like(self._sums)
            # The engine's own norm is a tensor, or a float after an overflow; Accelerate would read it, and wait.
            of_engine = self._engine.get_global_grad_norm()
            if isinstance(of_engine, Tensor):
                return of_engine.to(self._accelerator.device)
            return torch.full((), of_engine, device=self._accelerator.device)
        self._accelerator.unscale_gradients()
        local = [_local_gradient(parameter) for _, parameter in self._named]
        gradients = [gradient for gradient in local if gradient is not None]
        if self._parts.size > 1:
            self._sum_of_each_head()
        norms = gradient_norms(gradients, self._gradient_device)
        bad = ~norms.isfinite()
        if len(gradients) < len(local):
            present, fine = iter(bad.unbind()), torch.zeros((), device=bad.device, dtype=torch.bool)
            bad = torch.stack([fine if gradient is None else next(present) for gradient in local])
        self._unread.append(bad.to(self._accelerator.device))
        norm: Tensor = self._sum_of_squares(norms, local).sqrt()
        if max_norm is not None and gradients:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0]))
        inner = getattr(optimizer, "optimizer", optimizer)
        if self._gradient_device.type not in HEEDS_FOUND_INF and not norm.isfinite():
            for _, parameter in self._named:  # without gradients nothing is updated
                parameter.grad = None
        elif inner.defaults.get("fused") and self._accelerator.scaler is None:  # a scaler does the same
            inner.found_inf = (~norm.isfinite()).to(self._gradient_device, torch.float32)
        return norm

    def _sum_of_squares(self, norms: Tensor, local: list[Tensor | None]) -> Tensor:
        """Squared global norm: each element counts once, however many processes hold it."""
        squares = norms.square()
        if self._parts.size == 1:
            sums = squares.sum()[None]
        else:
            names = [name for (name, _), gradient in zip(self._named, local, strict=True) if gradient is not None]
            of_parts = [square for name, square in zip(names, squares, strict=True) if name in self._parts.dimension]
            others = [square for name, square in zip(names, squares, strict=True) if name not in self._parts.dimension]
            sums = torch.stack(
                [torch.stack(each).sum() if each else squares.new_zeros(()) for each in (of_parts, others)]
            )
        sums = sums.to(self._accelerator.device)  # the processes communicate there
        group = self._shard_group()
        if group is not None:
            dist.all_reduce(sums, group=group)
        if self._parts.size > 1:
            self._parts.sum(sums[:1])
        return sums.sum()

    def _sum_of_each_head(self) -> None:
        """Sum the gradients of parameters that each head uses, once for all micro-batches and parameters."""
        named = dict(self._named)
        found = [named[name] for name in self._parts.of_each_head if name in named]
        gradients = [gradient for each in found if (gradient := _local_gradient(each)) is not None]
        if gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(self._accelerator.device)
            summed = self._parts.sum(flat).to(gradients[0].device)
            torch._foreach_copy_(
                gradients,
                [
                    each.view_as(g)
                    for each, g in zip(summed.split([g.numel() for g in gradients]), gradients, strict=True)
                ],
            )

    @property
    def loss_scale(self) -> float:
        """Loss scale under fp16, else 1. Reading it waits for the device."""
        scaler = self._accelerator.scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def drop(self) -> None:
        """Drop the gradients after the update.

        Other work in torch's and Accelerate's `zero_grad` would cost a twentieth of a small model's step.
        """
        if not self._by_engine:  # the engine's are freed by then
            for _, parameter in self._named:
                parameter.grad = None

    def _shard_group(self) -> Any:
        """Group of the processes that each hold a different part of the gradients; None if they are not sharded."""
        mesh = next((p.device_mesh for _, p in self._named if hasattr(p, "device_mesh")), None)
        return None if mesh is None else mesh.get_group(mesh.ndim - 1)

    def not_finite(self) -> list[list[str]]:
        """Names of the parameters with a non-finite gradient on any process, for each step since the last call.

        Every process must call it.
        """
        if not self._unread:
            return []
        bad = torch.stack(self._unread).to(torch.int32)
        self._unread = []
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        names = [name for name, _ in self._named]
        return [[name for name, is_bad in zip(names, row, strict=True) if is_bad] for row in bad.tolist()]


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """This process's part of a gradient; None if no loss depends on the parameter, or the process has no row of it."""
    gradient: Tensor | None = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return gradient if gradient is not None and gradient.numel() else None


def gradient_norms(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Norm of each tensor [P]: float64 on a CPU; float32 elsewhere, where devices sum in a tree and lose nothing."""
    kept = torch.float64 if device.type == "cpu" else torch.float32
    if not gradients:
        return torch.zeros(0, device=device, dtype=kept)
    adds_in = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32  # 16-bit gradients too
    if device.type != "cpu":
        return torch.stack([norm.to(kept) for norm in torch._foreach_norm(gradients, dtype=adds_in)])
    if adds_in == kept or max(g.numel() for g in gradients) <= PART_ELEMENTS:
        return torch.stack(torch._foreach_norm(gradients, dtype=adds_in)).to(kept)
    is_large = [g.numel() > PART_ELEMENTS for g in gradients]
    small = [g for g, large in zip(gradients, is_large, strict=True) if not large]
    norms = iter(torch.stack(torch._foreach_norm(small, dtype=adds_in)).to(kept).unbind() if small else ())
    return torch.stack(
        [_norm_by_parts(g) if large else next(norms) for g, large in zip(gradients, is_large, strict=True)]
    )


def _norm_by_parts(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    end = flat.numel() // PART_ELEMENTS * PART_ELEMENTS
    parts = torch.linalg.vector_norm(flat[:end].view(-1, PART_ELEMENTS), dim=1, dtype=torch.float32)
    if end < flat.numel():
        parts = torch.cat([parts, torch.linalg.vector_norm(flat[end:], dtype=torch.float32)[None]])
    norm: Tensor = torch.linalg.vector_norm(parts, dtype=torch.float64)
    return norm
