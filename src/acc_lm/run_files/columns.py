"""`metrics.jsonl` as arrays by metric: a million lines in seconds, and only the new lines at the next look."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from acc_lm.run_files.names import METRICS

Floats = NDArray[np.float64]
LARGEST_STEP = 1 << 53
LARGEST_VALUE = 1e200
"""Size from which a value counts as infinite, so that sums and scales of finite ones are finite."""
MAX_METRICS = 1000
"""Number of different names that are kept; a file with more is damaged or no run's."""


@dataclass(frozen=True)
class Curve:
    """Finite values of one metric, by step."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        return float(self.values[-1])


EMPTY = Curve(np.empty(0), np.empty(0))


@dataclass
class MetricColumns:
    """Finite values of all metrics by name, read from a file that may still grow."""

    _pairs: dict[str, tuple[array[float], array[float]]] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)
    """Number of values that were null, nan or infinite, by metric."""
    num_lines: int = 0
    num_damaged: int = 0
    """Number of lines that are not those of a step."""
    _offset: int = 0
    _file: tuple[int, int] = (0, 0)

    def update(self, output_dir: Path) -> None:
        """Read the lines added since the last call; all of them if the file was replaced, as a resumed run does.

        A last line without its end is left for the next call.

        Raises:
            OSError: the file is missing or cannot be read.
        """
        path = output_dir / METRICS
        if path.exists() and not path.is_file():
            raise OSError(0, "not a regular file")
        with path.open("rb") as file:
            facts = path.stat()
            identity = (facts.st_dev, facts.st_ino)
            if identity != self._file or facts.st_size < self._offset:
                self.__init__()  # type: ignore[misc]
                self._file = identity
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(line)

    def add(self, entries: Iterable[dict[str, Any]]) -> MetricColumns:
        """Add entries that were read already."""
        for entry in entries:
            self._add(entry)
        return self

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict):
            self._add(entry)
        else:
            self.num_damaged += bool(line.strip())

    def _add(self, entry: dict[str, Any]) -> None:
        step = entry.get("step")
        if type(step) is not int or not 0 <= step < LARGEST_STEP:
            self.num_damaged += 1
            return
        self.num_lines += 1
        for name, value in entry.items():
            if value is None or (type(value) is float and not abs(value) < LARGEST_VALUE):
                self.nonfinite[name] = self.nonfinite.get(name, 0) + 1
            elif type(value) is float or (type(value) is int and abs(value) < LARGEST_STEP):
                pair = self._pairs.get(name)
                if pair is None:
                    if len(self._pairs) >= MAX_METRICS:
                        continue
                    pair = self._pairs[name] = (array("d"), array("d"))
                pair[0].append(step)
                pair[1].append(value)

    @property
    def names(self) -> list[str]:
        return list(self._pairs)

    @property
    def is_in_order(self) -> bool:
        """True if no step was logged twice or after a later one."""
        steps, _ = self._pairs.get("train/loss", (array("d"), array("d")))
        return bool(np.all(np.diff(np.array(steps)) > 0))

    @property
    def last_step(self) -> int:
        steps, _ = self._pairs.get("step", (array("d"), array("d")))
        return int(max(steps, default=0))

    def curve(self, name: str) -> Curve:
        """Values of a metric in the order of their steps; the last one of a step that occurs twice."""
        if name not in self._pairs:
            return EMPTY
        steps, values = (np.array(part) for part in self._pairs[name])
        if len(steps) > 1 and not np.all(steps[1:] > steps[:-1]):
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
            is_last = np.append(steps[1:] != steps[:-1], True)
            steps, values = steps[is_last], values[is_last]
        return Curve(steps, values)

    def parts(self, prefix: str, suffix: str = "") -> list[str]:
        """Middle parts of the metrics `prefix/<part>suffix`, in the order in which they were first logged."""
        ends = len(suffix) or None
        return [
            name[len(prefix) + 1 : ends and -ends]
            for name in self._pairs
            if name.startswith(f"{prefix}/") and name.endswith(suffix) and len(name) > len(prefix) + 1 + len(suffix)
        ]
