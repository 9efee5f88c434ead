"""Named places at which a test can kill the process."""

from __future__ import annotations

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Kill this process with SIGKILL if $ACC_LM_CRASH_AT names this point.

    The value is `NAME`, or `NAME@N` for the N-th time the point is reached. The stages of saving have names, so that a
    crash at each of them can be tested on any file system.
    """
    wanted, _, count = os.environ.get("ACC_LM_CRASH_AT", "").partition("@")
    if name == wanted:
        _passed[name] += 1
        if _passed[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
