"""One run on one, two and three processes in turn, each time on another backend, equals the run of one process alone."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import ROOT, Finished, Launch, launcher_environment, run_training
from test_resume import assert_equal_runs, metrics_of

STEPS, GLOBAL_BATCH = 20, 12


def arguments_of(recipe: Path, run: Path) -> list[str]:
    """20 steps of 12 rows over 97 rows: two epochs and a part, and a micro-batch that divides over 1, 2 and 3 processes."""
    return [
        "--config", str(recipe), f"output_dir={run}", f"training.max_steps={STEPS}", f"training.global_batch_size={GLOBAL_BATCH}",
        "training.micro_batch_size=2", "data.sequence_length=128", "training.log_every=1", "training.eval_every=null",
        "checkpoint.every=1", "checkpoint.keep_best=0",
    ]  # fmt: skip


def note_rows(file: Path, global_batch: int = GLOBAL_BATCH) -> None:
    """Write down which rows this process trains on, step by step: the rows that are read, not those that are planned."""
    import acc_lm.rows.text_rows
    import acc_lm.training

    train_step, getitems = acc_lm.training.train_step, acc_lm.rows.text_rows.Rows.__getitems__
    read: list[int] = []

    def reading(self: acc_lm.rows.text_rows.Rows, rows: list[int]) -> acc_lm.rows.batch.Batch:
        read.extend(int(row) for row in rows)
        return getitems(self, rows)

    def stepping(*arguments: object, **keywords: object) -> object:
        outcome = train_step(*arguments, **keywords)  # type: ignore[arg-type]
        share = global_batch // int(os.environ.get("WORLD_SIZE", "1"))
        warming = read[:-share]
        assert warming == list(range(len(warming))), (
            "the first rows warm up before the first step, and nothing else is read"
        )
        with file.open("a") as lines:
            print(json.dumps([keywords["step"], read[-share:]]), file=lines)
        read.clear()
        return outcome

    acc_lm.rows.text_rows.Rows.__getitems__ = reading  # type: ignore[method-assign]
    acc_lm.training.train_step = stepping  # type: ignore[assignment]


def rows_of(files: list[Path], sequence: list[int]) -> None:
    """Put the rows that the processes of one leg read where the run has them; repeated steps count once."""
    for lines in zip(*(file.read_text().splitlines() for file in files), strict=True):
        parts = [json.loads(line) for line in lines]
        step = parts[0][0]
        assert all(part[0] == step for part in parts)
        rows = [row for part in parts for row in part[1]]
        assert len(rows) == GLOBAL_BATCH
        place = (step - 1) * GLOBAL_BATCH
        assert place <= len(sequence), "a step was left out"
        sequence[place:] = rows


def at_step(step: int, action: Callable[[], object]) -> Callable[[], None]:
    """Let the last process do this in the middle of a step."""

    def prepare() -> None:
        import acc_lm.training

        train_step = acc_lm.training.train_step

        def stepping(*arguments: object, **keywords: object) -> object:
            if (
                keywords["step"] == step
                and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
            ):
                action()
            return train_step(*arguments, **keywords)  # type: ignore[arg-type]

        acc_lm.training.train_step = stepping  # type: ignore[assignment]

    return prepare


def make_stop(run: Path) -> None:
    (run / "STOP").touch()
    time.sleep(0.6)  # it is checked twice a second


Leg = tuple[str, int, list[str], Callable[[], object], int, int]


def legs_of(run: Path) -> list[Leg]:
    """(config, processes, more arguments, what ends it, exit code, step of its last checkpoint)."""
    kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731 - used once
    return [
        ("single", 1, [], at_step(5, kill), -signal.SIGKILL, 4),
        ("ddp", 2, [], at_step(9, lambda: os.kill(os.getpid(), signal.SIGTERM)), 75, 9),
        ("fsdp2", 3, [], at_step(13, lambda: make_stop(run)), 75, 13),
        ("deepspeed_zero2", 2, ["training.max_minutes=0.0001"], lambda: None, 75, 14),
        ("single", 1, [], lambda: None, 0, STEPS),
    ]


def run_leg(leg: Leg, arguments: list[str], notes: Path) -> Finished:
    config, num_processes, more, prepare, code, step = leg
    environment = (
        {} if config == "single" else launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    )

    def run() -> int:
        import train

        prepare()
        note_rows(notes.with_name(f"{notes.name}-{os.environ.get('RANK', '0')}"))
        return train.main([*arguments, *more])

    finished = Launch(run, num_processes, environment).wait(60)
    assert finished.codes == [code] * num_processes, finished.outputs
    newest = max((Path(arguments[2].partition("=")[2]) / "checkpoints").glob("step-*/manifest.json"))
    assert newest.parent.name == f"step-{step:08d}"
    return finished


def go_elastic(recipe: Path, folder: Path) -> tuple[str, float, int]:
    """(processes and backends in turn, largest relative difference of a loss from one process alone, rows of an epoch)."""
    run, whole = folder / "run", folder / "whole"
    reference = run_training(arguments_of(recipe, whole))
    num_rows = int(reference.output.split("rows          ")[1].split(" ")[0])
    assert 2 * num_rows < STEPS * GLOBAL_BATCH < 3 * num_rows
    sequence: list[int] = []
    legs = legs_of(run)
    for number, leg in enumerate(legs):
        notes = folder / f"rows-{number}"
        finished = run_leg(leg, arguments_of(recipe, run), notes)
        if number:
            assert f"at step {legs[number - 1][5]}" in finished.output
        environment = json.loads((run / "environment.json").read_text())
        assert (environment["strategy"], environment["num_processes"]) == leg[:2]
        rows_of([notes.with_name(f"{notes.name}-{rank}") for rank in range(leg[1])], sequence)
    # The rows read, cut into epochs: every row once in each, none twice in the part of one.
    assert len(sequence) == STEPS * GLOBAL_BATCH
    for start in range(0, len(sequence), num_rows):
        epoch = sequence[start : start + num_rows]
        assert len(set(epoch)) == len(epoch)
    assert set(sequence[:num_rows]) == set(range(num_rows))
    ledgers = [json.loads((one / "summary.json").read_text())["ledger"] for one in (run, whole)]
    assert ledgers[0] == ledgers[1]
    worst = 0.0
    for ours, theirs in zip(metrics_of(run), metrics_of(whole), strict=True):
        assert ours["step"] == theirs["step"]
        for name in ("train/loss", "eval/loss"):
            if name in theirs:
                worst = max(worst, abs(ours[name] / theirs[name] - 1))
        if "train/loss" in theirs:
            assert abs(ours["train/learning_rate"] - theirs["train/learning_rate"]) <= 1e-12
            assert (ours["train/epoch"], ours["train/tokens"]) == (theirs["train/epoch"], theirs["train/tokens"])
    return " -> ".join(f"{config} x{count}" for config, count, *_ in legs), worst, num_rows


@pytest.mark.slow
def test_a_run_that_changes_hardware_is_the_run_of_one_process(tiny_recipe: Path, tmp_path: Path) -> None:
    way, worst, num_rows = go_elastic(tiny_recipe, tmp_path)
    print(f"{way}: losses within {worst:.0e}, {num_rows} rows once per epoch")
    assert worst < 1e-5


def test_a_changed_global_batch_continues_at_the_same_row(tiny_recipe: Path, tmp_path: Path) -> None:
    """12 rows a step, then 18, then 12 again on two processes: every row once per epoch, the rates those of the position.

    Killed during the steps of 18, it ends bit for bit like the uninterrupted run.
    """
    run, whole = tmp_path / "run", tmp_path / "whole"
    sequence: list[int] = []

    def leg(size: int, epochs: int, killed_at: int = 0, num_processes: int = 1, folder: Path = run) -> str:
        arguments = [
            *arguments_of(tiny_recipe, folder), "training.max_steps=null", f"training.num_epochs={epochs}", "training.micro_batch_size=6",
            f"training.global_batch_size={size}", "checkpoint.allow_changed_recipe=true", "checkpoint.keep_last=null",
        ]  # fmt: skip
        notes = [tmp_path / f"{folder.name}-{size}-{epochs}-{killed_at}-{rank}" for rank in range(num_processes)]

        def train_leg() -> int:
            import train

            at_step(killed_at, lambda: os.kill(os.getpid(), signal.SIGKILL))()
            note_rows(notes[int(os.environ.get("RANK", "0"))], size)
            return train.main(arguments)

        finished = Launch(train_leg, num_processes).wait(60)
        assert finished.codes == [-signal.SIGKILL if killed_at else 0] * num_processes, finished.outputs
        if folder == run:
            for lines in zip(*(file.read_text().splitlines() for file in notes), strict=True):
                sequence.extend(row for line in lines for row in json.loads(line)[1])
        return finished.output

    leg(12, 2, killed_at=6)
    shutil.copytree(run, whole, symlinks=True)
    leg(18, 2, folder=whole)
    first = leg(18, 2, killed_at=9)
    assert "the global batch was 12 rows, is 18: the run resumes after the 60 rows that it has seen" in first
    again = leg(18, 2)
    assert "at step 8" in again
    assert "the global batch was" not in again
    assert_equal_runs(whole, run, 5 + 8)
    assert "the global batch was 18 rows, is 12: the run resumes after the 204 rows" in leg(12, 3, num_processes=2)

    num_rows = 97
    assert json.loads((run / "summary.json").read_text())["samples_seen"] == len(sequence) == 60 + 8 * 18 + 8 * 12
    for epoch in range(3):
        assert sorted(sequence[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    rates = {entry["step"]: entry["train/learning_rate"] for entry in metrics_of(run) if "train/loss" in entry}
    assert list(rates) == list(range(1, 22))
    assert all(abs(rates[step] - rate_at((step - 1) * 12, 17 * 12, 12)) < 1e-12 for step in range(1, 6))
    assert all(abs(rates[step] - rate_at(60 + (step - 6) * 18, 60 + 8 * 18, 18)) < 1e-12 for step in range(6, 14))
    assert all(abs(rates[step] - rate_at(204 + (step - 14) * 12, 300, 12)) < 1e-12 for step in range(14, 22))


def rate_at(place: int, length: int, size: int) -> float:
    """The cosine of the tiny recipe over rows: 2 steps of warm-up, then down to 0 where the run ends."""
    warm_up = 2 * size
    if place < warm_up:
        return 1e-3 * place / warm_up
    return 0.5e-3 * (1 + math.cos(math.pi * (place - warm_up) / (length - warm_up)))
