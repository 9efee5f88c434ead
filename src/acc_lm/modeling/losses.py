"""Cross-entropy fused with the output head: the logits of a batch never exist all at once.

The sum of -log p over the targets is computed for a few rows of logits at a time, in fp32 (float64 for a float64 model).
The chunk's part of the gradient is computed while its logits are at hand, so nothing is computed twice: the idea of
Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, arXiv:2410.10989, section 3.2, in plain torch.

On a GPU the working copy of the weight is padded with rows of zeros beyond the vocabulary, because matrix products are
slow where a row does not end at a multiple of 16 bytes (GPT-2's 50257). Their logits are -inf, so they add nothing to any
sum or gradient, and no parameter, checkpoint or exported model ever has these rows.

With a vocabulary in parts (`vocabulary_parts`) each process has some of the logits of a position, and gathers three numbers
of it from each of the others: the highest of their logits, their log-sum-exp, and the target's logit.

Shapes: N positions, H hidden size, V vocabulary or a part of it, W the same padded on a GPU, C positions of a chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acc_lm.modeling.vocabulary_parts import VocabularyParts
from acc_lm.rows.batch import IGNORE_INDEX

CHUNK_POSITIONS = 128
GPU_CHUNK_LOGITS = 2**28
"""Maximum number of logits in a chunk on a GPU, 1 GiB in fp32: products are fast with thousands of rows."""
GPU_MULTIPLE = 64
GPU_SLICES = 8
"""Parts of a chunk whose softmax is computed at once on a GPU, where it needs a copy of its logits in fp32."""
_BRANCH: list[str] = []
"""Type of device whose branches are taken, if it is not the one of the tensors."""


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Take the branches of a GPU in this context, for tensors without data that stand for those on one."""
    _BRANCH.append("cuda")
    try:
        yield
    finally:
        _BRANCH.pop()


_MEASURED_SLICES: list[int] = []


@contextlib.contextmanager
def one_slice_of_each_chunk() -> Iterator[None]:
    """Compute one slice of each softmax in this context, for tensors without data: each takes as much memory as the first."""
    _MEASURED_SLICES.append(1)
    try:
        yield
    finally:
        _MEASURED_SLICES.pop()


def _branch(device: torch.device) -> str:
    return _BRANCH[-1] if _BRANCH else device.type


class LossSums(NamedTuple):
    """Sums over the targets of a batch, scalars on the device; divide once, after adding all batches and processes."""

    nll: Tensor
    """Sum of -log p of the targets, in nats; float32, or float64 for a float64 model."""
    num_targets: Tensor
    """Number of targets; int64."""
    num_correct: Tensor
    """Number of targets that had the highest logit; int64."""


