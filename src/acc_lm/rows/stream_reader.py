"""Shards -> documents -> rows of one stream after the other, in a separate process that reads ahead of the training.

    shards of stream s ──► records ──► documents ──► ids ──► rows ──► blocks (shuffled, or not) ──► chunks ──► a pipe

The pipe and the queue before it are bounded, so the reader waits when its chunks are not consumed. A chunk holds the rows
that one optimizer step takes from a stream, and the state from which the stream continues after them.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import RawIOBase
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from acc_lm.config import DataConfig
from acc_lm.errors import DataError, first_line
from acc_lm.launcher import request_death_signal
from acc_lm.rows.order import own_seed, permutation
from acc_lm.text.contents import were_known
from acc_lm.text.corpus import stream_dataset
from acc_lm.text.documents import Skipped, hash_text, text_in
from acc_lm.text.encoder import TextEncoder
from acc_lm.text.files import read_shard
from acc_lm.text.locations import find_files
from acc_lm.text.tokenizer import cut_text

PAUSES = (1.0, 2.0, 4.0)
"""Seconds before each retry of a shard that could not be read; after the last retry the reader gives up."""
CHUNK_CHARACTERS, CHUNK_DOCUMENTS = 1 << 18, 1024
"""Size of one encoding call, in characters and in documents: small enough that the first row is ready soon."""
QUEUED_CHUNKS = 16
HEADER = struct.Struct("<c6q")
CHUNK, ERROR = b"C", b"E"


class Position(NamedTuple):
    """Position of a token in a stream."""

    epoch: int = 0
    """Number of complete passes over the shards of the stream before this token."""
    shard: int = 0
    """Index of the shard in the order of this pass."""
    record: int = 0
    offset: int = 0
    """Number of tokens of the record's text before this one."""
    skipped: int = 0
    """Number of records without text in this pass so far."""


class State(NamedTuple):
    """State from which a stream continues: `row` begins at `position`. With blocks it is the first row of a block."""

    row: int
    position: Position

    def pack(self) -> list[int]:
        return [self.row, *self.position]

    @staticmethod
    def unpack(numbers: Iterable[int]) -> State:
        row, *position = numbers
        return State(row, Position(*position))


@dataclass(frozen=True)
class Shards:
    """Parts in which a corpus is read: files, or the shards of a dataset."""

    names: tuple[str, ...]
    key: str
    """Hash of the names, because the text itself is not read in advance."""
    open: Callable[[int], Iterator[tuple[str, Any]]]
    """Function: number of a shard -> pairs (place for error messages, record) of the shard."""
    former_key: str | None = None
    """Key in the formats up to rows-1, which also hashed a dataset's folder; None if they read it differently."""


def open_shards(config: DataConfig) -> Shards:
    """Find the shards that a recipe names, without reading any.

    Raises:
        DataError: a file or dataset is missing.
    """
    if config.source == "files":
        files = find_files(config.files, "data.files", config.cache_dir)
        key = hash_text(repr([file.name for file in files]))  # no sizes: a truncated shard may be repaired
        former_key = key if were_known(files) else None
        names = tuple(map(str, files))
        return Shards(names, key, lambda number: read_shard(files[number], config.text_column), former_key)
    dataset = stream_dataset(config, config.dataset_split)
    about = f"{config.dataset} ({config.dataset_split})"
    names = tuple(f"{about}: shard {number}" for number in range(dataset.num_shards))

    def read(number: int) -> Iterator[tuple[str, Any]]:
        for count, record in enumerate(dataset.shard(dataset.num_shards, number), start=1):
            yield f"{names[number]}: record {count}", record

    folder = Path(str(config.dataset))
    known_by: Any = config.dataset
    if folder.is_dir():  # known by its files, whatever its path and its name
        inside = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and file.suffix != ".md")
        # Hidden files, such as those of git or of a download, come and go while the text stays the same.
        known_by = sorted(str(file) for file in inside if not any(part.startswith(".") for part in file.parts))
    key = hash_text(repr((known_by, config.dataset_split, len(names), config.dataset_config)))
    return Shards(names, key, read, hash_text(repr((names, config.dataset_config))))


