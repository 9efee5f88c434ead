"""GPU-only tests. Everywhere else these are skipped; with a GPU: pytest -m gpu tests/runs/test_gpu.py"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import Scenario, train_curve
from processes import run_everywhere, run_training

from acc_lm.modeling.losses import summed_loss
from acc_lm.runtime.monitoring.exposed_communication import watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


def hopper() -> bool:
    """Asked in a separate process: this one must not initialise the device, or it could not fork."""
    return bool(run_everywhere(lambda: torch.cuda.get_device_capability()[0] == 9)[0])


# --- the same curve ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "bound"),
    [(Scenario("gpt2"), 1e-4), (Scenario("llama", accumulation=2), 1e-4), (Scenario("llama", mixed_precision="bf16"), 2e-2)],
    ids=str,
)  # fmt: skip
def test_one_gpu_gives_the_curve_of_the_cpu(scenario: Scenario, bound: float) -> None:
    here = run_everywhere(lambda: train_curve(replace(scenario, mixed_precision="no")), environment=ON_CPU)[0]
    there = run_everywhere(lambda: train_curve(scenario))[0]
    assert there.start == here.start, "the same weights"
    off = [
        abs(there.metrics[step][key] / value - 1)
        for step, values in here.metrics.items()
        for key, value in values.items()
        if key in ("train/loss", "eval/loss")
    ]
    print(f"{scenario}: {max(off):.1e}")
    assert max(off) <= bound


def test_a_run_of_a_gpu_is_resumed_bit_for_bit(tiny: list[str], tmp_path: Path) -> None:
    """Its kernels must be deterministic for that, which the recipe can request."""
    exact = [*tiny, "training.deterministic=true", "checkpoint.every=3"]
    run_training([*exact, f"output_dir={tmp_path / 'whole'}"])
    run_training([*exact, "training.max_steps=3", "schedule.name=constant", "schedule.warmup_steps=0"])
    run_training([*exact, "schedule.name=constant", "schedule.warmup_steps=0", f"output_dir={tmp_path / 'other'}"])
    run_training([*exact, "schedule.name=constant", "schedule.warmup_steps=0"])
    whole, resumed = (last_line(tmp_path / name) for name in ("other", "run"))
    assert whole["eval/loss"] == resumed["eval/loss"]
    assert last_line(tmp_path / "whole")["eval/loss"] != whole["eval/loss"], "another schedule shows"


def last_line(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if "eval/loss" in line)


# --- nothing waits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_between_two_logs_nothing_waits_for_the_gpu(tiny: list[str], precision: str) -> None:
    """The loop of train.py from its third step to its sixth, with pinned batches: any read of the device raises."""

    def run() -> list[int]:
        import acc_lm.training
        import train

        original = acc_lm.training.train_step
        steps: list[int] = []

        def watched(*arguments: Any, **keywords: Any) -> Any:
            steps.append(keywords["step"])
            torch.cuda.set_sync_debug_mode("error" if 3 <= keywords["step"] < 6 else "default")
            return original(*arguments, **keywords)

        acc_lm.training.train_step = watched
        rare = ["training.log_every=100", "training.eval_every=100", "checkpoint.every=100"]
        assert train.main([*tiny, *rare, f"training.mixed_precision={precision}"]) == 0
        return steps

    assert run_everywhere(run)[0] == [1, 2, 3, 4, 5, 6]


def test_the_trap_for_waiting_works() -> None:
    def run() -> bool:
        value = torch.ones((), device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            value.item()
        except RuntimeError:
            return True
        return False

    assert run_everywhere(run)[0]


def test_waits_of_the_stream_that_computes_are_measured() -> None:
    """As engines do it: something is sent on a separate stream, with events around the wait for it."""

    def run() -> tuple[float, float]:
        stood: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

        def now() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        @contextmanager
        def standing() -> Iterator[None]:
            start = now()
            yield
            stood.append((start, now()))

        sending, computing = torch.cuda.Stream(), torch.cuda.current_stream()
        with watched(standing, on_gpu=True):
            with torch.cuda.stream(sending):
                start = now()
                torch.cuda._sleep(200_000_000)
                end = now()
            torch.cuda._sleep(50_000_000)  # hides a part of it
            computing.wait_stream(sending)
        torch.cuda.synchronize()
        assert len(stood) == 1
        return stood[0][0].elapsed_time(stood[0][1]), start.elapsed_time(end)

    waited, sent = run_everywhere(run)[0]
    assert 0.5 * sent < waited < 0.95 * sent


# --- attention -----------------------------------------------------------------------------------------------------


def attend(kernels: Callable[[], None], heads: int, kv: int, size: int, dtype: torch.dtype) -> Any:
    """Output and gradients of `causal_attention` on the CPU's float64 and on the GPU; and the kernels that ran there."""

    def run() -> tuple[list[float], list[str]]:
        from torch.profiler import ProfilerActivity, profile

        from acc_lm.modeling.attention import causal_attention

        torch.manual_seed(0)
        exact = [torch.randn(2, h, 512, size, dtype=torch.float64, requires_grad=True) for h in (heads, kv, kv)]
        weight = torch.randn(2, 512, heads, size, dtype=torch.float64)
        module = torch.nn.Module()
        expected = causal_attention(module, *exact, None)[0]  # type: ignore[arg-type]
        wanted = [expected, *torch.autograd.grad((expected * weight).sum(), exact)]
        kernels()
        given = [tensor.detach().to("cuda", dtype).requires_grad_() for tensor in exact]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            output = causal_attention(module, *given, None)[0]  # type: ignore[arg-type]
            got = [output, *torch.autograd.grad((output * weight.to("cuda", dtype)).sum(), given)]
            torch.cuda.synchronize()
        off = [float((g.cpu().double() - w).norm() / w.norm()) for g, w in zip(got, wanted, strict=True)]
        return off, sorted({event.key for event in seen.key_averages() if "attention" in event.key})

    return run_everywhere(run)[0]


