"""What can go wrong for a user, and the exit code each kind ends the run with."""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
import time

from acc_lm.redaction import printable, redact


class UserError(Exception):
    """A problem the user can solve; shown as `error: ...` lines without a traceback."""

    exit_code = 1
    status = "failed"
    speaks: bool | None = None
    """Whether this process is to say it; None: the main one is."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ConfigError(UserError, ValueError):
    """The recipe, the command line, the model or the output folder cannot be used."""

    exit_code = 2
    status = "config_error"


class DataError(UserError):
    """The text cannot be read, or there is too little of it."""

    exit_code = 3
    status = "data_error"


class MachineError(UserError):
    """The launch did not give what it asked for, or this machine cannot execute it."""

    exit_code = 4
    status = "environment_error"


class CheckpointError(UserError):
    """No valid checkpoint where one must be, or one that belongs to another recipe."""

    exit_code = 5
    status = "checkpoint_error"


class DivergedError(UserError):
    """The loss or the gradient is not finite any more."""

    exit_code = 6
    status = "diverged"


class WorkerLostError(UserError):
    """Another process of the run died, or does not answer."""

    exit_code = 7
    status = "worker_lost"

    def __init__(self, problem: str, speaks: bool) -> None:
        super().__init__(problem)
        self.speaks = speaks


class StorageError(UserError):
    """The disk is full, read-only or over quota."""

    exit_code = 8
    status = "storage_error"


class OutOfMemoryError(UserError):
    """A step needs more memory than there is."""

    exit_code = 9
    status = "out_of_memory"


class CrashLoopError(UserError):
    """The run was started again, and got no further."""

    exit_code = 70
    status = "crash_loop"


class Preempted(BaseException):
    """Asked to stop where there was nothing new to save.

    Like KeyboardInterrupt no `Exception`: a signal comes in the middle of any code, and no `except Exception` there may
    take it for an error of its own.
    """

    exit_code = 75
    status = "preempted"


def storage_reason(error: BaseException) -> str | None:
    """The system's words when an error says that a disk is full, read-only, broken or gone; None for any other error.

    Of writing: who reads what users give names the file instead, for the same numbers then mean something else.
    """
    in_text = re.search(
        r"os error (\d+)", str(error)
    )  # safetensors raises a kind of its own with the number in its text
    number = int(in_text[1]) if in_text else getattr(error, "errno", None)
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    closed = (errno.EROFS, errno.EACCES, errno.EPERM)
    broken = (errno.EIO, errno.ESTALE, errno.EXDEV)
    return os.strerror(number) if number in (*full, *closed, *broken) else None


def unreadable_file(error: BaseException) -> str | None:
    """The file that is there and that this user may not read, when an error is about one: no disk is to blame for it."""
    file = error.filename if isinstance(error, PermissionError) else None
    return str(file) if file is not None and os.path.isfile(file) and not os.access(file, os.R_OK) else None


def process_index() -> int:
    """Place of this process among all, by the launcher's word, so that it is known before anything is set up.

    RANK counts only next to the WORLD_SIZE of several processes: alone it is left over from another launch.
    """
    rank = os.environ.get("RANK", "0")
    return int(rank) if os.environ.get("WORLD_SIZE", "1") != "1" and rank.isdigit() else 0


def is_main_process() -> bool:
    """Whether this process speaks for all."""
    return process_index() == 0


LAUNCHER_SECONDS = 5.0
"""A launcher ends the other processes within this time after the main one has left with the same error."""


def print_problems(error: UserError) -> None:
    """Print an error once: the main process at once, another one only if it finds itself alone with it."""
    if error.speaks is False:
        return
    if error.speaks is None and not is_main_process():
        time.sleep(LAUNCHER_SECONDS)
        print(f"error: only process {process_index()} met this:", file=sys.stderr)
    for problem in error.problems:
        print(f"error: {printable(redact(problem))}", file=sys.stderr, flush=True)


UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)
"""Errors with which a file system says that it has no such operation."""


@functools.cache
def warn_once(text: str) -> None:
    """Print a line, on the main process, for something that this machine cannot do and the run does without."""
    if not is_main_process():
        return
    print(f"warning: {printable(redact(text))}", file=sys.stderr, flush=True)


EXIT_PREEMPTED = Preempted.exit_code
EXIT_INTERRUPTED = 130
