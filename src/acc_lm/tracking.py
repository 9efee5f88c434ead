"""Weights & Biases and TensorBoard through Accelerate's trackers, as observers: whatever they do, the run goes on."""

from __future__ import annotations

import json
import os
import socket
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from acc_lm.config import Config, flatten

if TYPE_CHECKING:
    from accelerate import Accelerator

NETWORK_SECONDS = 3.0
INIT_SECONDS = 10.0


class Tracking:
    """Metrics to the chosen trackers; after a tracker's first failure one warning, and training is all that is left."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._failed = False
        self.description = "none"

    def start(self, config: Config, output_dir: Path) -> None:
        """Start the trackers of the recipe; called by every process, acts on the main one."""
        report_to = config.tracking.report_to
        accelerator = self._accelerator
        if not accelerator.is_main_process or not report_to:
            return
        try:
            self._start(config, output_dir)
        except Exception as error:  # an observer must not stop a run, whatever it raises
            self._give_up(error)

    def _start(self, config: Config, output_dir: Path) -> None:
        report_to, accelerator = config.tracking.report_to, self._accelerator
        run_name = config.tracking.run_name or output_dir.resolve().name
        init_kwargs: dict[str, Any] = {}
        names = [str(name) for name in report_to if name != "wandb"]
        # TensorBoard takes nothing but numbers and strings.
        values = {
            key: value if isinstance(value, (int, float, str, bool)) else json.dumps(value)
            for key, value in flatten(config.model_dump(mode="json")).items()
        }
        project = config.tracking.project
        if "wandb" in report_to:
            mode, why = wandb_mode()
            init_kwargs["wandb"] = self._wandb_arguments(output_dir, run_name, mode)
            names.append(f"wandb {mode}" + (f" ({why})" if why else ""))
        try:
            accelerator.init_trackers(project, values, init_kwargs)
        except Exception as error:  # online, anything may fail; offline it must work
            if init_kwargs.get("wandb", {}).get("mode") != "online":
                raise
            accelerator.trackers.clear()
            init_kwargs["wandb"]["mode"] = "offline"
            accelerator.init_trackers(project, values, init_kwargs)
            names[-1] = f"wandb offline (online failed: {type(error).__name__})"
        missing = set(report_to) - {tracker.name for tracker in accelerator.trackers}
        if missing:
            names = [name for name in names if name.split()[0] not in missing]
            _warn(f"{', '.join(sorted(missing))} is not installed; metrics.jsonl is complete without it")
        self._define_step_axis()
        self.description = ", ".join(names) or "none"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._failed or not self._accelerator.is_main_process:
            return
        try:
            self._accelerator.log({"train/global_step": step, **metrics}, step=step)
        except Exception as error:  # an observer must not stop a run, whatever it raises
            self._give_up(error)

    def finish(self) -> None:
        """End the trackers; before the process group, which may be gone already."""
        try:
            for tracker in self._accelerator.trackers:
                tracker.finish()
        except Exception as error:  # an observer must not stop a run, whatever it raises
            self._give_up(error)
        self._accelerator.trackers.clear()

    def _define_step_axis(self) -> None:
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":
                run = tracker.tracker
                run.define_metric("train/global_step")
                run.define_metric("*", step_metric="train/global_step")

    def _wandb_arguments(self, output_dir: Path, run_name: str, mode: str) -> dict[str, Any]:
        import wandb

        return {
            "id": _run_id(output_dir),
            "resume": "allow",
            "name": run_name,
            "dir": str(output_dir),
            "mode": mode,
            "settings": wandb.Settings(init_timeout=INIT_SECONDS, silent=True, console="off"),
        }

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self.description = "none (failed)"
        self._accelerator.trackers.clear()
        _warn(f"tracking stopped ({type(error).__name__}: {' '.join(str(error).split())[:150]}); metrics.jsonl goes on")


def wandb_mode() -> tuple[str, str]:
    """(mode, why): what WANDB_MODE says, else online when there are a key and a network, else offline."""
    asked = os.environ.get("WANDB_MODE")
    if asked:
        return asked, "WANDB_MODE"
    server = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    if not _has_wandb_key(server.hostname or ""):
        return "offline", "no key; `wandb login`, then `wandb sync`"
    try:
        with socket.create_connection(
            (server.hostname, server.port or (443 if server.scheme == "https" else 80)), NETWORK_SECONDS
        ):
            return "online", ""
    except OSError:
        return "offline", "no network; `wandb sync` later"


def _has_wandb_key(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(output_dir: Path) -> str:
    """The id of this run in W&B: made once, kept beside the run, so that a resumed run is the same one there."""
    file = output_dir / "wandb" / "run_id"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text().strip()


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
