"""The training forward: a loss and never logits, causal without a mask, exact for every architecture it is used on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from releases import needs_transformers
from test_step import MODELS, make_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from acc_lm.config import ModelConfig, OptimizerConfig, TokenizerConfig
from acc_lm.errors import ConfigError, MachineError, Preempted
from acc_lm.modeling.attention import CAUSAL, choose_attention
from acc_lm.modeling.build import build_empty_model, build_model
from acc_lm.modeling.checks import check_model
from acc_lm.modeling.loss_head import LossHead, install_loss
from acc_lm.optimization.optimizer import build_optimizer, decayed_names
from acc_lm.text.tokenizer import count_ids, make_tokenizer

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


def build(model_type: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    known = type(AutoConfig.for_model(model_type))()
    values = {key: value for key, value in SMALL.items() if hasattr(known, key)} | fields
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).eval()


# model type, its fields, whether attention is ours (None: as soon as transformers routes it through its attention
# interface, which differs from release to release), whether the head is fused
ARCHITECTURES: list[tuple[str, dict[str, Any], bool | None, bool]] = [
    ("llama", {}, True, True),
    ("llama", {"tie_word_embeddings": True}, True, True),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, True, True),
    ("qwen3", {"head_dim": 8}, True, True),
    ("gpt_neox", {}, True, True),
    ("olmo2", {}, True, True),
    ("phi", {}, True, True),  # its head has a bias
    ("mistral", {"sliding_window": 4096}, True, True),  # the window covers a row
    ("mistral", {"sliding_window": 4}, False, True),
    ("gemma3_text", {"sliding_window": 4, "head_dim": 8}, False, True),
    ("gemma2", {"head_dim": 8}, False, False),  # soft caps on attention and on logits
    ("gpt_oss", MOE, False, True),  # sinks
    (
        "llama4_text",
        {"attention_chunk_size": 8, "head_dim": 8, "intermediate_size_mlp": 48, **MOE},
        False,
        False,
    ),  # does not mention its chunks
    ("phimoe", {"sliding_window": 8, **MOE}, False, True),  # nor this one its window
    ("granite", {"logits_scaling": 3.0}, True, False),
    ("cohere", {}, True, False),  # scales its logits
    ("bloom", {"n_layer": 2, "n_head": 4}, False, True),  # adds a bias by distance
    ("mamba", {"state_size": 4}, False, True),  # no attention
    ("falcon", {}, None, True),
    ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, None, True),
    ("gpt_neo", {"num_layers": 2, "num_heads": 4, "window_size": 4, "attention_types": [[["global", "local"], 1]]}, False, True),
    ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}, False, True),
    ("doge", {"head_dim": 8}, False, True),  # a learned mask, passed by its name
    ("afmoe", {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1, "head_dim": 8}, True, True),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "fields", "ours", "fused"), ARCHITECTURES, ids=lambda value: str(value)[:40])
def test_loss_and_gradients_equal_transformers_own(
    model_type: str, fields: dict[str, Any], ours: bool | None, fused: bool
) -> None:
    """On rows longer than any window; the reference is an untouched model of the same weights."""
    plain, model = build(model_type, **fields), build(model_type, **fields)
    model.load_state_dict(plain.state_dict())
    attention = choose_attention(model, sequence_length=24)
    loss = install_loss(model)
    expected_ours = model._supports_attention_backend if ours is None else ours
    assert attention.startswith("causal, no mask") is expected_ours, attention
    assert (loss == "fused with the head") is fused, loss
    ids = torch.randint(0, 64, (2, 25), generator=torch.Generator().manual_seed(1))
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, 10:] = -100
    reference = nn.functional.cross_entropy(
        plain(inputs, use_cache=False).logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    reference.backward()
    sums = model(inputs, targets)
    assert abs(sums.nll - reference) <= 1e-5 * reference
    for module in model.modules():
        module.training = isinstance(module, LossHead)  # a loss, without dropout
    model.training = True
    model(inputs, targets).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        want = expected[name].grad
        if want is not None:
            assert parameter.grad is not None, name
            assert (parameter.grad - want).abs().max() <= 2e-4 * want.abs().max() + 1e-6, name


def test_names_ties_generation_and_saving_are_untouched(tmp_path: Any) -> None:
    plain, model = build("llama", tie_word_embeddings=True), build("llama", tie_word_embeddings=True)
    choose_attention(model, 16)
    install_loss(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, plain(ids).logits)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, plain(ids).logits)
    assert again.config._attn_implementation != CAUSAL


class SeenAttention:
    """Recorder of calls of scaled_dot_product_attention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[bool, bool]] = []
        original = nn.functional.scaled_dot_product_attention

        def spy(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append(
                (keywords.get("attn_mask") is None and len(arguments) < 4, keywords.get("is_causal", False))
            )
            return original(*arguments, **keywords)

        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_is_called_causal_and_without_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(name, "float32")
    seen = SeenAttention(monkeypatch)
    model(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)).backward()
    assert seen.calls == [(True, True)] * 2, "one call a layer"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_stays_causal_without_a_mask_when_compiled(name: str) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    calls: list[dict[str, Any]] = []
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        calls.extend(
            dict(node.kwargs) for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)
        )
        return graph.forward

    model = make_model(name, "float32").eval()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    expected = model(ids, ids).nll
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        got = compiled(ids, ids).nll
    assert len(graphs) == 1, "no graph break"
    assert len(calls) == 2
    assert all(call["is_causal"] is True and call.get("attn_mask") is None for call in calls)
    assert torch.allclose(got, expected, rtol=1e-6)


