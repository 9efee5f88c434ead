"""Memory of a process: the measured micro-batch plus the state that its placement keeps, at the moment of the most."""

from __future__ import annotations

from dataclasses import dataclass

from acc_lm.planning.hardware import GIB
from acc_lm.planning.probe import Checkpointing, Probe, Used
from acc_lm.runtime import KEPT, MAX_FLAT, MAX_LIVE, PREFETCHED, Placement

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
    probe = probe.in_layers(placement.layers_in_parts).in_parts(placement.rows_in_parts)
    moments = _moments(probe, placement, micro_batch_size, accumulation, checkpointing)
    where = max(moments, key=lambda name: moments[name].total)
    found = moments[where]
    context = CUDA + (NCCL if placement.num_processes > 1 else 0)
    here = placement.num_processes // placement.num_machines
    counts = probe.parameters
    return MemoryEstimate(
        found.total,
        found.total * ALLOCATOR_LOW + context,
        found.total * ALLOCATOR_HIGH + context,
        {
            "weights, moments and buckets": found.state,
            "gradients": found.gradients,
            "activations": found.activations,
            "gathered weights and buffers": found.gathered,
            "at work": found.work,
        },
        (placement.host * counts.trained + placement.staged * counts.head) * here,
    )


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment of a step."""

    state: float
    gradients: float
    activations: float
    gathered: float
    work: float

    @property
    def total(self) -> float:
        return self.state + self.gradients + self.activations + self.gathered + self.work


def _moments(
    probe: Probe, placement: Placement, micro_batch_size: int, accumulation: int, checkpointing: Checkpointing
) -> dict[str, Moment]:
    """The moments of a step at which memory can be the most."""
    counts = probe.parameters
    body = probe.phases(micro_batch_size, checkpointing, compute=placement.compute)
    head = probe.head(micro_batch_size, compute=placement.compute)
    used = _used(placement, counts.total)
    block = probe.of_one_block(micro_batch_size, checkpointing, compute=placement.compute, weights=used)
    gathered = _gathered(probe, placement)
    is_cast, is_sharded = placement.compute == "cast", placement.shards_gradients
    size = 2 if is_cast else placement.trained
    state = placement.weights * counts.total + placement.state * counts.trained + placement.staged * counts.head
    buffers = placement.buffers
    largest = float(counts.head) if head.weight else 0.0  # elements whose gradient is reduced or summed at once
    held = placement.held * counts.trained * (accumulation > 1)
    complete = placement.gradients * counts.trained
    summed = _sums(placement, held, 0.0, complete)
    own = size * counts.trained_of_block  # gradients of a block
    # A shard is added to when a whole gradient has been reduced; other gradients are added to as they are computed.
    work = block - own if held and not is_sharded else block
    of_head = size * largest if counts.is_tied or not is_sharded else 0.0
    remains = of_head if is_sharded else max(0.0, of_head - held)
    reduces = placement.reduces * largest
    first = 0.0 if counts.is_tied else size * largest + reduces  # the head's own gradient, reduced before any block's
    flat = placement.flattens * counts.trained * (counts.trained <= MAX_FLAT)
    # Sums in the backward passes of the second and the first block, the last ones computed: all but those of a block and of the
    # weight that is reduced after all blocks, the embedding's or a head's that is tied to it.
    share = placement.gradients / size
    is_at_end = is_sharded or not counts.is_tied
    unreduced = share * (own + size * largest * is_at_end)
    at_second = _sums(placement, held, complete - unreduced - share * own, complete)
    at_first = _sums(placement, held, complete - unreduced, complete)
    at_embedding = _sums(placement, held, complete - placement.gradients * largest * is_sharded, complete)
    ending = complete + (held if placement.apart else 0.0)
    waiting = of_head if is_sharded and counts.is_tied else 0.0  # for the embedding's, to which it is added
    twice = size * largest * (counts.is_tied or accumulation > 1)  # added to the head's, or to a sum
    in_reduction = max((size * largest if is_sharded else 0) + reduces, flat)
    norm = 8 * min(largest, counts.trained / placement.shards) if placement.at_once else 0.0
    is_between = counts.num_blocks > 1
    kept, of_one = body.kept, body.kept / counts.num_blocks
    after_one = kept - of_one
    return {
        "forward": Moment(state, held, 0.0, gathered.forward + buffers, body.forward),
        "head": Moment(state, held, body.body, gathered.head + buffers, head.forward),
        "loss": Moment(state, held, kept, gathered.head + buffers, head.kept + is_cast * size * largest),
        "head's gradient": Moment(state, summed, kept, gathered.head + buffers, head.kept - head.weight + first),
        "backward": Moment(state, summed + remains, kept, gathered.backward + buffers, work),
        "next block": Moment(state, summed + remains, after_one, gathered.next_block + buffers, work * is_between),
        "second block": Moment(
            state, at_second + waiting, 2 * of_one * is_between, gathered.second_block + buffers, work * is_between
        ),
        "first block": Moment(state, at_first + waiting, of_one, gathered.first_block + buffers, work),
        "embedding": Moment(
            state, at_embedding, 0.0, gathered.embedding + buffers, max(twice, size * largest * is_sharded)
        ),
        "its reduction": Moment(state, ending, 0.0, gathered.end + buffers, in_reduction),
        "norm": Moment(state, ending, 0.0, buffers, norm),
        "update": Moment(state, placement.updates * counts.trained, 0.0, buffers, 0.0),
    }


def _used(placement: Placement, num_parameters: int) -> Used:
    """Use of a block's weights and gradients: reduced together at its end; by ZeRO-3 each when it is complete."""
    if placement.gathers != "limited":
        return "backward"
    return "freeing" if num_parameters <= KEPT else "sending"


