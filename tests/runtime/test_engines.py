"""Common behaviour of the engines: gradients that can be inspected, replicas that agree, weights that are made once."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import GLOBAL_BATCH, LENGTH, NUM_ROWS, RaggedRows, Scenario, make_config, run_backend
from processes import ROOT, launcher_environment, run_everywhere, run_training
from torch import nn

SHORT = Scenario("gpt2", accumulation=2, steps=2)


def environment_for(config: str, num_processes: int) -> dict[str, str]:
    if config == "single":
        return {}
    return launcher_environment(ROOT / "accelerate_configs" / f"{config}.yaml", num_processes)


# --- gradients -----------------------------------------------------------------------------------------------------

POISONED = "transformer.h.1.mlp.c_fc.weight"


class Poison(torch.autograd.Function):
    """Identity of the weight; its gradient is NaN in the first micro-batch of one step on one process."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor, is_due: list[bool]) -> torch.Tensor:
        context.is_due = is_due
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        factor = float("nan") if context.is_due[0] else 1.0
        context.is_due[0] = False
        return gradients[0] * factor, None


def train_with_a_bad_gradient(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """One good step, one in which a single parameter gets a bad gradient on the last process, one after it."""
    from acc_lm.checkpointing.loading import weights_digest
    from acc_lm.rows.order import RowOrder
    from acc_lm.runtime import Gradients, bare_model, count_updates, split_global_batch
    from acc_lm.training.divergence import Watch
    from acc_lm.training.step import train_step

    is_due = [False]
    module = bare_model(model).get_submodule(POISONED.rpartition(".")[0])

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weight = Poison.apply(module.weight, is_due)
        return hidden @ weight + module.bias

    module.forward = forward
    gradients, folder = Gradients(accelerator, model), Path(tempfile.mkdtemp())
    watch = Watch(accelerator, gradients, config.training, RowOrder(0, NUM_ROWS, GLOBAL_BATCH), folder)
    rows = RaggedRows(NUM_ROWS, 1)
    micro, accumulation = split_global_batch(config.training, accelerator.num_processes)
    seen: dict[str, Any] = {}
    updates = count_updates(optimizer)  # those of the harness itself
    for step in (1, 2, 3):
        is_due[0] = step == 2 and accelerator.process_index == accelerator.num_processes - 1
        before = weights_digest(accelerator, model, optimizer)
        batches = [rows.__getitems__(list(range(i * micro + 1, (i + 1) * micro + 1))) for i in range(accumulation)]
        outcome = train_step(
            accelerator, model, optimizer, batches,
            step=step, seed=0, num_targets=GLOBAL_BATCH * LENGTH, max_grad_norm=1.0, gradients=gradients,
        )  # fmt: skip
        moved = before != weights_digest(accelerator, model, optimizer)
        watch.note(step, outcome)
        loss = float("nan") if step == 1 else watch.look(step)
        seen[f"step {step}"] = (moved, count_updates(optimizer) - updates, loss, watch.news())
    return seen


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [("single", 1), ("ddp", 2), ("fsdp2", 2), ("deepspeed_zero2", 2), ("deepspeed_zero3", 2), ("deepspeed_zero2_offload", 2),
     *(pytest.param(*other, marks=pytest.mark.slow) for other in [("hsdp", 4), ("deepspeed_zero1", 2), ("deepspeed_zero3_offload", 2)])],
)  # fmt: skip
def test_a_bad_gradient_on_one_process_skips_the_step_on_all_and_is_named(config: str, num_processes: int) -> None:
    """Weights, moments and the count of updates stay; the first step was read together with the second, as between logs."""
    seen = run_backend(config, num_processes, [SHORT], train_with_a_bad_gradient)[0].extra
    assert seen["step 1"][:2] == (True, 1)
    moved, updates, loss, bad = seen["step 2"]
    assert (moved, updates) == (False, 1)
    assert bad == [f"step 2 was skipped: the gradient of {POISONED} is not finite"]
    assert 0 < loss < 10
    assert seen["step 3"][:2] == (True, 2)
    assert 0 < seen["step 3"][2] < 10
    assert seen["step 3"][3] == []