def test_logits_of_a_full_batch_never_exist_in_training() -> None:
    from test_losses import LargestTensor

    from acc_lm.modeling.losses import CHUNK_POSITIONS

    fields = {"vocab_size": 3000, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    model = build("llama", **fields)
    choose_attention(model, 256)
    install_loss(model)
    model.train()
    ids = torch.zeros(4, 256, dtype=torch.int64)
    with LargestTensor() as largest:
        model(ids, ids).backward()
    assert largest.numel <= CHUNK_POSITIONS * 3000 < 4 * 256 * 3000


def scratch(**fields: Any) -> ModelConfig:
    sizes = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return ModelConfig(config=sizes | fields)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(TokenizerConfig(kind="byte"), [])


def test_weights_are_a_function_of_the_seed_and_ids_come_from_the_tokenizer(tokenizer: Any) -> None:
    one, same, other = (build_model(scratch(), tokenizer, 16, seed)[0] for seed in (1, 1, 2))
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.ndim > 1:
            assert not torch.equal(a, c)
    assert (one.config.vocab_size, one.config.eos_token_id, one.config.bos_token_id) == (
        count_ids(tokenizer),
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
    )
    gpt2, facts = build_model(
        ModelConfig(config={"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}), tokenizer, 16, 0
    )
    assert gpt2.config.eos_token_id < 257, "GPT-2's own 50256 is not in this vocabulary"
    assert facts.dropout == 0.1
    assert facts.num_parameters == sum(p.numel() for p in gpt2.parameters())


def test_float64_weights_are_the_float32_ones(tokenizer: Any) -> None:
    single = build_model(scratch(), tokenizer, 16, 1)[0]
    double = build_model(scratch().model_copy(update={"dtype": "float64"}), tokenizer, 16, 1)[0]
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert b.dtype == torch.float64
        assert torch.equal(a.double(), b)


def test_a_continued_model_has_its_own_weights(tokenizer: Any, tmp_path: Any) -> None:
    model = build_model(scratch(), tokenizer, 16, 1)[0]
    model.save_pretrained(tmp_path)
    again, _ = build_model(ModelConfig(name_or_path=str(tmp_path)), tokenizer, 16, 5)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_embeddings_too_small_for_the_tokenizer_are_refused_or_enlarged(tokenizer: Any, tmp_path: Any) -> None:
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"vocab_size must be at least the tokenizer's 257 ids, got 64; .*model.resize_embeddings=true",
    ):
        build_model(ModelConfig(name_or_path=str(tmp_path)), tokenizer, 16, 0)
    model, _ = build_model(ModelConfig(name_or_path=str(tmp_path), resize_embeddings=True), tokenizer, 16, 0)
    assert model.get_input_embeddings().weight.shape[0] == 257


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 20, "num_attention_heads": 5, "num_key_value_heads": 2}, "must be a model that runs"),
        (
            {"max_position_embeddings": 8},
            "sequence_length must be at most the model's max_position_embeddings 8, got 16",
        ),
        ({"eos_token_id": 5000}, "model.config.eos_token_id must be an id below vocab_size"),
    ],
)
def test_a_model_that_cannot_run_is_refused_before_any_text_is_read(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_model(scratch(**fields), None, 4096, 16)


@pytest.mark.parametrize("empty", [False, True])
def test_experts_are_multiplied_in_float64_too(empty: bool, tokenizer: Any) -> None:
    """transformers' own choice is a kernel without it."""
    fields = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "num_local_experts": 4}  # fmt: skip
    config = ModelConfig(config=fields, dtype="float64")
    model, facts = build_model(config, tokenizer, 16, 0)
    if empty:
        full, model = model, build_empty_model(config, tokenizer, 16, facts)
        model.load_state_dict(full.state_dict())
    model(torch.arange(16)[None], torch.arange(16)[None]).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


