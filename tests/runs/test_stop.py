"""Requests to stop, of every kind and at every point: nothing is lost, no process is left, and the same command resumes."""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import ROOT, Finished, Launch, run_training, start_training
from test_resume import assert_equal_runs, wait_for


def wrap(place: str, before: Callable[[], None], call: int = 1) -> None:
    """Let `before` run at the n-th call of `module.function`, in this process."""
    module, _, name = place.rpartition(".")
    room = importlib.import_module(module)
    original, calls = getattr(room, name), iter(range(1, 10**6))

    @functools.wraps(original)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == call:
            before()
        return original(*arguments, **keywords)

    setattr(room, name, wrapped)


def train_with(arguments: list[str], prepare: Callable[[], None], num_processes: int = 1) -> Finished:
    def run() -> int:
        import train

        prepare()
        return train.main(arguments)

    return Launch(run, num_processes).wait(120)


def tell(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # a signal is handled between two instructions of Python


BEFORE_THE_LOOP = {
    "looking at the model": "acc_lm.modeling.checks.check_model",
    "reading text": "acc_lm.data.one_source.open_corpus",
    "training the tokenizer": "acc_lm.data.one_source.make_tokenizer",
    "drawing weights": "acc_lm.training.run.build_model",
    "preparing": "acc_lm.runtime.prepare",
}


@pytest.mark.parametrize("phase", BEFORE_THE_LOOP)
def test_before_the_loop_a_signal_ends_the_run_at_once(phase: str, tiny: list[str], tmp_path: Path) -> None:
    fresh = [*tiny, f"data.cache_dir={tmp_path / 'cache'}"]
    finished = train_with(fresh, lambda: wrap(BEFORE_THE_LOOP[phase], tell))
    assert finished.codes == [75], finished.output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("preempted", 75)
    assert "stopped by SIGTERM with nothing new to save; run the same command to resume" in summary["reason"]
    assert "Traceback" not in finished.output
    run_training(fresh)
    assert json.loads((tmp_path / "run/summary.json").read_text())["step"] == 6


def test_a_signal_while_an_error_is_written_down_truncates_nothing(tiny: list[str], tmp_path: Path) -> None:
    """A launcher that has seen another process end sends one at that moment."""

    def prepare() -> None:
        from acc_lm.cli import train

        write = train.write_failure

        def reported(*arguments: Any) -> None:
            tell()
            write(*arguments)

        train.write_failure = reported

        def broken(*arguments: Any, **keywords: Any) -> None:
            raise RuntimeError("broken")

        import acc_lm.training

        acc_lm.training.train_step = broken  # type: ignore[assignment]

    finished = train_with(tiny, prepare, 1)
    assert finished.codes == [1], finished.output
    assert json.loads((tmp_path / "run/summary.json").read_text())["reason"] == "RuntimeError: broken"


def test_a_recipe_is_refused_in_a_thread_too(tmp_path: Path) -> None:
    """No handler may be set there, and none was changed."""
    import threading

    import train

    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(train.main(["--config", str(tmp_path / "none.yaml")])))
    thread.start()
    thread.join()
    assert codes == [2]


IN_THE_LOOP = {
    "the first step": ("acc_lm.training.train_step", 1, 1),
    "a later step": ("acc_lm.training.train_step", 4, 4),
    "a log": ("acc_lm.run_files.metrics_file.append", 2, 2),
    "a save": ("acc_lm.checkpointing.writing._write_mine", 1, 2),
    "a commit": ("acc_lm.checkpointing.writing._commit", 1, 2),
    "a rotation": ("acc_lm.checkpointing.writing.rotate", 2, 4),
}
IN_MAKE_TEST = {("a later step", 2), ("a save", 1), ("a save", 2), ("a commit", 2), ("a rotation", 2)}


