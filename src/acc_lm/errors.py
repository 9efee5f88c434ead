"""Errors of a user's input and machine, each with the exit code that ends the run."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from acc_lm.launcher import is_main_process, prints_traceback, process_index, tell_torchrun
from acc_lm.redaction import printable, redact

WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")


class UserError(Exception):
    """Problem that the user can solve; printed as `error: ...` lines without a traceback."""

    exit_code = 1
    status = "failed"
    speaks: bool | None = None
    """True: this process prints the error; False: it does not; None: the main process prints it."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ConfigError(UserError, ValueError):
    """Recipe, command line, model or output folder that cannot be used."""

    exit_code = 2
    status = "config_error"


class DataError(UserError):
    """Text that cannot be read, or too little text."""

    exit_code = 3
    status = "data_error"


class MachineError(UserError):
    """Launch that does not provide what was requested, or a machine that cannot run it."""

    exit_code = 4
    status = "environment_error"


class CheckpointError(UserError):
    """Missing or invalid checkpoint where one is needed, or one that belongs to another recipe."""

    exit_code = 5
    status = "checkpoint_error"


class DivergedError(UserError):
    """Non-finite losses or gradients, or loss spikes that the recipe does not tolerate."""

    exit_code = 6
    status = "diverged"


class WorkerLostError(UserError):
    """Another process of the run that died or does not answer."""

    exit_code = 7
    status = "worker_lost"

    def __init__(self, problem: str, speaks: bool) -> None:
        super().__init__(problem)
        self.speaks = speaks


class StorageError(UserError):
    """Disk that is full, read-only, over quota, broken or gone."""

    exit_code = 8
    status = "storage_error"


class OutOfMemoryError(UserError):
    """Computation that needs more memory than there is."""

    exit_code = 9
    status = "out_of_memory"


class CrashLoopError(UserError):
    """Restarted run that made no progress."""

    exit_code = 70
    status = "crash_loop"


class Preempted(BaseException):
    """Request to stop at a point where there is nothing new to save.

    Like KeyboardInterrupt, it is not an `Exception`: a signal can arrive in the middle of any code, and an
    `except Exception` there must not mistake it for an error of its own.
    """

    exit_code = 75
    status = "preempted"


def storage_reason(error: BaseException) -> str | None:
    """System message of an error that means a full, read-only, broken or missing disk; None for any other error.

    Use it for errors of writing only: code that reads a user's files names the file instead, because the same error
    numbers mean something else there.
    """
    in_text = re.search(
        r"os error (\d+)", str(error)
    )  # safetensors raises its own error type, with the number in its text
    number = int(in_text[1]) if in_text else getattr(error, "errno", None)
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    closed = (errno.EROFS, errno.EACCES, errno.EPERM)
    broken = (errno.EIO, errno.ESTALE, errno.EXDEV)
    return os.strerror(number) if number in (*full, *closed, *broken) else None


def unreadable_file(error: BaseException) -> str | None:
    """Existing file that this user may not read, if that caused the error, for which no disk is to blame; else None."""
    file = error.filename if isinstance(error, PermissionError) else None
    return str(file) if file is not None and os.path.isfile(file) and not os.access(file, os.R_OK) else None


LAUNCHER_SECONDS = 5.0
"""Seconds within which a launcher ends the other processes after the main one has exited with the same error."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Context in which the launcher's SIGTERM ends this process, although a run that fails ignores it otherwise."""
    if threading.current_thread() is not threading.main_thread():  # which cannot change handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_problems(error: UserError) -> None:
    """Print an error once: immediately on the main process, and on another one only if that one alone has the error."""
    lines = [f"error: {printable(redact(problem))}" for problem in error.problems]
    tell_torchrun("\n".join(lines))
    if error.speaks is False:
        return
    if error.speaks is None and not is_main_process():
        with _ended_by_sigterm():
            time.sleep(LAUNCHER_SECONDS)
        print(f"error: only process {process_index()} has this error:", file=sys.stderr)
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    if prints_traceback():
        print("note: what follows is accelerate launch's own; --quiet leaves it out", file=sys.stderr, flush=True)


UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)
"""Error numbers by which a file system reports an unsupported operation."""


@functools.cache
def warn_once(text: str) -> None:
    """Print a warning once, on the main process, about something that this machine cannot do and the run does without."""
    if not is_main_process():
        return
    print(f"warning: {printable(redact(text))}", file=sys.stderr, flush=True)


EXIT_PREEMPTED = Preempted.exit_code
EXIT_INTERRUPTED = 130


LINE = 200
"""Maximum characters of another library's error within one of ours."""


def first_line(error: BaseException) -> str:
    """Text of another library's error on one line, cut after a word at 200 characters."""
    text = " ".join((str(error) or type(error).__name__).split())
    if len(text) <= LINE:
        return text
    return text[:LINE].rpartition(" ")[0].rstrip(".,:;") + " ..." if " " in text[:LINE] else text[:LINE]


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error means that a device or the machine has no memory left."""
    # torch's error class is matched by its name, because this file does not import torch
    if isinstance(error, MemoryError) or "OutOfMemoryError" in (kind.__name__ for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS)
