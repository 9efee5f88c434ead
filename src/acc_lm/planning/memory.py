"""Memory of a process: the measured micro-batch plus the state that its placement keeps, at the moment of the most."""

from __future__ import annotations

from dataclasses import dataclass

from acc_lm.planning.hardware import GIB
from acc_lm.planning.probe import Checkpointing, Probe
from acc_lm.runtime import MAX_LIVE, Placement

CUDA, NCCL = 0.6 * GIB, 1.0 * GIB
"""Bytes of CUDA's context with its libraries, and of NCCL's buffers."""
ALLOCATOR_LOW, ALLOCATOR_HIGH = 1.08, 1.20
"""Bytes that the allocator holds for a byte of tensors: PR 165 of torchtitan publishes both."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    tensors: float
    """The most that exist at once."""
    low: float
    high: float
    """Range with the allocator, CUDA and NCCL."""
    parts: dict[str, float]
    """The tensors, by what they are."""
    host: float
    """Bytes in the memory of a machine, by all of its processes."""

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def verdict(self, available: float) -> str:
        """yes, tight (the estimate is within its error) or no."""
        return "yes" if self.high <= available else "tight" if self.low <= available else "no"


def memory_of(
    probe: Probe, placement: Placement, micro_batch_size: int, accumulation: int, checkpointing: Checkpointing
) -> MemoryEstimate:
    """Memory of a process that trains with this placement.

    Args:
        accumulation: micro-batches of a step.
    """
    counts = probe.parameters
    body = probe.phases(micro_batch_size, checkpointing, compute=placement.compute)
    head = probe.head(micro_batch_size, compute=placement.compute)
    block = probe.of_one_block(micro_batch_size, checkpointing, compute=placement.compute)
    state = placement.weights * counts.total + placement.state * counts.trained
    gradients = placement.gradients * counts.trained
    held = gradients if accumulation > 1 else 0.0
    at_head, at_backward = (size + placement.buffers for size in _gathered(probe, placement))
    is_cast = placement.compute == "cast"
    # In the dtype of the weight; added to the sum of earlier micro-batches at once, unless it has to be reduced first.
    of_head = head.weight / 2 if is_cast else head.weight
    own = (
        counts.block * counts.trained / counts.total * (2 if placement.compute == "cast" else 4)
    )  # gradients of a block
    at_work = block - own if held and not is_cast else block  # the same for the gradients of a block
    moments = {
        "head": state + held + max(body.forward, body.body + head.forward) + at_head,
        "loss": state + held + body.kept + head.kept + of_head * is_cast + at_head,
        "backward": state + max(held, of_head) + is_cast * min(held, of_head) + body.kept + at_work + at_backward,
        "last block": state + gradients + body.kept / counts.num_blocks + block - own + at_backward,
        "update": state + gradients + placement.buffers,
    }
    where = max(moments, key=lambda name: moments[name])
    most = moments[where]
    gathered = {"head": at_head, "loss": at_head, "update": placement.buffers}.get(where, at_backward)
    summed = gradients if where in ("last block", "update") else held
    activations = {"last block": body.kept / counts.num_blocks, "update": 0.0}.get(where, body.kept)
    parts = {
        "weights and moments": state,
        "gradients": summed,
        "activations": activations,
        "gathered weights and buffers": gathered,
        "at work": most - state - summed - activations - gathered,
    }
    context = CUDA + (NCCL if placement.num_processes > 1 else 0)
    here = placement.num_processes // placement.num_machines
    return MemoryEstimate(
        most,
        most * ALLOCATOR_LOW + context,
        most * ALLOCATOR_HIGH + context,
        parts,
        placement.host * counts.trained * here,
    )


def _gathered(probe: Probe, placement: Placement) -> tuple[float, float]:
    """Bytes of weights that are gathered when the loss is computed, and in the backward pass of a block."""
    counts = probe.parameters
    size = 2 if placement.compute == "cast" else 4
    if placement.gathers == "blocks":
        return float(size * (counts.outside + counts.block)), float(size * (counts.outside + 3 * counts.block))
    if placement.gathers == "all blocks":
        return float(size * (counts.total + counts.block)), float(size * counts.total)
    if placement.gathers == "limited":
        return (float(size * min(counts.total, MAX_LIVE) + size * counts.head),) * 2
    return 0.0, 0.0
