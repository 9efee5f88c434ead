"""AdamW with 8-bit moments (torchao): why `optimizer.name` does not offer it; a table of docs/promises/exactness.md.

    pip install torchao
    python benchmarks/eight_bit.py [docs/promises/exactness.md]      # a few minutes on one core

Three questions, each answered on torchao's own optimizer. Do moments survive a checkpoint in float32, from which any engine
could resume? Do they depend on how a parameter is cut? And how far does rounding alone take two runs apart, when they
differ in nothing but the order in which the same gradient is summed, as two engines do?
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

ROWS, LENGTH, VOCABULARY, STEPS, WARMUP, RATE = 16, 64, 512, 60, 10, 3e-3
SHOWN = (10, 20, 40, 60)
BLOCK = 256
"""torchao's block of elements with one scale."""
SMALL_HEAD = 510
"""Rows of a vocabulary that three processes do not cut at the end of a block."""


def build(width: int = 128, vocabulary: int = VOCABULARY) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def batches(num_steps: int, vocabulary: int) -> Iterator[Tensor]:
    """Ids [ROWS, LENGTH + 1] of each step, from a chain in which eight ids may follow each id."""
    after = torch.randint(0, vocabulary, (vocabulary, 8), generator=torch.Generator().manual_seed(1))
    for step in range(num_steps):
        draw = torch.Generator().manual_seed(100 + step)
        ids = [torch.randint(0, vocabulary, (ROWS,), generator=draw)]
        for _ in range(LENGTH):
            ids.append(after[ids[-1], torch.randint(0, 8, (ROWS,), generator=draw)])
        yield torch.stack(ids, 1)


def optimizer_of(name: str, model: nn.Module) -> Any:
    settings: Any = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), **settings)
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")  # torchao compiles the update for each shape, for speed

    return AdamW8bit(model.parameters(), block_size=BLOCK, **settings)


def train(
    model: nn.Module,
    name: str,
    num_parts: int = 1,
    bf16: bool = False,
    vocabulary: int = VOCABULARY,
    rank: int = 0,
    world: int = 1,
) -> tuple[list[float], Any]:
    """Loss of each step, with the global batch in so many micro-batches; and the optimizer."""
    optimizer, losses = optimizer_of(name, model), []
    for step, ids in enumerate(batches(STEPS, vocabulary)):
        for group in optimizer.param_groups:
            rate = RATE * min(1.0, step / WARMUP)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        total = 0.0
        for part in ids.chunk(world)[rank].chunk(num_parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(input_ids=part[:, :-1]).logits.float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum") / (
                ROWS * LENGTH
            )
            (loss * world).backward()  # FSDP2 takes the mean over processes
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, optimizer


# --- through float32 and back --------------------------------------------------------------------------------------


def round_trip(optimizer: Any) -> dict[str, tuple[float, float]]:
    """Moment -> (share of blocks that another quantization changes, norm after 20 of them relative to before)."""
    found = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        changed, before, after = [], 0.0, 0.0
        for state in optimizer.state.values():
            moment = state[kind]
            if not hasattr(moment, "codes"):
                continue
            values = moment.dequantize()
            before += float(values.square().sum())
            again = type(moment).zeros(moment.shape, moment.signed, BLOCK)
            for time in range(20):
                again.copy_(values)
                values = again.dequantize()
                if time == 0:
                    changed.append(again.scale != moment.scale)
            after += float(values.square().sum())
        found[kind] = float(torch.cat(changed).float().mean()), (after / before) ** 0.5
    return found


# --- cut by FSDP2 --------------------------------------------------------------------------------------------------


def on_fsdp2(rank: int, world: int, port: int, file: str, name: str, vocabulary: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    model: Any = build(vocabulary=vocabulary)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses, optimizer = train(model, name, vocabulary=vocabulary, rank=rank, world=world)
    summed = torch.tensor(losses)
    dist.all_reduce(summed)
    held = torch.tensor(held_in_8_bits(optimizer), dtype=torch.float64)
    dist.all_reduce(held)
    if rank == 0:
        torch.save((summed.tolist(), float(held[0] / held[1])), file)
    dist.destroy_process_group()


def held_in_8_bits(optimizer: Any) -> tuple[int, int]:
    """(elements whose moments have 8 bits, all elements) on this process."""
    small = total = 0
    for state in optimizer.state.values():
        moment = state["exp_avg"]
        moment = moment.to_local() if hasattr(moment, "to_local") else moment
        total += moment.numel()
        small += moment.numel() * hasattr(moment, "codes")
    return small, total


def fsdp2(world: int, name: str, vocabulary: int) -> tuple[list[float], float]:
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        file = str(Path(folder) / "found")
        spawn(on_fsdp2, (world, port, file, name, vocabulary), world)
        found: tuple[list[float], float] = torch.load(file)
    return found


# --- the table -----------------------------------------------------------------------------------------------------


def apart(expected: list[float], got: list[float]) -> str:
    """Cells: largest relative difference of the losses up to each of the shown steps."""
    off = [abs(a - b) / abs(a) for a, b in zip(expected, got, strict=True)]
    return " | ".join(f"{max(off[:step]):.0e}" for step in SHOWN)


def main(page: Path | None) -> None:
    torch.set_num_threads(1)
    lines = [
        "| optimizer, compute | compared with one process and one micro-batch | "
        + " | ".join(f"{n} steps" for n in SHOWN)
        + " |",
        "|---|---|" + "---|" * len(SHOWN),
    ]
    last: Any = None
    for name, bf16 in (("adamw", False), ("8 bits", False), ("adamw", True), ("8 bits", True)):
        whole, optimizer = train(build(), name, bf16=bf16)
        last = optimizer if name == "8 bits" and not bf16 else last
        for num_parts in (2, 4):
            other, _ = train(build(), name, num_parts, bf16)
            compute = "bf16" if bf16 else "float32"
            lines.append(
                f"| {name}, {compute} | {num_parts} micro-batches, the same gradient to rounding | {apart(whole, other)} |"
            )
            print(lines[-1], flush=True)
    for world, vocabulary in ((2, VOCABULARY), (3, SMALL_HEAD)):
        for name in ("adamw", "8 bits"):
            whole, optimizer = train(build(vocabulary=vocabulary), name, vocabulary=vocabulary)
            other, share = fsdp2(world, name, vocabulary)
            about = f"FSDP2 on {world} processes"
            if name != "adamw":
                small, total = held_in_8_bits(optimizer)
                about += f"; {share:.1%} of the moments in 8 bits, {small / total:.1%} on one process"
            lines.append(f"| {name}, float32 | {about} | {apart(whole, other)} |")
            print(lines[-1], flush=True)
    shares = round_trip(last)
    lines += [
        "",
        f"The moments of {STEPS} steps, read as float32 and quantized again: the scale changes in {shares['exp_avg'][0]:.0%} of the blocks of the first "
        f"moment (its norm after 20 times: {shares['exp_avg'][1]:.3f} of what it was) and in {shares['exp_avg_sq'][0]:.0%} of those of the second "
        f"({shares['exp_avg_sq'][1]:.3f}).",
    ]
    text = "\n".join(lines)
    print(text)
    if page:
        sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
        from importlib.metadata import version

        from acc_lm.studies.tables import machine_line, replace_block

        head = [
            "`python benchmarks/eight_bit.py docs/promises/exactness.md`: a Llama of 0.5 million weights, largest relative difference of any loss so far.",
            "",
            f"{machine_line()}, torchao {version('torchao')}",
            "",
        ]
        replace_block(page, "eight_bit", "\n".join(head) + text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
