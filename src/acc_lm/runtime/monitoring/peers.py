"""The other processes of a run: check that they run the same code and recipe, and detect deaths and hangs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
import torch
import torch.distributed as dist
import xxhash

from acc_lm.config import Config, flatten
from acc_lm.errors import MachineError, WorkerLostError
from acc_lm.run_files.metrics_file import newest_checkpoint
from acc_lm.runtime.engines.collectives import gather_objects
from acc_lm.runtime.engines.identity import library_versions

if TYPE_CHECKING:
    from accelerate import Accelerator

BROKEN = re.compile(
    r"connection (closed|reset|refused)|timed out|timeout|broken pipe|socket|gloo|nccl|remote process|peer",
    re.IGNORECASE,
)
LOOK_SECONDS = 2.0
"""Seconds given to a dying process to become visible, and to a run to end normally before a dead process is lost."""
WATCH_SECONDS, BEAT_SECONDS = 1.0, 5.0
"""Seconds between two checks of this machine's processes, and between two heartbeats of a machine."""
SILENT_SECONDS = 120.0
"""Seconds without a heartbeat after which a machine counts as lost."""


STOPPED = "is stopped (SIGSTOP)"


@dataclass(frozen=True)
class Peer:
    host: str
    pid: int
    started: float


class Peers:
    """Monitor that turns a dead or hanging process into one error line with that process and this one's phase.

    Every process creates one, at the same time, before anything is loaded. gloo's collectives raise when another process
    is gone or does not answer. NCCL's collectives wait on the device: the main thread notices nothing, and torch aborts
    in the end. Under NCCL a thread therefore checks the processes of this machine, the heartbeats of the other machines,
    and whether the device still finishes its work. It ends the run if a process is gone, if a machine is silent, or if
    device work, which includes waiting for collectives, is not finished within `timeout_seconds`. Time on the host does
    not count: compiling, evaluating, saving and reading may take as long as they need.

    As a context manager it stops watching on an error, which several processes raise before each exits in its own time.

    Args:
        leave: ends this process with the error; called from another thread.

    Raises:
        MachineError: processes differ in recipe, code or libraries.
    """

    current: ClassVar[Peers | None] = None
    """Instance of this process, one for its process group, that explains unexpected errors."""

    def __init__(
        self, accelerator: Accelerator, config: Config, leave: Callable[[WorkerLostError], None] | None = None
    ) -> None:
        self._accelerator, self._leave = accelerator, leave
        self._limit, self._timeout = config.distributed.step_timeout_seconds, config.distributed.timeout_seconds
        self._output_dir = Path(config.output_dir)
        self._over, self._leaving = threading.Event(), threading.Lock()
        self._gone: tuple[float, dict[int, str]] | None = None
        """Time (monotonic, in seconds) at which processes were first seen dead, and their states by rank."""
        self._end_of_work: Any = None
        self._end_marked_at = 0.0
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
        self._looks = leave is not None and len(self._peers) > 1 and not collectives_raise()
        self._in_sight = set(range(len(self._peers))) - self._states().keys()
        """Ranks whose death is visible from here: containers may share a host name without sharing processes."""
        if self._limit is not None or self._looks:
            threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: Any) -> None:
        if kind is not None:
            self.stop()

    def stop(self) -> None:
        """Stop watching: from here on each process ends in its own time, and none counts as lost."""
        with self._leaving:
            self._over.set()

    def check_same(self, facts: dict[str, str]) -> None:
        """Compare `facts` with those of the other processes. Every process must call it.

        Raises:
            MachineError: one line for each difference.
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
        """Record the current phase of this process; warn with a stack trace if a watched phase takes too long."""
        self._phase, self._since, self._is_watched = phase, time.monotonic(), is_watched

    def _watch(self) -> None:
        main, reported = threading.main_thread().ident, None
        machines = Machines(self._peers, self._accelerator.process_index) if self._looks else None
        while not self._over.wait(min(WATCH_SECONDS, (self._limit or 4.0) / 4)):
            if machines is not None and (error := self._lost(machines)) is not None:
                with self._leaving:
                    if not self._over.is_set() and self._leave is not None:
                        self._leave(error)
            since, waited = self._since, time.monotonic() - self._since
            if self._limit is not None and self._is_watched and waited > self._limit and reported != since:
                reported = since
                stack = traceback.format_stack(sys._current_frames()[main])[-8:] if main else []
                print(
                    f"warning: process {self._accelerator.process_index} has been in {self._phase} for {waited:.0f} s, here:\n{''.join(stack)}",
                    file=sys.stderr,
                    flush=True,
                )

    def _lost(self, machines: Machines) -> WorkerLostError | None:
        """Return the error to exit with if a process is gone or does not answer; None while all is well."""
        now, states = time.monotonic(), self._states()
        died = {rank: state for rank, state in states.items() if state != STOPPED and rank in self._in_sight}
        self._gone = (self._gone or (now, died)) if died else None
        if self._gone is not None and now - self._gone[0] >= LOOK_SECONDS:
            return self._error(self._gone[1], "")
        if silent := machines.silent(min(SILENT_SECONDS, self._timeout)):
            return self._error(
                {
                    rank: f"has not answered ({peer.host})"
                    for rank, peer in enumerate(self._peers)
                    if peer.host in silent
                },
                "",
            )
        if self._end_of_work is None or self._end_of_work.query():
            self._end_of_work, self._end_marked_at = end_of_work(self._accelerator.device), now
        if self._end_of_work is not None and now - self._end_marked_at > self._timeout:
            return self._error(states, f"for {now - self._end_marked_at:.0f} s")
        return None

    def explain(self, error: Exception) -> WorkerLostError | None:
        """Return the error that explains a broken connection between processes; None for any other error."""
        kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
        if not isinstance(error, kinds) and not (isinstance(error, RuntimeError) and BROKEN.search(str(error))):
            return None
        if isinstance(error, torch.OutOfMemoryError) or len(self._peers) == 1:
            return None
        states = self._states()
        end = time.monotonic() + LOOK_SECONDS
        while not states and time.monotonic() < end:  # the process may still be dying
            time.sleep(0.02)
            states = self._states()
        return self._error(states, " ".join(str(error).split())[:120])

    def _error(self, states: dict[int, str], words: str) -> WorkerLostError:
        """Build the error message.

        Args:
            states: state of each lost process, by rank.
            words: further details, for the case that all processes are alive.
        """
        got = ", ".join(f"process {rank} {state}" for rank, state in states.items())
        if not got:
            others = {peer.host for peer in self._peers} - {platform.node()}
            where = "on this machine" if others else "of them"
            got = f"one does not answer, although all {where} are alive ({words})"
        last_checkpoint = newest_checkpoint(self._output_dir)
        speaker = min((rank for rank in range(len(self._peers)) if rank not in states), default=0)
        return WorkerLostError(
            f"every process must take part, got: {got}, while process {self._accelerator.process_index} was in {self._phase}; "
            f"the last checkpoint is {last_checkpoint or 'none'}; run the same command to resume",
            speaks=self._accelerator.process_index == speaker,
        )

    def _states(self) -> dict[int, str]:
        """States, by rank, of the other processes on this machine that are dead or stopped."""
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
                states[rank] = STOPPED
        return states


class Machines:
    """Heartbeats of a run's machines, in the rendezvous store; each machine's first process sends and reads them."""

    def __init__(self, peers: Sequence[Peer], process: int) -> None:
        firsts: dict[str, int] = {}
        for rank, peer in enumerate(peers):
            firsts.setdefault(peer.host, rank)
        self._is_first = len(firsts) > 1 and process in firsts.values()
        self._host = peers[process].host
        attempt = f"{peers[0].pid}-{peers[0].started}"  # a launcher's store outlives an attempt
        self._keys = {host: f"acc_lm/{attempt}/{host}" for host in firsts}
        now = time.monotonic()
        self._heard = dict.fromkeys(firsts, (0, now))
        """Number of heartbeats of each machine, and the time (monotonic, in seconds) at which the last one was seen."""
        self._last = 0.0
        self._store: Any = None

    def silent(self, limit: float) -> list[str]:
        """Send a heartbeat if one is due, then return the other machines without one for more than `limit` seconds."""
        now = time.monotonic()
        if not self._is_first or now - self._last < BEAT_SECONDS:
            return []
        self._last = now
        with contextlib.suppress(RuntimeError):  # a lost machine may take the store with it: no heartbeats then
            if self._store is None:
                address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                self._store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=BEAT_SECONDS))  # type: ignore[attr-defined]
            for host, key in self._keys.items():
                count = self._store.add(key, int(host == self._host))
                if count != self._heard[host][0]:
                    self._heard[host] = count, now
        return [host for host, (_, heard) in self._heard.items() if host != self._host and now - heard > limit]


def collectives_raise() -> bool:
    """Return whether collectives of the process group raise in Python if a process is gone or does not answer."""
    return dist.get_backend() == "gloo"


def end_of_work(device: torch.device) -> Any:
    """Record an event that completes when the device has finished all work queued so far; None without CUDA."""
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)  # for this thread
    event = torch.cuda.Event()
    event.record()
    return event


def _how(pid: int) -> str:
    """Exit code or signal of a process not yet reaped by its parent, which Linux shows to its owner; else empty."""
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
