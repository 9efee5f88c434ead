"""A process that dies, hangs, or runs something else: a bounded wait, and one line that says which and where."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from processes import ROOT, Launch, launcher_environment
from test_stop import LONG, wait_for_a_step, wrap

from acc_lm import errors


def start(tiny: list[str], num_processes: int, sabotage: object, config: str = "ddp") -> Launch:
    def run() -> int:
        import train

        sabotage(int(os.environ.get("RANK", "0")))  # type: ignore[operator]
        return train.main(tiny)

    return Launch(run, num_processes, launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes))


@pytest.mark.parametrize(
    ("victim", "config"),
    [
        (1, "ddp"), (0, "fsdp2"), (1, "deepspeed_zero2"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in [(0, "ddp"), (1, "fsdp2"), (0, "deepspeed_zero2"), (0, "ddp_sequence"), (1, "ddp_sequence")]),
    ],
)  # fmt: skip
def test_a_process_that_dies_is_named_with_the_step(config: str, victim: int, tiny: list[str], tmp_path: Path) -> None:
    def sabotage(rank: int) -> None:
        if rank == victim:
            wrap("acc_lm.training.train_step", lambda: os.kill(os.getpid(), signal.SIGKILL), 4)

    before = {
        "status": "preempted",
        "exit_code": 75,
        "attempt": 1,
        "step": 1,
        "last_checkpoint": "step-00000001",
        "resumed_from": "none",
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").write_text(json.dumps(before))
    started = time.monotonic()
    finished = start(tiny, 2, sabotage, config).wait(60)
    assert time.monotonic() - started < 40
    assert finished.codes[victim] == -signal.SIGKILL
    assert finished.codes[1 - victim] == 7, finished.outputs
    (line,) = [line for line in finished.outputs[1 - victim].splitlines() if line.startswith("error: ")]
    # The cause of death is known until its parent has asked.
    assert re.search(
        rf"got: process {victim} died( \(SIGKILL\))?, while process {1 - victim} was in step 4; the last", line
    )
    assert f"the last checkpoint is {tmp_path}/run/checkpoints/step-00000003; run the same command to resume" in line
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("worker_lost", 7)
    # The position of the run now, nothing from the previous attempt.
    assert (summary["step"], summary["last_checkpoint"]) == (3, f"{tmp_path}/run/checkpoints/step-00000003")
    assert "resumed_from" not in summary


@pytest.mark.parametrize("config", ["ddp", pytest.param("ddp_sequence", marks=pytest.mark.slow)])
def test_a_process_that_hangs_is_named_after_the_timeout(config: str, tiny: list[str], tmp_path: Path) -> None:
    def sabotage(rank: int) -> None:
        if rank == 1:
            wrap("acc_lm.training.train_step", lambda: os.kill(os.getpid(), signal.SIGSTOP), 4)

    hasty = [*tiny, "distributed.timeout_seconds=4", "distributed.step_timeout_seconds=1"]
    started = time.monotonic()
    launch = start(hasty, 2, sabotage, config)
    while not (tmp_path / "run/summary.json").exists():
        time.sleep(0.1)
    os.kill(launch.pids[1], signal.SIGKILL)
    finished = launch.wait(60)
    assert time.monotonic() - started < 4 + 35
    assert finished.codes[0] == 7, finished.outputs
    assert "got: process 1 is stopped (SIGSTOP), while process 0 was in step 4" in finished.errors[0]
    assert "warning: process 0 has been in step 4 for 1 s, here:" in finished.output
    assert ("in train_step" if config == "ddp" else "in all_to_all_single") in finished.output


@pytest.mark.slow
def test_reading_and_writing_a_full_model_may_take_longer_than_the_timeout(tiny: list[str], tmp_path: Path) -> None:
    """The main process does it alone, while the others wait for it."""
    places = (
        "acc_lm.checkpointing.format._find",
        "acc_lm.modeling.build.make_ready",
        "acc_lm.export.export.model_card",
    )

    def sabotage(rank: int) -> None:
        for place in places if rank == 0 else ():
            wrap(place, partial(time.sleep, 6))

    hasty = [*tiny, "distributed.timeout_seconds=4", "checkpoint.verify=full"]
    finished = start(hasty, 2, sabotage, "fsdp2").wait(90)
    assert finished.codes == [0, 0], finished.outputs
    assert json.loads((tmp_path / "run/environment.json").read_text())["strategy"] == "fsdp2"


# --- where collectives do not raise, as under NCCL -----------------------------------------------------------------


def stand_still() -> None:
    """A collective that waits for a process forever, without reporting it."""
    from acc_lm.runtime.monitoring import peers

    peers.end_of_work = lambda device: SimpleNamespace(query=lambda: False)  # nor does the device make progress
    while True:
        time.sleep(0.05)


def without_raising(device_works: bool = True) -> None:
    from acc_lm.runtime.monitoring import peers

    peers.collectives_raise = lambda: False
    peers.LOOK_SECONDS, peers.WATCH_SECONDS, peers.BEAT_SECONDS = 0.5, 0.1, 0.2
    peers.end_of_work = lambda device: SimpleNamespace(query=lambda: device_works)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_that_dies_is_named_where_collectives_do_not_raise(
    victim: int, tiny: list[str], tmp_path: Path
) -> None:
    def sabotage(rank: int) -> None:
        without_raising()
        die = partial(os.kill, os.getpid(), signal.SIGKILL)
        wrap("acc_lm.training.train_step", die if rank == victim else stand_still, 4)

    launch = start(tiny, 2, sabotage)
    finished = launch.wait(60)
    assert finished.codes[victim] == -signal.SIGKILL
    assert finished.codes[1 - victim] == 7, finished.outputs
    (line,) = [line for line in finished.outputs[1 - victim].splitlines() if line.startswith("error: ")]
    assert re.search(
        rf"got: process {victim} died( \(SIGKILL\))?, while process {1 - victim} was in step 4; the last", line
    )
    assert f"the last checkpoint is {tmp_path}/run/checkpoints/step-00000003; run the same command to resume" in line
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["rank"]) == ("worker_lost", 7, 1 - victim)


def test_a_device_that_makes_no_progress_ends_the_run_after_the_timeout(tiny: list[str], tmp_path: Path) -> None:
    """One process hangs on its host, so the collectives that the other has requested are never done."""

    def sabotage(rank: int) -> None:
        without_raising()
        wrap("acc_lm.training.train_step", stand_still if rank == 0 else partial(time.sleep, 3600), 4)

    started = time.monotonic()
    finished = start([*tiny, "distributed.timeout_seconds=3"], 2, sabotage).wait(60)
    assert time.monotonic() - started < 3 + 15
    assert finished.codes == [7, 7], finished.outputs
    (line,) = finished.errors
    assert re.search(
        r"got: one does not answer, although all of them are alive \(for [34] s\), while process 0 was in step 4", line
    )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["rank"]) == ("worker_lost", 7, 0)


@pytest.mark.parametrize("is_in_sight", [True, False])
def test_only_the_death_of_a_process_that_was_visible_is_detected(
    is_in_sight: bool, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers may have one host name, and neither sees the processes of the other."""
    from acc_lm.config.loading import load_config
    from acc_lm.runtime.monitoring import peers

    other = subprocess.Popen(["sleep", "60"])
    started = psutil.Process(other.pid).create_time() if is_in_sight else 0.0
    monkeypatch.setattr(peers, "collectives_raise", lambda: False)
    monkeypatch.setattr(peers.Peers, "current", None)
    monkeypatch.setattr(peers, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(peers, "LOOK_SECONDS", 0.1)

    def gather(accelerator: Any, mine: Any) -> list[Any]:
        return [mine, replace(mine, pid=other.pid, started=started) if isinstance(mine, peers.Peer) else mine]

    monkeypatch.setattr(peers, "gather_objects", gather)
    lost: list[str] = []
    accelerator: Any = SimpleNamespace(process_index=0, device=torch.device("cpu"))
    watching = peers.Peers(accelerator, load_config(Path(tiny[1]), tiny[2:]), lambda error: lost.append(str(error)))
    try:
        time.sleep(0.3)
        assert lost == []
        other.kill()
        time.sleep(0.5)
    finally:
        watching.stop()
        other.kill()
        other.wait()
    assert bool(lost) == is_in_sight
    if lost:
        assert "got: process 1 died (SIGKILL), while process 0 was in starting; the last checkpoint is none" in lost[0]


@pytest.mark.slow
def test_a_machine_that_gives_no_sign_of_life_is_lost(tiny: list[str], tmp_path: Path) -> None:
    """Two machines are simulated; process 1 is stopped, which process 0 cannot see on another machine."""

    def sabotage(rank: int) -> None:
        from acc_lm.runtime.monitoring import peers

        without_raising()
        peers.SILENT_SECONDS = 1.5
        peers.platform = SimpleNamespace(node=lambda: f"machine{rank}", python_version=lambda: "3")  # type: ignore[assignment]
        stop = partial(os.kill, os.getpid(), signal.SIGSTOP)
        wrap("acc_lm.training.train_step", stop if rank == 1 else stand_still, 4)

    launch = start(tiny, 2, sabotage)
    while not (tmp_path / "run/summary.json").exists():
        time.sleep(0.1)
    os.kill(launch.pids[1], signal.SIGKILL)
    finished = launch.wait(60)
    assert finished.codes[0] == 7, finished.outputs
    assert "got: process 1 has not answered (machine1), while process 0 was in step 4" in finished.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["completed", "failed"])
