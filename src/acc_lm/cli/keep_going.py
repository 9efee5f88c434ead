"""`acc-lm keep-going`: restart a run until it has ended, or until a restart makes no progress."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from acc_lm.cli.train import parse_train_arguments
from acc_lm.config import Mode
from acc_lm.errors import ConfigError, CrashLoopError, MachineError
from acc_lm.launcher import adopt_orphans, request_death_signal
from acc_lm.run_files.metrics_file import newest_checkpoint
from acc_lm.run_files.names import SUMMARY
from acc_lm.run_files.output_dir import Supervision, check_not_in_use, check_output_dir, when_taken
from acc_lm.run_files.summary import write_failure
from acc_lm.stop import SIGNALS

AGAIN = ("preempted", "interrupted", "worker_lost", "killed")
KILLED = {"status": "killed", "reason": "it left no summary"}
SUPERVISION_SECONDS = 0.2
"""Seconds between two looks for the folder of the first attempt."""
STOPPED_BY_A_PERSON = "the file STOP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attempts", type=int, metavar="N", help="maximum number of attempts (default: as many as make progress)"
    )
    parser.add_argument(
        "--pause", type=float, default=5, metavar="SECONDS", help="pause between two attempts (default 5)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command that starts the run")


def run(known: argparse.Namespace) -> int:
    for name, wrong, wanted, action in (
        ("attempts", known.attempts is not None and known.attempts < 1, "at least 1", "raise it"),
        ("pause", not 0 <= known.pause < math.inf, "0 or more", "use 5 for instance"),
    ):
        if wrong:
            raise ConfigError(f"--{name} must be {wanted}, got {getattr(known, name)}; {action}")
    command = known.command[1:] if known.command[:1] == ["--"] else known.command
    return keep_going(command, known.attempts, known.pause)


def keep_going(command: Sequence[str], attempts: int | None, pause: float) -> int:
    """Run a command that calls train.py until its run has ended; return the exit code of the last attempt's status.

    Launchers turn every exit code into 1, so the status is read from `summary.json`. An attempt that left it unchanged
    was killed if a signal or the lock that it left in the folder shows so; otherwise it never became a run. A signal is
    forwarded to the attempt, and no attempt is started after it.

    Args:
        attempts: Maximum number of attempts; None: as many as make progress.
        pause: Seconds between two attempts.

    Raises:
        ConfigError: the command does not train, its recipe has a problem, or another run uses its folder.
        MachineError: the command ended before it became a run.
        CrashLoopError: two attempts in a row ended at the same checkpoint.
    """
    output_dir, patience = _what_it_trains(command)
    stopped_by: int | None = None
    running: subprocess.Popen[bytes] | None = None
    supervision = Supervision(output_dir)

    def pass_on(number: int, frame: Any) -> None:
        nonlocal stopped_by
        stopped_by = number
        if running is not None:
            running.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        last, last_step, number, had_folder = "", -1, 0, False
        while True:
            number += 1
            check_not_in_use(output_dir)
            summary_before, taken_before = _summary(output_dir), when_taken(output_dir)
            running = _start(command)
            if stopped_by is not None:  # it arrived before there was a process to forward it to
                running.send_signal(stopped_by)
            code, running = _wait_for(running, supervision), None
            _wait_for_what_it_left(patience)
            check_not_in_use(output_dir)  # all processes of this attempt have ended
            was_taken = when_taken(output_dir) not in (None, taken_before)
            summary = _summary_after(output_dir, summary_before, code, was_taken or stopped_by is not None)
            had_folder |= was_taken or _summary(output_dir) != summary_before
            step = _newest_step(output_dir)
            reason = f" ({summary['reason']})" if summary["reason"] else ""
            ended = f"attempt {number} ended after step {step}: {summary['status']}{reason}"
            if _is_over(summary) or stopped_by is not None or number == attempts:
                print(ended, file=sys.stderr, flush=True)
                return int(summary["exit_code"])
            if step == last_step:
                raise _crash_loop(last, ended, step, output_dir if had_folder else None)
            last, last_step = ended, step
            print(f"{ended}; starting again in {pause:g} s", file=sys.stderr, flush=True)
            _wait(pause, lambda: stopped_by is not None)
            if stopped_by is not None:
                return int(summary["exit_code"])
    finally:
        supervision.release()
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _is_over(summary: dict[str, Any]) -> bool:
    """Check that a run has ended: the file STOP ends all of it, a time limit only one attempt."""
    return summary["status"] not in AGAIN or summary["reason"] == STOPPED_BY_A_PERSON


def _summary_after(output_dir: Path, before: dict[str, Any], code: int, was_run: bool) -> dict[str, Any]:
    """`summary.json` of an attempt with this exit code, or the summary of a killed one if it left none.

    Raises:
        MachineError: the attempt never became a run.
    """
    summary = _summary(output_dir)
    if summary != before or (code == 0 and summary.get("status") == "completed"):
        return summary
    if 0 <= code < 128 and not was_run:
        raise _no_run(code, output_dir)
    return KILLED | {"exit_code": code if code >= 0 else 128 - code}


def _wait_for(process: subprocess.Popen[bytes], supervision: Supervision) -> int:
    """Exit code of an attempt; its folder is locked for the supervision when there is one."""
    while True:
        supervision.hold()
        try:
            code = process.wait(None if supervision.is_held else SUPERVISION_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        supervision.hold()
        return code


def _wait(seconds: float, is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not is_over() and time.monotonic() < end:
        time.sleep(0.05)


def _crash_loop(last: str, ended: str, step: int, output_dir: Path | None) -> CrashLoopError:
    """Error for two attempts that ended at the same checkpoint, also written to their folder if they had one."""
    if output_dir is not None:
        write_failure(str(output_dir), CrashLoopError.status, CrashLoopError.exit_code, f"{last}; {ended}", True)
    return CrashLoopError(
        last,
        ended,
        f"a new attempt must get further than the previous one, got step {step} twice; see above why they ended, "
        "fix that, and start again",
    )


def _what_it_trains(command: Sequence[str]) -> tuple[Path, float]:
    """Folder of the run that the command starts, and the maximum time, in seconds, that its processes wait for each other."""
    places = [i for i, word in enumerate(command) if Path(word).name == "train.py"]
    if not places:
        raise ConfigError(
            f"the command after -- must be one that runs train.py, got {' '.join(command) or 'none'}; for instance "
            "acc-lm keep-going -- accelerate launch train.py"
        )
    script = Path(command[places[0]])
    parsed = parse_train_arguments(command[places[0] + 1 :], script.parent / "recipes" / "quickstart.yaml")
    if parsed is None or parsed[1] != Mode.TRAIN:
        raise ConfigError(
            "the command after -- must train, got --dry-run, --eval-only or --print-config; run it without keep-going"
        )
    config, _ = parsed
    check_output_dir(Path(config.output_dir))
    return Path(config.output_dir), config.distributed.timeout_seconds


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command in a session of its own, so that a Ctrl-C reaches it only once, through this process."""
    adopt_orphans()  # processes that outlive their launcher still save, and this one waits for them
    before = request_death_signal(signal.SIGTERM)
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before)
    except OSError as error:
        raise ConfigError(
            f"the command after -- must be one that can be started, got {command[0]} ({error.strerror}); check its name"
        ) from None


def _wait_for_what_it_left(seconds: float) -> None:
    """Wait until all processes of an attempt have ended, because two attempts must not write to one folder.

    After `seconds`, the time that the run itself would wait, the remaining processes are killed.
    """
    import psutil

    end = time.monotonic() + seconds
    while True:
        try:
            gone, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if gone:
            continue
        if time.monotonic() > end:
            for process in psutil.Process().children(recursive=True):
                process.kill()
        time.sleep(0.05)


def _no_run(code: int, output_dir: Path) -> MachineError:
    error = MachineError(
        f"the command after -- must start the run, got exit code {code} and nothing new in {output_dir}; "
        "see its own error above"
    )
    error.exit_code = code if code > 1 else MachineError.exit_code  # launchers turn every code into 1
    return error


def _summary(output_dir: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((output_dir / SUMMARY).read_text())
        return summary
    except (OSError, ValueError):
        return {}


def _newest_step(output_dir: Path) -> int:
    newest = newest_checkpoint(output_dir)
    return int(newest.name.removeprefix("step-")) if newest else 0
