"""Selective activation checkpointing: same numbers bit for bit, no product computed twice, memory between full and none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from backends import BACKENDS, STRATEGY, Curve, Scenario, run_backend
from processes import run_everywhere, run_training
from torch.utils._python_dispatch import TorchDispatchMode

from acc_lm.config import ModelConfig, TokenizerConfig
from acc_lm.modeling import activations
from acc_lm.modeling.build import build_model
from acc_lm.text.tokenizer import make_tokenizer

MODES: list[Any] = [False, "selective", True]
SIZES = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 2,
              "num_key_value_heads": 1},
    "mixtral": {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
                "num_key_value_heads": 1, "num_local_experts": 4},
}  # fmt: skip
DROPOUT = SIZES["gpt2"] | {"resid_pdrop": 0.1, "attn_pdrop": 0.1}
LENGTH = 128


def build(fields: dict[str, Any], mode: Any, packs: bool = False) -> Any:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    return build_model(ModelConfig(config=fields, gradient_checkpointing=mode), tokenizer, LENGTH, 0, packs=packs)[0]


def batch_of(packs: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 257, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "targets": ids.roll(-1)}
    if packs:
        half = LENGTH // 2
        batch["position_ids"] = (torch.arange(LENGTH) % half).expand(4, LENGTH)
        batch["document_ids"] = (torch.arange(LENGTH) // half).expand(4, LENGTH)
    return batch


def step(model: Any, run: Any, packs: bool = False) -> list[torch.Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = run(**batch_of(packs))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def kept_bytes(run: Callable[[], Any]) -> int:
    """Bytes that a forward pass leaves allocated, by the allocator's own count.

    In a separate process: in one that has profiled, torch's profiler cannot be silenced any more.
    """
    return int(run_everywhere(lambda: _kept_bytes(run))[0])


def _kept_bytes(run: Callable[[], Any]) -> int:
    from torch.profiler import ProfilerActivity, profile

    run().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = run()
    kept = sum(event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    del loss
    return int(kept)


def operations(run: Callable[[], Any]) -> tuple[int, int]:
    """Floating-point operations of the products and attentions in the forward and in the backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward:
        loss = run()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


class Attentions(TorchDispatchMode):
    """Counter of attentions, which torch's own count leaves out on a CPU."""

    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        self.calls += name.startswith("aten::_scaled_dot_product_") and "backward" not in name
        return function(*args, **(kwargs or {}))


def attentions(run: Callable[[], Any]) -> tuple[int, int]:
    """Calls in the forward and in the backward pass."""
    with Attentions() as forward:
        loss = run()
    with Attentions() as backward:
        loss.backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize("name", SIZES)
def test_no_product_is_computed_twice_and_memory_is_in_between(name: str) -> None:
    found = {}
    for mode in MODES:
        model = build(SIZES[name], mode)
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) is bool(mode)
        run = partial(model, **batch_of())
        found[mode] = kept_bytes(run), *operations(run)
        assert attentions(run) == (3, 3 if mode is True else 0)
    print(name, found)
    plain, selective, full = (found[mode] for mode in MODES)
    assert full[0] < 0.25 * plain[0], "the blocks' inputs, and little else"
    assert full[0] < selective[0] < 0.65 * plain[0]
    assert plain[1] == selective[1] == full[1]
    assert selective[2] == plain[2], "nothing that counts is computed again"
    assert 1.2 < full[2] / plain[2] < 1.55, "a third of forward and backward together would be 1.5, without a head"


@pytest.mark.parametrize(
    ("fields", "packs"), [*((fields, packs) for fields in SIZES.values() for packs in (False, True)), (DROPOUT, False)]
)
def test_loss_and_gradients_are_the_same_bit_for_bit(fields: dict[str, Any], packs: bool) -> None:
    plain, selective, full = (step(model := build(fields, mode, packs), model, packs) for mode in MODES)
    assert all(map(torch.equal, plain, selective))
    assert all(map(torch.equal, plain, full))


