"""Layers in parts: the processes of a group read the same rows, and each computes with other parts of every layer.

In an attention or feed-forward module the first matrices are cut by their outputs (heads, or units) and the last one by
its inputs, so that a process needs nothing from the others until it adds up the result:

    x (same on all) -> first matrices: some heads or units -> last matrix: one term of a sum -> all-reduce -> same on all

Backward the gradient of x is a sum, too: each module communicates twice, a block four times. Embedding and head are cut by
the ids of the vocabulary (`modeling.vocabulary_parts`); norms are complete on each process. Source: Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053; the model's own plan in
transformers says what is cut. Weights are plain tensors, so an engine sees a narrower model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.errors import ConfigError
from acc_lm.modeling.loss_head import LossHead
from acc_lm.modeling.vocabulary_parts import (
    VocabularyParts,
    divide_embedding,
    is_plain_embedding,
    parts_add_up,
)
from acc_lm.runtime.settings.grid import parts_of_rows
from acc_lm.runtime.settings.strategy import bare_model

if TYPE_CHECKING:
    from datetime import timedelta

BY_OUTPUTS, BY_INPUTS, OF_EACH_HEAD = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Rules of transformers' plans that are followed here; the others are refused, but for embeddings and head."""
NUMBERS_OF_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
"""Attributes in which attention modules of transformers keep numbers of heads."""


@dataclass
class LayerParts:
    """Division of a model's layers over a group of processes; of size 1: layers are complete."""

    size: int = 1
    index: int = 0
    """Index of this process's part."""
    dimension: dict[str, int] = field(default_factory=dict)
    """Dimension along which a parameter is cut, by its name; other parameters are complete."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Complete shape of each cut parameter."""
    first: dict[str, int] = field(default_factory=dict)
    """First row or column of each cut parameter that is here."""
    vocabulary: str = ""
    """Reason why embedding and head are complete; empty if they are cut."""
    of_each_head: list[str] = field(default_factory=list)
    """Names of complete parameters that each head uses: their gradient is a sum over the parts."""
    group: Any = None

    def keep(self, name: str, dimension: int, shape: tuple[int, ...], first: int) -> None:
        """Record a parameter that is cut."""
        self.dimension[name], self.shapes[name], self.first[name] = dimension, shape, first

    def shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """Complete shape of a parameter of this model."""
        return self.shapes.get(name, tuple(parameter.shape))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the parts, in place; nothing without a group, on fake tensors."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


def layer_parts(model: nn.Module) -> LayerParts:
    """Division of this model's layers."""
    found: LayerParts = getattr(bare_model(model), "layer_parts", LayerParts())
    return found


class _Enter(torch.autograd.Function):
    """The input of a module in parts: backward its gradients are summed, once for all matrices that read it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: LayerParts) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.sum(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    """The output of a module in parts: the terms are summed, and each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: LayerParts) -> Tensor:
        return parts.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class LinearOfParts(nn.Linear):
    """Last matrix of a module in parts: the model's own with another class; its bias is added once."""

    parts: LayerParts

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = _Leave.apply(nn.functional.linear(x, self.weight), self.parts)
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class _Trial(LayerParts):
    """All parts on one process, one after the other: after the last one the sum is complete."""

    total: Tensor | None = None

    def sum(self, tensor: Tensor) -> Tensor:
        self.total = tensor if self.total is None else self.total + tensor
        return self.total