def _sums(placement: Placement, held: float, new: float, complete: float) -> float:
    """Bytes of summed gradients, of earlier micro-batches and of this one, if `new` of the latter are there by now."""
    found = complete if placement.at_once else new
    return held + found if placement.apart else max(held, found)


@dataclass(frozen=True)
class _Gathered:
    """Bytes of gathered weights, and of gradients on their way to the shards, at the moments of a step."""

    forward: float = 0.0
    head: float = 0.0
    backward: float = 0.0
    """In the backward pass of the last block, the first of that pass."""
    next_block: float = 0.0
    """In that of the block before it, while the gradients of the last one are reduced."""
    second_block: float = 0.0
    """In that of the second block, the one but last of that pass."""
    first_block: float = 0.0
    """In that of the first block, after which the embedding's weight comes instead of a further block."""
    embedding: float = 0.0
    """When the embedding's gradient is computed, while the gradients of the first block are reduced."""
    end: float = 0.0
    """When that gradient is reduced."""


def _gathered(probe: Probe, placement: Placement) -> _Gathered:
    counts = probe.parameters
    size = 2 if placement.compute == "cast" else placement.stored
    block, head = float(size * counts.block), float(size * counts.head)
    tied = head * counts.is_tied
    at_head = head + (
        block if counts.is_tied else head
    )  # the last message is held until the next one: a block's, or its own
    reduced_head = 0.0 if counts.is_tied else placement.reduces * counts.head * counts.trains_head
    reduced = placement.reduces * counts.trained_of_block
    at_end = head + reduced  # of the embedding, or of the head that is tied to it
    if placement.gathers == "blocks":  # one that is computed with, and the next one; a head with its buffer
        two = 2 * block + tied
        return _Gathered(two, at_head, two + reduced_head, two + reduced, two + reduced, block + at_end, at_end)
    if placement.gathers == "all blocks":
        whole = float(size * counts.total)
        rest = whole - (head - tied)
        backward = (rest + reduced_head, rest - block + reduced, 2 * block + at_end, block + at_end, at_end)
        return _Gathered(whole, whole - head + at_head, *backward)
    if placement.gathers == "limited":
        live = size * min(counts.total, KEPT + counts.head + 2 * PREFETCHED, MAX_LIVE)
        again = size * min(counts.total, PREFETCHED)  # what arrives at a time has a second copy
        back = live + again if counts.total > KEPT else live - (head - tied)
        return _Gathered(live + again, live, back, back, back, back, live, live)
    return _Gathered()
