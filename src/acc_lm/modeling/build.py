"""A causal language model, from scratch or pretrained, whose training forward returns a loss and never logits."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm.activations import checkpoint_arguments
from acc_lm.adapter import SETTINGS, add_adapter, freeze, weights_checksum
from acc_lm.attention import (
    CAUSAL,
    CAUSAL_WITHOUT_MASK,
    attention_looked_at,
    choose_attention,
    document_mask,
    own_masks,
    probe_length,
    register_attention,
    register_counting_attention,
    use_block_masks,
)
from acc_lm.config import AdapterConfig, ModelConfig
from acc_lm.errors import ConfigError, MachineError, UserError
from acc_lm.experts import use_autocast
from acc_lm.losses import (
    IGNORE_INDEX,
    LossSums,
    loss_sums,
    losses_of_logits,
    position_losses,
    summed_loss,
    sums_of_logits,
)
from acc_lm.router import Routed, Router, find_router, recorded_router_logits, routing_sums
from acc_lm.runtime import is_out_of_memory
from acc_lm.throughput import Flops, count_flops, few_tokens
from acc_lm.tokenizer import count_ids, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FUSED, ON_LOGITS = "fused with the head", "on the model's own logits"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
NO_ADAPTER = AdapterConfig()


@dataclass(frozen=True)
class ModelFacts:
    """What was built; shown at start."""

    num_parameters: int
    num_trainable: int
    attention: str
    loss: str
    dropout: float
    flops: Flops
    base: str = ""
    """Checksum of the weights before training, of a model that was trained before; else empty."""
    router: Router | None = None
    """Routing of a mixture of experts that is trained with its load-balancing loss."""


class LossHead(nn.Linear):
    """The output head, which given targets returns their loss instead of logits.

    It is the model's own head with another class: same parameter, same name, same tie. Inside a head's forward even
    sharded weights are whole, so the fused loss works on every engine.
    """

    def forward(self, hidden: Tensor, targets: Tensor | None = None, by_position: bool = False) -> Any:
        """Logits [..., V]; with targets the summed loss when training, `LossSums` or `PositionLosses` when evaluating."""
        if targets is None:
            return super().forward(hidden)
        if by_position:
            return position_losses(hidden, self.weight, self.bias, targets)
        compute = summed_loss if self.training else loss_sums
        return compute(hidden, self.weight, self.bias, targets)


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
    given = _documents(model, position_ids, document_ids)
    if targets is None and last is None:
        return type(model).forward(model, input_ids=input_ids, **given, **keywords)
    if num_choices is not None:
        given["output_router_logits"] = True
    output = model.base_model(input_ids=input_ids, use_cache=False, **given)
    hidden = output[0]
    if num_choices is not None:
        assert targets is not None
        choices, probabilities = routing_sums(output.router_logits, num_choices, targets)
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
        choices, probabilities = routing_sums(tuple(router_logits), num_choices, targets)
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
    """One position of each row, [B, X]: the one behind which the likeliest id is asked for."""
    return values_BLX[torch.arange(len(last_B), device=last_B.device), last_B]


def _documents(model: Any, position_ids: Tensor | None, document_ids: Tensor | None) -> dict[str, Any]:
    """What tells the model of the documents in its rows; nothing for rows of one."""
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


def build_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    seed: int,
    adapter: AdapterConfig = NO_ADAPTER,
    packs: bool = False,
    device_type: str = "cpu",
) -> tuple[PreTrainedModel, ModelFacts]:
    """The model on the CPU, ready to be prepared: `model(input_ids, targets)` returns the summed loss.

    From scratch, the weights are a function of the seed alone: drawn on the CPU in float32, whatever trains them.

    Args:
        packs: rows will hold several documents, with `position_ids` and `document_ids`.
        device_type: where the model will run.

    Raises:
        ConfigError: no such model, or it does not fit the tokenizer, the rows, the adapter or what is to be frozen.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    if config.config is not None:
        model_config = scratch_config(config, tokenizer)
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
        for embedding in _train_every_row(model):
            model._init_weights(embedding)  # the row was zeroed
    else:
        model = _load_pretrained(config)
    with _must_run("model"):
        router = find_router(model, config.router_loss)
    attention, loss = make_ready(model, config, tokenizer, sequence_length, packs, device_type)
    base = weights_checksum(model) if config.config is None else ""
    _choose_trained(model, config, adapter, seed, base)
    parameters = list(model.parameters())
    facts = ModelFacts(
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        attention=attention,
        loss=loss,
        dropout=dropout_of(model),
        flops=flops_of_model(model, attention),
        base=base,
        router=router,
    )
    model.train()
    return model, facts