@pytest.fixture(scope="module")
def whole_runs(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The uninterrupted run, by number of processes."""

    @functools.cache
    def whole(num_processes: int) -> Path:
        run = tmp_path_factory.mktemp("whole") / "run"
        run_training(["--config", str(tiny_recipe), f"output_dir={run}"], num_processes)
        return run

    return whole


@pytest.mark.parametrize(
    ("phase", "num_processes"),
    [
        pytest.param(phase, count, marks=[] if (phase, count) in IN_MAKE_TEST else [pytest.mark.slow])
        for phase in IN_THE_LOOP
        for count in (1, 2)
    ],
)
def test_in_the_loop_a_signal_to_one_process_ends_all_after_the_step(
    phase: str, num_processes: int, tiny: list[str], whole_runs: Callable[[int], Path], tmp_path: Path
) -> None:
    place, call, step = IN_THE_LOOP[phase]

    def prepare() -> None:
        only_main = place.endswith(("append", "_commit", "rotate"))
        if os.environ.get("RANK", "0") == ("0" if only_main else str(num_processes - 1)):
            wrap(place, lambda: (tell(), tell()), call)  # sent twice, which changes nothing

    finished = train_with(tiny, prepare, num_processes)
    assert finished.codes == [75] * num_processes, finished.outputs
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    # A signal that arrives while a step is being saved is seen after the next one.
    assert summary["step"] in (step, step + 1)
    assert summary["reason"] == "SIGTERM"
    assert Path(summary["last_checkpoint"]).name == f"step-{summary['step']:08d}"
    assert not list((tmp_path / "run/checkpoints").glob("tmp-*"))
    run_training(tiny, num_processes)
    assert_equal_runs(whole_runs(num_processes), tmp_path / "run", 6)


@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_an_evaluation_is_interrupted_and_made_up_for(step: int, tiny: list[str], tmp_path: Path) -> None:
    """The last step's evaluation too: the model is exported by the resumed run."""
    many = [*tiny, "training.micro_batch_size=1", "data.eval_fraction=0.5"]

    def prepare() -> None:
        import acc_lm.evaluation.held_out

        acc_lm.evaluation.held_out.PAUSE_BATCHES = 1
        if os.environ.get("RANK") == "1":
            wrap("acc_lm.training.train_step", lambda: wrap("acc_lm.evaluation.held_out.to_device", tell, 2), step)

    def count_evaluations() -> int:
        return sum("eval/loss" in line for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())

    finished = train_with(many, prepare, 2)
    assert finished.codes == [75, 75], finished.outputs
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("preempted", step)
    assert count_evaluations() == step // 3 - 1
    assert not (tmp_path / "run/final").exists()
    run_training(many, 2)
    run_training([*many, f"output_dir={tmp_path / 'whole'}"], 2)
    assert_equal_runs(tmp_path / "whole", tmp_path / "run", 6)


def test_a_signal_during_the_export_leaves_no_partial_model(tiny: list[str], tmp_path: Path) -> None:
    finished = train_with(tiny, lambda: wrap("acc_lm.export.export.whole_weights", tell))
    assert finished.codes == [75], finished.output
    assert not (tmp_path / "run/final").exists()
    finished = run_training(tiny)
    assert "already complete: step 6 of 6" in finished.output
    assert (tmp_path / "run/final/model.safetensors").is_file()


def wait_for_a_step(run: Path, seconds: float = 60) -> None:
    wait_for(run / "metrics.jsonl", seconds)
    end = time.monotonic() + seconds
    while "train/loss" not in (run / "metrics.jsonl").read_text():
        assert time.monotonic() < end, "no step was logged"
        time.sleep(0.01)


LONG = ["training.max_steps=100000", "training.eval_every=null", "checkpoint.every=null", "checkpoint.keep_best=0"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_file_save_requests_a_checkpoint_and_stop_requests_the_end(
    num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launch = start_training([*tiny, *LONG], num_processes)
    wait_for_a_step(run)
    (run / "SAVE").touch()
    end = time.monotonic() + 60
    while (run / "SAVE").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert (run / "checkpoints/latest/manifest.json").is_file()
    (run / "STOP").touch()
    finished = launch.wait(60)
    assert finished.codes == [75] * num_processes, finished.outputs
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("preempted", "the file STOP")
    assert not (run / "STOP").exists(), "the next start would stop again"
    assert int(Path(os.readlink(run / "checkpoints/latest")).name.removeprefix("step-")) == summary["step"]


def test_files_from_before_the_run_request_nothing(tiny: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("STOP", "SAVE"):
        (run / name).touch()
        os.utime(run / name, (1, 1))
    finished = run_training(tiny)
    assert f"removed {run / 'STOP'}, which was there before the run started" in finished.output
    assert not (run / "STOP").exists()
    assert not (run / "SAVE").exists()


def test_a_time_limit_saves_and_stops(tiny: list[str], tmp_path: Path) -> None:
    started = time.monotonic()
    finished = run_training([*tiny, *LONG, "training.max_minutes=0.05"], 2, expect=75)
    assert time.monotonic() - started < 30
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["reason"] == "training.max_minutes"
    assert "stopped by training.max_minutes after step" in finished.output
    assert (Path(summary["last_checkpoint"]) / "manifest.json").is_file()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGUSR1, signal.SIGKILL))]
)
def test_when_the_launcher_ends_no_process_is_left_and_the_step_is_saved(
    number: int, tiny: list[str], tmp_path: Path
) -> None:
    """On SIGUSR1 and SIGKILL it dies without signalling its processes, which Linux then does."""
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml"),
        "--main_process_port", "0", str(ROOT / "train.py"), *tiny, *LONG,
    ]  # fmt: skip
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        wait_for_a_step(run, 120)
        workers = psutil.Process(launcher.pid).children()
        assert len(workers) == 2
        launcher.send_signal(number)
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
        output = launcher.communicate()[0]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["reason"]) == ("preempted", 75, "SIGTERM"), output
    assert (Path(summary["last_checkpoint"]) / "manifest.json").is_file()


