"""One optimizer step: the gradient of the mean loss over the targets of a global batch, clipped and applied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from acc_lm.router import Router, RouterLoss
from acc_lm.rows import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from acc_lm.runtime import Gradients


@dataclass(frozen=True)
class StepResult:
    """Tensors stay on the device: reading one synchronises, so only a step that is logged is read."""

    nll: Tensor
    """Summed loss of this process's targets, scalar, nats."""
    grad_norm: Tensor
    """Global gradient norm before clipping, scalar."""
    num_targets: int
    """Targets in the global batch."""
    router_loss: RouterLoss | None = None
    """Load-balancing loss of a mixture of experts; None for other models."""


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Batch],
    *,
    step: int,
    seed: int,
    num_targets: int,
    max_grad_norm: float | None,
    gradients: Gradients,
    router: Router | None = None,
) -> StepResult:
    """Accumulate over this process's micro-batches, clip and update.

    Engines average gradients over processes, and `backward` divides by the number of micro-batches. Both are undone and
    the sum of losses is divided by the targets of the global batch, so no split into micro-batches and processes shows.

    Args:
        micro_batches: as many as `accelerator.gradient_accumulation_steps`.
        step: first = 1; with `seed` it decides the dropout masks, so that a resumed run draws the same ones.
        num_targets: in the global batch, over all processes.
        max_grad_norm: None for no clipping.
        gradients: of this model.
        router: of a mixture of experts, whose load-balancing loss is added. An exact one must know where all tokens of the
            global batch go before the first backward: a forward pass of its own, unless there is one micro-batch.
    """
    num_parts = accelerator.num_processes * accelerator.gradient_accumulation_steps
    scale = num_parts / max(num_targets, 1)
    nll = torch.zeros((), device=accelerator.device)
    grad_norm = nll

    def seed_masks(micro_batch: int) -> None:
        state = _random_state(seed, step, micro_batch, accelerator.process_index)
        set_random_state(state, accelerator.device)

    router_loss = None
    if router is not None:
        router_loss = RouterLoss(accelerator, router, num_parts)
        if router.is_exact and accelerator.gradient_accumulation_steps > 1:
            micro_batches = list(micro_batches)
            router_loss.know_choices(_count_choices(accelerator, model, micro_batches, seed_masks, router.num_choices))
    for i, batch in enumerate(micro_batches):
        seed_masks(i)
        with accelerator.accumulate(model):
            inputs = to_device(batch, accelerator.device)
            if router_loss is None:
                loss = model(**inputs)
                accelerator.backward(loss * scale)
            else:
                routed = model(**inputs, num_choices=router_loss.router.num_choices)
                loss = routed.nll
                accelerator.backward(loss * scale + router_loss.part_of(routed) * num_parts)
            nll = nll + loss.detach()
            if accelerator.sync_gradients:
                grad_norm = gradients.clip(max_grad_norm, optimizer)
                optimizer.step()
                gradients.drop()
    return StepResult(nll, grad_norm, num_targets, router_loss)


def _count_choices(
    accelerator: Accelerator,
    model: nn.Module,
    micro_batches: list[Batch],
    seed_masks: Callable[[int], None],
    num_choices: int,
) -> Tensor:
    """Times that this process's micro-batches choose each expert, int64 [E], under the dropout masks that they will have."""
    choices_E: Tensor | None = None
    for i, batch in enumerate(micro_batches):
        seed_masks(i)
        with torch.no_grad():
            chosen = model(**to_device(batch, accelerator.device), num_choices=num_choices, only_choices=True)
        choices_E = chosen if choices_E is None else choices_E + chosen
    assert choices_E is not None
    return choices_E


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def set_random_state(state: int, device: torch.device) -> None:
    """`torch.manual_seed` for the CPU and this device alone.

    That one, for each kind of device that is not here, notes down the call with the whole Python stack: a tenth of a
    millisecond, in every step.
    """
    torch.default_generator.manual_seed(state)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(state)  # a Mac has one GPU and no word for all


def _random_state(seed: int, step: int, micro_batch: int, process: int) -> int:
    text = f"{seed} {step} {micro_batch} {process}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def in_steps(batches: Iterable[Batch], num_micro_batches: int) -> Iterator[Iterator[Batch]]:
    """The micro-batches of one step after the other."""
    iterator = iter(batches)
    for first in iterator:
        yield _one_step(first, iterator, num_micro_batches)


def _one_step(first: Batch, rest: Iterator[Batch], num_micro_batches: int) -> Iterator[Batch]:
    yield first
    for _ in range(num_micro_batches - 1):
        yield next(rest)
