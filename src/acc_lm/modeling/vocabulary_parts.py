"""Vocabulary in parts: the processes of a group compute the same positions, and each has other ids of embedding and head.

    ids -> embedding of the ids here, 0 for the others -> all-reduce -> the same on all
    hidden -> logits of the ids here -> their highest, their log-sum-exp, the target's logit -> all-gather -> loss, the same on all

Backward, the gradient of hidden is a sum over the parts, too. Source: Shoeybi et al., "Megatron-LM", 2019,
arXiv:1909.08053, section 3.

Shapes: S parts, C positions, W ids of a part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class VocabularyParts:
    """Division of a vocabulary over a group of processes; the first parts have one id more if it does not divide.

    Args:
        index: index of this process's part.
        group: None on fake tensors, whose sums and gathers send nothing.
    """

    def __init__(self, vocab_size: int, size: int, index: int, group: Any = None) -> None:
        self.size, self.index, self._group = size, index, group
        self._sizes = [vocab_size // size + (each < vocab_size % size) for each in range(size)]
        self._firsts = [sum(self._sizes[:each]) for each in range(size)]

    @property
    def first(self) -> int:
        """First id of this process's part."""
        return self._firsts[self.index]

    def cut(self, tensor: Tensor) -> Tensor:
        """Copy this process's part out of a tensor with a row for each id."""
        return tensor[self.first : self.first + self._sizes[self.index]].clone()

    def here(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows of the ids in this part, with any row for an id of another part; flags for the ids that are here)."""
        rows = ids - self.first
        is_here = (rows >= 0) & (rows < self._sizes[self.index])
        return rows.where(is_here, 0), is_here

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the parts, in place."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather(self, values: Tensor) -> Tensor:
        """Tensors of this shape from all parts, [S, ...], without a gradient."""
        values = values.contiguous()
        gathered = values.new_empty((self.size, *values.shape))
        if self._group is not None:
            dist.all_gather([*gathered.unbind()], values, group=self._group)
        return gathered

    def log_sums(self, highest_C: Tensor, log_sum_C: Tensor, of_target_C: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of the logits of all ids minus the highest one here, and minus the target's: the loss.

        Only differences of logits are returned, because large logits would lose digits.

        Args:
            highest_C: highest logit in this part.
            log_sum_C: log-sum-exp of the logits in this part minus the highest one.
            of_target_C: the target's logit if it is here, else 0.
        """
        highest_SC, log_sum_SC, of_target_SC = self.gather(torch.stack([highest_C, log_sum_C, of_target_C])).unbind(1)
        top_C = highest_SC.amax(dim=0)
        total_C = (highest_SC - top_C + log_sum_SC).logsumexp(dim=0)
        return total_C + (top_C - highest_C), total_C + (top_C - of_target_SC.sum(dim=0))

    def best(self, logits_CW: Tensor) -> Tensor:
        """Ids with the highest logit of all parts, int64 [C]; the first of equal ones."""
        highest_C, row_C = logits_CW.max(dim=-1)
        gathered = self.gather(torch.stack([highest_C.double(), (row_C + self.first).double()]))
        part_1C = gathered[:, 0].argmax(dim=0, keepdim=True)
        return gathered[:, 1].gather(0, part_1C)[0].long()

    def all_logits(self, logits: Tensor) -> Tensor:
        """Logits of all ids, [..., V], from those of the parts, without a gradient."""
        missing = self._sizes[0] - logits.shape[-1]
        gathered = self.gather(nn.functional.pad(logits, (0, missing)))
        return torch.cat([part[..., :size] for part, size in zip(gathered, self._sizes, strict=True)], dim=-1)


class _Selected(torch.autograd.Function):
    """Rows of an embedding: those of other parts are replaced by theirs, and only the own ones get a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_here: Tensor, parts: VocabularyParts) -> Tensor:
        ctx.save_for_backward(is_here)
        return parts.sum(x.masked_fill(~is_here[..., None], 0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (is_here,) = ctx.saved_tensors
        return gradients[0].masked_fill(~is_here[..., None], 0), None, None


class _EmbeddingOfParts:
    """First base of the class of an embedding in parts; the second one is the model's own."""

    parts: VocabularyParts

    def forward(self, input: Tensor) -> Tensor:
        rows, is_here = self.parts.here(input)
        selected: Tensor = _Selected.apply(super().forward(rows), is_here, self.parts)  # type: ignore[misc]
        return selected


def divide_embedding(embedding: nn.Embedding, parts: VocabularyParts) -> None:
    """Let an embedding, whose weight is cut already, look up the ids of all parts."""
    if embedding.padding_idx is not None:  # its row has no gradient
        row = embedding.padding_idx - parts.first
        embedding.padding_idx = row if 0 <= row < embedding.weight.shape[0] else None
    own = type(embedding)
    embedding.__class__ = type(f"{own.__name__}OfParts", (_EmbeddingOfParts, own), {})
    embedding.parts = parts  # type: ignore[assignment]


def is_plain_embedding(embedding: Any) -> bool:
    """Test that a module is an embedding that changes neither its weights nor their gradients by more than a scale."""
    return (
        isinstance(embedding, nn.Embedding)
        and embedding.max_norm is None
        and not embedding.sparse
        and not embedding.scale_grad_by_freq
    )


def parts_add_up(embedding: nn.Embedding, size: int) -> bool:
    """Test on this process that a part of an embedding's rows is enough for the ids in it."""
    weight, padding = embedding.weight.data, embedding.padding_idx
    ids = torch.linspace(0, len(weight) - 1, 4 * size, device=weight.device).long()
    with torch.no_grad():
        expected = embedding(ids)
        total = torch.zeros_like(expected)
        try:
            embedding.padding_idx = None
            for index in range(size):
                parts = VocabularyParts(len(weight), size, index)
                embedding.weight.data = parts.cut(weight)
                rows, is_here = parts.here(ids)
                total += embedding(rows).masked_fill(~is_here[..., None], 0)
        except (RuntimeError, ValueError, TypeError, IndexError):  # its code counts on all rows
            return False
        finally:
            embedding.weight.data, embedding.padding_idx = weight, padding
    return torch.equal(total, expected)