@dataclass
class _CutModule:
    """An attention or feed-forward module that the plan cuts."""

    name: str
    module: nn.Module
    dimension: dict[str, int] = field(default_factory=dict)
    of_each_head: list[str] = field(default_factory=list)
    last: nn.Linear | None = None

    def take(self, parts: LayerParts) -> None:
        """Keep only this process's part of the weights, and the numbers of heads that are in it."""
        for name, dimension in self.dimension.items():
            parameter = self.module.get_parameter(name)
            parameter.data = parameter.data.chunk(parts.size, dimension)[parts.index].clone()
        for name in NUMBERS_OF_HEADS:
            if isinstance(number := getattr(self.module, name, None), int):
                setattr(self.module, name, number // parts.size)
        assert self.last is not None
        self.last.__class__, self.last.parts = LinearOfParts, parts  # type: ignore[assignment]


def cut_layers(model: nn.Module, size: int, timeout: timedelta | None = None) -> None:
    """Keep only this process's part of the layers of a complete model. Every process calls, with the same weights.

    Raises:
        ConfigError: the model cannot be cut by its plan.
    """
    group, _ = dist.new_subgroups(size, timeout=timeout)  # neighbours, which share a machine where they can
    parts = LayerParts(size, group.rank(), group=group)
    modules = modules_to_cut(model, size)
    _check_parts(model, modules, size)
    parts.vocabulary = why_vocabulary_is_complete(model, size)
    if not parts.vocabulary and not parts_add_up(model.get_input_embeddings(), size):  # type: ignore[operator]
        parts.vocabulary = "an embedding that needs all of its rows"
    _cut(model, modules, parts)


def cut_fake_layers(model: nn.Module, size: int) -> None:
    """Keep a part of the layers of a complete model on fake tensors, whose sums over the parts send nothing.

    Raises:
        ConfigError: the model cannot be cut by its plan.
    """
    _cut(model, modules_to_cut(model, size), LayerParts(size, vocabulary=why_vocabulary_is_complete(model, size)))


def _cut(model: nn.Module, modules: list[_CutModule], parts: LayerParts) -> None:
    for cut in modules:
        for name, dimension in cut.dimension.items():
            shape = tuple(cut.module.get_parameter(name).shape)
            first = parts.index * (shape[dimension] // parts.size)
            parts.keep(f"{cut.name}.{name}", dimension, shape, first)
        parts.of_each_head += [f"{cut.name}.{name}" for name in cut.of_each_head]
        cut.take(parts)
        cut.module.register_forward_pre_hook(_entering(parts), with_kwargs=True)
    if not parts.vocabulary:
        _cut_vocabulary(model, parts)
    model.layer_parts = parts  # type: ignore[assignment]


def why_vocabulary_is_complete(model: Any, size: int) -> str:
    """Reason why embedding and head cannot be cut by ids; empty if they can."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(head, LossHead):
        return "a loss on the model's own logits"
    if not is_plain_embedding(embedding) or embedding.weight.shape[0] != head.weight.shape[0]:
        return "an embedding that is not a plain one"
    others = (m for m in model.modules() if m is not embedding and m is not head)
    used = {id(p) for module in others for p in module._parameters.values()}
    if {id(embedding.weight), id(head.weight)} & used:
        return "a weight that is shared with other layers"
    return "fewer ids than parts" if embedding.weight.shape[0] < size else ""


def _cut_vocabulary(model: Any, parts: LayerParts) -> None:
    """Keep only this process's ids of embedding and head; a weight that they share is cut once."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    division = VocabularyParts(len(head.weight), parts.size, parts.index, parts.group)
    cut = [each for each in (embedding.weight, head.weight, head.bias) if each is not None]
    for name, parameter in model.named_parameters():
        if any(parameter is each for each in cut):
            parts.keep(name, 0, tuple(parameter.shape), division.first)
            parameter.data = division.cut(parameter.data)
    divide_embedding(embedding, division)
    head.parts = division


def _entering(parts: LayerParts) -> Any:
    def enter(value: Any) -> Any:
        return _Enter.apply(value, parts) if isinstance(value, Tensor) and value.requires_grad else value

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return tuple(map(enter, arguments)), {name: enter(value) for name, value in keywords.items()}

    return hook


def modules_to_cut(model: Any, size: int) -> list[_CutModule]:
    """List the modules that the model's plan in transformers cuts, after checks that need no weights.

    Raises:
        ConfigError: there is no plan, it has other rules, or a size does not divide.
    """
    whole = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    rules = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), rule) for key, rule in model.tp_plan.items()]
    found: dict[str, _CutModule] = {}
    if rules:
        _check_heads(model, size)
    for name, module in [*model.named_modules(), *model.named_parameters()]:
        rule = next((rule for pattern, rule in rules if pattern.fullmatch(name)), None)
        if rule is None or id(module) in whole:
            continue
        if rule not in (BY_OUTPUTS, BY_INPUTS, OF_EACH_HEAD) or isinstance(module, nn.Parameter):
            _refuse(model, size, f"layers that are cut by the rule {rule}")
        parent, _, own = name.rpartition(".")
        cut = found.setdefault(parent, _CutModule(parent, model.get_submodule(parent)))
        if rule == OF_EACH_HEAD:
            cut.of_each_head += [f"{own}.{each}" for each, _ in module.named_parameters()]
            continue
        if type(module) is not nn.Linear:
            _refuse(model, size, f"layers of type {type(module).__name__}")
        rows_or_columns = 0 if rule == BY_OUTPUTS else 1
        if module.weight.shape[rows_or_columns] % size:
            _refuse(model, size, f"{module.weight.shape[rows_or_columns]} units in {name}, which do not divide")
        cut.dimension[f"{own}.weight"] = rows_or_columns
        if rule == BY_OUTPUTS and module.bias is not None:
            cut.dimension[f"{own}.bias"] = 0
        if rule == BY_INPUTS:
            cut.last = module if cut.last is None else _refuse(model, size, f"several last matrices in {parent}")
    if not found:
        _refuse(model, size, "no plan in transformers of how its layers are cut")
    for cut in found.values():
        _check_module(model, cut, size)
    return list(found.values())


