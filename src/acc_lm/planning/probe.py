"""Bytes of a micro-batch, measured on the recipe's own model without its data.

The model runs forward and backward on fake tensors with a few blocks and with one and two rows. Every phase grows
linearly with both, so two numbers of blocks and two of rows give every depth and micro-batch.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from acc_lm.errors import ConfigError, first_line
from acc_lm.modeling.build import DTYPES
from acc_lm.modeling.checks import check_parts_early, refuse_parts
from acc_lm.modeling.fake import FakeModel, build_fake_model, fake_config, period_of, switch_checkpointing, with_depth
from acc_lm.modeling.loss_head import ON_LOGITS
from acc_lm.modeling.losses import (
    as_on_gpu,
    chunk_positions,
    one_slice_of_each_chunk,
    padded_vocabulary,
    summed_loss,
)
from acc_lm.modeling.pretrained import check_length
from acc_lm.modeling.row_parts import RowParts
from acc_lm.modeling.vocabulary_parts import VocabularyParts
from acc_lm.runtime import Compute, LiveBytes, cut_fake_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from acc_lm.config import Config

Checkpointing = Literal["no", "selective", "full"]
SWITCH: dict[Checkpointing, bool | Literal["selective"]] = {"no": False, "selective": "selective", "full": True}
"""Value of `model.gradient_checkpointing` for each name."""
Used = Literal["backward", "sending", "freeing"]
"""Use of weights and gradients in a backward pass, by the names in `Phases`."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which configs of transformers have their number of experts."""
MANY_ROWS = 64
"""Rows of a micro-batch in which the gradients of activations outweigh those of weights."""


@dataclass(frozen=True)
class Phases:
    """Bytes of one micro-batch, on top of the weights.

    The loss head is apart: its size depends on the number of chunks and is not linear in the rows.
    """

    forward: float
    """The most during the forward pass of the body."""
    body: float
    """Activations and copies that exist at its end."""
    kept: float
    """Activations that are kept for the backward pass."""
    backward: float
    """The most during the backward pass of the body, with the gradients of one block's weights."""
    sending: float
    """The same if each gradient is sent away when it is complete."""
    freeing: float
    """The same if each weight is freed with it; relative to all weights, so it can be less than `kept`."""


@dataclass(frozen=True)
class Head:
    """Bytes of the fused loss of one micro-batch."""

    forward: float
    """The most while the chunks are computed."""
    kept: float
    """Gradients that are kept for the backward pass."""
    weight: float
    """The gradient of the head's weight among them."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    total: int
    trained: int
    head: int
    """Those of the output head, which an embedding may share."""
    block: int
    """Mean of the blocks; what is left of the total stands outside of them."""
    num_blocks: int
    is_tied: bool
    """True if the embedding shares the head's weight."""
    trains_head: bool = True
    known_of_block: int | None = None
    """Trained ones of a block, if they are not in proportion to all."""

    @property
    def outside(self) -> int:
        return self.total - self.num_blocks * self.block

    @property
    def trained_of_block(self) -> float:
        """Trained ones of a block."""
        return self.block * self.trained / self.total if self.known_of_block is None else self.known_of_block


