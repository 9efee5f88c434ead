"""`acc-lm keep-going` and the launcher's own restarts: a run that is killed again and again ends like an uninterrupted one."""

from __future__ import annotations

import fcntl
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
from test_slurm import STATUSES

from acc_lm.cli import main, report
from acc_lm.reporting import report_html, report_sections, run_comparison  # noqa: F401 - read before the first pause ends

# A stand-in for a run: it ends as the next line of `plan` says, and writes what train.py would have written.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path

run = Path(next(word for word in sys.argv if word.startswith("output_dir=")).partition("=")[2])
plan, log = run.parent / "plan", run.parent / "starts"
with log.open("a") as file:
    print(os.getpid(), file=file)
attempt = len(log.read_text().splitlines())
status, code, step = json.loads(plan.read_text())[attempt - 1]
folder = run / "checkpoints" / f"step-{step:08d}"
if status == "refused":  # before it became a run
    time.sleep(0.5)
    os._exit(code)
if status == "killed early":
    os.kill(os.getpid(), signal.SIGKILL)
run.mkdir(exist_ok=True)
(run / ".lock").write_text(str(os.getpid()))
if step:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").touch()


def leave(*_):
    global status
    if status == "waits":
        status = "preempted"
    if status != "killed":
        (run / "summary.json").write_text(
            json.dumps({"status": status, "exit_code": code, "reason": f"plan {attempt}", "attempt": attempt})
        )
        (run / ".lock").unlink()
    os._exit(1)  # the launcher's


signal.signal(signal.SIGTERM, leave)
if status == "orphan":  # a launcher that dies while its process still saves
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    status = "preempted"
    (run.parent / "saved").touch()
if status == "hangs":  # and what it leaves does not even hear a signal
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
if status == "waits":
    time.sleep(60)
if attempt > 1 and (run.parent / "orphan").exists():
    assert (run.parent / "saved").exists(), "the one before still writes"