def test_an_ordinary_end_leaves_no_trace(tiny: list[str], tmp_path: Path) -> None:
    def run() -> int:
        import train

        before = [
            signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
        ]
        code = train.main(tiny)
        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)]
        return code or int(before != after)

    assert Launch(run).wait().codes == [0]
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(("tmp-", "."))]


def stop_a_launch(recipe: Path, run: Path, how: str, whom: str) -> float:
    """Seconds from the request to stop until the launcher and both of its processes are gone; the step must be saved.

    Args:
        how: a signal's name, STOP (the file) or limit (`training.max_minutes`).
        whom: launcher or process; only a signal goes to one of them.
    """
    limit = 0.4  # minutes since a process started
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml"),
        "--main_process_port", "0", str(ROOT / "train.py"), "--config", str(recipe), f"output_dir={run}", *LONG,
        "training.micro_batch_size=6", *([f"training.max_minutes={limit}"] if how == "limit" else []),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        wait_for_a_step(run, 120)
        workers = psutil.Process(launcher.pid).children()
        assert len(workers) == 2
        asked = time.monotonic()
        if how == "limit":
            first = min(worker.create_time() for worker in workers)
            asked += first + 60 * limit - time.time()
        elif how == "STOP":
            (run / "STOP").touch()
        else:
            (psutil.Process(launcher.pid) if whom == "launcher" else workers[1]).send_signal(signal.Signals[how])
        output = launcher.communicate(timeout=120)[0]
        _, alive = psutil.wait_procs(workers, timeout=60)
        seconds = time.monotonic() - asked
    assert not alive
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("preempted", 75), output
    assert Path(summary["last_checkpoint"]).name == f"step-{summary['step']:08d}"
    assert (Path(summary["last_checkpoint"]) / "manifest.json").is_file()
    return seconds


STOPS = [
    *((number.name, whom) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2) for whom in ("launcher", "process")),
    ("STOP", "launcher"), ("limit", "launcher"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("how", "whom"), STOPS)
def test_a_launch_is_gone_seconds_after_a_request_to_stop(
    how: str, whom: str, tiny_recipe: Path, tmp_path: Path
) -> None:
    """A step and a save of this recipe take milliseconds."""
    seconds = stop_a_launch(tiny_recipe, tmp_path / "run", how, whom)
    print(f"{how} to the {whom}: {seconds:.1f} s")
    assert seconds < 10, "5 s are promised, and kept where nothing else runs; the launcher takes most of them"


def test_a_process_stuck_in_a_library_leaves_when_its_launcher_is_gone(tmp_path: Path) -> None:
    """Python's own handlers wait until the library returns, which may be never; here it is a store that no process fills."""
    reported, said = tmp_path / "pid", tmp_path / "said"

    def stuck() -> int:
        from datetime import timedelta

        import torch.distributed as dist

        from acc_lm import stop

        if os.fork():  # the launcher, which goes first
            while not reported.exists():
                time.sleep(0.01)
            time.sleep(0.2)
            return 0
        stop.STUCK_SECONDS = 1.0
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)  # the output of a launch ends with its launcher
        with stop.StopRequest(tmp_path).listening():
            store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
            reported.write_text(str(os.getpid()))
            store.wait(["never"], timedelta(seconds=100))
        return 0

    assert Launch(stuck).wait().code == 0
    process = psutil.Process(int(reported.read_text()))
    process.send_signal(signal.SIGTERM)
    psutil.wait_procs([process], timeout=20)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert "stuck in a library, and the launcher is gone: exiting" in said.read_text()


def test_a_time_limit_counts_from_the_start_of_the_process(tmp_path: Path) -> None:
    """Imports before the clock is first read count too."""

    def run() -> int:
        time.sleep(1.5)
        from acc_lm.stop import StopRequest

        request = StopRequest(tmp_path, max_minutes=1.2 / 60)
        return 75 if request.agreed() == "training.max_minutes" else 1

    assert Launch(run).wait().code == 75


def test_a_stop_during_the_export_is_one_on_every_process(tiny: list[str], tmp_path: Path) -> None:
    """The launcher's signal ends the other process while the main one, which writes, has yet to handle its own."""

    def prepare() -> None:
        is_main = os.environ["RANK"] == "0"
        wrap("acc_lm.export.export.model_card" if is_main else "acc_lm.export.export.on_main", tell)

    stopped = train_with([*tiny, "training.micro_batch_size=6"], prepare, 2)
    assert stopped.codes == [75, 75], stopped.outputs
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "preempted"