def _check_heads(model: Any, size: int) -> None:
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(shared, int):  # by layer: the trial of the parts decides
        return
    if heads % size or shared % size:
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and shared % n == 0]
        near = [*[n for n in possible if n < size][-1:], *[n for n in possible if n > size][:1]]
        raise ConfigError(
            f"parallelism_config_tp_size must divide the {heads} attention heads and the {shared} key-value heads of the model, got {size}; "
            f"nearest: {' or '.join(map(str, near))}"
        )
    rows, own, own_shared = parts_of_rows(), heads // size, shared // size
    if own % rows or (own_shared % rows and rows % own_shared):
        raise ConfigError(
            f"parallelism_config_sp_size (or cp_size) must divide the {own} attention heads of a part of a layer, and divide or be a multiple of "
            f"its {own_shared} key-value heads, got {rows} with tp_size {size}; lower one of the two"
        )


def _check_module(model: Any, cut: _CutModule, size: int) -> None:
    """Check that a module consists of matrices in parts, and of parameters that each head uses."""
    if cut.last is None or not any(dimension == 0 for dimension in cut.dimension.values()):
        _refuse(model, size, f"a module {cut.name} without a first and a last matrix")
    last = next(name for name, each in cut.module.named_children() if each is cut.last)
    for name, parameter in cut.module.named_parameters():
        if name not in cut.dimension and name not in cut.of_each_head and name != f"{last}.bias":
            _refuse(model, size, f"{cut.name}.{name}, which its plan does not name")
        if name in cut.of_each_head and parameter.dim() != 1:
            _refuse(model, size, f"{cut.name}.{name}, which differs between heads")
    dropped = [each.p for each in cut.module.modules() if isinstance(each, nn.Dropout)]
    if max([float(getattr(cut.module, "attention_dropout", 0.0) or 0.0), *dropped]) > 0:
        _refuse(model, size, "dropout inside its layers, whose masks would repeat from part to part")


def _check_parts(model: Any, modules: list[_CutModule], size: int) -> None:
    """Check on one process that the parts of one module of each kind give the outputs of the complete one.

    Raises:
        ConfigError: an output differs.
    """
    kinds = {(type(cut.module), *cut.dimension): cut for cut in modules}
    calls: dict[str, tuple[Any, ...]] = {}

    def record(name: str) -> Any:
        return lambda module, *call: calls.setdefault(name, call) and None

    handles = [cut.module.register_forward_hook(record(cut.name), with_kwargs=True) for cut in kinds.values()]
    was_training, attention = model.training, model.config._attn_implementation
    model.eval()
    if attention == "flex_attention":  # compiled, for devices
        model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            ids = torch.arange(1, 9)[None] * 7 % model.config.get_text_config().vocab_size
            model.base_model(input_ids=ids, use_cache=False)
            for handle in handles:
                handle.remove()
            same = all(_is_sum(cut, size, *calls[cut.name]) for cut in kinds.values() if cut.name in calls)
    finally:
        model.train(was_training)
        if attention == "flex_attention":
            model.set_attn_implementation(attention)
    if not same:
        _refuse(model, size, "outputs that change when layers are cut")


def _is_sum(cut: _CutModule, size: int, arguments: Any, keywords: Any, expected: Any) -> bool:
    """Test whether the module's parts, each with its heads, add up to its output."""
    weights = {name: parameter.data for name, parameter in cut.module.named_parameters()}
    numbers = {name: getattr(cut.module, name) for name in NUMBERS_OF_HEADS if hasattr(cut.module, name)}
    trial = _Trial(size)
    got: Any = None
    try:
        for trial.index in range(size):
            cut.take(trial)
            got = cut.module(*arguments, **keywords)
            _restore(cut, weights, numbers)
    except (RuntimeError, ValueError, TypeError, IndexError):  # its code counts on complete heads
        return False
    finally:
        _restore(cut, weights, numbers)
    got, expected = (each[0] if isinstance(each, tuple) else each for each in (got, expected))
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


def _restore(cut: _CutModule, weights: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    for name, parameter in cut.module.named_parameters():
        parameter.data = weights[name]
    for name, number in numbers.items():
        setattr(cut.module, name, number)
    assert cut.last is not None
    cut.last.__class__ = nn.Linear


def _refuse(model: Any, size: int, got: str) -> NoReturn:
    raise ConfigError(
        f"parallelism_config_tp_size must be 1 for a model of type {model.config.model_type}, got {size} for {got}; use "
        "accelerate_configs/fsdp2.yaml, or sequence_parallel.yaml for long rows"
    )
