"""The other processes of a run: whether they run the same thing, and which of them died or hangs."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil
import torch
import torch.distributed as dist
import xxhash

from acc_lm.config import Config, flatten
from acc_lm.errors import MachineError, WorkerLostError
from acc_lm.runtime.engines import gather_objects
from acc_lm.runtime.identity import library_versions

if TYPE_CHECKING:
    from accelerate import Accelerator

BROKEN = re.compile(
    r"connection (closed|reset|refused)|timed out|timeout|broken pipe|socket|gloo|nccl|remote process|peer",
    re.IGNORECASE,
)
LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Peer:
    host: str
    pid: int
    started: float


class Peers:
    """Which processes take part, and where this one is, so that a death or a hang is one line that names both.

    Every process makes one, together, before anything is loaded.

    Raises:
        MachineError: processes differ in recipe, code or libraries.
    """

    current: ClassVar[Peers | None] = None
    """Of this process, as its process group is: an error that nobody expected is explained by it."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._accelerator = accelerator
        self._limit = config.distributed.step_timeout_seconds
        self._phase, self._since, self._is_watched = "starting", time.monotonic(), False
        me = psutil.Process()
        self._peers = gather_objects(accelerator, Peer(platform.node(), me.pid, me.create_time()))
        self.check_same(
            {
                "python": platform.python_version(),
                **{name: str(version) for name, version in library_versions().items()},
                "the code of acc_lm": _code_digest(),
                **{key: str(value) for key, value in flatten(config.model_dump(mode="json")).items()},
            }
        )
        Peers.current = self
        if self._limit is not None:
            threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def check_same(self, facts: dict[str, str]) -> None:
        """Compare with what the other processes have. Every process calls.

        Raises:
            MachineError: with one line for each difference.
        """
        everyone = gather_objects(self._accelerator, facts)
        problems = []
        for key, value in everyone[0].items():
            for rank, theirs in enumerate(everyone):
                if theirs.get(key) != value:
                    problems.append(
                        f"{key} must be the same on every process, got {value} on process 0 and {theirs.get(key)} on process {rank} "
                        f"({self._peers[rank].host}); start them from the same folder and environment"
                    )
                    break
        if problems:
            raise MachineError(*problems)

    def at(self, phase: str, is_watched: bool = False) -> None:
        """Note what this process does now; a watched phase that takes too long is told, with the place in the code."""
        self._phase, self._since, self._is_watched = phase, time.monotonic(), is_watched

    def _watch(self) -> None:
        assert self._limit is not None
        main, told = threading.main_thread().ident, None
        while True:
            time.sleep(min(1.0, self._limit / 4))
            since, waited = self._since, time.monotonic() - self._since
            if self._is_watched and waited > self._limit and told != since:
                told = since
                stack = traceback.format_stack(sys._current_frames()[main])[-8:] if main else []
                print(
                    f"warning: process {self._accelerator.process_index} has been in {self._phase} for {waited:.0f} s, here:\n{''.join(stack)}",
                    file=sys.stderr,
                    flush=True,
                )

    def explain(self, error: Exception, last_checkpoint: Path | None) -> WorkerLostError | None:
        """The error that a broken connection between processes stands for; None when it is another error."""
        kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
        if not isinstance(error, kinds) and not (isinstance(error, RuntimeError) and BROKEN.search(str(error))):
            return None
        if isinstance(error, torch.OutOfMemoryError) or len(self._peers) == 1:
            return None
        states = self._states()
        end = time.monotonic() + LOOK_SECONDS
        while not states and time.monotonic() < end:  # it may still be dying
            time.sleep(0.02)
            states = self._states()
        got = ", ".join(f"process {rank} {state}" for rank, state in states.items())
        if not got:
            others = {peer.host for peer in self._peers} - {platform.node()}
            where = "on this machine" if others else "of them"
            got = f"no answer from one, and all {where} are alive ({' '.join(str(error).split())[:120]})"
        speaker = min((rank for rank in range(len(self._peers)) if rank not in states), default=0)
        return WorkerLostError(
            f"every process must take part, got: {got}, while process {self._accelerator.process_index} was in {self._phase}; "
            f"the last checkpoint is {last_checkpoint or 'none'}; the same command goes on from there",
            speaks=self._accelerator.process_index == speaker,
        )

    def _states(self) -> dict[int, str]:
        """What became of those on this machine that no longer run."""
        states = {}
        for rank, peer in enumerate(self._peers):
            if peer.host != platform.node() or rank == self._accelerator.process_index:
                continue
            try:
                process = psutil.Process(peer.pid)
                status = process.status() if process.create_time() == peer.started else psutil.STATUS_DEAD
            except psutil.Error:
                status = psutil.STATUS_DEAD
            if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
                states[rank] = f"died{_how(peer.pid)}"
            elif status == psutil.STATUS_STOPPED:
                states[rank] = "is stopped (SIGSTOP)"
        return states


def _how(pid: int) -> str:
    """Exit code or signal of a process that its parent has not yet asked for; Linux shows it to its owner."""
    try:
        number = int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[-1])
        code = os.waitstatus_to_exitcode(number)
    except (OSError, ValueError, IndexError):
        return ""
    return f" ({signal.Signals(-code).name})" if code < 0 else f" with exit code {code}"


def _code_digest() -> str:
    digest = xxhash.xxh3_64()
    for file in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