def test_processes_that_end_one_after_the_other_are_not_reported_as_lost(
    fails: bool, tiny: list[str], tmp_path: Path
) -> None:
    """Nor is time on the host a hang, whatever takes it: the device is idle for longer than the timeout."""

    def sabotage(rank: int) -> None:
        from acc_lm import runtime
        from acc_lm.errors import DivergedError
        from acc_lm.runtime.monitoring.peers import Peers

        def diverge() -> None:
            raise DivergedError("it went up")

        def begin(peers: Any, *arguments: Any) -> None:
            original(peers, *arguments)
            peers._timeout = 0.5

        def close(accelerator: Any) -> None:
            closed(accelerator)
            time.sleep(1.5 if rank == 0 else 0.0)

        without_raising()
        errors.LAUNCHER_SECONDS = 1.5
        original, Peers.__init__ = Peers.__init__, begin  # type: ignore[method-assign]
        closed, runtime.close = runtime.close, close
        for place in (
            "acc_lm.training.train_step",
            "acc_lm.training.watching.evaluate_all",
            "acc_lm.checkpointing.writing.write_checkpoint",
        ):
            wrap(place, partial(time.sleep, 0.7 if rank == 0 else 0.0))
        if fails:
            wrap("acc_lm.training.train_step", diverge, 4)

    finished = start(tiny, 2, sabotage).wait(60)
    assert finished.codes == ([6, 6] if fails else [0, 0]), finished.outputs
    status = json.loads((tmp_path / "run/summary.json").read_text())["status"]
    assert status == ("diverged" if fails else "completed")


