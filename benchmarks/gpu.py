"""The GPU suite: three commands of less than ten minutes each, on one GPU, without a network.

    python -m benchmarks.gpu ceilings     # speed of the hardware at the shapes of the models; gain of each of our techniques
    python -m benchmarks.gpu gpt2         # GPT-2 124M at 1024, compared with every peer; memory; the largest micro-batch
    python -m benchmarks.gpu llama        # the shape of Llama-3.2-1B at 2048 and 8192

All three write into one file of results. With --toy they run anywhere in a minute, on a CPU too; the measurements then mean nothing,
but errors in the code show before a GPU is paid for. Times are those of the device, between two of its events.
"""

from __future__ import annotations

import os

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the driver checks for a GPU and forks afterwards

import argparse
import contextlib
import importlib
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from acc_lm.modeling.flops import flops_of, peak_of
from benchmarks import contenders, report, ring
from benchmarks.contenders import ROOT, Job
from benchmarks.cpu import IMPORTED, NO_DROPOUT
from benchmarks.ring import Goal, Race, figure

REFERENCE = "bare loop"


@dataclass(frozen=True)
class Shape:
    model: dict[str, Any]
    length: int
    batch_size: int
    vocab_size: int

    @property
    def weights(self) -> int:
        """Number of weights in the matrix products that a token passes through, including the output head."""
        m = self.model
        if m["model_type"] == "gpt2":
            return int(12 * m["n_layer"] * m["n_embd"] ** 2 + self.vocab_size * m["n_embd"])
        d, kv = m["hidden_size"], m["hidden_size"] * m["num_key_value_heads"] // m["num_attention_heads"]
        return int(
            m["num_hidden_layers"] * (2 * d * d + 2 * d * kv + 3 * d * m["intermediate_size"]) + self.vocab_size * d
        )

    def flops(self, causal: bool) -> float:
        """FLOP of a token, forward and backward; nanoGPT's convention also counts what causal attention leaves out."""
        m = self.model
        width, layers = (m["n_embd"], m["n_layer"]) if "n_embd" in m else (m["hidden_size"], m["num_hidden_layers"])
        return flops_of(self.weights, layers * width).of_token(self.length, causal)


def gpt2(layers: int, heads: int, width: int, length: int, batch_size: int, vocab_size: int) -> Shape:
    model = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": width,
        "n_positions": length,
        "activation_function": "gelu_pytorch_tanh",
        "summary_first_dropout": 0.0,
        **NO_DROPOUT,
    }
    return Shape(model, length, batch_size, vocab_size)


def llama(
    layers: int, heads: int, kv: int, width: int, inner: int, length: int, batch_size: int, vocab_size: int
) -> Shape:
    model = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": length,
        "tie_word_embeddings": True,
    }
    return Shape(model, length, batch_size, vocab_size)


@dataclass(frozen=True)
class Sizes:
    gpt2: Shape = field(default_factory=lambda: gpt2(12, 12, 768, 1024, 32, 50304))
    llamas: tuple[Shape, ...] = field(
        default_factory=lambda: (
            llama(16, 32, 8, 2048, 8192, 2048, 8, 128256),
            llama(16, 32, 8, 2048, 8192, 8192, 2, 128256),
        )
    )
    steps: int = 20
    llama_steps: int = 4
    rounds: int = 7
    llama_rounds: int = 5
    warm_up: int = 2
    square: int = 8192
    copied: int = 1 << 30
    attention: tuple[tuple[int, int, int, int, int], ...] = (
        (32, 12, 12, 64, 1024),
        (16, 32, 8, 64, 2048),
        (4, 32, 8, 64, 8192),
    )
    """Batch, heads, key-value heads, head size, length."""
    micro_batches: tuple[int, ...] = (32, 64, 96, 128, 192, 256)
    accumulation: int = 15
    """Number of micro-batches in the large step of GPT-2."""
    odd_vocabulary: int = 50257
    """GPT-2's own vocabulary size, which is not a multiple of 64."""
    backend: str = "inductor"