def test_positions_counted_from_the_padding_leave_less_room() -> None:
    fields = {"model_type": "roberta", "is_decoder": True, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "vocab_size": 300, "pad_token_id": 260, "max_position_embeddings": 277}  # fmt: skip
    model, _ = build_model(ModelConfig(config=fields), make_tokenizer(TokenizerConfig(kind="byte"), []), 16, 0)
    model(torch.arange(4, 20)[None], torch.arange(4, 20)[None])
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        model(torch.arange(4, 21)[None], torch.arange(4, 21)[None])
    check_model(ModelConfig(config=fields), None, 300, 16)
    with pytest.raises(ConfigError, match="max_position_embeddings 277, of which it cannot use 261, got 17"):
        check_model(ModelConfig(config=fields), None, 300, 17)


def test_checking_a_model_allocates_nothing() -> None:
    huge = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    check_model(scratch(**huge), None, 128_000, 2048)  # 5 billion parameters: 20 GB if they were real


def test_gradient_checkpointing_changes_nothing(tokenizer: Any) -> None:
    ids = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    gradients = []
    for flag in (False, True):
        model, _ = build_model(scratch().model_copy(update={"gradient_checkpointing": flag}), tokenizer, 16, 1)
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) is flag
        model(ids, ids).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", list(MODELS))
