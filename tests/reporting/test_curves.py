"""training_curves.png: what is drawn, where the axes lie, and that a resumed run says where it was resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run_training

from acc_lm.checkpointing.resuming import resumed_at
from acc_lm.run_files import curves
from acc_lm.run_files.charts import smooth
from acc_lm.run_files.curves import draw_curves
from acc_lm.run_files.metrics_file import read
from acc_lm.run_files.names import ENVIRONMENT, METRICS, PICTURE


def axes_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> dict[str, Any]:
    """Axes of the picture by title, as they are when it is saved."""
    import matplotlib.figure

    found: dict[str, Any] = {}
    save = matplotlib.figure.Figure.savefig

    def look(figure: Any, *arguments: Any, **keys: Any) -> None:
        found.update({axes.get_title(): axes for axes in figure.axes})
        save(figure, *arguments, **keys)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", look)
    draw_curves(folder, "a $run", **keys)
    assert (folder / PICTURE).read_bytes().startswith(b"\x89PNG")
    return found


def write_metrics(folder: Path, num_steps: int = 100) -> None:
    with (folder / METRICS).open("w") as file:
        for step in range(1, num_steps + 1):
            names = {
                "loss": 5 - step / 50,
                "learning_rate": 1e-3 * min(step / 10, 1),
                "grad_norm": 10.0 ** (step % 4),
                "tokens_per_second": 900.0,
            }
            file.write(json.dumps({"step": step} | {f"train/{name}": value for name, value in names.items()}) + "\n")
            if step % 20 == 0:
                evaluated = {"eval/loss": 5 - step / 60, "eval/bits_per_byte": 3.0, "eval/wiki/loss": 4.0}
                file.write(json.dumps({"step": step} | evaluated) + "\n")


def test_a_picture_shows_losses_compression_rate_norm_and_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_metrics(tmp_path)
    found = axes_of(
        tmp_path,
        monkeypatch,
        compressors={"gzip": 2.5, "xz": 2.25},
        resumes=[(40, "resumed on ddp x2"), (80, "resumed on ddp x2")],
    )
    labels = {title: axes.get_legend_handles_labels()[1] for title, axes in found.items()}
    assert labels["Training loss"] == ["logged steps", "smoothed", "resumed on ddp x2"]
    assert labels["Evaluation loss"] == ["held-out text", "wiki", "best 3.3333 at step 100", "resumed on ddp x2"]
    assert labels["Held-out text, compressed"] == ["this model", "gzip 2.50", "xz 2.25", "resumed on ddp x2"]
    rate, norm, speed = (found[title] for title in ("Learning rate", "Gradient norm, before clipping", "Speed"))
    assert (rate.get_yscale(), rate.get_ylim()[0]) == ("linear", 0), "a warm-up from 0 is a ramp, no wall"
    assert norm.get_yscale() == "log"
    assert speed.get_ylim()[0] == 0
    for axes in found.values():
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [40, 80]


def test_a_picture_of_the_first_step_and_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / METRICS).write_text("")
    assert len(axes_of(tmp_path, monkeypatch)) == 6
    write_metrics(tmp_path, 1)
    assert axes_of(tmp_path, monkeypatch)["Training loss"].lines[0].get_marker() == "."


def test_a_smoothed_curve_does_not_lag() -> None:
    assert smooth([0, 0, 0, 9, 0, 0, 0], 1) == [0, 0, 3, 3, 3, 0, 0]
    assert smooth([1, 2, 6], 0) == [1, 2, 6]
    straight = list(range(50))
    assert smooth(straight, 5)[5:-5] == straight[5:-5]
    assert smooth([], 3) == []


def test_a_run_records_where_it_was_resumed_and_draws_it(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, drawn = tmp_path / "run", tmp_path / "drawn.json"
    draw = curves.draw_curves

    def record(*arguments: Any) -> None:
        drawn.write_text(json.dumps(arguments[-1]))
        draw(*arguments)

    monkeypatch.setattr(curves, "draw_curves", record)
    run_training([*tiny, "training.max_steps=2"])
    assert resumed_at(run) == []
    for num_steps, wanted in ((4, [2]), (6, [2, 4])):
        run_training([*tiny, f"training.max_steps={num_steps}", "checkpoint.resume=auto"])
        assert resumed_at(run) == wanted
        assert json.loads(drawn.read_text()) == [[step, "resumed on single x1"] for step in wanted]
    starts = json.loads((run / ENVIRONMENT).read_text())["starts"]
    assert [(start["step"], start["strategy"], start["num_processes"]) for start in starts] == [
        (step, "single", 1) for step in (0, 2, 4)
    ]
    last = Path(starts[-1]["checkpoint"])
    assert last == (run / "checkpoints/step-00000004").resolve()
    assert starts[-1]["ledger"] == json.loads((last / "state.json").read_text())["progress"]["ledger"]


def keep_what_is_drawn(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the points of every line of a picture, by chart and label, as it is saved by a process that is forked later."""
    import matplotlib.figure

    save = matplotlib.figure.Figure.savefig

    def keep(figure: Any, *arguments: Any, **keys: Any) -> None:
        charts = {
            axes.get_title(): {
                line.get_label(): [list(line.get_xdata()), list(line.get_ydata())] for line in axes.lines
            }
            for axes in figure.axes
        }
        file.write_text(json.dumps(charts, default=float))
        save(figure, *arguments, **keys)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)


