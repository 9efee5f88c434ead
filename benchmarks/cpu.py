"""The CPU suite: all figures of one machine in one run, compared with every peer that is installed.

    PEERS=~/peers python -m benchmarks.cpu [--only C1,C2] [--output benchmarks/results]

PEERS is a folder with the peers that are not packages: nanoGPT/, litgpt/ and transformers/ (of which only
examples/pytorch/language-modeling is needed). One thread per process. Time is the CPU time of the training process, so that other
load on the machine disturbs as little as possible. A run whose A/A control (ours against ours again) fails is reported as void.
"""

from __future__ import annotations

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}

import argparse
import contextlib
import importlib
import json
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import contenders, report, ring
from benchmarks.contenders import ROOT, Job
from benchmarks.ring import Goal, Race, figure

Figure = dict[str, Any]
REFERENCE = "bare loop"
BEST_GUESS = ("ours", "ours again")
IMPORTED = (
    "torch",
    "torch._dynamo",
    "accelerate",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "datasets",
    "transformers.models.llama.modeling_llama",
    "lightning",
    "acc_lm.cli.train",
    "acc_lm.checkpointing.saving",
    "acc_lm.export.export",
    "acc_lm.reporting.tracking",
    "acc_lm.modeling.build",
    "torch.distributed.fsdp",
    "matplotlib.pyplot",
    "deepspeed",
)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the suite; TOY tries the complete suite in half a minute."""

    char: tuple[int, int, int, int, int] = (4, 4, 128, 64, 12)
    """Layers, heads, width, row length, batch: nanoGPT's example for a CPU."""
    char_steps: int = 5
    loop: tuple[int, int, int, int, int] = (2, 2, 16, 16, 2)
    loop_steps: int = 180
    tiny: tuple[int, int, int, int, int] = (4, 4, 256, 256, 4)
    tiny_steps: int = 1
    tiny_vocab: int = 4096
    rounds: int = 18
    """Many short turns, because other load on the machine changes within seconds."""
    few_rounds: int = 9
    text_bytes: int = 12_000_000
    tokens: int = 50_000_000
    head: tuple[int, int, int] = (1024, 256, 50304)
    save_width: int = 384
    starts: int = 3
    growth: bool = True
    seen: int = 1_000_000
    index_rows: tuple[int, ...] = (1_000_000, 100_000_000, 10_000_000_000)
    sorted_rows: tuple[int, ...] = (1_000_000, 10_000_000)
    busy_steps: int = 25
    busy_programs: int = 4


TOY = Sizes(
    char=(1, 1, 16, 8, 2),
    char_steps=2,
    loop_steps=3,
    tiny=(1, 2, 16, 8, 2),
    tiny_steps=1,
    tiny_vocab=64,
    rounds=2,
    few_rounds=2,
    text_bytes=30_000,
    tokens=60_000,
    head=(64, 8, 128),
    save_width=48,
    starts=1,
    growth=False,
    seen=1000,
    index_rows=(100_000, 1_000_000),
    sorted_rows=(100_000, 200_000),
    busy_steps=4,
    busy_programs=1,
)


@dataclass
class Run:
    """Results of a run so far."""

    sizes: Sizes
    folder: Path
    figures: list[Figure] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    races: dict[str, Any] = field(default_factory=dict)
    void: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, *arguments: Any, **keywords: Any) -> None:
        self.figures.append(figure(*arguments, **keywords))

    def job(self, name: str, shape: tuple[int, int, int, int, int], vocab_size: int, num_steps: int, gpt2: bool) -> Job:
        layers, heads, width, length, batch_size = shape
        if gpt2:
            model = {
                "model_type": "gpt2",
                "n_layer": layers,
                "n_head": heads,
                "n_embd": width,
                "n_positions": length,
                "activation_function": "gelu_pytorch_tanh",
                **NO_DROPOUT,
            }
        else:
            model = {
                "model_type": "llama",
                "hidden_size": width,
                "intermediate_size": 2 * width + width // 2 + width // 8,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "max_position_embeddings": length,
            }
        # No contender reaches the end of the text, because the end of an epoch costs more than a step.
        job = Job(
            name,
            self.folder / name,
            model,
            length,
            batch_size,
            vocab_size,
            num_steps,
            least_rows=num_steps * batch_size,
        )
        digest = ring.in_a_process(job.prepare, job.folder / "prepare")
        self.races[name] = {"tokens_xxh3": digest, "model": model, "length": length, "batch_size": batch_size}
        return job

    def race(self, job: Job, runs: dict[str, Callable[[], None]], absent: dict[str, str], **how: Any) -> Race:
        race = ring.race(runs, job.folder / "runs", reference=REFERENCE, tolerance=ring.TOLERANCE["no"], **how)
        why, noise = ring.why_void(race, ring.NOISE["cpu"])
        if why:
            self.void.append(f"{job.name}: {why}")
        self.races[job.name] |= {
            "samples": race.samples,
            "checks": race.checks,
            "failed": race.failed,
            "absent": absent,
            "ours_over_ours": noise,
            "seconds_to_checked": race.started,
        }
        return race


def best_peer(race: Race, names: Iterator[str] | None = None) -> str:
    peers = [name for name in names or race.samples if not name.startswith("ours")]
    return min(peers, key=lambda name: statistics.median(race.values(name, "cpu")))


