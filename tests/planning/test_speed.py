"""Planner: GPUs from the command line, predicted steps, bytes sent, and errors on published runs."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
from processes import ROOT

from acc_lm.errors import ConfigError
from acc_lm.planning.closed_form import peak_memory
from acc_lm.planning.constants import FITTED
from acc_lm.planning.hardware import GPUS, parse_gpus
from acc_lm.planning.shapes import RECOMPUTED, Layout, Shape, Work
from acc_lm.planning.speed import StepTime, step_time
from benchmarks import planning

LLAMA_1B = Shape(16, 2048, 8192, True, 32, 8, 64, 128256, True, other_parameters=67584)
H100 = GPUS["H100"]
WORK = Work(2048, 8, accumulation=4, compiled=True)


def sharded(count: int, **changes: object) -> Layout:
    full = Layout(
        count, count, count, regathers=True, keeps_head=True, reduces_each_micro_batch=True, scatters_gradients=True
    )
    return replace(full, **changes)  # type: ignore[arg-type]


LAYOUTS = {
    "one": lambda n: Layout(casts_weights=True),
    "ddp": lambda n: Layout(replicas=n, casts_weights=True),
    "zero1": lambda n: Layout(moment_shards=n, overlap=0.0),
    "zero2": lambda n: Layout(gradient_shards=n, moment_shards=n, reduces_each_micro_batch=True, overlap=0.0),
    "zero3": lambda n: sharded(n, overlap=0.5, keeps=5e8, keeps_head=False),
    "fsdp2": lambda n: sharded(n),
    "fsdp2_grad_op": lambda n: sharded(n, regathers=False),
    "hsdp": lambda n: sharded(n // 2, replicas=2),
}


def predict(layout: Layout, work: Work = WORK, shape: Shape = LLAMA_1B, **changes: float) -> StepTime:
    return step_time(shape, H100, layout, work, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [("8xH100", 8, "H100"), ("H100", 1, "H100"), ("64xA100-40", 64, "A100-40"), ("2 x rtx 4090", 2, "RTX 4090"), ("RTX 3090", 1, "RTX 3090"), ("8xA100", 8, "A100-80")],
)  # fmt: skip
def test_gpus_are_a_number_and_a_kind(text: str, count: int, name: str) -> None:
    assert parse_gpus(text) == (count, GPUS[name])


@pytest.mark.parametrize(
    ("text", "hint"),
    [("8xH10", "nearest: 8xH100"), ("8xL40", "nearest: 8xL40S"), ("0xH100", "for example 8xH100"), ("xV100", "for example 8xV100"), ("-2xT4", "for example 8xT4"), ("many x H100", "for example 8xH100"), ("", "nearest: H100")],
)  # fmt: skip
def test_other_gpus_are_refused_in_one_line_with_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gpus(text)
    (line,) = caught.value.problems
    assert line.startswith("--gpus must ")
    assert f"got {text!r}" in line or f"got {text.split('x')[-1]!r}" in line
    assert line.endswith(hint)
    assert "\n" not in line


def test_facts_about_gpus_are_plausible_and_precision_follows_the_capability() -> None:
    for gpu in GPUS.values():
        assert gpu.peak() > 2e13
        assert gpu.ring_bandwidth < gpu.memory_bandwidth
        assert gpu.precision == ("fp16" if gpu.name in ("V100", "T4") else "bf16")
    assert GPUS["H100"].memory_gib * 2**30 < 85.9e9, "80 GB, with the driver's share taken off"
    with pytest.raises(ConfigError, match=r"must be fp16 to plan for a V100, got a computation in bfloat16"):
        GPUS["V100"].peak("bfloat16")


def test_planning_loads_no_torch() -> None:
    code = "import sys, acc_lm.planning.communication, acc_lm.planning.speed, acc_lm.planning.closed_form; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, check=True)


def test_the_flop_of_a_token_are_those_of_the_speed_report() -> None:
    """8.22 GFLOP of Llama-3.2-1B on rows of 2,048; 1.236 billion parameters."""
    assert LLAMA_1B.flops_per_token(2048) / 1e9 == pytest.approx(8.22, abs=0.01)
    assert LLAMA_1B.parameters == 1_235_814_400


@pytest.mark.parametrize("count", [2, 8])
def test_bytes_sent_are_those_of_the_table_of_strategies(count: int) -> None:
    """docs/guides/strategies.md, bf16, in units of the model in fp32: f = (N - 1) / N, A micro-batches."""
    a, f, m = 4, (count - 1) / count, 4.0 * LLAMA_1B.parameters
    half, within = count // 2, (count // 2 - 1) / (count // 2)
    expected = {
        "one": 0.0,
        "ddp": 2 * f,
        "zero1": 2.5 * f,
        "zero2": (2 * a + 0.5) * f,
        "zero3": 2 * a * f,
        "fsdp2": 2 * a * f,
        "fsdp2_grad_op": 1.5 * a * f,
        "hsdp": 2 * a * within + 2 * a / half * 0.5,
    }
    for name, of_m in expected.items():
        layout = LAYOUTS[name](count)
        if name in ("fsdp2", "zero3"):
            assert 0.7 * of_m * m < predict(layout).bytes_sent < of_m * m, "some weights stay gathered"
        step = predict(replace(layout, keeps=0.0, keeps_head=False))
        assert step.bytes_sent == pytest.approx(of_m * m), name
        assert step.network_bytes == 0, "one machine"
        assert LAYOUTS[name](count).processes == (1 if name == "one" else count)


def test_the_layout_of_each_config_is_the_one_above() -> None:
    """The layouts above, of the files in accelerate_configs/ in bf16; with offloads, and in fp32 twice the weights."""
    from acc_lm.config.loading import load_config
    from acc_lm.planning.plan import layout_of
    from acc_lm.runtime import placement_of

    def read(name: str, count: int, *overrides: str, machines: int = 1) -> Layout:
        config = load_config(ROOT / "recipes/quickstart.yaml", ["training.mixed_precision=bf16", *overrides])
        return layout_of(placement_of(ROOT / f"accelerate_configs/{name}.yaml", count, machines, config))

    files = {"one": "single_gpu", "zero1": "deepspeed_zero1", "zero2": "deepspeed_zero2", "zero3": "deepspeed_zero3"}
    for name, of in LAYOUTS.items():
        if name != "hsdp":
            assert predict(read(files.get(name, name), 1 if name == "one" else 8)) == predict(of(8)), name
    assert read("multi_node_hsdp", 16, machines=2) == sharded(8, replicas=2)
    offload = read("deepspeed_zero2_offload", 8)
    assert offload == replace(LAYOUTS["zero2"](8), offloads_moments=True)
    assert read("fsdp2_offload", 8) == sharded(8, offloads_moments=True, offloads_weights=True)
    assert read("fsdp2", 8, "training.mixed_precision=no") == sharded(8, weight_bytes=4)
    for dtype, size in ("bfloat16", 2), ("float64", 8):
        own = read("fsdp2", 8, "training.mixed_precision=no", f"model.dtype={dtype}")
        assert own == sharded(8, weight_bytes=size, gradient_bytes=size), "sent in the dtype of the weights"
    assert predict(read("deepspeed_zero1", 2, "training.mixed_precision=no")).bytes_sent == pytest.approx(
        3 * 0.5 * 4 * LLAMA_1B.parameters
    )


def test_bytes_over_the_network_leave_a_machine_once_per_ring() -> None:
    m = 4.0 * LLAMA_1B.parameters
    flat = predict(sharded(16))
    assert flat.network_bytes == pytest.approx(flat.bytes_sent)
    hybrid = predict(sharded(8, replicas=2))
    assert hybrid.network_bytes == pytest.approx(8 * 4 * 2 * m / 8 * 0.5), (
        "each of 8 GPUs, 4 times, its shard's all-reduce"
    )
    assert predict(sharded(8, replicas=32)).communication < predict(sharded(256)).communication


def test_a_step_changes_as_it_must() -> None:
    one = predict(LAYOUTS["one"](1))
    assert one.total == pytest.approx(
        one.products + one.attention + one.traffic + one.communication + one.update + one.offload
    )
    assert one.communication == 0
    assert one.update == pytest.approx(28 * LLAMA_1B.parameters / (3.35e12 * 0.7))
    for name, layout in LAYOUTS.items():
        base = predict(layout(8))
        assert 0 < base.utilization < 0.8
        faster = step_time(LLAMA_1B, replace(H100, device="NVIDIA B200"), layout(8), WORK)
        assert faster.total <= base.total, name
        full = predict(layout(8), replace(WORK, recomputed=RECOMPUTED["yes"]))
        selective = predict(layout(8), replace(WORK, recomputed=RECOMPUTED["selective"]))
        assert full.total > selective.total > base.total, name
        assert full.attention / base.attention == pytest.approx(9 / 7), "forward, backward with scores, forward again"
        assert predict(layout(8), replace(WORK, compiled=False)).total > base.total, name
        twice = predict(layout(8), replace(WORK, accumulation=8))
        assert twice.tokens == 2 * base.tokens
        assert twice.products == pytest.approx(2 * base.products)
    for name in ("ddp", "fsdp2", "fsdp2_grad_op", "zero1", "zero2", "zero3"):
        speeds = [predict(LAYOUTS[name](n)).tokens_per_second.middle for n in (8, 16, 64, 256)]
        assert speeds == sorted(speeds, reverse=True), name
        assert len(set(speeds)) == 4, name
    hybrid = [predict(sharded(8, replicas=n)).tokens_per_second.middle for n in (1, 2, 8, 32)]
    assert hybrid == sorted(hybrid, reverse=True)
    slow, fast = predict(sharded(16), network=3e9), predict(sharded(16), network=50e9)
    assert slow.communication > fast.communication
    offload = predict(sharded(8, offloads_moments=True, offloads_weights=True))
    assert offload.update == 0 < offload.offload


def test_a_measured_step_scales_and_narrows_the_range_and_the_unpublished_is_marked() -> None:
    layout = sharded(8)
    before, after = predict(layout), predict(layout, calibration=1.25)
    assert after.total == pytest.approx(1.25 * before.total)
    assert before.tokens_per_second.low == pytest.approx(0.8 * before.tokens_per_second.middle)
    assert before.tokens_per_second.high == pytest.approx(1.2 * before.tokens_per_second.middle)
    assert after.tokens_per_second.low == pytest.approx(0.9 * after.tokens_per_second.middle)
    assert before.extrapolated == ""
    assert "communication takes" in predict(sharded(256), Work(1024, 1)).extrapolated
    assert predict(sharded(1024)).extrapolated == "more than 512 GPUs"
    assert "L40S" in step_time(LLAMA_1B, GPUS["L40S"], Layout(), WORK).extrapolated


def test_the_constants_keep_their_accuracy_on_published_runs() -> None:
    rows = planning.speed_rows()
    assert len(rows) == 285
    assert len(planning.sources(rows)) == 17
    ratios = [planning.ratio(row, FITTED) for row in rows]
    assert planning.median_error(ratios) <= 0.06
    assert planning.inside(ratios, 0.2) >= 0.8
    assert planning.median_error(planning.anchored(rows, lambda row: FITTED)) <= 0.05
    right, pairs = planning.right_orders(rows, lambda row: FITTED)
    assert right >= 0.8 * pairs > 80
    scaling = planning.scale_out(rows)
    assert len(scaling) == 31
    assert math.sqrt(statistics.mean((value - 1) ** 2 for value in scaling)) <= 0.02
    assert max(abs(value - 1) for value in scaling) <= 0.04
    base = planning.one_utilization(rows)
    assert statistics.median(planning.median_error(values) for values in base.values()) > 0.12


@pytest.mark.slow
def test_a_source_that_was_left_out_of_the_fit_is_predicted() -> None:
    rows = planning.speed_rows()
    fitted = planning.fit(rows)
    assert fitted == {name: pytest.approx(value, rel=0.01) for name, value in FITTED.items()}
    without = planning.held_out(rows, fitted)
    missed = [figure.name for figure in planning.figures(rows, fitted, without) if figure.is_met is False]
    assert missed == []


def test_the_closed_form_agrees_with_published_memory_and_sees_gigabytes_for_gibibytes() -> None:
    ratios = [value for _, value, reason in planning.memory_ratios() if reason is None]
    assert len(ratios) == 31
    assert planning.median_error(ratios) <= 0.05
    assert max(abs(value - 1) for value in ratios) <= 0.20
    assert planning.median_error(value * 2**30 / 1e9 for value in ratios) > 0.05, "GB taken for GiB would be seen"


@pytest.mark.parametrize("shape", [LLAMA_1B, Shape(12, 768, 3072, False, 12, 12, 64, 50257, True)])
def test_memory_falls_with_checkpointing_and_shards_and_grows_with_tokens(shape: Shape) -> None:
    for layout in (Layout(casts_weights=True), Layout(replicas=8, casts_weights=True), sharded(8)):
        kept = [peak_memory(shape, layout, 16384, how).activations for how in ("no", "selective", "yes")]
        assert kept == sorted(kept, reverse=True)
        assert peak_memory(shape, layout, 32768, "no").total > peak_memory(shape, layout, 16384, "no").total
    states = [peak_memory(shape, layout, 1024, "yes").state for layout in (Layout(), sharded(2), sharded(8))]
    assert states == [12 * shape.parameters, 6 * shape.parameters, 1.5 * shape.parameters]
    held = peak_memory(shape, Layout(), 16384, "no", accumulates=True).at_head
    assert held - peak_memory(shape, Layout(), 16384, "no").at_head == pytest.approx(4 * shape.parameters)
