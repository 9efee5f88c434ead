"""Time and memory of the loss head compared with transformers' plain path, at 1024 positions x 50,304 ids.

    python benchmarks/loss_head.py

Each measurement is a separate process; the contenders take turns, and the median of the rounds counts.
Goals: at most 1.05 x the CPU time and 0.35 x the extra memory of the plain path.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

POSITIONS, HIDDEN, VOCABULARY = 1024, 256, 50304
ROUNDS, STEPS = 5, 3


def measure(
    contender: str, num_positions: int = POSITIONS, hidden_size: int = HIDDEN, vocab_size: int = VOCABULARY
) -> dict[str, float]:
    """CPU seconds of one forward and backward pass, and MB of memory in addition to the inputs."""
    import torch
    from torch import nn

    from acc_lm.modeling.losses import summed_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(1, num_positions, hidden_size, requires_grad=True)
    head = nn.Linear(hidden_size, vocab_size, bias=False)
    targets = torch.randint(0, vocab_size, (1, num_positions))

    def plain() -> torch.Tensor:
        logits = head(hidden).float()  # as transformers does it: complete logits, in fp32
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), targets.view(-1), reduction="sum")

    def step() -> float:
        hidden.grad = head.weight.grad = None
        loss = plain() if contender == "plain" else summed_loss(hidden, head.weight, None, targets)
        (loss / num_positions).backward()
        return loss.item()

    before = peak_kilobytes()
    loss = step()
    extra = peak_kilobytes() - before
    start = time.process_time()
    for _ in range(STEPS):
        step()
    return {"seconds": (time.process_time() - start) / STEPS, "megabytes": extra / 1024, "loss": loss}


def peak_kilobytes() -> int:
    """Peak memory of this program. Not from getrusage, whose value includes the parent process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1])


def samples(rounds: int = ROUNDS, *sizes: int) -> dict[str, list[dict[str, float]]]:
    """Samples of each contender, one per round; `sizes` are positions, hidden size and vocabulary."""
    taken: dict[str, list[dict[str, float]]] = {"plain": [], "fused": []}
    for _ in range(rounds):
        for contender, mine in taken.items():
            command = [sys.executable, __file__, contender, *map(str, sizes)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            mine.append(json.loads(done.stdout))
    losses = {sample["loss"] for mine in taken.values() for sample in mine}
    assert max(losses) - min(losses) < 1e-5 * max(losses), "both must compute the same loss"
    return taken


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:]))))
        return
    medians = {
        name: {key: statistics.median(sample[key] for sample in taken) for key in ("seconds", "megabytes")}
        for name, taken in samples().items()
    }
    for name, values in medians.items():
        print(f"{name:<6} {values['seconds']:.3f} s CPU   {values['megabytes']:.0f} MB extra")
    for key, goal in (("seconds", 1.05), ("megabytes", 0.35)):
        ratio = medians["fused"][key] / medians["plain"][key]
        print(f"{key}: fused / plain = {ratio:.3f}, goal at most {goal}: {'met' if ratio <= goal else 'NOT met'}")


if __name__ == "__main__":
    main()
