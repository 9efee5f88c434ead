"""Weights & Biases and TensorBoard through Accelerate's trackers, as observers: whatever they do, the run continues.

`metrics.jsonl` is the record, trackers show it. A resumed run first sends them the lines that are in it, so trackers get
every step exactly once and in order, in spite of kills, lost networks and skipped checkpoints:

- W&B online knows the last step that it has, and gets the steps after it.
- W&B offline cannot resume, and the last lines of a killed process may be missing. So every start writes one folder with
  all steps that were not uploaded yet, which replaces the previous folder. There is never more than one to sync.
- TensorBoard gets all steps again and discards all earlier files.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from acc_lm.config import Config, flatten, learned_changes
from acc_lm.redaction import printable, redact
from acc_lm.run_files import metrics_file
from acc_lm.run_files.names import SAMPLES

if TYPE_CHECKING:
    from accelerate import Accelerator

Entry = tuple[int, dict[str, Any]]
"""Step and its metrics; `samples` among them are rows of a table."""

NETWORK_SECONDS = 3.0
INIT_SECONDS = 10.0
START_SECONDS = 12.0
"""Seconds that the first step waits for slow trackers to start; after that they continue in the background."""
FINISH_SECONDS = 30.0
"""Seconds that the end of the run waits for trackers to finish writing and uploading."""


class Tracking:
    """Metrics for the chosen trackers, sent from a thread: a tracker that is slow, hangs or raises costs one warning."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._rows: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._chain: WandbChain | None = None
        self.description = "none"

    def start(self, config: Config, output_dir: Path, awaited: Callable[[int], set[str]]) -> None:
        """Start the trackers of the recipe; every process calls, only the main one acts.

        Args:
            awaited: names of the metrics without which a step is incomplete.
        """
        if not self._accelerator.is_main_process or not config.tracking.report_to:
            return
        known: dict[int, dict[str, Any]] = {}
        for entry in metrics_file.read(output_dir):
            known.setdefault(entry.pop("step"), {}).update(entry)
        for sample in metrics_file.read(output_dir, SAMPLES):
            if sample["step"] in known:
                known[sample["step"]].setdefault("samples", []).append(sample)
        for row in known.items():
            self._rows.put(row)
        self._thread = threading.Thread(
            target=self._work, args=(config, output_dir, awaited, max(known, default=0)), daemon=True
        )
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            self.description = "still starting, in the background"

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        if self._thread and self._thread.is_alive():
            self._rows.put((step, metrics))

    def finish(self) -> None:
        """End the trackers; call before the process group ends."""
        if not self._thread:
            return
        self._rows.put(None)
        self._thread.join(FINISH_SECONDS)
        self._accelerator.trackers = []  # or Accelerate would end them again
        if self._thread.is_alive():
            _warn(f"tracking did not end within {FINISH_SECONDS:.0f} s and was abandoned; metrics.jsonl is complete")
        elif self._chain and self._chain.folder:
            print(f"W&B was offline; once there is a network: wandb sync {shlex.quote(str(self._chain.folder))}")

    def _work(self, config: Config, output_dir: Path, awaited: Callable[[int], set[str]], last_step: int) -> None:
        try:
            self._open(config, output_dir, last_step)
            self._ready.set()
            step, metrics = 0, dict[str, Any]()
            while (row := self._rows.get()) is not None:
                if row[0] > step:
                    self._send(step, metrics)
                    metrics = {}
                step = row[0]
                metrics = metrics | row[1]
                # A step is sent once and complete: W&B accepts nothing more for it later, and an evaluation that a
                # stop skipped comes from the resumed run.
                if awaited(step) <= metrics.keys():
                    self._send(step, metrics)
                    metrics = {}
            for tracker in self._accelerator.trackers:
                tracker.finish()
            if self._chain and self._accelerator.trackers:
                self._chain.finished()
        except Exception as error:  # an observer must not stop a run, whatever it raises
            self._give_up(error)
        finally:
            self._ready.set()

    def _open(self, config: Config, output_dir: Path, last_step: int) -> None:
        report_to, accelerator = config.tracking.report_to, self._accelerator
        recipe = config.model_dump(mode="json")
        # TensorBoard accepts only numbers and strings.
        values = {
            key: value if isinstance(value, (int, float, str, bool)) else json.dumps(value)
            for key, value in flatten(recipe).items()
        }
        project, names = config.tracking.project, [str(name) for name in report_to if name != "wandb"]
        init_kwargs: dict[str, dict[str, Any]] = {"tensorboard": {"purge_step": 0}}
        if "wandb" in map(str, accelerator.log_with):  # Accelerate drops trackers that are not installed
            mode, why = wandb_mode()
            if mode != "disabled":
                self._chain = WandbChain(output_dir, recipe, last_step)
            run_name = config.tracking.run_name or output_dir.resolve().name[-128:]  # the maximum length at W&B
            init_kwargs["wandb"] = _wandb_arguments(output_dir, run_name, mode, self._chain)
            names.append(f"wandb {mode}" + (f" ({why})" if why else ""))
        try:
            accelerator.init_trackers(project, values, init_kwargs)
        except Exception as error:  # online, anything may fail; offline it must work
            if init_kwargs.get("wandb", {}).get("mode") != "online":
                raise
            _warn(f"W&B cannot be reached ({_first_words(error)}); it continues offline")
            accelerator.trackers.clear()
            import wandb

            wandb.teardown()  # its process still holds the run's id
            init_kwargs["wandb"]["mode"] = "offline"
            accelerator.init_trackers(project, values, init_kwargs)
            names[-1] = f"wandb offline (online failed: {type(error).__name__})"
        missing = set(report_to) - {tracker.name for tracker in accelerator.trackers}
        if missing:
            names = [name for name in names if name.split()[0] not in missing]
            _warn(f"{', '.join(sorted(missing))} is not installed; metrics.jsonl is complete without it")
        for tracker in accelerator.trackers:
            if tracker.name == "wandb":
                tracker.tracker.define_metric("train/global_step")
                tracker.tracker.define_metric("*", step_metric="train/global_step")
                if self._chain:
                    self._chain.opened(tracker.tracker)
        self.description = ", ".join(names) or "none"

    def _send(self, step: int, metrics: dict[str, Any]) -> None:
        for tracker in self._accelerator.trackers if metrics else ():
            if tracker.name != "wandb" or not self._chain or self._chain.takes(step):
                tracker.log({"train/global_step": step, **metrics, **_shown(metrics, tracker.name)}, step=step)

    def _give_up(self, error: Exception) -> None:
        self.description, self._chain = "none (failed)", None
        self._accelerator.trackers.clear()
        _warn(f"tracking stopped ({_first_words(error)}); metrics.jsonl continues")