TOY = Sizes(
    gpt2=gpt2(1, 2, 16, 8, 2, 65),
    llamas=(llama(1, 2, 1, 16, 32, 8, 2, 65),),
    steps=2,
    llama_steps=1,
    rounds=2,
    llama_rounds=2,
    warm_up=1,
    square=64,
    copied=1 << 16,
    attention=((1, 2, 1, 8, 16),),
    micro_batches=(1, 2),
    backend="eager",
    odd_vocabulary=65,
    accumulation=3,
)


@dataclass
class Run:
    sizes: Sizes
    folder: Path
    figures: list[dict[str, Any]] = field(default_factory=list)
    races: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    void: list[str] = field(default_factory=list)
    clock: str = "cpu"
    peak: float | None = None
    memory_gb: float | None = None
    """Memory of the GPU, in GB."""
    deadline: float = math.inf
    """Value of `time.monotonic()`; what has not begun by then is listed as not reached."""
    save: Callable[[], Any] = lambda: None
    """Writes the results so far, after every race, so that an interrupted command leaves figures."""

    def left(self) -> float:
        """Seconds left, at most the limit for a single piece of work."""
        return min(300.0, self.deadline - time.monotonic())

    @property
    def together(self) -> int:
        """Number of contenders that start at once; two do not fit on a GPU of 80 GB."""
        return 1 if self.memory_gb is not None and self.memory_gb < 120 else 2

    def job(self, name: str, shape: Shape, num_steps: int, least_rows: int = 0) -> Job:
        job = Job(
            name,
            self.folder / name,
            shape.model,
            shape.length,
            shape.batch_size,
            shape.vocab_size,
            num_steps,
            least_rows,
        )
        digest = ring.in_a_process(job.prepare, job.folder / "prepare")
        self.races[name] = {
            "tokens_xxh3": digest,
            "model": shape.model,
            "length": shape.length,
            "batch_size": shape.batch_size,
        }
        return job

    def race(
        self,
        name: str,
        job: Job,
        runs: dict[str, Callable[[], None]],
        steps: int,
        rounds: int,
        control: bool = True,
        **how: Any,
    ) -> Race:
        race = ring.race(
            runs,
            job.folder / name,
            steps=steps,
            rounds=rounds,
            tolerance=ring.TOLERANCE["bf16"],
            warm_up=self.sizes.warm_up,
            together=self.together,
            deadline=self.deadline,
            **({"reference": REFERENCE} | how),
        )
        found: dict[str, Any] = {
            "samples": race.samples,
            "checks": race.checks,
            "failed": race.failed,
            "seconds_to_checked": race.started,
        }
        if control:
            why, noise = ring.why_void(race, ring.NOISE["gpu"], self.clock)
            found["ours_over_ours"] = noise
            if why:
                self.void.append(f"{name}: {why}")
        self.races[name] = self.races.get(name, {}) | found
        self.save()
        return race

    def speeds(self, race: Race, name: str, shape: Shape) -> list[float]:
        return [shape.batch_size * shape.length / seconds for seconds in race.values(name, self.clock)]

    def add_speeds(self, id: str, what: str, race: Race, shape: Shape, goals: dict[str, Goal]) -> None:
        if "ours" not in race.samples:
            return
        ours = self.speeds(race, "ours", shape)
        for name in race.samples:
            self.figures.append(
                figure(
                    id,
                    f"{what}, tokens/s",
                    name,
                    ours=ours,
                    theirs=self.speeds(race, name, shape),
                    unit="tokens/s",
                    goal=goals.get(name),
                    higher_is_better=True,
                )
            )
        for name in race.samples:
            goal = Goal(at_most=0.5) if name == "Trainer" and id == "G1" else None
            self.figures.append(
                figure(
                    id,
                    f"{what}, peak memory",
                    name,
                    ours=[max(race.values("ours", "memory"))],
                    theirs=[max(race.values(name, "memory"))],
                    unit="MiB",
                    goal=goal,
                )
            )

    def add_mfu(self, id: str, what: str, race: Race, shape: Shape, goal: float) -> None:
        if self.peak is None or "ours" not in race.samples:
            return
        for causal in (False, True):
            shares = [speed * shape.flops(causal) / self.peak for speed in self.speeds(race, "ours", shape)]
            convention = "causal attention counted" if causal else "nanoGPT's convention"
            self.figures.append(
                figure(
                    id,
                    f"{what}, MFU, {convention}, of {self.peak / 1e12:.0f} TFLOP/s",
                    "ours",
                    ours=shares,
                    unit="",
                    goal=None if causal else Goal("median", at_least=goal),
                    higher_is_better=True,
                )
            )