def test_the_gradient_norm_is_exact_and_clips_as_torch_does() -> None:
    """Large and small tensors, an empty one as a process may have of a sharded parameter, and one without a gradient."""

    def run() -> list[float]:
        from test_step import make_config as least_config

        from acc_lm.runtime import Gradients, build_accelerator

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                sizes = {"large": (3000, 1001), "small": (7,), "empty": (0, 5), "unused": (4,)}
                for name, size in sizes.items():
                    self.register_parameter(name, nn.Parameter(torch.zeros(size)))

        model, exact = Model(), Model().double()
        numbers = torch.Generator().manual_seed(0)
        for (name, parameter), other in zip(model.named_parameters(), exact.parameters(), strict=True):
            if name != "unused":
                parameter.grad = torch.randn(parameter.shape, generator=numbers)
                other.grad = parameter.grad.double()
        accelerator = build_accelerator(least_config(1, 1))
        gradients = Gradients(accelerator, model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), fused=True))
        norm, expected = gradients.clip(10.0, optimizer), nn.utils.clip_grad_norm_(exact.parameters(), 10.0)
        clipped = (model.large.grad.double() - exact.large.grad).abs().max() / exact.large.grad.abs().max()
        again = gradients.clip(None, optimizer)
        return [
            abs(float(norm / expected) - 1),
            float(clipped),
            abs(float(again) / 10.0 - 1),
            sum(len(names) for names in gradients.not_finite()),
        ]

    ((norm, clipped, again, num_bad),) = run_everywhere(run)
    assert norm < 1e-8
    assert clipped < 1e-6
    assert again < 1e-6
    assert num_bad == 0


# --- replicas ------------------------------------------------------------------------------------------------------


