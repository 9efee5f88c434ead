"""Load-balancing loss of a mixture of experts, over the tokens of the global batch.

    coefficient x E x sum_e f_e P_e     f_e: (token, choice) pairs routed to expert e, per token     P_e: mean router probability

Source: Fedus et al., "Switch Transformers", 2021, arXiv:2101.03961, equation 4, in the form of transformers'
`load_balancing_loss_func`, which takes the tokens of all layers together.

The loss is a product of two means, so the mean of its values over parts of a batch is not its value over the batch:
computed for each micro-batch on its own, as is usual, it depends on how the batch is split. But f_e has no gradient, and
once f_e is known for the global batch, the loss is a sum over tokens, which is the same for every split:

    sum_tokens sum_e (coefficient x E x f_e / number of tokens) p_e(token)

Shapes: N positions, E experts, K choices of a token.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from acc_lm.errors import ConfigError
from acc_lm.rows.batch import IGNORE_INDEX

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

ROUTER_ADVICE = "set model.router_loss=off to train without a load-balancing loss"


@dataclass(frozen=True)
class Router:
    """Routing of a model, and how its load-balancing loss is computed."""

    num_experts: int
    num_choices: int
    """Number of experts that each token is routed to."""
    coefficient: float
    is_exact: bool
    """True: computed over the global batch; False: for each micro-batch on its own."""

    @property
    def description(self) -> str:
        how = "exact over the global batch" if self.is_exact else "for each micro-batch alone: it depends on the split"
        return f"{self.num_choices} of {self.num_experts} for each token; load-balancing loss x {self.coefficient:g}, {how}"


class Routed(NamedTuple):
    """Loss of a micro-batch, and the experts of its tokens; scalars and vectors on the device."""

    nll: Tensor
    """Sum of -log p of the targets, in nats."""
    choices_E: Tensor
    """Number of times that each expert was chosen, over all layers and all parts of the rows, int64."""
    probabilities_E: Tensor
    """Router probabilities, summed over tokens and layers, float32; they carry the gradient."""


class RouterLoss:
    """Load-balancing loss of one optimizer step, accumulated over its micro-batches.

    Args:
        num_parts: number of micro-batches of the step, over all processes.
        parts_of_rows: number of processes that share each micro-batch; all of them know its choices.
    """

    def __init__(self, accelerator: Accelerator, router: Router, num_parts: int, parts_of_rows: int = 1) -> None:
        self.router = router
        self._accelerator, self._num_parts, self._parts_of_rows = accelerator, num_parts, parts_of_rows
        self._choices_E: Tensor | None = None
        """Choices in the global batch if the loss is exact; otherwise in this process's micro-batches so far."""
        self._value = torch.zeros((), device=accelerator.device)
        """This process's share, before the coefficient; the shares of all processes add up to the loss."""

    def know_choices(self, choices_E: Tensor) -> None:
        """Sum the choices of each process's micro-batches over all processes. Every process calls, once."""
        self._choices_E = self._accelerator.reduce(choices_E, reduction="sum") // self._parts_of_rows

    def part_of(self, routed: Routed) -> Tensor:
        """Part of the loss that a micro-batch contributes, coefficient included, scalar with a gradient.

        If `know_choices` was not called before, an exact loss treats it as the only micro-batch of this process.
        """
        if not self.router.is_exact:
            value = balance(routed.choices_E, routed.probabilities_E, self.router.num_choices) / self._num_parts
            self._choices_E = routed.choices_E if self._choices_E is None else self._choices_E + routed.choices_E
        else:
            if self._choices_E is None:
                self.know_choices(routed.choices_E)
            assert self._choices_E is not None
            value = balance(self._choices_E, routed.probabilities_E, self.router.num_choices)
        self._value = self._value + value.detach()
        return self.router.coefficient * value

    def metrics(self) -> dict[str, float]:
        """Loss before its coefficient, and the busiest expert's share as a multiple of an even share.

        Waits for the device; every process calls.
        """
        assert self._choices_E is not None
        choices_E = self._choices_E
        if not self.router.is_exact:
            choices_E = self._accelerator.reduce(choices_E, reduction="sum")
        value = self._accelerator.reduce(self._value, reduction="sum")
        busiest = choices_E.max() * self.router.num_experts / choices_E.sum().clamp(min=1)
        return {"train/router_loss": float(value), "train/busiest_expert": float(busiest)}


def balance(choices_E: Tensor, probabilities_E: Tensor, num_choices: int) -> Tensor:
    """E x sum_e f_e P_e, scalar: 1 x `num_choices` when every expert is chosen equally often.

    Args:
        choices_E: over all tokens.
        probabilities_E: over all tokens, or over some of them for their part of the value.
    """
    num_tokens = (choices_E.sum() / num_choices).clamp(min=1)
    return len(choices_E) * ((choices_E / num_tokens) * (probabilities_E / num_tokens)).sum()


def read_positions(targets: Tensor) -> Tensor:
    """Flags for the positions up to the last target of their row, bool like `targets`.

    The others are padding, and its amount depends on the batch's other rows.
    """
    return (targets != IGNORE_INDEX).flip(-1).cumsum(-1).flip(-1) > 0


