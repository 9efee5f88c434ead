"""Facts of a run, read from its folder; a missing or damaged file costs only its own part, with one line that says so."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from acc_lm.config import flatten, learned_changes
from acc_lm.errors import ConfigError, first_line
from acc_lm.run_files import metrics_file
from acc_lm.run_files.charts import Drawn
from acc_lm.run_files.columns import MetricColumns
from acc_lm.run_files.names import CHECKPOINTS, ENVIRONMENT, FINAL, METRICS, RECIPE, SAMPLES, STATE, SUMMARY
from acc_lm.run_files.output_dir import is_in_use, is_run_folder, is_supervised, when_taken

LARGEST_FILE = 1 << 26
"""Bytes of the largest JSON or YAML file that is read; a run writes none near that size."""
MAX_VALUES = 5000
"""Values of a recipe; aliases of YAML can make a short file stand for any number of them."""
PARITY_TABLE = "parity.json"
"""File of `acc-lm parity --output RUN/parity.md`, if it was written into the run's folder."""
PROFILE_TABLE = Path("profile", "summary.txt")
LARGEST_TEXT = 20_000
"""Characters that are shown of a text file."""
STEP_FOLDER = re.compile(r"step-(\d{8,15})")
EVENT_FILE = re.compile(r"(spike|nonfinite)_step_(\d{1,15})\.json")


@dataclass(frozen=True)
class SavedState:
    """A checkpoint of the run."""

    folder: Path
    step: int
    problem: str | None
    """Reason why it is not complete, by sizes, headers and the checksum of its state; None when it is."""
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def ledger(self) -> str:
        return words(self.state.get("progress"), "ledger")


@dataclass(frozen=True)
class StartOfRun:
    """A start of the run: at its first step, or after a checkpoint."""

    step: int
    time: str
    engine: str
    """Strategy and number of processes; empty when the run did not record them."""
    facts: dict[str, Any]


@dataclass
class RunRecord:
    """A run as its folder shows it."""

    folder: Path
    columns: MetricColumns
    is_live: bool
    is_supervised: bool = False
    """True while `acc-lm keep-going` follows the run."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Dotted keys and values of config.yaml."""
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    parity: dict[str, Any] = field(default_factory=dict)
    profile: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    starts: list[StartOfRun] = field(default_factory=list)
    checkpoints: list[SavedState] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    """(step, description) of each spike and each skipped step, of which the run wrote a file."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Line about each file that is missing or damaged, by its name."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def step(self) -> int:
        """Last step of which anything is known."""
        own = number(self.summary, "step") or 0
        return max(self.columns.last_step, 0 if self.is_live else int(own))

    @property
    def num_steps(self) -> int | None:
        """Steps of the complete run, as far as the files show it."""
        if (steps := number(self.recipe, "training.max_steps")) is not None:
            return int(steps)
        epochs, passed = number(self.recipe, "training.num_epochs"), self.columns.curve("train/epoch")
        if not self.is_live and (steps := number(self.summary, "num_steps")) is not None:
            return int(steps)
        return (
            math.ceil(epochs * passed.steps[-1] / passed.last) if epochs and len(passed) and passed.last > 0 else None
        )

    @property
    def status(self) -> str:
        """running, killed, or the status of summary.json; and that an ended attempt is not the last."""
        if self.is_live:
            return "running"
        killed = when_taken(self.folder) is not None
        ended = "killed" if killed else words(self.summary, "status") or "ended without summary.json"
        return f"{ended}, between two attempts of keep-going" if self.is_supervised else ended

    @property
    def continues(self) -> bool:
        """True while more can be expected from the run."""
        return self.is_live or self.is_supervised

    @property
    def compressors(self) -> dict[str, float]:
        """Bits per byte of gzip and xz on the text that the run's evaluations score; empty if they score another."""
        scores = self.summary.get("bits_per_byte") or self.environment.get("compressors")
        scores = scores if isinstance(scores, dict) else {}
        return {name: value for name in ("gzip", "xz") if (value := number(scores, name)) is not None}

    @property
    def drawn(self) -> Drawn:
        metric = words(self.recipe, "checkpoint.best_metric") or "eval/loss"
        return Drawn(self.name, self.columns, metric, self.compressors, resumes_of(self.starts))