class Stream:
    """One of the streams in which a corpus is read: every `num_streams`-th shard, pass after pass.

    Args:
        encoder: encoder of plain text.
    """

    def __init__(
        self, number: int, shards: Shards, config: DataConfig, encoder: TextEncoder, dtype: Any, seed: int
    ) -> None:
        self.number, self._shards, self._config, self._seed = number, shards, config, seed
        self._encoder, self._dtype = encoder, dtype
        self._own = np.arange(number, len(shards.names), config.num_streams)

    def _records(self, shard: int, first: int) -> Iterator[tuple[int, str, Any]]:
        """Triples (number, place, record) from record `first` on; a failed read is retried from the record that failed.

        Raises:
            DataError: the last retry failed too.
        """
        number, failures = first, 0
        while True:
            try:
                for place, record in islice(self._shards.open(shard), number, None):
                    yield number, place, record
                    number, failures = number + 1, 0
                return
            except Exception as error:  # files, networks and formats raise dozens of kinds; each may be temporary
                if failures == len(PAUSES):
                    reason = " ".join(str(error).split())[:300] or type(error).__name__
                    raise DataError(
                        f"{self._shards.names[shard]} must be readable to its end, got {failures + 1} errors after record {number}: "
                        f"{reason}; repair it, then run the same command to resume from the last checkpoint"
                    ) from None
                print(
                    f"warning: {self._shards.names[shard]} could not be read ({first_line(error)}); "
                    f"trying again in {PAUSES[failures]:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(PAUSES[failures])
                failures += 1

    def _documents(self, start: Position) -> Iterator[tuple[Position, str]]:
        """Pairs (position of the first token, text) of every document, from the record of `start` on."""
        read, position, has_text = text_in(self._config.text_column), start, False
        while True:
            skipped = Skipped(self._config.skip_bad_rows, position.skipped)
            order = self._own
            if self._config.shuffle_buffer is not None:
                order = order[permutation(own_seed(self._seed, 2 * self.number + 1), position.epoch, len(order))]
            for place in range(position.shard, len(order)):
                first = position.record if place == position.shard else 0
                for number, where, record in self._records(int(order[place]), first):
                    before = skipped.count
                    text = read(record, where, skipped)
                    if text is not None:
                        has_text = True
                        yield Position(position.epoch, place, number, 0, before), text
            if not has_text and position == Position(position.epoch):
                raise DataError(
                    f"data: each of the {self._config.num_streams} streams must have text, got none in stream {self.number}: "
                    f"{self._shards.names[self.number]} and every {self._config.num_streams}-th shard after it; lower data.num_streams"
                )
            position, has_text = Position(position.epoch + 1), False

    def _tokens(self, start: Position) -> Iterator[list[tuple[Position, np.ndarray]]]:
        """Lists of a few documents each, from `start` on: (position of the first id, ids with the end token)."""
        offset, end = start.offset, [self._encoder.end]
        for batch, error in _in_batches(self._documents(start)):
            pieces = [cut_text(text, self._encoder.backend) for _, text in batch]
            encoded = iter(self._encoder.encode(list(chain(*pieces))))
            done = []
            for (position, _), own in zip(batch, pieces, strict=True):
                ids = np.concatenate([*(next(encoded) for _ in own), end], dtype=self._dtype, casting="unsafe")
                done.append((position._replace(offset=offset), ids[offset:]))
                offset = 0
            yield done
            if error is not None:
                raise error

    def _rows(self, start: Position) -> Iterator[tuple[np.ndarray, Position]]:
        """Pairs (ids of a row [sequence_length + 1], position where the next row begins)."""
        length = self._config.sequence_length
        ids = np.zeros(0, dtype=self._dtype)
        begins: list[int] = []
        positions: list[Position] = []
        for batch in self._tokens(start):
            end = len(ids)
            for position, document in batch:
                begins.append(end)
                positions.append(position)
                end += len(document)
            ids = np.concatenate([ids, *(document for _, document in batch)])
            count = max(len(ids) - 1, 0) // length
            places = np.arange(1, count + 1) * length
            inside = np.searchsorted(begins, places, side="right") - 1
            for row, (place, document_number) in enumerate(zip(places.tolist(), inside.tolist(), strict=True)):
                at = positions[document_number]
                at = at._replace(offset=at.offset + place - begins[document_number])
                yield ids[row * length : place + 1], at
            if count:
                first, cut = int(inside[-1]), int(places[-1])
                positions = [at, *positions[first + 1 :]]
                begins = [0, *(begin - cut for begin in begins[first + 1 :])]
                ids = ids[cut:]

    def rows(self, state: State, first_row: int) -> Iterator[tuple[np.ndarray, State]]:
        """Pairs (ids, state after the row) of every row from `first_row` on, in the order in which they are learned.

        Args:
            state: state at `first_row`, or at the start of the block that contains it.
        """
        rows, size = self._rows(state.position), self._config.shuffle_buffer
        if size is None:
            for number, (ids, position) in enumerate(rows, start=state.row):
                if number >= first_row:
                    yield ids, State(number + 1, position)
        while size is not None:
            block = list(islice(rows, size))
            after = State(state.row + size, block[-1][1])
            order = permutation(own_seed(self._seed, 2 * self.number + 2), state.row // size, size)
            for number, place in enumerate(order.tolist(), start=state.row):
                if number >= first_row:
                    yield block[place][0], state if number + 1 < after.row else after
            state = after


def _in_batches(
    documents: Iterator[tuple[Position, str]],
) -> Iterator[tuple[list[tuple[Position, str]], Exception | None]]:
    """Batches of a few documents; an error comes with the documents before it, so no readable document is lost."""
    batch: list[tuple[Position, str]] = []
    characters = 0
    while True:
        try:
            document = next(documents)
        except Exception as error:
            yield batch, error
            return
        batch.append(document)
        characters += len(document[1])
        if characters >= CHUNK_CHARACTERS or len(batch) == CHUNK_DOCUMENTS:
            yield batch, None
            batch, characters = [], 0


def read_streams(job: dict[str, Any]) -> Iterator[tuple[State, list[np.ndarray]]]:
    """Chunks of all streams of a job: in each step, one chunk of each stream after the other."""
    from tokenizers import Tokenizer

    config = DataConfig.model_validate_json(json.dumps(job["config"]))
    shards, backend, dtype = open_shards(config), Tokenizer.from_str(job["tokenizer"]), np.dtype(job["dtype"])
    backend.encode_special_tokens = True  # plain text; the tokenizer's JSON does not keep this flag
    encoder = TextEncoder(backend, job["end"])
    streams = [
        Stream(int(number), shards, config, encoder, dtype, job["seed"]).rows(State.unpack(state), job["first_row"])
        for number, state in job["streams"].items()
    ]
    while True:
        for stream in streams:
            rows, states = zip(*islice(stream, job["rows_per_step"]), strict=True)
            yield states[-1], list(rows)


def main() -> None:
    """Read a job from standard input and write its chunks to standard output, until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the process group; the training process handles them
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of libraries must not mix with the chunks
    job = json.loads(sys.stdin.buffer.readline())
    request_death_signal(signal.SIGKILL)()
    if os.getppid() != job["parent"]:
        return
    chunks: queue.Queue[bytes | None] = queue.Queue(job["queued_chunks"])
    writer = threading.Thread(target=_write, args=(chunks, out), daemon=True)
    writer.start()
    try:
        for state, rows in read_streams(job):
            chunks.put(HEADER.pack(CHUNK, *state.pack()) + np.concatenate(rows).tobytes())
    except Exception as error:  # the training process reports the error and exits with its code
        text = json.dumps([type(error).__name__, str(error)]).encode()
        chunks.put(HEADER.pack(ERROR, len(text), 0, 0, 0, 0, 0) + text)
    chunks.put(None)
    writer.join()


def _write(chunks: queue.Queue[bytes | None], out: RawIOBase) -> None:
    with contextlib.suppress(BrokenPipeError), out:
        while (chunk := chunks.get()) is not None:
            left = memoryview(chunk)
            while left:
                left = left[out.write(left) or 0 :]
        return
    os._exit(0)  # the other end of the pipe is closed


def command() -> tuple[list[str], dict[str, str]]:
    """Command line that starts a reader, and the environment that it needs."""
    package = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-P", "-m", "acc_lm.rows.stream_reader"], environment


if __name__ == "__main__":
    main()
