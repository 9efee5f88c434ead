"""Tokens per CPU second of streams and of rows on disk, compared with the tokenizer alone; CPU time of all processes counts.

    python benchmarks/streaming.py [docs/guides/data.md]

The table replaces what is between the `<!-- streaming -->` lines of a file. Text: the Python standard library's source in
shards, and a byte-level BPE of 8,192 ids trained on it; one thread per process. Goal: streams reach 0.8 of the tokenizer's own speed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import psutil
import torch

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data import build_data
from acc_lm.rows.loader import MicroBatches, build_loader
from acc_lm.text.corpus import python_stdlib_files
from acc_lm.text.tokenizer import build_encoder, make_tokenizer

NUM_SHARDS, NUM_STREAMS, LENGTH, BATCH, ROUNDS = 8, 4, 1024, 16, 5
FORMATS = ("jsonl", "parquet")
WARM_UP, STREAMED, FROM_DISK = 10, 200, 2000
"""Numbers of steps: before timing starts, timed from a stream, timed from disk."""
MARK = "<!-- streaming -->\n"


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    texts = [text for file in python_stdlib_files() if (text := file.read_text("utf-8", "ignore")).strip()]
    tokenizer = make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=8192), texts[::10])
    with tempfile.TemporaryDirectory() as name:
        write_shards(texts, Path(name))
        table = measure(texts, tokenizer, Path(name))
    print("\n".join(table))
    for argument in arguments:
        before, _, after = Path(argument).read_text().split(MARK)
        Path(argument).write_text(before + MARK + "\n".join(table) + "\n" + MARK + after)


def measure(texts: list[str], tokenizer: Any, folder: Path) -> list[str]:
    """Return the lines of the table. Each round measures every case once, so that a slow minute of the machine affects all of them."""
    encoder = build_encoder(tokenizer)
    speeds: dict[str, list[float]] = {}

    def encode() -> int:
        return sum(map(len, encoder.encode(texts)))

    def encode_without_tiktoken() -> int:
        return sum(len(each.ids) for each in encoder.backend.encode_batch_fast(texts, add_special_tokens=False))

    for _ in range(ROUNDS):
        note(speeds, "the tokenizer alone", encode)
        note(speeds, "the tokenizer alone, without tiktoken", encode_without_tiktoken)
        for suffix in FORMATS:
            data = build(tokenizer, folder, suffix, streaming=True, num_streams=NUM_STREAMS)
            order = data.order(0, BATCH)
            with data.reading(order, 0, None, 0, 1):
                read_steps(data, order, 1, WARM_UP)
                note(speeds, f"streams of {suffix}", partial(read_steps, data, order, WARM_UP + 1, WARM_UP + STREAMED))
        data = build(tokenizer, folder, "jsonl")
        order = data.order(0, BATCH)
        note(speeds, "rows on disk, once built", partial(read_steps, data, order, 1, FROM_DISK))
    medians = {what: statistics.median(values) for what, values in speeds.items()}
    alone = medians["the tokenizer alone"]
    lines = ["| | million tokens per CPU second | share of the tokenizer's own speed |", "|---|---|---|"]
    lines += [f"| {what} | {speed / 1e6:.2f} | {speed / alone:.2f} |" for what, speed in medians.items()]
    met = all(medians[f"streams of {suffix}"] >= 0.8 * alone for suffix in FORMATS)
    return [
        *lines,
        "",
        f"{len(texts):,} documents, rows of {LENGTH} tokens, median of {ROUNDS} rounds. Goal, 0.8 of the tokenizer's own speed: {'met' if met else 'NOT met'}.",
    ]


def note(speeds: dict[str, list[float]], what: str, count: Callable[[], int]) -> None:
    before = cpu_seconds()
    tokens = count()
    speeds.setdefault(what, []).append(tokens / (cpu_seconds() - before))


def cpu_seconds() -> float:
    """CPU seconds of this process and of its reader processes."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [me, *me.children()])


def write_shards(texts: list[str], folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    for number in range(NUM_SHARDS):
        records = [{"text": text} for text in texts[number::NUM_SHARDS]]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / f"{number}.parquet")
    (folder / "held-out.txt").write_text("held out " * 2000)


def build(tokenizer: Any, folder: Path, suffix: str, **more: Any) -> Any:
    values = {"source": "files", "files": str(folder / f"*.{suffix}"), "eval_files": str(folder / "held-out.txt")}
    values |= {"sequence_length": LENGTH, "cache_dir": str(folder / "cache")}
    return build_data(DataConfig.model_validate(values | more), TokenizerConfig(), tokenizer, 0, BATCH)


def read_steps(data: Any, order: Any, first: int, last: int) -> int:
    batches = MicroBatches(order, micro_batch_size=BATCH, process=0, num_processes=1, first_step=first, last_step=last)
    return sum(batch["targets"].numel() for batch in build_loader(data.train, batches, 0, pin_memory=False))


if __name__ == "__main__":
    main(sys.argv[1:])
