"""Rows that arrive during training: the output of the `stream_reader` processes, under the contract of `Rows`.

Every process reads complete streams of its own, so the rows of a step are the same for any number of processes that
divides `data.num_streams`. Every checkpoint has the state of each stream after the newest step. A resumed run reads no
more than the shard in which each of its streams stopped, and with a shuffle buffer the rows of that block.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from acc_lm.config import DataConfig
from acc_lm.errors import CheckpointError, DataError
from acc_lm.rows.batch import KEPT_APART
from acc_lm.rows.order import StreamOrder
from acc_lm.rows.packing import apart, shifted
from acc_lm.rows.stream_reader import CHUNK, HEADER, QUEUED_CHUNKS, State, command
from acc_lm.text.tokenizer import count_ids, id_dtype, text_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIPE_BYTES = 1 << 20
SET_PIPE_SIZE = 1031  # fcntl's F_SETPIPE_SZ on Linux


class StreamRows(Dataset[dict[str, torch.Tensor]]):
    """The rows of all streams, numbered as in `StreamOrder`; inside `reading` each can be read once, in that order.

    Outside `reading` there are only rows of the right shape, for a trial of whether a step fits.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.sequence_length, self.num_streams = config.sequence_length, config.num_streams
        self.end = None if config.attend_across_documents else tokenizer.eos_token_id
        self._config, self._seed = config, seed
        self._dtype = np.dtype(id_dtype(count_ids(tokenizer)))
        self._job = {"tokenizer": text_encoder(tokenizer).to_str(), "end": tokenizer.eos_token_id}
        self._readers: dict[int, StreamReader] = {}
        self._states: dict[int, State] = {}
        """State of each stream after its newest chunk."""
        self._chunks: dict[int, tuple[int, np.ndarray]] = {}
        """Newest chunk of each stream: (number of its first row, ids)."""
        self._passes = 0
        self._news: list[str] = []

    @property
    def packs(self) -> bool:
        return self.end is not None

    @property
    def padded_lengths(self) -> None:
        return None

    @property
    def fill(self) -> tuple[str, str]:
        return KEPT_APART

    @contextlib.contextmanager
    def reading(
        self, order: StreamOrder, step: int, saved: dict[str, list[int]] | None, process: int, num_processes: int
    ) -> Iterator[None]:
        """Context in which the rows of the steps after `step` are read ahead.

        Args:
            saved: `states` after that step, of all processes; None: the streams are read from their beginning.

        Raises:
            CheckpointError: `saved` belongs to other streams.
        """
        share = order.global_batch_size // self.num_streams
        first_row = order.places_after(step) // self.num_streams
        own = np.array_split(np.arange(self.num_streams), num_processes)[process].tolist()
        size = self._config.shuffle_buffer or 1
        begin = State(first_row // size * size, State.unpack([0] * 6).position)
        states = dict.fromkeys(own, begin)
        if saved is not None:
            found = {int(stream): State.unpack(numbers) for stream, numbers in saved.items()}
            if len(found) != self.num_streams or any(not s.row <= first_row < s.row + size for s in found.values()):
                raise CheckpointError(
                    f"data.num_streams and data.shuffle_buffer must match the checkpoint of {len(found)} streams "
                    "that the run resumes from, got others; restore them, or choose another output_dir"
                )
            states = {stream: found[stream] for stream in own}
        num_readers = min(max(self._config.num_workers, 1), len(own))
        job = self._job | {
            "config": self._config.model_dump(mode="json"),
            "dtype": self._dtype.name,
            "seed": self._seed,
            "first_row": first_row,
            "rows_per_step": share,
            "parent": os.getpid(),
            "queued_chunks": max(QUEUED_CHUNKS, -(-2 * (self._config.shuffle_buffer or 0) * len(own) // share)),
        }
        try:
            for number in range(num_readers):
                mine = own[number::num_readers]
                streams = {str(stream): states[stream].pack() for stream in mine}
                reader = StreamReader(job | {"streams": streams}, (share, self.sequence_length + 1), self._dtype)
                self._readers |= dict.fromkeys(mine, reader)
            self._passes = max(state.position.epoch for state in states.values())
            self._states, self._chunks = states, dict.fromkeys(own, (first_row, np.zeros((0, 0))))
            yield
        finally:
            for reader in dict.fromkeys(self._readers.values()):
                reader.close()
            self._readers, self._states, self._chunks = {}, {}, {}

    def states(self) -> dict[str, list[int]] | None:
        """State of each stream of this process after the rows consumed so far; None if no stream is being read."""
        return {str(stream): state.pack() for stream, state in self._states.items()} or None

    def news(self) -> list[str]:
        """Messages since the last call: a line for the first stream of this process that begins another pass."""
        lines, self._news = self._news, []
        return lines

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([row])

    def __getitems__(self, rows: Iterable[int]) -> dict[str, torch.Tensor]:
        """Batch of these rows, with the keys of a batch of `Rows`; every row is full."""
        rows = list(rows)
        ids = np.zeros((len(rows), self.sequence_length + 1), dtype=np.int64)
        for place, row in enumerate(rows if self._readers else ()):
            number, stream = divmod(int(row), self.num_streams)
            ids[place] = self._row(stream, number)
        batch = shifted(ids)
        return batch if self.end is None else batch | apart(ids[:, :-1], self.end)

    def _row(self, stream: int, number: int) -> np.ndarray:
        first, ids = self._chunks[stream]
        if number == first + len(ids):
            self._states[stream], ids = self._readers[stream].next_chunk()
            first = number
            self._chunks[stream] = first, ids
            if (passes := self._states[stream].position.epoch) > self._passes:
                self._passes = passes
                self._news.append(f"stream {stream} reached its end, pass {passes}; it continues with its first shard")
        assert first <= number < first + len(ids), "each row of a stream can be read once, in order"
        row: np.ndarray = ids[number - first]
        return row

    def count_targets(self, rows: np.ndarray) -> int:
        """Number of targets in these rows."""
        assert self._readers, "rows can be read only inside `reading`"
        return len(rows) * self.sequence_length


class StreamReader:
    """Process that reads some streams ahead: a chunk of each, in their order, again and again.

    Args:
        job: the job that `stream_reader.main` reads.
        shape: shape of the ids of a chunk.
    """

    def __init__(self, job: dict[str, Any], shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
        self._shape, self._dtype = shape, dtype
        arguments, environment = command()
        # A session of its own, so Ctrl-C on a terminal reaches only the training process, which handles it.
        self._process = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        with contextlib.suppress(OSError):  # a limit of this machine, or not Linux: the pipe stays smaller
            fcntl.fcntl(self._pipe, SET_PIPE_SIZE, PIPE_BYTES)
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(job).encode() + b"\n")

    def next_chunk(self) -> tuple[State, np.ndarray]:
        """Wait for the next chunk and return (state after it, ids).

        Raises:
            DataError: a shard could not be read, or the reader process has ended.
        """
        header = self._pipe.read(HEADER.size)
        if len(header) < HEADER.size:
            raise self._said(
                f"the process that reads the streams must keep running, got its exit ({self._process.wait()})"
            )
        kind, *numbers = HEADER.unpack(header)
        if kind != CHUNK:
            name, problem = json.loads(self._pipe.read(numbers[0]))
            raise self._said(problem if name == "DataError" else f"the streams must be readable, got {name}: {problem}")
        size = self._shape[0] * self._shape[1]
        ids = np.frombuffer(self._pipe.read(size * self._dtype.itemsize), dtype=self._dtype)
        if len(ids) < size:
            raise self._said(
                f"the process that reads the streams must keep running, got its exit ({self._process.wait()})"
            )
        return State.unpack(numbers), ids.reshape(self._shape)

    @staticmethod
    def _said(problem: str) -> DataError:
        error = DataError(problem)
        error.speaks = True  # only this process has the error
        return error

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