def recorded(run: Path, metric: str) -> list[list[float]]:
    """Steps and values of a metric in metrics.jsonl."""
    entries = [entry for entry in read(run) if metric in entry]
    return [[entry["step"] for entry in entries], [entry[metric] for entry in entries]]


def check_lines(charts: dict[str, Any], run: Path, num_steps: int) -> None:
    losses, evaluations = recorded(run, "train/loss"), recorded(run, "eval/loss")
    assert len(losses[0]) == num_steps
    assert len(evaluations[0]) == num_steps // 14, "each step once, also after a resume"
    training, held_out = charts["Training loss"], charts["Evaluation loss"]
    assert training["logged steps"] == losses
    window = num_steps // 40
    means = [
        sum(part) / len(part) for n in range(num_steps) if (part := losses[1][max(0, n - window) : n + window + 1])
    ]
    assert training["smoothed"] == [losses[0], pytest.approx(means)]
    assert held_out["held-out text"] == evaluations
    best = min(evaluations[1])
    at = evaluations[0][evaluations[1].index(best)]
    assert held_out[f"best {best:.4f} at step {at}"] == [[at], [best]]
    assert charts["Learning rate"]["logged steps"] == recorded(run, "train/learning_rate")
    assert charts["Held-out text, compressed"]["this model"] == recorded(run, "eval/bits_per_byte")


def test_a_picture_has_the_values_of_the_metrics_also_after_a_resume(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, drawn, num_steps = tmp_path / "run", tmp_path / "drawn.json", 42
    keep_what_is_drawn(drawn, monkeypatch)
    more = [f"training.max_steps={num_steps}", "training.log_every=1", "training.eval_every=14", "checkpoint.every=14"]
    more += ["checkpoint.keep_last=9", "optimizer.learning_rate=5e-2"]
    run_training([*tiny, *more])
    uninterrupted = json.loads(drawn.read_text())
    check_lines(uninterrupted, run, num_steps)
    run_training([*tiny, *more, f"checkpoint.resume={run}/checkpoints/step-00000014"])
    resumed = json.loads(drawn.read_text())
    check_lines(resumed, run, num_steps)
    for title, lines in resumed.items():
        assert lines.pop("resumed on single x1") == [[14, 14], [0, 1]], title
        if title != "Speed":
            assert lines == uninterrupted[title], "as if it had not been interrupted"


def test_a_notebooks_backend_that_is_not_installed_does_not_end_a_run(tmp_path: Path) -> None:
    write_metrics(tmp_path, 4)
    program = "import pathlib, sys; from acc_lm.run_files.curves import draw_curves; draw_curves(pathlib.Path(sys.argv[1]), 'run')"
    environment = {**os.environ, "MPLBACKEND": "a_notebooks_own"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True)
    assert (tmp_path / PICTURE).exists()