class WandbChain:
    """One W&B run over all starts of a training: its id and the steps that it has, kept in `wandb/chain.json`."""

    def __init__(self, output_dir: Path, recipe: dict[str, Any], last_step: int) -> None:
        self._file = output_dir / "wandb" / "chain.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._state: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "sent": 0, "uploaded": 0}
        try:
            before = json.loads(self._file.read_text())
            resume, resume_before = recipe["checkpoint"]["resume"], before["recipe"]["checkpoint"]["resume"]
            is_same = not learned_changes(before["recipe"], recipe) and resume in ("auto", resume_before)
            # W&B accepts no earlier step: a changed training that begins before the last step sent gets a new run there.
            if is_same or before["sent"] <= last_step:
                self._state = {key: before[key] for key in self._state}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a power cut can leave it empty
            _warn(f"{self._file} cannot be read; W&B gets a new run with the full history")
        self._state["recipe"] = recipe
        folders = self._file.parent.glob(f"offline-run-*-{self.id}*")
        self._replaced = [folder for folder in folders if not list(folder.glob("*.wandb.synced"))]
        if not self._replaced:  # the last start was online, or its folder was uploaded
            self._state["uploaded"] = self._state["sent"]
        self._first = self._state["uploaded"] + 1
        self._save()
        self.folder: Path | None = None
        """Only folder to sync; None unless W&B is offline."""

    @property
    def id(self) -> str:
        return str(self._state["id"])

    def opened(self, run: Any) -> None:
        """Register the opened run: find the steps that it still needs, and rename the folders that it replaces."""
        if run.offline:
            self.folder = self._file.parent / Path(run.dir).parent.name
        else:
            self._first = run.starting_step
        for folder in self._replaced:
            folder.rename(folder.with_name(f"replaced-{folder.name}"))

    def finished(self) -> None:
        """Delete the folders that the finished run has replaced: all their steps are in its own."""
        for folder in self._file.parent.glob(f"replaced-offline-run-*-{self.id}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def takes(self, step: int) -> bool:
        """Test whether W&B lacks this step, and record it before it is sent, so that it is never sent again."""
        if step < self._first:
            return False
        self._state["sent"] = step
        self._save()
        return True

    def _save(self) -> None:
        temporary = self._file.with_name(".chain.json")
        temporary.write_text(json.dumps(self._state))
        os.replace(temporary, self._file)


def _wandb_arguments(output_dir: Path, run_name: str, mode: str, chain: WandbChain | None) -> dict[str, Any]:
    import wandb

    return {
        "id": chain and chain.id,
        "resume": "allow",
        "name": run_name,
        "dir": str(output_dir),
        "mode": mode,
        "settings": wandb.Settings(
            init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS, silent=True, console="off"
        ),
    }


def wandb_mode() -> tuple[str, str]:
    """Mode of W&B and its reason: WANDB_MODE if set, else online if there are a key and a network, else offline."""
    asked = os.environ.get("WANDB_MODE")
    if asked:
        return asked, "WANDB_MODE"
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not _has_wandb_key(urlparse(server).hostname or ""):
        return "offline", "no key; `wandb login`, then `wandb sync`"
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:  # uses the environment's proxy; any HTTP response is enough, a bare connection is not
        urlopen(server, timeout=NETWORK_SECONDS).close()
    except HTTPError:
        return "online", ""
    except (OSError, HTTPException) as error:
        if not isinstance(getattr(error, "reason", None), ssl.SSLError):
            return "offline", "no network; `wandb sync` later"
    return "online", ""


def _has_wandb_key(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _shown(metrics: dict[str, Any], tracker: str) -> dict[str, Any]:
    """Samples in the form that a tracker takes: a table for W&B, else Markdown."""
    samples = metrics.get("samples")
    if not samples:
        return {}
    if tracker == "wandb":
        import wandb

        columns = ["step", "prompt", "text"]
        return {"samples": wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in samples])}
    parts = [f"    {line}" for row in samples for line in (row["prompt"] + " ⟶ " + row["text"]).split("\n") + [""]]
    return {"samples": "\n".join(parts)}


def _first_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _warn(text: str) -> None:
    print(f"warning: {printable(redact(text))}", file=sys.stderr, flush=True)
