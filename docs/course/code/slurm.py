"""Stand-ins for SLURM's sbatch, srun, scontrol and scancel, for a machine without SLURM: every node is this machine.

    python docs/course/code/slurm.py runs/course/slurm                           write the programs into this folder
    PATH="$PWD/runs/course/slurm:$PATH" sbatch --nodes=2 slurm/train.sbatch ...  start a job with them

sbatch runs the job in the foreground, again when it is requeued. The time of the job's first turn is over when the file
TIME_IS_OVER exists; the script then gets the signal that it requested.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "scontrol", "scancel")
POLL_SECONDS = 0.02


def write_programs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" --as {name} "$@"\n')
        program.chmod(0o755)
    print(f"wrote {', '.join(PROGRAMS)} to {folder}")


def sbatch(arguments: list[str], state: Path) -> int:
    options = dict(word.removeprefix("--").split("=", 1) for word in arguments if word.startswith("--"))
    script = [word for word in arguments if not word.startswith("--")]
    state.mkdir(parents=True, exist_ok=True)
    job, turn = str(os.getpid()), 0
    environment = os.environ | {
        "SLURM_JOB_ID": job,
        "SLURM_NNODES": options.get("nodes", "1"),
        "SLURM_JOB_NODELIST": "stand-in",
        "SLURM_CPUS_ON_NODE": str(os.cpu_count()),
        "STAND_IN_STATE": str(state),
    }
    print(f"Submitted batch job {job}", flush=True)
    while True:
        (state / "requeued").unlink(missing_ok=True)
        print(f"--- turn {turn + 1} of job {job}", flush=True)
        shell = subprocess.Popen(["bash", *script], env=environment)
        wait_for_end(shell, os.environ.get("TIME_IS_OVER") if turn == 0 else None)
        if not (state / "requeued").exists():
            return shell.returncode
        turn += 1
        environment["SLURM_RESTART_COUNT"] = str(turn)


def wait_for_end(shell: subprocess.Popen[bytes], time_is_over: str | None) -> None:
    """Wait for the job's script; send it SIGUSR1 once the file exists, as `--signal=B:USR1` does."""
    while shell.poll() is None:
        if time_is_over and Path(time_is_over).exists():
            print("--- the time is over: SIGUSR1 to the script", flush=True)
            shell.send_signal(signal.SIGUSR1)
            time_is_over = None
        time.sleep(POLL_SECONDS)


def srun(arguments: list[str], state: Path) -> int:
    command = arguments[next(place for place, word in enumerate(arguments) if not word.startswith("--")) :]
    nodes = range(int(os.environ["SLURM_NNODES"]))
    tasks = [subprocess.Popen(command, env=os.environ | {"SLURM_NODEID": str(node)}) for node in nodes]
    (state / "tasks").write_text(json.dumps([task.pid for task in tasks]))
    return max(task.wait() for task in tasks)


def scancel(arguments: list[str], state: Path) -> int:
    """Send SIGTERM to every process of every task."""
    import psutil

    for pid in json.loads((state / "tasks").read_text()):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            process.send_signal(signal.SIGTERM)
    return 0


def scontrol(arguments: list[str], state: Path) -> int:
    if arguments[0] == "requeue":
        (state / "requeued").touch()
    elif arguments[:2] == ["show", "hostnames"]:
        print("\n".join(f"stand-in-{node}" for node in range(int(os.environ["SLURM_NNODES"]))))
    elif arguments[:2] == ["show", "node"]:
        print(f"NodeName={arguments[-1]} NodeAddr=127.0.0.1")
    else:
        print(f"JobId={arguments[-1]} JobState=RUNNING")
    return 0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--as"]:
        program = {"sbatch": sbatch, "srun": srun, "scancel": scancel, "scontrol": scontrol}[arguments[1]]
        return program(arguments[2:], Path(os.environ.get("STAND_IN_STATE", "runs/course/slurm-state")).resolve())
    if len(arguments) != 1:
        print(f"error: FOLDER must be one folder, got {len(arguments)} words; give a new folder", file=sys.stderr)
        return 2
    write_programs(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
