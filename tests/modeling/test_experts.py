"""Experts under autocast: in groups, and in autocast's type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backends import MODELS
from torch.nn import functional

from acc_lm.config import ModelConfig, TokenizerConfig
from acc_lm.modeling.build import build_model
from acc_lm.text.tokenizer import make_tokenizer

QWEN = {"model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}  # fmt: skip


@pytest.mark.parametrize("shape", [MODELS["mixtral"], QWEN], ids=lambda shape: shape["model_type"])
def test_the_products_of_experts_are_in_the_type_of_autocast(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    model, _ = build_model(ModelConfig(config=shape, router_loss="off"), tokenizer, 16, 0)
    model.config.save_pretrained(tmp_path)
    assert "in_autocast" not in (tmp_path / "config.json").read_text()
    seen: list[torch.dtype] = []
    product = functional.grouped_mm

    def noted(input: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
        seen.append(weight.dtype)
        assert input.dtype == weight.dtype
        return product(input, weight, **how)

    monkeypatch.setattr(functional, "grouped_mm", noted)
    ids = torch.randint(1, 250, (3, 17), generator=torch.Generator().manual_seed(0))

    def run(is_low: bool, how: str | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if how:
            model.set_experts_implementation(how)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
            loss = model.train()(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    exact, exact_gradients = run(False)
    assert set(seen) == {torch.float32}
    seen.clear()
    low, low_gradients = run(True)
    assert set(seen) == {torch.bfloat16}
    assert {gradient.dtype for gradient in low_gradients.values()} == {torch.float32}
    assert 0 < abs(low / exact - 1) < 1e-2
    other, other_gradients = run(True, "eager")  # whose products heed autocast by themselves
    assert abs(low / other - 1) < 2e-3

    def off(gradients: dict[str, torch.Tensor]) -> float:
        square = sum(float((gradients[name] - exact).square().sum()) for name, exact in exact_gradients.items())
        return float(square / sum(float(exact.square().sum()) for exact in exact_gradients.values())) ** 0.5

    assert 0 < off(low_gradients) < 2 * off(other_gradients) < 0.2, "bf16 itself, and tokens that it sends elsewhere"
    seen.clear()
    same, same_gradients = run(False, "grouped_mm")
    assert seen
    assert torch.equal(same, exact)
    assert all(torch.equal(same_gradients[name], gradient) for name, gradient in exact_gradients.items())


def test_sizes_that_16_bits_do_not_align_are_multiplied_one_by_one() -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    model, _ = build_model(
        ModelConfig(config=QWEN | {"moe_intermediate_size": 20}, router_loss="off"), tokenizer, 16, 0
    )
    ids = torch.randint(1, 250, (3, 17), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            model.train()(ids[:, :-1], ids[:, 1:]).backward()