# --- values of untrusted files ----------------------------------------------------------------------------------------


def number(values: Any, key: str) -> float | None:
    """Finite number at a key; None when there is none."""
    value = values.get(key) if isinstance(values, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return value


def words(values: Any, key: str) -> str:
    """Text at a key; empty when there is none."""
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, str) else ""


def listed(values: Any, key: str) -> list[Any]:
    """List at a key; empty when there is none."""
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, list) else []


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys of two recipes that differ in what is learned; none if they are no recipes."""
    try:
        return list(learned_changes(old, new))
    except (TypeError, AttributeError, RecursionError):
        return []


# --- reading -------------------------------------------------------------------------------------------------------


def read_record(folder: Path, columns: MetricColumns | None = None) -> RunRecord:
    """Read a run's folder.

    Args:
        columns: metrics of an earlier call, to which only the new lines are added.

    Raises:
        ConfigError: the folder is not that of a run.
    """
    check_is_run(folder)
    record = RunRecord(folder, columns or MetricColumns(), is_in_use(folder), is_supervised(folder))
    try:
        record.columns.update(folder)
    except OSError as error:
        record.reasons[METRICS] = f"{METRICS} {_why(error)}"
    for name, part in ((ENVIRONMENT, "environment"), (SUMMARY, "summary")):
        values, reason = _read_object(folder / name, name)
        setattr(record, part, values)
        if reason:
            record.reasons[name] = reason
    record.final, _ = _read_object(folder / FINAL / "run.json", f"{FINAL}/run.json")
    record.parity, _ = _read_object(folder / PARITY_TABLE, PARITY_TABLE)
    record.profile = _read_text(folder / PROFILE_TABLE)[-LARGEST_TEXT:]
    record.recipe = _read_recipe(folder, record.reasons)
    record.samples = _read_samples(folder, record.reasons)
    record.starts = starts_in(record.environment)
    record.checkpoints = _read_checkpoints(folder)
    record.events = _read_events(folder)
    return record


def check_is_run(folder: Path) -> None:
    """Refuse what is not the folder of a run.

    Raises:
        ConfigError: names the run that was probably meant.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "nothing there"
        inside = folder.exists() and _is_run(folder.parent)
        raise ConfigError(
            f"RUN must be the folder of a run, got {folder} ({what}); "
            + (f"name {folder.parent}" if inside else "name one like runs/quickstart")
        )
    if not _is_run(folder):
        near = next((parent for parent in list(folder.absolute().parents)[:2] if _is_run(parent)), None)
        inner = _runs_in(folder) if near is None else []
        meant = f"name {near}" if near else f"name one of those in it: {', '.join(map(str, inner))}"
        raise ConfigError(
            f"RUN must be the folder of a run, got {folder}, in which no run wrote; "
            + (meant if near or inner else "name one like runs/quickstart")
        )


def _runs_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))[:3]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    try:
        if is_run_folder(folder):
            return True
        if not (folder / METRICS).is_file():
            return False
        with (folder / METRICS).open("rb") as file:
            return any(name in file.readline(1 << 16) for name in (b"train/", b"eval/"))
    except OSError:
        return False


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"cannot be read ({error.strerror or first_line(error)})"


def _read_object(file: Path, name: str) -> tuple[dict[str, Any], str | None]:
    """Object in a JSON file, and the reason why it is left out; None: it is not."""
    try:
        if file.exists() and not file.is_file():
            return {}, f"{name} is not a file"
        if file.stat().st_size > LARGEST_FILE:
            return {}, f"{name} has {file.stat().st_size:,} bytes, more than a run writes"
        values = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return {}, f"{name} {_why(error)}"
    except (ValueError, RecursionError) as error:
        return {}, f"{name} is damaged ({first_line(error)})"
    return (values, None) if isinstance(values, dict) else ({}, f"{name} is damaged (no object)")


def _read_text(file: Path) -> str:
    try:
        if file.is_file() and file.stat().st_size <= LARGEST_FILE:
            return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        pass
    return ""


