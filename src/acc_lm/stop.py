"""Requests to stop or to save: signals, files, a time limit."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from acc_lm.errors import EXIT_INTERRUPTED, Preempted
from acc_lm.launcher import is_main_process, is_torchrun

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SAVE = "SAVE"
"""Answer of `StopRequest.agreed` that asks for a checkpoint without ending the run."""
FAILED_SAVE = "a checkpoint that could not be written"
# Processes agree on the highest number that any of them has; signals have the system's numbers, which are below 65.
NUMBERS = {
    SAVE: 1,
    **{number.name: int(number) for number in SIGNALS},
    "the file STOP": 101,
    "training.max_minutes": 102,
    FAILED_SAVE: 103,
}
NAMES = {number: name for name, number in NUMBERS.items()}
FILE_SECONDS = 0.5
STUCK_SECONDS = 30.0


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the signal handlers on exit, whatever handlers a run that failed has left."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that was not set from Python. A handler that differs was changed by the main thread, the
            # only one that may set any, so this is the main thread.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


class StopRequest:
    """Requests to stop or to save, as a flag that all processes agree on after a step.

    Requests are signals, a file STOP or SAVE in the run's folder, and a time limit. In the loop they wait for the end of
    the step; before and after the loop there is nothing to save, and a signal ends the run immediately. A second Ctrl-C
    exits immediately, but two within a second count as one, because launchers forward a Ctrl-C to processes that have
    already received it.
    """

    def __init__(self, output_dir: Path, max_minutes: float | None = None) -> None:
        self._output_dir = output_dir
        running = time.time() - psutil.Process().create_time()  # imports take seconds, which count towards the limit
        self._end = None if max_minutes is None else time.monotonic() - running + 60 * max_minutes
        self._reason: str | None = None
        self._wants_save = False
        self._started = time.time()
        self._looked = 0.0
        self._first_interrupt: float | None = None
        self._handled = 0
        self._in_loop = False
        self._group: Any = None

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle signals while the context lasts."""
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        looks = threading.Thread(target=self._leave_if_stuck, args=(reader, os.getppid()), daemon=True, name="stuck")
        looks.start()
        after: dict[Any, Any] = dict(before)
        try:
            yield self
        except BaseException:
            # The error has not been printed and recorded yet, and a launcher that has seen another process end sends a
            # SIGTERM at this moment, which must not interrupt that.
            after |= dict.fromkeys(after.keys() - {signal.SIGINT}, signal.SIG_IGN)
            raise
        finally:
            signal.set_wakeup_fd(wakeup)
            writer.close()
            looks.join(1.0)
            reader.close()
            for number, handler in after.items():
                signal.signal(number, handler)

    def _leave_if_stuck(self, signals: socket.socket, launcher: int) -> None:
        """Exit if a signal is not handled for STUCK_SECONDS and the launcher is gone.

        A process that waits for others inside a library handles no signal, and without its launcher nothing else would end
        it. The system writes the number of each signal to this socket before Python handles it.
        """
        while number := signals.recv(1):
            if number[0] not in SIGNALS:
                continue
            end = time.monotonic() + STUCK_SECONDS
            while self._handled == 0 and time.monotonic() < end:
                time.sleep(0.1)
            if self._handled == 0 and os.getppid() != launcher:
                os.write(2, b"\nstuck in a library, and the launcher is gone: exiting\n")
                os._exit(128 + number[0])

    @contextmanager
    def saving(self, group: Any) -> Iterator[None]:
        """Context of the training loop, in which a request waits for `agreed`. Every process must call it.

        Args:
            group: process group on the CPU, because agreeing must not wait for the device; None with one process.
        """
        self._group = group
        for name in ("STOP", SAVE):
            file = self._output_dir / name
            if is_main_process() and file.is_file() and file.stat().st_mtime < self._started:
                print(f"removed {file}, which was there before the run started", file=sys.stderr)
                file.unlink()
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False

    def _handle(self, number: int, frame: Any) -> None:
        self._handled += 1
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._first_interrupt is not None and now - self._first_interrupt > 1.0:
                os.write(2, b"\ninterrupted twice: exiting immediately, nothing saved since the last checkpoint\n")
                os._exit(EXIT_INTERRUPTED)
            self._first_interrupt = self._first_interrupt or now
        name = signal.Signals(number).name
        if self._reason is not None:
            if is_main_process():
                os.write(2, f"\n{name}: already stopping, because of {self._reason}\n".encode())
            return
        self._reason = name
        if not self._in_loop:
            raise Preempted(f"stopped by {name} with nothing new to save; run the same command to resume")
        if is_main_process():
            # A launcher turns a second Ctrl-C into a SIGTERM.
            hint = "" if is_torchrun() else " (a second Ctrl-C exits immediately)"
            os.write(2, f"\n{name}: finishing the step, then saving{hint}\n".encode())

    def _mine(self) -> int:
        """This process's request as an integer for the all-reduce; only the main process looks for the files."""
        now = time.monotonic()
        if self._reason is None and self._end is not None and now > self._end:
            self._reason = "training.max_minutes"
        if now - self._looked > FILE_SECONDS and is_main_process():
            self._looked = now
            if self._reason is None and (self._output_dir / "STOP").is_file():
                self._reason = "the file STOP"
            self._wants_save = (self._output_dir / SAVE).is_file()
        return NUMBERS[self._reason] if self._reason else int(self._wants_save)

    def agreed(self) -> str | None:
        """Reason to stop, SAVE, or None; the same on every process. Every process must call it after a step."""
        number = self._mine()
        if self._group is not None:
            import torch
            import torch.distributed as dist

            numbers = torch.tensor([number])
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
            number = int(numbers.numpy()[0])
        return NAMES.get(number)

    def check(self) -> None:
        """Raise Preempted if `agreed` gives a reason to stop, in work that may be abandoned halfway.

        Every process must call it; outside the loop it does nothing.
        """
        if self._in_loop and (reason := self.agreed()) not in (None, SAVE):
            raise Preempted(f"stopped by {reason}")

    def ask(self, reason: str) -> None:
        """Request a stop from inside this process, from any of its threads."""
        self._reason = self._reason or reason

    def done(self) -> None:
        """Remove the STOP or SAVE file that asked for the checkpoint just saved; a file that came later stays."""
        if self._reason == "the file STOP":
            (self._output_dir / "STOP").unlink(missing_ok=True)
        if self._wants_save:
            (self._output_dir / SAVE).unlink(missing_ok=True)
        self._wants_save = False