def test_processes_with_different_recipes_refuse_before_anything_is_loaded(tiny: list[str], tmp_path: Path) -> None:
    def run() -> int:
        import train

        rank = int(os.environ["RANK"])
        return train.main([*tiny, f"optimizer.learning_rate={1e-3 + rank}", "data.files=[nowhere.txt]"])

    finished = Launch(run, 2).wait(60)
    assert finished.codes == [4, 4], finished.outputs
    assert (
        "optimizer.learning_rate must be the same on every process, got 0.001 on process 0 and 1.001 on process 1"
        in finished.errors[0]
    )


def test_processes_with_other_code_or_text_refuse_before_the_first_step(tiny: list[str], tmp_path: Path) -> None:
    def sabotage(what: str) -> object:
        def change(rank: int) -> None:
            if rank == 0:
                return
            if what == "code":
                from acc_lm.runtime.monitoring import peers

                peers._code_digest = lambda: "another"
            else:
                import acc_lm.data

                original = acc_lm.training.run.build_data

                def build_data(*arguments: object) -> object:
                    data = original(*arguments)  # type: ignore[arg-type]
                    object.__setattr__(data, "key", "another")
                    return data

                acc_lm.training.run.build_data = build_data  # type: ignore[assignment]

        return change

    for what, name in (("code", "the code of acc_lm"), ("text", "the text")):
        finished = start(tiny, 2, sabotage(what)).wait(60)
        assert finished.codes == [4, 4], finished.outputs
        assert f"{name} must be the same on every process, got" in finished.errors[0]
        assert "another on process 1" in finished.errors[0]
        assert not (tmp_path / "run/metrics.jsonl").exists()


