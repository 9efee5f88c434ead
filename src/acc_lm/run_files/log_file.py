"""`train.log`: lines that a run prints on the terminal, each with time and rank, appended over all of its starts."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, cast

from acc_lm.launcher import process_index
from acc_lm.redaction import printable, redact
from acc_lm.run_files.names import LOG


def append_lines(output_dir: Path, lines: Iterable[str]) -> None:
    """Append lines of this process in one piece; a full or broken disk loses them, and never ends the run."""
    start = f"{datetime.now(UTC).isoformat(timespec='seconds')} rank {process_index()}  "
    text = "".join((start + printable(redact(line))).rstrip() + "\n" for line in lines)
    with contextlib.suppress(OSError):
        # Without waiting for a reader, if a user has put a pipe there.
        descriptor = os.open(output_dir / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            os.write(descriptor, text.encode(errors="backslashreplace"))
        finally:
            os.close(descriptor)


def is_own_log(file: Path) -> bool:
    """True for a log that a start of a run has begun: another of its processes may be first, and a kill leave nothing else."""
    if not file.is_file():  # opening a pipe would wait for its other end
        return False
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline(200)
    except OSError:
        return False
    return not first or re.match(r"\d{4}-\d\d-\d\dT[\d:+]+ rank \d+  ", first) is not None


class CopiedStream:
    """Terminal stream whose complete lines are also appended to the log; text that a progress bar overwrites is left out."""

    def __init__(self, stream: TextIO, output_dir: Path) -> None:
        self._stream, self._output_dir = stream, output_dir
        self._pending = threading.local()  # of each thread, so that no lock is held in a signal handler or at a fork
        self._is_open = True

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        if self._is_open:
            *lines, rest = (getattr(self._pending, "text", "") + text).split("\n")
            self._pending.text = rest.rpartition("\r")[2]
            if lines:
                append_lines(self._output_dir, (line.rstrip("\r").rpartition("\r")[2] for line in lines))
        return written

    def stop_copying(self) -> None:
        """Stop copying: a library may keep this stream beyond the run."""
        if self._is_open and getattr(self._pending, "text", "").strip():
            append_lines(self._output_dir, [self._pending.text])
        self._is_open = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def copied_to_log(output_dir: Path) -> Iterator[None]:
    """Context in which everything that this process prints from Python is also appended to the log of the run."""
    before = sys.stdout, sys.stderr
    copies = [CopiedStream(stream, output_dir) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, copy) for copy in copies)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for copy in copies:
            copy.stop_copying()