# --- ceilings and the ladder ---------------------------------------------------------------------------------------


def ceilings(run: Run) -> None:
    """Speed of one GPU in matrix products, copies and attention; then the gain of each of our techniques on GPT-2."""
    for row in ring.in_a_process(lambda: hardware(run.sizes), run.folder / "hardware"):
        run.figures.append(
            figure("G0", row["what"], "hardware", ours=row["samples"], unit=row["unit"], higher_is_better=True)
        )
    climb(run)
    if run.left() > ring.LEAST_SECONDS:
        for row in ring.in_a_process(lambda: loss_heads(run.sizes), run.folder / "heads", run.left()):
            run.figures.append(figure("G0", row["what"], "hardware", ours=row["samples"], unit=row["unit"]))
    else:
        run.samples["loss head"] = {"failed": {"all": ring.NOT_REACHED}}


LADDER: dict[str, str] = {
    "eager, transformers' own": "",
    "+ causal attention without a mask": "attention",
    "+ cuDNN's attention": "cudnn",
    "+ the activation in one operation": "activation",
    "+ fused update": "update",
    "+ loss fused with the head": "loss",
    "+ compiled": "compile",
    "+ vocabulary to a multiple of 64": "vocabulary",
    "+ pinned transfer, frozen collector": "transfer",
    "+ FSDP2's 16 bits instead of autocast": "sharded",
}
"""Rung -> the technique that it adds to the previous rung."""


