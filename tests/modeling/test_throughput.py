"""Reported speed of a run: the arithmetic against torch's own counter and published shapes, the parts of a step, the profile."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import STRATEGY
from processes import ROOT, Finished, Launch, launcher_environment
from test_stop import wrap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from acc_lm.config import AdapterConfig, ModelConfig, TokenizerConfig
from acc_lm.config.loading import load_config
from acc_lm.errors import ConfigError
from acc_lm.modeling.adapter import add_adapter
from acc_lm.modeling.attention import CAUSAL_WITHOUT_MASK, register_attention
from acc_lm.modeling.build import build_model, flops_of_model
from acc_lm.modeling.flops import Flops, flops_of, peak_of
from acc_lm.reporting.trace import STEP, STEP_PARTS, joined, look_at, operators, split, without
from acc_lm.run_files.metrics_file import read
from acc_lm.runtime.monitoring.exposed_communication import watched
from acc_lm.text.tokenizer import make_tokenizer
from benchmarks import gpu

LENGTH = 64
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip


def build(config: dict[str, Any], **more: Any) -> Any:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    return build_model(ModelConfig(config=config, **more), tokenizer, LENGTH, 0)


def flops_by_torch(model: Any) -> float:
    """FLOPs of a token, forward and backward, as torch counts the products that it really makes."""
    ids = torch.randint(0, 257, (2, LENGTH))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # products that it can see
        model(
            input_ids=ids, use_cache=False
        ).logits.sum().backward()  # the fused head adds into a tensor, which it does not see
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("config", [
    GPT2, LLAMA, LLAMA | {"tie_word_embeddings": True}, LLAMA | {"head_dim": 16}, {**LLAMA, "model_type": "qwen3", "head_dim": 16},
], ids=["gpt2", "llama with shared heads", "tied", "wide heads", "qwen3"])  # fmt: skip
def test_a_token_costs_what_torch_counts(config: dict[str, Any]) -> None:
    model, facts = build(config)
    assert facts.flops.unknown == ""
    # Rotary positions are a product of torch's too, of one FLOP for each place of a head.
    assert facts.flops.of_token(LENGTH) == pytest.approx(flops_by_torch(model), rel=1e-3)
    assert model.training
    assert facts.attention == CAUSAL_WITHOUT_MASK


def test_frozen_weights_cost_less() -> None:
    whole, facts = build(LLAMA)
    add_adapter(whole, AdapterConfig(kind="lora", rank=2), 0, "base")
    flops = flops_of_model(whole, facts.attention)
    assert flops.of_token(LENGTH) == pytest.approx(flops_by_torch(whole), rel=1e-3)
    assert flops.weights < 0.85 * facts.flops.weights, "4 instead of 6, and the small matrices"
    frozen, facts = build(GPT2, freeze=("transformer.wte.*", "transformer.wpe.*", "transformer.h.0.*"))
    assert facts.flops.of_token(LENGTH) == pytest.approx(flops_by_torch(frozen), rel=1e-3)
    recomputing, again = build(GPT2, gradient_checkpointing=True)
    assert again.flops == build(GPT2)[1].flops, "what is computed twice is not the model's"
    assert flops_by_torch(recomputing) > again.flops.of_token(LENGTH)


PUBLISHED = {
    "GPT-2 124M": ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50304}, 1024, 0.855),
    "GPT-2 XL": ({"model_type": "gpt2", "n_layer": 48, "n_head": 25, "n_embd": 1600, "vocab_size": 50304}, 1024, 10.27),
    "TinyLlama 1.1B": ({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}, 2048, 7.31),
    "Llama-3.2-1B": ({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 2048, 8.22),
    "Llama-3.2-1B at 8192": ({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                              "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 8192, 10.64),
    "Llama-3.1-8B": ({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 8192, 57.9),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_token_of_a_known_model_costs_what_is_published(name: str) -> None:
    """GFLOP in nanoGPT's convention; with the last, torchtitan's 5,762 and 6,667 tokens/s are its 33 and 39 % of an H100."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape, length, expected = PUBLISHED[name]
    register_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    flops = flops_of_model(model, CAUSAL_WITHOUT_MASK)
    assert flops.unknown == ""
    assert flops.of_token(length) / 1e9 == pytest.approx(expected, rel=2e-3)
    layers, width = (shape.get(a) or shape[b] for a, b in (("n_layer", "num_hidden_layers"), ("n_embd", "hidden_size")))
    assert flops.of_token(length) - flops.of_token(length, causal=True) == 6 * layers * width * length
    benchmarked = gpu.Shape(shape, length, 1, shape["vocab_size"])
    assert (benchmarked.flops(False), benchmarked.flops(True)) == (flops.of_token(length), flops.of_token(length, True))
    if name == "Llama-3.1-8B":
        peak = peak_of("NVIDIA H100 80GB HBM3", "bfloat16")
        assert peak is not None
        assert [round(speed * flops.of_token(length) / peak.flops, 3) for speed in (5762, 6667)] == [0.337, 0.39]


