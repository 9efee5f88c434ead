"""Muon (steps of equal size in every direction) for the matrices between embeddings and head; AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = "momentum"
"""Key that only Muon's parameter group has."""
MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


def moments(group: dict[str, Any]) -> tuple[str, ...]:
    """Names of the state tensors that the optimizer keeps for each parameter of a group, in the parameter's shape."""
    return MUON_MOMENTS if MOMENTUM in group else MOMENTS


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the weights that map a vector to a vector inside the model: those of linear layers, without the head.

    An embedding table, tied to the head or not, is no such map; experts stored in one tensor are several maps.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        # GPT-2's linear layers are transformers' Conv1D, with a transposed weight.
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if module.weight is not getattr(head, "weight", None)
    }


class MuonAndAdamW(torch.optim.AdamW):
    """torch's Muon on the group that has a momentum, AdamW on the others.

    A matrix is orthogonalised as a whole. Where processes hold parts of it, each gathers it with its gradient and momentum,
    computes the same step as all others and keeps its own part: torch's Muon on sharded tensors would add up 16-bit parts,
    and be 2 % off. Like fused AdamW it skips the step where `found_inf` says so, without waiting for the device.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; rate scaled as in Liu et al., Muon
    is scalable for LLM training, 2025, arXiv 2502.16982, eq. 4, so that AdamW's learning rate serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._muon = torch.optim.Muon([torch.zeros(1, 1)], adjust_lr_fn="match_rms_adamw")

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if MOMENTUM not in group]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if MOMENTUM in group:
                self._step_of_muon(group)

    @torch.no_grad()
    def _step_of_muon(self, group: dict[str, Any]) -> None:
        skipped = getattr(self, "found_inf", None)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=local(parameter).device if group["fused"] else "cpu")
                state["momentum_buffer"] = torch.zeros_like(parameter)
            matrix, momentum = whole(parameter), whole(state["momentum_buffer"])
            matrix.grad = whole(parameter.grad)
            self._muon.state = {matrix: {"momentum_buffer": momentum}}  # type: ignore[assignment]
            self._muon.param_groups[0] |= {
                "params": [matrix],
                **{name: group[name] for name in ("lr", "weight_decay", MOMENTUM)},
            }
            self._muon.step()
            for mine, new in ((parameter, matrix), (state["momentum_buffer"], momentum)):
                old, new = local(mine), part_of(new, mine)
                old.copy_(new if skipped is None else torch.where(skipped.to(old.device) > 0, old, new))
            state["step"] += 1 if skipped is None else 1 - skipped.to(state["step"].device)
        self._muon.state.clear()


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Copy of the complete tensor; every process that holds a part calls."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().clone()
    gathered: Tensor = tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return gathered


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a complete tensor, cut in the way that `like` is."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    cut = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
    return local(cut).to(local(like).device)
