"""The SLURM job script under a real SLURM: two nodes on this machine. It installs nothing: apt-get install slurm-wlm munge."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import LAUNCH_VARIABLES, ROOT, run_training
from test_slurm import metrics, summary_of

MISSING = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a SLURM of its own needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {', '.join(MISSING)} (apt-get install slurm-wlm munge)"),
]

# A stand-in for a run: it writes down what it was given, and a summary as the file `plan` says.
TRAIN = "import sys\nprint('output_dir: run' if '--print-config' in sys.argv else '')\n"
ACCELERATE = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path

node = os.environ["SLURM_NODEID"]
names = ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_ON_NODE")
seen = {{name: os.environ.get(name) for name in names}} | {{"cpus": len(os.sched_getaffinity(0)), "arguments": sys.argv[1:]}}
Path(f"node-{{node}}").write_text(json.dumps(seen))
status, reason = json.loads(Path("plan").read_text())
if node == "0":
    summary, attempt = Path("run/summary.json"), 0
    summary.parent.mkdir(exist_ok=True)
    if summary.exists():
        attempt = json.loads(summary.read_text())["attempt"]
    values = {{"status": status, "reason": reason, "attempt": attempt + 1, "slurm_job_id": os.environ["SLURM_JOB_ID"]}}
    summary.write_text(json.dumps(values))
sys.exit(status != "completed")
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)} | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
        }

    def call(self, *command: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=folder, env=self.environment | environment, capture_output=True, text=True, timeout=120
        )

    def submit(self, log: Path, *arguments: str, folder: Path = ROOT, **environment: str) -> str:
        options = ["--parsable", f"--output={log}", "--time=10"]
        done = self.call("sbatch", *options, *arguments, folder=folder, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        words = self.call("scontrol", "show", "job", "--oneliner", number).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, number: str, log: Path) -> dict[str, str]:
        going = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        wait_until(lambda: self.job(number)["JobState"] not in going, log)
        return self.job(number)


def wait_until(condition: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, log.read_text() if log.exists() else "no output"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # munged requires a path that all may enter, pytest's is closed
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(ROOT / "tests/support/slurm_up.sh")
    try:
        subprocess.run([script, "up", folder], check=True, timeout=60, env=os.environ | {"PORT": str(port)})
        yield Cluster(folder)
    finally:
        subprocess.run([script, "down", folder], check=False, timeout=60)
        shutil.rmtree(folder)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder that the script takes for the root of the repository, whose run ends at once."""
    for name in ("slurm", "recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/accelerate").write_text(ACCELERATE)
    (tmp_path / "bin/accelerate").chmod(0o755)
    (tmp_path / "plan").write_text('["completed", null]')
    return tmp_path


def run_stand_in(cluster: Cluster, folder: Path, *options: str) -> tuple[dict[str, str], str]:
    log, path = folder / "log", f"{folder / 'bin'}:{cluster.environment['PATH']}"
    job = cluster.submit(log, *options, "slurm/train.sbatch", folder=folder, PATH=path)
    return cluster.wait_for_end(job, log), log.read_text()


@pytest.mark.parametrize(
    "options",
    [
        ("--gpus-per-node=1",),  # fewer than the node has: --exclusive gives all of them
        ("--gres=gpu:2",),  # in addition to the script's own --gpus-per-node=8
        ("--gpus-per-node=2", "--nodes=1", "--nodelist=n1", "--ntasks-per-node=2"),
    ],
)
def test_each_node_gets_one_task_with_all_of_its_devices(
    options: tuple[str, ...], cluster: Cluster, stand_in: Path
) -> None:
    job, log = run_stand_in(cluster, stand_in, *options)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), log
    num_nodes = int(job["NumNodes"])
    for node in range(num_nodes):
        seen: dict[str, Any] = json.loads((stand_in / f"node-{node}").read_text())
        assert seen["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert seen["SLURM_CPUS_ON_NODE"] == str(2 - node)
        assert seen["cpus"] == len(os.sched_getaffinity(0)), "not bound to one"
        given = dict(zip(seen["arguments"][1::2], seen["arguments"][2::2], strict=False))
        assert (given["--machine_rank"], given["--num_machines"]) == (str(node), str(num_nodes))
        assert given["--num_processes"] == str(2 * num_nodes)
        assert given["--main_process_ip"] == "127.0.0.1", "the nodes' names do not resolve"


@pytest.mark.parametrize(
    ("plan", "restarts", "says"),
    [
        (["worker_lost", "process 1 died"], "1", "is worker_lost, and this turn saved nothing"),
        (["preempted", "the file STOP"], "0", "not requeued: the file STOP asked for an end"),
        (["data_error", "no text"], "0", "not requeued: the status of run is data_error"),
    ],
)
def test_a_job_that_cannot_make_progress_ends(
    plan: list[str], restarts: str, says: str, cluster: Cluster, stand_in: Path
) -> None:
    (stand_in / "plan").write_text(json.dumps(plan))
    job, log = run_stand_in(cluster, stand_in, "--gpus-per-node=2")
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", restarts, "1:0"), log
    assert says in log


def test_a_signal_before_the_run_is_one_line(cluster: Cluster, stand_in: Path) -> None:
    wait = "from pathlib import Path\nimport time\nPath('waits').touch()\ntime.sleep(3)\n"
    (stand_in / "train.py").write_text(wait + TRAIN)
    log = stand_in / "log"
    job = cluster.submit(log, "--gpus-per-node=2", "slurm/train.sbatch", folder=stand_in)
    wait_until((stand_in / "waits").exists, log)
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    ended = cluster.wait_for_end(job, log)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), log.read_text()
    assert log.read_text().startswith("error: --time must leave the run some time before --signal, got the signal")
    assert len(log.read_text().splitlines()) == 1


def test_in_the_shell_of_salloc_it_is_one_line(cluster: Cluster, stand_in: Path) -> None:
    done = cluster.call("salloc", "--quiet", "--nodes=2", "bash", "slurm/train.sbatch", folder=stand_in)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: slurm/train.sbatch must be started by sbatch, got a shell")


def test_a_job_is_stopped_requeued_and_ends_like_an_uninterrupted_one(
    cluster: Cluster, tiny_recipe: Path, tmp_path: Path
) -> None:
    longer = ["training.max_steps=300", "training.eval_every=100", "training.log_every=50", "checkpoint.every=50"]
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    job = cluster.submit(
        log, "--gpus-per-node=1", "slurm/train.sbatch", *longer, f"output_dir={run}",
        RECIPE=str(tiny_recipe), PROCESSES_PER_NODE="1",
    )  # fmt: skip
    wait_until((run / "checkpoints/step-00000050/manifest.json").exists, log)
    cluster.call("scancel", "--signal=USR1", "--batch", job)  # what --signal does when the time is over
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", log)
    assert (summary_of(run)["status"], summary_of(run)["slurm_job_id"]) == ("preempted", job), log.read_text()
    ended = cluster.wait_for_end(job, log)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    assert summary_of(run)["attempt"] == 2
    run_training(["--config", str(tiny_recipe), *longer, f"output_dir={whole}"], num_processes=2)
    assert metrics(run) == metrics(whole)
