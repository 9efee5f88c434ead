"""One optimizer step: the gradient of the mean loss over the targets of a global batch, clipped and applied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from acc_lm.modeling.router import Router, RouterLoss
from acc_lm.rows.batch import Batch, to_device
from acc_lm.runtime import parts_of_layers, parts_of_rows, repeats_losses

if TYPE_CHECKING:
    from accelerate import Accelerator

    from acc_lm.runtime import Gradients


@dataclass(frozen=True)
class StepResult:
    """Result of one step; its tensors stay on the device, because reading one synchronises.

    They are read only when a step is logged or checked.
    """

    nll: Tensor
    """Summed loss of this process's targets, scalar, nats; 0 if another process has counted them."""
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

    Engines average gradients over processes that read different rows, and `backward` divides by the number of micro-batches. Both are undone and
    the sum of losses is divided by the targets of the global batch, so the result does not depend on the split into
    micro-batches and processes.

    Args:
        micro_batches: this process's `accelerator.gradient_accumulation_steps` micro-batches.
        step: number of the step, first = 1; with `seed` it decides the dropout masks, so that a resumed run draws the same.
        num_targets: targets in the global batch, over all processes.
        max_grad_norm: norm to clip the gradient to; None: no clipping.
        gradients: gradients of this model.
        router: router of a mixture of experts, whose load-balancing loss is added. An exact router must know the experts of
            all tokens of the global batch before the first backward, so several micro-batches need an extra forward pass.
    """
    num_parts = accelerator.num_processes // parts_of_layers() * accelerator.gradient_accumulation_steps
    scale = num_parts / max(num_targets, 1)
    nll = torch.zeros((), device=accelerator.device)
    grad_norm = nll

    def seed_masks(micro_batch: int) -> None:
        state = _random_state(seed, step, micro_batch, accelerator.process_index // parts_of_layers())
        set_random_state(state, accelerator.device)

    router_loss = None
    if router is not None:
        router_loss = RouterLoss(accelerator, router, num_parts // parts_of_rows(), parts_of_rows())
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
    return StepResult(_counted_once(accelerator, nll), grad_norm, num_targets, router_loss)


def _counted_once(accelerator: Accelerator, nll: Tensor) -> Tensor:
    """Sum of the losses of this process's targets, or 0 if another process counts them."""
    return torch.zeros_like(nll) if repeats_losses(accelerator) else nll


def _count_choices(
    accelerator: Accelerator,
    model: nn.Module,
    micro_batches: list[Batch],
    seed_masks: Callable[[int], None],
    num_choices: int,
) -> Tensor:
    """Number of times this process's micro-batches choose each expert, int64 [E], under the step's dropout masks."""
    choices_E: Tensor | None = None
    for i, batch in enumerate(micro_batches):
        seed_masks(i)
        with torch.no_grad():
            chosen = model(**to_device(batch, accelerator.device), num_choices=num_choices, only_choices=True)
        choices_E = chosen if choices_E is None else choices_E + chosen
    assert choices_E is not None
    return choices_E


def set_random_state(state: int, device: torch.device) -> None:
    """Seed the random generators of the CPU and this device alone.

    `torch.manual_seed` also records the call, with the full Python stack, for each kind of device that is absent, which
    takes a tenth of a millisecond per call.
    """
    torch.default_generator.manual_seed(state)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(state)  # a Mac has one GPU and no manual_seed_all


def _random_state(seed: int, step: int, micro_batch: int, process: int) -> int:
    text = f"{seed} {step} {micro_batch} {process}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def in_steps(batches: Iterable[Batch], num_micro_batches: int) -> Iterator[Iterator[Batch]]:
    """Group batches into steps: one iterator over `num_micro_batches` micro-batches per step."""
    iterator = iter(batches)
    for first in iterator:
        yield _one_step(first, iterator, num_micro_batches)


def _one_step(first: Batch, rest: Iterator[Batch], num_micro_batches: int) -> Iterator[Batch]:
    yield first
    for _ in range(num_micro_batches - 1):
        yield next(rest)
