"""Documents encoded part by part, by several processes if requested; finished parts survive an interruption.

    stretches of files ──► processes: documents ──► parts ──► arrays ──► files ──► this process, in order

A process reads a stretch by itself. A file that cannot be cut and holds more than a process's share of the text is read
here, and its parts are sent to the processes.
"""

from __future__ import annotations

import os
import signal
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from acc_lm.errors import MachineError
from acc_lm.launcher import request_death_signal
from acc_lm.text.documents import Document, Documents, Skipped, Stretch

PART_OF_TEXT = 4_000_000
"""Characters of text that are encoded in one call, at least."""
PART_OF_CONVERSATIONS = 200_000
"""The same for conversations, so that the progress bar moves often enough."""
AHEAD = 2
"""Parts in progress or waiting, per process."""
Encoded = dict[str, np.ndarray]
Encoder = Callable[[list[Document]], Encoded]


def in_parts(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Lists of consecutive documents, each of at least `size` characters but the last."""
    part: list[Document] = []
    characters = 0
    for document in documents:
        part.append(document)
        characters += len(document.text)
        if characters >= size:
            yield part
            part, characters = [], 0
    if part:
        yield part


@dataclass(frozen=True)
class Preparation:
    """Settings of `acc-lm data prepare`; by default, this process encodes one part after the other and keeps none."""

    num_processes: int = 0
    """Number of processes that encode parts; 0: this one, in the tokenizer's threads."""
    folder: Path | None = None
    """Folder in which finished parts are kept until the rows are complete; needed for more than this process."""

    def inside(self, name: str) -> Preparation:
        """The same settings with a folder of their own for the parts of one text."""
        return self if self.folder is None else Preparation(self.num_processes, self.folder / name)

    def encode(
        self, name: str, documents: Documents, num_skipped: int, encode: Encoder, size: int
    ) -> Generator[Encoded]:
        """Encoded parts of a text, in order.

        Args:
            name: prefix of the files of finished parts.
            num_skipped: number of records without usable text that may be skipped.
            size: characters of a part, at least.

        Raises:
            MachineError: a process that encodes ended early.
        """
        if not self.num_processes:
            yield from map(encode, in_parts(documents(Skipped(num_skipped)), size))
            return
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        own = _Process(self.folder / name, documents, num_skipped, encode, size)
        pool = ProcessPoolExecutor(self.num_processes, get_context("fork"), _begin, (own,))
        waiting: deque[Future[list[Path]]] = deque()
        try:
            for task in self._tasks(documents, num_skipped, size):
                waiting.append(pool.submit(_work, *task))
                if len(waiting) > AHEAD * self.num_processes:
                    yield from map(_load, waiting.popleft().result())
            while waiting:
                yield from map(_load, waiting.popleft().result())
        except BrokenProcessPool:
            raise MachineError(
                f"--processes must leave enough memory, got {self.num_processes} and one was ended from outside; lower it"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)

    def _tasks(
        self, documents: Documents, num_skipped: int, size: int
    ) -> Iterator[tuple[int, Stretch | list[Document], int]]:
        """Numbered stretches, or parts of one that would keep a single process busy at the end."""
        read = documents.read_stretch
        if documents.stretches is None or read is None:
            for count, part in enumerate(in_parts(documents(Skipped(num_skipped)), size)):
                yield 0, part, count
            return
        for number, stretch in enumerate(documents.stretches()):
            if stretch.end is not None or stretch.num_bytes * self.num_processes <= documents.num_bytes:
                yield number, stretch, 0
                continue
            for count, part in enumerate(in_parts(read(stretch, Skipped(num_skipped)), size)):
                yield number, part, count


NO_PREPARATION = Preparation()


@dataclass(frozen=True)
class _Process:
    """Everything that a process inherits, because functions with their tokenizers cannot be sent."""

    prefix: Path
    documents: Documents
    num_skipped: int
    encode: Encoder
    size: int

    def finish(self, number: int, count: int, part: list[Document]) -> Path:
        """The file of an encoded part, made now unless it is there."""
        file = self.prefix.with_name(f"{self.prefix.name}-{number:06}-{count:06}.npz")
        if not _is_complete(file):
            unfinished = file.with_name(f"tmp-{file.name}")
            with unfinished.open("wb") as stream:
                np.savez(stream, **self.encode(part))  # type: ignore[arg-type]
            unfinished.rename(file)
        return file


_PROCESS: list[_Process] = []


def _begin(own: _Process) -> None:
    request_death_signal(signal.SIGKILL)()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _PROCESS.append(own)


def _work(number: int, work: Stretch | list[Document], count: int) -> list[Path]:
    """Files of the encoded parts of a stretch, or of one part."""
    own = _PROCESS[0]
    if not isinstance(work, Stretch):
        return [own.finish(number, count, work)]
    assert own.documents.read_stretch is not None
    documents = own.documents.read_stretch(work, Skipped(own.num_skipped))
    return [own.finish(number, count, part) for count, part in enumerate(in_parts(documents, own.size))]


def _is_complete(file: Path) -> bool:
    """True for a finished part of an earlier start; False for a missing or damaged one."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return False


def _load(file: Path) -> Encoded:
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)
