"""Peak memory of a GPU by formula, for Llama- and GPT-2-like models: a second opinion, independent of any traced model.

    peak = max(state + activations + head at work,  state + activations + one block's backward,  state + gradients)

The counts are bytes per token that a block keeps for its backward, from the tensors that torch saves; H hidden, q and k sizes
of all queries and keys, F inner, a heads. A gated block in bf16 keeps 16 H + 4 q + 4 k + 8 F + 4 a, under autocast 26 H,
because norms and residuals are fp32 there and each product casts its input for itself; a plain block 8 H + 8 q + 4 F, and
12 H under autocast. Architectures with other parts (norms of queries and keys, experts) keep more than this says.
"""

from __future__ import annotations

from dataclasses import dataclass

from acc_lm.planning.shapes import Layout, Shape

LOGITS_OF_A_CHUNK = 2**28
"""Logits that the fused loss computes at a time on a GPU."""
ZERO_BUCKET = 1e9
"""Bytes of a bucket of 5e8 gradients or weights in bf16, and number of weights that stay gathered: DeepSpeed's defaults."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on one GPU at the three places where they can be the most, allocator and CUDA not included."""

    at_head: float
    at_backward: float
    at_update: float
    state: float
    """Weights and moments that are there all the time."""
    activations: float
    """Kept for the backward pass, of all blocks and the last norm."""

    @property
    def total(self) -> float:
        return max(self.at_head, self.at_backward, self.at_update)


def kept_per_token(shape: Shape, checkpointing: str, autocast: bool = False, compiled: bool = False) -> float:
    """Bytes that a block keeps for its backward pass, per token.

    Args:
        checkpointing: no, selective (results of all products and of attention are kept) or yes; and two of other projects:
            every_second_product and every_second_block.
    """
    h, q, k, f, a = shape.hidden, shape.queries, shape.keys, shape.ffn, shape.heads
    residual = 4 * h if autocast else 2 * h
    attention = 4 * q + 4 * k + 4 * a  # queries, keys, values and result, and the log-sum of each score row
    if compiled:
        whole = 2 * residual + 4 * h + (attention + 6 * f if shape.gated else 8 * q + 4 * f)
    elif shape.gated:
        whole = (26 if autocast else 16) * h + attention + 8 * f
    else:
        whole = (12 if autocast else 8) * h + 8 * q + 4 * a + 4 * f
    products = attention + 4 * h + 4 * f if shape.gated else 8 * q + 4 * h + 2 * f
    every_second = 4 * q + 2 * k + 4 * a + 2 * h + 2 * f if shape.gated else products
    return {
        "no": whole,
        "yes": residual,
        "selective": residual + products,
        "every_second_product": residual + every_second,
        "every_second_block": (whole + residual) / 2,
    }[checkpointing]


def peak_memory(
    shape: Shape,
    layout: Layout,
    tokens: int,
    checkpointing: str,
    *,
    accumulates: bool = False,
    compiled: bool = False,
    logit_bytes: float | None = None,
    separate_weights: bool = False,
    all_bf16: bool = False,
) -> PeakMemory:
    """Peak memory of a training step with AdamW.

    Args:
        tokens: tokens of a micro-batch.
        accumulates: True: several micro-batches per step, so gradients stay from one to the next.
        logit_bytes: bytes per logit that a loss holds that computes all of them at once; None: the fused loss of this project.
        separate_weights: True: bf16 weights next to the fp32 ones, and buckets (DeepSpeed); False: one fp32 copy.
        all_bf16: True: weights, gradients and moments are all in bf16.
    """
    h, n, autocast = shape.hidden, tokens, layout.casts_weights
    whole = kept_per_token(shape, "no", autocast, compiled)
    kept = kept_per_token(shape, checkpointing, autocast, compiled) * n * shape.layers
    activations = kept + (14 if autocast else 8) * n * h
    state, gradients = _state(shape, layout, separate_weights, all_bf16)
    held = gradients if accumulates else 0.0
    if logit_bytes is None:
        chunk = min(n, -(-LOGITS_OF_A_CHUNK // shape.vocab))
        head_kept = 4.0 * shape.head_parameters + 2 * n * h  # fp32 gradient of the head, and that of its input
        head = head_kept + 10.0 * chunk * shape.vocab + (2 * shape.head_parameters if autocast else 0)
    else:
        head_kept, head = 0.0, logit_bytes * n * shape.vocab
    at_head, in_backward, at_update = _gathered(shape, layout, separate_weights)
    block = (
        (1.0 if checkpointing != "no" else 0.3) * whole * n
    )  # recomputed whole, or only the gradients of a part of it
    return PeakMemory(
        at_head=state + held + activations + head + at_head,
        at_backward=state + held + activations + head_kept + block + in_backward,
        at_update=state + gradients + at_update,
        state=state,
        activations=activations,
    )


def _state(shape: Shape, layout: Layout, separate_weights: bool, all_bf16: bool) -> tuple[float, float]:
    """Bytes of weights and moments, and of gradients once all are there."""
    total = float(shape.parameters)
    is_copied = layout.replicas > 1 and layout.group == 1  # buckets of gradients, there all the time
    if all_bf16:
        return 6 * total / layout.moment_shards + (2 * total if is_copied else 0), 2 * total / layout.gradient_shards
    if separate_weights:
        weights = 0.0 if layout.offloads_weights else 2 * total / layout.weight_shards
        if layout.offloads_moments:
            return weights, 0.0
        of_gradients = 6 * total if layout.gradient_shards == 1 else 2 * total / layout.gradient_shards + ZERO_BUCKET
        return weights + 12 * total / layout.moment_shards, of_gradients
    if is_copied:
        return 16 * total, 0.0
    return 12 * total / layout.moment_shards, 4 * total / layout.gradient_shards


def _gathered(shape: Shape, layout: Layout, separate_weights: bool) -> tuple[float, float, float]:
    """Bytes of gathered or cast weights and of buffers: at the head, in a block's backward, at the update."""
    blocks, head = 2.0 * shape.layers * shape.block_parameters, float(shape.head_parameters)
    ends = 2 * head * (1 if shape.tied else 2)
    block = float(shape.block_parameters)
    if separate_weights:
        if layout.weight_shards > 1:
            live = 2 * min(shape.parameters, 1e9) if not layout.offloads_moments or layout.offloads_weights else 0.0
            buffers = ZERO_BUCKET if layout.offloads_moments and not layout.offloads_weights else 0.0
            return live + buffers, live + buffers, 0.0
        return 0.0, 0.0, ZERO_BUCKET  # updated weights are gathered in buckets after the update
    if layout.weight_shards == 1:
        cast = blocks if layout.casts_weights else 0.0
        return cast, cast, 0.0
    if not layout.regathers:
        return ends + blocks + 6 * block, ends + blocks + 6 * block, 0.0
    # two gathered blocks; in the backward also a third, one block's gradient in bf16 and fp32, and those of the head
    return ends + 4 * block, ends + 12 * block + 6 * head, 0.0
