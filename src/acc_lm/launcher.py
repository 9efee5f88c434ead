"""Place of this process in its launch, from the launcher's variables, and an end together with its parent; no torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SPIN_COUNT = "10000"
"""Rounds of the loop, about 20 microseconds: on a machine without other load as fast as no bound."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def process_index() -> int:
    """Rank of this process from the launcher's variables, so that it is known before anything is set up.

    RANK counts only together with a WORLD_SIZE of several processes: alone it is left over from another launch.
    """
    rank = os.environ.get("RANK", "0")
    return int(rank) if os.environ.get("WORLD_SIZE", "1") != "1" and rank.isdigit() else 0


def is_main_process() -> bool:
    """Check whether this process is the main one, which prints and writes for all."""
    return process_index() == 0


def bound_spinning() -> None:
    """Let OpenMP's threads wait for each other in a loop for a moment only, then asleep; call it before torch is imported.

    Without a bound, a thread that waits for one without a core takes that core's time. The user's own setting wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def is_torchrun() -> bool:
    """Check whether torchrun, or Accelerate through it, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def tell_torchrun(text: str) -> None:
    """Leave an error's text where torchrun looks for it: its report of the failed process, which comes last, then ends with it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and is_torchrun():
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")


def prints_traceback() -> bool:
    """Check whether `accelerate launch` started this process alone, without --quiet: it then adds a traceback of its own."""
    if is_torchrun() or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return False
    try:
        words = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return False
    return any("accelerate" in word for word in words) and not {"-q", "--quiet"} & set(words)


def shutdown_seconds() -> float:
    """Seconds that torchrun waits after a SIGTERM before it kills its processes."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


def request_death_signal(number: int) -> Callable[[], None]:
    """Return a function that asks Linux to send this signal to its process when the parent dies, however it dies.

    Its process may be a fork that has not yet started its command: it loads nothing.
    """
    if sys.platform != "linux":
        return lambda: None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of its descendants whose parent dies, so that it can wait for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_launcher() -> None:
    """Ask Linux for a SIGTERM when the launcher dies, so that no process of a run outlives it."""
    if sys.platform != "linux" or not (is_torchrun() or "ACCELERATE_MIXED_PRECISION" in os.environ):
        return
    launcher = os.getppid()
    request_death_signal(signal.SIGTERM)()
    if os.getppid() != launcher:  # the launcher died in the meantime
        os.kill(os.getpid(), signal.SIGTERM)