# --- races ---------------------------------------------------------------------------------------------------------


def c1_step(run: Run) -> None:
    """A step of a small model: nanoGPT's example for a CPU."""
    sizes = run.sizes
    num_steps = ring.CHECKED_STEPS + sizes.char_steps * (sizes.rounds + 1) + 3
    job = run.job("char", sizes.char, 65, num_steps, gpt2=True)
    runs, absent = contenders.field(job)
    race = run.race(job, runs, absent, steps=sizes.char_steps, rounds=sizes.rounds)
    if "ours" not in race.samples:
        return
    best = best_peer(race)
    ours = race.values("ours", "cpu")
    for name in race.samples:
        goal = Goal(at_most=1.02) if name == best else Goal(at_most=0.80) if name == "Trainer" else None
        run.add(
            "C1",
            "CPU time of a step, char shape",
            name,
            ours=ours,
            theirs=race.values(name, "cpu"),
            unit="ms",
            scale=1e3,
            goal=goal,
            note="the best peer" if name == best else "",
        )
    products = ring.in_a_process(lambda: seconds_of_products(job), job.folder / "products")
    run.add(
        "C1",
        "share of a step that its matrix products take on their own, at their shapes and on one core, char shape",
        "limit",
        ours=[products / seconds for seconds in ours],
        unit="of the limit",
        goal=Goal("median", at_least=0.65),
        higher_is_better=True,
        note=f"{step_flops(job) / 1e9:.2f} GFLOP a step at {step_flops(job) / products / 1e9:.0f} GFLOP/s",
    )


def step_flops(job: Job) -> float:
    """FLOP of the matrix products, forward and backward; attention counts both halves, because its CPU kernels compute both."""
    shape = job.model
    width, layers = shape["n_embd"], shape["n_layer"]
    weights = 12 * layers * width * width + job.vocab_size * width
    return job.batch_size * job.length * (6.0 * weights + 12 * layers * width * job.length)


def seconds_of_products(job: Job) -> float:
    """CPU seconds of a step's matrix products alone, forward and backward: each shape at its best of several times."""
    import torch

    width, layers, heads = job.model["n_embd"], job.model["n_layer"], job.model["n_head"]
    tokens, rows, size = job.batch_size * job.length, job.batch_size * heads, width // heads
    # Output, inner and input sizes, and how often: each product, its gradient for the input and that for the weights.
    shapes = [
        (1, tokens, inner, out, layers)
        for inner, out in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    ]
    shapes += [
        (1, tokens, width, job.vocab_size, 1),
        (rows, job.length, size, job.length, layers),
        (rows, job.length, job.length, size, layers),
    ]
    total = 0.0
    for count, m, k, n, times in shapes:
        for a, b, c in ((m, k, n), (m, n, k), (k, m, n)):
            left, right = torch.randn(count, a, b), torch.randn(count, b, c)
            if count == 1:
                left, right = left[0], right[0]
            best = float("inf")
            for _ in range(12):
                began = time.process_time()
                for _ in range(5):
                    left @ right
                best = min(best, (time.process_time() - began) / 5)
            total += times * best
    return total


def c2_overhead(run: Run) -> None:
    """A step with almost nothing to compute: the overhead of the loop."""
    sizes = run.sizes
    num_steps = ring.CHECKED_STEPS + sizes.loop_steps * (sizes.rounds + 1) + 3
    job = run.job("loop", sizes.loop, 65, num_steps, gpt2=True)
    runs, absent = contenders.field(job)
    race = run.race(job, runs, absent, steps=sizes.loop_steps, rounds=sizes.rounds)
    if "ours" not in race.samples:
        return
    ours = race.values("ours", "cpu")
    for name in race.samples:
        goal = Goal(at_most=1.0) if name.startswith(("Trainer", "Lightning")) else None
        run.add(
            "C2",
            "CPU time of a step with nothing to compute",
            name,
            ours=ours,
            theirs=race.values(name, "cpu"),
            unit="ms",
            scale=1e3,
            goal=goal,
        )
    for name in [name for name in race.samples if name.startswith("bare")]:
        above = [a - b for a, b in zip(ours, race.values(name, "cpu"), strict=True)]
        goal = Goal("median", at_most=0.30) if name == "bare loop, tuned" else None
        run.add("C2", f"ours minus {name}", name, ours=above, unit="ms", scale=1e3, goal=goal)


def ours_without(job: Job, technique: str) -> None:
    contenders.without(technique)
    contenders.ours(job)


def c3_precision_c10_memory(run: Run) -> None:
    """A model with a vocabulary: fp32 and bf16, the memory, and ours without each of our techniques."""
    sizes = run.sizes
    num_steps = ring.CHECKED_STEPS + sizes.tiny_steps * (sizes.rounds + 1) + 3
    job = run.job("tiny-bpe", sizes.tiny, sizes.tiny_vocab, num_steps, gpt2=False)
    runs, absent = contenders.field(job)
    for technique in ("attention", "loss", "update"):  # the gain of each
        runs[f"ours without our {technique}"] = partial(ours_without, job, technique)
    bf16: dict[str, Callable[[], None]] = {
        "ours, bf16": lambda: contenders.ours(job, "training.mixed_precision=bf16"),
        "bare loop, tuned, bf16": lambda: contenders.bare(job, precision="bf16"),
        "Trainer, tuned, bf16": lambda: contenders.trainer(job, precision="bf16"),
    }
    race = run.race(
        job,
        runs | bf16,
        absent,
        steps=sizes.tiny_steps,
        rounds=sizes.rounds,
        tolerances=dict.fromkeys(bf16, ring.TOLERANCE["bf16"]),
    )
    if "ours" not in race.samples:
        return
    for name in race.samples:
        mine = "ours, bf16" if "bf16" in name else "ours"
        if mine in race.samples:
            run.add(
                "C3",
                f"CPU time of a step, tiny-bpe shape, {'bf16' if 'bf16' in name else 'fp32'}",
                name,
                ours=race.values(mine, "cpu"),
                theirs=race.values(name, "cpu"),
                unit="ms",
                scale=1e3,
            )
    _add_bf16_gain_and_memory(run, race)


