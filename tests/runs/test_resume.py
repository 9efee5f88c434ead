"""A resumed run is the uninterrupted run: weights, optimizer, metrics and ledger, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from backends import STRATEGY
from processes import ROOT, Finished, Launch, launcher_environment, run_training, start_training

STEPS = 10
DROPOUT_MODEL = (
    "model.config={model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 128}"  # dropout 0.1 by default
)
TIMED = (
    "train/tokens_per_second", "train/seconds_per_step", "train/seconds_data", "train/seconds_waiting", "train/seconds_compute", "train/seconds_communication",
    "train/memory_gb", "epoch/seconds",
)  # fmt: skip


@pytest.fixture(scope="module")
def dropout_recipe(tiny_recipe: Path) -> list[str]:
    """10 steps of 12 rows over about 97 rows: an epoch ends inside step 9."""
    return with_dropout(tiny_recipe)


def with_dropout(recipe: Path) -> list[str]:
    return [
        "--config", str(recipe), DROPOUT_MODEL, "data.sequence_length=128", f"training.max_steps={STEPS}",
        "training.micro_batch_size=2", "training.log_every=1", "training.eval_every=5", "checkpoint.every=1", "checkpoint.keep_last=null",
    ]  # fmt: skip


def metrics_of(run: Path) -> list[dict[str, float]]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key not in TIMED} for entry in entries]


def tensors_of(run: Path, step: int) -> dict[str, tuple[dict[str, str], dict[str, bytes]]]:
    """By file: its description of its pieces, and each of them (weights and optimizer state).

    The files themselves may differ: safetensors writes its metadata in any order.
    """
    from safetensors import safe_open

    found = {}
    for path in sorted((run / f"checkpoints/step-{step:08d}").glob("tensors-*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key).numpy().tobytes() for key in file.keys()}  # noqa: SIM118 - no mapping
            found[path.name] = (file.metadata(), tensors)
    assert found
    return found


def different(
    one: dict[str, tuple[dict[str, str], dict[str, bytes]]], other: dict[str, tuple[dict[str, str], dict[str, bytes]]]
) -> list[str]:
    """Names of what differs, more readable in a report than bytes."""
    assert one.keys() == other.keys()
    assert all(one[file][0] == other[file][0] and one[file][1].keys() == other[file][1].keys() for file in one)
    return [key for file in one for key, tensor in one[file][1].items() if tensor != other[file][1][key]]


def assert_equal_runs(run: Path, other: Path, step: int = STEPS) -> None:
    assert different(tensors_of(run, step), tensors_of(other, step)) == [], "weights and optimizer state"
    assert (run / "final/model.safetensors").read_bytes() == (other / "final/model.safetensors").read_bytes()
    assert_equal_logs(run, other)


def assert_equal_logs(run: Path, other: Path) -> None:
    assert metrics_of(run) == metrics_of(other)
    ledgers = [json.loads((folder / "summary.json").read_text())["ledger"] for folder in (run, other)]
    assert ledgers[0] == ledgers[1]


def resume_from(
    whole: Path,
    step: int,
    target: Path,
    arguments: list[str],
    num_processes: int,
    environment: dict[str, str] | None = None,
) -> Finished:
    """Resume as if the complete run had been killed right after its checkpoint of `step`, in another place."""
    name = f"step-{step:08d}"
    shutil.copytree(whole / "checkpoints" / name, target / "checkpoints" / name)
    shutil.copy(whole / "metrics.jsonl", target / "metrics.jsonl")
    return run_training([*arguments, f"output_dir={target}"], num_processes, environment)


@pytest.mark.parametrize("num_processes", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted(num_processes: int, dropout_recipe: list[str], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    finished = run_training([*dropout_recipe, f"output_dir={whole}"], num_processes)
    environment = json.loads((whole / "environment.json").read_text())
    assert environment["num_processes"] == num_processes
    assert environment["strategy"] == ("ddp" if num_processes > 1 else "single")
    rows = int(finished.output.split("rows          ")[1].split(" ")[0])
    assert 8 * 12 < rows < 9 * 12, "step 9 must span two epochs"
    # After the first step, in the middle of an epoch, before and after the step that spans two.
    for step in (1, 4, 8, 9):
        resumed = resume_from(whole, step, tmp_path / f"from-{step}", dropout_recipe, num_processes)
        assert f"resumed from {tmp_path}/from-{step}/checkpoints/step-{step:08d} at step {step}" in resumed.output
        assert_equal_runs(whole, tmp_path / f"from-{step}")


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        ("fsdp2", 2),
        *(pytest.param(*other, marks=pytest.mark.slow)
          for other in [("hsdp", 4), ("deepspeed_zero1", 2), ("deepspeed_zero2", 2), ("deepspeed_zero2_offload", 2), ("deepspeed_zero3", 2)]),
    ],
)  # fmt: skip
def test_resumed_equals_uninterrupted_on_every_engine(
    config: str, num_processes: int, dropout_recipe: list[str], tmp_path: Path
) -> None:
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    arguments = [*dropout_recipe, "training.micro_batch_size=3"]
    run_training([*arguments, f"output_dir={tmp_path / 'whole'}"], num_processes, environment)
    found = json.loads((tmp_path / "whole/environment.json").read_text())
    assert (found["strategy"], found["num_processes"]) == (STRATEGY[config][0], num_processes)
    for step in (1, 8):
        resumed = resume_from(
            tmp_path / "whole", step, tmp_path / f"from-{step}", arguments, num_processes, environment
        )
        assert f"at step {step}" in resumed.output
        assert_equal_runs(tmp_path / "whole", tmp_path / f"from-{step}")


def test_resumed_twice_in_a_row_and_with_workers(dropout_recipe: list[str], tmp_path: Path) -> None:
    whole, first, second = tmp_path / "whole", tmp_path / "first", tmp_path / "second"
    run_training([*dropout_recipe, f"output_dir={whole}"])
    resume_from(whole, 3, first, [*dropout_recipe, "data.num_workers=2"], 1)
    assert_equal_runs(whole, first)
    resume_from(first, 6, second, dropout_recipe, 1)
    assert_equal_runs(whole, second)


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(dropout_recipe: list[str], tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_training([*dropout_recipe, f"output_dir={whole}"])
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (whole / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 5, "eval' not in line))
    resume_from(whole, 5, resumed, dropout_recipe, 1)
    (whole / "metrics.jsonl").write_text("".join(lines))
    assert_equal_runs(whole, resumed)


def test_after_the_last_step_there_is_nothing_left_to_do(dropout_recipe: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training([*dropout_recipe, f"output_dir={run}"])
    tensors = run / f"checkpoints/step-{STEPS:08d}/tensors-00000-of-00001.safetensors"
    before = (
        tensors.read_bytes(),
        tensors.stat().st_mtime_ns,
        metrics_of(run),
        (run / "final/model.safetensors").read_bytes(),
    )

    def start() -> int:
        import train

        # Room for no checkpoint, of which none is left to save.
        shutil.disk_usage = lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 0)  # type: ignore
        return train.main([*dropout_recipe, f"output_dir={run}"])

    again = Launch(start).wait(120)
    assert again.codes == [0], again.output
    assert f"already complete: step {STEPS} of {STEPS}" in again.output
    assert before == (
        tensors.read_bytes(),
        tensors.stat().st_mtime_ns,
        metrics_of(run),
        (run / "final/model.safetensors").read_bytes(),
    )
    summary = json.loads((run / "summary.json").read_text())
    assert summary["resumed_from"].endswith(f"step-{STEPS:08d}")
    assert (summary["status"], summary["attempt"]) == ("completed", 2)


def test_a_longer_run_resumes_and_says_so(tiny: list[str], tmp_path: Path) -> None:
    run_training(tiny)
    longer = run_training([*tiny, "training.max_steps=8"])
    assert "resumed from" in longer.output
    assert "the schedule of the new length applies from here on" in longer.output
    assert json.loads((tmp_path / "run/summary.json").read_text())["step"] == 8


@pytest.fixture(scope="module")
def longer(dropout_recipe: list[str]) -> list[str]:
    return [*dropout_recipe, f"training.max_steps={STEPS + 20}", "training.eval_every=10"]


@pytest.fixture(scope="module")
def whole_runs(longer: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The uninterrupted run, by number of processes."""

    @functools.cache
    def whole(num_processes: int) -> Path:
        run = tmp_path_factory.mktemp("whole") / "run"
        run_training([*longer, f"output_dir={run}"], num_processes)
        return run

    return whole


