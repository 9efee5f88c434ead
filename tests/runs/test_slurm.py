"""The SLURM job script, run under stand-ins for srun, scontrol and scancel: every node is this machine."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import LAUNCH_VARIABLES, ROOT, run_training
from test_resume import TIMED

STAND_IN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
from pathlib import Path

program, *arguments = [Path(sys.argv[0]).name, *sys.argv[1:]]
state = Path(os.environ["STAND_IN_STATE"])
with open(state / "calls", "a") as calls:
    print(json.dumps([program, *arguments]), file=calls)


def srun():
    options = []
    while arguments[0].startswith("--"):
        options.append(arguments.pop(0))
    assert options == [
        f"--ntasks={{os.environ['SLURM_NNODES']}}", "--ntasks-per-node=1", "--cpu-bind=none",
        f"--gpus-per-node={{os.environ['SLURM_GPUS_ON_NODE']}}", "--kill-on-bad-exit=0", "--wait=60",
    ], options
    tasks = [
        subprocess.Popen(arguments, env=os.environ | {{"SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0"}})
        for node in range(int(os.environ["SLURM_NNODES"]))
    ]

    def kill_tasks(*_):  # what the real one does
        print("srun: forcing job termination", file=sys.stderr)
        for task in tasks:
            task.kill()

    signal.signal(signal.SIGTERM, kill_tasks)
    (state / "tasks").write_text(json.dumps([task.pid for task in tasks]))
    sys.exit(max(task.wait() for task in tasks))


def scancel():  # a signal reaches every process of every task, not only the first of each
    import psutil

    assert arguments == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], arguments
    for pid in json.loads((state / "tasks").read_text()):
        task = psutil.Process(pid)
        for process in [task, *task.children(recursive=True)]:
            process.send_signal(signal.SIGTERM)


def scontrol():
    if arguments == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]:
        if "STAND_IN_SIGNAL_EARLY" in os.environ:
            os.kill(os.getppid(), signal.SIGUSR1)
        for node in range(int(os.environ["SLURM_NNODES"])):
            print(f"no-name-{{node}}.invalid")
    elif arguments == ["show", "node", "--oneliner", "no-name-0.invalid"]:
        print("NodeName=no-name-0.invalid NodeAddr=127.0.0.1 NodeHostName=no-name-0.invalid Version=22.05.8")
    elif arguments == ["show", "job", "--oneliner", os.environ["SLURM_JOB_ID"]]:
        print("JobId=1 JobName=acc-lm JobState=" + os.environ.get("STAND_IN_JOB_STATE", "RUNNING") + " Reason=None")
    else:
        assert arguments == ["requeue", os.environ["SLURM_JOB_ID"]], arguments


globals()[program]()
"""