def test_an_ordinary_error_on_one_process_keeps_its_traceback(tiny: list[str], tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("something of my own")

    def sabotage(rank: int) -> None:
        if rank == 1:
            wrap("acc_lm.training.train_step", fail, 4)

    finished = start(tiny, 2, sabotage).wait(60)
    assert finished.codes[1] == 1
    assert "RuntimeError: something of my own" in finished.outputs[1]
    assert "Traceback" in finished.outputs[1]
    assert finished.codes[0] == 7
    assert re.search(r"process 1 died( with exit code 1)?, while process 0 was in step 4", finished.errors[0])


def test_a_launcher_leaves_no_process_when_one_is_killed(tiny: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml"),
        "--main_process_port", "0", str(ROOT / "train.py"), *tiny, *LONG,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        wait_for_a_step(tmp_path / "run", 120)
        workers = psutil.Process(launcher.pid).children()
        by_rank = {int(worker.environ()["RANK"]): worker for worker in workers}
        killed = time.monotonic()
        by_rank[1].kill()
        _, alive = psutil.wait_procs([launcher_process := psutil.Process(launcher.pid), *workers], timeout=30)
        seconds = time.monotonic() - killed
        output = launcher.communicate()[0]
    assert not alive
    assert not launcher_process.is_running()
    assert seconds < 10, "5 s are promised; the launcher takes most of them"
    print(f"gone after {seconds:.1f} s")
    assert (tmp_path / "run/summary.json").is_file(), output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] in ("worker_lost", "preempted"), output
    assert "process 1" in output


@pytest.mark.parametrize(
    "config", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepspeed_zero2", "ddp_sequence"))]
)
def test_a_straggler_is_named_once(config: str, tiny: list[str], tmp_path: Path) -> None:
    def sabotage(rank: int) -> None:
        if rank != 1:
            return
        import acc_lm.training

        original = acc_lm.training.train_step

        def slow(*positional: Any, **keywords: Any) -> Any:
            time.sleep(0.3)
            return original(*positional, **keywords)

        acc_lm.training.train_step = slow

    finished = start([*tiny, "training.max_steps=8"], 2, sabotage, config).wait(60)
    assert finished.codes == [0, 0], finished.outputs
    (line,) = re.findall(
        r"^warning: process 1 holds up the others by (\S+) of (\S+) s in each step", finished.output, re.M
    )
    assert 0.25 < float(line[0]) <= float(line[1])
    assert "holds up" not in start([*tiny, "training.max_steps=8", f"output_dir={tmp_path}/even"], 2, lambda rank: None, config).wait(60).output  # fmt: skip