IN_MAKE_TEST = {(1, signal.SIGINT), (2, signal.SIGUSR1)}
"""Each number of processes once, and two of the signals; the other pairs are slow."""


@pytest.mark.parametrize(
    ("num_processes", "number"),
    [
        pytest.param(
            count,
            number,
            id=f"{count}-{number.name}",
            marks=[] if (count, number) in IN_MAKE_TEST else [pytest.mark.slow],
        )
        for count in (1, 2)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    ],
)
def test_a_signal_finishes_the_step_saves_and_exits_75(
    num_processes: int,
    number: signal.Signals,
    longer: list[str],
    whole_runs: Callable[[int], Path],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    launch = start_training([*longer, f"output_dir={run}"], num_processes)
    wait_for(run / "checkpoints/step-00000005/manifest.json")
    os.kill(launch.pids[-1], number)  # one process gets the signal, all agree
    finished = launch.wait()
    assert finished.codes == [75] * num_processes, finished.outputs
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["reason"]) == ("preempted", 75, number.name)
    stopped = summary["step"]
    assert 5 <= stopped < STEPS + 20
    assert Path(summary["last_checkpoint"]).name == f"step-{stopped:08d}"
    assert f"stopped by {number.name} after step {stopped}" in finished.output
    # The same command resumes, and ends like an uninterrupted run.
    run_training([*longer, f"output_dir={run}"], num_processes)
    assert_equal_runs(whole_runs(num_processes), run, STEPS + 20)


