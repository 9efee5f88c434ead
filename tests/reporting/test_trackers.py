"""Every tracker that Accelerate knows: offline in the run's folder, or one run on its server over all starts."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
from test_tracking import raising, rows_of_metrics, train_with, warnings_of

from acc_lm.config.recipe import Tracker
from acc_lm.run_files import metrics_file

LOSSES = dict[int, float]


def losses_in_aim(folder: Path) -> LOSSES:
    from aim import Repo, Run
    from aim.storage.context import Context

    repository = Repo(str(folder))
    (name,) = repository.list_all_runs()
    run = Run(name, repo=repository, system_tracking_interval=None, capture_terminal_logs=False)
    steps, (values, *_) = run.get_metric("train/loss", Context({})).data.items_list()
    run.close()
    return dict(zip(map(int, steps), values, strict=True))


def losses_in_clearml(folder: Path) -> LOSSES:
    (file,) = folder.glob("offline/offline-*/metrics.jsonl")
    rows = [row for line in file.read_text().splitlines() for row in json.loads(line)]
    return {row["iter"]: row["value"] for row in rows if row["metric"] == "train/loss"}


def losses_in_comet(folder: Path) -> LOSSES:
    (archive,) = folder.glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").decode().splitlines()]
    found = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    return {metric["step"]: metric["metricValue"] for metric in found if metric["metricName"] == "train/loss"}


def losses_in_dvclive(folder: Path) -> LOSSES:
    lines = (folder / "plots/metrics/train/loss.tsv").read_text().splitlines()
    return {int(step): float(value) for step, value in (line.split("\t") for line in lines[1:])}


def losses_in_mlflow(folder: Path) -> LOSSES:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert len(points) == len({point.step for point in points})
    return {point.step: point.value for point in points}


def losses_in_swanlab(folder: Path) -> LOSSES:
    (file,) = folder.glob("run-*/run-*.swanlab")
    data = file.read_bytes()
    assert b"train/loss" in data
    return {}  # its format has no reader here


def losses_in_trackio(folder: Path) -> LOSSES:
    with sqlite3.connect(folder / "acc-lm.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    values = {step: json.loads(metrics) for step, metrics in rows}
    assert len(rows) == len(values)
    return {step: metrics["train/loss"] for step, metrics in values.items() if "train/loss" in metrics}


OFFLINE: dict[str, Callable[[Path], LOSSES]] = {
    "aim": losses_in_aim,
    "clearml": losses_in_clearml,
    "comet_ml": losses_in_comet,
    "dvclive": losses_in_dvclive,
    "mlflow": losses_in_mlflow,
    "swanlab": losses_in_swanlab,
    "trackio": losses_in_trackio,
}


def test_the_recipe_knows_the_trackers_that_accelerate_knows() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert sorted(LOGGER_TYPE_TO_CLASS) == sorted(get_args(Tracker)) == sorted([*OFFLINE, "tensorboard", "wandb"])


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_each_tracker_has_every_step_once_after_a_kill(name: str, tiny: list[str], tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    run, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    arguments = [
        *tiny,
        "training.max_steps=7",
        "training.log_every=1",
        f"tracking.report_to=[{name}]",
        "tracking.sample_tokens=4",
    ]
    environment = {
        "HOME": str(home),
        "NO_PROXY": "*",
        "HTTPS_PROXY": "http://127.0.0.1:1",
        "HTTP_PROXY": "http://127.0.0.1:1",
    }

    project = tmp_path / "project"
    subprocess.run(["git", "init", "-q", project], check=True)

    def end_after_five() -> None:
        os.chdir(project)
        append = metrics_file.append

        def append_and_end(output_dir: Path, step: int, metrics: dict[str, float]) -> None:
            append(output_dir, step, metrics)
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        metrics_file.append = append_and_end

    train_with(arguments, end_after_five, environment, expect=-signal.SIGKILL)
    finished = train_with(arguments, lambda: os.chdir(project), environment)
    assert warnings_of(finished) == []
    assert f"{name} in {run / 'trackers' / name}" in finished.output or "still starting" in finished.output
    rows = rows_of_metrics(run)
    assert list(rows) == list(range(1, 8))
    if name != "swanlab":
        found = OFFLINE[name](run / "trackers" / name)
        assert found == pytest.approx({step: row["train/loss"] for step, row in rows.items()})
    else:
        OFFLINE[name](run / "trackers" / name)
    assert [path.name for path in (run / "trackers").iterdir()] == [name], "the folder of the killed start is replaced"
    assert [path.name for path in project.iterdir()] == [".git"], "nothing is written where the run was started"


class Server:
    """Stand-ins of the libraries whose run is on a server: they keep the arguments of each start, and the steps."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def keep(self, tracker: str, **values: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"tracker": tracker, **values}, default=str) + "\n")

    def install(self) -> None:
        from accelerate import tracking
        from accelerate.utils import LoggerType

        names = ("clearml", "comet_ml", "mlflow", "swanlab", "trackio")
        tracking._available_trackers[:] = [LoggerType(name) for name in names]
        for name in names:
            sys.modules[name] = getattr(self, name)(ModuleType(name))

    def clearml(self, module: Any) -> Any:
        def init(**keywords: Any) -> Any:
            self.keep("clearml", **keywords)
            logger = SimpleNamespace(report_scalar=lambda **point: self.keep("clearml", step=point["iteration"]))
            offset = lambda step: self.keep("clearml", offset=step)  # noqa: E731
            return SimpleNamespace(id="task-1", get_logger=lambda: logger, set_initial_iteration=offset,
                                   connect_configuration=print, close=print)  # fmt: skip

        module.Task = SimpleNamespace(current_task=lambda: None, init=init)
        return module

    def comet_ml(self, module: Any) -> Any:
        def start(**keywords: Any) -> Any:
            self.keep("comet_ml", **keywords)
            return SimpleNamespace(log_parameters=print, set_step=print, log_other=print, end=print,
                                   log_metric=lambda name, value, step: self.keep("comet_ml", step=step))  # fmt: skip

        module.start, module.__version__ = start, "3.58.8"
        module.ExperimentConfig = lambda **keywords: keywords
        return module

    def mlflow(self, module: Any) -> Any:
        def start_run(**keywords: Any) -> Any:
            self.keep("mlflow", **keywords)
            return SimpleNamespace(info=SimpleNamespace(run_id="run-1"))

        module.utils = SimpleNamespace(
            validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
        )
        module.search_experiments = lambda filter_string: []
        module.create_experiment = lambda **keywords: "experiment-1"
        module.start_run, module.log_params, module.end_run = start_run, print, print
        module.log_metrics = lambda metrics, step: self.keep("mlflow", step=step)
        return module

    def _as_wandb(self, name: str, module: Any) -> Any:
        class Values(dict[str, Any]):
            def update(self, values: Any, allow_val_change: bool) -> None: ...

        def init(**keywords: Any) -> Any:
            self.keep(name, **keywords)
            return SimpleNamespace(log=lambda values, step: self.keep(name, step=step), finish=print)

        module.init, module.config = init, Values()
        return module

    def swanlab(self, module: Any) -> Any:
        return self._as_wandb("swanlab", module)

    def trackio(self, module: Any) -> Any:
        return self._as_wandb("trackio", module)


