"""Real launches, one after the other: the command of a user, its output in a file, no process left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from acc_lm.errors import ConfigError
from acc_lm.launcher import request_death_signal
from acc_lm.runtime import has_accelerator, without_launch

LAUNCH_SECONDS = 3600
"""Time that a launch of a study may take."""


def launch(
    program: Sequence[str],
    config_file: Path | None,
    num_processes: int,
    log: Path,
    seconds: float,
    *,
    num_machines: int = 1,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    shows_output: bool = False,
) -> str | None:
    """Run a program on `num_processes` processes and wait for its end; return the problem as one line, None on success.

    Environment variables left by an earlier launch are not passed on.

    Args:
        program: path of a script, or -m and a module, with its arguments.
        config_file: Accelerate config; None: plain Python, one process.
        log: file for the output; each further machine gets its own file next to it.
        seconds: time limit in seconds, after which all processes are killed.
        num_machines: number of launchers, all on this machine.
        options: further words for `accelerate launch`.
        shows_output: pass stdout through; the log then has only stderr.
    """
    commands, held = [[sys.executable, *program]], socket.socket()
    if config_file is not None:
        # Bound until the end, so that no other process gets the port; torch's store reuses addresses and still gets it.
        held.bind(("127.0.0.1", 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        launcher = _launcher(config_file, num_processes, held.getsockname()[1], options)
        machines: list[list[str]] = [[]]
        if num_machines > 1:
            launcher += ["--num_machines", str(num_machines), "--main_process_ip", "127.0.0.1"]
            machines = [["--machine_rank", str(rank)] for rank in range(num_machines)]
        commands = [[*launcher, *machine, *program] for machine in machines]
    logs = [log, *(log.with_name(f"{log.name}-{rank}") for rank in range(1, len(commands)))]
    variables = {"OMP_NUM_THREADS": "1", **without_launch(os.environ), **(environment or {})}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command, file in zip(commands, logs, strict=True):
            with file.open("wb") as output:
                running.append(_start(command, output, None if shows_output else output, variables))
        codes = [process.wait(seconds) for process in running]
    except subprocess.TimeoutExpired:
        return f"still running after {seconds:g} s"
    finally:
        held.close()
        for process in running:
            _end(process)
    return None if not any(codes) else _what_it_says(log, codes)


def _launcher(config_file: Path, num_processes: int, port: int, options: Sequence[str]) -> list[str]:
    """`accelerate launch` up to the program."""
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config_file)]
    return [*words, "--num_processes", str(num_processes), "--main_process_port", str(port), *options]


def _start(command: list[str], log: IO[bytes], stdout: Any, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a new session, which Ctrl-C does not reach; on Linux it also ends when this process dies."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=log,
        env=variables,
        start_new_session=True,
        preexec_fn=request_death_signal(signal.SIGTERM),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all its descendants."""
    import psutil

    if process.poll() is not None:
        return
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    # Do not wait through the Popen: a signal that interrupted its wait can have left its lock taken. Do not wait for the
    # children either: once it is gone, they belong to another process.
    with suppress(psutil.TimeoutExpired):
        process.returncode = family[-1].wait(timeout=10)


def _what_it_says(log: Path, codes: list[int]) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    ours = [line for line in lines if line.startswith("error: ")]
    # After the program's traceback, a launcher prints its own.
    theirs = [line for line in lines if "Error: " in line] or lines
    return (ours[:1] or theirs[-1:] or [f"exit codes {codes}"])[0]


@contextmanager
def signals_end_it() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that started processes are ended first. A context manager."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def num_accelerators() -> int:
    """Number of GPUs that launches from this process would use."""
    import torch

    return torch.accelerator.device_count() if has_accelerator() else 0


def check_num_processes(count: int, key: str) -> None:
    """Refuse more processes than GPUs, if there are GPUs; CPU processes may share cores, which the tables report.

    Raises:
        ConfigError: more processes than GPUs.
    """
    present = num_accelerators()
    if 0 < present < count:
        raise ConfigError(
            f"{key} must be at most {present}, one for each GPU here, got {count}; lower it, or set ACCELERATE_USE_CPU=true to "
            "rehearse on the CPU"
        )


def shared_cores(counts: Sequence[int]) -> list[str]:
    """A note for each number of processes that exceeds the CPU cores; empty where there are GPUs."""
    cores = os.cpu_count() or 1
    if num_accelerators():
        return []
    return [
        f"{count} processes share {cores} cores: the curve shows this too, not only their communication"
        for count in counts
        if count > cores
    ]
