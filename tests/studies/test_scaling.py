"""`acc-lm scaling`: communication of a step on each engine, the same losses on any number of processes, and the derived figures."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import STRATEGY
from processes import ROOT, launcher_environment, run_everywhere, start_training

from acc_lm.cli import main
from acc_lm.errors import ConfigError

CONFIGS = ROOT / "accelerate_configs"


# --- what a step communicates --------------------------------------------------------------------------------------


def one_step(recipe: Path, config: str, num_processes: int, accumulation: int = 1) -> dict[str, Any]:
    """Measurements of the main process: a step's collectives by kind, bytes received over TCP, and facts about the model."""

    def run() -> dict[str, Any]:
        from acc_lm import runtime
        from acc_lm.studies.bandwidth_worker import build, measure

        case = build(recipe, ["training.micro_batch_size=2"], num_processes, accumulation)
        shapes = runtime.whole_shapes(case.model)
        found = measure(case, 1)
        return {"strategy": case.strategy, "elements": sum(map(math.prod, shapes.values())), **found}

    environment = launcher_environment(CONFIGS / f"{config}.yaml", num_processes)
    found: dict[str, Any] = run_everywhere(run, num_processes, environment=environment)[0]
    assert found["strategy"] == STRATEGY[config][0]
    return found


def sent(found: dict[str, Any], kind: str) -> tuple[float, float]:
    entry = found["collectives"].get(kind, {"calls": 0, "bytes": 0})
    return entry["calls"], entry["bytes"]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_ddp_sends_each_gradient_once_a_step(accumulation: int, tiny_recipe: Path) -> None:
    found = one_step(tiny_recipe, "ddp", 2, accumulation)
    assert sent(found, "all-reduce") == (1, 4 * found["elements"])
    assert set(found["collectives"]) <= {"all-reduce", "broadcast"}, "and its buffers"
    assert found["tcp_bytes"] == pytest.approx(4 * found["elements"], rel=0.02), "the system's own count"


def test_fsdp2_gathers_each_unit_twice_and_scatters_it_once(tiny_recipe: Path) -> None:
    found = one_step(tiny_recipe, "fsdp2", 2)
    num_units = sent(found, "reduce-scatter")[0]
    assert num_units == 4, "two blocks, the embedding, the norm with the head"
    assert sent(found, "all-gather")[0] == 2 * num_units - 1, "the last one stays whole from forward to backward"
    gradients = 4 * found["elements"]
    assert gradients <= sent(found, "reduce-scatter")[1] <= 1.05 * gradients, "padded"
    assert gradients < sent(found, "all-gather")[1] <= 2.1 * gradients
    assert sent(found, "all-reduce") == (1, 8), "the norm"


def test_hsdp_reduces_a_shard_between_the_copies(tiny_recipe: Path) -> None:
    found = one_step(tiny_recipe, "hsdp", 4)
    scattered = found["collectives"]["reduce-scatter"]
    assert scattered["ring_bytes"] == scattered["bytes"] / 2, "among the two that share a copy, not among all four"
    calls, num_bytes = sent(found, "all-reduce")
    assert (calls, num_bytes) == (scattered["calls"] + 1, scattered["bytes"] / 2 + 8)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_sends_gradients_one_way_and_weights_the_other(stage: int, tiny_recipe: Path) -> None:
    found = one_step(tiny_recipe, f"deepspeed_zero{stage}", 2)
    gradients = 4 * found["elements"]
    reduced = sum(sent(found, kind)[1] for kind in ("all-reduce", "reduce-scatter", "reduce"))
    assert reduced == pytest.approx(gradients, rel=0.05)
    assert sent(found, "all-gather")[1] == pytest.approx(gradients, rel=0.05)