def change_a_copy(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """Result of `check_replicas` before and after one weight on the last process was changed."""
    from acc_lm.errors import DivergedError
    from acc_lm.runtime import bare_model, check_replicas

    check_replicas(accelerator, model, 6)
    if accelerator.process_index == accelerator.num_processes - 1:
        weight = dict(bare_model(model).named_parameters())[POISONED].detach()
        getattr(weight, "_local_tensor", weight).view(-1)[-1] += 1e-3
    try:
        check_replicas(accelerator, model, 7)
    except DivergedError as error:
        return {"says": str(error)}
    return {"says": "nothing"}


@pytest.mark.parametrize(
    ("config", "num_processes", "other"), [("ddp", 3, 0), ("hsdp", 4, 1), ("deepspeed_zero2", 2, 0)]
)
def test_a_weight_that_differs_between_copies_is_named(config: str, num_processes: int, other: int) -> None:
    says = run_backend(config, num_processes, [SHORT], change_a_copy)[0].extra["says"]
    assert (
        f"got a different {POISONED} on process {num_processes - 1} than on process {other} after step 7; "
        "this step was not saved; check the hardware"
    ) in says


@pytest.mark.parametrize("config", ["fsdp2", "deepspeed_zero3"])
def test_pieces_that_exist_once_are_not_compared(config: str) -> None:
    assert run_backend(config, 2, [SHORT], change_a_copy)[0].extra["says"] == "nothing"


@pytest.mark.parametrize(("config", "num_processes"), [("ddp", 2), ("hsdp", 4)])
def test_a_run_compares_its_copies_as_often_as_the_recipe_says(
    config: str, num_processes: int, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import acc_lm.runtime
    import acc_lm.training

    environment = environment_for(config, num_processes)
    checked = tmp_path / "checked"
    original_check, original_step = acc_lm.runtime.check_replicas, acc_lm.training.train_step

    def note(accelerator: Any, model: Any, step: int) -> None:
        if accelerator.is_main_process:
            with checked.open("a") as file:
                file.write(f"{step} ")
        original_check(accelerator, model, step)

    monkeypatch.setattr(acc_lm.runtime, "check_replicas", note)
    arguments = [*tiny, "checkpoint.every=1", "distributed.check_parameters_every=2"]
    run_training([*arguments, f"output_dir={tmp_path / 'good'}"], num_processes, environment)
    assert checked.read_text() == "2 4 6 "

    def spoil(accelerator: Any, model: Any, *arguments: Any, step: int, **keywords: Any) -> Any:
        outcome = original_step(accelerator, model, *arguments, step=step, **keywords)
        if step == 3 and accelerator.process_index == num_processes - 1:
            weight = list(model.parameters())[0].detach()
            getattr(weight, "_local_tensor", weight).view(-1)[-1] += 1e-3
        return outcome

    monkeypatch.setattr(acc_lm.training, "train_step", spoil)
    finished = run_training(arguments, num_processes, environment, timeout=60, expect=6)
    (line,) = finished.errors
    assert "parameters must be equal on every process, got a different model.embed_tokens.weight on process" in line
    assert "after step 4" in line
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "diverged"
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] != []
    assert not (tmp_path / "run/checkpoints/step-00000004").exists()


# --- parameters that no loss depends on ----------------------------------------------------------------------------

UNUSED = [
    "model.config={model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 32, add_cross_attention: true}",
    "training.max_steps=2", "schedule.warmup_steps=1",
]  # fmt: skip


def test_a_parameter_without_a_gradient_is_refused_before_any_data_is_read(tiny: list[str]) -> None:
    finished = run_training([*tiny, *UNUSED, "data.files=[/nowhere/text.jsonl]"], timeout=60, expect=2)
    (line,) = finished.errors
    assert "model.config must use all of its parameters, got no gradient for transformer.h.0." in line
    assert "crossattention" in line
    assert "set distributed.find_unused_parameters=true" in line


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        ("ddp", 2), ("deepspeed_zero3", 2),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in [("single", 1), ("fsdp2", 2), ("deepspeed_zero2", 2)]),
    ],
)  # fmt: skip
def test_a_parameter_without_a_gradient_may_be_allowed(
    config: str, num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    """It trains, saves and resumes."""
    arguments = [*tiny, *UNUSED, "distributed.find_unused_parameters=true"]
    environment = environment_for(config, num_processes)
    run_training(arguments, num_processes, environment, timeout=60)
    run_training([*arguments, "training.max_steps=3"], num_processes, environment, timeout=60)
    assert json.loads((tmp_path / "run/summary.json").read_text())["step"] == 3


# --- weights are made once -----------------------------------------------------------------------------------------

LARGE = {"model_type": "llama", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip


@pytest.mark.parametrize("config", ["fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_under_bf16_an_engine_starts_from_the_main_processs_weights_in_full_precision(config: str) -> None:
    """DeepSpeed keeps frozen weights in 16 bits. Some shards of FSDP2 are one element here; all can be written."""

    def run() -> tuple[str, dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, set[bool]]]]:
        from acc_lm import runtime
        from acc_lm.config import ModelConfig, TokenizerConfig
        from acc_lm.modeling.build import build_empty_model, build_model
        from acc_lm.optimization.optimizer import build_optimizer
        from acc_lm.runtime.engines.shards import WEIGHT, gather_tensor, pieces_of
        from acc_lm.text.tokenizer import make_tokenizer

        recipe = make_config(replace(SHORT, mixed_precision="bf16"), 2)
        accelerator = runtime.build_accelerator(recipe)
        tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
        sizes = LARGE | {"hidden_size": 2, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
        wanted = ModelConfig(config=sizes, freeze=("model.layers.1.*",))
        model, _ = runtime.initialise_once(
            accelerator,
            lambda: build_model(wanted, tokenizer, LENGTH, seed=accelerator.process_index),
            lambda facts: build_empty_model(wanted, tokenizer, LENGTH, facts),
        )
        original = {name: p.detach().clone() for name, p in model.named_parameters()}
        model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, recipe.optimizer))
        pieces, found = list(pieces_of(model, optimizer)), {}
        for name, before in original.items():
            own = [piece for piece in pieces if piece.name == name]
            full = gather_tensor(accelerator, own, WEIGHT, tuple(before.shape), torch.float32)
            for piece in own:
                piece.put(WEIGHT, torch.full((piece.length,), 3.0))
            written = gather_tensor(accelerator, own, WEIGHT, tuple(before.shape), torch.float32)
            found[name] = (before, full, written, {piece.is_trained for piece in own})
        return type(model).__name__, found

    (engine, main), (_, other) = run_everywhere(run, 2, environment=environment_for(config, 2))
    assert engine == ("FSDPLlamaForCausalLM" if config == "fsdp2" else "DeepSpeedEngine")
    for name, (before, full, written, is_trained) in main.items():
        assert is_trained | other[name][3] == {".layers.1." not in name}, name
        rounded = config != "fsdp2" and ".layers.1." in name
        assert torch.equal(full, before.bfloat16().float() if rounded else before), name
        assert torch.equal(full, other[name][1]), name
        assert torch.equal(written, torch.full_like(full, 3.0)), name
    embedding, of_other = (each["model.embed_tokens.weight"][0] for each in (main, other))
    assert not torch.equal(embedding, embedding.bfloat16().float())
    assert config == "fsdp2" or not torch.equal(embedding, of_other), "the other process began with others"


@pytest.mark.parametrize("config", ["fsdp2", "deepspeed_zero3"])
def test_before_prepare_only_the_main_process_holds_the_model(config: str) -> None:
    def run() -> tuple[float, float, int, list[str]]:
        import ctypes
        import gc

        import psutil

        from acc_lm import runtime
        from acc_lm.config import ModelConfig, TokenizerConfig
        from acc_lm.modeling.build import build_empty_model, build_model
        from acc_lm.text.tokenizer import make_tokenizer

        accelerator = runtime.build_accelerator(make_config(SHORT, 2))
        tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])

        def make(sizes: dict[str, Any]) -> Any:
            model = ModelConfig(config=sizes)
            return runtime.initialise_once(
                accelerator,
                lambda: build_model(model, tokenizer, LENGTH, 0),
                lambda facts: build_empty_model(model, tokenizer, LENGTH, facts),
            )

        make(
            LARGE | {"hidden_size": 8, "intermediate_size": 8}
        )  # what is imported meanwhile does not count for the model
        gc.collect()
        # Freed memory that a forked process inherits and reuses would not show as growth.
        ctypes.CDLL(None).malloc_trim(0)
        before = psutil.Process().memory_info().rss
        model, facts = make(LARGE)
        grown = (psutil.Process().memory_info().rss - before) / 1e6
        return grown, facts.num_parameters * 4 / 1e6, int(os.environ["RANK"]), [n for n, _ in model.named_parameters()]

    (main, size, _, names), (other, _, rank, other_names) = run_everywhere(
        run, 2, environment=environment_for(config, 2)
    )
    assert 100 < size < 130
    assert rank == 1
    assert names == other_names
    assert main > 0.9 * size, "the measure must see a model"
    assert other < 0.1 * size, f"the other process grew by {other:.0f} MB of a model of {size:.0f} MB"


