"""Trackers that Accelerate knows: where each one writes, and how it stays one run over all starts of a training.

With its key or its address in the environment, a tracker reports to its server, where a run stays one run: `Chain` knows
its id and the steps that it has. Without them it writes into `trackers/NAME` of the output folder, without a network;
`Store` gives every start a new folder with all steps, which replaces the previous one once it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from acc_lm.config import learned_changes
from acc_lm.redaction import printable, redact
from acc_lm.run_files.names import TRACKERS

TRACKING_THREAD = "trackers"
"""Name of the thread in which trackers run."""
TAKES_TEXT = ("comet_ml", "tensorboard")
"""Trackers that take the text of samples; W&B has a table of it, the others take numbers only."""


class Chain:
    """One run on a server over all starts of a training: its id and the last step sent, kept in a file."""

    fresh: ClassVar[dict[str, Any]] = {"sent": 0, "named": None}
    shown_name = "its server"

    def __init__(self, file: Path, recipe: dict[str, Any], last_step: int) -> None:
        self._file = file
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._state: dict[str, Any] = {"id": uuid.uuid4().hex[:12], **self.fresh}
        try:
            before = json.loads(self._file.read_text())
            resume, resume_before = recipe["checkpoint"]["resume"], before["recipe"]["checkpoint"]["resume"]
            is_same = not learned_changes(before["recipe"], recipe) and resume in ("auto", resume_before)
            # A tracker accepts no earlier step: a changed training that begins before the last step sent gets a new run.
            if is_same or before["sent"] <= last_step:
                self._state = {key: before[key] for key in self._state}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a power cut can leave it empty
            warn(f"{self._file} cannot be read; {self.shown_name} gets a new run with the full history")
        self._state["recipe"] = recipe
        self._first = self._state["sent"] + 1

    @property
    def id(self) -> str:
        return str(self._state["id"])

    @property
    def named(self) -> str | None:
        """Id that the server gave to the run; None before the first start, and for one that takes ours."""
        name: str | None = self._state["named"]
        return name

    def name(self, named: str | None) -> None:
        """Keep the id that the server gave."""
        self._state["named"] = named
        self.save()

    def takes(self, step: int) -> bool:
        """Test whether the tracker lacks this step, and record it before it is sent, so that it is never sent again."""
        if step < self._first:
            return False
        self._state["sent"] = step
        self.save()
        return True

    def save(self) -> None:
        temporary = self._file.with_name(f".{self._file.name}")
        temporary.write_text(json.dumps(self._state))
        os.replace(temporary, self._file)


class Store:
    """Folder of a tracker that works without a server, written anew with all steps by every start."""

    def __init__(self, output_dir: Path, name: str) -> None:
        self.folder = output_dir / TRACKERS / name
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self.folder.exists():
            number = len(self._replaced) + 1
            self.folder.rename(self.folder.with_name(f"replaced-{name}-{number}"))
        self.folder.mkdir()

    @property
    def _replaced(self) -> list[Path]:
        return sorted(self.folder.parent.glob(f"replaced-{self.folder.name}-*"))

    def complete(self) -> None:
        """Delete the folders of earlier starts: all their steps are in this one."""
        for folder in self._replaced:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Opening:
    """Arguments for one of Accelerate's trackers."""

    keywords: dict[str, Any]
    id_of: Callable[[Any], str | None] = lambda run: None
    """Id that the server gave to an opened run."""


