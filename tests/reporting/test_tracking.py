"""Trackers observe: with them, without them or with broken ones, the training is the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, Finished, Launch
from test_resume import assert_equal_runs

from acc_lm.reporting import tracking
from acc_lm.run_files import curves, metrics_file

NO_KEY = {"WANDB_API_KEY": "", "NETRC": os.devnull}
LIKELY_KEY = "k" * 40


@pytest.fixture(scope="module", autouse=True)
def wandb_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """W&B and TensorBoard imported once, away from the user's own settings."""
    home = tmp_path_factory.mktemp("home")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        os.environ[name] = str(home)
    import wandb.proto.wandb_internal_pb2  # noqa: F401


@pytest.fixture(scope="module")
def untracked(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result of the tiny run when nothing observes it."""
    run = tmp_path_factory.mktemp("untracked")
    train_with(["--config", str(tiny_recipe), f"output_dir={run}"])
    return run


def train_with(
    arguments: list[str],
    prepare: Callable[[], None] = lambda: None,
    environment: dict[str, str] | None = None,
    num_processes: int = 1,
    expect: int = 0,
) -> Finished:
    """Train in processes in which `prepare` has broken something; `expect` is how the run must end nevertheless."""

    def function() -> int:
        import train

        curves.draw_curves = lambda *arguments: None  # which takes longer than all the steps
        tracking.START_SECONDS = 60.0  # on a busy machine W&B takes long to start
        prepare()
        return train.main(arguments)

    finished = Launch(function, num_processes, NO_KEY | (environment or {})).wait(120)
    assert finished.codes == [expect] * num_processes, finished.outputs
    return finished


def warnings_of(finished: Finished) -> list[str]:
    return [line for line in finished.output.splitlines() if line.startswith("warning:")]


def offline_runs(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*"))


def records_of(folder: Path) -> Iterator[Any]:
    """Records that `wandb sync` would read: blocks of 32 KiB, each record a part with 7 bytes ahead: checksum, length, kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if left < 7 or kind == 0:
            place += left
            continue
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield Record.FromString(parts)
            parts = b""


def identity_and_rows(folder: Path) -> tuple[str, dict[int, dict[str, float]]]:
    """The run's id, and the values that W&B gets for each step; its own step and the axis of the charts must be the same."""
    identity, rows = "", dict[int, dict[str, float]]()
    for record in records_of(folder):
        if record.HasField("run"):
            identity = record.run.run_id
        if record.HasField("history"):
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = row.pop("train/global_step")
            assert row["_step"] == step > max(rows, default=0)
            rows[step] = {name: value for name, value in row.items() if not name.startswith("_")}
    return identity, rows


def rows_of_metrics(run: Path) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        rows.setdefault(entry.pop("step"), {}).update(entry)
    return rows


def assert_complete(run: Path) -> None:
    """Check that the only folder to sync has every step of `metrics.jsonl`, with the same values."""
    (folder,) = offline_runs(run)
    identity, rows = identity_and_rows(folder)
    assert rows == rows_of_metrics(run)
    assert identity == json.loads((run / "wandb/chain.json").read_text())["id"]
    for other in (run / "wandb").glob("replaced-*"):
        assert identity in other.name, "one run, whatever happened"


def test_without_a_key_wandb_is_offline_and_says_how_to_sync(tiny: list[str], untracked: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished = train_with([*tiny, "tracking.report_to=[wandb]", "tracking.run_name=my-run"])
    assert "tracking      wandb offline (no key; `wandb login`, then `wandb sync`)" in finished.output
    assert warnings_of(finished) == []
    (folder,) = offline_runs(run)
    assert finished.output.splitlines()[-1] == f"W&B was offline; once there is a network: wandb sync {folder}"
    assert_complete(run)
    assert_equal_runs(run, untracked, 6)
    record = next(folder.glob("run-*.wandb")).read_bytes()
    for text in (b"train/global_step", b"my-run", b"optimizer.learning_rate", b"eval/bits_per_byte", b"acc-lm"):
        assert text in record, f"{text!r} must reach W&B"


@pytest.mark.parametrize("ending", [pytest.param("Ctrl-C", marks=pytest.mark.slow), "kill -9", "damage"])
def test_offline_one_folder_has_every_step_once_whatever_ended_the_run(
    ending: str, tiny: list[str], tmp_path: Path
) -> None:
    """Ctrl-C, kill -9 after steps that no checkpoint has, and a damaged newest checkpoint: then from the one before."""
    run = tmp_path / "run"
    arguments = [*tiny, "training.max_steps=9", "training.log_every=1", "tracking.report_to=[wandb,tensorboard]"]

    def end_after_five() -> None:
        append = metrics_file.append

        def append_and_end(output_dir: Path, step: int, metrics: dict[str, float]) -> None:
            append(output_dir, step, metrics)
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL if ending == "kill -9" else signal.SIGINT)

        metrics_file.append = append_and_end

    train_with(arguments, end_after_five, expect=-signal.SIGKILL if ending == "kill -9" else 75)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    newest = (run / "checkpoints/latest").resolve()
    assert (max(steps), newest.name) in ((5, "step-00000004"), (6, "step-00000006")), "kill -9, and the others"
    if ending == "damage":
        (newest / "state.json").write_text("{}")
    finished = train_with(arguments)
    assert "resumed from" in finished.output
    assert ("was skipped" in finished.output) == (ending == "damage")
    assert_complete(run)
    assert list(rows_of_metrics(run)) == list(range(1, 10))
    assert not list((run / "wandb").glob("replaced-offline-run-*")), "the folder to sync is complete without them"
    assert (scalars_of(run)["train/loss"], scalars_of(run)["eval/loss"]) == (list(range(1, 10)), [3, 6, 9])


def test_offline_after_a_sync_only_later_steps_follow(tiny: list[str], tmp_path: Path) -> None:
    """W&B renumbers steps that it already has, so they must not be sent again."""
    run = tmp_path / "run"
    arguments = [*tiny, "training.log_every=1", "tracking.report_to=[wandb]"]
    train_with(arguments)
    (first,) = offline_runs(run)
    next(first.glob("*.wandb")).with_suffix(".wandb.synced").touch()  # as `wandb sync` does
    finished = train_with([*arguments, "training.max_steps=9"])
    (again, second) = offline_runs(run)
    assert again == first
    (one, early), (other, late) = identity_and_rows(first), identity_and_rows(second)
    assert (one, [*early, *late]) == (other, list(range(1, 10)))
    assert finished.output.splitlines()[-1].endswith(f"wandb sync {second}")


def test_an_older_step_of_another_recipe_is_another_run(tiny: list[str], tmp_path: Path) -> None:
    """After a sync W&B has steps of the first course that the second one has its own values for."""
    run = tmp_path / "run"
    arguments = [*tiny, "training.log_every=1", "tracking.report_to=[wandb]"]
    train_with(arguments)
    (first,) = offline_runs(run)
    next(first.glob("*.wandb")).with_suffix(".wandb.synced").touch()
    shutil.rmtree(run / "checkpoints/step-00000006")
    changed = ["optimizer.learning_rate=1e-2", "checkpoint.allow_changed_recipe=true"]
    train_with([*arguments, *changed])
    (second,) = (folder for folder in offline_runs(run) if folder != first)
    assert identity_and_rows(first)[0] != identity_and_rows(second)[0]
    assert list(identity_and_rows(second)[1]) == list(range(1, 7))


class FakeRun:
    """The part of an online W&B run that we use, with the server's rule: a step that is not later is refused."""

    offline = False
    starting_step = 0

    def __init__(self, file: Path) -> None:
        self.file = file
        if file.exists():
            self.starting_step = json.loads(file.read_text().splitlines()[-1])["train/global_step"] + 1

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.starting_step, f"{step} is a step back"
        self.starting_step = step + 1
        with self.file.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def finish(self) -> None:
        pass


def test_online_wandb_gets_only_what_it_does_not_have_yet(tiny: list[str], tmp_path: Path) -> None:
    """A stop at a step whose evaluation is left to the next run, a lost tail, and an older checkpoint."""
    server, run = tmp_path / "server.jsonl", tmp_path / "run"
    arguments = [*tiny, "training.log_every=1", "tracking.report_to=[wandb]"]

    def prepare() -> None:
        import wandb

        wandb.init = lambda **keywords: FakeRun(server)
        wandb.config = {}
        tracking.wandb_mode = lambda: ("online", "")

    def stop_at_three() -> None:
        from acc_lm import stop

        prepare()
        stop.StopRequest.agreed = lambda self: "SIGTERM" if (run / "checkpoints/step-00000002").is_dir() else None

    finished = train_with(arguments, stop_at_three, expect=75)
    assert "stopped by SIGTERM after step 3" in finished.output
    assert [json.loads(line)["train/global_step"] for line in server.read_text().splitlines()] == [1, 2]
    train_with(arguments, prepare)
    assert server_rows(server) == rows_of_metrics(run)
    server.write_text("".join(server.read_text().splitlines(keepends=True)[:-1]))  # never arrived
    shutil.rmtree(run / "checkpoints/step-00000006")
    train_with([*arguments, "training.max_steps=9"], prepare)
    assert list(server_rows(server)) == list(range(1, 10))


def server_rows(file: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({row["train/global_step"] for row in rows}) == len(rows)
    return {row.pop("train/global_step"): row for row in rows}


def scalars_of(run: Path) -> dict[str, list[int]]:
    """Steps by metric, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard/acc-lm"))
    accumulator.Reload()
    return {name: [event.step for event in accumulator.Scalars(name)] for name in accumulator.Tags()["scalars"]}


def test_tensorboard_takes_a_recipe_with_lists_mappings_and_nulls(tiny: list[str], tmp_path: Path) -> None:
    finished = train_with([*tiny, "tracking.report_to=[tensorboard]"])
    assert warnings_of(finished) == []
    assert "tracking      tensorboard" in finished.output
    found = scalars_of(tmp_path / "run")
    assert found["train/loss"] == [1, 2, 4, 6]
    assert found["eval/loss"] == [3, 6]
    (file,) = (tmp_path / "run/tensorboard").rglob("hparams.yml")
    text = file.read_text()
    for line in ("optimizer.betas: '[0.9, 0.95]'", "schedule.arguments: '{}'", "training.max_minutes: 'null'"):
        assert line in text


def raising(*arguments: Any, **keywords: Any) -> None:
    raise OSError("the tracker's disk is full")


def no_wandb() -> None:
    import accelerate.tracking

    accelerate.tracking._available_trackers.remove(accelerate.tracking.LoggerType.WANDB)
    sys.modules["wandb"] = None  # type: ignore[assignment]


def slow_to_start() -> None:
    """A W&B that answers the first question, and none of those of `wandb.init`, for longer than the run takes to begin."""
    tracking.wandb_mode = lambda: ("online", "")
    tracking.INIT_SECONDS, tracking.START_SECONDS = 1.0, 0.2


CASES: dict[str, tuple[Callable[[], None], dict[str, str], str, list[str]]] = {
    # what is broken, environment, start line, warnings
    "offline": (lambda: None, {"WANDB_MODE": "offline"}, "wandb offline (WANDB_MODE)", []),
    "disabled": (lambda: None, {"WANDB_MODE": "disabled"}, "wandb disabled (WANDB_MODE)", []),
    "refused": (
        lambda: None,
        {"WANDB_API_KEY": LIKELY_KEY, "WANDB_BASE_URL": "http://127.0.0.1:1"},
        "wandb offline (no network; `wandb sync` later)",
        [],
    ),
    "no answer": (
        lambda: setattr(tracking, "NETWORK_SECONDS", 0.5),
        {"WANDB_API_KEY": LIKELY_KEY, "WANDB_BASE_URL": "black hole"},
        "wandb offline (no network; `wandb sync` later)",
        [],
    ),
    "no answer later": (
        slow_to_start,
        {"WANDB_API_KEY": LIKELY_KEY, "WANDB_BASE_URL": "black hole"},
        "still starting, in the background",
        ["W&B cannot be reached (CommError"],
    ),
    "a broken setting": (
        lambda: None,
        {"WANDB_API_KEY": LIKELY_KEY, "WANDB_BASE_URL": "http://host:not-a-port"},
        "none (failed)",
        ["wandb stopped ("],
    ),
    "not installed": (no_wandb, {}, "none", ["wandb is not installed; metrics.jsonl is complete without it"]),
    "a full disk": (lambda: setattr(tracking.WandbChain, "save", raising), {}, "none (failed)", ["wandb stopped (OSError"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_with_wandb_broken_the_run_is_the_same_and_starts_soon(
    case: str, tiny: list[str], untracked: Path, tmp_path: Path
) -> None:
    prepare, environment, description, expected = CASES[case]
    run = tmp_path / "run"
    with socket.socket() as black_hole:
        black_hole.bind(("127.0.0.1", 0))
        black_hole.listen()
        address = f"http://127.0.0.1:{black_hole.getsockname()[1]}"
        environment = {name: address if value == "black hole" else value for name, value in environment.items()}
        started = time.monotonic()
        finished = train_with([*tiny, "tracking.report_to=[wandb]"], prepare, environment)
    assert time.monotonic() - started < 15
    assert f"\ntracking      {description}\n" in finished.output
    assert len(warnings_of(finished)) == len(expected)
    assert all(f"warning: {text}" in finished.output for text in expected)
    assert_equal_runs(run, untracked, 6)
    if offline_runs(run) and not any(text.startswith("wandb stopped") for text in expected):
        assert_complete(run)
    else:
        assert case in ("disabled", "a broken setting", "not installed", "a full disk")
    secret = LIKELY_KEY.encode()
    assert not [file for file in run.rglob("*") if file.is_file() and secret in file.read_bytes()]


def test_a_tracker_that_raises_costs_one_warning_and_nothing_else(
    tiny: list[str], untracked: Path, tmp_path: Path
) -> None:
    from accelerate.tracking import TensorBoardTracker

    steps: list[int | None] = []

    def breaks_at_four(self: object, values: object, step: int | None = None, **keywords: object) -> None:
        steps.append(step)
        print(f"asked to log {step}")
        if step == 4:
            raising()

    arguments = [*tiny, "tracking.report_to=[tensorboard]"]
    finished = train_with(arguments, lambda: setattr(TensorBoardTracker, "log", breaks_at_four))
    assert warnings_of(finished) == [
        "warning: tensorboard stopped (OSError: the tracker's disk is full); metrics.jsonl continues"
    ]
    assert [line for line in finished.output.splitlines() if "asked" in line][-1] == "asked to log 4"
    assert_equal_runs(tmp_path / "run", untracked, 6)


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_hangs_is_abandoned(method: str, tiny: list[str], untracked: Path, tmp_path: Path) -> None:
    from accelerate.tracking import TensorBoardTracker

    def prepare() -> None:
        setattr(TensorBoardTracker, method, lambda *arguments, **keywords: time.sleep(1000))
        tracking.FINISH_SECONDS = 1.0

    started = time.monotonic()
    finished = train_with([*tiny, "tracking.report_to=[tensorboard]"], prepare)
    assert time.monotonic() - started < 15
    assert warnings_of(finished) == [
        "warning: tracking did not end within 1 s and was abandoned; metrics.jsonl is complete"
    ]
    assert_equal_runs(tmp_path / "run", untracked, 6)


def test_an_abandoned_tracker_does_not_hold_up_the_end_of_the_process() -> None:
    """Libraries wait for their threads when Python ends: the process must end all the same, with its own exit code."""
    code = """
import atexit, threading, time
from acc_lm.cli import train
from acc_lm.reporting.trackers import TRACKING_THREAD
train.EXIT_SECONDS = 0.1
threading.Thread(target=time.sleep, args=(HANGS,), name=TRACKING_THREAD, daemon=True).start()
atexit.register(time.sleep, HANGS)
train.leave_hanging_tracker(75)
"""
    path = {"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"]}
    ended = subprocess.run([sys.executable, "-c", code.replace("HANGS", "50")], env=path, timeout=40)
    assert ended.returncode == 75
    ended = subprocess.run([sys.executable, "-c", code.replace("HANGS", "0")], env=path, timeout=40)
    assert ended.returncode == 0, "without a thread that hangs, the process ends by itself"


def test_a_slow_tracker_delays_no_step(tiny: list[str], untracked: Path, tmp_path: Path) -> None:
    from accelerate.tracking import TensorBoardTracker

    def prepare() -> None:
        log = TensorBoardTracker.log

        def slow(*arguments: Any, **keywords: Any) -> None:
            time.sleep(0.5)
            log(*arguments, **keywords)

        TensorBoardTracker.log = slow

    finished = train_with([*tiny, "tracking.report_to=[tensorboard]"], prepare)
    assert warnings_of(finished) == []
    assert_equal_runs(tmp_path / "run", untracked, 6)
    assert scalars_of(tmp_path / "run")["train/loss"] == [1, 2, 4, 6], "the end waits for what is left"
    loop = json.loads((tmp_path / "run/summary.json").read_text())
    assert loop["tokens"] / loop["tokens_per_second"] < 5 * 0.5


def test_a_signal_while_trackers_start_ends_the_run(tiny: list[str], tmp_path: Path) -> None:
    def run() -> int:
        import train

        def asked_to_stop() -> tuple[str, str]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            return "offline", ""

        tracking.wandb_mode = asked_to_stop
        return train.main([*tiny, "tracking.report_to=[wandb]"])

    started = time.monotonic()
    finished = Launch(run).wait(60)
    assert finished.codes == [75], finished.output
    assert time.monotonic() - started < 5
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "preempted"


def test_without_any_network_everything_works_and_nothing_is_tried(tiny: list[str], tmp_path: Path) -> None:
    tried = tmp_path / "tried"

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
            where = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments[0]
            host = where[0] if isinstance(where, tuple) else where
            if event != "socket.getaddrinfo" and isinstance(where, (str, bytes)):
                return  # a socket of this machine's file system
            if host not in ("127.0.0.1", "::1", "localhost"):
                with tried.open("a") as file:
                    file.write(f"{event} {where}\n")
                raise OSError("no network")

    environment = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    train_with(
        [*tiny, "tracking.report_to=[wandb,tensorboard]", "export.sample_tokens=4"],
        lambda: sys.addaudithook(audit),
        environment,
    )
    assert (tmp_path / "run/final/model.safetensors").is_file()
    assert not tried.exists(), tried.read_text()


def test_a_second_process_has_no_tracker_no_bar_and_no_file_but_its_tensors(tiny: list[str], tmp_path: Path) -> None:
    run, written = tmp_path / "run", tmp_path / "written"

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.rmdir", "shutil.rmtree")
        if event == "open":
            changes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if changes and str(run) in str(arguments[0]):
            with open(f"{written}-{os.environ['RANK']}", "a") as file:
                file.write(f"{event} {arguments[0]}\n")

    finished = train_with(
        [*tiny, "tracking.report_to=[wandb,tensorboard]"], lambda: sys.addaudithook(audit), num_processes=2
    )
    assert finished.outputs[1] == ""
    by_main, by_second = (
        file.read_text().splitlines() if file.exists() else [] for file in (Path(f"{written}-0"), Path(f"{written}-1"))
    )
    assert any("chain.json" in line for line in by_main)
    assert any("metrics.jsonl" in line for line in by_main)
    # It checks whether its machine can write there, and removes what it wrote.
    allowed = (f"os.mkdir {run}", "/.probe-", "/tensors-00001-of-00002.safetensors")
    assert [line for line in by_second if not any(text in line for text in allowed)] == []
    assert list(run.glob("checkpoints/latest/tensors-00001-of-00002.safetensors"))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"id": "x", "sent": "y", "uploaded": 0, "recipe": {}}'])
def test_a_damaged_wandb_note_costs_a_line_and_starts_a_new_run_there(
    content: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from acc_lm.config.loading import load_config

    recipe = load_config(tiny[1]).model_dump(mode="json")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/chain.json").write_text(content)
    chain = tracking.WandbChain(tmp_path / "wandb/chain.json", recipe, 6)
    assert "chain.json cannot be read; W&B gets a new run" in capsys.readouterr().err
    assert chain.takes(1), "the whole history"
    assert tracking.WandbChain(tmp_path / "wandb/chain.json", recipe, 6).id == chain.id
    assert capsys.readouterr().err == ""


def test_wandb_mode_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.wandb_mode()[0] == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert tracking.wandb_mode()[0] == "offline"
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}/nothing-here")
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password " + LIKELY_KEY)
        assert tracking.wandb_mode() == ("online", ""), "404 is an answer"
        server.shutdown()


def test_metrics_are_complete_and_plain_json(untracked: Path) -> None:
    lines = [json.loads(line) for line in (untracked / "metrics.jsonl").read_text().splitlines()]
    assert all(list(line)[0] == "step" for line in lines)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 6, 6]