def test_redrawn_dropout_masks_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the first pass's random state the gradients differ."""
    (plain,) = (step(model := build(DROPOUT, mode), model) for mode in (False,))
    arguments = activations.checkpoint_arguments("selective") | {"preserve_rng_state": False}
    monkeypatch.setattr("acc_lm.modeling.build.checkpoint_arguments", lambda which: arguments)
    model = build(DROPOUT, "selective")
    broken = step(model, model)
    assert torch.equal(plain[0], broken[0])
    assert not all(map(torch.equal, plain, broken))


def test_attention_with_dropout_is_called_again() -> None:
    """If it were kept, it would not draw the second time, and later draws would give other numbers."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    q = torch.zeros(1)
    keep, again = activations.CheckpointPolicy.MUST_SAVE, activations.CheckpointPolicy.PREFER_RECOMPUTE
    assert activations._keep_products(None, flash, q, q, q) == keep
    assert activations._keep_products(None, flash, q, q, q, 0.0, True) == keep
    assert activations._keep_products(None, flash, q, q, q, 0.1, True) == again
    assert activations._keep_products(None, flash, q, q, q, dropout_p=0.1) == again
    assert activations._keep_products(None, efficient, q, q, q, None, True, 0.1) == again
    assert activations._keep_products(None, efficient, q, q, q, None, True) == keep
    assert activations._keep_products(None, torch.ops.aten.native_dropout.default, q, 0.1, True) == again
    assert activations._keep_products(None, torch.ops.aten.bmm.default, q, q) == again


@pytest.mark.parametrize(("backend", "name", "packs"), [
    ("aot_eager_decomp_partition", "llama", False),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in [("aot_eager_decomp_partition", "gpt2", True), ("inductor", "llama", False), ("inductor", "gpt2", True)]),
])  # fmt: skip
def test_compiled_it_keeps_less_than_full_and_gives_the_same(backend: str, name: str, packs: bool) -> None:
    torch._dynamo.reset()
    expected = step(model := build(SIZES[name], False, packs), model, packs)
    kept = {}
    for mode in MODES:
        model = build(SIZES[name], mode, packs)
        run = torch.compile(model, backend=backend)
        for one, other in zip(expected, step(model, run, packs), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))
        kept[mode] = kept_bytes(partial(run, **batch_of(packs)))
    print(backend, name, packs, kept)
    plain, selective, full = (kept[mode] for mode in MODES)
    assert full < selective < plain


ENGINES = {"single": ("single", 1)} | {
    name: BACKENDS[name] for name in ("ddp x2", "fsdp2 x2", "deepspeed_zero2 x2", "deepspeed_zero3 x2")
}
SCENARIOS = [
    Scenario(model, accumulation=2, steps=4, gradient_checkpointing=mode) for model in ("gpt2", "llama") for mode in (False, "selective")
]  # fmt: skip


@cache
def one_process() -> list[Curve]:
    return run_backend("single", 1, SCENARIOS)


@pytest.mark.parametrize(
    "name", [name if name in ("single", "fsdp2 x2") else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]
)
def test_every_engine_keeps_its_curve_bit_for_bit(name: str) -> None:
    curves = one_process() if name == "single" else run_backend(*ENGINES[name], SCENARIOS)
    for plain, selective in zip(curves[::2], curves[1::2], strict=True):
        assert plain.strategy == selective.strategy == STRATEGY[ENGINES[name][0]][0]
        assert plain.metrics == selective.metrics
        assert (plain.start, plain.end) == (selective.start, selective.end)
        assert plain.start != plain.end


def test_the_recipe_chooses_the_kind_of_checkpointing(tiny: list[str]) -> None:
    assert run_training([*tiny, "model.gradient_checkpointing=selective", "--dry-run"]).code == 0
    (line,) = run_training([*tiny, "model.gradient_checkpointing=selectiv"], expect=2).errors
    assert line.endswith(
        "model.gradient_checkpointing must be one of false, true, selective, got 'selectiv' (a string); did you mean selective?"
    )
    (line,) = run_training([*tiny, "model.gradient_checkpointing=1"], expect=2).errors
    assert line.endswith("model.gradient_checkpointing must be true, false or a word, got 1; write true or false")
