"""Cost of a checkpoint: its speed compared with a raw write, and the training time that a save in the background takes.

    python benchmarks/saving.py [docs/promises/reliability.md]

The contenders take turns; the median of the rounds counts. Goals: a save reaches 0.85 of the speed of a raw write of the same
bytes with a flush to disk, and a save in the background costs at most 3 % of the steps' time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acc_lm.checkpointing.saving import Saver

os.environ["OMP_NUM_THREADS"] = "1"

ROUNDS, WINDOWS, STEPS = 5, 5, 8
SYNCHRONOUS, BACKGROUND = "synchronous", "in the background"
RECIPE = """
model: {config: {model_type: gpt2, n_embd: 384, n_layer: 6, n_head: 6, n_positions: 256, vocab_size: 8192}}
tokenizer: {kind: byte}
data: {source: synthetic, sequence_length: 256}
training: {max_steps: 1000, global_batch_size: 4, micro_batch_size: 4}
"""


@dataclass(frozen=True)
class Measured:
    """Times of one process, in seconds."""

    num_bytes: int
    times: dict[str, list[float]]
    """One sample per round: `raw`, a write of the same bytes with a flush to disk, and `save`."""
    windows: dict[str, list[float]]
    """Durations of windows of steps: without a save, with a synchronous one, and with one in the background."""
    held: dict[str, float]
    """Seconds for which the saves of all windows blocked the loop."""


class Trial:
    """A small model that can take steps and be saved.

    Args:
        hidden_size: hidden size of the model.
    """

    def __init__(self, folder: Path, hidden_size: int) -> None:
        import torch

        from acc_lm.modeling.build import build_model
        from acc_lm.optimization.optimizer import build_optimizer
        from acc_lm.progress import Progress
        from acc_lm.rows.order import RowOrder
        from acc_lm.runtime import Gradients, build_accelerator, prepare, quiet_libraries
        from acc_lm.text.tokenizer import make_tokenizer

        self.folder = folder
        (folder / "recipe.yaml").write_text(RECIPE.replace("384", str(hidden_size)))
        quiet_libraries()
        config = self.config_of()
        self.accelerator = build_accelerator(config)
        model = build_model(config.model, make_tokenizer(config.tokenizer, []), 256, 0)[0]
        self.model, self.optimizer = prepare(self.accelerator, model, build_optimizer(model, config.optimizer))
        self.gradients, self.order = Gradients(self.accelerator, self.model), RowOrder(0, 64, 4)
        ids = torch.randint(0, 256, (4, 257))
        self.batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:].contiguous()}
        self.progress = Progress()

    def config_of(self, *overrides: str) -> Any:
        from acc_lm.config.loading import load_config

        return load_config(self.folder / "recipe.yaml", [f"output_dir={self.folder / 'run'}", *overrides])

    def saver(self, name: str, override: str) -> Saver:
        from acc_lm.checkpointing.format import Found
        from acc_lm.checkpointing.saving import Saver

        return Saver(self.accelerator, self.folder / name, self.config_of(override), "", Found(None))

    def step(self) -> None:
        from acc_lm.training.step import train_step

        number = self.progress.step + 1
        train_step(
            self.accelerator,
            self.model,
            self.optimizer,
            [self.batch],
            step=number,
            seed=0,
            num_targets=1024,
            max_grad_norm=1.0,
            gradients=self.gradients,
        )
        self.progress = self.progress.advance(self.order.rows_at(number), 1024)

    def save(self, saver: Saver) -> None:
        saver.save(self.model, self.optimizer, self.progress, None)

    def tensors(self) -> list[Any]:
        """All weights and their moments."""
        return [
            state
            for p in self.model.parameters()
            for state in (p.detach(), *(self.optimizer.state[p][kind] for kind in ("exp_avg", "exp_avg_sq")))
        ]

    def write_raw(self) -> None:
        """Write the same bytes into one file, without checksum, manifest or rename."""
        with (self.folder / "raw").open("wb", buffering=0) as file:
            for tensor in self.tensors():
                file.write(tensor.contiguous().view(-1).numpy().data)
            os.fsync(file.fileno())

    def timed(self, work: Callable[[], None]) -> float:
        (self.folder / "raw").unlink(missing_ok=True)
        os.sync()
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def window(self, saver: Saver | None) -> float:
        """Seconds of `STEPS` steps; the saver, if any, saves after the first of them."""
        os.sync()
        began = time.perf_counter()
        for number in range(STEPS):
            self.step()
            if number == 0 and saver is not None:
                self.save(saver)
        seconds = time.perf_counter() - began
        if saver is not None:
            saver.wait()
        return seconds


def measure(rounds: int = ROUNDS, windows: int = WINDOWS, hidden_size: int = 384) -> Measured:
    folder = Path(tempfile.mkdtemp(prefix="acc-lm-saving-"))
    trial = Trial(folder, hidden_size)
    trial.step()
    front, background = (
        trial.saver("front", "checkpoint.keep_last=2"),
        trial.saver("background", "checkpoint.asynchronous=true"),
    )
    size = sum(tensor.numel() * tensor.element_size() for tensor in trial.tensors())
    times: dict[str, list[float]] = {"raw": [], "save": []}
    for _ in range(rounds):
        trial.step()  # a new step number, so a new folder
        times["raw"].append(trial.timed(trial.write_raw))
        times["save"].append(trial.timed(lambda: trial.save(front)))
    contenders: dict[str, Saver | None] = {"no save": None, SYNCHRONOUS: front, BACKGROUND: background}
    took: dict[str, list[float]] = {name: [] for name in contenders}
    held: dict[str, float] = {}
    if windows:
        for saver in contenders.values():
            trial.window(saver)
        held = {SYNCHRONOUS: front.seconds_held, BACKGROUND: background.seconds_held}
    for _ in range(windows):
        for name, saver in contenders.items():
            took[name].append(trial.window(saver))
    stood = {SYNCHRONOUS: front.seconds_held, BACKGROUND: background.seconds_held}
    shutil.rmtree(folder)
    return Measured(size, times, took, {name: stood[name] - before for name, before in held.items()})


def costs(rounds: int = ROUNDS, hidden_size: int = 384) -> dict[str, dict[str, Any]]:
    """CPU seconds and bytes of a save by ours and by other libraries, which the speed of the disk does not decide."""
    import safetensors.torch
    import torch
    import torch.distributed.checkpoint as dcp

    folder = Path(tempfile.mkdtemp(prefix="acc-lm-saving-"))
    trial = Trial(folder, hidden_size)
    trial.step()
    saver = trial.saver("ours", "checkpoint.keep_last=2")

    def states() -> dict[str, Any]:
        return {"model": trial.model.state_dict(), "optimizer": trial.optimizer.state_dict()}

    def flat() -> dict[str, Any]:
        return {str(number): tensor.contiguous() for number, tensor in enumerate(trial.tensors())}

    works: dict[str, Callable[[Path], object]] = {
        "ours": lambda place: trial.save(saver),
        "torch.save": lambda place: torch.save(states(), place / "state.pt"),
        "safetensors": lambda place: safetensors.torch.save_file(flat(), place / "state.safetensors"),
        "torch.distributed.checkpoint": lambda place: dcp.save(states(), checkpoint_id=place, no_dist=True),
    }
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in works}
    for number in range(rounds):
        trial.step()
        for name, work in works.items():
            place = folder / f"{name}-{number}"
            place.mkdir()
            began = time.process_time()
            work(place)
            found[name]["seconds"].append(time.process_time() - began)
            written = saver.newest if name == "ours" else place
            assert written is not None
            found[name]["bytes"] = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
            shutil.rmtree(place)
    shutil.rmtree(folder)
    return found


def main() -> None:
    from acc_lm.studies.tables import machine_line, replace_block

    measured = measure()
    size, times, took = measured.num_bytes, measured.times, measured.windows
    speed = {name: size / 2**20 / statistics.median(values) for name, values in times.items()}
    ratio = statistics.median(r / s for r, s in zip(times["raw"], times["save"], strict=True))
    plain = statistics.median(took["no save"])
    lines = [
        "`python benchmarks/saving.py docs/promises/reliability.md`:",
        "",
        machine_line(),
        "",
        f"A checkpoint of {size / 2**20:.0f} MiB (weights and moments), one process, one thread; medians of {ROUNDS} rounds.",
        "",
        "| | MiB/s | of a raw write |",
        "|---|---|---|",
        f"| raw write and fsync of the same bytes | {speed['raw']:.0f} | 1 |",
        f"| checkpoint: write, fsync, checksum, manifest, rename | {speed['save']:.0f} | {ratio:.2f} |",
        "",
        f"{STEPS} steps with one save among them, {WINDOWS} windows of each kind in turn:",
        "",
        "| save | seconds | more than without a save | a save blocks training for |",
        "|---|---|---|---|",
        f"| none | {plain:.2f} | | |",
    ]
    for name, stood in measured.held.items():
        share = statistics.median(v / p for v, p in zip(took[name], took["no save"], strict=True)) - 1
        lines.append(f"| {name} | {statistics.median(took[name]):.2f} | {share:+.1%} | {stood / WINDOWS:.3f} s |")
    print("\n".join(lines))
    if len(sys.argv) > 1:
        replace_block(Path(sys.argv[1]), "saving", "\n".join(lines))


if __name__ == "__main__":
    main()
