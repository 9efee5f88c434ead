"""Variables of the launcher that tell this process its place, before torch is loaded."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def process_index() -> int:
    """Rank of this process from the launcher's variables, so that it is known before anything is set up.

    RANK counts only together with a WORLD_SIZE of several processes: alone it is left over from another launch.
    """
    rank = os.environ.get("RANK", "0")
    return int(rank) if os.environ.get("WORLD_SIZE", "1") != "1" and rank.isdigit() else 0


def is_main_process() -> bool:
    """Check whether this process is the main one, which prints and writes for all."""
    return process_index() == 0


def die_with_launcher() -> None:
    """Ask Linux for a SIGTERM when the launcher dies, however it dies, so that no process of a run outlives it."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if not is_launched or sys.platform != "linux":
        return
    launcher = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != launcher:  # the launcher died in the meantime
        os.kill(os.getpid(), signal.SIGTERM)
