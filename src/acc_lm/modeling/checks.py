"""Trial runs of a model before training: it is causal, packed rows give the gradient of separate ones, rows can be cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from acc_lm.config import AdapterConfig, ModelConfig
from acc_lm.errors import ConfigError, MachineError, UserError, first_line
from acc_lm.modeling.activations import check_checkpointing
from acc_lm.modeling.adapter import NO_ADAPTER, choose_trained
from acc_lm.modeling.attention import (
    CAUSAL_WITHOUT_MASK,
    probe_length,
    register_counting_attention,
    run_probe,
)
from acc_lm.modeling.loss_head import FUSED, ignore_padding
from acc_lm.modeling.pretrained import check_length, is_of_machine, pretrained_config, scratch_config
from acc_lm.modeling.row_parts import StackedParts
from acc_lm.modeling.vocabulary import check_new_rows, fit_vocabulary
from acc_lm.rows.batch import IGNORE_INDEX
from acc_lm.text.tokenizer import count_ids, new_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


CHANGES_WITH_LENGTH = ("dynamic", "longrope")
"""Types of transformers' rotary embeddings that depend on the largest position of a forward pass."""


def check_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    sequence_length: int,
    may_be_unused: bool = False,
    adapter: AdapterConfig = NO_ADAPTER,
) -> PreTrainedModel:
    """Check before any text is read that this model can be built and can run one row.

    It runs forward and backward on the meta device, which costs neither memory nor time, and is returned.

    Args:
        may_be_unused: True: allow parameters that no loss depends on.

    Raises:
        ConfigError: with the error of the model's own code, or with the parameters that would never get a gradient.
    """
    try:
        model = _run_on_meta(config, tokenizer, vocab_size, sequence_length, may_be_unused, adapter)
    except ConfigError:
        if config.config is None or "pad_token_id" in config.config:
            raise
        free = max(config.config.get("vocab_size", 0), vocab_size if tokenizer is None else count_ids(tokenizer))
        # Some models count positions from the padding id on.
        room = {"vocab_size": free + 1, "pad_token_id": free, "max_position_embeddings": free + sequence_length + 1}
        padded = config.model_copy(update={"config": {**config.config, **room}})
        try:
            _run_on_meta(padded, tokenizer, vocab_size, sequence_length, may_be_unused, adapter)
        except ConfigError:
            pass  # a padding id does not help
        else:
            raise ConfigError(
                f"model.config.pad_token_id must be an id that no text uses for model type {config.config['model_type']}, "
                f"got none; name one, such as {free} with model.config.vocab_size: {free + 1}"
            ) from None
        raise
    with must_run("model.config" if config.config is not None else "model.name_or_path"):
        check_length(model, sequence_length)
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
    with must_run(what):
        if config.config is not None:
            model_config = scratch_config(config, tokenizer, vocab_size)
        else:
            model_config = pretrained_config(config)
    tried_in = torch.float64 if config.dtype == "float64" else torch.float32  # bfloat16 may run under autocast
    with must_run(what), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=tried_in, trust_remote_code=config.trust_remote_code
        )
        check_checkpointing(model, config)
        ignore_padding(model)
        if tokenizer is not None and new_tokens(tokenizer):
            fit_vocabulary(model, config, tokenizer)
        choose_trained(model, config, adapter, 0, "")
        if tokenizer is not None:
            check_new_rows(model, adapter, tokenizer)
        own = model.config._attn_implementation
        # transformers reads the values of masks and of expert assignments, which meta tensors do not have.
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a model without the attention interface
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
                unused = []  # this architecture reads tensor values; `build_model` runs it for real
    if unused and not may_be_unused:
        raise ConfigError(
            f"{what} must use all of its parameters, got no gradient for {', '.join(unused[:3])}"
            f"{f' and {len(unused) - 3} more' if len(unused) > 3 else ''}; they would never be trained: "
            "choose another model, or set distributed.find_unused_parameters=true"
        )
    return model


def _unused(model: PreTrainedModel, sequence_length: int, masked: bool = False) -> list[str]:
    """Names of the parameters that get no gradient from 4 tokens, nor from a full row.

    Args:
        masked: True: pass an additive mask, for a model whose own code reads one.
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

    In a causal model the gradient of earlier logits with respect to later embedded ids is exactly 0, because a masked
    position has a weight of exactly 0. This needs no tolerance in any dtype, however small the initial weights are. A
    choice without a gradient (experts that choose tokens) shows when the later ids change. Changed ids also change the
    batches of experts, which may round differently and occasionally tip a router, so a change is a leak only when it
    shows in at least half of the rows.

    Args:
        model: on the CPU, with its own attention; left unchanged.

    Raises:
        ConfigError: a logit depends on a later token.
    """
    length = min(sequence_length, 16)
    if length == 1:
        return
    if not _leaks(model, length):
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


