"""A causal type of transformers, built tiny, compared with transformers itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from test_router import OneProcess
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from acc_lm.config import AdapterConfig, ModelConfig, TokenizerConfig
from acc_lm.errors import ConfigError, UserError
from acc_lm.modeling.adapter import add_adapter
from acc_lm.modeling.build import build_model
from acc_lm.modeling.checks import check_model
from acc_lm.modeling.pretrained import scratch_config
from acc_lm.modeling.router import RouterLoss
from acc_lm.rows.batch import IGNORE_INDEX
from acc_lm.text.tokenizer import make_tokenizer

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LENGTH = 24

SIZES: dict[str, Any] = {}
"""Sizes by the names that config classes give them."""
for size, names in {
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
       "num_attention_heads n_head num_heads n_heads decoder_attention_heads encoder_attention_heads num_key_value_heads "
       "num_experts_per_tok top_k moe_topk num_experts_per_token",
    1: "n_group topk_group num_expert_group first_k_dense_replace",
    4: "num_experts n_routed_experts num_local_experts moe_num_experts",
    8: "state_size rotary_dim qk_rope_head_dim conv_kernel_size",
    16: "head_dim q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim d_kv mamba_d_state",
    32: "hidden_size d_model n_embd n_embed dim emb_dim embedding_size word_embed_proj_dim moe_intermediate_size "
        "attention_hidden_size expert_ffn_hidden_size",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff d_inner n_inner ffn_hidden_size shared_expert_intermediate_size",
    128: "max_position_embeddings n_positions n_ctx max_seq_len",
}.items():  # fmt: skip
    SIZES |= dict.fromkeys(names.split(), size)
_ENCODER = {"is_decoder": True}
_UNUSED = {"pad_token_id": 257, "vocab_size": 258}
_FROM_PADDING = _ENCODER | _UNUSED | {"max_position_embeddings": 400}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "rembert", "roc_bert", "roformer"], _ENCODER),
    **dict.fromkeys(["camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"], _FROM_PADDING),
    "axk1": {"num_key_value_heads": 2, "n_group": 2, "topk_group": 1, "head_dim": 8},
    "codegen": {"num_attention_heads": 4, "rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}},
    "dbrx": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": 64,
                     "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512, "laurel_rank": 4},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512},
    "kimi_linear": {"num_experts": 4, "linear_head_dim": 16, "linear_num_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "modernbert-decoder": _UNUSED,
    "moshi": {"audio_vocab_size": 256},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "prophetnet": _FROM_PADDING | {"is_decoder": True, "add_cross_attention": False},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False, "attention_head_size": 16, "feed_forward_size": 64, "local_attn_chunk_length": 8},
    "xmod": _FROM_PADDING | {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2, "attention_head_dim": 32, "attention_hidden_size": 64, "mamba_dt_rank": 4, "num_attention_heads": 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "attention_head_dim": 32, "kv_channels": 16, "num_query_groups": 2, "mamba_headdim": 8, "n_mamba_heads": 8, "chunk_size": 8, "adapter_rank": 4, "num_mem_blocks": 1},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "xlm": _UNUSED | {"causal": True},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "zaya": {"num_experts_per_tok": 1},
    "fuyu": {"text_config": {"model_type": "persimmon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}},
    "mimo_v2_flash": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 16},
}  # fmt: skip
"""Other sizes for types where those do not fit together."""

FLOAT32 = ("inkling2_text", "xglm", "xlnet")
"""Types that transformers does not run in float64."""


@dataclass
class Found:
    """Result for a type here."""

    model_type: str
    outcome: str
    """trains, refused, or not built."""
    why: str = ""
    attention: str = ""
    loss: str = ""
    experts: str = ""
    flops: str = ""
    packs: bool = False
    adapters: bool = False
    wrong: str = ""
    """Difference from transformers; empty if it is correct."""


def tiny_fields(config_class: Any) -> dict[str, Any]:
    """Arguments of a config class for a model of a few thousand parameters without dropout."""
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)
    fields = {name: size for name, size in SIZES.items() if name in known}
    defaults = inspect.signature(config_class.__init__).parameters
    fields |= {
        name: 0.0 for name in known if "drop" in name and isinstance(getattr(defaults.get(name), "default", 0), float)
    }
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if name in known and part is not AutoConfig and name.endswith("config") and name != "attn_config":
            fields[name] = tiny_fields(part)
    return fields


def look_at(model_type: str) -> Found:
    """Build it here and in transformers, and compare."""
    fields = tiny_fields(CONFIG_MAPPING[model_type]) | OVERRIDES.get(model_type, {})
    try:
        AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        return Found(model_type, "not built", why=_first_line(error))
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    config = ModelConfig(
        config={"model_type": model_type, **fields}, dtype="float32" if model_type in FLOAT32 else "float64"
    )
    dtype = getattr(torch, config.dtype)
    try:
        check_model(config, tokenizer, len(tokenizer), LENGTH)
        model, facts = build_model(config, tokenizer, LENGTH, 0)
    except UserError as error:
        return Found(model_type, "refused", why=_first_line(error), wrong=untrue(config, tokenizer, str(error)))
    found = Found(
        model_type, "trains", attention=facts.attention, loss=facts.loss, flops=facts.flops.unknown or "known",
        experts=facts.router.description if facts.router else "",
    )  # fmt: skip
    reference = AutoModelForCausalLM.from_config(scratch_config(config, tokenizer), dtype=dtype)
    reference.set_experts_implementation("eager")
    reference.load_state_dict(model.state_dict())

    def other() -> Any:
        again = AutoModelForCausalLM.from_config(
            scratch_config(config, tokenizer), dtype=dtype, attn_implementation="eager"
        )
        again.set_experts_implementation("eager")
        again.load_state_dict(reference.state_dict())
        return again

    found.wrong = difference(model, reference, facts, other)
    found.packs, wrong = packing(config, tokenizer, reference)
    found.wrong = found.wrong or wrong
    try:
        add_adapter(model, AdapterConfig(kind="lora"), 0, "")
        found.adapters = True
    except ConfigError:
        pass
    return found


def packing(config: ModelConfig, tokenizer: Any, reference: Any) -> tuple[bool, str]:
    """Accepted or not, with rows of several documents, and how their loss differs from that of each document alone in transformers."""
    try:
        model, _ = build_model(config, tokenizer, LENGTH, 0, packs=True)
    except ConfigError:
        return False, ""
    lengths = [9, LENGTH - 9]
    ids = torch.randint(1, 250, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    targets = ids.roll(-1, 1).masked_fill(documents != documents.roll(-1, 1), IGNORE_INDEX)
    targets[:, -1] = IGNORE_INDEX
    with torch.no_grad():
        ours = float(model.train()(ids, targets, position_ids=positions, document_ids=documents))
        alone = [ids[documents == number][None] for number in range(2)]
        losses = [reference.eval()(input_ids=each, labels=each, use_cache=False).loss for each in alone]
    theirs = sum(float(loss) * (length - 1) for loss, length in zip(losses, lengths, strict=True))
    return True, "" if abs(ours / theirs - 1) < 1e-6 else f"packed loss {ours:.8g}, each alone {theirs:.8g}"


def difference(model: Any, reference: Any, facts: Any, other: Callable[[], Any]) -> str:
    """Difference of loss and gradients from those of transformers' own forward; empty if there is none.

    Args:
        other: makes the reference with another of transformers' own kinds of attention. Where the architecture makes rounding larger,
            these two are apart as well, and no implementation can be nearer to either.
    """
    ids = torch.randint(1, 250, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    if facts.router:
        routed = model.train()(**batch, num_choices=facts.router.num_choices)
        ours = routed.nll / (2 * LENGTH) + RouterLoss(OneProcess(), facts.router, 1).part_of(routed)  # type: ignore[arg-type]
    else:
        ours = model.train()(**batch) / (2 * LENGTH)
    theirs = _own_loss(reference, batch, facts)
    if abs(ours.item() / theirs.item() - 1) > 1e-6:
        return f"loss {ours.item():.8g}, transformers' {theirs.item():.8g}"
    expected, got = _gradients(reference, theirs), _gradients(model, ours)
    if expected.keys() != got.keys():
        return f"parameters with a gradient: {sorted(expected.keys() ^ got.keys())[:3]}"
    off = _largest_difference(got, expected)
    if off[0] > 1e-5:
        again = other()
        rounding = _largest_difference(_gradients(again, _own_loss(again, batch, facts)), expected)
        if off[0] > 3 * rounding[0]:
            return f"gradient of {off[1]} off by {off[0]:.1e}, that of another attention of transformers by {rounding[0]:.1e}"
    return ""


def _own_loss(reference: Any, batch: dict[str, Tensor], facts: Any) -> Tensor:
    """The mean loss of transformers' own forward, with its load-balancing loss where there is one."""
    given = {"output_router_logits": True} if facts.router else {}
    output = reference.train()(input_ids=batch["input_ids"], use_cache=False, **given)
    loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten())
    return loss + facts.router.coefficient * output.aux_loss if facts.router else loss