def test_weight_decay_is_chosen_by_name(name: str) -> None:
    model = make_model(name, "float32")
    decayed = decayed_names(model)
    for parameter_name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2  # true for these two models; the choice itself does not look at shapes
        assert (parameter_name in decayed) is is_matrix, parameter_name
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    (one,) = build_optimizer(model, OptimizerConfig(weight_decay=0.0)).param_groups
    assert len(one["params"]) == len(list(model.parameters())), "nothing decays: one update for all"
    for parameter in model.parameters():
        parameter.data = parameter.data.reshape(-1)  # as a sharded engine may hold them
    assert decayed_names(model) == decayed


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "mistral", "bloom", "mamba"])
def test_the_check_on_the_meta_device_really_runs_the_model(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that gives up before the first layer would find nothing wrong with any model."""
    ran = []
    original = nn.Module.__call__

    def note(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        output = original(self, *arguments, **keywords)
        ran.append(type(self).__name__)
        return output

    monkeypatch.setattr(nn.Module, "__call__", note)
    known = type(AutoConfig.for_model(model_type))()
    fields = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    check_model(ModelConfig(config={"model_type": model_type, **fields}), None, 64, 8)
    assert any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in ran), (
        f"{model_type} was not run to its end: {ran[-1:]}"
    )


@pytest.mark.parametrize("name", list(MODELS))
def test_padding_after_a_short_row_changes_nothing(name: str) -> None:
    model = make_model(name, "float64").eval()
    ids = torch.randint(1, 64, (1, 6), generator=torch.Generator().manual_seed(2))
    alone = model(ids[:, :5], ids[:, 1:])
    padded_ids, padded_targets = torch.zeros(3, 12, dtype=torch.int64), torch.full((3, 12), -100)
    padded_ids[1, :5], padded_targets[1, :5] = ids[0, :5], ids[0, 1:]
    padded = model(padded_ids, padded_targets)
    assert torch.allclose(alone.nll, padded.nll, rtol=1e-12)
    assert (alone.num_targets, alone.num_correct) == (padded.num_targets, padded.num_correct)


# --- the empty model of the processes that get their weights from another ------------------------------------------

EMPTY: list[dict[str, Any]] = [
    {"model_type": "llama"}, {"model_type": "llama", "tie_word_embeddings": True}, {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    {"model_type": "gemma2", "head_dim": 8}, {"model_type": "bloom", "n_layer": 2, "n_head": 4},
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fields", EMPTY, ids=str)
def test_an_empty_model_is_the_real_one_except_for_its_weights(
    fields: dict[str, Any], dtype: str, tokenizer: Any
) -> None:
    known = type(AutoConfig.for_model(fields["model_type"]))()
    sizes = {key: value for key, value in SMALL.items() if hasattr(known, key) and "token_id" not in key}
    config = ModelConfig(config={**sizes, "vocab_size": 257, **fields}, dtype=dtype, gradient_checkpointing=True)  # type: ignore[arg-type]
    model, facts = build_model(config, tokenizer, 16, 0)
    empty = build_empty_model(config, tokenizer, 16, facts)

    def describe(model: Any) -> list[Any]:
        parameters = [(n, p.shape, p.dtype, p.requires_grad, p.device.type) for n, p in model.named_parameters()]
        ties = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        modules = [(name, type(module), module.training) for name, module in model.named_modules()]
        checkpointing = [n for n, m in model.named_modules() if getattr(m, "gradient_checkpointing", False)]
        return [
            parameters,
            ties,
            modules,
            checkpointing,
            model.config._attn_implementation,
            model.config.to_dict() | {"dtype": None},
        ]

    for mine, its in zip(describe(empty), describe(model), strict=True):
        assert mine == its
    # Buffers are not weights: no process sends them, so they are computed here as there.
    for (name, buffer), (its_name, its_buffer) in zip(empty.named_buffers(), model.named_buffers(), strict=True):
        assert name == its_name
        assert torch.equal(buffer, its_buffer)
    with torch.no_grad():
        for mine, its in zip(empty.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(empty.eval()(ids, ids).nll, model.eval()(ids, ids).nll)


def test_an_empty_model_of_a_continued_one_reads_no_weights(tokenizer: Any, tmp_path: Any) -> None:
    build("llama").save_pretrained(tmp_path)
    config = ModelConfig(name_or_path=str(tmp_path), resize_embeddings=True)
    model, facts = build_model(config, tokenizer, 16, 0)
    (tmp_path / "model.safetensors").unlink()
    empty = build_empty_model(config, tokenizer, 16, facts)
    assert [(n, p.shape) for n, p in empty.named_parameters()] == [(n, p.shape) for n, p in model.named_parameters()]
    assert empty.get_input_embeddings().weight.shape[0] == 257


# --- parameters that no loss depends on ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [row[:2] for row in [*ARCHITECTURES, ("mixtral", MOE), ("qwen3_moe", MOE)]],
    ids=lambda value: str(value)[:40],
)
def test_no_architecture_is_refused(model_type: str, fields: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    """Neither for unused parameters, where experts see a few of the four tokens of the check, nor for leaks; continued as well."""
    if model_type == "doge":
        needs_transformers("5.18", "Doge's logits depend on later tokens")
    known = type(AutoConfig.for_model(model_type))()
    values = {key: value for key, value in SMALL.items() if hasattr(known, key)} | fields | {"vocab_size": 257}
    config = ModelConfig(config={"model_type": model_type, **values})
    check_model(config, None, 257, 16)
    build_model(config, tokenizer, 16, 0)[0].save_pretrained(tmp_path)
    continued = ModelConfig(name_or_path=str(tmp_path))
    check_model(continued, tokenizer, 257, 16)
    build_model(continued, tokenizer, 16, 0)


def test_a_parameter_that_a_short_row_does_not_reach_is_not_called_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model that compresses many positions to one."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: x if x.shape[1] < 16 else original(self, x))
    with pytest.raises(ConfigError, match=r"must use all of its parameters, got no gradient for .*mlp"):
        check_model(scratch(), None, 64, 15)
    check_model(scratch(), None, 64, 16)


def test_a_model_whose_own_code_reads_the_mask_is_checked_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    original = LlamaAttention.forward

    def forward(self: nn.Module, hidden_states: torch.Tensor, attention_mask: Any = None, **keywords: Any) -> Any:
        attention_mask[:, 0]
        return original(self, hidden_states, attention_mask=attention_mask, **keywords)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    check_model(scratch(), None, 64, 16)


# --- causal, whatever the type ---------------------------------------------------------------------------------------

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("more", [{}, {"initializer_range": 1e-6}], ids=["drawn as usual", "drawn near zero"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_looks_ahead_is_refused_with_what_makes_it_causal(
    dtype: str, more: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    says = r"model.config must be a causal model, got one of type bert, whose output at a position depends on later tokens; set model.config.is_decoder=true"
    config = ModelConfig(config=BERT | more, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        build_model(config, tokenizer, 16, 0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**BERT, **more, vocab_size=257)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.name_or_path .* set is_decoder: true in its config.json"):
        build_model(ModelConfig(name_or_path=str(tmp_path), dtype=dtype), tokenizer, 16, 0)  # type: ignore[arg-type]
    build_model(config.model_copy(update={"config": BERT | more | {"is_decoder": True}}), tokenizer, 16, 0)


@pytest.mark.parametrize("reaches", ["one token ahead", "all of the first four", "which positions are taken"])
def test_a_leak_is_found_however_little_it_shows(reaches: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one has no gradient: as experts that choose tokens do, a layer works on the largest of all positions."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if reaches == "one token ahead":
            x = x + 1e-6 * torch.cat([x[:, 1:], x[:, -1:]], dim=1)
        elif reaches == "all of the first four":
            x = x + 1e-6 * torch.cat([x[:, :4].mean(dim=1, keepdim=True).expand(-1, 4, -1), 0 * x[:, 4:]], dim=1)
        else:
            norms = (x[..., 0] + x[..., 1]).detach()
            x = 30 * x * (norms >= norms.median(dim=1, keepdim=True).values)[..., None]
        result: torch.Tensor = original(self, x)
        return result

    build_model(scratch(), tokenizer, 32, 0)
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(ConfigError, match=r"must be a causal model, got one of type llama, .*choose another model"):
        build_model(scratch(), tokenizer, 32, 0)


# --- the id that rows would be padded with -------------------------------------------------------------------------


def gradient_of_end_token(model: Any, tokenizer: Any) -> torch.Tensor:
    """Gradient of its row of the input embeddings, where a row of ids holds it once."""
    ids = torch.randint(1, 200, (2, 17), generator=torch.Generator().manual_seed(0))
    ids[:, 8] = tokenizer.eos_token_id
    weight = model.get_input_embeddings().weight
    nll = nn.functional.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    gradient: torch.Tensor = torch.autograd.grad(nll, weight)[0][tokenizer.eos_token_id]
    return gradient


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "opt"])
def test_the_end_token_is_drawn_and_trained_like_any_other(model_type: str, tokenizer: Any) -> None:
    known = type(AutoConfig.for_model(model_type))()
    sizes = {key: value for key, value in SMALL.items() if hasattr(known, key) and "token_id" not in key}
    config = ModelConfig(config={**sizes, "vocab_size": 257, "model_type": model_type, "tie_word_embeddings": False})
    model, facts = build_model(config, tokenizer, 16, 0)
    rows = model.get_input_embeddings().weight
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert model.config.pad_token_id is None
    assert 0.5 < rows[0].norm() / rows.norm(dim=1).mean() < 2
    assert gradient_of_end_token(model, tokenizer).norm() > 0
    assert build_empty_model(config, tokenizer, 16, facts).get_input_embeddings().padding_idx is None


def test_a_named_padding_id_must_be_one_that_no_text_uses(tokenizer: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"model.config.pad_token_id must be an id that no text uses, got 0; leave it"
    ):
        check_model(scratch(pad_token_id=0), None, 257, 16)
    with pytest.raises(
        ConfigError, match=r"model.config.pad_token_id must be an id that no text uses, got 65; leave it"
    ):
        check_model(scratch(pad_token_id=65), tokenizer, 257, 16)
    config = scratch(pad_token_id=257, vocab_size=258)
    one, same = (build_model(config, tokenizer, 16, 3)[0].get_input_embeddings() for _ in range(2))
    assert one.padding_idx is None
    assert torch.equal(one.weight, same.weight)
    assert 0.5 < one.weight[257].norm() / one.weight.norm(dim=1).mean() < 2
    modern = {"model_type": "modernbert-decoder", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
    says = "pad_token_id must be an id that no text uses for model type modernbert-decoder, got none; name one, such as 257 with model.config.vocab_size: 258"
    with pytest.raises(ConfigError, match=says):
        check_model(ModelConfig(config=modern), tokenizer, 257, 16)
    check_model(ModelConfig(config={**modern, "vocab_size": 258, "pad_token_id": 257}), tokenizer, 257, 16)


def test_a_continued_model_whose_padding_is_its_end_token_gets_the_true_gradient(
    tokenizer: Any, tmp_path: Path
) -> None:
    plain = build("llama", vocab_size=257, pad_token_id=0)
    with torch.no_grad():
        plain.get_input_embeddings().weight[0].normal_(0, 0.02)
    plain.save_pretrained(tmp_path)
    model, _ = build_model(ModelConfig(name_or_path=str(tmp_path)), tokenizer, 16, 0)
    assert not gradient_of_end_token(plain, tokenizer).any(), "transformers leaves it out"
    plain.get_input_embeddings().padding_idx = None
    torch.testing.assert_close(gradient_of_end_token(model, tokenizer), gradient_of_end_token(plain, tokenizer))
    assert model.config.pad_token_id == 0, "the config stays the model's own"


# --- what the model's own code says, and what it does not ------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "ctrl", "n_embd": 32, "n_layer": 2, "n_head": 2, "dff": 64},
        {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 2},
    ],
    ids=lambda fields: fields["model_type"],
)
@pytest.mark.parametrize("mode", [True, "selective"])
def test_gradient_checkpointing_is_refused_where_transformers_has_none(
    mode: Any, fields: dict[str, Any], tokenizer: Any
) -> None:
    config = ModelConfig(config=fields, gradient_checkpointing=mode)
    says = f"model.gradient_checkpointing must be false for a model of type {fields['model_type']}, got {str(mode).lower()}"
    for attempt in (lambda: check_model(config, tokenizer, 257, 16), lambda: build_model(config, tokenizer, 16, 0)):
        with pytest.raises(ConfigError, match=says):
            attempt()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (Preempted("stopped by SIGTERM"), Preempted),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError),
        (OSError(errno.ENOSPC, "No space left on device"), OSError),
        (ImportError("it requires the timm library"), MachineError),
        (ValueError("embed_dim must be divisible"), ConfigError),
    ],
    ids=lambda value: "" if isinstance(value, type) else type(value).__name__,
)
def test_the_recipe_is_blamed_only_for_errors_of_the_models_own_code(
    raised: BaseException,
    expected: type[BaseException],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    build("llama", vocab_size=257).save_pretrained(tmp_path)

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise raised

    monkeypatch.setattr(LlamaModel, "forward", fail)
    continued = ModelConfig(name_or_path=str(tmp_path))
    for config in (scratch(), continued):
        for attempt in (lambda: check_model(config, tokenizer, 257, 16), lambda: build_model(config, tokenizer, 16, 0)):  # noqa: B023
            with pytest.raises(expected):
                attempt()
    monkeypatch.setattr(LlamaModel, "__init__", fail)
    if not isinstance(raised, (ImportError, ValueError)):
        with pytest.raises(expected):
            build_model(continued, tokenizer, 16, 0)


def test_parameters_without_a_gradient_are_named_unless_they_are_allowed() -> None:
    fields = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "add_cross_attention": True}
    says = r"model.config must use all of its parameters, got no gradient for transformer\.h\.0\.crossattention\.c_attn\.weight, .* and \d+ more"
    with pytest.raises(ConfigError, match=says):
        check_model(ModelConfig(config=fields), None, 64, 16)
    check_model(ModelConfig(config=fields), None, 64, 16, may_be_unused=True)