def flops_of_model(model: PreTrainedModel, attention: str) -> Flops:
    """What it computes for a token; `attention` is what people are told of it. The model is left as it was."""
    if attention != CAUSAL_WITHOUT_MASK:
        return Flops(0.0, 0.0, f"how much of a row {attention} looks at is not known here")
    ids = few_tokens(model.config.get_text_config().vocab_size, next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        with attention_looked_at(model) as seen:
            return count_flops(model, lambda: model(input_ids=ids, use_cache=False), ids.numel(), lambda: seen)
    except Exception as error:  # such as weights in 4 bits, which exist on their device only
        return Flops(0.0, 0.0, f"the model does not run before it is on its device ({first_line(error)})")
    finally:
        model.train(was_training)


def make_ready(
    model: PreTrainedModel,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    packs: bool,
    device_type: str,
) -> tuple[str, str]:
    """Types, attention and loss of a model that has its weights; returns what people are told of the last two."""
    _fit_to_recipe(model, config, tokenizer, sequence_length)
    with _must_run("model"):  # in the type that the weights were drawn or stored in, which may see more
        check_causal(model, config, sequence_length)
        attention = choose_attention(model, sequence_length)
        loss = install_loss(model)
    for parameter in model.parameters():  # buffers such as rotary frequencies stay in float32
        parameter.data = parameter.data.to(DTYPES[config.dtype])
    if packs:
        check_packing(model, sequence_length)
        attention = _prepare_packing(model, attention, device_type)
    return attention, loss


def build_empty_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    facts: ModelFacts,
    adapter: AdapterConfig = NO_ADAPTER,
    packs: bool = False,
    device_type: str = "cpu",
) -> PreTrainedModel:
    """What `build_model` returns, with weights that are reserved but neither drawn nor touched.

    For processes that get their weights from the main one; `facts` are what it found out with the real weights.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    model_config = _pretrained_config(config) if config.config is None else scratch_config(config, tokenizer)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
        _fit_to_recipe(model, config, tokenizer, sequence_length)
    dtype = DTYPES[config.dtype]
    # An untouched tensor takes no memory: only what a process will really hold is ever written.
    model._apply(lambda t: torch.empty(t.shape, dtype=dtype) if t.is_meta else t)
    model.tie_weights()
    if facts.attention == CAUSAL_WITHOUT_MASK:
        model.set_attn_implementation(register_attention())
    elif packs:
        _prepare_packing(model, facts.attention, device_type)
    _use_loss(model, fused=facts.loss == FUSED)
    _choose_trained(model, config, adapter, 0, facts.base)
    model.train()
    return model


def _prepare_packing(model: PreTrainedModel, attention: str, device_type: str) -> str:
    """No dense mask on a GPU where transformers' own attention stays; returns what people are told of the attention."""
    return use_block_masks(model) if attention != CAUSAL_WITHOUT_MASK and device_type == "cuda" else attention


def _choose_trained(model: PreTrainedModel, config: ModelConfig, adapter: AdapterConfig, seed: int, base: str) -> None:
    """Everything is trained, but for what the recipe freezes, or nothing but an adapter."""
    freeze(model, config.freeze)
    if adapter.kind != "none":
        add_adapter(model, adapter, seed, base)