def routing_sums(router_logits: tuple[Tensor, ...], num_choices: int, is_read: Tensor) -> tuple[Tensor, Tensor]:
    """`choices_E` and `probabilities_E` of one micro-batch.

    Args:
        router_logits: for each layer [N, E], all with the same experts.
        is_read: bool [B, T], N = B x T: `read_positions`, the positions that count.
    """
    is_read_N = is_read.flatten()
    num_experts = router_logits[0].shape[-1]
    choices_E = torch.zeros(num_experts, dtype=torch.int64, device=is_read.device)
    probabilities_E = torch.zeros(num_experts, dtype=torch.float32, device=is_read.device)
    for logits in router_logits:
        probabilities_NE = logits.reshape(-1, num_experts).softmax(dim=-1)
        chosen_NK = probabilities_NE.topk(num_choices, dim=-1).indices
        counted_NK = is_read_N[:, None].expand_as(chosen_NK)
        choices_E = choices_E.scatter_add(0, chosen_NK.flatten(), counted_NK.flatten().to(torch.int64))
        probabilities_E = probabilities_E + (probabilities_NE.float() * is_read_N[:, None]).sum(dim=0)
    return choices_E, probabilities_E


@contextlib.contextmanager
def recorded_router_logits(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Record the router logits of every layer that runs in this context, whatever outputs the caller requests."""
    seen: list[Tensor] = []

    def ask(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        return arguments, keywords | {"output_router_logits": True}

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        seen.extend(getattr(output, "router_logits", None) or ())

    handles = [
        model.base_model.register_forward_pre_hook(ask, with_kwargs=True),
        model.base_model.register_forward_hook(keep),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def find_router(model: PreTrainedModel, setting: str) -> Router | None:
    """Load-balancing loss that transformers' own forward adds for this model; None for a model without one.

    The model runs on a small batch. The number of experts per token is the one with which this module's formula gives the
    value that the model's forward returns, and the model's coefficient must explain what its forward adds to the loss.

    Args:
        model: still with transformers' own forward; left unchanged.
        setting: `model.router_loss`.

    Raises:
        ConfigError: the model's loss has another form, or transformers returns no router logits of its routers.
    """
    if setting == "off" or "output_router_logits" not in inspect.signature(type(model).forward).parameters:
        return None
    device = next(model.parameters()).device
    ids = (torch.arange(32, device=device).reshape(2, 16) * 7 + 1) % model.config.get_text_config().vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with recorded_router_logits(model) as router_logits:
                without = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=False)
            if not router_logits and _has_routers(model):
                raise ConfigError(
                    f"model.router_loss must be off where transformers returns no router logits, got {setting} for a model of type "
                    f"{model.config.model_type}, which has routers; {ROUTER_ADVICE}"
                )
            if not router_logits:
                return None
            try:
                with_loss = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
                value = getattr(with_loss, "aux_loss", None)
                found = None if value is None else _same_form(tuple(router_logits), ids, float(value))
            except (RuntimeError, ValueError, IndexError, TypeError):
                value, found = math.nan, None
    finally:
        model.train(was_training)
    if value is None:
        return None
    names = ("router_aux_loss_coef", "aux_loss_coef")
    coefficient = next((float(getattr(model, name)) for name in names if hasattr(model, name)), math.nan)
    if found is not None:
        added, rounding = float(with_loss.loss - without.loss), 1e-5 * abs(float(without.loss))
        if not math.isclose(added, coefficient * float(value), rel_tol=1e-2, abs_tol=rounding):
            found = None
    if found is None:
        raise ConfigError(
            f"model.router_loss must be off for a model of type {model.config.model_type}, got {setting}: its load-balancing "
            f"loss is of a form that is not known to add up over the parts of a global batch; {ROUTER_ADVICE}"
        )
    if coefficient == 0:
        return None
    return Router(router_logits[0].shape[-1], found, coefficient, is_exact=setting == "exact")


def _has_routers(model: PreTrainedModel) -> bool:
    """Test whether any module is of a class whose router logits transformers records."""
    recorders = getattr(model.base_model, "_can_record_outputs", None) or {}
    wanted = recorders.get("router_logits", ())
    classes = tuple(
        getattr(each, "target_class", each) for each in (wanted if isinstance(wanted, (list, tuple)) else [wanted])
    )
    return any(
        isinstance(module, tuple(each for each in classes if isinstance(each, type))) for module in model.modules()
    )


def _same_form(router_logits: tuple[Tensor, ...], ids: Tensor, value: float) -> int | None:
    """Number of choices with which this module's formula gives this value; None if there is none."""
    num_experts = router_logits[0].shape[-1]
    for num_choices in range(1, num_experts + 1):
        choices_E, probabilities_E = routing_sums(router_logits, num_choices, torch.ones_like(ids, dtype=torch.bool))
        ours = balance(choices_E, probabilities_E, num_choices)
        if math.isclose(float(ours), value, rel_tol=1e-5):
            return num_choices
    return None
