"""Accelerate's trackers as observers: whatever they do, the run continues.

`metrics.jsonl` is the record, trackers show it. A resumed run first sends them the lines that are in it, so trackers get
every step exactly once and in order, in spite of kills, lost networks and skipped checkpoints:

- W&B online knows the last step that it has, and gets the steps after it.
- W&B offline cannot resume, and the last lines of a killed process may be missing. So every start writes one folder with
  all steps that were not uploaded yet, which replaces the previous folder. There is never more than one to sync.
- TensorBoard gets all steps again and discards all earlier files.
- The others: `trackers`.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlparse

from acc_lm.config import Config, flatten
from acc_lm.reporting.trackers import TAKES_TEXT, TRACKING_THREAD, Chain, Store, has_server, opening_of, warn
from acc_lm.run_files import metrics_file
from acc_lm.run_files.names import SAMPLES, TRACKERS

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


@dataclass
class Opened:
    """One of Accelerate's trackers at work."""

    tracker: Any
    chain: Chain | None = None
    """Steps that it has; None: it gets all of them."""
    store: Store | None = None

    @property
    def name(self) -> str:
        return str(self.tracker.name)


class Tracking:
    """Metrics for the chosen trackers, sent from a thread: a tracker that is slow, hangs or raises costs one warning."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._rows: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._opened: list[Opened] = []
        self._sync: Path | None = None
        """Only folder of W&B to sync; None unless W&B is offline and has ended."""
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
            target=self._work,
            args=(config, output_dir, awaited, max(known, default=0)),
            name=TRACKING_THREAD,
            daemon=True,
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
            warn(f"tracking did not end within {FINISH_SECONDS:.0f} s and was abandoned; metrics.jsonl is complete")
        elif self._sync:
            print(f"W&B was offline; once there is a network: wandb sync {shlex.quote(str(self._sync))}")

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
            self._end()
        except Exception as error:  # an observer must not stop a run, whatever it raises
            self._opened.clear()
            self.description = "none (failed)"
            warn(f"tracking stopped ({_first_words(error)}); metrics.jsonl continues")
        finally:
            self._ready.set()

    def _open(self, config: Config, output_dir: Path, last_step: int) -> None:
        """Open the trackers one after the other; one that fails leaves the others alone."""
        recipe = config.model_dump(mode="json")
        installed = [str(name) for name in self._accelerator.log_with]  # Accelerate drops those that are not
        names, failed = [], False
        for name in config.tracking.report_to:
            if name not in installed:
                warn(f"{name} is not installed; metrics.jsonl is complete without it")
                continue
            try:
                names.append(self._open_one(name, config, recipe, output_dir, last_step))
            except Exception as error:
                failed = True
                warn(f"{name} stopped ({_first_words(error)}); metrics.jsonl continues")
        self.description = ", ".join(names) or ("none (failed)" if failed else "none")

    def _open_one(self, name: str, config: Config, recipe: dict[str, Any], output_dir: Path, last_step: int) -> str:
        """Open a tracker; return its name and place for the start block."""
        run_name = config.tracking.run_name or output_dir.resolve().name[-128:]  # the maximum length at W&B
        if name == "wandb":
            return self._open_wandb(config, recipe, output_dir, run_name, last_step)
        if name == "tensorboard":
            self._opened.append(Opened(self._started(name, config, recipe, output_dir / name, {"purge_step": 0})))
            return name
        place: Chain | Store
        if has_server(name):
            place = Chain(output_dir / TRACKERS / f"{name}.json", recipe, last_step)
        else:
            place = Store(output_dir, name)
        opening = opening_of(name, run_name, place)
        folder = place.folder if isinstance(place, Store) else output_dir
        tracker = self._started(name, config, recipe, folder, opening.keywords)
        if isinstance(place, Chain):
            place.name(opening.id_of(tracker.tracker))
            self._opened.append(Opened(tracker, chain=place))
            return name
        self._opened.append(Opened(tracker, store=place))
        return f"{name} in {place.folder}"

    def _open_wandb(
        self, config: Config, recipe: dict[str, Any], output_dir: Path, run_name: str, last_step: int
    ) -> str:
        mode, why = wandb_mode()
        chain = WandbChain(output_dir / "wandb" / "chain.json", recipe, last_step) if mode != "disabled" else None
        arguments = _wandb_arguments(output_dir, run_name, mode, chain)
        shown = f"wandb {mode}" + (f" ({why})" if why else "")
        try:
            tracker = self._started("wandb", config, recipe, output_dir, arguments)
        except Exception as error:  # online, anything may fail; offline it must work
            if mode != "online":
                raise
            warn(f"W&B cannot be reached ({_first_words(error)}); it continues offline")
            import wandb

            wandb.teardown()  # its process still holds the run's id
            tracker = self._started("wandb", config, recipe, output_dir, arguments | {"mode": "offline"})
            shown = f"wandb offline (online failed: {type(error).__name__})"
        tracker.tracker.define_metric("train/global_step")
        tracker.tracker.define_metric("*", step_metric="train/global_step")
        if chain:
            chain.opened(tracker.tracker)
        self._opened.append(Opened(tracker, chain=chain))
        return shown

    def _started(
        self, name: str, config: Config, recipe: dict[str, Any], folder: Path, keywords: dict[str, Any]
    ) -> Any:
        """Let Accelerate start one tracker, and give it the recipe.

        Args:
            folder: for the trackers of which Accelerate chooses the folder.
        """
        accelerator = self._accelerator
        # TensorBoard accepts only numbers and strings.
        values = {
            key: value if isinstance(value, (int, float, str, bool)) else json.dumps(value)
            for key, value in flatten(recipe).items()
        }
        all_names = accelerator.log_with
        accelerator.log_with = [known for known in all_names if str(known) == name]
        accelerator.project_configuration.logging_dir = str(folder)
        try:
            accelerator.init_trackers(config.tracking.project, values, {name: keywords})
            return accelerator.trackers[-1]
        finally:
            accelerator.log_with, accelerator.trackers = all_names, []  # ended here, and not by Accelerate again

    def _send(self, step: int, metrics: dict[str, Any]) -> None:
        for opened in list(self._opened) if metrics else ():
            try:
                if opened.chain is None or opened.chain.takes(step):
                    values = {"train/global_step": step, **_shown(metrics, opened.name)}
                    opened.tracker.log(values, step=step)
            except Exception as error:
                self._give_up(opened, error)

    def _end(self) -> None:
        for opened in list(self._opened):
            try:
                opened.tracker.finish()
                if opened.store:
                    opened.store.complete()
                if isinstance(opened.chain, WandbChain):
                    opened.chain.finished()
                    self._sync = opened.chain.folder
            except Exception as error:
                self._give_up(opened, error)

    def _give_up(self, opened: Opened, error: Exception) -> None:
        self._opened.remove(opened)
        warn(f"{opened.name} stopped ({_first_words(error)}); metrics.jsonl continues")


class WandbChain(Chain):
    """One W&B run over all starts of a training; offline, also the steps that were uploaded from earlier folders."""

    fresh: ClassVar[dict[str, Any]] = {"sent": 0, "uploaded": 0}
    shown_name = "W&B"

    def __init__(self, file: Path, recipe: dict[str, Any], last_step: int) -> None:
        super().__init__(file, recipe, last_step)
        folders = self._file.parent.glob(f"offline-run-*-{self.id}*")
        self._replaced = [folder for folder in folders if not list(folder.glob("*.wandb.synced"))]
        if not self._replaced:  # the last start was online, or its folder was uploaded
            self._state["uploaded"] = self._state["sent"]
        self._first = self._state["uploaded"] + 1
        self.save()
        self.folder: Path | None = None
        """Only folder to sync; None unless W&B is offline."""

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
    """Metrics of a step in the form that a tracker takes, with samples as a table for W&B, as Markdown, or without them."""
    samples = metrics.get("samples")
    if not samples:
        return metrics
    values = {name: value for name, value in metrics.items() if name != "samples"}
    if tracker == "wandb":
        import wandb

        columns = ["step", "prompt", "text"]
        values["samples"] = wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in samples])
    elif tracker in TAKES_TEXT:
        parts = [f"    {line}" for row in samples for line in (row["prompt"] + " ⟶ " + row["text"]).split("\n") + [""]]
        values["samples"] = "\n".join(parts)
    return values


def _first_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
