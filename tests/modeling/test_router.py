"""Load-balancing loss of mixtures of experts: transformers' own value, whatever the split."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from backends import BACKENDS, Curve, Scenario, run_backend
from processes import run_everywhere, run_training
from releases import needs_transformers
from torch import nn
from transformers.models.mixtral import modeling_mixtral

from acc_lm.config import ModelConfig, TokenizerConfig
from acc_lm.errors import ConfigError
from acc_lm.modeling.build import build_model
from acc_lm.modeling.router import Router, RouterLoss, balance, routing_sums
from acc_lm.text.tokenizer import make_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5},
    "qwen3_moe": {**EXPERTS, "router_aux_loss_coef": 0.5},
    "qwen2_moe": {**EXPERTS, "router_aux_loss_coef": 0.5, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.5, "sliding_window": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "logits_scaling": 2.0},
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "sliding_window": 8},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "aux_loss_coef": 0.5, "kv_channels": 16, "num_key_value_heads": 1},
}  # fmt: skip
SPLITS = [Scenario("mixtral", accumulation=1, steps=6), Scenario("mixtral", accumulation=4, steps=6)]
TOLERANCE = {
    "train/loss": 1e-6, "train/grad_norm": 1e-6, "train/router_loss": 1e-6, "train/busiest_expert": 1e-6, "train/learning_rate": 0.0, "eval/loss": 1e-6,
}  # fmt: skip


def build(model_type: str, seed: int = 0, **more: Any) -> tuple[Any, Any]:
    config = {"model_type": model_type, **SIZES, **FAMILIES.get(model_type, {}), **more.pop("config", {})}
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    return build_model(ModelConfig(config=config, **more), tokenizer, 24, seed)


def rows(num_rows: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 257, (num_rows, 25), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:].clone()}


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class OneProcess:
    """The part of an Accelerator that a loss needs."""

    device = torch.device("cpu")

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize(
    ("model_type", "checkpointing"), [*((name, False) for name in FAMILIES), ("mixtral", True), ("granitemoe", True)]
)
def test_value_and_gradient_are_transformers_own(model_type: str, checkpointing: bool) -> None:
    if "granitemoe" in model_type:
        needs_transformers("5.18", "Granite's own loss for its router is an error")
    model, facts = build(model_type, gradient_checkpointing=checkpointing)
    batch = rows()
    theirs = type(model).forward(
        model, batch["input_ids"], labels=batch["targets"], shift_labels=batch["targets"], output_router_logits=True,
        use_cache=False,
    )  # fmt: skip
    expected = gradients(model, theirs.loss)
    routed = model(**batch, num_choices=facts.router.num_choices)
    router_loss = RouterLoss(OneProcess(), facts.router, 1)  # type: ignore[arg-type]
    loss = routed.nll / batch["targets"].numel() + router_loss.part_of(routed)
    assert facts.router.coefficient == 0.5
    assert router_loss.metrics()["train/router_loss"] == pytest.approx(theirs.aux_loss.item(), rel=1e-6)
    assert float(loss) == pytest.approx(float(theirs.loss), rel=1e-6)
    got = gradients(model, loss)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
    without = gradients(model, model(**batch) / batch["targets"].numel())
    assert any((without[name] - gradient).abs().max() > 1e-3 * gradient.abs().max() for name, gradient in got.items())


@cache
def one_process() -> Curve:
    return run_backend("single", 1, SPLITS[:1])[0]


def differences_to_one_process(curve: Curve) -> dict[str, float]:
    """Largest relative difference of each metric over all steps."""
    expected = one_process().metrics
    assert curve.metrics.keys() == expected.keys()
    return {
        name: max(
            abs(curve.metrics[step][name] - metrics[name]) / max(abs(metrics[name]), 1e-30)
            for step, metrics in expected.items() if name in metrics
        )
        for name in expected[6]
    }  # fmt: skip


@pytest.mark.parametrize("name", ["single", "ddp x2", "fsdp2 x2", "deepspeed_zero2 x2", "deepspeed_zero3 x2",
                                  *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp x3", "hsdp 2x2", "deepspeed_zero1 x2"))])  # fmt: skip
def test_no_split_changes_the_router_loss(name: str) -> None:
    scenarios = SPLITS[1:] if name == "single" else SPLITS
    for curve in run_backend(*BACKENDS.get(name, (name, 1)), scenarios):
        differences = differences_to_one_process(curve)
        print(name, {key: f"{value:.1e}" for key, value in differences.items()})
        assert differences.keys() == TOLERANCE.keys()
        assert all(difference <= TOLERANCE[key] for key, difference in differences.items()), differences


def test_a_router_loss_per_micro_batch_would_depend_on_the_split() -> None:
    alone = [
        run_backend("single", 1, [Scenario("mixtral", accumulation=n, steps=2, overrides=("model.router_loss=per_micro_batch",))])[0]
        for n in (1, 4)
    ]  # fmt: skip
    first, second = (curve.metrics[1]["train/router_loss"] for curve in alone)
    assert first == pytest.approx(one_process().metrics[1]["train/router_loss"], rel=1e-6)
    assert 1e-4 < abs(second / first - 1) < 0.05, "a mean over the parts, which is near"


@pytest.mark.parametrize(("accumulation", "expected"), [(1, 1), (2, 4)])
def test_an_exact_loss_counts_choices_ahead_only_if_several_micro_batches_share_them(
    accumulation: int, expected: int
) -> None:
    def run() -> tuple[int, list[torch.Tensor]]:
        from acc_lm.config import Config
        from acc_lm.runtime import Gradients, build_accelerator
        from acc_lm.training.step import train_step

        config = Config.model_validate({
            "model": {"config": {"model_type": "mixtral"}}, "tracking": {"report_to": []},
            "schedule": {"warmup_steps": 0}, "training": {"max_steps": 1, "global_batch_size": 2 * accumulation, "micro_batch_size": 2},
        })  # fmt: skip
        accelerator = build_accelerator(config)
        model, facts = build("mixtral", config={"attention_dropout": 0.5})
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        choices: list[torch.Tensor] = []

        def note(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            choices.append(output.clone() if keywords.get("only_choices") else output.choices_E.clone())

        model.register_forward_hook(note, with_kwargs=True)
        batches = [rows(2) for _ in range(accumulation)]
        train_step(
            accelerator, model, optimizer, batches, step=1, seed=0, num_targets=48 * accumulation, max_grad_norm=1.0,
            gradients=Gradients(accelerator, model), router=facts.router,
        )  # fmt: skip
        return len(choices), choices

    ((number, choices),) = run_everywhere(run, 1)
    assert number == expected
    for ahead, later in zip(choices[:accumulation], choices[-accumulation:], strict=True):
        assert torch.equal(ahead, later), "counted under the masks of the step itself"


def test_padding_does_not_count() -> None:
    model, facts = build("mixtral")
    batch = rows()
    batch["targets"][1, 9:] = -100
    wider = {
        "input_ids": nn.functional.pad(batch["input_ids"], (0, 7)),
        "targets": nn.functional.pad(batch["targets"], (0, 7), value=-100),
    }
    narrow, wide = (model(**rows, num_choices=facts.router.num_choices) for rows in (batch, wider))
    assert torch.equal(narrow.choices_E, wide.choices_E)
    assert int(narrow.choices_E.sum()) == 2 * 2 * (24 + 9 + 24)  # layers x choices x tokens
    torch.testing.assert_close(narrow.probabilities_E, wide.probabilities_E)


def test_even_routing_costs_the_number_of_choices() -> None:
    assert float(balance(torch.tensor([6, 6, 6, 6]), torch.tensor([3.0, 3.0, 3.0, 3.0]), 2)) == 2.0
    logits = torch.eye(4).repeat(3, 1)[:, [1, 0, 3, 2]] * 9
    choices, probabilities = routing_sums((logits,), 1, torch.ones(2, 6, dtype=torch.bool))
    assert choices.tolist() == [3, 3, 3, 3]
    assert float(balance(choices, probabilities, 1)) == pytest.approx(1.0)


def test_models_without_a_router_loss_and_models_that_disable_it() -> None:
    assert build("llama")[1].router is None
    assert build("deepseek_v3", config={"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "qk_nope_head_dim": 8,
                                        "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 8, "q_lora_rank": 8, "moe_intermediate_size": 16,
                                        "first_k_dense_replace": 1})[1].router is None  # fmt: skip
    assert build("mixtral", router_loss="off")[1].router is None
    assert build("mixtral", config={"router_aux_loss_coef": 0.0})[1].router is None
    assert build("mixtral", router_loss="per_micro_batch")[1].router == Router(4, 2, 0.5, is_exact=False)


def test_routers_that_record_nothing_are_not_taken_for_a_model_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that torch compiled can keep transformers from recording what it is asked to record."""
    from transformers.utils.output_capturing import _active_collector

    monkeypatch.setattr(_active_collector, "compiling", True)
    with pytest.raises(
        ConfigError, match=r"model\.router_loss must be off where transformers returns no router logits, got exact"
    ):
        build("mixtral")
    assert build("llama")[1].router is None