class Job:
    """A job's environment, and the calls that the stand-ins received."""

    def __init__(self, folder: Path, num_nodes: int, processes_per_node: int) -> None:
        binaries, self.state = folder / "bin", folder / "state"
        binaries.mkdir()
        self.state.mkdir()
        for name in ("srun", "scontrol", "scancel"):
            (binaries / name).write_text(STAND_IN)
            (binaries / name).chmod(0o755)
        self.environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)} | {
            "PATH": f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STAND_IN_STATE": str(self.state),
            "SLURM_JOB_ID": str(20_000 + free_port() - 10_000),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NNODES": str(num_nodes),
            "SLURM_GPUS_ON_NODE": str(processes_per_node),
            "SLURM_CPUS_ON_NODE": "2",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, recipe: Path, *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "slurm/train.sbatch", *overrides],
            cwd=ROOT,
            env=self.environment | {"RECIPE": str(recipe)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, recipe: Path, *overrides: str) -> tuple[int, str]:
        return self.finish(self.start(recipe, *overrides))

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            output, _ = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            self.end_tasks()
            raise
        return process.returncode, output

    def end_tasks(self) -> None:
        """Leave no process of a failed test running."""
        subprocess.run([self.state.parent / "bin/scancel", "--signal=TERM", self.environment["SLURM_JOB_ID"]],
                       env=self.environment, timeout=20, check=False)  # fmt: skip

    def requeue(self, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            ["slurm/requeue.sh", *arguments],
            cwd=ROOT,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def calls(self, program: str) -> list[list[str]]:
        """Arguments of the calls to the stand-in for `program`."""
        file = self.state / "calls"
        calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [arguments for name, *arguments in calls if name == program]

    def requeues(self) -> int:
        return sum(call[0] == "requeue" for call in self.calls("scontrol"))


def free_port() -> int:
    """A free port among those that the script gives to jobs."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def summary_of(output_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output_dir / "summary.json").read_text())
    return summary


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Learned values, without what depends on the clock and the machine."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMED} for line in lines]


@pytest.mark.slow
def test_a_job_out_of_time_saves_and_when_requeued_ends_like_an_uninterrupted_one(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    longer = ["training.max_steps=300", "training.eval_every=100", "training.log_every=50", "checkpoint.every=50"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    job = Job(tmp_path, num_nodes=2, processes_per_node=1)
    process = job.start(tiny_recipe, *longer, f"output_dir={run}")
    end = time.monotonic() + 90
    while not (run / "checkpoints/step-00000050/manifest.json").exists():
        if process.poll() is not None or time.monotonic() > end:
            job.end_tasks()
            pytest.fail(f"nothing was saved:\n{process.communicate(timeout=60)[0]}")
        time.sleep(0.005)
    process.send_signal(signal.SIGUSR1)  # only the shell gets it, as with --signal=B:USR1
    code, output = job.finish(process)
    assert code == 1, "the launcher's"
    summary = summary_of(run)
    assert (summary["status"], summary["exit_code"], summary["reason"]) == ("preempted", 75, "SIGTERM"), output
    assert 50 <= summary["step"] < 300
    assert output.endswith(f"requeued: the status of {run} is preempted\n")
    assert job.requeues() == 1
    assert len(job.calls("scancel")) == 1
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["num_processes"], environment["slurm_job_id"]) == (2, job.environment["SLURM_JOB_ID"])

    code, output = job.run(tiny_recipe, *longer, f"output_dir={run}")
    assert code == 0, output
    assert summary_of(run)["status"] == "completed"
    assert summary_of(run)["resumed_from"] == summary["last_checkpoint"]
    assert output.endswith(f"not requeued: the status of {run} is completed\n")
    assert job.requeues() == 1, "that of the first turn"

    run_training(["--config", str(tiny_recipe), *longer, f"output_dir={whole}"], num_processes=2)
    assert metrics(run) == metrics(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "strategy"), [(1, "single"), (2, "ddp")])
def test_a_job_on_one_node(processes: int, strategy: str, tiny_recipe: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=processes)
    run = tmp_path / "run"
    code, output = job.run(tiny_recipe, f"output_dir={run}")
    assert code == 0, output
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["strategy"], environment["num_processes"]) == (strategy, processes)
    assert summary_of(run)["status"] == "completed"
    assert job.requeues() == 0


def test_a_recipe_error_is_not_requeued(tiny_recipe: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=2, processes_per_node=8)
    code, output = job.run(tiny_recipe, "optimizer.learing_rate=1")
    assert code == 2
    assert output.splitlines() == [line for line in output.splitlines() if line.startswith("error: ")], output
    assert "did you mean learning_rate?" in output
    assert job.calls("srun") == [], "found before anything was started"
    assert job.requeues() == 0


def test_an_error_that_only_the_run_detects_is_not_requeued_either(tiny_recipe: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)
    run = tmp_path / "run"
    code, output = job.run(tiny_recipe, f"output_dir={run}", "data.files=[/nowhere/*.txt]")
    assert code == 3, output
    assert output.endswith(f"not requeued: the status of {run} is data_error\n")
    assert job.requeues() == 0


STATUSES = {
    "completed": False,
    "config_error": False,
    "data_error": False,
    "environment_error": False,
    "checkpoint_error": False,
    "diverged": False,
    "worker_lost": True,
    "storage_error": False,
    "out_of_memory": False,
    "crash_loop": False,
    "failed": False,
    "preempted": True,
    "interrupted": True,
}


def write_summary(job: Job, folder: Path, **values: object) -> None:
    ours = {"attempt": 3, "reason": None, "slurm_job_id": job.environment["SLURM_JOB_ID"]}
    (folder / "summary.json").write_text(json.dumps(ours | values))


def test_the_status_decides_which_job_is_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)
    before = job.requeue("--before", str(tmp_path))
    for status, goes_on in STATUSES.items():
        requeues = job.requeues()
        write_summary(job, tmp_path, status=status)
        says = job.requeue(str(tmp_path), before)
        assert says == f"{'requeued' if goes_on else 'not requeued'}: the status of {tmp_path} is {status}"
        assert job.requeues() - requeues == goes_on


def test_an_old_summary_decides_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)
    write_summary(job, tmp_path, status="preempted")
    before = job.requeue("--before", str(tmp_path))
    assert job.requeue(str(tmp_path), before).startswith("not requeued: "), "killed for an unknown reason"
    assert job.requeue(str(tmp_path / "nothing"), "0:").startswith("not requeued: ")
    assert job.requeues() == 0
    assert job.requeue("--stopped", str(tmp_path), before).startswith("requeued: "), "killed, because its time was over"
    assert job.requeues() == 1


def test_the_summary_of_another_job_decides_nothing(tmp_path: Path) -> None:
    """Its run was refused the folder, in which the other one continued meanwhile."""
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)
    before = job.requeue("--before", str(tmp_path))
    write_summary(job, tmp_path, status="preempted", slurm_job_id="1")
    assert job.requeue(str(tmp_path), before) == f"not requeued: the status of {tmp_path} is unknown"
    assert job.requeues() == 0


def test_a_file_stop_made_by_the_user_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)
    before = job.requeue("--before", str(tmp_path))
    write_summary(job, tmp_path, status="preempted", reason="the file STOP")
    assert job.requeue(str(tmp_path), before) == "not requeued: the file STOP asked for an end"
    write_summary(job, tmp_path, status="preempted", reason="training.max_minutes")
    assert job.requeue(str(tmp_path), before).startswith("requeued: ")


@pytest.mark.parametrize(
    ("status", "options", "ends"),
    [
        ("worker_lost", [], True),
        ("preempted", ["--stopped"], True),
        (None, ["--stopped"], True),
        ("preempted", [], False),  # by another job: that is no reason to give up
    ],
)
def test_a_requeued_job_that_saved_nothing_is_the_last(
    status: str | None, options: list[str], ends: bool, tmp_path: Path
) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)

    def save(step: int) -> None:
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    def is_requeued(**environment: str) -> bool:
        return job.requeue(*options, str(tmp_path), before, **environment).startswith("requeued: ")

    save(99_999_999)
    before = job.requeue("--before", str(tmp_path))
    if status:
        write_summary(job, tmp_path, status=status)
    assert is_requeued(), "the first turn may have been bad luck"
    assert is_requeued(SLURM_RESTART_COUNT="1") != ends
    save(100_000_000)
    assert is_requeued(SLURM_RESTART_COUNT="2")


def test_a_cancelled_job_stays_cancelled(tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)
    write_summary(job, tmp_path, status="preempted", attempt=1)
    says = job.requeue(str(tmp_path), "0:", STAND_IN_JOB_STATE="CANCELLED")
    assert says == "not requeued: the job is not running any more, JobState=CANCELLED"
    assert job.requeues() == 0


def test_without_sbatch_it_is_one_line(tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)
    del job.environment["SLURM_CPUS_ON_NODE"]  # as in a shell of salloc
    code, output = job.run(ROOT / "recipes/quickstart.yaml")
    assert code == 2
    assert output.startswith("error: slurm/train.sbatch must be started by sbatch, got a shell"), output
    assert len(output.splitlines()) == 1
    assert job.calls("srun") == []


def test_a_time_that_is_over_before_the_run_has_started_is_one_line(tmp_path: Path) -> None:
    job = Job(tmp_path, num_nodes=1, processes_per_node=1)
    job.environment["STAND_IN_SIGNAL_EARLY"] = "yes"
    (job.state / "tasks").write_text("[]")
    code, output = job.run(ROOT / "recipes/quickstart.yaml")
    assert (code, len(output.splitlines())) == (2, 1), output
    assert output.startswith("error: --time must leave the run some time before --signal, got the signal before"), (
        output
    )
    assert job.calls("srun") == []
    assert job.requeues() == 0