def test_on_a_server_each_tracker_keeps_one_run_and_gets_each_step_once(tiny: list[str], tmp_path: Path) -> None:
    """By Accelerate's interface: these libraries are stand-ins, no server is asked."""
    file = tmp_path / "server.jsonl"
    names = ["clearml", "comet_ml", "mlflow", "swanlab", "trackio"]
    environment = {"CLEARML_API_ACCESS_KEY": "key-of-clearml", "COMET_API_KEY": "key-of-comet", "TRACKIO_SPACE_ID": "me/space",
                   "MLFLOW_TRACKING_URI": "http://127.0.0.1:1", "SWANLAB_API_KEY": "key-of-swanlab"}  # fmt: skip
    arguments = [*tiny, "training.log_every=1", f"tracking.report_to=[{','.join(names)}]", "tracking.run_name=mine"]
    for steps in (4, 6):
        finished = train_with([*arguments, f"training.max_steps={steps}"], Server(file).install, environment)
        assert warnings_of(finished) == []
        assert f"tracking      {', '.join(names)}\n" in finished.output
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    starts = {
        name: [entry for entry in kept if entry["tracker"] == name and "step" not in entry and "offset" not in entry]
        for name in names
    }
    for name in names:
        sent = [entry["step"] for entry in kept if entry["tracker"] == name and "step" in entry]
        assert sorted(set(sent)) == [1, 2, 3, 4, 5, 6]
        assert sent == sorted(sent), f"{name} gets no step twice"
        assert len(starts[name]) == 2
    assert [entry["continue_last_task"] for entry in starts["clearml"]] == [False, "task-1"]
    assert [entry["offset"] for entry in kept if "offset" in entry] == [0, 0]
    assert [entry["run_id"] for entry in starts["mlflow"]] == [None, "run-1"]
    (key,) = {entry["experiment_key"] for entry in starts["comet_ml"]}
    assert len(key) == 32
    assert len({entry["id"] for entry in starts["swanlab"]}) == len({entry["name"] for entry in starts["trackio"]}) == 1
    assert {entry["resume"] for entry in starts["swanlab"] + starts["trackio"]} == {"allow"}
    secrets = [value.encode() for name, value in environment.items() if "KEY" in name]
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [secret for secret in secrets for data in files if secret in data]


def test_one_tracker_that_fails_leaves_the_others(tiny: list[str], tmp_path: Path) -> None:
    def prepare() -> None:
        Server(tmp_path / "server.jsonl").install()
        sys.modules["mlflow"].start_run = raising  # type: ignore[attr-defined]
        sys.modules["swanlab"].init = lambda **keywords: SimpleNamespace(log=raising, finish=raising)  # type: ignore[attr-defined]

    environment = {
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:1",
        "SWANLAB_API_KEY": "key",
        "TRACKIO_SPACE_ID": "me/space",
    }
    finished = train_with([*tiny, "tracking.report_to=[mlflow,swanlab,trackio]"], prepare, environment)
    why = "stopped (OSError: the tracker's disk is full); metrics.jsonl continues"
    assert warnings_of(finished) == [f"warning: mlflow {why}", f"warning: swanlab {why}"]
    assert "tracking      swanlab, trackio\n" in finished.output
    kept = [json.loads(line) for line in (tmp_path / "server.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in kept if "step" in entry] == [1, 2, 3, 4, 6]