def prefer(cudnn: bool) -> None:
    from acc_lm.modeling.attention import prefer_kernels

    prefer_kernels(torch.cuda.get_device_capability(), cudnn)


@pytest.mark.parametrize(("heads", "kv", "size"), [(12, 12, 64), (8, 2, 64), (8, 8, 128), (4, 4, 40)])
def test_cudnns_attention_is_as_close_to_exact_as_the_other(heads: int, kv: int, size: int) -> None:
    if not hopper():
        pytest.skip("needs a Hopper GPU")
    first, names = attend(lambda: prefer(True), heads, kv, size, torch.bfloat16)
    other, others = attend(lambda: prefer(False), heads, kv, size, torch.bfloat16)
    print(f"heads {heads}/{kv} of {size}: {max(first):.1e} by {names}, {max(other):.1e} by {others}")
    assert any("cudnn" in name for name in names)
    assert not any("cudnn" in name for name in others)
    for mine, its in zip(first, other, strict=True):
        assert mine <= max(1.5 * its, 4e-3)


def test_another_kernel_computes_what_cudnn_cannot() -> None:
    off, names = attend(lambda: prefer(True), 4, 2, 64, torch.float32)
    assert max(off) <= 1e-4
    assert not any("cudnn" in name for name in names)


def test_a_compiled_model_uses_cudnns_attention_too() -> None:
    if not hopper():
        pytest.skip("needs a Hopper GPU")

    def run() -> tuple[list[str], float]:
        from torch.profiler import ProfilerActivity, profile

        from acc_lm.config import ModelConfig, TokenizerConfig
        from acc_lm.modeling.build import build_model
        from acc_lm.text.tokenizer import make_tokenizer

        prefer(True)
        config = ModelConfig(config={"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
                                     "num_attention_heads": 4, "num_key_value_heads": 2})  # fmt: skip
        model = build_model(config, make_tokenizer(TokenizerConfig(kind="byte"), []), 256, 0)[0].cuda()
        ids = torch.randint(0, 257, (4, 256), device="cuda")
        compiled = torch.compile(model)
        with torch.autocast("cuda", torch.bfloat16):
            usual = model(input_ids=ids, targets=ids)
            compiled(input_ids=ids, targets=ids).backward()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                loss = compiled(input_ids=ids, targets=ids)
                loss.backward()
                torch.cuda.synchronize()
        return sorted({event.key for event in seen.key_averages()}), float(loss / usual - 1)

    names, off = run_everywhere(run)[0]
    assert any("cudnn" in name and "attention" in name for name in names)
    assert abs(off) <= 2e-3