def test_a_counter_sees_the_payload_and_the_group_of_each_kind() -> None:
    def run() -> Any:
        import torch.distributed as dist

        from acc_lm.runtime import Traffic, summarize_traffic

        dist.init_process_group("gloo")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = pairs[dist.get_rank() // 2]
        parts = [torch.zeros(5) for _ in range(4)]
        with Traffic() as traffic:
            dist.all_reduce(torch.zeros(7, 3, dtype=torch.int64), group=mine)
            dist.all_gather(parts, torch.zeros(5))
            dist.broadcast(torch.zeros(10, dtype=torch.bfloat16), 0)
            dist.barrier()
        dist.all_reduce(torch.zeros(9))  # after it
        return summarize_traffic(traffic.calls), [call.dtype for call in traffic.calls]

    found, dtypes = run_everywhere(run, 4)[3]
    assert found == {
        "all-reduce": {"calls": 1, "bytes": 168, "ring_bytes": 168.0},
        "all-gather": {"calls": 1, "bytes": 80, "ring_bytes": 60.0},
        "broadcast": {"calls": 1, "bytes": 20, "ring_bytes": 20.0},
    }
    assert dtypes == ["int64", "float32", "bfloat16"]


def test_a_counted_step_runs_what_is_compiled() -> None:
    """torch runs nothing compiled under most of its dispatch modes, and attention without its kernel needs T x T scores."""
    from acc_lm.runtime import Traffic

    ran: list[str] = []

    def count(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            ran.append("compiled")
            return graph.forward(*arguments)

        return run

    torch._dynamo.reset()
    double = torch.compile(lambda values: 2 * values, backend=count)
    with Traffic() as traffic:
        assert double(torch.ones(3)).tolist() == [2, 2, 2]
        assert double(torch.ones(3)).tolist() == [2, 2, 2]
    assert ran == ["compiled"] * 2
    assert traffic.calls == []


# --- the command ---------------------------------------------------------------------------------------------------


def forked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Let launches fork from this process instead of starting a new interpreter; returns the requested launches, as they come."""
    from acc_lm.studies import scaling

    asked: list[tuple[int, str]] = []

    def launch(
        program: Sequence[str], config_file: Path | None, count: int, log: Path, seconds: float, *,
        num_machines: int, environment: dict[str, str],
    ) -> str | None:  # fmt: skip
        arguments = list(program[1:])
        asked.append(
            (count, next(word for word in reversed(arguments) if word.startswith("training.global_batch_size=")))
        )
        assert (config_file is None) == (count == 1)
        how = launcher_environment(config_file, count) if config_file else {}
        finished = start_training(arguments, count, {**how, **environment}).wait()
        return None if finished.codes == [0] * count else finished.errors[0]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(scaling, "launch", launch)
    return asked


def test_strong_and_weak_scaling_of_a_recipe(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = forked(monkeypatch)
    page = tmp_path / "scaling.md"
    page.write_text("# Scaling\n\nwritten by hand\n")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    command = ["scaling", "--config", str(tiny_recipe), "--processes", "3,1", "--steps", "6", "--output", str(page)]
    assert main([*command, "optimizer.learning_rate=2e-3"]) == 0
    size = "training.global_batch_size="
    assert asked == [(1, f"{size}12"), (3, f"{size}12"), (3, f"{size}36")], "one process is the same either way"

    values = json.loads((tmp_path / "scaling.json").read_text())
    assert "optimizer.learning_rate=2e-3" in values["command"]
    rows = {(row["kind"], row["num_processes"]): row for row in values["rows"]}
    assert list(rows) == [("strong", 1), ("strong", 3), ("weak", 1), ("weak", 3)]
    assert [row["strategy"] for row in values["rows"]] == ["single", "ddp"] * 2
    three = rows["strong", 3]
    assert three["largest_difference"]["train/loss"] <= 1e-6
    assert three["largest_difference"]["train/learning_rate"] == 0
    assert three["same_rows"] is True
    assert rows["weak", 3]["largest_difference"] is None, "it trains on other batches"
    assert rows["strong", 1]["collectives"] == {}
    gradients = three["collectives"]["all-reduce"]
    assert gradients["bytes"] == pytest.approx(4 * three["num_parameters"], rel=0.02), (
        "and what is agreed on and logged"
    )
    assert gradients["ring_bytes"] == pytest.approx(gradients["bytes"] * 4 / 3)
    assert three["tcp_bytes"] == pytest.approx(three["collectives"]["all-reduce"]["ring_bytes"], rel=0.1)
    for row in values["rows"]:
        times = row["num_processes"]
        assert row["efficiency"] == pytest.approx(row["speed_up"] / times)
        tokens = row["global_batch_size"] * 32
        assert row["step_seconds"] * row["tokens_per_second"] == pytest.approx(tokens, rel=0.5)

        assert row["planned"]["bytes_sent"] == pytest.approx(
            sum(entry["ring_bytes"] for entry in row["collectives"].values()), rel=0.02, abs=1
        )
    assert rows["strong", 1]["planned"]["speed_up"] == 1
    assert values["plan"].startswith("plan of CPU processes: computation measured on 1 x, ")

    text = page.read_text()
    assert text.startswith("# Scaling\n\nwritten by hand\n")
    assert f"\n{values['plan']}.\n" in text
    assert "3 processes share 2 cores" in text
    assert "![Speed-up over the number of processes](scaling.png)" in text
    assert f"| 3 | ddp | 36 | {1000 * rows['weak', 3]['step_seconds']:.1f} ms |" in text
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "strong scaling: the same losses to " in output


def measured(losses: Sequence[float], ledger: str = "rows") -> dict[str, Any]:
    """Measurements of a launch of six steps."""
    metrics = {
        step: {"train/loss": loss, "train/tokens": 100.0 * step, "train/tokens_per_second": 50.0}
        for step, loss in enumerate(losses, start=1)
    }
    return {
        "metrics": metrics, "summary": {"peak_memory_gb": [0.5, 0.7], "ledger": ledger}, "strategy": "ddp", "num_parameters": 10,
        "traffic": {"collectives": {}, "tcp_bytes": None, "backend": "nccl"},
    }  # fmt: skip


SAME = [3.0, 2.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("second", "code", "said"), [
    (measured([*SAME[:5], 1.000001]), 0, "strong scaling: the same losses to 1.0e-06"),
    (measured([*SAME[:5], 1.0001]), 1, "strong scaling: NOT the same losses"),
    (measured(SAME, "others"), 1, "OTHER ROWS"),
    (measured([*SAME[:5], math.nan]), 1, "loss apart inf"),
    ({"problem": "error: out of luck"}, 1, "strong    2 x  error: out of luck"),
])  # fmt: skip
def test_another_loss_on_more_processes_is_no_scaling(
    second: dict[str, Any], code: int, said: str,
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from acc_lm.studies import scaling

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(scaling, "_measure", lambda case, *rest: measured(SAME) if case.num_processes == 1 else second)
    output = ["--output", str(tmp_path / "scaling.md")]
    assert main(["scaling", "--config", str(tiny_recipe), "--processes", "1,2", "--steps", "6", *output]) == code
    assert said in capsys.readouterr().out
    assert (tmp_path / "scaling.png").stat().st_size > 0


@pytest.mark.slow
def test_scaling_by_a_real_launch(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of processes is one launch: strong and weak begin with the same."""
    monkeypatch.chdir(ROOT)
    output = tmp_path / "made" / "scaling.md"
    command = ["scaling", "--config", str(tiny_recipe), "--processes", "2", "--steps", "20", "--output", str(output)]
    assert main(command) == 0
    rows = json.loads(output.with_name("scaling.json").read_text())["rows"]
    assert [(row["kind"], row["num_processes"], row["strategy"], row["backend"]) for row in rows] == [
        (kind, 2, "ddp", "gloo") for kind in ("strong", "weak")
    ]
    assert rows[0]["collectives"] == rows[1]["collectives"]
    # Of a step that logs nothing: the gradients in one bucket, and 8 bytes of what the processes agree on.
    assert rows[0]["collectives"]["all-reduce"]["bytes"] == 4 * rows[0]["num_parameters"] + 8
    assert sorted(file.name for file in output.parent.iterdir()) == ["scaling.json", "scaling.md", "scaling.png"]


@pytest.mark.parametrize(("arguments", "text"), [
    (["--processes", "1,x"], "--processes must be numbers of processes such as 1,2,4, got '1,x'; write them like these"),
    (["--processes", "0,2"], "--processes must be numbers of processes such as 1,2,4, got '0,2'; write them like these"),
    (["--processes", ""], "--processes must be numbers of processes such as 1,2,4, got ''; write them like these"),
    (["--steps", "5"], "--steps must be at least 6, got 5; raise it"),
    (["--processes", "1,5"], "training.global_batch_size must be a multiple of each of --processes, got 12 for 5; nearest: 10, 15"),
    (["--processes", "1,2", "training.micro_batch_size=5"], "training.global_batch_size must be a multiple of micro_batch_size 5"),
    (["--config_file", "nowhere.yaml"], "nowhere.yaml must be an Accelerate config, or the name of one, got nothing there"),
    (["training.max_stops=3"], "must be a known key, got 'max_stops'; did you mean max_steps?"),
])  # fmt: skip
def test_scaling_refuses_what_it_cannot_do_in_one_line(
    arguments: list[str],
    text: str,
    tiny_recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forked(monkeypatch)
    assert main(["scaling", "--config", str(tiny_recipe), *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_more_processes_than_gpus_are_refused_and_cpu_processes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.studies.launching import check_num_processes

    check_num_processes(5, "--processes")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    check_num_processes(4, "--processes")
    with pytest.raises(
        ConfigError, match="--processes must be at most 4, one for each GPU here, got 5; lower it, or set"
    ):
        check_num_processes(5, "--processes")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    check_num_processes(5, "--processes")


def test_the_time_of_a_step_is_taken_from_the_log_without_the_start() -> None:
    from acc_lm.studies.scaling import seconds_of_steps

    def log(step: int, tokens: float, rate: float) -> tuple[int, dict[str, float]]:
        return step, {"train/tokens": tokens, "train/tokens_per_second": rate}

    slow = [log(step, 100 * step, 1.0) for step in (2, 4, 6)]
    metrics = dict([*slow, log(8, 800, 50.0), log(10, 1000, 100.0), log(12, 1200, 100.0)])
    assert seconds_of_steps({**metrics, 13: {"eval/loss": 2.0}}) == (1.0, 100.0)


def test_the_serial_share_is_karp_and_flatts() -> None:
    from acc_lm.studies.scaling import serial_share

    assert serial_share(1.0, 1) is None
    assert serial_share(4.0, 4) == pytest.approx(0)
    assert serial_share(1.0, 4) == pytest.approx(1)
    amdahl = 1 / (0.1 + 0.9 / 8)
    assert serial_share(amdahl, 8) == pytest.approx(0.1)


def test_a_speed_up_that_the_cores_cannot_give_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.studies.scaling import ScalingRow, doubts

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    rows = [ScalingRow("weak", count, 8, speed_up=speed_up) for count, speed_up in ((1, 1.0), (2, 2.05), (4, 2.4))]
    (said,) = doubts(rows, 1, load=0.5)
    assert said.startswith(
        "weak scaling to 4 processes was 2.40 times as fast, and 2 cores allow 2: other programs used them meanwhile"
    )
    assert doubts(rows[:2], 1, load=0.5) == []
    assert "load average 3.00" in doubts([], 1, load=3.0)[0]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert doubts(rows, 1, load=9.0) == []


# --- the plan's curve ----------------------------------------------------------------------------------------------


def of_model(**model: Any) -> Any:
    from acc_lm.config import Config

    shape = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
    training = {"max_steps": 1, "global_batch_size": 512, "micro_batch_size": 8, "mixed_precision": "bf16"}
    data = {"sequence_length": 2048}
    return Config.model_validate(
        {"model": {"config": {"model_type": "llama", **shape, **model}}, "data": data, "training": training}
    )


def test_the_plan_of_cpu_processes_rests_on_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.studies.scaling import ScalingRow
    from acc_lm.studies.scaling_plan import add_plan

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    measured = [("strong", 1, 512, 8.0), ("strong", 2, 512, 5.0), ("strong", 4, 512, 9.9), ("weak", 4, 2048, 1.0)]
    rows = [ScalingRow(kind, count, size, step_seconds=seconds) for kind, count, size, seconds in measured]
    found, about = add_plan(rows, of_model(), CONFIGS / "ddp.yaml")
    assert about == "plan of CPU processes: computation measured on 1 x, link on 2 x (strong)"
    # 4 s of computation and 1 s for 2 x 1/2 of the gradients; four processes share two cores and send 2 x 3/4.
    assert [each.planned and each.planned.speed_up for each in found] == pytest.approx(
        [1, 8 / 5, 8 / 5.5, 4 * 8 / 17.5]
    )


def test_the_plan_of_gpus_is_relative_and_marks_what_is_extrapolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acc_lm.planning import hardware
    from acc_lm.studies import scaling, scaling_plan

    monkeypatch.setattr(scaling_plan, "num_accelerators", lambda: 8)
    monkeypatch.setattr(hardware, "gpus_here", lambda: (8, hardware.GPUS["H100"]))
    rows = [scaling.ScalingRow("strong", 1, 8, step_seconds=3.0, speed_up=1, largest_difference={"train/loss": 0.0})]
    rows += [scaling.ScalingRow("weak", n, 8 * n, step_seconds=3.0, speed_up=n) for n in (1, 8, 64, 1024)]
    found, about = scaling_plan.add_plan(rows, of_model(), CONFIGS / "ddp.yaml")
    assert about == "plan for H100, as multiples of its speed on 1 x"
    planned = [each.planned for each in found[1:] if each.planned]
    assert [each.speed_up for each in planned] == sorted(each.speed_up for each in planned)
    assert planned[0].speed_up == 1
    assert all(0.5 * n < each.speed_up < n for each, n in zip(planned[1:3], (8, 64), strict=True))
    assert all(each.low == pytest.approx(0.9 * each.speed_up) for each in planned)
    assert [bool(each.extrapolated) for each in planned] == [False, False, False, True]
    values = {
        "command": "",
        "made": "",
        "cores": 2,
        "accelerators": 8,
        "plan": about,
        "notes": [],
        "load_average_before": 0.0,
    }
    scaling.draw_scaling(found, values, tmp_path / "scaling.png")
    assert f"{planned[3].speed_up:.2f} (extrapolated) |" in "\n".join(scaling._page(found, values))


def test_a_model_without_a_plan_has_no_curve_and_says_so() -> None:
    from acc_lm.studies.scaling import ScalingRow
    from acc_lm.studies.scaling_plan import add_plan

    rows = [ScalingRow("strong", 1, 512, step_seconds=1.0)]
    config = of_model(
        model_type="mixtral", num_local_experts=4, num_hidden_layers=2, hidden_size=64, intermediate_size=64
    )
    assert add_plan(rows, config, CONFIGS / "ddp.yaml") == (
        rows, "no curve of the plan: speed of this kind of model or adapter is not modelled",
    )  # fmt: skip


# --- launches ------------------------------------------------------------------------------------------------------

PARENT_OF_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_ends_what_it_started(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PARENT_OF_A_CHILD)
    log = tmp_path / "log"
    command = (
        "import sys; from pathlib import Path; from acc_lm.studies.launching import launch, signals_end_it\n"
        "with signals_end_it():\n"
        "    launch([sys.argv[1]], None, 1, Path(sys.argv[2]), 600)"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", command, str(tmp_path / "program.py"), str(log)], stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where the tests themselves run in the background
    )  # fmt: skip
    end = time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.02)
    grandchild = int(log.read_text())
    assert Path(f"/proc/{grandchild}").exists()
    running.send_signal(number)
    assert b"KeyboardInterrupt" in running.communicate(timeout=60)[1]
    end = time.monotonic() + 10
    while is_alive(grandchild) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_alive(grandchild)


def test_an_interrupted_wait_keeps_no_process_alive() -> None:
    """Between taking the lock of a Popen and checking the process nothing releases it."""
    from acc_lm.studies.launching import _end

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process._waitpid_lock.acquire()  # type: ignore[attr-defined]
    ending = threading.Thread(target=_end, args=(process,), daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()
    assert not is_alive(process.pid)


def is_alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_an_interrupted_verb_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from acc_lm.studies import scaling

    def interrupted(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(scaling, "scaling", interrupted)
    assert main(["scaling"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_launch_that_fails_says_why_and_one_that_hangs_is_terminated(tmp_path: Path) -> None:
    from acc_lm.studies.launching import launch

    file, log = tmp_path / "program.py", tmp_path / "log"
    file.write_text("import sys; print('error: first'); print('error: second'); sys.exit(2)")
    assert launch([str(file)], None, 1, log, 60) == "error: first"
    file.write_text("raise ValueError('no such thing')")
    assert launch([str(file)], None, 1, log, 60) == "ValueError: no such thing"
    file.write_text("import time; time.sleep(600)")
    assert launch([str(file)], None, 1, log, 0.5) == "still running after 0.5 s"