leave()
"""
FINISHED = ["completed", 0, 9]


def keep_going(arguments: list[str], prepare: Callable[[], object] = lambda: None) -> Launch:
    def run() -> int:
        from acc_lm.cli import main
        from acc_lm.stop import SIGNALS

        prepare()
        before = [signal.getsignal(number) for number in SIGNALS]
        code = main(["keep-going", *arguments])
        assert [signal.getsignal(number) for number in SIGNALS] == before
        return code

    return Launch(run)


class Plan:
    """Plan of a stand-in, by attempt: (status, exit code, newest checkpoint)."""

    def __init__(self, folder: Path, recipe: Path, plan: list[Any]) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "plan").write_text(json.dumps(plan))
        (folder / "train.py").write_text(STAND_IN)
        self.command = [sys.executable, str(folder / "train.py"), "--config", str(recipe), f"output_dir={self.run}"]

    def start(self, *options: str, prepare: Callable[[], object] = lambda: None) -> Launch:
        return keep_going(["--pause", "0", *options, "--", *self.command], prepare)

    def finish(self, *options: str) -> Finished:
        return self.start(*options).wait(60)

    @property
    def starts(self) -> int:
        file = self.folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    @property
    def summary(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return values


@pytest.mark.parametrize("status", STATUSES)
def test_the_status_decides_as_it_does_under_slurm(status: str, tiny_recipe: Path, tmp_path: Path) -> None:
    code = 42 if status != "completed" else 0
    plan = Plan(tmp_path, tiny_recipe, [[status, code, 2], FINISHED])
    finished = plan.finish()
    assert plan.starts == 1 + STATUSES[status], finished.output
    assert finished.code == (0 if STATUSES[status] else code)
    assert f"attempt 1 ended after step 2: {status} (plan 1)" in finished.output


def test_a_silently_killed_run_is_restarted_until_it_has_ended(tiny_recipe: Path, tmp_path: Path) -> None:
    steps = [["killed", 0, 2], ["worker_lost", 7, 4], ["killed", 0, 6], ["preempted", 75, 7], FINISHED]
    plan = Plan(tmp_path, tiny_recipe, steps)
    finished = plan.finish()
    assert (finished.code, plan.starts) == (0, 5), finished.output
    assert "attempt 3 ended after step 6: killed (it left no summary); starting again in 0 s" in finished.output


def test_an_attempt_that_finds_the_run_complete_or_the_folder_taken_is_the_last(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    plan = Plan(tmp_path, tiny_recipe, [])
    (tmp_path / "train.py").write_text("")  # exit code 0, and nothing written
    plan.run.mkdir()
    (plan.run / "summary.json").write_text(
        json.dumps({"status": "completed", "exit_code": 0, "reason": None, "attempt": 1})
    )
    assert plan.finish().code == 0
    (plan.run / "summary.json").unlink()
    (plan.run / "config.yaml").write_text("mine: 1")
    finished = plan.finish()
    assert (finished.code, len(finished.errors), plan.starts) == (2, 1, 0)
    assert [path.name for path in plan.run.iterdir()] == ["config.yaml"]


def test_two_attempts_that_end_at_the_same_step_are_the_last(tiny_recipe: Path, tmp_path: Path) -> None:
    steps = [["killed", 0, 2], ["worker_lost", 7, 4], ["killed", 0, 4], FINISHED]
    plan = Plan(tmp_path, tiny_recipe, steps)
    finished = plan.finish()
    assert (finished.code, plan.starts) == (70, 3), finished.output
    assert finished.errors == [
        "error: attempt 2 ended after step 4: worker_lost (plan 2)",
        "error: attempt 3 ended after step 4: killed (it left no summary)",
        "error: a new attempt must get further than the previous one, got step 4 twice; see above why they ended, "
        "fix that, and start again",
    ]
    assert (plan.summary["status"], plan.summary["exit_code"]) == ("crash_loop", 70)
    assert "attempt 2 ended after step 4: worker_lost" in plan.summary["reason"]
    assert "attempt 3 ended after step 4: killed" in plan.summary["reason"]


def test_a_run_that_never_reaches_a_checkpoint_is_given_up(tiny_recipe: Path, tmp_path: Path) -> None:
    plan = Plan(tmp_path, tiny_recipe, [["killed", 0, 0]] * 9)
    finished = plan.finish()
    assert (finished.code, plan.starts) == (70, 2), finished.output
    assert plan.summary["status"] == "crash_loop"


COMPLETED = json.dumps({"status": "completed", "exit_code": 0, "reason": None, "attempt": 7})


@pytest.mark.parametrize(("code", "becomes"), [(1, 4), (3, 3)])
def test_a_command_that_starts_no_run_is_not_repeated(
    code: int, becomes: int, tiny_recipe: Path, tmp_path: Path
) -> None:
    """A misspelt launcher, for instance; the existing summary is of a run that was completed long ago."""
    plan = Plan(tmp_path, tiny_recipe, [["refused", code, 0], FINISHED])
    plan.run.mkdir()
    (plan.run / "summary.json").write_text(COMPLETED)
    (plan.run / ".lock").write_text("left by a run that was killed earlier")
    finished = plan.finish()
    assert (finished.code, plan.starts) == (becomes, 1), finished.output
    (line,) = finished.errors
    assert f"the command after -- must start the run, got exit code {code} and nothing new in {plan.run}" in line
    assert (plan.run / "summary.json").read_text() == COMPLETED


def test_a_process_killed_before_its_run_began_leaves_the_summary_alone(tiny_recipe: Path, tmp_path: Path) -> None:
    plan = Plan(tmp_path, tiny_recipe, [["killed early", 0, 0]] * 9)
    plan.run.mkdir()
    (plan.run / "summary.json").write_text(COMPLETED)
    finished = plan.finish()
    assert (finished.code, plan.starts) == (70, 2), finished.output
    assert (plan.run / "summary.json").read_text() == COMPLETED


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
def test_it_leaves_at_once_when_the_run_is_already_alive(begins: str, tiny_recipe: Path, tmp_path: Path) -> None:
    plan = Plan(tmp_path, tiny_recipe, [["refused", 1, 0], FINISHED])
    plan.run.mkdir()
    (plan.run / "summary.json").write_text(COMPLETED)
    with (plan.run / ".lock").open("a+") as lock:
        launch = plan.start() if begins == "meanwhile" else None
        while launch and not plan.starts:
            time.sleep(0.01)
        fcntl.lockf(lock, fcntl.LOCK_EX)
        print("process 1 on another", file=lock, flush=True)
        # What the other one saves and writes is not our progress.
        (plan.run / "checkpoints/step-00000002").mkdir(parents=True)
        (plan.run / "checkpoints/step-00000002/manifest.json").touch()
        finished = (launch or plan.start()).wait(20)
    assert (finished.code, plan.starts) == (2, launch is not None), finished.output
    (line,) = finished.errors
    assert f"must be used by one run at a time, got {plan.run}, which process 1 on another writes to" in line
    assert (plan.run / "summary.json").read_text() == COMPLETED


def test_no_more_attempts_than_were_allowed(tiny_recipe: Path, tmp_path: Path) -> None:
    plan = Plan(tmp_path, tiny_recipe, [["preempted", 75, step] for step in range(1, 9)])
    assert (plan.finish("--attempts", "3").code, plan.starts) == (75, 3)


def test_a_file_stop_made_by_the_user_ends_the_attempts(tiny_recipe: Path, tmp_path: Path) -> None:
    plan = Plan(tmp_path, tiny_recipe, [["preempted", 75, 2], FINISHED])
    (tmp_path / "train.py").write_text(STAND_IN.replace('f"plan {attempt}"', '"the file STOP"'))
    assert (plan.finish().code, plan.starts) == (75, 1)


def test_a_watched_report_waits_for_the_next_attempt(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(report, "PATIENCE_FACTOR", 0)
    plan = Plan(tmp_path, tiny_recipe, [["preempted", 75, 2], ["killed", 0, 4], FINISHED])
    launch = plan.start("--pause", "3")
    wait_for(plan.run / ".keep-going")
    assert main(["report", str(plan.run), "--watch"]) == 0
    *lines, page = capsys.readouterr().out.splitlines()
    seen = [line for line in lines if line.endswith("between two attempts of keep-going")]
    assert any("preempted," in line for line in seen)
    assert any("killed," in line for line in seen)
    assert lines[-1].endswith("completed")
    assert "http-equiv=refresh" not in Path(page).read_text()
    assert launch.wait(60).code == 0
    assert plan.starts == 3
    assert not (plan.run / ".keep-going").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["running", "pausing"])
def test_a_signal_is_passed_on_and_nothing_is_started_after_it(
    when: str, number: int, tiny_recipe: Path, tmp_path: Path
) -> None:
    first = ["waits", 75, 2] if when == "running" else ["preempted", 75, 2]
    plan = Plan(tmp_path, tiny_recipe, [first, FINISHED])
    (tmp_path / "train.py").write_text(STAND_IN.replace("SIGTERM, leave", f"{signal.Signals(number).name}, leave"))
    launch = plan.start("--pause", "60" if when == "pausing" else "0")
    if when == "running":
        wait_for(tmp_path / "run/checkpoints/step-00000002/manifest.json")
        time.sleep(0.3)
    else:
        while "starting again in 60 s" not in launch.outputs()[0]:
            time.sleep(0.01)
    os.kill(launch.pids[0], number)
    finished = launch.wait(20)
    assert (finished.code, plan.starts) == (75, 1), finished.output
    assert plan.summary["status"] == "preempted"
    assert ("starting again" in finished.output) == (when == "pausing")


def test_a_signal_before_the_first_process_exists_is_not_lost(tiny_recipe: Path, tmp_path: Path) -> None:
    def prepare() -> None:
        from acc_lm.cli import keep_going

        start = keep_going._start

        def told_first(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return start(*arguments)

        keep_going._start = told_first

    plan = Plan(tmp_path, tiny_recipe, [["waits", 75, 2], FINISHED])
    finished = plan.start(prepare=prepare).wait(20)
    assert finished.code in (75, 128 + signal.SIGTERM), finished.output
    assert plan.starts <= 1


@pytest.mark.skipif(sys.platform != "linux", reason="Linux gives orphans a new parent on request")
def test_processes_of_a_dead_launcher_end_before_the_next_attempt_starts(tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "orphan").touch()
    plan = Plan(tmp_path, tiny_recipe, [["orphan", 75, 2], FINISHED])
    finished = plan.finish()
    assert (finished.code, plan.starts) == (0, 2), finished.output
    assert "attempt 1 ended after step 2: preempted" in finished.output
    assert "the one before still writes" not in finished.output


@pytest.mark.skipif(sys.platform != "linux", reason="Linux gives orphans a new parent on request")
def test_the_wait_for_processes_of_a_dead_launcher_is_bounded(tiny_recipe: Path, tmp_path: Path) -> None:
    """As long as the processes of the run would wait for each other; then they are killed."""
    plan = Plan(tmp_path, tiny_recipe, [["hangs", 0, 2], ["hangs", 0, 4]])
    plan.command.append("distributed.timeout_seconds=1")
    finished = plan.start("--attempts", "2").wait(30)
    assert (finished.code, plan.starts) == (128 + signal.SIGKILL, 2), finished.output
    assert "attempt 1 ended after step 2: killed (it left no summary)" in finished.output


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a process when its parent dies")
def test_when_it_is_killed_itself_no_process_is_left(tiny_recipe: Path, tmp_path: Path) -> None:
    plan = Plan(tmp_path, tiny_recipe, [["waits", 75, 2]])
    launch = plan.start()
    wait_for(tmp_path / "run/checkpoints/step-00000002/manifest.json")
    time.sleep(0.3)
    (child,) = psutil.Process(launch.pids[0]).children()
    assert os.getsid(child.pid) == child.pid, "a Ctrl-C of the terminal comes to it once, from its parent"
    os.kill(launch.pids[0], signal.SIGKILL)
    launch.wait(20)
    child.wait(20)
    assert plan.summary["status"] == "preempted"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "python", "other.py"], "the command after -- must be one that runs train.py, got python other.py"),
        ([], "the command after -- must be one that runs train.py, got none"),
        (["--", "nowhere/python", "train.py"], "must be one that can be started, got nowhere/python (No such file"),
        (["--", "python", "train.py", "optimizer.learing_rate=1"], "did you mean learning_rate?"),
        (["--", "python", "train.py", "--dry-run"], "must train, got --dry-run"),
        (["--attempts", "0", "--", "python", "train.py"], "--attempts must be at least 1, got 0"),
        (["--pause", "-1", "--", "python", "train.py"], "--pause must be 0 or more, got -1"),
    ],
)
def test_commands_that_cannot_be_kept_going_are_one_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    finished = keep_going(arguments).wait(20)
    assert finished.code == 2
    (line,) = finished.errors
    assert says in line


# With this in the environment each start saves two checkpoints and dies in the third: three times in eight steps.
STEPS, KILLS, CRASH = 8, 3, {"ACC_LM_CRASH_AT": "before_tmp@3"}


def launch_with(options: list[str], arguments: list[str]) -> list[str]:
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml"),
        "--main_process_port", "0", *options, str(ROOT / "train.py"), *arguments,
    ]  # fmt: skip


def long_enough(recipe: Path, run: Path) -> list[str]:
    return [
        "--config", str(recipe), f"output_dir={run}", f"training.max_steps={STEPS}", "training.micro_batch_size=6",
        "training.log_every=1", "checkpoint.every=1", "checkpoint.keep_last=null",
    ]  # fmt: skip


def check_killed_run(recipe: Path, folder: Path, output: str) -> None:
    """Check that it was killed as often as planned, each time further along, and ended like an uninterrupted run."""
    run = folder / "run"
    for step in (2, 4, 6):
        assert f"resumed from {run}/checkpoints/step-{step:08d} at step {step}" in output, output
    run_training(long_enough(recipe, folder / "whole"), 2)
    assert_equal_runs(folder / "whole", run, STEPS)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("completed", STEPS)


def killed_under_keep_going(recipe: Path, folder: Path) -> float:
    """Seconds that a run of two processes takes when it is killed three times and restarted from outside."""
    began = time.monotonic()
    code = "import sys; from acc_lm.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "keep-going", "--pause", "0.1", "--"]
    done = subprocess.run(
        [*command, *launch_with([], long_enough(recipe, folder / "run"))],
        env=os.environ | CRASH, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("starting again") == KILLS
    check_killed_run(recipe, folder, done.stdout)
    return seconds


def killed_under_max_restarts(recipe: Path, folder: Path) -> float:
    """The same when the launcher itself restarts the processes."""
    began = time.monotonic()
    options = ["--rdzv_backend", "c10d", "--max_restarts", "5"]
    done = subprocess.run(
        launch_with(options, long_enough(recipe, folder / "run")),
        env=os.environ | CRASH, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout
    check_killed_run(recipe, folder, done.stdout)
    return seconds


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_ends_like_an_uninterrupted_one(tiny_recipe: Path, tmp_path: Path) -> None:
    print(f"{killed_under_keep_going(tiny_recipe, tmp_path):.0f} s")


@pytest.mark.slow
def test_a_run_restarted_by_the_launcher_itself_does_too(tiny_recipe: Path, tmp_path: Path) -> None:
    print(f"{killed_under_max_restarts(tiny_recipe, tmp_path):.0f} s")


def test_the_launchers_own_restarts_on_several_machines_need_a_launcher_setting(tiny: list[str]) -> None:
    environment = {
        "ACC_LM_CONFIG_FILE": str(ROOT / "tests/support/accelerate_config_answers/multi_node_ddp_c10d.yaml"),
        "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    finished = start_training(tiny, 2, environment).wait(30)
    assert finished.codes == [4, 4], finished.outputs
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for the launcher on every machine" in finished.errors[0]
