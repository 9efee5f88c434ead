"""Rows in parts: the processes of a group read the same rows, and each computes other positions of them.

Every layer but attention looks at one position at a time, so a part of a row is enough for it. Attention exchanges
positions for heads, computes some heads of full rows, and exchanges back:

    positions 0..L of all heads | L..2L of all heads   ->   all positions of some heads | of the other heads   ->   back

Source: Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv:2309.14509. An engine sees only more processes: to it, a part of a
row is a batch like any other.

Shapes: S parts, B rows, H heads, L positions of a part, T = S x L positions of a row, D size of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.modeling.router import read_positions
from acc_lm.rows.batch import IGNORE_INDEX

NO_DOCUMENT = -1


class PartOfRows(NamedTuple):
    """Some positions of every row of a batch; document ids stay those of all positions, which attention needs."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    document_ids: Tensor | None
    is_read: Tensor
    """Flags for the positions up to the last target of their row; those after it are padding."""


class RowParts:
    """Division of rows over a group of processes; until `begin` rows are complete."""

    def __init__(self) -> None:
        self.size = 1
        """Number of parts of a row."""
        self._index = 0
        self._group: Any = None

    def begin(self, group: Any) -> None:
        """Divide rows from now on among the processes of this group, which all read the same rows."""
        self._group, self.size, self._index = group, group.size(), group.rank()

    @classmethod
    def without_others(cls, size: int) -> RowParts:
        """The first of `size` parts on fake tensors, whose exchanges take memory and send nothing."""
        parts = cls()
        parts.size = size
        return parts

    def cut(
        self, input_ids: Tensor, targets: Tensor, position_ids: Tensor | None, document_ids: Tensor | None
    ) -> PartOfRows:
        """Cut this process's part out of a batch.

        The last part is filled up with positions that have no target, and that no position before them attends to.

        Args:
            input_ids, targets, position_ids, document_ids: int64 [B, at most T].
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return PartOfRows(
            self._part(self._filled(input_ids, 0)),
            self._part(self._filled(targets, IGNORE_INDEX)),
            self._part(self._filled(position_ids, 0)),
            None if document_ids is None else self._filled(document_ids, NO_DOCUMENT),
            self._part(self._filled(read_positions(targets), False)),
        )

    def _filled(self, tensor_BT: Tensor, value: int) -> Tensor:
        return nn.functional.pad(tensor_BT, (0, -tensor_BT.shape[1] % self.size), value=value)

    def _part(self, tensor_BT: Tensor) -> Tensor:
        return tensor_BT.chunk(self.size, dim=1)[self._index]

    def to_heads(self, x_BHLD: Tensor) -> Tensor:
        """Exchange all heads of a part of the rows for some heads of full rows, float [B, H/S, T, D].

        Fewer key-value heads than parts are repeated; attention treats repeated ones as it treats shared ones.
        """
        if x_BHLD.shape[1] % self.size:
            x_BHLD = x_BHLD.repeat_interleave(self.size // x_BHLD.shape[1], dim=1)
        rows, heads, length, width = x_BHLD.shape
        parts = x_BHLD.reshape(rows, self.size, heads // self.size, length, width).transpose(0, 1)
        return self._exchanged(parts).permute(1, 2, 0, 3, 4).reshape(rows, heads // self.size, -1, width)

    def to_positions(self, x_BTHD: Tensor) -> Tensor:
        """Exchange back: float [B, T, H/S, D] -> [B, L, H, D]."""
        rows, total, heads, width = x_BTHD.shape
        parts = x_BTHD.reshape(rows, self.size, total // self.size, heads, width).transpose(0, 1)
        return self._exchanged(parts).permute(1, 2, 0, 3, 4).reshape(rows, total // self.size, -1, width)

    def _exchanged(self, parts: Tensor) -> Tensor:
        exchanged: Tensor = _Exchange.apply(parts, self._group)
        return exchanged

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the parts, without a gradient."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total


class _Exchange(torch.autograd.Function):
    """[S, ...] -> [S, ...]: element s goes to process s of the group, and its gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        if group is not None:
            dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchanged: Tensor = _Exchange.apply(gradients[0], ctx.group)
        return exchanged, None


class StackedParts(RowParts):
    """All parts of the rows on one process, one after the other along the batch: a trial without communication."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.num_exchanges = 0
        """Number of attentions that exchanged, so far."""

    def _part(self, tensor_BT: Tensor) -> Tensor:
        return torch.cat(tensor_BT.chunk(self.size, dim=1))

    def to_heads(self, x_BHLD: Tensor) -> Tensor:
        """Put the parts of all heads together: float [S x B, H, L, D] -> [B, H, T, D]."""
        self.num_exchanges += 1
        return torch.cat(x_BHLD.chunk(self.size), dim=2)

    def to_positions(self, x_BTHD: Tensor) -> Tensor:
        """Stack the parts of all heads again: float [B, T, H, D] -> [S x B, L, H, D]."""
        return torch.cat(x_BTHD.chunk(self.size, dim=1))

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.detach()