def test_a_loss_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_transformers("5.18", "Doge's logits depend on later tokens, for which it is refused first")
    with pytest.raises(ConfigError, match=r"model.router_loss must be off for a model of type doge, got exact"):
        build("doge", config={"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2})
    with pytest.raises(ValueError, match=r"output_router_logits must be left out because model.router_loss decides"):
        ModelConfig(config={"model_type": "mixtral", "output_router_logits": False})
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *_: torch.tensor(2.5))
    with pytest.raises(ConfigError, match=r"model.router_loss must be off for a model of type mixtral, got exact"):
        build("mixtral")


def test_a_run_logs_the_router_loss_separately_and_says_how_it_is_computed(tiny: list[str]) -> None:
    import json
    from pathlib import Path

    sizes = {**SIZES, **FAMILIES["mixtral"], "model_type": "mixtral"}
    finished = run_training([*tiny, f"model.config={json.dumps(sizes)}", "training.micro_batch_size=6"], expect=0)
    assert "experts" in finished.output
    assert (
        "2 of 4 for each token; load-balancing loss x 0.5, exact over the global batch; a second forward"
        in finished.output
    )
    output_dir = Path(next(argument for argument in tiny if argument.startswith("output_dir=")).partition("=")[2])
    logged = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in logged if "train/loss" in record]
    assert trained
    for record in trained:
        assert 2.0 <= record["train/router_loss"] <= 4.0
        assert 1.0 <= record["train/busiest_expert"] <= 2.0
        assert record["train/loss"] < 5.7, "the router's loss is no part of it"