def has_server(name: str) -> bool:
    """Check whether the environment has the key or the address of this tracker's server."""
    given = os.environ.get
    home = Path(given("SWANLAB_ROOT") or given("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab")
    comet = Path(given("COMET_CONFIG") or Path.home() / ".comet.config")
    clearml = Path(given("CLEARML_CONFIG_FILE") or Path.home() / "clearml.conf")
    return {
        "clearml": bool(given("CLEARML_API_ACCESS_KEY") or clearml.is_file()) and not given("CLEARML_OFFLINE_MODE"),
        "comet_ml": bool(given("COMET_API_KEY") or comet.is_file()),
        "mlflow": bool(given("MLFLOW_TRACKING_URI")),
        "swanlab": bool(given("SWANLAB_API_KEY") or (home / ".netrc").is_file())
        and given("SWANLAB_MODE", "online") in ("online", "cloud"),
        "trackio": any(given(f"TRACKIO_{key}") for key in ("DIR", "SPACE_ID", "SERVER_URL")),
    }.get(name, False)


def opening_of(name: str, run_name: str, place: Store | Chain) -> Opening:
    """Arguments to open a tracker other than W&B and TensorBoard in its place. The tracker must be installed."""
    if isinstance(place, Store):
        return Opening(_LOCAL[name](place.folder, run_name))
    return _ON_SERVER[name](place, run_name)


def _aim(folder: Path, run_name: str) -> dict[str, Any]:
    from aim import Repo

    Repo.from_path(str(folder), init=True)
    return {"experiment": run_name, "system_tracking_interval": None, "capture_terminal_logs": False}


_FRAMEWORKS = [
    "matplotlib",
    "tensorflow",
    "tensorboard",
    "pytorch",
    "xgboost",
    "scikit",
    "fastai",
    "lightgbm",
    "hydra",
    "tfdefines",
    "joblib",
    "megengine",
    "catboost",
    "gradio",
    "detect_repository",
]
_QUIET_CLEARML = {
    "auto_connect_arg_parser": False,
    # Otherwise it replaces functions of torch that save, and its look at the repository can hang the end of the run.
    "auto_connect_frameworks": dict.fromkeys(_FRAMEWORKS, False),
    "auto_connect_streams": False,
    "auto_resource_monitoring": False,
}


def _clearml(folder: Path, run_name: str) -> dict[str, Any]:
    os.environ["CLEARML_CACHE_DIR"] = str(folder)
    from clearml import Task

    Task.set_offline(True)
    return {"task_name": run_name, "reuse_last_task_id": False, **_QUIET_CLEARML}


def _comet_settings(run_name: str, **more: Any) -> Any:
    import comet_ml

    off = ("log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details", "parse_args")
    automatic = ("param", "metric", "output", "histogram_tensorboard")
    settings = dict.fromkeys([*off, *(f"auto_{kind}_logging" for kind in automatic)], False)
    return comet_ml.ExperimentConfig(name=run_name, display_summary_level=0, **settings, **more)


def _comet(folder: Path, run_name: str) -> dict[str, Any]:
    return {"online": False, "experiment_config": _comet_settings(run_name, offline_directory=str(folder))}


def _dvclive(folder: Path, run_name: str) -> dict[str, Any]:
    import dvclive.live

    # Otherwise it sets up DVC in the Git repository in which the run is started.
    dvclive.live.get_dvc_repo = lambda: None
    return {"dir": str(folder), "save_dvc_exp": False, "dvcyaml": False}


def _mlflow(folder: Path, run_name: str) -> dict[str, Any]:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder.resolve()}/mlflow.db")
    return {"run_name": run_name, "logging_dir": str(folder.resolve() / "artifacts")}


def _swanlab(folder: Path, run_name: str) -> dict[str, Any]:
    return {"name": run_name, "mode": os.environ.get("SWANLAB_MODE", "offline"), "log_dir": str(folder)}


def _trackio(folder: Path, run_name: str) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(folder.resolve())
    return {"name": run_name, "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}


_LOCAL: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "aim": _aim,
    "clearml": _clearml,
    "comet_ml": _comet,
    "dvclive": _dvclive,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "trackio": _trackio,
}


def _clearml_server(chain: Chain, run_name: str) -> Opening:
    continued = chain.named or False
    keywords = {"task_name": run_name, "reuse_last_task_id": False, "continue_last_task": continued, **_QUIET_CLEARML}

    def id_of(task: Any) -> str:
        task.set_initial_iteration(0)  # otherwise it adds the last step to every later one
        return str(task.id)

    return Opening(keywords, id_of)


def _comet_server(chain: Chain, run_name: str) -> Opening:
    # Comet's keys have at least 32 letters and digits; a key that it does not know yet begins an experiment.
    key = chain.id.ljust(32, "0")
    return Opening({"mode": "get_or_create", "experiment_key": key, "experiment_config": _comet_settings(run_name)})


def _mlflow_server(chain: Chain, run_name: str) -> Opening:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    return Opening({"run_name": run_name, "run_id": chain.named}, lambda run: str(run.info.run_id))


def _swanlab_server(chain: Chain, run_name: str) -> Opening:
    return Opening({"name": run_name, "id": chain.id, "resume": "allow"})


def _trackio_server(chain: Chain, run_name: str) -> Opening:
    # A name stands for a run there, so that of another folder must differ.
    keywords = {"name": f"{run_name}-{chain.id[:6]}", "resume": "allow", "embed": False}
    return Opening({**keywords, "auto_log_cpu": False, "auto_log_gpu": False})


_ON_SERVER: dict[str, Callable[[Chain, str], Opening]] = {
    "clearml": _clearml_server,
    "comet_ml": _comet_server,
    "mlflow": _mlflow_server,
    "swanlab": _swanlab_server,
    "trackio": _trackio_server,
}


def warn(text: str) -> None:
    """Print a warning of a tracker."""
    print(f"warning: {printable(redact(text))}", file=sys.stderr, flush=True)
