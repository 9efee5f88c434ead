"""Train a small model on two processes, right and with five faults of distributed training, and draw both curves of each.

    python docs/course/code/wrong_curves.py                     # runs/theory/wrong_*.svg and wrong_curves.json
    python docs/course/code/wrong_curves.py --output FOLDER     # the same into another folder

Everything is trained for real: two processes with DDP over gloo, and with DeepSpeed's ZeRO-3 for the last fault. The model is a
table of transitions between 32 symbols. Rows are answers of two kinds, which follow different tables: half of the rows are short
and half are long, so a long row has fifteen times as many targets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

ROOT = Path(__file__).resolve().parents[3]
SYMBOLS, SHORT, LONG = 32, 4, 60
STEPS, ROWS, GLOBAL_BATCH, WARM_UP, LEARNING_RATE = 240, 320, 8, 12, 0.02
EVAL_BATCHES = (1, 4, 16)
FAULTS = ("mean_of_means", "schedule_per_process", "no_set_epoch")
"""Faults of training; the two others are in the evaluation and in the export of a model that is trained without a fault."""


class Transitions(nn.Module):
    """Logits of the next symbol, given the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SYMBOLS, SYMBOLS)
        nn.init.zeros_(self.table.weight)

    def forward(self, symbols: Tensor) -> Tensor:
        logits: Tensor = self.table(symbols)
        return logits


def make_rows(count: int, seed: int) -> list[Tensor]:
    """Rows of symbols, int64 [targets + 1], short and long ones in random order."""
    tables = torch.randn(2, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(7)).mul(2).softmax(-1)
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        is_long = int(torch.randint(2, (), generator=draw))
        symbols = [int(torch.randint(SYMBOLS, (), generator=draw))]
        for _ in range(LONG if is_long else SHORT):
            symbols.append(int(torch.multinomial(tables[is_long, symbols[-1]], 1, generator=draw)))
        rows.append(torch.tensor(symbols))
    return rows


def summed_loss(model: nn.Module, rows: list[Tensor]) -> tuple[Tensor, int]:
    """Sum of the losses of all targets in nats, and their number."""
    logits = model(torch.cat([row[:-1] for row in rows]))
    targets = torch.cat([row[1:] for row in rows])
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), len(targets)


def loss_per_target(model: nn.Module, rows: list[Tensor]) -> float:
    """Evaluation: one sum over all targets, one division."""
    with torch.no_grad():
        loss, count = summed_loss(model, rows)
    return float(loss) / count


