"""Summed loss of the targets as a model's output, computed without holding all logits where its head is plain."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm.modeling.attention import (
    CAUSAL,
    document_mask,
    own_masks,
)
from acc_lm.modeling.losses import LossSums, loss_sums, losses_of_logits, position_losses, summed_loss, sums_of_logits
from acc_lm.modeling.router import Routed, read_positions, recorded_router_logits, routing_sums
from acc_lm.modeling.row_parts import RowParts
from acc_lm.modeling.vocabulary_parts import VocabularyParts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FUSED, ON_LOGITS = "fused with the head", "on the model's own logits"


class LossHead(nn.Linear):
    """Output head that, given targets, returns their loss instead of logits.

    It is the model's own head with another class: same parameter, same name, same tie. Inside a head's forward even
    sharded weights are complete, so the fused loss works on every engine.
    """

    parts: VocabularyParts | None = None
    """Division of the vocabulary, if the weight has the rows of a part of the ids."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, by_position: bool = False) -> Any:
        """Logits [..., V]; with targets, the summed loss in training, `LossSums` or `PositionLosses` in evaluation."""
        if targets is None:
            logits = super().forward(hidden)
            return logits if self.parts is None else self.parts.all_logits(logits)
        if by_position:
            return position_losses(hidden, self.weight, self.bias, targets, self.parts)
        compute = summed_loss if self.training else loss_sums
        return compute(hidden, self.weight, self.bias, targets, self.parts)


def _fused_forward(
    model: Any,
    input_ids: Tensor,
    targets: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    by_position: bool = False,
    last: Tensor | None = None,
    num_choices: int | None = None,
    only_choices: bool = False,
    **keywords: Any,
) -> Any:
    is_cut = targets is not None and not by_position and model.row_parts.size > 1
    if is_cut:
        input_ids, targets, position_ids, document_ids, is_read = model.row_parts.cut(
            input_ids, targets, position_ids, document_ids
        )
    given = _documents(model, position_ids, document_ids)
    if is_cut:
        given["row_parts"] = model.row_parts
    if targets is None and last is None:
        return type(model).forward(model, input_ids=input_ids, **given, **keywords)
    if num_choices is not None:
        given["output_router_logits"] = True
    output = model.base_model(input_ids=input_ids, use_cache=False, **given)
    hidden = output[0]
    if num_choices is not None:
        assert targets is not None
        counted = is_read if is_cut else read_positions(targets)
        choices, probabilities = routing_sums(output.router_logits, num_choices, counted)
        if is_cut:
            choices = model.row_parts.sum(choices)
        return (
            choices if only_choices else Routed(model.get_output_embeddings()(hidden, targets), choices, probabilities)
        )
    if last is None:
        return model.get_output_embeddings()(hidden, targets, by_position)
    return model.get_output_embeddings()(_at(hidden, last)).argmax(dim=-1)


def _logits_forward(
    model: Any,
    input_ids: Tensor,
    targets: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    by_position: bool = False,
    last: Tensor | None = None,
    num_choices: int | None = None,
    only_choices: bool = False,
    **keywords: Any,
) -> Any:
    given = _documents(model, position_ids, document_ids) | keywords
    if targets is None and last is None:
        return type(model).forward(model, input_ids=input_ids, **given)
    if num_choices is not None:
        assert targets is not None
        with recorded_router_logits(model) as router_logits:
            output = type(model).forward(
                model, input_ids=input_ids, **{"use_cache": False, **given, "output_router_logits": False}
            )
        choices, probabilities = routing_sums(tuple(router_logits), num_choices, read_positions(targets))
        return choices if only_choices else Routed(sums_of_logits(output.logits, targets).nll, choices, probabilities)
    output = type(model).forward(model, input_ids=input_ids, **{"use_cache": False, **given})
    if last is not None:
        return _at(output.logits, last).argmax(dim=-1)
    assert targets is not None
    if by_position:
        return losses_of_logits(output.logits, targets)
    sums: LossSums = sums_of_logits(output.logits, targets)
    return sums.nll if model.training else sums


def _at(values_BLX: Tensor, last_B: Tensor) -> Tensor:
    """Values at one position of each row, [B, X]: the position whose most likely next id is requested."""
    return values_BLX[torch.arange(len(last_B), device=last_B.device), last_B]


def _documents(model: Any, position_ids: Tensor | None, document_ids: Tensor | None) -> dict[str, Any]:
    """Keyword arguments that mark the documents in rows; empty for rows of one document."""
    if position_ids is None:
        if document_ids is not None:
            raise ValueError("position_ids must restart in each of the document_ids, got none")
        return {}
    given: dict[str, Any] = {"position_ids": position_ids}
    if document_ids is not None and model.config._attn_implementation == CAUSAL:
        given["document_mask"] = document_mask(document_ids)
    elif document_ids is not None:
        given["attention_mask"] = own_masks(model, position_ids)
    return given


def install_loss(model: PreTrainedModel) -> str:
    """Give the model the training forward, fused with the head where that is exact; returns its display name."""
    ignore_padding(model)
    fused = _head_is_plain(model)
    use_loss(model, fused)
    return FUSED if fused else ON_LOGITS


def use_loss(model: PreTrainedModel, fused: bool) -> None:
    ignore_padding(model)
    if fused:
        model.get_output_embeddings().__class__ = LossHead
    # Shared with copies of the model that are made when it is prepared, so that all see when rows are divided.
    model.row_parts = RowParts()
    model.forward = MethodType(_fused_forward if fused else _logits_forward, model)


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """Do nothing, in place of a check that does not apply."""


def ignore_padding(model: PreTrainedModel) -> None:
    """Disable the padding warning of some models, which reads the ids in every forward and so waits for the device."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _nothing


def _head_is_plain(model: PreTrainedModel) -> bool:
    """Test that logits = head(last hidden state), with nothing else applied to either.

    The head is made to return random numbers. The logits must equal them bit for bit (a soft cap or a scale would
    change them), and the head's input must be the base model's last hidden state.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or model.base_model is model:
        return False
    seen: dict[str, Tensor] = {}

    def replace(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["hidden"] = arguments[0]
        seen["logits"] = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        return seen["logits"]

    was_training = model.training
    model.eval()
    handle = head.register_forward_hook(replace)
    try:
        with torch.no_grad():
            ids = (
                torch.arange(1, 9, device=head.weight.device).reshape(1, 8) % model.config.get_text_config().vocab_size
            )
            logits = model(input_ids=ids, use_cache=False).logits
            hidden = model.base_model(input_ids=ids, use_cache=False)[0]
    finally:
        handle.remove()
        model.train(was_training)
    return "logits" in seen and torch.equal(logits, seen["logits"]) and torch.equal(hidden, seen["hidden"])