def climb(run: Run) -> None:
    """G3: gain of each technique over the previous rung, on GPT-2 with its own 50257 ids."""
    sizes = run.sizes
    shape = replace(sizes.gpt2, vocab_size=sizes.odd_vocabulary)
    steps = max(1, sizes.steps // 2)
    job = run.job("ladder", shape, ring.CHECKED_STEPS + (steps + sizes.warm_up) * (sizes.rounds + 1) + 3)
    one_process = ring.in_a_process(one_process_sharded, run.folder / "launch")
    runs: dict[str, Callable[[], None]] = {}
    environments: dict[str, dict[str, str]] = {}
    has: set[str] = set()
    for name, adds in LADDER.items():
        has.add(adds)
        taken = {"attention", "update", "loss", "vocabulary", "transfer"} - has
        overrides = ["training.mixed_precision=bf16", f"training.cudnn_attention={str('cudnn' in has).lower()}"]
        if "activation" not in has:
            overrides.append(f"model.name_or_path={job.default_weights}")

        def rung(taken: set[str] = taken, overrides: list[str] = overrides) -> None:
            contenders.without(*taken)
            contenders.ours(job, *overrides)

        runs[name] = rung
        environments[name] = {"ACCELERATE_DYNAMO_BACKEND": sizes.backend} if "compile" in has else {}
        if "sharded" in has:  # each block is compiled separately, and gathers its own weights
            environments[name] |= one_process | {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}
    race = run.race(
        "ladder", job, runs, steps, sizes.rounds, control=False, environments=environments, reference=next(iter(runs))
    )
    before = None
    for name in race.samples:
        speeds = run.speeds(race, name, shape)
        row = figure(
            "G3",
            "GPT-2 shape, ours, and ratio to the previous rung",
            name,
            ours=speeds,
            unit="tokens/s",
            theirs=run.speeds(race, before, shape) if before else None,
            higher_is_better=True,
        )
        run.figures.append(row | {"median": statistics.median(speeds)})
        before = name
    run.save()


def one_process_sharded() -> dict[str, str]:
    """Environment of the only process of `accelerate launch --config_file fsdp2_grad_op.yaml --num_processes 1`."""
    import socket

    from acc_lm.runtime.settings.config_file import launch_with

    file = ROOT / "accelerate_configs/fsdp2_grad_op.yaml"
    _, environment = launch_with(file, "--num_processes", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    for name in ("OMP_NUM_THREADS", "PYTHONPATH", "ACCELERATE_DYNAMO_BACKEND"):
        changed.pop(name, None)
    return changed | {
        "ACC_LM_CONFIG_FILE": str(file),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def loss_heads(sizes: Sizes) -> list[dict[str, Any]]:
    """Milliseconds and MiB of head and loss, forward and backward: ours in chunks of several sizes, and the plain one."""
    import torch
    from torch.nn import functional as F

    from acc_lm.modeling import losses

    device, shape = contenders.device_here(), sizes.gpt2
    tokens, width, vocabulary = shape.batch_size * shape.length, shape.model["n_embd"], sizes.odd_vocabulary
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    rows: list[dict[str, Any]] = []

    def plain(hidden: Any, weight: Any, bias: None, targets: Any) -> Any:
        return F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def measure(what: str, function: Callable[..., Any], is_compiled: bool) -> None:
        torch._dynamo.reset()
        run = torch.compile(function, backend=sizes.backend) if is_compiled else function
        samples = []
        try:
            for number in range(8):
                if number == 3 and device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                began = now()
                with torch.autocast(device, torch.bfloat16):
                    loss = run(hidden, weight, None, targets)
                loss.backward()
                samples.append(now() - began)
                hidden.grad = weight.grad = None
        except RuntimeError as error:  # does not fit into memory
            rows.append({"what": f"{what}: {str(error).splitlines()[0][:80]}", "unit": "ms", "samples": [0.0]})
            return
        rows.append({"what": what, "unit": "ms", "samples": [1000 * seconds for seconds in samples[3:]]})
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**20
            rows.append({"what": f"{what}, peak memory", "unit": "MiB", "samples": [peak]})

    usual = losses.GPU_CHUNK_LOGITS
    for is_compiled in (False, True):
        how = "compiled" if is_compiled else "eager"
        measure(f"loss of {tokens} x {vocabulary}, plain, {how}", plain, is_compiled)
        for logits in (usual // 4, usual, usual * 4):
            losses.GPU_CHUNK_LOGITS = logits
            measure(
                f"loss of {tokens} x {vocabulary}, ours, {logits >> 20} Mi logits at once, {how}",
                losses.summed_loss,
                is_compiled,
            )
    return rows


def hardware(sizes: Sizes) -> list[dict[str, Any]]:
    """Rows of {what, unit, samples}; call it in a separate process."""
    import torch

    device = contenders.device_here()
    rows: list[dict[str, Any]] = []

    def timed(work: Callable[[], Any], amount: float, what: str, unit: str) -> None:
        try:
            for _ in range(3):
                work()
            rows.append({"what": what, "unit": unit, "samples": [amount / seconds(work) for _ in range(10)]})
        except RuntimeError as error:  # this kernel does not exist here
            rows.append({"what": f"{what}: {str(error).splitlines()[0][:80]}", "unit": unit, "samples": [0.0]})

    def seconds(work: Callable[[], Any]) -> float:
        if device == "cpu":
            began = time.process_time()
            work()
            return max(time.process_time() - began, 1e-9)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def product(rows_: int, inner: int, columns: int) -> None:
        a, b = (torch.randn(n, m, device=device, dtype=torch.bfloat16) for n, m in ((rows_, inner), (inner, columns)))
        timed(lambda: a @ b, 2e-12 * rows_ * inner * columns, f"bf16 product {rows_} x {inner} x {columns}", "TFLOP/s")

    product(sizes.square, sizes.square, sizes.square)
    for shape in (sizes.gpt2, *sizes.llamas[:1]):
        m = shape.model
        width, inner = m.get("n_embd", m.get("hidden_size")), m.get("intermediate_size", 4 * m.get("n_embd", 0))
        tokens = shape.batch_size * shape.length
        for columns in (width, 3 * width, inner, shape.vocab_size):
            product(tokens, width, columns)
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed(lambda: target.copy_(source), 2e-12 * sizes.copied, "copy, read and written", "TB/s")
    _attention(sizes, device, timed)
    return rows


def _attention(sizes: Sizes, device: str, timed: Callable[[Callable[[], Any], float, str, str], None]) -> None:
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for batch, heads, kv, size, length in sizes.attention:
        q, k, v = (
            torch.randn(batch, h, length, size, device=device, dtype=torch.bfloat16, requires_grad=True)
            for h in (heads, kv, kv)
        )
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

            def attend(q: Any = q, k: Any = k, v: Any = v, backend: Any = backend, same: bool = heads == kv) -> None:
                with sdpa_kernel(backend):
                    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not same).sum().backward()

            work = 6e-12 * batch * heads * size * length * length
            timed(
                attend,
                work,
                f"attention {backend.name.lower()}, heads {heads}/{kv} of {size}, length {length}, forward and backward",
                "TFLOP/s",
            )


# --- races ---------------------------------------------------------------------------------------------------------


def gpt2_race(run: Run) -> None:
    """G1: GPT-2 124M at 1024 compared with every peer, default and tuned."""
    shape, sizes = run.sizes.gpt2, run.sizes
    num_steps = ring.CHECKED_STEPS + (sizes.steps + sizes.warm_up) * (sizes.rounds + 1) + 3
    job = run.job("gpt2", shape, num_steps, least_rows=max(sizes.micro_batches))
    bf16 = "training.mixed_precision=bf16"
    runs: dict[str, Callable[[], None]] = {
        "ours": lambda: contenders.ours(job, bf16),
        "ours, eager": lambda: contenders.ours(job, bf16),
        REFERENCE: lambda: contenders.bare(job, default=True, precision="bf16"),
        "bare loop, tuned": lambda: contenders.bare(job, precision="bf16", compiled=sizes.backend),
        "Trainer": lambda: contenders.trainer(job, default=True, precision="bf16"),
        "Trainer, tuned": lambda: contenders.trainer(job, precision="bf16", compiled=sizes.backend),
    }
    found, absent = contenders.field(job)
    if "Lightning" in found:
        runs["Lightning, tuned"] = lambda: contenders.lightning(job, precision="bf16", compiled=sizes.backend)
    if "nanoGPT" in found:
        runs["nanoGPT"] = found["nanoGPT"]
    if "run_clm_no_trainer" in found:
        runs["run_clm_no_trainer"] = found["run_clm_no_trainer"]
    runs["ours again"] = lambda: contenders.ours(job, bf16)
    compiled = {"ACCELERATE_DYNAMO_BACKEND": sizes.backend}
    environments = {
        "ours": compiled,
        "ours again": compiled,
        "run_clm_no_trainer": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    }
    race = run.race("gpt2", job, runs, sizes.steps, sizes.rounds, environments=environments)
    run.races["gpt2"]["absent"] = absent
    goals = {
        "nanoGPT": Goal(at_least=1.03),
        "bare loop, tuned": Goal(at_least=1.0),
        "Trainer": Goal(at_least=1.25),
        "Trainer, tuned": Goal(at_least=1.10),
    }
    run.add_speeds("G1", "GPT-2 shape", race, shape, goals)
    run.add_mfu("G1", "GPT-2 shape", race, shape, 0.52)
    accumulated(run)
    largest_micro_batch(run, job)


def accumulated(run: Run) -> None:
    """A step of GPT-2's own global batch, half a million tokens, in micro-batches of the size above."""
    sizes, micro = run.sizes, run.sizes.gpt2.batch_size
    if run.left() < ring.LEAST_SECONDS:
        run.races["gpt2 accumulated"] = {"failed": {"ours": ring.NOT_REACHED}}
        return
    shape = replace(sizes.gpt2, batch_size=micro * sizes.accumulation)
    rounds = max(2, sizes.rounds // 2)
    job = run.job("gpt2 accumulated", shape, ring.CHECKED_STEPS + (1 + sizes.warm_up) * (rounds + 1) + 3)
    bf16, compiled = "training.mixed_precision=bf16", {"ACCELERATE_DYNAMO_BACKEND": sizes.backend}
    runs: dict[str, Callable[[], None]] = {
        "ours": lambda: contenders.ours(job, bf16, f"training.micro_batch_size={micro}"),
        "Trainer, tuned": lambda: contenders.trainer(
            job, precision="bf16", compiled=sizes.backend, micro_batch_size=micro
        ),
    }
    race = run.race(
        "gpt2 accumulated", job, runs, 1, rounds, control=False, reference="ours", environments={"ours": compiled}
    )
    what = f"GPT-2 shape, a step of {shape.batch_size * shape.length:,} tokens in {sizes.accumulation} micro-batches"
    run.add_speeds("G1", what, race, shape, {"Trainer, tuned": Goal(at_least=1.10)})


def largest_micro_batch(run: Run, job: Job) -> None:
    """Largest of several micro-batch sizes that trains, for ours and for Trainer as its documentation runs it."""
    reached: dict[str, float] = {}
    sizes = run.sizes.micro_batches
    run.samples["largest micro-batch"] = {"tried": sizes, "reached": reached}
    for name in ("ours", "Trainer"):
        fit, rest = 0, len(sizes)  # this many sizes fit; at most this many can
        while fit < rest:
            middle = (fit + rest + 1) // 2
            if run.left() < ring.LEAST_SECONDS:
                run.samples["largest micro-batch"]["failed"] = {name: ring.NOT_REACHED}
                return
            try:
                ring.in_a_process(
                    lambda name=name, size=sizes[middle - 1]: train_two_steps(run, job, name, size),
                    run.folder / f"fit-{name}-{sizes[middle - 1]}",
                    min(120, run.left()),
                )  # type: ignore[misc]
                fit = middle
            except RuntimeError:
                rest = middle - 1
        if fit:
            reached[name] = float(sizes[fit - 1])
    if len(reached) == 2:
        run.figures.append(
            figure(
                "G1",
                "GPT-2 shape, largest micro-batch tried that trains",
                "Trainer",
                ours=[reached["ours"]],
                theirs=[reached["Trainer"]],
                unit="rows",
                goal=Goal(at_least=2.0),
                higher_is_better=True,
            )
        )


def train_two_steps(run: Run, job: Job, name: str, size: int) -> bool:
    """Train two steps of this many rows, the second with the optimizer's state present; any exception means that they do not fit."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken = []

    def leave(*_: Any) -> None:
        taken.append(1)
        if len(taken) == 2:
            raise ring.Done

    large = Job(job.name, job.folder, job.model, job.length, size, job.vocab_size, job.num_steps)
    register_optimizer_step_post_hook(leave)
    with contextlib.suppress(ring.Done):
        if name == "ours":
            sizes = [f"training.global_batch_size={size}", f"training.micro_batch_size={size}"]
            contenders.ours(job, "training.mixed_precision=bf16", *sizes)
        else:
            contenders.trainer(large, default=True, precision="bf16")
    return True


def llama_race(run: Run) -> None:
    """G2: the shape of Llama-3.2-1B; two contenders at a time, because all stay on the device. The most informative pairs first."""
    shapes = run.sizes.llamas
    if run.together == 1:
        shapes = tuple(replace(shape, batch_size=max(1, shape.batch_size // 2)) for shape in shapes)
    jobs: dict[int, Job] = {}
    for peer in (REFERENCE, "ours again", "Trainer, tuned", "Lightning, tuned", "ours, fp8"):
        for shape, goal in zip(shapes, (0.57, 0.58), strict=False):
            if peer == "ours again" and shape is not shapes[0]:
                continue
            if run.left() < ring.LEAST_SECONDS:
                late = run.samples.setdefault("llama", {"failed": {}})["failed"]
                late[f"{peer} at {shape.length}"] = ring.NOT_REACHED
            else:
                llama_alternatives(run, jobs, peer, shape, goal)


def llama_alternatives(run: Run, jobs: dict[int, Job], peer: str, shape: Shape, goal: float) -> None:
    """Race ours against one other: ours must agree with the hand-written loop, and the others with ours."""
    sizes, name = run.sizes, f"llama {shape.length}"
    bf16, compiled = "training.mixed_precision=bf16", {"ACCELERATE_DYNAMO_BACKEND": sizes.backend}
    if shape.length not in jobs:
        num_steps = ring.CHECKED_STEPS + (sizes.llama_steps + sizes.warm_up) * (sizes.llama_rounds + 1) + 3
        jobs[shape.length] = run.job(name, shape, num_steps)
    job = jobs[shape.length]
    needs = {"Lightning, tuned": "lightning", "ours, fp8": "torchao"}.get(peer)
    if needs and not contenders._has(needs):
        run.races[name].setdefault("absent", {})[peer] = f"{needs} is not installed"
        return
    runs: dict[str, Callable[[], None]] = {
        REFERENCE: lambda: contenders.bare(job, precision="bf16", compiled=sizes.backend),
        "ours again": lambda: contenders.ours(job, bf16),
        "Trainer, tuned": lambda: contenders.trainer(job, precision="bf16", compiled=sizes.backend),
        "Lightning, tuned": lambda: contenders.lightning(job, precision="bf16", compiled=sizes.backend),
        "ours, fp8": lambda: contenders.ours(job, "training.mixed_precision=fp8"),
    }
    is_first = peer == REFERENCE
    race = run.race(
        name if is_first else f"{name}, {peer}",
        job,
        {"ours": lambda: contenders.ours(job, bf16), peer: runs[peer]},
        sizes.llama_steps,
        sizes.llama_rounds,
        control=peer == "ours again",
        reference=REFERENCE if is_first else "ours",
        environments=dict.fromkeys(("ours", "ours again", "ours, fp8"), compiled),
        tolerances={"ours, fp8": 0.2},
    )
    goals = {
        REFERENCE: Goal(at_least=1.0),
        "Trainer, tuned": Goal(at_least=1.05),
        "Lightning, tuned": Goal(at_least=1.10),
    }
    run.add_speeds("G2", f"Llama 1B shape at {shape.length}", race, shape, goals)
    if is_first:
        run.add_mfu("G2", f"Llama 1B shape at {shape.length}", race, shape, goal)
    run.save()


COMMANDS: dict[str, Callable[[Run], None]] = {"ceilings": ceilings, "gpt2": gpt2_race, "llama": llama_race}


def command(name: str, sizes: Sizes, output: Path, seconds: float = math.inf) -> Path:
    """Run one of the three commands, merge its results with those of the others, and return the file of results.

    Args:
        seconds: time limit; what was not reached by then is listed.
    """
    began = time.monotonic()
    for module in IMPORTED:
        with contextlib.suppress(Exception):  # absent, or DeepSpeed without CUDA's compiler
            importlib.import_module(module)
        if sys.modules["torch"].cuda.is_initialized():
            raise RuntimeError(
                f"{module} must not initialise the GPU on import, because no process could be forked afterwards"
            )
    folder = Path(tempfile.mkdtemp(prefix="acc-lm-bench-"))
    os.environ["ACC_LM_CACHE"] = str(folder / "cache")
    before = os.getloadavg()
    run = Run(sizes, folder, deadline=began + seconds)
    # In another process: one that has initialised the device cannot fork.
    header = ring.in_a_process(lambda: report.header("gpu"), folder / "machine")
    gpu = header["machine"].get("gpu")
    if gpu:
        run.clock, run.memory_gb = "gpu", gpu["memory_gb"]
        peak = peak_of(gpu["name"], "bfloat16")
        run.peak = peak and peak.flops
    failed: dict[str, str] = {name: "cut off: the process was ended from outside"}

    def save() -> Path:
        took = time.monotonic() - began
        result = {
            **header,
            "void": bool(run.void),
            "void_because": run.void,
            "failed": failed,
            "complete": sizes == Sizes() and bool(gpu),
            "load": {"before": before, "after": os.getloadavg()},
            "seconds": took,
            "seconds_of": {name: took},
            "figures": run.figures,
            "races": run.races,
            "samples": run.samples,
        }
        return report.write(report.merge_results(result, output), output)

    run.save = save
    try:
        COMMANDS[name](run)
        failed.clear()
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    file = save()
    if run.void:
        print("VOID: " + "; ".join(run.void))
    if failed:
        print(f"{name} failed: {failed[name]}")
    met = [row for row in run.figures if row["met"] is not None]
    print(f"{file}: {name}, {sum(row['met'] for row in met)} of {len(met)} goals met, {time.monotonic() - began:.0f} s")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one command of the GPU suite.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on any machine, to check that everything runs")
    parser.add_argument(
        "--seconds",
        type=float,
        default=540,
        help="time limit; what is not reached by then is listed (default: 540)",
    )
    parser.add_argument("--page", type=Path, help="page to write from the results: docs/measured/benchmarks.md")
    chosen = parser.parse_args()
    command(chosen.command, TOY if chosen.toy else Sizes(), chosen.output, chosen.seconds)
    if chosen.page:
        report.write_page(chosen.output, chosen.page)


if __name__ == "__main__":
    main()