class Probe:
    """Measurements of one recipe's model; each is made once.

    Args:
        vocab_size: ids of a vocabulary that is yet to be built.
        on_gpu: True: take the branches of a GPU, False: those of a CPU.
    """

    def __init__(self, config: Config, vocab_size: int, *, on_gpu: bool = True) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        if config.adapter.quantize_base != "none":
            raise ConfigError(
                f"adapter.quantize_base must be none for a plan, got {config.adapter.quantize_base}, whose weights exist only on a GPU; plan "
                "with adapter.quantize_base=none, which needs more memory, or measure it there with train.py --dry-run"
            )
        self._config, self._on_gpu = config, on_gpu
        self._mode = FakeTensorMode()  # one for all models, which are built once
        self._models: dict[tuple[Compute, int], PreTrainedModel] = {}
        self._model_config = fake_config(config.model, vocab_size)
        self.num_blocks: int = self._model_config.get_text_config().num_hidden_layers
        period = period_of(self._model_config)
        depths = (2 * period, 3 * period) if period is not None and self.num_blocks > 3 * period else ()
        self._depths: tuple[int, ...] = depths or (self.num_blocks,)
        self._phases: dict[tuple[Compute, Checkpointing, int, int], Phases] = {}
        self._heads: dict[tuple[Compute, int], Head] = {}
        self._parts: dict[tuple[str, int], Probe] = {}
        self._layer_parts = 1
        self._vocabulary: VocabularyParts | None = None
        """Division of the head among the processes that share layers."""
        self._row_parts: RowParts | None = None
        self._length = config.data.sequence_length
        """Positions of a row that a process computes."""
        self.parameters, self._sizes, self.is_fused = self._count()

    def in_parts(self, size: int) -> Probe:
        """Measurements of the same model whose rows are shared by `size` processes; itself for 1.

        Raises:
            ConfigError: rows of this model cannot be shared by so many.
        """
        if size == 1:
            return self
        key = "rows", size
        if key not in self._parts:
            whole = copy.copy(self)
            whole._layer_parts = 1  # the check calls modules without weights, which parts of layers have
            with self._fake():
                check_parts_early(whole._build(self._depths[0], torch.bfloat16, "no").model, self._length, size)
            if not self.is_fused:
                refuse_parts(self._model_config, size, f"a loss {ON_LOGITS}")
            part = self._parts[key] = copy.copy(self)
            part._row_parts = RowParts.without_others(size)
            part._length = -(-self._length // size)
            part._phases, part._heads = {}, {}
        return self._parts[key]

    def in_layers(self, size: int) -> Probe:
        """Measurements of one process's part of the model, whose layers are shared by `size` processes; itself for 1.

        Raises:
            ConfigError: layers of this model cannot be shared by so many.
        """
        if size == 1:
            return self
        key = "layers", size
        if key not in self._parts:
            part = copy.copy(self)
            part._layer_parts, part._parts = size, {}
            part._phases, part._heads, part._models = {}, {}, {}
            part.parameters, part._sizes, part.is_fused = part._count()
            self._parts[key] = part
        return self._parts[key]

    @property
    def sizes(self) -> dict[str, Any] | None:
        """Sizes of a dense decoder by the names of `speed.Shape`; None for any other model."""
        text = self._model_config.get_text_config()
        values = text.to_dict()
        if any(values.get(name) for name in EXPERTS) or not hasattr(text, "num_attention_heads"):
            return None
        hidden, heads = text.hidden_size, text.num_attention_heads
        inner = values.get("intermediate_size") or values.get("n_inner") or values.get("ffn_dim") or 4 * hidden
        kv_heads = values.get("num_key_value_heads") or heads
        size = values.get("head_dim") or hidden // heads
        attention = 2 * hidden * size * (heads + kv_heads)
        is_gated = self.parameters.block > attention + 2.5 * hidden * inner
        tied = bool(text.tie_word_embeddings)
        known = attention + (3 if is_gated else 2) * hidden * inner
        other = self.parameters.total - self.num_blocks * known - self.parameters.head * (1 if tied else 2)
        if abs(other) > 0.05 * self.parameters.total:
            return None
        return {
            "layers": self.num_blocks,
            "hidden": hidden,
            "ffn": inner,
            "gated": is_gated,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_size": size,
            "vocab": self._sizes[0],
            "tied": tied,
            "other_parameters": other,
            "vocab_in_parts": self.is_fused,
        }

    @property
    def no_speed(self) -> str:
        """Reason why the speed of this model is not modelled; empty if it is."""
        if self.parameters.trained < self.parameters.total:
            return "adapters: no published run with frozen weights was fitted"
        if any(self._model_config.get_text_config().to_dict().get(name) for name in EXPERTS):
            return "mixtures of experts: no published run with experts was fitted"
        return (
            "" if self.sizes else f"blocks of {self._model_config.model_type}, which are not those of a plain decoder"
        )

    def _count(self) -> tuple[Parameters, tuple[int, int], bool]:
        counts = []
        for depth in self._depths:
            with self._fake():
                fake = self._build(depth, torch.bfloat16, "no")
                parameters = list(fake.model.parameters())
                trained = sum(p.numel() for p in parameters if p.requires_grad)
                weight = fake.model.get_output_embeddings().weight
                self._vocabulary = getattr(fake.model.get_output_embeddings(), "parts", None)
                is_tied = getattr(fake.model.get_input_embeddings(), "weight", None) is weight
                counts.append((sum(p.numel() for p in parameters), trained))
        (total, trained), *more = counts
        block = 0
        if more:
            block = (more[0][0] - total) // (self._depths[1] - self._depths[0])
            blocks = self.num_blocks - self._depths[0]
            trained += (more[0][1] - trained) // (self._depths[1] - self._depths[0]) * blocks
            total += block * blocks
        else:
            block = (total - weight.numel()) // self.num_blocks
        of_block = None
        if more and self._config.adapter.also_train:  # which is trained more than in proportion
            of_block = (more[0][1] - counts[0][1]) // (self._depths[1] - self._depths[0])
        trains_head = weight.requires_grad
        found = Parameters(total, trained, weight.numel(), block, self.num_blocks, is_tied, trains_head, of_block)
        return found, tuple(weight.shape), fake.is_fused

    @contextlib.contextmanager
    def _fake(self) -> Iterator[None]:
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the error says it again
        with self._mode, as_on_gpu() if self._on_gpu else contextlib.nullcontext():
            yield

    def _build(self, depth: int, dtype: torch.dtype, checkpointing: Checkpointing) -> FakeModel:
        model = self._config.model.model_copy(update={"gradient_checkpointing": SWITCH[checkpointing]})
        length = self._config.data.sequence_length
        fake = build_fake_model(model, with_depth(self._model_config, depth), length, dtype, self._config.adapter)
        check_length(fake.model, length)
        if self._layer_parts > 1:
            cut_fake_layers(fake.model, self._layer_parts)
        return fake

    def _dtype(self, compute: Compute) -> torch.dtype:
        """Dtype of the weights that a forward pass reads."""
        return torch.bfloat16 if compute == "cast" else DTYPES[self._config.model.dtype]

    def phases(self, micro_batch_size: int, checkpointing: Checkpointing, *, compute: Compute) -> Phases:
        """Bytes of a micro-batch of this many rows.

        Args:
            compute: as in `Placement`.
        """
        rows = [1] if micro_batch_size == 1 else [1, 2]
        if len(self._depths) == 1:
            corners = [[self._run(compute, checkpointing, self._depths[0], b)] * 2 for b in rows]
        else:
            corners = [[self._run(compute, checkpointing, depth, b) for depth in self._depths] for b in rows]
        low, high = self._depths[0], self._depths[-1]
        more = (self.num_blocks - low) / (high - low) if high > low else 0.0

        def at(name: str) -> float:
            of_rows = [getattr(a, name) + more * (getattr(b, name) - getattr(a, name)) for a, b in corners]
            return float(of_rows[0] + (of_rows[-1] - of_rows[0]) * (micro_batch_size - 1))

        return Phases(*(at(one.name) for one in fields(Phases)))

    def of_one_block(
        self, micro_batch_size: int, checkpointing: Checkpointing, *, compute: Compute, weights: Used = "backward"
    ) -> float:
        """Bytes that the backward pass of a block needs on top of what is kept.

        The most is where gradients of weights are large or where those of activations are, so it is not linear in the rows:
        the larger of two lines, of few rows and of many. Many cost no more to run than few.

        Args:
            weights: what becomes of weights and their gradients within a block, as in `Phases`.
        """
        size = micro_batch_size

        def at(num_rows: int) -> float:
            found = self._run(compute, checkpointing, self._depths[0], num_rows)
            most: float = getattr(found, weights)
            return max(0.0, most - found.kept)

        if size <= 2:
            return at(size)
        lines = ((1, 2), (MANY_ROWS, 2 * MANY_ROWS))
        return max(at(a) + (at(b) - at(a)) / (b - a) * (size - a) for a, b in lines)

    def _run(self, compute: Compute, checkpointing: Checkpointing, depth: int, num_rows: int) -> Phases:
        key = compute, checkpointing, depth, num_rows
        if key not in self._phases:
            try:
                with self._fake():
                    self._phases[key] = self._measure(*key)
            except Exception as error:  # a model's own code raises anything where it reads values
                raise ConfigError(
                    f"model must be one that runs without data, got {self._model_config.model_type}: {first_line(error)[:100]}; "
                    "measure it with --dry-run"
                ) from None
        return self._phases[key]

    def _model(self, compute: Compute, checkpointing: Checkpointing, depth: int) -> PreTrainedModel:
        key = compute, depth
        if key not in self._models:
            model = self._models[key] = self._build(depth, self._dtype(compute), "no").model
            if compute == "cast":
                for parameter in model.parameters():  # adapters are built in fp32
                    parameter.data = parameter.data.to(self._dtype(compute))
        model = self._models[key]
        switch_checkpointing(model, SWITCH[checkpointing])
        return model

    def _measure(self, compute: Compute, checkpointing: Checkpointing, depth: int, num_rows: int) -> Phases:
        model = self._model(compute, checkpointing, depth)
        ids = torch.zeros(num_rows, self._length, dtype=torch.int64)
        live = _BackwardBytes()
        for tensor in (*model.parameters(), *model.buffers()):
            live.add(tensor)
        weights = live.now
        with live.counting():
            with torch.autocast("cpu", torch.bfloat16, enabled=compute == "autocast"):
                output = self._forward(model, ids)
                body, forward = live.now - weights, live.most - weights
            kept = live.now - weights  # autocast has freed the copies that no graph holds
            live.forget()
            with live.dropping_gradients(model, self.parameters.block):
                output.backward(output.detach())
            backward = (each - weights for each in (live.most_held, live.most, live.most_freed))
            del output
        return Phases(forward, body, kept, *backward)

    def _forward(self, model: Any, ids: Tensor) -> Tensor:
        """Hidden states of the body, or the loss of a model that computes it on all logits.

        The body starts from embeddings where it can: the gradient of an embedding is as large as its table, and is
        counted apart.
        """
        if not self.is_fused:
            loss: Tensor = model(input_ids=ids, targets=ids)
            return loss
        table = model.get_input_embeddings()
        embedded = table(ids).detach().requires_grad_()
        given: dict[str, Any] = {}
        if self._row_parts is not None:
            positions = torch.arange(ids.shape[1]).expand_as(ids)
            given = {"position_ids": positions, "row_parts": self._row_parts}
        try:
            hidden: Tensor = model.base_model(inputs_embeds=embedded, use_cache=False, **given)[0]
        except (TypeError, ValueError):
            hidden = model.base_model(input_ids=ids, use_cache=False, **given)[0]
        return hidden

    def head(self, micro_batch_size: int, *, compute: Compute) -> Head:
        """Bytes of the fused loss for this many rows; nothing if the model computes all logits itself."""
        key = compute, micro_batch_size
        if not self.is_fused:
            return Head(0.0, 0.0, 0.0)
        if key not in self._heads:
            vocab_size, width = self._sizes
            positions = micro_batch_size * self._length
            is_trained = self.parameters.trains_head
            with self._fake():
                dtype = self._dtype(compute)
                reads = torch.bfloat16 if compute == "autocast" else dtype
                few = self._two_chunks(positions)
                more = (positions - few) * width * reads.itemsize  # gradients of the hidden states, which are kept
                hidden = torch.zeros(few, width, dtype=reads, requires_grad=True)
                weight = torch.zeros(vocab_size, width, dtype=dtype, requires_grad=is_trained)
                ids = torch.zeros(few, dtype=torch.int64)
                live = LiveBytes()
                for tensor in (hidden, weight, ids):
                    live.add(tensor)
                before = live.now
                autocast = torch.autocast("cpu", torch.bfloat16, enabled=compute == "autocast")
                with live.counting(), autocast, one_slice_of_each_chunk():
                    loss = summed_loss(hidden, weight, None, ids, self._vocabulary)
                forward, kept = live.most - before + more, live.now - before + more
                self._heads[key] = Head(forward, kept, 4.0 * weight.numel() * is_trained)
                del loss
        return self._heads[key]

    def _two_chunks(self, num_positions: int) -> int:
        """Positions of the loss's first two chunks, which need as much as all of them, or all if these are other chunks."""
        device = torch.device("cpu")
        vocab_size = padded_vocabulary(self._sizes[0], device)
        size = chunk_positions(num_positions, vocab_size, device)
        few = min(num_positions, 2 * size)
        return few if chunk_positions(few, vocab_size, device) == size else num_positions


class _BackwardBytes(LiveBytes):
    """Counter for a backward pass whose gradients are dropped: the most as it is, and as it would be if some were held."""

    def __init__(self) -> None:
        super().__init__()
        self._held = 0
        self.most_held = 0
        """The most if gradients were held."""
        self.most_freed = 0
        """The most if the weights of these gradients were freed when they are complete."""

    def _grow(self, num_bytes: int) -> None:
        super()._grow(num_bytes)
        self.most_held = max(self.most_held, self.now + self._held)
        self.most_freed = max(self.most_freed, self.now - self._held)

    def forget(self) -> None:
        super().forget()
        self.most_held = self.most_freed = self.now

    @contextlib.contextmanager
    def dropping_gradients(self, model: Any, num_elements: int) -> Iterator[None]:
        """Drop all gradients in this context; the first, of about this many elements, count as held."""
        seen = 0

        def drop(parameter: Tensor) -> None:
            nonlocal seen
            size, gradient = 0, parameter.grad
            if seen < num_elements and gradient is not None:
                size = self._rounded(gradient.untyped_storage().nbytes())
            seen += parameter.numel()
            del gradient
            parameter.grad = None
            self._held += size
            self._grow(0)

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(drop) for parameter in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def vocabulary_of(config: Config) -> int:
    """Number of ids that the model needs if its config names none, or if the recipe enlarges its vocabulary."""
    from acc_lm.text.tokenizer import count_ids, load_tokenizer, vocabulary_to_build

    is_enlarged = config.tokenizer.add_tokens or config.tokenizer.add_special_tokens or config.model.resize_embeddings
    if not is_enlarged if config.model.config is None else "vocab_size" in config.model.config:
        return 0
    try:
        tokenizer = load_tokenizer(config.tokenizer, config.model)
    except ConfigError as error:
        raise ConfigError(f"{error}; for a plan alone, model.config.vocab_size=N does without it") from None
    if tokenizer is not None:
        return count_ids(tokenizer)
    return vocabulary_to_build(config.tokenizer)