def test_unknown_quantities_have_no_figure() -> None:
    _, window = build({**LLAMA, "model_type": "mistral", "sliding_window": 16})
    assert "sliding_window" in window.flops.unknown
    experts = build({**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                     "head_dim": 8})[1]  # fmt: skip
    assert "experts" in experts.flops.unknown
    recurrent = build({"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4})[1]
    assert recurrent.flops.unknown


def test_a_peak_is_of_the_device_and_of_the_type_it_computes_in() -> None:
    names = {
        ("NVIDIA H200", "bfloat16"): (989e12, "NVIDIA H200, 989 TFLOP/s dense bf16"),
        ("NVIDIA H100 PCIe", "float16"): (756e12, "NVIDIA H100 PCIe, 756 TFLOP/s dense fp16"),
        ("NVIDIA A100-SXM4-80GB", "tf32"): (156e12, "NVIDIA A100-SXM4-80GB, 156 TFLOP/s dense tf32"),
        ("NVIDIA H100 80GB HBM3", "fp8"): (989e12, "NVIDIA H100 80GB HBM3, 989 TFLOP/s dense bf16"),
        ("NVIDIA GB200", "bfloat16"): (2500e12, "NVIDIA GB200, 2500 TFLOP/s dense bf16"),
        ("NVIDIA L4", "bfloat16"): (121e12, "NVIDIA L4, 121 TFLOP/s dense bf16"),
        ("NVIDIA L40S", "bfloat16"): (362e12, "NVIDIA L40S, 362 TFLOP/s dense bf16"),
        ("Tesla V100-SXM2-32GB", "float16"): (125e12, "Tesla V100-SXM2-32GB, 125 TFLOP/s dense fp16"),
    }
    for other in (
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
    ):
        assert peak_of(other, "bfloat16") is None, "a part of the chip of that name, or another"
    for (device, compute), (flops, name) in names.items():
        peak = peak_of(device, compute)
        assert peak is not None
        assert (peak.flops, peak.name) == (flops, name)
    assert peak_of("NVIDIA H200", "float64") is None, "none is better than that of another type"
    assert peak_of("cpu (x86_64)", "float32") is None
    given = peak_of("cpu (x86_64)", "float32", 0.1)
    assert given is not None
    assert (given.flops, given.name) == (1e11, "cpu (x86_64), 0.1 TFLOP/s from the recipe")
    assert flops_of(10, 4) == Flops(60, 48)


# --- runs ----------------------------------------------------------------------------------------------------------

SPLIT = ("seconds_data", "seconds_compute", "seconds_communication", "seconds_waiting")
PROFILED = [
    "training.max_steps=8",
    "profile.steps=[4, 6]",
    "training.eval_every=5",
    "training.log_every=1",
    "tracking.peak_tflops=0.1",
]


def train(arguments: list[str], config: str = "single", sabotage: Callable[[int], None] | None = None) -> Finished:
    """Run `train.py`, on two processes where the engine has several; `sabotage` gets the number of its process."""

    def run() -> int:
        import train

        if sabotage:
            sabotage(int(os.environ.get("RANK", "0")))
        sys.argv = ["train.py", *arguments]
        return train.main(arguments)

    count = 1 if config == "single" else 2
    environment = {} if count == 1 else launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", count)
    finished = Launch(run, count, environment).wait(120)
    assert finished.codes == [0] * count, "\n".join(finished.outputs)
    folder = Path(next(word for word in reversed(arguments) if word.startswith("output_dir=")).partition("=")[2])
    described = json.loads((folder / "environment.json").read_text())
    assert (described["strategy"], described["num_processes"]) == (STRATEGY[config][0], count)
    return finished


def logged(run: Path) -> list[dict[str, float]]:
    return [
        {name.removeprefix("train/"): value for name, value in row.items()} for row in read(run) if "train/loss" in row
    ]


def parts_of(run: Path) -> dict[str, list[float]]:
    """Rows of the first table of the summary: mean, then the processes, in milliseconds."""
    table = (run / "profile/summary.txt").read_text().split("\n\n")[1].splitlines()[1:]
    return {row[:22].strip(): [float(n) for n in row[22:].split() if "%" not in n] for row in table}


@pytest.mark.parametrize(
    "config", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("single", "fsdp2", "deepspeed_zero2"))]
)
def test_a_profile_is_written_and_changes_nothing(config: str, tiny: list[str], tmp_path: Path) -> None:
    more = ["training.micro_batch_size=3"]  # accumulation of 2 or 4, an evaluation inside, and a save
    finished = train([*tiny, *PROFILED, *more], config)
    run, count = tmp_path / "run", 1 if config == "single" else 2
    assert f"profile of steps 4 to 6: {run}/profile/summary.txt" in finished.output
    assert "USDT" not in finished.output, "torch's profiler prints what it does"
    names = [f"trace-process-{i:05d}.json.gz" for i in range(count)]
    assert sorted(file.name for file in (run / "profile").iterdir()) == ["summary.txt", *names]
    with gzip.open(run / "profile" / names[-1], "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [event["name"] for event in events if event.get("name", "").startswith(STEP)]
    assert spans == [f"{STEP}{step}" for step in (4, 5, 6)]
    assert not [event for event in events if event.get("name") == "aten::argmax"], "the evaluation is not in it"
    parts = parts_of(run)
    for i in range(count + 1):
        assert sum(parts[name][i] for name in ("data", "compute", "communication", "waiting for others", "host, none of these")) == pytest.approx(
            parts["step"][i], abs=0.05)  # fmt: skip
    assert parts["compute"][0] > 0
    assert parts["data"][0] > 0
    assert (parts["communication"][0] > 0) == (config != "single")
    text = (run / "profile/summary.txt").read_text()
    phases = json.loads((run / "summary.json").read_text())["peak_memory_gb_by_phase"]
    assert len(phases) == count
    assert list(phases[0]) == ["model built", "model prepared", "before first step", "first forward", "first backward", "first update",
                               "later steps", "saving", "evaluation"]  # fmt: skip
    assert all(f"\n{phase} " in text for phase in phases[0] if phase != "saving")
    if config in ("single", "ddp"):
        plain = tmp_path / "plain"
        train([*tiny, *PROFILED, *more, "profile.steps=null", f"output_dir={plain}"], config)
        assert not (plain / "profile").exists()
        exact = ("step", "loss", "grad_norm")
        assert [[row[k] for k in exact] for row in logged(run)] == [[row[k] for k in exact] for row in logged(plain)]


def slow_loader(rank: int) -> None:
    """Process 1 waits a tenth of a second for each batch."""
    from acc_lm.rows.text_rows import Rows

    original = Rows.__getitems__

    def late(self: Rows, rows: Any) -> Any:
        time.sleep(0.1 if rank == 1 else 0.0)
        return original(self, rows)

    Rows.__getitems__ = late  # type: ignore[method-assign]


def slow_host(rank: int, seconds: float = 0.2) -> None:
    """Process 1 does something else for a moment before each step."""
    import acc_lm.training

    original = acc_lm.training.train_step

    def late(*positional: Any, **keywords: Any) -> Any:
        time.sleep(seconds if rank == 1 else 0.0)
        return original(*positional, **keywords)

    acc_lm.training.train_step = late


# Its positions are only in the outermost unit, which FSDP2 gathers before any hook of ours that is not in front.
MODEL_WITH_WEIGHTS_AT_ITS_ROOT = "model.config={model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 32, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0}"
SEVERAL = ["ddp", "fsdp2", "deepspeed_zero2", pytest.param("deepspeed_zero3", marks=pytest.mark.slow),
           pytest.param("deepspeed_zero1", marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("config", SEVERAL)
@pytest.mark.parametrize("what", [slow_loader, pytest.param(slow_host, marks=pytest.mark.slow)])
def test_slowness_shows_in_the_part_that_causes_it(
    what: Callable[[int], None], config: str, tiny: list[str], tmp_path: Path
) -> None:
    """Two batches a step: 0.2 s on process 1, for which process 0 waits; the means are half of that."""
    train([*tiny, "training.micro_batch_size=3", "training.max_steps=5", "profile.steps=[3, 4]", "training.log_every=1",
           "training.eval_every=null", "data.eval_fraction=0.02", MODEL_WITH_WEIGHTS_AT_ITS_ROOT], config, what)  # fmt: skip
    rows = logged(tmp_path / "run")
    assert len(rows) == 5
    for row in rows:
        assert sum(row[name] for name in SPLIT) == pytest.approx(row["seconds_per_step"])
        assert row["seconds_per_step"] >= 0.2
    data, waiting = (statistics.median(row[name] for row in rows[1:]) for name in ("seconds_data", "seconds_waiting"))
    assert waiting > 0.04, rows
    assert all(row[name] > 0 for row in rows for name in SPLIT), rows
    assert (data >= 0.1) == (what is slow_loader), rows
    parts = parts_of(tmp_path / "run")
    assert (parts["data"][2] >= 200) == (what is slow_loader), parts
    assert (parts["host, none of these"][2] >= 200) == (what is slow_host), parts
    # On a busy machine process 0 may be late too: by less than that, and it is never process 1 that waits longer.
    assert parts["waiting for others"][1] > max(60, parts["waiting for others"][2]), parts
    # The same two steps by the profiler's clock: a process's idle time does not depend on how it is observed.
    stood = statistics.fmean(row["seconds_communication"] + row["seconds_waiting"] for row in rows[2:4])
    assert 1e3 * stood == pytest.approx(parts["communication"][0] + parts["waiting for others"][0], rel=0.15), (
        rows,
        parts,
    )


@pytest.mark.parametrize("config", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_main_process_work_between_steps_is_not_counted_as_waiting(
    config: str, tiny: list[str], tmp_path: Path
) -> None:
    """The main process needs three seconds before the first step and after each evaluation, and half a second in each step.

    DDP copies its buffers first, so that is where the other process waits. The mean of both is a quarter of a second; on a
    busy machine it is less, because the other process is late too. Three seconds among two steps would add 0.75.
    """

    def slow_main(rank: int) -> None:
        slow_host(1 - rank, seconds=0.5)
        if rank == 0:
            for place in ("acc_lm.training.reporter.start_block", "acc_lm.run_files.curves.draw_curves"):
                wrap(place, lambda: time.sleep(3.0))

    train([*tiny, "training.max_steps=6", "training.log_every=2", "training.eval_every=3", "checkpoint.every=100",
           "checkpoint.keep_best=0"], config, slow_main)  # fmt: skip
    rows = logged(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 4, 6]
    for row in rows:
        assert 0.08 < row["seconds_waiting"] < 0.7, rows
        assert row["seconds_per_step"] < 1.5, rows


def test_a_background_save_during_the_steps_delays_no_process(tiny: list[str], tmp_path: Path) -> None:
    """Process 1 has a thread that waits a second for process 0 to write, while both compute and log."""

    def slow_save(rank: int) -> None:
        for step in range(1, 5):
            wrap("acc_lm.training.train_step", lambda: time.sleep(0.6), step)
        wrap("acc_lm.checkpointing.writing.write_checkpoint", lambda: time.sleep(0.1 if rank else 1.1))

    train([*tiny, "training.max_steps=4", "training.log_every=4", "training.eval_every=null", "data.eval_fraction=0.02",
           "checkpoint.asynchronous=true"], "ddp", slow_save)  # fmt: skip
    _, last = logged(tmp_path / "run")
    assert last["seconds_per_step"] > 0.6
    assert last["seconds_waiting"] < 0.08, "a second of one of two processes in three steps"


def test_a_gpu_is_idle_when_the_stream_that_computes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated streams: those on which engines send may wait for each other for any time."""
    waits: list[str] = []
    stood: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: str) -> None:
            waits.append(f"{self.name} for {event}")

        def wait_stream(self, other: Stream) -> None:
            self.wait_event(f"the end of {other.name}")

    class Work:
        def wait(self) -> str:
            waits.append(f"{current.name} for work")
            return "done"

    @contextlib.contextmanager
    def standing() -> Iterator[None]:
        before = len(waits)
        yield
        stood.extend(waits[before:])

    current = computing = Stream("computing")
    sending = Stream("sending")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.distributed, "Work", Work)
    with watched(standing, on_gpu=True):
        computing.wait_stream(sending)
        computing.wait_event("a gather")
        sending.wait_stream(computing)
        assert Work().wait() == "done"
        current = sending
        Work().wait()
        computing.wait_event("what is asked elsewhere")
    assert stood == ["computing for the end of sending", "computing for a gather", "computing for work"]
    assert len(waits) == 6
    computing.wait_event("later")
    assert len(stood) == 3


@pytest.mark.parametrize("config", ["single", "ddp"])
def test_mfu_is_of_all_processes(config: str, tiny: list[str], tmp_path: Path) -> None:
    arguments = ["training.micro_batch_size=3", "training.log_every=1"]
    finished = train([*tiny, *arguments, "tracking.peak_tflops=0.25"], config)
    _, facts = build({"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                      "num_attention_heads": 2, "num_key_value_heads": 1})  # fmt: skip
    whole, causal = (facts.flops.of_token(32, half) for half in (False, True))
    count = 1 if config == "single" else 2
    assert re.search(rf"^speed +{whole / 1e3:.3g} kFLOP a token, {causal / 1e3:.3g} with causal attention; "
                     rf"MFU is of {count} x cpu \(\S+\), 0.25 TFLOP/s from the recipe$", finished.output, re.M)  # fmt: skip
    rows = logged(tmp_path / "run")
    for row in rows:
        expected = row["tokens_per_second"] * whole / (count * 0.25e12)
        assert row["mfu"] == pytest.approx(expected, rel=0.1), "a row may be short, and is computed in full"
        assert row["mfu_causal"] / row["mfu"] == pytest.approx(causal / whole)
    assert any(
        row["mfu"] == pytest.approx(row["tokens_per_second"] * whole / (count * 0.25e12), rel=1e-6) for row in rows
    )
    if config == "single":
        assert {row[name] for row in rows for name in ("seconds_communication", "seconds_waiting")} == {0.0}
        finished = train([*tiny, f"output_dir={tmp_path}/unknown"])
        assert "no MFU: no peak of cpu (" in finished.output
        assert not any("mfu" in name for row in logged(tmp_path / "unknown") for name in row)


def test_a_resumed_run_profiles_the_steps_that_are_left(tiny: list[str], tmp_path: Path) -> None:
    def stop(rank: int) -> None:
        wrap("acc_lm.training.train_step", lambda: os.kill(os.getpid(), signal.SIGTERM), 4)

    arguments = [*tiny, "profile.steps=[3, 6]"]

    def run() -> int:
        import train

        stop(0)
        return train.main(arguments)

    stopped = Launch(run).wait(60)
    assert stopped.codes == [75], stopped.output
    file = tmp_path / "run/profile/summary.txt"
    assert re.match(r"Steps 3 to [45],", file.read_text())
    last = int(file.read_text()[11])
    train([*arguments, "training.max_steps=8"])
    assert file.read_text().startswith(f"Steps {last + 1} to 6,")
    shutil.rmtree(file.parent)
    finished = train([*arguments, "training.max_steps=10"])
    assert "resumed from" in finished.output
    assert not file.parent.exists(), "the range is past"


@pytest.mark.parametrize(("steps", "message"), [
    ("[5, 3]", "profile.steps must be the first and the last of 1 to 20 steps, got [5, 3]; for instance [5, 8]"),
    ("[1, 21]", "profile.steps must be the first and the last of 1 to 20 steps, got [1, 21]"),
    ("[0, 3]", "profile.steps"), ("[3]", "profile.steps"), ("ten", "profile.steps"),
    ("[4, 7]", "profile.steps must be within training.max_steps 6, got [4, 7]"),
])  # fmt: skip
def test_invalid_steps_to_profile_are_refused(steps: str, message: str, tiny: list[str]) -> None:
    config = [word for word in tiny if word != "--config"]
    with pytest.raises(ConfigError) as error:
        load_config(Path(config[0]), [*config[1:], f"profile.steps={steps}"])
    assert message in str(error.value)


def test_steps_to_profile_beyond_the_last_epoch_are_refused(tiny: list[str]) -> None:
    arguments = [
        *tiny,
        "training.max_steps=null",
        "training.num_epochs=0.5",
        "schedule.warmup_steps=0",
        "profile.steps=[18, 19]",
    ]

    def run() -> int:
        import train

        return train.main(arguments)

    finished = Launch(run).wait(60)
    assert finished.codes == [2]
    assert re.search(
        r"^error: profile.steps must be within the \d+ steps of the run, got \[18, 19\]", finished.output, re.M
    )


# --- traces --------------------------------------------------------------------------------------------------------


def event(name: str, start: float, duration: float, cat: str, correlation: int | None = None) -> dict[str, Any]:
    """Times in milliseconds."""
    more = {} if correlation is None else {"args": {"correlation": correlation}}
    return {"ph": "X", "name": name, "ts": 1e3 * start, "dur": 1e3 * duration, "cat": cat, "tid": 1, **more}


def on_a_gpu(late: float) -> list[dict[str, Any]]:
    """Two steps of 10 ms that the host launches ahead; in the second the loader is late while the device has nothing to do."""
    return [
        event(f"{STEP}1", 0, 4, "user_annotation"), event(f"{STEP}2", 5, 9, "user_annotation"),
        event("data", 0.2, 0.2, "user_annotation"), event("data", 5, 6, "user_annotation"),
        event("cudaLaunchKernel", 1, 0.1, "cuda_runtime", 1), event("gemm", 1, 5, "kernel", 1),
        event("cudaLaunchKernel", 2, 0.1, "cuda_runtime", 2), event("ncclDevKernel_AllReduce", 4, 4 + late, "kernel", 2),
        event("cudaLaunchKernel", 3, 0.1, "cuda_runtime", 3), event("adamw", 8 + late, 2, "kernel", 3),
        event("cudaLaunchKernel", 11, 0.1, "cuda_runtime", 4), event("gemm", 12 + late, 5, "kernel", 4),
        event("ncclDevKernel_AllReduce", 13 + late, 5, "kernel", 5), event("cudaLaunchKernel", 12.5, 0.1, "cuda_runtime", 5),
    ]  # fmt: skip


def test_the_parts_of_a_step_on_a_gpu_are_those_of_the_device() -> None:
    fast, slow = look_at(on_a_gpu(0)), look_at(on_a_gpu(1))
    first, second = fast
    assert [round(1e3 * first[name], 3) for name in ("seconds", "data", "compute", "host")] == [10, 0.2, 7, 0.8]
    assert first["exposed"] == [pytest.approx(2e-3)], "4 to 6 is hidden by the product"
    # From the end of the first on: 10 to 11 the loader, then the host; the device is done at 18.
    assert [round(1e3 * second[name], 3) for name in ("seconds", "data", "compute", "host")] == [8, 1, 5, 1]
    assert second["exposed"] == [pytest.approx(1e-3)]
    parts = split([fast, slow])
    for of in parts:
        assert sum(of[name] for name in STEP_PARTS) == pytest.approx(of["step"])
    assert [round(1e3 * of["communication"], 3) for of in parts] == [1.5, 1.5]
    assert [round(1e3 * of["waiting"], 3) for of in parts] == [0, 0.5]
    assert [round(1e3 * of["hidden"], 3) for of in parts] == [3, 3]
    assert [(name, calls) for name, calls, _ in operators(on_a_gpu(0))] == [
        ("gemm", 2),
        ("ncclDevKernel_AllReduce", 2),
        ("adamw", 1),
    ]


def test_a_wait_for_two_overlapping_collectives_counts_once() -> None:
    span, product = event(f"{STEP}1", 0, 10, "user_annotation"), event("aten::mm", 0, 2, "cpu_op")
    (step,) = look_at(
        [
            span,
            product,
            event("gloo:all_reduce", 1, 5, "user_annotation"),
            event("gloo:all_gather", 3, 5, "user_annotation"),
        ]
    )
    assert step["exposed"] == [pytest.approx(4e-3), pytest.approx(2e-3)]
    assert [round(1e3 * step[name], 3) for name in ("compute", "communicated", "host")] == [2, 7, 2]


def test_operators_are_charged_only_their_own_time() -> None:
    events = [event(f"{STEP}1", 0, 10, "user_annotation"), event("aten::linear", 1, 4, "cpu_op"), event("aten::mm", 2, 2.5, "cpu_op"),
              event("autograd::engine::evaluate_function: X", 6, 3, "cpu_op"), event("aten::mm", 6.5, 1, "cpu_op"),
              event("aten::argmax", 11, 5, "cpu_op")]  # fmt: skip
    assert [(name, calls, round(1e3 * seconds, 3)) for name, calls, seconds in operators(events)] == [
        ("aten::mm", 2, 3.5), ("aten::linear", 1, 1.5),
    ]  # fmt: skip


def test_intervals() -> None:
    assert joined([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]
    assert without([(0, 10)], [(1, 2), (3, 4), (9, 12)]) == [(0, 1), (2, 3), (4, 9)]
    assert without([(0, 1), (5, 6)], [(0, 6)]) == []
    assert without([(0, 1)], []) == [(0, 1)]


def test_step_marks_are_not_part_of_the_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an event would be made once, during compilation: here a tensor stands for it, which must not be in the graph."""
    from types import SimpleNamespace

    from acc_lm.runtime import Pace

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

        def forward(self, values: Any) -> Any:
            return self.module(values)

    graphs: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.code))
        return graph.forward

    monkeypatch.setattr(Pace, "_now", lambda self: torch.rand(()))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch._dynamo.reset()
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=2)
    model: Any = torch.compile(Wrapped(), backend=keep)
    pace = Pace(accelerator, model)
    for _ in range(2):
        pace.start_step()
        model(torch.ones(1, 2)).sum().backward()
    first, second = pace._steps
    assert (
        len({float(getattr(step, name)) for step in (first, second) for name in ("called", "forward", "forward_end")})
        == 6
    )
    assert graphs
    assert not [code for code in graphs if "rand" in code]