def _leaks(model: PreTrainedModel, length: int) -> bool:
    """Test whether a logit of rows of this length depends on a later token; the model is left unchanged."""
    vocab_size = model.config.get_text_config().vocab_size
    starts = sorted({1, length // 4, length // 2, length - 1} - {0})  # first later token of each row
    is_later = torch.arange(length) >= torch.tensor(starts)[:, None]
    generator = torch.Generator().manual_seed(0)
    ids, others = torch.randint(vocab_size, (2, len(starts), length), generator=generator)
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
    return leaks


def check_packing(model: PreTrainedModel, sequence_length: int) -> None:
    """Check that each document of a packed row gets the loss and the gradient that it gets alone.

    The test uses the model's own weights and a row longer than any window. It compares each document's loss, and its
    gradient with respect to the embeddings' output, which must be exactly 0 in every other document.

    Args:
        model: on the CPU, as `build_model` returns it; left unchanged.

    Raises:
        ConfigError: a loss or gradient differs, as in recurrent models, or the model takes no positions.
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
        for chosen in ([1], [0, 2]):  # the long document, then the two short ones around it
            is_chosen = torch.isin(documents, torch.tensor(chosen))
            packed_targets = targets.masked_fill(~is_chosen, IGNORE_INDEX)
            loss, gradient = _loss_and_gradient(
                model, input_ids=ids, targets=packed_targets, position_ids=positions, document_ids=documents
            )
            alone = [
                _loss_and_gradient(model, input_ids=ids[documents == n][None], targets=targets[documents == n][None])
                for n in chosen
            ]
            expected, expected_gradient = sum(nll for nll, _ in alone), torch.cat([grad[0] for _, grad in alone])
            tolerance = 1e-4 if gradient.dtype in (torch.float32, torch.float64) else 5e-2
            off = (gradient[is_chosen] - expected_gradient).abs().max() / expected_gradient.abs().max()
            same &= bool(abs(loss / expected - 1) <= tolerance and off <= tolerance and not gradient[~is_chosen].any())
    except Exception as error:
        if is_of_machine(error):
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


def check_parts_early(model: PreTrainedModel, sequence_length: int, size: int) -> None:
    """Check the heads and the attention of a model whose rows are cut, as far as that is possible without weights.

    Args:
        model: on the meta device; its attention is replaced.
        size: number of parts of a row.

    Raises:
        ConfigError: the heads do not divide over the parts, or attention needs more than a causal flag.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(shared, int):
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
        if size not in possible:
            near = [*[n for n in possible if n < size][-1:], *[n for n in possible if n > size][:1]]
            raise ConfigError(
                f"parallelism_config_sp_size (or cp_size) must divide the {heads} attention heads of the model, and divide or be a multiple of its "
                f"{shared} key-value heads, got {size}; nearest: {' or '.join(map(str, near))}"
            )
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if (
                kind in CHANGES_WITH_LENGTH
            ):  # by the largest position that a process sees, which differs between the parts
                refuse_parts(
                    model.config, size, f"positions that are rotated by the length of a row (rope_type {kind})"
                )
    required, _ = run_probe(model, torch.zeros(1, 8, dtype=torch.int64, device="meta"), sequence_length)
    if set(required) != {"called"}:
        refuse_parts(
            model.config,
            size,
            f"attention that needs {', '.join(sorted(set(required) - {'called'})) or 'its own code'}",
        )


def check_row_parts(model: PreTrainedModel, sequence_length: int, size: int, attention: str, loss: str) -> None:
    """Check that a model computes the same hidden states when its rows are cut into parts.

    Everything but attention must look at one position at a time, and take that position from its argument. All parts
    are computed in one batch, without communication.

    Args:
        model: on the CPU; left unchanged.
        size: number of parts of a row.
        attention, loss: their display names.

    Raises:
        ConfigError: the hidden states differ, or attention or loss need complete rows.
    """
    if attention != CAUSAL_WITHOUT_MASK:
        refuse_parts(model.config, size, attention)
    if loss != FUSED:
        refuse_parts(model.config, size, f"a loss {loss}")
    total = min(sequence_length, 8 * size + 1)
    ids = (torch.arange(2 * total).reshape(2, total) * 7 + 1) % model.config.get_text_config().vocab_size
    was_training = model.training
    model.eval()
    try:
        parts = StackedParts(size)
        part = parts.cut(ids, ids, None, None)
        with torch.no_grad():
            expected = model.base_model(input_ids=ids, use_cache=False)[0]
            stacked = model.base_model(
                input_ids=part.input_ids, position_ids=part.position_ids, row_parts=parts, use_cache=False
            )[0]
        got = torch.cat(stacked.chunk(size), dim=1)[:, :total]
        tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
        same = parts.num_exchanges > 0 and bool((got - expected).abs().max() <= tolerance * expected.abs().max())
    except Exception as error:
        if is_of_machine(error):
            raise
        same = False  # its own code takes no positions
    finally:
        model.train(was_training)
    if not same:
        refuse_parts(model.config, size, "hidden states that change when rows are cut")


def refuse_parts(config: PreTrainedConfig, size: int, got: str) -> NoReturn:
    """Raise the error for a model whose rows cannot be cut."""
    raise ConfigError(
        f"parallelism_config_sp_size (or cp_size) must be 1 for a model of type {config.model_type}, got {size} for {got}; remove it from the "
        "Accelerate config, and save memory with model.gradient_checkpointing=true"
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
def must_run(what: str) -> Iterator[None]:
    """Report errors of the model's own code under the recipe's key `what`; let machine errors and signals through."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise MachineError(f"{what} must have its libraries, got: {first_line(error)}; install them") from None
    except Exception as error:
        if is_of_machine(error):
            raise
        raise ConfigError(f"{what} must be a model that runs, got: {first_line(error)}; change the sizes") from None
