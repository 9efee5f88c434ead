"""`acc-lm keep-going`: start a run again until it has ended, or until starting it again gets it nowhere."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from acc_lm.cli.arguments import Mode, parse_train_arguments
from acc_lm.errors import ConfigError, CrashLoopError, MachineError
from acc_lm.history import newest_checkpoint
from acc_lm.stop import SIGNALS
from acc_lm.summary import FILE, check_not_in_use, check_output_dir, when_taken, write_failure

AGAIN = ("preempted", "interrupted", "worker_lost", "killed")
KILLED = {"status": "killed", "reason": "it left no word"}
STOPPED_BY_A_PERSON = "the file STOP"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def keep_going(command: Sequence[str], attempts: int | None, pause: float) -> int:
    """Run a command that calls train.py, as often as it takes; returns the exit code of the last attempt's status.

    Launchers turn every exit code into 1, so the status is read from `summary.json`. An attempt that changed nothing there was
    killed if a signal says so, or the lock that it left in the folder; else it never became a run. A signal is passed on, and
    after it nothing is started again.

    Args:
        attempts: at most; None: as many as get the run further.
        pause: seconds between two attempts.

    Raises:
        ConfigError: no command that trains, any problem of its recipe, or another run in its folder.
        MachineError: the command ended before it became a run.
        CrashLoopError: two attempts in a row ended at the same checkpoint.
    """
    output_dir, patience = _what_it_trains(command)
    stopped_by: int | None = None
    running: subprocess.Popen[bytes] | None = None

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
            if stopped_by is not None:  # it came before there was anybody to pass it on to
                running.send_signal(stopped_by)
            code = running.wait()
            running = None
            _wait_for_what_it_left(patience)
            check_not_in_use(output_dir)  # what this attempt left has ended
            summary, was_taken = _summary(output_dir), when_taken(output_dir) not in (None, taken_before)
            had_folder |= was_taken or summary != summary_before
            if summary == summary_before and (code or summary.get("status") != "completed"):
                if 0 <= code < 128 and not was_taken and stopped_by is None:
                    raise _no_run(code, output_dir)
                summary = KILLED | {"exit_code": code if code >= 0 else 128 - code}
            step = _newest_step(output_dir)
            reason = f" ({summary['reason']})" if summary["reason"] else ""
            ended = f"attempt {number} ended after step {step}: {summary['status']}{reason}"
            # Whoever made the file wants an end; a time limit is one of each attempt.
            is_over = summary["status"] not in AGAIN or summary["reason"] == STOPPED_BY_A_PERSON
            if is_over or stopped_by is not None or number == attempts:
                print(ended, file=sys.stderr, flush=True)
                return int(summary["exit_code"])
            if step == last_step:
                if had_folder:
                    write_failure(
                        str(output_dir), CrashLoopError.status, CrashLoopError.exit_code, f"{last}; {ended}", True
                    )
                raise CrashLoopError(
                    last,
                    ended,
                    f"a new attempt must get further than the one before, got step {step} twice; see above what ends them, "
                    "and start again when it is mended",
                )
            last, last_step = ended, step
            print(f"{ended}; starting again in {pause:g} s", file=sys.stderr, flush=True)
            end = time.monotonic() + pause
            while stopped_by is None and time.monotonic() < end:
                time.sleep(0.05)
            if stopped_by is not None:
                return int(summary["exit_code"])
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _what_it_trains(command: Sequence[str]) -> tuple[Path, float]:
    """Folder of the run that the command starts, and how long its processes wait for each other at most."""
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
            "the command after -- must train, got --dry-run, --eval-only or --print-config; run it by itself"
        )
    config, _ = parsed
    check_output_dir(Path(config.output_dir))
    return Path(config.output_dir), config.distributed.timeout_seconds


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a Ctrl-C comes to it once, from here."""
    if sys.platform != "linux":
        return _popen(command, None)
    libc = ctypes.CDLL(None)
    # What a dead launcher leaves behind still saves; its processes become ours, so that they can be waited for.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    return _popen(command, lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM))


def _popen(command: Sequence[str], before: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before)
    except OSError as error:
        raise ConfigError(
            f"the command after -- must be one that can be started, got {command[0]} ({error.strerror}); check its name"
        ) from None


def _wait_for_what_it_left(seconds: float) -> None:
    """Two attempts must not write to one folder; whoever hangs for longer than the run itself would wait is killed."""
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
        f"the command after -- must get as far as the run, got exit code {code} and nothing new in {output_dir}; "
        "see its own error above"
    )
    error.exit_code = code if code > 1 else MachineError.exit_code  # 1 is every launcher's
    return error


def _summary(output_dir: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((output_dir / FILE).read_text())
        return summary
    except (OSError, ValueError):
        return {}


def _newest_step(output_dir: Path) -> int:
    newest = newest_checkpoint(output_dir)
    return int(newest.name.removeprefix("step-")) if newest else 0