def _fit_to_recipe(
    model: PreTrainedModel, config: ModelConfig, tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> None:
    """Embeddings for every id, positions for every row, activation checkpointing."""
    vocab_size = count_ids(tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    if vocab_size > rows and config.resize_embeddings:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    elif vocab_size > rows:
        raise ConfigError(
            f"model vocab_size must be at least the tokenizer's {vocab_size} ids, got {rows}; "
            "use the model's own tokenizer, or set model.resize_embeddings=true"
        )
    _check_length(model, sequence_length)
    if config.dtype == "float64":
        model.set_experts_implementation("eager")  # the kernels that multiply experts in groups do not take it
    else:
        use_autocast(model)
    _train_every_row(model)
    _check_checkpointing(model, config)
    if config.gradient_checkpointing:
        # transformers is renaming the switch; both names take the same keywords.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(checkpoint_arguments(config.gradient_checkpointing))


def _train_every_row(model: PreTrainedModel) -> list[nn.Embedding]:
    """Let the row of the padding id get its gradient like any other; returns the embeddings that exempted it.

    Rows are never padded with it, and it often is the end token, which they do hold.
    """
    exempting = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module.padding_idx is not None
        # Positions that are counted from it, in a forward of their own, need it.
        and (
            type(module).forward is nn.Embedding.forward or "padding_idx" not in type(module).forward.__code__.co_names
        )
    ]
    for module in exempting:
        module.padding_idx = None
    return exempting


def _check_checkpointing(model: PreTrainedModel, config: ModelConfig) -> None:
    if config.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"model.gradient_checkpointing must be false for a model of type {model.config.model_type}, got "
            f"{str(config.gradient_checkpointing).lower()}, which transformers does not implement for it; set it to false"
        )


def check_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    sequence_length: int,
    may_be_unused: bool = False,
    adapter: AdapterConfig = NO_ADAPTER,
) -> PreTrainedModel:
    """Before any text is read: can this model be built, and run one row?

    It runs forward and backward on the meta device, which costs neither memory nor time, and is returned.

    Args:
        may_be_unused: parameters that no loss depends on are no mistake.

    Raises:
        ConfigError: with what the model's own code says, or with the parameters that would never get a gradient.
    """
    try:
        model = _run_on_meta(config, tokenizer, vocab_size, sequence_length, may_be_unused, adapter)
    except ConfigError:
        if config.config is None or "pad_token_id" in config.config:
            raise
        free = max(config.config.get("vocab_size", 0), vocab_size if tokenizer is None else count_ids(tokenizer))
        # Some count positions from it on.
        room = {"vocab_size": free + 1, "pad_token_id": free, "max_position_embeddings": free + sequence_length + 1}
        padded = config.model_copy(update={"config": {**config.config, **room}})
        try:
            _run_on_meta(padded, tokenizer, vocab_size, sequence_length, may_be_unused, adapter)
        except ConfigError:
            pass  # so that is not what it lacks
        else:
            raise ConfigError(
                f"model.config.pad_token_id must be an id that no text uses for model type {config.config['model_type']}, "
                f"got none; name one, such as {free} with model.config.vocab_size: {free + 1}"
            ) from None
        raise
    with _must_run("model.config" if config.config is not None else "model.name_or_path"):
        _check_length(model, sequence_length)
    return model


def _run_on_meta(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    sequence_length: int,
    may_be_unused: bool,
    adapter: AdapterConfig,
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    what = "model.config" if config.config is not None else "model.name_or_path"
    with _must_run(what):
        if config.config is not None:
            model_config = scratch_config(config, tokenizer, vocab_size)
        else:
            model_config = _pretrained_config(config)
    tried_in = torch.float64 if config.dtype == "float64" else torch.float32  # bfloat16 may be computed under autocast
    with _must_run(what), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=tried_in, trust_remote_code=config.trust_remote_code
        )
        _check_checkpointing(model, config)
        _do_not_look_for_padding(model)
        _choose_trained(model, config, adapter, 0, "")
        own = model.config._attn_implementation
        # transformers looks into a mask, and into who goes to which expert; a meta tensor allows neither.
        with contextlib.suppress(ValueError, TypeError, KeyError):  # outside of the attention interface
            model.set_attn_implementation(register_counting_attention())
        model.set_experts_implementation("batched_mm")
        try:
            unused = _unused(model, sequence_length)
        except Exception as error:
            try:
                model.set_attn_implementation(own)
                unused = _unused(model, sequence_length, masked=True)
            except Exception:
                if not isinstance(error, (NotImplementedError, RuntimeError)) or "meta" not in str(error):
                    raise error from None
                unused = []  # this architecture looks into tensors; `build_model` runs it for real
    if unused and not may_be_unused:
        raise ConfigError(
            f"{what} must use all of its parameters, got no gradient for {', '.join(unused[:3])}"
            f"{f' and {len(unused) - 3} more' if len(unused) > 3 else ''}; they would never be trained: "
            "choose another model, or set distributed.find_unused_parameters=true"
        )
    return model


