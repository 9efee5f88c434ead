"""Documents encoded part by part, by several processes if requested; finished parts survive an interruption."""

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
from acc_lm.text.documents import Document

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
    """Folder in which finished parts are kept until the rows are complete."""

    def inside(self, name: str) -> Preparation:
        """The same settings with a folder of their own for the parts of one text."""
        return self if self.folder is None else Preparation(self.num_processes, self.folder / name)

    def encode(self, name: str, documents: Iterable[Document], encode: Encoder, size: int) -> Generator[Encoded]:
        """Encoded parts of a text, in order.

        Args:
            name: prefix of the files of finished parts.
            size: characters of a part, at least.

        Raises:
            MachineError: a process that encodes ended early.
        """
        if not self.num_processes:
            yield from map(encode, in_parts(documents, size))
            return
        pool = ProcessPoolExecutor(self.num_processes, get_context("fork"), _begin, (encode,))
        waiting: deque[tuple[Path | None, Future[Encoded] | Encoded]] = deque()
        try:
            for number, part in enumerate(in_parts(documents, size)):
                file = self.folder / f"{name}-{number:06}.npz" if self.folder else None
                done = _load(file)
                waiting.append((file, pool.submit(_encode, part) if done is None else done))
                if len(waiting) > AHEAD * self.num_processes:
                    yield _finished(*waiting.popleft())
            while waiting:
                yield _finished(*waiting.popleft())
        except BrokenProcessPool:
            raise MachineError(
                f"--processes must leave enough memory, got {self.num_processes} and one was ended from outside; lower it"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


NO_PREPARATION = Preparation()
_ENCODER: list[Encoder] = []
"""The function of this process, which it inherits because functions with their tokenizers cannot be sent."""


def _begin(encode: Encoder) -> None:
    request_death_signal(signal.SIGKILL)()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _ENCODER.append(encode)


def _encode(part: list[Document]) -> Encoded:
    return _ENCODER[0](part)


def _finished(file: Path | None, result: Future[Encoded] | Encoded) -> Encoded:
    """The result, kept in a file until all parts are finished."""
    if not isinstance(result, Future):
        return result
    arrays = result.result()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"tmp-{file.name}")
        with unfinished.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        unfinished.rename(file)
    return arrays


def _load(file: Path | None) -> Encoded | None:
    """A finished part of an earlier start; None if there is none, or a damaged one."""
    try:
        if file is None or not file.is_file():
            return None
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