def test_the_norm_of_an_engine_is_taken_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a gradient that is not finite is found by its sum, in whichever micro-batch."""
    from types import SimpleNamespace

    from acc_lm.runtime import Gradients

    class Engine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in ("fine", "bad")})

        def get_global_grad_norm(self) -> Any:
            return norm

    Engine.__module__ = "deepspeed.runtime.engine"
    engine: Any = Engine()
    gradients = Gradients(SimpleNamespace(device=torch.device("cpu")), engine)  # type: ignore[arg-type]
    fine, bad = (engine.module[name].weight for name in ("fine", "bad"))
    steps = (
        [(1.0, 1.0)],
        [(1.0, float("inf")), (1.0, 1.0)],
        [(1.0, float("-inf")), (1.0, float("inf"))],
        [(1e38, 1.0)],
    )
    norm: Any = torch.tensor(2.5)
    for step in steps:
        for mine, other in step:
            (fine.sum() * mine + (bad * torch.tensor([1.0, other, 1.0])).sum()).backward()
        with monkeypatch.context() as trap:
            for name in ("item", "tolist", "__bool__", "__float__"):
                trap.setattr(torch.Tensor, name, lambda *_: pytest.fail("waits for the device"))
            assert gradients.clip(1.0, None) is norm
        fine.grad = bad.grad = None
    norm = float("inf")
    assert gradients.clip(1.0, None).isinf()
    assert gradients.not_finite() == [[], ["bad.weight"], ["bad.weight"], [], []]