def _unused(model: PreTrainedModel, sequence_length: int, masked: bool = False) -> list[str]:
    """Names of the parameters that get no gradient in a row; of a short one, if that is enough for all.

    Args:
        masked: hand over a mask as it is added to scores, for a model whose own code reads one.
    """
    for length in (4, sequence_length):
        given = {"attention_mask": torch.zeros(1, 1, length, length)} if masked else {}
        model.zero_grad()
        model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False, **given).logits.sum().backward()
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if not unused:
            break
    return unused


def check_causal(model: PreTrainedModel, config: ModelConfig, sequence_length: int) -> None:
    """Refuse a model whose logits at a position depend on a later token, whatever its type.

    The gradient of the earlier logits with respect to later embedded ids is exactly 0 in a causal model, because a hidden
    position has a weight of exactly 0: that needs no tolerance in any dtype, however small the weights are drawn. A
    choice without a gradient (experts that choose tokens) shows when the later ids change; an expert's batch is another
    one then, which may round differently and once in a while tip a router, so that is a leak in half of the rows only.

    Args:
        model: on the CPU, with its own attention; left as it was.

    Raises:
        ConfigError: a logit depends on a later token.
    """
    text_config = model.config.get_text_config()
    length = min(sequence_length, 16)
    if length == 1:
        return
    starts = sorted({1, length // 4, length // 2, length - 1} - {0})  # of the later tokens, one for each row
    is_later = torch.arange(length) >= torch.tensor(starts)[:, None]
    generator = torch.Generator().manual_seed(0)
    ids, others = torch.randint(text_config.vocab_size, (2, len(starts), length), generator=generator)
    embedded: list[Tensor] = []

    def cut(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()  # some models change it in place

    was_training = model.training
    model.eval()
    handle = model.get_input_embeddings().register_forward_hook(cut)
    try:
        with torch.random.fork_rng(devices=[]):  # some models draw numbers in every forward
            torch.manual_seed(0)
            logits = model(input_ids=ids, use_cache=False).logits
            handle.remove()
            torch.manual_seed(0)
            with torch.no_grad():
                half = length // 2
                changed = model(input_ids=torch.cat([ids[:, :half], others[:, half:]], dim=1), use_cache=False).logits
        weights = torch.randn(logits.shape[-1], generator=generator).to(logits)
        leaks = False
        if embedded and embedded[0].shape[:2] == ids.shape:
            (gradient,) = torch.autograd.grad((logits @ weights)[~is_later].sum(), embedded[0])
            leaks = bool((gradient[is_later].abs() > 0).any())
        change = (changed - logits.detach()).abs().amax(dim=-1)
        earlier, later = change[:, :half].amax(dim=1), change[:, half:].amax(dim=1)
        tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 5e-2
        leaks |= bool((earlier > tolerance * later).float().mean() >= 0.5)
    finally:
        handle.remove()
        model.train(was_training)
    if not leaks:
        return
    key = "model.config" if config.config is not None else "model.name_or_path"
    field = next((name for name in ("is_decoder", "causal") if getattr(model.config, name, None) is False), None)
    if field is None:
        advice = "choose another model"
    else:
        advice = (
            f"set model.config.{field}=true" if config.config is not None else f"set {field}: true in its config.json"
        )
    raise ConfigError(
        f"{key} must be a causal model, got one of type {model.config.model_type}, whose output at a position depends on "
        f"later tokens; {advice}"
    )


def check_packing(model: PreTrainedModel, sequence_length: int) -> None:
    """Does each document of a packed row get the loss and the gradient that it gets alone?

    Asked with the model's own weights and a row longer than any window: each document's loss, and its gradient with
    respect to what the embeddings put out, which must be exactly 0 in every other document.

    Args:
        model: on the CPU, as `build_model` returns it; left as it was.

    Raises:
        ConfigError: it does not, as in recurrent models, or the model takes no positions.
    """
    text_config = model.config.get_text_config()
    total = max(8, min(sequence_length, probe_length(text_config.to_dict(), sequence_length) + 8))
    lengths = [3, total - 7, 3, 1]  # the last one stands for the padding
    ids = (torch.arange(total)[None] * 7 + 1) % text_config.vocab_size
    targets = ids.roll(-1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    was_training = model.training
    model.eval()
    try:
        same = True
        for chosen in ([1], [0, 2]):  # the long one between two short ones, and they around it
            mine = torch.isin(documents, torch.tensor(chosen))
            packed_targets = targets.masked_fill(~mine, IGNORE_INDEX)
            loss, gradient = _loss_and_gradient(
                model, input_ids=ids, targets=packed_targets, position_ids=positions, document_ids=documents
            )
            alone = [
                _loss_and_gradient(model, input_ids=ids[documents == n][None], targets=targets[documents == n][None])
                for n in chosen
            ]
            expected, expected_gradient = sum(nll for nll, _ in alone), torch.cat([grad[0] for _, grad in alone])
            tolerance = 1e-4 if gradient.dtype in (torch.float32, torch.float64) else 5e-2
            off = (gradient[mine] - expected_gradient).abs().max() / expected_gradient.abs().max()
            same &= bool(abs(loss / expected - 1) <= tolerance and off <= tolerance and not gradient[~mine].any())
    except Exception as error:
        if _is_of_machine(error):
            raise
        same = False  # its own code takes neither positions nor masks of documents
    finally:
        model.train(was_training)
    if not same:
        raise ConfigError(
            f"data.packing must be false for a model of type {model.config.model_type}, got true, which "
            "changes the losses of the documents in a row; set data.packing: false (padded, no loss changes), "
            "or for plain text data.attend_across_documents: true"
        )


def _loss_and_gradient(model: PreTrainedModel, **batch: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss, and its gradient with respect to the embedded ids, [B, T, H]."""
    seen: list[Tensor] = []

    def cut(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1].clone()  # some models change it in place

    handle = model.get_input_embeddings().register_forward_hook(cut)
    try:
        nll = model(**batch).nll
        return nll.detach(), torch.autograd.grad(nll, seen[0])[0]
    finally:
        handle.remove()


@contextlib.contextmanager
def _must_run(what: str) -> Iterator[None]:
    """Blame the recipe's key for whatever the model's own code raises; not for the machine or for a signal."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise MachineError(f"{what} must have its libraries, got: {first_line(error)}; install them") from None
    except Exception as error:
        if _is_of_machine(error):
            raise
        raise ConfigError(f"{what} must be a model that runs, got: {first_line(error)}; change the sizes") from None


def _is_of_machine(error: Exception) -> bool:
    """Memory that ran out, or a full disk, which no other model or size in the recipe stands for."""
    return is_out_of_memory(error) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def install_loss(model: PreTrainedModel) -> str:
    """Give the model the training forward; fused with the head where that is exact. Returns its name, for people."""
    _do_not_look_for_padding(model)
    fused = _head_is_plain(model)
    _use_loss(model, fused)
    return FUSED if fused else ON_LOGITS


def _use_loss(model: PreTrainedModel, fused: bool) -> None:
    _do_not_look_for_padding(model)
    if fused:
        model.get_output_embeddings().__class__ = LossHead
    model.forward = MethodType(_fused_forward if fused else _logits_forward, model)


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """In place of a check that does not apply."""


def _do_not_look_for_padding(model: PreTrainedModel) -> None:
    """Rows are never padded; some models read the ids in every forward to warn of it, which waits for the device."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _nothing


def _head_is_plain(model: PreTrainedModel) -> bool:
    """True when logits = head(last hidden state) and nothing else happens to either.

    The head is made to return random numbers: they must come out as the logits, bit for bit (a soft cap or a scale would
    show), and what went into the head must be the base model's last hidden state.
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


# --- configs and weights -------------------------------------------------------------------------------------------


def scratch_config(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None = None
) -> PreTrainedConfig:
    """The model's config; the size and the ids that the recipe leaves out come from the tokenizer.

    Without a padding id, unless the recipe names one: models treat its row as if no text held it.
    """
    from transformers import AutoConfig

    values = dict(config.config or {})
    values.setdefault("vocab_size", vocab_size if tokenizer is None else count_ids(tokenizer))
    for name in ("bos_token_id", "eos_token_id"):
        values.setdefault(name, 0 if tokenizer is None else getattr(tokenizer, name))
    padding = values.setdefault("pad_token_id", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = values[name]
        if isinstance(given, int) and not 0 <= given < values["vocab_size"]:
            raise ConfigError(
                f"model.config.{name} must be an id below vocab_size {values['vocab_size']}, got {given}; leave it out"
            )
    if padding is not None and _is_in_text(padding, values, tokenizer):
        raise ConfigError(
            f"model.config.pad_token_id must be an id that no text uses, got {padding}; leave it out: no row is padded with it"
        )
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    refuse_kernels(made, config.trust_remote_code, "model.config")
    return made


def _is_in_text(token_id: int, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> bool:
    if token_id in (config["bos_token_id"], config["eos_token_id"]):
        return True
    return tokenizer is not None and token_id in set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)


def _pretrained_config(config: ModelConfig) -> PreTrainedConfig:
    from transformers import AutoConfig

    name = str(config.name_or_path)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ConfigError(
            f"model.name_or_path must be an existing folder or a Hub id, got {name!r}, which does not exist; check the path"
        )
    if Path(name, SETTINGS).is_file():
        raise ConfigError(
            f"model.name_or_path must be a whole model, got the adapter {name!r}; make one of it and its base: acc-lm export --merge {name} OUTPUT"
        )
    if Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise ConfigError(
            f"model.name_or_path must be a folder with a config.json, got {name!r} without one; export the model first"
        )
    try:
        found = AutoConfig.from_pretrained(name, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # each failure of the Hub or the file has its own kind; all mean: no usable model
        if _is_of_machine(error):
            raise
        raise ConfigError(f"model.name_or_path {_why_not(name, error)}") from None
    refuse_kernels(found, config.trust_remote_code, "model.name_or_path")
    return found


def refuse_kernels(found: PreTrainedConfig, trust_remote_code: bool, key: str) -> None:
    """An attention that is named like a repository would be fetched from the Hub and run.

    Raises:
        ConfigError: the model asks for one, and nobody said that its code is trusted.
    """
    kernel = str(getattr(found, "_attn_implementation", None) or "")
    if "/" in kernel and not trust_remote_code:
        raise ConfigError(
            f"{key} must be a model without code of its own, got the attention {kernel!r}, which is code of the Hub; "
            "read it, then set model.trust_remote_code=true"
        )


def _load_pretrained(config: ModelConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    name = str(config.name_or_path)
    _pretrained_config(config)
    try:
        return AutoModelForCausalLM.from_pretrained(
            name,
            revision=config.revision,
            dtype=torch.float32 if config.dtype != "bfloat16" else torch.bfloat16,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # as above
        if _is_of_machine(error):
            raise
        raise ConfigError(f"model.name_or_path {_why_not(name, error)}") from None


def _why_not(name: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return f"must be a model without code of its own, got {name!r}, which brings some; read it, then set model.trust_remote_code=true"
    if Path(name).is_dir() and not list(Path(name).glob("*.safetensors")):
        return f"must have its weights in safetensors, got {name!r} without; convert them (weights in pickle are not loaded)"
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    if not Path(name).exists():
        why = (
            "is not in the local cache and offline mode is on"
            if offline
            else "is not in the local cache and could not be fetched"
        )
        return f"must be a model that can be loaded, got {name!r}, which {why}; give a local folder, or check name and network"
    return f"must be a causal language model of transformers, got {name!r}: {first_line(error)}; check the folder"


def _check_length(model: PreTrainedModel, sequence_length: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return
    # RoBERTa and those made after it count positions from the id of their padding on.
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each.num_embeddings == limit]
    paddings = [each.padding_idx for each in tables if each is not model.get_input_embeddings()]
    counts_from = max((index + 1 for index in paddings if index is not None), default=0)
    if limit - counts_from < sequence_length:
        which = f"{limit}, of which {counts_from} are of no use to it" if counts_from else limit
        raise ConfigError(
            f"data.sequence_length must be at most the model's max_position_embeddings {which}, got {sequence_length}; "
            "lower it, or raise the model's"
        )


def dropout_of(model: PreTrainedModel) -> float:
    """The largest dropout probability in the model's config or modules."""
    found = model.config.to_dict().items()  # GPT-2's `summary_first_dropout` is of a head that no language model has
    values = [v for k, v in found if "drop" in k and not k.startswith("summary") and isinstance(v, float)]
    values += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return max(values, default=0.0)


def longest_input(config: ModelConfig) -> int | None:
    """Most ids that an existing model reads at once; None when it does not say."""
    limit = getattr(_pretrained_config(config).get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