def _read_recipe(folder: Path, reasons: dict[str, str]) -> dict[str, Any]:
    """Keys of config.yaml as they are, also those of a recipe that this version would refuse."""
    file = folder / RECIPE
    if not file.is_file():
        reasons[RECIPE] = f"{RECIPE} is missing"
        return {}
    text = _read_text(file)
    try:
        values = _plain(YAML(typ="safe", pure=True).load(text), [MAX_VALUES])
        if isinstance(values, dict) and values:
            return flatten(values)
        reasons[RECIPE] = f"{RECIPE} is damaged (no mapping of keys)"
    except (YAMLError, ValueError, TypeError, RecursionError) as error:
        reasons[RECIPE] = f"{RECIPE} is damaged ({first_line(error)})"
    return {}


def _plain(value: Any, left: list[int]) -> Any:
    """Copy of a value with texts as keys.

    Raises:
        ValueError: it has more values than `left` allows.
    """
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"more than {MAX_VALUES} values")
    if isinstance(value, dict):
        return {str(key): _plain(inner, left) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, left) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _read_samples(folder: Path, reasons: dict[str, str]) -> list[dict[str, Any]]:
    file = folder / SAMPLES
    if not file.exists():
        return []
    try:
        if not file.is_file() or file.stat().st_size > LARGEST_FILE:
            reasons[SAMPLES] = f"{SAMPLES} is not a file of a run"
            return []
        found = metrics_file.read(folder, SAMPLES)
    except OSError as error:
        reasons[SAMPLES] = f"{SAMPLES} {_why(error)}"
        return []
    samples = [entry for entry in found if words(entry, "text") or words(entry, "prompt")]
    if not samples and file.stat().st_size:
        reasons[SAMPLES] = f"{SAMPLES} is damaged (no line of it is a sample)"
    return samples


def starts_in(environment: dict[str, Any]) -> list[StartOfRun]:
    """Starts that environment.json records; of an earlier version's run only the steps after which it was resumed."""
    starts = []
    for facts in listed(environment, "starts"):
        if (step := number(facts, "step")) is not None:
            processes = number(facts, "num_processes")
            engine = f"{words(facts, 'strategy')} x{processes:.0f}" if processes else words(facts, "strategy")
            starts.append(StartOfRun(int(step), words(facts, "time"), engine, facts))
    if not starts:
        steps = [step for step in listed(environment, "resumed_at") if type(step) is int]
        starts = [StartOfRun(step, "", "", {}) for step in steps]
    return starts


def resumes_of(starts: Sequence[StartOfRun]) -> list[tuple[int, str]]:
    """(step, label) of each resume, with the engine if the run recorded it."""
    return [
        (start.step, f"resumed on {start.engine}" if start.engine else "resumed") for start in starts if start.step > 0
    ]


def _read_checkpoints(folder: Path) -> list[SavedState]:
    root, found = folder / CHECKPOINTS, []
    try:
        for path in root.iterdir() if root.is_dir() else ():
            if (match := STEP_FOLDER.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
                files = [(file.name, file.stat().st_mtime_ns) for file in sorted(path.iterdir())]
                problem, state = _look_at(path, tuple(files))
                found.append(SavedState(path, int(match[1]), problem, state))
    except OSError:
        pass  # a running run removes checkpoints while they are listed
    return sorted(found, key=lambda saved: saved.step)


@functools.lru_cache(maxsize=64)
def _look_at(folder: Path, files: tuple[tuple[str, int], ...]) -> tuple[str | None, dict[str, Any]]:
    """Problem with a checkpoint and its state; a second look at an unchanged one, as with --watch, reads nothing."""
    from acc_lm.checkpointing.format import problem_with

    problem = problem_with(folder, read_all=False)
    state, reason = _read_object(folder / STATE, STATE) if problem is None else ({}, None)
    return problem or reason, state


def _read_events(folder: Path) -> list[tuple[int, str]]:
    events = []
    for file in sorted(folder.glob("*_step_*.json")):
        if match := EVENT_FILE.fullmatch(file.name):
            values, _ = _read_object(file, file.name)
            loss, median = number(values, "loss"), number(values, "median_before")
            if match[1] == "spike":
                text = "loss spike" if loss is None else f"loss spike: {loss:.4f}"
                text += "" if median is None else f", median before it {median:.4f}"
            else:
                names = [name for name in listed(values, "parameters") if isinstance(name, str)]
                text = "skipped: the gradient was not finite" + (f", first in {names[0]}" if names else "")
            events.append((int(match[2]), text))
    return sorted(events)[:200]