def test_ctrl_c_on_a_terminal_reaches_workers_too_and_still_saves(dropout_recipe: list[str], tmp_path: Path) -> None:
    import psutil

    run = tmp_path / "run"
    arguments = [
        *dropout_recipe,
        "training.max_steps=4000",
        "training.eval_every=null",
        "data.num_workers=2",
        "checkpoint.keep_last=2",
    ]
    launch = start_training([*arguments, f"output_dir={run}"])
    wait_for(run / "checkpoints/step-00000003/manifest.json")
    trainer = psutil.Process(launch.pids[0])
    workers = trainer.children()
    assert len(workers) == 2
    for process in (*workers, trainer):
        process.send_signal(signal.SIGINT)
    finished = launch.wait()
    assert finished.codes == [75], finished.output
    assert finished.output.count("SIGINT: finishing the step") == 1


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} never appeared"
        time.sleep(0.002)


def test_a_second_ctrl_c_leaves_at_once(tiny: list[str], tmp_path: Path) -> None:
    # One step takes long: the first Ctrl-C waits for it, the second does not.
    slow = [
        *tiny,
        "training.max_steps=100000",
        "training.global_batch_size=4800",
        "training.micro_batch_size=1",
        "data.sequence_length=2",
    ]
    launch = start_training(slow)
    while "output " not in launch.outputs()[0]:  # the start block is the last thing before the loop
        time.sleep(0.01)
    time.sleep(1)
    os.kill(launch.pids[0], signal.SIGINT)
    time.sleep(0.2)
    os.kill(launch.pids[0], signal.SIGINT)  # a launcher's echo of the same key: no second one
    time.sleep(1.2)
    os.kill(launch.pids[0], signal.SIGINT)
    finished = launch.wait()
    assert finished.code == 130, finished.output
    assert "exiting immediately" in finished.output
    assert "SIGINT: finishing the step" in finished.output


@dataclass
class Kills:
    """Results of killing runs at random."""

    kills: int = 0
    in_save: int = 0
    runs: int = 0
    seconds: float = 0.0