def _add_bf16_gain_and_memory(run: Run, race: ring.Race) -> None:
    if "ours, bf16" in race.samples:
        has_units = any(word in Path("/proc/cpuinfo").read_text() for word in ("avx512_bf16", "amx_bf16"))
        gain = [a / b for a, b in zip(race.values("ours", "cpu"), race.values("ours, bf16", "cpu"), strict=True)]
        run.add(
            "C3",
            "bf16 over fp32, ours",
            "ours",
            ours=gain,
            unit="x",
            goal=Goal("median", at_least=1.2) if has_units else None,
            higher_is_better=True,
            note="" if has_units else "this CPU has no bf16 units",
        )
    fp32 = [name for name in race.samples if "bf16" not in name]
    peers = [name for name in fp32 if not name.startswith("ours")]
    least = min(peers, key=lambda name: max(race.values(name, "memory")))
    for name in fp32:
        run.add(
            "C10",
            "peak memory in addition to the memory at the start, tiny-bpe shape",
            name,
            ours=[max(race.values("ours", "memory"))],
            theirs=[max(race.values(name, "memory"))],
            unit="MiB",
            goal=Goal(at_most=1.0) if name == least else None,
            note="the best peer" if name == least else "",
        )


def c12_two_processes(run: Run) -> None:
    """Two processes, connected by gloo, compared with torch's own DDP."""
    sizes = run.sizes
    layers, heads, width, length, batch_size = sizes.char
    num_steps = ring.CHECKED_STEPS + sizes.char_steps * (sizes.rounds + 1) + 3
    job = run.job("ddp", (layers, heads, width, length, 2 * batch_size), 65, num_steps, gpt2=True)

    def twice(work: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            port = free_port()
            rank = 0
            if os.fork() == 0:
                rank = 1
                die_with_parent()
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "ACCELERATE_USE_CPU": "true",
            }
            if rank:
                follow()
            work()

        return both

    runs: dict[str, Callable[[], None]] = {
        "ours": twice(lambda: contenders.ours(job)),
        REFERENCE: twice(lambda: contenders.bare(job, default=True, distributed=True)),
        "bare loop, tuned": twice(lambda: contenders.bare(job, distributed=True)),
        "ours again": twice(lambda: contenders.ours(job)),
    }
    race = run.race(job, runs, {}, steps=sizes.char_steps, rounds=sizes.rounds, together=1)
    if "ours" not in race.samples:
        return
    for name in race.samples:
        goal = Goal(at_most=1 / 0.97) if name == "bare loop, tuned" else None
        run.add(
            "C12",
            "CPU time of a step of one of two processes",
            name,
            ours=race.values("ours", "cpu"),
            theirs=race.values(name, "cpu"),
            unit="ms",
            scale=1e3,
            goal=goal,
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def follow() -> None:
    """Make the second process follow the first, waiting in its collectives, and report nothing."""
    ring.Gate.step_done = lambda self: None  # type: ignore[method-assign]


# --- data ----------------------------------------------------------------------------------------------------------


def c4_tokenise_c6_kept(run: Run) -> None:
    """From text to rows: speed, and lost tokens."""
    folder = run.folder / "text"
    folder.mkdir(parents=True)
    length = 256
    made = ring.in_a_process(lambda: make_text(folder, run.sizes.text_bytes), folder / "make")
    rounds = 3
    works: dict[str, Callable[[], dict[str, float]]] = {
        "ours": lambda: pack_with_ours(folder, length),
        "ours without tiktoken": lambda: pack_with_ours(folder, length, without_tiktoken=True),
        "tokenizers alone": lambda: encode_alone(folder),
    }
    timed: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    absent = {"nanoGPT": "its prepare.py downloads its text", "litgpt": "its TextFiles needs litdata"}
    if contenders.peer_folder("transformers") is not None:
        timed["run_clm_no_trainer"] = []
        works["run_clm_no_trainer"] = lambda: pack_with_run_clm(folder, length)
    else:
        absent["run_clm_no_trainer"] = "no folder transformers in PEERS"
    failed: dict[str, str] = {}
    for round_ in range(rounds):
        for name, work in list(works.items()):
            try:
                timed[name].append(ring.in_a_process(work, folder / f"{name}-{round_}".replace(" ", "-")))
            except RuntimeError as error:
                failed[name] = str(error)
                works.pop(name)
                timed.pop(name)
    run.samples["C4"] = {"text": made, "samples": timed, "absent": absent, "failed": failed}
    if "ours" not in timed:
        return
    ours = [made["tokens"] / sample["seconds"] for sample in timed["ours"]]
    for name, samples in timed.items():
        goal = Goal(at_least=5.0) if name == "run_clm_no_trainer" else None
        run.add(
            "C4",
            "tokens per CPU second from text to rows",
            name,
            ours=ours,
            theirs=[made["tokens"] / s["seconds"] for s in samples],
            unit="thousand/s",
            scale=1e-3,
            goal=goal,
            higher_is_better=True,
        )
    for name, samples in timed.items():
        if "kept" in samples[0]:
            lost = made["tokens"] - samples[0]["kept"]
            goal = Goal("median", at_most=length - 1) if name == "ours" else None
            run.add(
                "C6",
                f"tokens lost by cutting rows of {length}",
                name,
                ours=[lost],
                unit=f"of {made['tokens']:.0f}",
                goal=goal,
            )


def make_text(folder: Path, num_bytes: int) -> dict[str, float]:
    """Write files of the standard library, one per record, and a BPE trained on some of them."""
    from acc_lm.config import TokenizerConfig
    from acc_lm.text.corpus import python_stdlib_files
    from acc_lm.text.tokenizer import make_tokenizer

    texts: list[str] = []
    size = 0
    for file in python_stdlib_files():
        text = file.read_text(encoding="utf-8", errors="replace")
        if size < num_bytes and text.strip():
            texts.append(text)
            size += len(text.encode())
    tokenizer = make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=4096), texts[: max(1, len(texts) // 8)])
    tokenizer.model_max_length = 10**9
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "text.json").write_text(json.dumps([{"text": text} for text in texts]))
    (folder / "held-out.json").write_text(json.dumps([{"text": texts[0][:2000]}]))
    ids = tokenizer(texts)["input_ids"]
    return {"tokens": float(sum(map(len, ids))), "documents": float(len(texts)), "bytes": float(size)}


def pack_with_ours(folder: Path, length: int, without_tiktoken: bool = False) -> dict[str, float]:
    from transformers import AutoTokenizer

    from acc_lm.config import DataConfig, TokenizerConfig
    from acc_lm.data import build_data
    from acc_lm.text import encoder

    if without_tiktoken:
        encoder.WORTH = 1 << 60
    config = DataConfig(
        source="files",
        files=(str(folder / "text.json"),),
        eval_files=(str(folder / "held-out.json"),),
        sequence_length=length,
        cache_dir=tempfile.mkdtemp(dir=folder),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    began = time.process_time()
    data = build_data(config, TokenizerConfig(), tokenizer, 0, 1)
    seconds = time.process_time() - began
    assert without_tiktoken or data.facts.train_bytes < 1e6 or data.facts.encoder == "tiktoken", data.facts.encoder
    rows = np.arange(len(data.train))
    # Every document has one end token more than its text; the first token of a split is not a target.
    kept = data.train.count_targets(rows) + 1 - data.facts.train_documents  # type: ignore[union-attr]
    return {"seconds": seconds, "kept": float(kept)}


def encode_alone(folder: Path) -> dict[str, float]:
    from transformers import AutoTokenizer

    texts = [record["text"] for record in json.loads((folder / "text.json").read_text())]
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer").backend_tokenizer
    began = time.process_time()
    for start in range(0, len(texts), 100):
        tokenizer.encode_batch_fast(texts[start : start + 100], add_special_tokens=False)
    return {"seconds": time.process_time() - began}


class Packed(BaseException):
    """Raised to leave a script once its rows are built."""


def pack_with_run_clm(folder: Path, length: int) -> dict[str, float]:
    """Run the script up to its loaders and time the two maps that build its rows."""
    import datasets
    import torch

    peer = contenders.peer_folder("transformers")
    assert peer is not None
    tiny_model(folder / "tokenizer")
    took = {"seconds": 0.0, "kept": 0.0}
    original = datasets.DatasetDict.map

    def timed(self: Any, *arguments: Any, **keywords: Any) -> Any:
        began = time.process_time()
        made = original(self, *arguments, **keywords)
        took["seconds"] += time.process_time() - began
        if "labels" in made["train"].column_names:
            took["kept"] = float(len(made["train"]) * length)
        return made

    def stop(*_: Any, **__: Any) -> None:
        raise Packed

    datasets.DatasetDict.map = timed
    torch.utils.data.DataLoader.__init__ = stop  # type: ignore[method-assign]
    os.environ["HF_DATASETS_CACHE"] = datasets.config.HF_DATASETS_CACHE = tempfile.mkdtemp(dir=folder)
    sys.argv = [
        "run_clm_no_trainer.py",
        "--train_file",
        str(folder / "text.json"),
        "--validation_file",
        str(folder / "held-out.json"),
        "--model_name_or_path",
        str(folder / "tokenizer"),
        "--block_size",
        str(length),
    ]
    with contextlib.suppress(Packed):
        contenders._run_script(contenders.run_clm_file(peer))
    return took


def tiny_model(folder: Path) -> None:
    """Save a tiny model next to the tokenizer, because the script requires one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    vocab_size = len(AutoTokenizer.from_pretrained(folder))
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=1, n_embd=8, n_positions=512, vocab_size=vocab_size)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def c5_loader(run: Run) -> None:
    """The loader: from memory-mapped rows to batches."""
    from benchmarks import loader

    length, batch_size = min(loader.LENGTH, run.sizes.tokens // 64), loader.BATCH
    steps = min(loader.STEPS, run.sizes.tokens // length // batch_size)
    absent: dict[str, str] = {}
    if contenders.peer_folder("nanoGPT") is None:
        absent["nanoGPT"] = "no folder nanoGPT in PEERS"

    def take_turns() -> dict[str, list[float]]:
        field = {"ours": loader.rounds(run.sizes.tokens, length, batch_size, steps)}
        if not absent:
            field["nanoGPT"] = rounds_of_get_batch(run, length, batch_size, max(1, steps // 20))
        speeds: dict[str, list[float]] = {name: [] for name in field}
        for _ in range(run.sizes.rounds):
            for name, rounds in field.items():
                speeds[name].append(next(rounds))
        return speeds

    speeds = ring.in_a_process(take_turns, run.folder / "loader")
    run.samples["C5"] = {"samples": speeds, "absent": absent}
    for name, samples in speeds.items():
        run.add(
            "C5",
            "tokens per CPU second from the loader",
            name,
            ours=speeds["ours"],
            theirs=samples,
            unit="million/s",
            scale=1e-6,
            goal=Goal(at_least=10.0) if name == "nanoGPT" else None,
            higher_is_better=True,
        )
    run.add(
        "C5",
        "tokens per CPU second from the loader, ours",
        "goal",
        ours=speeds["ours"],
        unit="million/s",
        scale=1e-6,
        goal=Goal("median", at_least=100.0),
        higher_is_better=True,
    )


def rounds_of_get_batch(run: Run, length: int, batch_size: int, steps: int) -> Iterator[float]:
    """Yield the speed of nanoGPT's own get_batch, extracted from its train.py."""
    folder = contenders.peer_folder("nanoGPT")
    assert folder is not None
    data = run.folder / "get-batch-data"
    data.mkdir()
    np.random.RandomState(0).randint(0, 50_000, run.sizes.tokens).astype(np.uint16).tofile(data / "train.bin")
    import torch
    from numpy import memmap

    tree = __import__("ast").parse((folder / "train.py").read_text())
    (function,) = [node for node in tree.body if getattr(node, "name", "") == "get_batch"]
    names: dict[str, Any] = {
        "np": np,
        "os": os,
        "torch": torch,
        "data_dir": str(data),
        "block_size": length,
        "batch_size": batch_size,
        "device_type": "cpu",
        "device": "cpu",
    }
    assert memmap is np.memmap
    exec(compile(__import__("ast").Module([function], []), "train.py", "exec"), names)
    while True:
        began = time.process_time()
        count = sum(names["get_batch"]("train")[1].numel() for _ in range(steps))
        yield count / (time.process_time() - began)


# --- pieces --------------------------------------------------------------------------------------------------------


def c7_loss_head(run: Run) -> None:
    """Head and loss, compared with transformers' own."""
    from benchmarks import loss_head

    samples = loss_head.samples(3 if run.sizes.growth else 1, *run.sizes.head)
    run.samples["C7"] = samples
    for key, unit, goal in (("seconds", "s", 1.05), ("megabytes", "MB", 0.35)):
        run.add(
            "C7",
            f"loss head at V = {run.sizes.head[2]}, {'CPU time' if key == 'seconds' else 'memory'}",
            "transformers",
            ours=[s[key] for s in samples["fused"]],
            theirs=[s[key] for s in samples["plain"]],
            unit=unit,
            goal=Goal(at_most=goal),
        )


def c8_saving(run: Run) -> None:
    """A checkpoint: CPU time and bytes compared with those of torch, safetensors and DCP, and its speed on this disk."""

    def measure() -> dict[str, Any]:
        from benchmarks import saving

        measured = saving.measure(rounds=run.sizes.few_rounds, windows=0, hidden_size=run.sizes.save_width)
        costs = saving.costs(rounds=run.sizes.few_rounds, hidden_size=run.sizes.save_width)
        return {"bytes": measured.num_bytes, "times": measured.times, "costs": costs}

    measured = ring.in_a_process(measure, run.folder / "saving")
    run.samples["C8"] = measured
    size = measured["bytes"]
    for name, cost in measured["costs"].items():
        goal = Goal(at_most=1.0) if name == "torch.distributed.checkpoint" else None
        ours, theirs = ([s / size * 1e9 for s in cost_["seconds"]] for cost_ in (measured["costs"]["ours"], cost))
        run.add(
            "C8",
            "CPU time of a checkpoint per GB of weights and moments",
            name,
            ours=ours,
            theirs=theirs,
            unit="s",
            goal=goal,
        )
    for name, cost in measured["costs"].items():
        run.add(
            "C8", "bytes of a checkpoint per byte of weights and moments", name, ours=[cost["bytes"] / size], unit=""
        )
    speed = {name: [size / 2**20 / seconds for seconds in values] for name, values in measured["times"].items()}
    run.add(
        "C8",
        "speed of a checkpoint compared with a raw write and fsync, which the disk decides",
        "raw write",
        ours=speed["save"],
        theirs=speed["raw"],
        unit="MiB/s",
        higher_is_better=True,
        note="cost of a save in the background: docs/promises/reliability.md",
    )


def c9_resume(run: Run) -> None:
    """Time to the first batch, at the start and after a million batches."""

    def measure() -> dict[str, list[float]]:
        from acc_lm.rows.loader import MicroBatches, build_loader
        from acc_lm.rows.order import RowOrder
        from acc_lm.rows.text_rows import Rows

        rows = Rows(np.zeros(min(run.sizes.tokens, 4_000_000), dtype=np.uint16), 64)

        def first_batch(step: int) -> float:
            began = time.process_time()
            order = RowOrder(0, len(rows), 16)
            batches = MicroBatches(
                order, micro_batch_size=16, process=0, num_processes=1, first_step=step, last_step=step + 9
            )
            next(iter(build_loader(rows, batches, 0, pin_memory=False)))
            return time.process_time() - began

        times: dict[str, list[float]] = {"start": [], "late": []}
        for _ in range(25):
            times["start"].append(first_batch(1))
            times["late"].append(first_batch(run.sizes.seen))
        return times

    times = ring.in_a_process(measure, run.folder / "resume")
    run.samples["C9"] = times
    run.add(
        "C9",
        f"time to the first batch after {run.sizes.seen:,} batches, compared with after none",
        "ours at the start",
        ours=times["late"],
        theirs=times["start"],
        unit="ms",
        scale=1e3,
        goal=Goal(at_most=1.1),
    )


def c14_index(run: Run) -> None:
    """CPU time and memory from opened rows to the first batch, by the number of rows: an index of that size, no text."""
    versions = {
        "ours": (2, run.sizes.index_rows),
        "ours, every epoch sorted (until version 1 of the order)": (1, run.sizes.sorted_rows),
    }
    for name, (version, counts) in versions.items():
        found = {
            count: ring.in_a_process(lambda: first_batch_of(run.folder, count, version), run.folder / f"index-{count}")  # noqa: B023
            for count in counts
        }
        run.samples[f"C14 {name}"] = found
        seconds = [statistics.median(found[count]["seconds"]) for count in counts]
        for count in counts:
            run.add(
                "C14",
                f"CPU time to the first batch of {count:,} rows",
                name,
                ours=found[count]["seconds"],
                unit="ms",
                scale=1e3,
            )
            run.add(
                "C14",
                f"memory for the first batch of {count:,} rows",
                name,
                ours=found[count]["bytes"],
                unit="MiB",
                scale=2**-20,
            )
        slope = float(np.polyfit(np.log(counts), np.log(seconds), 1)[0])
        goal = Goal("median", at_most=0.05) if name == "ours" else None
        run.add(
            "C14", "slope of that time over rows, log-log (1: proportional)", name, ours=[slope], unit="", goal=goal
        )


def first_batch_of(folder: Path, num_rows: int, version: int) -> dict[str, list[float]]:
    """Seconds and bytes of several first batches of rows without text, each in a process of its own."""

    def measure(number: int) -> tuple[float, float]:
        from acc_lm.rows.loader import MicroBatches, build_loader
        from acc_lm.rows.order import RowOrder
        from acc_lm.rows.text_rows import Rows

        def first(rows: Rows, seed: int) -> None:
            order = RowOrder(seed, len(rows), 16, version=version)
            batches = MicroBatches(order, micro_batch_size=16, process=0, num_processes=1, first_step=1, last_step=9)
            next(iter(build_loader(rows, batches, 0, pin_memory=False)))

        first(Rows(np.zeros(100, dtype=np.uint16), 2), 0)  # so that only what grows is measured
        rows = Rows(np.broadcast_to(np.uint16(0), num_rows * INDEX_LENGTH + 1), INDEX_LENGTH)  # one number, repeated
        assert len(rows) == num_rows
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = peak_memory(), time.process_time()
        first(rows, number)
        return time.process_time() - began, peak_memory() - before

    pairs = [ring.in_a_process(lambda: measure(number), folder / f"first-{number}") for number in range(5)]  # noqa: B023
    return {"seconds": [seconds for seconds, _ in pairs], "bytes": [float(size) for _, size in pairs]}


INDEX_LENGTH = 16


def peak_memory() -> int:
    """Peak resident memory of this process, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


FIRST_STEP = """
import os, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: os._exit(0))
"""


def c11_start(run: Run) -> None:
    """CPU time from a fresh Python to the end of the first step, with tokenised data; and of --help."""
    job = run.job("start", run.sizes.loop, 65, 4, gpt2=True)
    ring.in_a_process(lambda: warm_files(job), job.folder / "warm")
    made = f"""
from pathlib import Path
from benchmarks.contenders import Job, lightning, ours, trainer
job = Job({job.name!r}, Path({str(job.folder)!r}), {job.model!r}, {job.length}, {job.batch_size}, {job.vocab_size}, {job.num_steps})
"""
    arguments = ["--config", str(job.folder / "recipe.yaml"), "output_dir=run"]
    train = f"import runpy\nsys.argv = {['train.py', *arguments]!r}\nrunpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    codes = {"ours": FIRST_STEP + train, "Trainer": FIRST_STEP + made + "trainer(job, default=True)"}
    absent = {}
    if contenders._has("lightning"):
        codes["Lightning"] = FIRST_STEP + made + "lightning(job, default=True)"
    else:
        absent["Lightning"] = "not installed: pip install 'acc-lm[bench]'"
    times: dict[str, list[float]] = {name: [] for name in codes} | {"--help": []}
    walls: dict[str, list[float]] = {name: [] for name in times}
    for round_ in range(run.sizes.starts):
        for name in times:
            command = (
                [sys.executable, str(ROOT / "train.py"), "--help"]
                if name == "--help"
                else [sys.executable, "-c", codes[name]]
            )
            place = job.folder / f"{name}-{round_}"
            place.mkdir()
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
            }
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(command, cwd=place, env=environment, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            walls[name].append(time.perf_counter() - began)
    run.samples["C11"] = {"cpu": times, "wall": walls, "absent": absent}
    for name in codes:
        run.add(
            "C11",
            "CPU time from a fresh Python to the end of the first step",
            name,
            ours=times["ours"],
            theirs=times[name],
            unit="s",
            goal=Goal(at_most=0.7) if name == "Trainer" else None,
        )
    run.add(
        "C11", "CPU time of train.py --help", "ours", ours=times["--help"], unit="s", goal=Goal("median", at_most=0.5)
    )


def c15_busy(run: Run) -> None:
    """Wall time of a step while other programs use all cores, of fresh processes that choose their threads themselves."""
    sizes = run.sizes
    num_steps = sizes.busy_steps
    job = run.job("busy", sizes.char, 65, num_steps + 1, gpt2=True)
    arguments = ["--config", str(job.folder / "recipe.yaml"), "output_dir=run"]
    train = f"import runpy\nsys.argv = {['train.py', *arguments]!r}\nrunpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
    made = f"""
from pathlib import Path
from benchmarks.contenders import Job, trainer
job = Job({job.name!r}, Path({str(job.folder)!r}), {job.model!r}, {job.length}, {job.batch_size}, {job.vocab_size}, {job.num_steps})
trainer(job, default=True)"""
    hook = STEP_TIMES.replace("LAST", str(num_steps))
    all_threads = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "active"}
    contenders_here: dict[str, tuple[str, dict[str, str]]] = {
        "ours": (BOUNDED + hook + train, {}),
        "ours with a thread for each core, which wait in a loop": (hook + train, all_threads),
        "Trainer": (hook + made, {}),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for load in (0, sizes.busy_programs):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
        when = f"next to {load} busy programs" if load else "on a quiet machine"
        try:
            found[when] = {name: step_times(code, more, job.folder) for name, (code, more) in contenders_here.items()}
        finally:
            for other in others:
                other.kill()
                other.wait()
        for name in contenders_here:
            run.add(
                "C15",
                f"wall time of a step {when}",
                name,
                ours=found[when]["ours"],
                theirs=found[when][name],
                unit="ms",
                scale=1e3,
                goal=Goal(at_most=1.0) if name == "Trainer" and load else None,
            )
    run.samples["C15"] = found


BOUNDED = """
from acc_lm.launcher import bound_spinning
bound_spinning()  # as train.py does before it imports torch, which the next lines do here
"""
STEP_TIMES = """
import os, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
left = [LAST]
def note(*_):
    print("step-time", time.monotonic(), flush=True)
    left[0] -= 1
    if not left[0]:
        os._exit(0)
register_optimizer_step_post_hook(note)
"""


def step_times(code: str, more: dict[str, str], folder: Path) -> list[float]:
    """Seconds of each step of a program that prints the time after each."""
    place = Path(tempfile.mkdtemp(dir=folder))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "MKL_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env=environment, check=True, capture_output=True, text=True
    )
    times = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step-time")]
    return np.diff(times)[1:].tolist()


def warm_files(job: Job) -> None:
    """Read all files once, so that they come from the page cache."""
    for file in job.folder.rglob("*"):
        if file.is_file():
            file.read_bytes()


def c13_growth(run: Run) -> None:
    """Growth of a step's time with tokens, width and row length, compared with that of its operations."""
    if not run.sizes.growth:
        return
    shapes = {  # width, layers, row length, batch
        "tokens": [(256, 2, 128, b) for b in (4, 8, 16, 32, 64)],
        "width": [(width, 2, 128, 4) for width in (64, 128, 256, 512)],
        "row length": [(128, 2, length, 2048 // length) for length in (64, 256, 1024, 2048)],
    }
    for name, sizes in shapes.items():
        times = ring.in_a_process(lambda sizes=sizes: grow(sizes), run.folder / f"growth-{name}".replace(" ", "-"))  # type: ignore[misc]
        flops = [
            length * batch * (6.0 * (12 * layers * width**2 + 1024 * width) + 12 * layers * width * length)
            for width, layers, length, batch in sizes
        ]
        tokens = [length * batch for _, _, length, batch in sizes]
        seconds = [min(samples) for samples in times]
        run.samples[f"C13 {name}"] = {"shapes": sizes, "seconds": times, "flops": flops}
        if name == "tokens":
            slope = float(np.polyfit(np.log(tokens), np.log(seconds), 1)[0])
            for goal in (Goal("median", at_most=1.05), Goal("median", at_least=0.95)):
                run.add(
                    "C13",
                    "slope of step time over tokens, log-log (1: proportional)",
                    "ours",
                    ours=[slope],
                    unit="",
                    goal=goal,
                )
        else:
            growth = (seconds[-1] / seconds[-2]) / (flops[-1] / flops[-2])
            place = 2 if name == "row length" else 0
            last, before = sizes[-1][place], sizes[-2][place]
            run.add(
                "C13",
                f"growth of step time / growth of operations, {name} {before} to {last}",
                "ours",
                ours=[growth],
                unit="x",
                goal=Goal("median", at_most=1.15),
            )


def grow(shapes: list[tuple[int, int, int, int]]) -> list[list[float]]:
    """CPU seconds of several steps at each shape; the shapes take turns."""
    import torch

    from acc_lm.config.loading import load_config
    from acc_lm.modeling.build import build_model
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.runtime import Gradients, build_accelerator, prepare, quiet_libraries
    from acc_lm.text.tokenizer import make_tokenizer
    from acc_lm.training.step import train_step

    quiet_libraries()
    steps = []
    for width, layers, length, batch_size in shapes:
        recipe = {
            "model": {
                "config": {
                    "model_type": "gpt2",
                    "n_layer": layers,
                    "n_head": width // 32,
                    "n_embd": width,
                    "n_positions": length,
                    "vocab_size": 1024,
                    "activation_function": "gelu_pytorch_tanh",
                    **NO_DROPOUT,
                }
            },
            "tokenizer": {"kind": "byte"},
            "schedule": {"warmup_steps": 0},
            "data": {"source": "synthetic", "sequence_length": length},
            "tracking": {"report_to": []},
            "training": {"max_steps": 9, "global_batch_size": batch_size, "micro_batch_size": batch_size},
        }
        Path("recipe.yaml").write_text(json.dumps(recipe))
        config = load_config("recipe.yaml", [])
        accelerator = build_accelerator(config)
        model = build_model(config.model, make_tokenizer(config.tokenizer, []), length, 0)[0]
        model, optimizer = prepare(accelerator, model, build_optimizer(model, config.optimizer))
        ids = torch.randint(0, 1024, (batch_size, length + 1), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:].contiguous()}
        steps.append((accelerator, model, optimizer, batch, Gradients(accelerator, model), batch_size * length))
    times: list[list[float]] = [[] for _ in shapes]
    for number in range(1, 6):
        for taken, (accelerator, model, optimizer, batch, gradients, count) in zip(times, steps, strict=True):
            began = time.process_time()
            train_step(
                accelerator,
                model,
                optimizer,
                [batch],
                step=number,
                seed=0,
                num_targets=count,
                max_grad_norm=1.0,
                gradients=gradients,
            )
            if number > 1:
                taken.append(time.process_time() - began)
    return times


# --- all of it -----------------------------------------------------------------------------------------------------

SUITE: dict[str, Callable[[Run], None]] = {
    "C1": c1_step,
    "C2": c2_overhead,
    "C3": c3_precision_c10_memory,
    "C4": c4_tokenise_c6_kept,
    "C5": c5_loader,
    "C7": c7_loss_head,
    "C8": c8_saving,
    "C9": c9_resume,
    "C11": c11_start,
    "C12": c12_two_processes,
    "C13": c13_growth,
    "C14": c14_index,
    "C15": c15_busy,
}


def suite(sizes: Sizes, only: list[str], output: Path) -> Path:
    """Run the suite, write the results and return their file."""
    import torch

    torch.set_num_threads(1)
    began = time.monotonic()
    for name in IMPORTED:  # once here, not in every forked process
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    folder = Path(tempfile.mkdtemp(prefix="acc-lm-bench-"))
    os.environ["ACC_LM_CACHE"] = str(folder / "cache")
    run = Run(sizes, folder)
    before = os.getloadavg()
    failed: dict[str, str] = {}
    try:
        for name, work in SUITE.items():
            if only and name not in only:
                continue
            started = time.monotonic()
            try:
                work(run)
            except Exception as error:  # the other figures continue; the page lists what is missing
                failed[name] = f"{type(error).__name__}: {error}"
            run.seconds[name] = time.monotonic() - started
            print(
                f"{name}: {run.seconds[name]:.0f} s{', failed: ' + failed[name] if name in failed else ''}", flush=True
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {
        **report.header("cpu"),
        "void": bool(run.void),
        "void_because": run.void,
        "failed": failed,
        "complete": sizes == Sizes(),
        "load": {"before": before, "after": os.getloadavg()},
        "seconds": time.monotonic() - began,
        "seconds_of": run.seconds,
        "figures": run.figures,
        "races": run.races,
        "samples": run.samples,
    }
    if only:
        result = report.merge_results(result, output)
        result["complete"] = result["complete"] and set(result["seconds_of"]) == set(SUITE)
    file = report.write(result, output)
    if result["void"]:
        print(
            "VOID: "
            + "; ".join(result["void_because"])
            + " (stop other load on the machine and run again, or only that figure with --only)"
        )
    met = [row for row in result["figures"] if row["met"] is not None]
    print(f"{file}: {sum(row['met'] for row in met)} of {len(met)} goals met, {time.monotonic() - began:.0f} s")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the CPU suite.")
    parser.add_argument(
        "--only",
        default="",
        help="ids of figures, separated by commas; merged with the other figures of this commit and day",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to check that everything runs")
    parser.add_argument("--page", type=Path, help="page to write from the results: docs/measured/benchmarks.md")
    chosen = parser.parse_args()
    suite(TOY if chosen.toy else Sizes(), [name for name in chosen.only.split(",") if name], chosen.output)
    if chosen.page:
        report.write_page(chosen.output, chosen.page)


if __name__ == "__main__":
    main()