def _largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Largest difference of all gradients, relative to the largest element of each, and whose it is."""
    largest_of_all = max(float(gradient.abs().max()) for gradient in expected.values())
    # Some are 0 on paper, such as that of a key's bias: what rounding leaves of them is compared with the others.
    return max(
        (float((gradient - expected[name]).abs().max() / (expected[name].abs().max() + 1e-4 * largest_of_all)), name)
        for name, gradient in got.items()
    )


def untrue(config: ModelConfig, tokenizer: Any, reason: str) -> str:
    """Evidence from transformers against the reason of a refusal; empty if transformers confirms it."""
    try:
        model = AutoModelForCausalLM.from_config(
            scratch_config(config, tokenizer)
        ).train()  # without dropout; some do not run otherwise
        ids = torch.randint(1, 250, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        logits = model(input_ids=ids, use_cache=False).logits
        logits.sum().backward()
    except Exception as error:
        return (
            ""
            if re.search("must be a model that runs|pad_token_id|must have its libraries", reason)
            else f"{_first_line(error)}"
        )
    if "must use all of its parameters" in reason:
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        return "" if unused else "every parameter has a gradient"
    if "must be a causal model" in reason:
        embedded: list[Tensor] = []
        model.get_input_embeddings().register_forward_hook(
            lambda module, given, output: embedded.append(output.detach().requires_grad_()) or embedded[-1].clone()
        )
        at = LENGTH // 4
        early = model(input_ids=ids, use_cache=False).logits[:, at].sum()
        (gradient,) = torch.autograd.grad(early, embedded[0])
        later = ids.clone()
        later[:, LENGTH // 2 :] = ids[:, LENGTH // 2 :].flip(1) + 1
        change = (model(input_ids=later, use_cache=False).logits - logits)[:, : LENGTH // 2]
        leaks = bool(gradient[:, at + 1 :].any()) or float(change.abs().max()) > 0
        return "" if leaks else "no logit changes with a later token"
    return "it runs"


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
