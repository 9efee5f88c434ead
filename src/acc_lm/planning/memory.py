"""Memory of a process: the measured micro-batch plus the state that its layout keeps, at the moment of the most."""

from __future__ import annotations

from dataclasses import dataclass

from acc_lm.planning.probe import Checkpointing, Probe
from acc_lm.runtime import LIVE, Layout

GIB = 2**30
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

    def verdict(self, available: float) -> str:
        """yes, tight (the estimate is within its error) or no."""
        return "yes" if self.high <= available else "tight" if self.low <= available else "no"


def memory_of(
    probe: Probe, layout: Layout, micro_batch_size: int, accumulation: int, checkpointing: Checkpointing
) -> MemoryEstimate:
    """Memory of a process that trains with this layout.

    Args:
        accumulation: micro-batches of a step.
    """
    counts = probe.parameters
    body = probe.phases(micro_batch_size, checkpointing, compute=layout.compute)
    head = probe.head(micro_batch_size, compute=layout.compute)
    block = probe.of_one_block(micro_batch_size, checkpointing, compute=layout.compute)
    state = layout.weights * counts.total + layout.trained * counts.trained
    gradients = layout.gradients * counts.trained
    held = gradients if accumulation > 1 else 0.0
    at_head, at_backward = (size + layout.buckets for size in _gathered(probe, layout))
    of_head = head.weight if layout.compute != "cast" else head.weight / 2  # in the dtype of the weight
    moments = {
        "head": state + held + max(body.forward, body.body + head.forward) + at_head,
        "loss": state + held + body.kept + head.kept + of_head * (layout.compute == "cast") + at_head,
        "backward": state + held + body.kept + of_head + block + at_backward,
        "update": state + gradients + layout.buckets,
    }
    where = max(moments, key=lambda name: moments[name])
    most = moments[where]
    kept = body.kept + head.kept
    gathered = {"head": at_head, "loss": at_head, "backward": at_backward, "update": layout.buckets}[where]
    summed = gradients if where == "update" else held
    activations = 0.0 if where == "update" else kept
    parts = {
        "weights and moments": state,
        "gradients": summed,
        "activations": activations,
        "gathered weights and buffers": gathered,
        "at work": most - state - summed - activations - gathered,
    }
    context = CUDA + (NCCL if layout.num_processes > 1 else 0)
    here = layout.num_processes // layout.num_machines
    return MemoryEstimate(
        most,
        most * ALLOCATOR_LOW + context,
        most * ALLOCATOR_HIGH + context,
        parts,
        layout.host * counts.trained * here,
    )


def _gathered(probe: Probe, layout: Layout) -> tuple[float, float]:
    """Bytes of weights that are gathered when the loss is computed, and in the backward pass of a block."""
    counts = probe.parameters
    size = 2 if layout.compute == "cast" else 4
    if layout.gathers == "blocks":
        return float(size * (counts.outside + counts.block)), float(size * (counts.outside + 3 * counts.block))
    if layout.gathers == "kept":
        return float(size * (counts.total + counts.block)), float(size * counts.total)
    if layout.gathers == "limited":
        return (float(size * min(counts.total, LIVE) + size * counts.head),) * 2
    return 0.0, 0.0