class PositionLosses(NamedTuple):
    """Terms of `LossSums` for each position; all 0 where there is no target."""

    nll: Tensor
    """-log p of the targets, in nats, shaped like them; float32, or float64 for a float64 model."""
    is_correct: Tensor
    """Flags for targets that had the highest logit; bool, shaped like the targets."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a loss is computed: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunk_positions(num_positions: int, vocab_size: int, device: torch.device) -> int:
    """Positions whose logits are computed at once: few enough for a CPU's cache, or enough to keep a GPU busy."""
    if _branch(device) != "cuda":
        return CHUNK_POSITIONS
    num_chunks = -(-num_positions * vocab_size // GPU_CHUNK_LOGITS)
    share = -(-num_positions // max(num_chunks, 1))  # chunks as equal as possible
    return max(CHUNK_POSITIONS, -(-share // CHUNK_POSITIONS) * CHUNK_POSITIONS)


def padded_vocabulary(vocab_size: int, device: torch.device) -> int:
    """Number of rows of the weight that logits are computed with."""
    return -(-vocab_size // GPU_MULTIPLE) * GPU_MULTIPLE if _branch(device) == "cuda" else vocab_size


def _with_padded_vocabulary(
    weight_VH: Tensor, bias_V: Tensor | None, compute: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Weight in the compute dtype and bias of a head, padded with rows that no position can choose."""
    size = weight_VH.shape[0]
    added = padded_vocabulary(size, weight_VH.device) - size
    if not added:
        return weight_VH.to(compute), bias_V
    weight_WH = weight_VH.new_zeros((size + added, weight_VH.shape[1]), dtype=compute)
    weight_WH[:size] = weight_VH
    return weight_WH, None if bias_V is None else nn.functional.pad(bias_V, (0, added), value=-torch.inf)


def _log_softmax_in_slices(logits_CW: Tensor, exact: torch.dtype) -> Tensor:
    """Log-softmax of a chunk, by rows as always, without a copy of all its logits in the wider dtype."""
    log_p_CW = torch.empty_like(logits_CW, dtype=exact)
    size = -(-len(logits_CW) // GPU_SLICES)
    for start in range(0, len(logits_CW), size)[: _MEASURED_SLICES[-1] if _MEASURED_SLICES else None]:
        part = slice(start, start + size)
        torch.log_softmax(logits_CW[part], dim=-1, dtype=exact, out=log_p_CW[part])
    return log_p_CW


def _loss_of_targets(
    log_p_CW: Tensor, logits_CW: Tensor, targets_C1: Tensor, parts: VocabularyParts | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of a chunk, columns of its targets, and flags for the targets that have one here.

    With a vocabulary in parts, log p among the ids of this part becomes log p among all, in place.
    """
    is_target_C1 = targets_C1 != IGNORE_INDEX
    if parts is None:
        index_C1 = targets_C1.clamp(min=0)
        return -(log_p_CW.gather(1, index_C1) * is_target_C1).sum(), index_C1, is_target_C1
    index_C1, is_here_C1 = parts.here(targets_C1)
    best_C1, at_C1 = log_p_CW.max(dim=1, keepdim=True)
    highest_C1 = logits_CW.gather(1, at_C1).to(log_p_CW.dtype)
    of_target_C1 = logits_CW.gather(1, index_C1).to(log_p_CW.dtype) * is_here_C1
    more_C, nll_C = parts.log_sums(highest_C1[:, 0], -best_C1[:, 0], of_target_C1[:, 0])
    log_p_CW -= best_C1 + more_C[:, None]
    return (nll_C * is_target_C1[:, 0]).sum(), index_C1, is_here_C1


class _SummedLoss(torch.autograd.Function):
    """Sum of the losses of N positions, with the gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Any, targets_N: Tensor, parts: Any) -> Tensor:
        compute = hidden_NH.dtype
        exact = wide(compute)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        size = weight_VH.shape[0]
        weight_WH, bias_W = _with_padded_vocabulary(weight_VH, bias_V, compute)
        added = weight_WH.shape[0] - size
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_weight_WH = torch.zeros_like(weight_WH, dtype=exact) if needs_weight else None
        grad_bias_W = torch.zeros_like(bias_W, dtype=exact) if needs_bias and bias_W is not None else None
        nll = torch.zeros((), dtype=exact, device=hidden_NH.device)
        num_positions = hidden_NH.shape[0]
        positions = chunk_positions(num_positions, size + added, hidden_NH.device)
        logits, log_p = None, None
        branch = _branch(hidden_NH.device)
        if branch == "cpu" and not torch.compiler.is_compiling():
            # Reuse two buffers for all chunks: glibc may keep freed memory. GPUs and the compiler have pools.
            shape = (min(positions, num_positions), size + added)
            logits, log_p = hidden_NH.new_empty(shape), hidden_NH.new_empty(shape, dtype=exact)
        for start in range(0, num_positions, positions):
            hidden_CH = hidden_NH[start : start + positions]
            targets_C1 = targets_N[start : start + positions, None]
            logits_CW = torch.mm(hidden_CH, weight_WH.t(), out=None if logits is None else logits[: len(hidden_CH)])
            if bias_W is not None:
                logits_CW = logits_CW + bias_W
            elif added:
                logits_CW[:, size:].fill_(-torch.inf)
            if branch == "cuda" and not torch.compiler.is_compiling():
                log_p_CW = _log_softmax_in_slices(logits_CW, exact)
            else:
                log_p_CW = torch.log_softmax(
                    logits_CW, dim=-1, dtype=exact, out=None if log_p is None else log_p[: len(hidden_CH)]
                )
            nll_of_chunk, index_C1, is_here_C1 = _loss_of_targets(log_p_CW, logits_CW, targets_C1, parts)
            nll += nll_of_chunk
            del logits_CW
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            # d nll / d logits = softmax - one_hot(target), and 0 where there is no target
            grad_CW = log_p_CW.exp_()
            grad_CW.scatter_add_(1, index_C1, -is_here_C1.to(exact))
            grad_CW *= targets_C1 != IGNORE_INDEX
            if grad_bias_W is not None:
                grad_bias_W += grad_CW.sum(dim=0)
            grad_CW = grad_CW.to(compute)
            del log_p_CW  # gigabytes on a GPU: free them before the next chunk
            if grad_hidden_NH is not None:
                grad_hidden_NH[start : start + positions] = grad_CW @ weight_WH
            if grad_weight_WH is not None:
                if compute == exact:
                    grad_weight_WH.addmm_(grad_CW.t(), hidden_CH)
                else:
                    grad_weight_WH += grad_CW.t() @ hidden_CH  # summing chunks in fp32 keeps bf16's precision
            del grad_CW
        grad_weight_VH = None if grad_weight_WH is None else grad_weight_WH[:size]
        grad_bias_V = None if grad_bias_W is None else grad_bias_W[:size]
        ctx.save_for_backward(grad_hidden_NH, grad_weight_VH, grad_bias_V)
        ctx.dtypes, ctx.parts = (weight_VH.dtype, None if bias_V is None else bias_V.dtype), parts
        return nll

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        grad_hidden_NH, grad_weight_VH, grad_bias_V = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        # In place: the buffers belong to this function, and backward can run only once.
        hidden = None if grad_hidden_NH is None else grad_hidden_NH.mul_(scale)
        if ctx.parts is not None and hidden is not None:
            ctx.parts.sum(hidden)
        weight = None if grad_weight_VH is None else grad_weight_VH.mul_(scale).to(weight_dtype)
        bias = None if grad_bias_V is None else grad_bias_V.mul_(scale).to(bias_dtype)
        return hidden, weight, bias, None, None


def summed_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, parts: VocabularyParts | None = None
) -> Tensor:
    """Sum of -log p(target) over all targets, for training.

    Args:
        hidden: last hidden states, float [..., H].
        weight: output head, float [V, H].
        bias: bias of the head, float [V], or None.
        targets: int64 [...], IGNORE_INDEX where there is none.
        parts: division of the vocabulary, if head and bias are a part; every process of its group calls, with the same
            hidden states and targets.

    Returns:
        Scalar, float32 (float64 for float64 input), in nats; 0 with zero gradients when there is no target.
    """
    hidden_NH = hidden.reshape(-1, hidden.shape[-1])
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    if autocast:
        hidden_NH = hidden_NH.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
        loss: Tensor = _SummedLoss.apply(hidden_NH, weight, bias, targets.reshape(-1), parts)
    return loss


def loss_sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, parts: VocabularyParts | None = None
) -> LossSums:
    """Sums for an evaluation; arguments as in `summed_loss`, no gradient."""
    if parts is not None:
        by_position = position_losses(hidden, weight, bias, targets, parts)
        return LossSums(by_position.nll.sum(), (targets != IGNORE_INDEX).sum(), by_position.is_correct.sum())
    hidden_NH, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    nll = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    positions = chunk_positions(hidden_NH.shape[0], weight.shape[0], hidden.device)
    for start in range(0, hidden_NH.shape[0], positions):
        chunk = slice(start, start + positions)
        sums = sums_of_logits(nn.functional.linear(hidden_NH[chunk], weight, bias), targets_N[chunk])
        nll += sums.nll
        num_correct += sums.num_correct
    return LossSums(nll, (targets_N != IGNORE_INDEX).sum(), num_correct)


def sums_of_logits(logits: Tensor, targets: Tensor) -> LossSums:
    """Sums as in `loss_sums`, for logits that already exist.

    Args:
        logits: float [..., V].
        targets: int64 [...].
    """
    logits_NV, targets_N = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    nll = nn.functional.cross_entropy(
        logits_NV.to(wide(logits.dtype)), targets_N, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return LossSums(nll, (targets_N != IGNORE_INDEX).sum(), (logits_NV.argmax(dim=-1) == targets_N).sum())


def position_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, parts: VocabularyParts | None = None
) -> PositionLosses:
    """Losses of an evaluation by position; arguments as in `summed_loss`, no gradient."""
    hidden_NH, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    positions = chunk_positions(hidden_NH.shape[0], weight.shape[0], hidden.device)
    chunks = [
        losses_of_logits(nn.functional.linear(some_CH, weight, bias), some_C, parts)
        for some_CH, some_C in zip(hidden_NH.split(positions), targets_N.split(positions), strict=True)
    ]
    nll_N, is_correct_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return PositionLosses(nll_N.view_as(targets), is_correct_N.view_as(targets))


def losses_of_logits(logits: Tensor, targets: Tensor, parts: VocabularyParts | None = None) -> PositionLosses:
    """Losses by position for logits that already exist, of all ids or of a part; arguments as in `sums_of_logits`."""
    logits_NV, targets_N = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    if parts is not None:
        exact_NV = logits_NV.to(wide(logits.dtype))
        rows_N, is_here_N = parts.here(targets_N)
        of_target_N = exact_NV.gather(1, rows_N[:, None])[:, 0] * is_here_N
        highest_N1 = exact_NV.amax(dim=1, keepdim=True)
        _, nll_N = parts.log_sums(highest_N1[:, 0], (exact_NV - highest_N1).logsumexp(dim=1), of_target_N)
        nll_N = nll_N * (targets_N != IGNORE_INDEX)
        return PositionLosses(nll_N.view_as(targets), (parts.best(logits_NV) == targets_N).view_as(targets))
    nll_N = nn.functional.cross_entropy(
        logits_NV.to(wide(logits.dtype)), targets_N, ignore_index=IGNORE_INDEX, reduction="none"
    )
    return PositionLosses(nll_N.view_as(targets), (logits_NV.argmax(dim=-1) == targets_N).view_as(targets))