# --- loss and compilation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_the_loss_of_a_gpu_is_the_exact_one(dtype: torch.dtype, bound: float, is_compiled: bool) -> None:
    """With GPT-2's 50257 ids, which are computed as 50304, in two chunks; compared with plain logits in float64."""

    def run() -> list[float]:
        torch.manual_seed(0)
        hidden, weight = (torch.randn(size, 16, device="cuda") for size in (6000, 50257))
        targets = torch.randint(0, 50257, (6000,), device="cuda")
        targets[::7] = -100
        leaves = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
        loss = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].t(), targets, reduction="sum")
        exact = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        leaves = [tensor.requires_grad_() for tensor in (hidden, weight)]
        loss_of = torch.compile(summed_loss) if is_compiled else summed_loss
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = loss_of(leaves[0], leaves[1], None, targets)
        got = [loss.detach(), *torch.autograd.grad(loss, leaves)]
        return [float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True)]

    off = run_everywhere(run)[0]
    print(f"{dtype}: {off}")
    assert max(off) <= bound


@pytest.mark.parametrize("regions", ["false", "true"], ids=["whole", "regions"])
@pytest.mark.parametrize(("precision", "bound"), [("no", 1e-4), ("bf16", 1e-2)])
def test_compiled_by_inductor_it_learns_the_same(precision: str, bound: float, regions: str) -> None:
    scenario = Scenario("llama", mixed_precision=precision, steps=6)
    compiled = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": regions}
    usual = run_everywhere(lambda: train_curve(scenario))[0]
    found = run_everywhere(lambda: train_curve(scenario), 1, 500, compiled)[0]
    assert found.start == usual.start
    for step, values in usual.metrics.items():
        assert abs(found.metrics[step]["train/loss"] / values["train/loss"] - 1) <= bound


# --- 8 and 4 bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_stays_close_to_bf16(recipe: str) -> None:
    pytest.importorskip("torchao")
    if not run_everywhere(lambda: torch.cuda.get_device_capability() >= (8, 9))[0]:
        pytest.skip("needs a GPU with fp8")
    scenario = Scenario("llama", mixed_precision="fp8", overrides=(f"training.fp8_recipe={recipe}",))
    usual = run_everywhere(lambda: train_curve(replace(scenario, mixed_precision="bf16", overrides=())))[0]
    found = run_everywhere(lambda: train_curve(scenario), 1, 300)[0]
    assert "fp8 products" in found.precision
    for step, values in usual.metrics.items():
        assert abs(found.metrics[step]["train/loss"] / values["train/loss"] - 1) <= 5e-2


def test_a_base_of_4_bits_trains_an_adapter_on_a_gpu(hub: Path, text_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = hub / "HuggingFaceTB/SmolLM2-135M"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({
        "output_dir": str(tmp_path / "run"), "model": {"name_or_path": str(model)},
        "data": {"source": "files", "files": [str(text_file)], "sequence_length": 32},
        "training": {"max_steps": 8, "global_batch_size": 8, "micro_batch_size": 8, "mixed_precision": "bf16", "log_every": 1, "eval_every": 8},
        "adapter": {"kind": "lora", "rank": 4, "quantize_base": "nf4"}, "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup_steps": 0}, "tracking": {"report_to": []},
    }))  # fmt: skip
    run_training(["--config", str(recipe)])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0]