def kill_at_random(recipe: list[str], folder: Path, kills: int, seed: int) -> Kills:
    """kill -9 one process at random moments, again and again, until each run has ended like an uninterrupted one."""
    choose, result = random.Random(seed), Kills()
    # More to write than to compute, so that kills meet saves; everything as before otherwise.
    arguments = [
        *recipe, "model.config.n_embd=128", "training.max_steps=25", "training.micro_batch_size=12", "checkpoint.keep_last=2",
        "data.sequence_length=8", "training.eval_every=null", "training.log_every=1",
    ]  # fmt: skip
    whole = folder / "whole"
    began = started = time.monotonic()
    run_training([*arguments, f"output_dir={whole}"])
    duration = time.monotonic() - started
    while result.kills < kills:
        result.runs += 1
        run = folder / f"run-{result.runs}"
        while True:
            launch = start_training([*arguments, f"output_dir={run}"])
            if result.kills < kills:
                seen = killed_at = None
                end = time.monotonic() + choose.uniform(0.15, 0.5) * duration
                aim = (
                    result.kills % 2 == 0
                )  # every other kill waits for the next save that begins after its random moment
                while not killed_at:
                    time.sleep(0.0005)
                    done, status = os.waitpid(launch.pids[0], os.WNOHANG)
                    if done:
                        assert os.waitstatus_to_exitcode(status) == 0, launch.outputs()
                        break
                    seen = bool(list(run.glob("checkpoints/tmp-step-*")))
                    if time.monotonic() > end and (seen or not aim):
                        time.sleep(choose.uniform(0, 0.004))
                        os.kill(launch.pids[0], signal.SIGKILL)
                        os.waitpid(launch.pids[0], 0)
                        killed_at = time.monotonic()
                if not killed_at:
                    break
                result.kills += 1
                result.in_save += bool(list(run.glob("checkpoints/tmp-step-*")))
            else:
                assert launch.wait().code == 0, launch.outputs()
                break
        assert different(tensors_of(run, 25), tensors_of(whole, 25)) == []
        assert metrics_of(run) == metrics_of(whole)
        assert json.loads((run / "summary.json").read_text())["status"] == "completed"
        assert not list(run.rglob("tmp-*"))
        shutil.rmtree(run)
    result.seconds = time.monotonic() - began
    return result


def test_killed_at_random_it_always_resumes_and_ends_the_same(dropout_recipe: list[str], tmp_path: Path) -> None:
    """6 times kill -9, at least 2 of them inside a save; `make chaos` does it a hundred times."""
    result = kill_at_random(dropout_recipe, tmp_path, kills=6, seed=0)
    print(result)
    assert result.in_save >= 2


def kill_launches_at_random(
    recipe: list[str], folder: Path, kills: int, seed: int, config: str = "ddp", model: str = "model.config.n_embd=256"
) -> Kills:
    """The same with two processes under `accelerate launch`: process 0, process 1, the launcher and all of them, in turn."""
    import psutil

    choose, result = random.Random(seed), Kills()
    arguments = [
        *recipe, model, "training.max_steps=60", "training.micro_batch_size=6", "checkpoint.keep_last=2",
        "data.sequence_length=8", "training.eval_every=null", "training.log_every=1",
    ]  # fmt: skip
    file = ROOT / f"accelerate_configs/{config}.yaml"
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file),
        "--main_process_port", "0", str(ROOT / "train.py"),
    ]  # fmt: skip
    began, whole = time.monotonic(), folder / "whole"
    run_training([*arguments, f"output_dir={whole}"], 2, None if config == "ddp" else launcher_environment(file, 2))
    while result.kills < kills:
        result.runs += 1
        run = folder / f"run-{result.runs}"
        while True:
            launcher = subprocess.Popen(
                [*command, *arguments, f"output_dir={run}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            before = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
            while launcher.poll() is None and result.kills < kills:
                log = run / "metrics.jsonl"
                if log.exists() and log.read_text() not in ("", before):  # it is training
                    time.sleep(choose.uniform(0, 0.3))
                    while (
                        result.kills % 2 == 0
                        and launcher.poll() is None
                        and not list(run.glob("checkpoints/tmp-step-*"))
                    ):
                        time.sleep(0.0005)
                    break
                time.sleep(0.002)
            if result.kills >= kills or launcher.poll() is not None:
                assert launcher.wait(300) == 0
                break
            workers = psutil.Process(launcher.pid).children()
            targets = {0: workers[:1], 1: workers[1:2], 2: [launcher], 3: [launcher, *workers]}[result.kills % 4]
            result.in_save += bool(list(run.glob("checkpoints/tmp-step-*")))
            for target in targets:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    target.kill()
            result.kills += 1
            _, alive = psutil.wait_procs(workers, timeout=60)
            assert not alive, "no process may be left"
            launcher.wait(60)
        assert different(tensors_of(run, 60), tensors_of(whole, 60)) == []
        assert metrics_of(run) == metrics_of(whole)
        assert json.loads((run / "summary.json").read_text())["status"] == "completed"
        shutil.rmtree(run)
    result.seconds = time.monotonic() - began
    return result


def test_a_folder_in_the_place_of_the_runs_tokenizer_is_replaced(tiny: list[str], tmp_path: Path) -> None:
    run_training(tiny)
    file = tmp_path / "run/tokenizer/tokenizer.json"
    file.unlink()
    file.mkdir()
    (file / "x").touch()
    run_training([*tiny, "training.max_steps=8", "checkpoint.allow_changed_recipe=true"])
    assert file.is_file()
