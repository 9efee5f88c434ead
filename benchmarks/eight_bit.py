"""AdamW with 8-bit moments (torchao): why `optimizer.name` does not offer it; a table of docs/promises/exactness.md.

    pip install torchao
    python benchmarks/eight_bit.py [docs/promises/exactness.md]      # a few minutes on one core

Three questions, each answered on torchao's own optimizer. Do moments survive a checkpoint in float32, from which any engine
could resume? Do they depend on how a parameter is cut? And how far does rounding alone take two runs apart, when they
differ only in the order in which the same gradient is summed, as two engines do?
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

ROWS, LENGTH, VOCABULARY, STEPS, WARMUP, RATE = 16, 64, 512, 40, 10, 3e-3
SHOWN = (10, 20, 40)
BLOCK = 256
"""torchao's block of elements with one scale."""


def build() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def batches() -> Iterator[Tensor]:
    """Ids [ROWS, LENGTH + 1] of each step, from a chain in which eight ids may follow each id."""
    after = torch.randint(0, VOCABULARY, (VOCABULARY, 8), generator=torch.Generator().manual_seed(1))
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 + step)
        ids = [torch.randint(0, VOCABULARY, (ROWS,), generator=draw)]
        for _ in range(LENGTH):
            ids.append(after[ids[-1], torch.randint(0, 8, (ROWS,), generator=draw)])
        yield torch.stack(ids, 1)


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> Any:
    settings: Any = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    if name == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")  # torchao compiles the update for each shape, for speed
    return AdamW8bit(parameters, block_size=BLOCK, **settings)


def train(name: str, num_parts: int = 1, bf16: bool = False, num_cuts: int = 1) -> tuple[list[float], Any]:
    """Loss of each step, and the optimizer.

    Args:
        num_parts: micro-batches of a step.
        num_cuts: parts into which the optimizer gets each parameter, cut between rows as FSDP2 does for so many processes.
    """
    model = build()
    parameters = list(model.parameters())
    parts = [nn.Parameter(part) for parameter in parameters for part in parameter.detach().chunk(num_cuts)]
    optimizer, losses = optimizer_of(name, parts), []
    for step, ids in enumerate(batches()):
        for group in optimizer.param_groups:
            rate = RATE * min(1.0, step / WARMUP)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        total = 0.0
        for micro_batch in ids.chunk(num_parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(input_ids=micro_batch[:, :-1]).logits.float()
            summed = nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch[:, 1:].flatten(), reduction="sum")
            loss = summed / (ROWS * LENGTH)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        gradients = [part for parameter in parameters for part in parameter.grad.chunk(num_cuts)]
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = gradient
        optimizer.step()
        model.zero_grad()
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


def share_in_8_bits(optimizer: Any) -> float:
    """Share of the elements whose moments have 8 bits; torchao leaves small and odd tensors in float32."""
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    small = sum(moment.numel() for moment in moments if hasattr(moment, "codes"))
    return small / sum(moment.numel() for moment in moments)


# --- the table -----------------------------------------------------------------------------------------------------


def apart(expected: list[float], got: list[float]) -> str:
    """Cells: largest relative difference of the losses up to each of the shown steps."""
    off = [abs(a - b) / abs(a) for a, b in zip(expected, got, strict=True)]
    return " | ".join(f"{max(off[:step]):.0e}" for step in SHOWN)


def main(page: Path | None) -> None:
    torch.set_num_threads(1)
    columns = " | ".join(f"{step} steps" for step in SHOWN)
    lines = [
        f"| optimizer, compute | against one micro-batch, parameters whole | {columns} |",
        "|---|---|" + "---|" * len(SHOWN),
    ]
    last: Any = None
    for name, bf16 in (("adamw", False), ("8 bits", False), ("adamw", True), ("8 bits", True)):
        whole, optimizer = train(name, bf16=bf16)
        other, _ = train(name, 2, bf16)
        about = f"| {name}, {'bf16' if bf16 else 'float32'} |"
        lines.append(f"{about} two micro-batches: the same gradient to rounding | {apart(whole, other)} |")
        print(lines[-1], flush=True)
        if name == "adamw" or bf16:
            continue
        last = optimizer
        for num_cuts in (2, 3, 8):
            other, cut = train(name, num_cuts=num_cuts)
            of_all = f"{share_in_8_bits(cut):.1%} of the moments in 8 bits, {share_in_8_bits(optimizer):.1%} uncut"
            lines.append(
                f"{about} the same gradient, parameters cut for {num_cuts} processes; {of_all} | {apart(whole, other)} |"
            )
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
        replace_block(page, "eight_bit", "\n".join([*head, text]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