def mean_of_batch_means(model: nn.Module, rows: list[Tensor], batch_size: int) -> float:
    """FAULT: the mean loss of each batch, and the mean of those."""
    means = [loss_per_target(model, rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    return sum(means) / len(means)


def train(accelerator: Any, fault: str | None = None, num_steps: int = STEPS) -> dict[str, Any]:
    """Train with Accelerate on all processes of the launch; each step is the same on any number of them.

    Args:
        fault: one of `FAULTS`; None trains without any.
    """
    from transformers import get_cosine_schedule_with_warmup

    rows, held_out = make_rows(ROWS, seed=1), make_rows(100, seed=2)
    world = accelerator.num_processes
    bare = Transitions()
    optimizer = torch.optim.Adam(bare.parameters(), lr=LEARNING_RATE)
    schedule: Any = get_cosine_schedule_with_warmup(optimizer, WARM_UP, STEPS)
    model, optimizer = accelerator.prepare(bare, optimizer)
    if fault == "schedule_per_process":  # FAULT: Accelerate's scheduler takes one step for each process
        schedule = accelerator.prepare(schedule)
    sampler: Any = DistributedSampler(rows, world, accelerator.process_index, shuffle=True, seed=3)  # type: ignore[arg-type]
    steps_of_epoch, batches = ROWS // GLOBAL_BATCH, set()
    result: dict[str, Any] = {"loss": [], "learning_rate": [], "held_out": [], "by_batch_means": []}
    for step in range(num_steps):
        epoch, place = divmod(step, steps_of_epoch)
        if fault != "no_set_epoch":  # FAULT: without it, every epoch has the order of the first
            sampler.set_epoch(epoch)
        share = GLOBAL_BATCH // world
        numbers = list(sampler)[place * share : (place + 1) * share]
        batches.add(tuple(numbers))
        num_targets = torch.tensor(sum(len(rows[number]) - 1 for number in numbers))
        num_targets = int(accelerator.reduce(num_targets))
        total = torch.zeros(())
        for i, number in enumerate(numbers):  # micro-batches of one row
            with nullcontext() if i == len(numbers) - 1 else accelerator.no_sync(model):
                loss, count = summed_loss(model, [rows[number]])
                if fault == "mean_of_means":  # FAULT: the mean of each micro-batch, and the mean of those
                    (loss / count / len(numbers)).backward()
                else:  # DDP takes the mean over the processes, which `world` undoes
                    (loss * world / num_targets).backward()
            total += loss.detach()
        result["learning_rate"].append(schedule.get_last_lr()[0])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        result["loss"].append(float(accelerator.reduce(total)) / num_targets)
        result["held_out"].append(loss_per_target(bare, held_out))
        if fault is None:
            result["by_batch_means"].append([mean_of_batch_means(bare, held_out, size) for size in EVAL_BATCHES])
    result["different_batches"] = len(batches)
    result["weights"] = bare.table.weight.detach().clone()
    return result


def train_and_export(num_steps: int = STEPS) -> dict[str, Any]:
    """Train under ZeRO-3 with the library, and export every 20 steps: the gathered weights, and `state_dict()` as it is."""
    from acc_lm import runtime
    from acc_lm.config.loading import load_config
    from acc_lm.export.export import whole_weights

    rows, held_out = make_rows(ROWS, seed=1), make_rows(100, seed=2)
    config = load_config(
        ROOT / "recipes/pretrain_synthetic.yaml",
        ["training.global_batch_size=8", "training.micro_batch_size=4", "tracking.report_to=[]"],
    )
    accelerator = runtime.build_accelerator(config)
    bare: nn.Module = Transitions()
    model, optimizer = runtime.prepare(
        accelerator, bare, torch.optim.AdamW(bare.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    )
    result: dict[str, Any] = {"steps": [], "right": [], "wrong": [], "elements": []}
    for step in range(num_steps + 1):
        if step % 20 == 0:
            gathered = whole_weights(accelerator, model, optimizer)
            emptied = accelerator.unwrap_model(model).state_dict()  # FAULT: ZeRO-3 keeps the weights elsewhere
            result["steps"].append(step)
            result["elements"] = [sum(tensor.numel() for tensor in found.values()) for found in (gathered, emptied)]
            for name, found in (("right", gathered), ("wrong", emptied)):
                loaded = Transitions()  # tensors of another shape are left out, as `ignore_mismatched_sizes=True` does
                own = loaded.state_dict()
                loaded.load_state_dict(
                    {**own, **{key: value for key, value in found.items() if value.shape == own[key].shape}}
                )
                result[name].append(loss_per_target(loaded, held_out) if accelerator.is_main_process else 0.0)
        if step == num_steps:
            break
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step)).tolist()[:GLOBAL_BATCH]
        num_targets = sum(len(rows[number]) - 1 for number in order)
        loss, _ = summed_loss(
            model, [rows[number] for number in order[accelerator.process_index :: accelerator.num_processes]]
        )
        accelerator.backward(loss * accelerator.num_processes / num_targets)
        optimizer.step()
        optimizer.zero_grad()
    return result


def work(kind: str, file: Path) -> None:
    """Do the part of one launch on every process; the main process writes the result."""
    torch.set_num_threads(1)
    if kind == "zero3":
        from acc_lm import runtime

        runtime.quiet_libraries()
        results = {"empty_export": train_and_export()}
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=not torch.cuda.is_available())
        results = {name or "right": train(accelerator, name) for name in (None, *FAULTS)}
    if torch.distributed.get_rank() == 0:
        for result in results.values():
            result.pop("weights", None)
        file.write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/theory"))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    known = parser.parse_args()
    if known.work:
        work(known.work[0], Path(known.work[1]))
        return
    results: dict[str, Any] = {}
    for kind, config in (("ddp", "ddp"), ("zero3", "deepspeed_zero3")):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file"]
            command += [
                str(ROOT / f"accelerate_configs/{config}.yaml"),
                "--num_processes",
                "2",
                "--main_process_port",
                "0",
            ]
            subprocess.run([*command, __file__, "--work", kind, str(file)], check=True)
            results |= json.loads(file.read_text())
    known.output.mkdir(parents=True, exist_ok=True)
    (known.output / "wrong_curves.json").write_text(json.dumps(rounded(results)) + "\n")
    sys.path.insert(0, str(Path(__file__).parent))
    import draw

    draw.draw_data("wrong_curves", known.output)
    print_table(results)


def rounded(found: Any) -> Any:
    """The same lists and numbers, with five decimals."""
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    if isinstance(found, list):
        return [rounded(value) for value in found]
    return round(found, 5)


def print_table(results: dict[str, Any]) -> None:
    """Print what each fault does to a figure that people look at."""
    right, export = results["right"], results["empty_export"]
    by_size = dict(zip(EVAL_BATCHES, right["by_batch_means"][-1], strict=True))
    middle = STEPS // 2
    print(f"right                  held-out loss {right['held_out'][-1]:.4f} after {STEPS} steps")
    print(f"mean of means          held-out loss {results['mean_of_means']['held_out'][-1]:.4f}")
    wrong = results["schedule_per_process"]
    print(
        f"schedule per process   after {middle} steps: rate {wrong['learning_rate'][middle]:.4f} instead of "
        f"{right['learning_rate'][middle]:.4f}, held-out loss {wrong['held_out'][middle]:.4f} instead of {right['held_out'][middle]:.4f}"
    )
    print(
        f"                       after {STEPS} steps: rate {wrong['learning_rate'][-1]:.4f} instead of {right['learning_rate'][-1]:.4f}"
    )
    print(
        "evaluation             of the right model by batch means: "
        + ", ".join(f"{value:.4f} (batches of {size})" for size, value in by_size.items())
    )
    print(
        f"no set_epoch           {results['no_set_epoch']['different_batches']} different batches in {STEPS} steps instead of "
        f"{right['different_batches']}; held-out loss {results['no_set_epoch']['held_out'][-1]:.4f}"
    )
    print(
        f"empty export           {export['elements'][1]} of {export['elements'][0]} weights exported; held-out loss of the export "
        f"{export['wrong'][-1]:.4f} instead of {export['right'][-1]:.4f}"
    )


if __name__ == "__main__":
    main()
