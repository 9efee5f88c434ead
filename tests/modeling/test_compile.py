"""Compiled runs, as an Accelerate config requests: curve, checkpoints and resumed run are those of the eager one."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import STRATEGY, Curve, Scenario, run_backend, train_curve
from processes import ROOT, Launch, launcher_environment, run_everywhere, run_training, start_training
from test_resume import assert_equal_runs, wait_for, with_dropout
from torch._dynamo.utils import counters

from acc_lm.run_files.differences import TOLERANCE, largest_differences

STEPS = 4
SCENARIO = Scenario("llama", steps=STEPS)
WHOLE, REGIONAL = "whole", "regional"


def environment_of(config: str, num_processes: int, backend: str, what: str) -> dict[str, str]:
    """Environment that `accelerate launch` passes on for this config with a `dynamo_config`."""
    launch = (
        {} if config == "single" else launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    )
    return launch | {
        "ACCELERATE_DYNAMO_BACKEND": backend.upper(), "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "false", "ACCELERATE_DYNAMO_USE_DYNAMIC": "false",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(what == REGIONAL).lower(),
    }  # fmt: skip


def compiled(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """Number of compiled graphs, backend, and the parameter names, in which compiling must not show."""
    from acc_lm.runtime import whole_shapes

    return {"graphs": counters["stats"]["unique_graphs"], "backend": accelerator.state.dynamo_plugin.backend.value,
            "names": sorted(whole_shapes(model))}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Forget what other tests have compiled and counted; the processes would inherit it."""
    torch._dynamo.reset()
    counters.clear()


@cache
def eager(scenario: Scenario) -> Curve:
    return run_backend("single", 1, [scenario], compiled)[0]


CASES = [("ddp", 2, REGIONAL), ("fsdp2", 2, REGIONAL)]
MORE = [("single", 1, WHOLE), ("single", 1, REGIONAL), ("ddp", 2, WHOLE), ("ddp", 3, REGIONAL), ("hsdp", 4, REGIONAL),
        ("deepspeed_zero2", 2, WHOLE), ("deepspeed_zero2", 2, REGIONAL), ("deepspeed_zero3", 2, REGIONAL)]  # fmt: skip
INDUCTOR = [case for case in (*CASES, *MORE) if case[1] <= 2 and case[0] in ("single", "ddp", "fsdp2")]


@pytest.mark.parametrize(("config", "num_processes", "what", "backend"), [
    *((*case, "aot_eager") for case in CASES),
    *(pytest.param(*case, "aot_eager", marks=pytest.mark.slow) for case in MORE),
    *(pytest.param(*case, "inductor", marks=pytest.mark.slow) for case in INDUCTOR),
])  # fmt: skip
def test_the_curve_and_its_checkpoints_are_those_of_the_eager_run(
    config: str, num_processes: int, what: str, backend: str, tmp_path: Path
) -> None:
    """Compared with one eager process; resumed from half of the way, compiled (bit for bit) and eager."""
    load = tmp_path / f"checkpoints/step-{STEPS // 2:08d}"
    environment = environment_of(config, num_processes, backend, what)
    scenarios = [replace(SCENARIO, save=tmp_path), replace(SCENARIO, load=load)]
    per_process = run_everywhere(
        lambda: [train_curve(scenario, compiled) for scenario in scenarios], num_processes, 300, environment
    )
    whole, resumed = per_process[0]
    expected = eager(SCENARIO)
    assert (expected.extra["graphs"], expected.extra["backend"]) == (0, "NO")
    for curve in (whole, resumed):
        assert (curve.strategy, curve.num_processes) == (STRATEGY[config][0], num_processes)
        assert curve.extra["backend"] == backend.upper()
        assert curve.extra["graphs"] > 0
        assert curve.extra["names"] == expected.extra["names"]
        assert curve.ledger == expected.ledger
    assert whole.start == expected.start
    differences = largest_differences(expected.metrics, whole.metrics)
    print(config, what, backend, whole.extra["graphs"], {name: f"{value:.1e}" for name, value in differences.items()})
    assert {name for name, value in differences.items() if value > TOLERANCE["no"][name]} == set()
    assert resumed.metrics == {step: whole.metrics[step] for step in resumed.metrics}
    assert sorted(resumed.metrics) == list(range(STEPS // 2 + 1, STEPS + 1))
    assert resumed.end == whole.end
    (read,) = run_backend("single", 1, [replace(SCENARIO, load=load)])
    rest = {step: expected.metrics[step] for step in read.metrics}
    assert max(largest_differences(rest, read.metrics).values()) <= TOLERANCE["no"]["train/loss"]


@pytest.mark.parametrize(
    "rows", ["text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("padded", "stream"))]
)
def test_ddp_gets_batches_of_one_size_so_that_nothing_is_compiled_twice(
    rows: str, tiny: list[str], text_file: Path, tmp_path: Path
) -> None:
    """After seeing two sizes torch compiles for any size, and every step then runs on that."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(f'{{"prompt": "{i}", "completion": "number {i}"}}\n' for i in range(200)))
    shutil.copy(text_file, tmp_path / "copy.jsonl")
    more = {
        "text": [],
        "padded": [f"data.files=[{chats}]", "data.packing=false", "data.sequence_length=128"],
        "stream": [
            f"data.files=[{text_file}, {tmp_path}/copy.jsonl]",
            "data.streaming=true",
            "data.num_streams=2",
            f"data.eval_files=[{text_file}]",
            "data.shuffle=false",
        ],
    }[rows]

    def run() -> int:
        import train

        forward, sizes = torch.nn.parallel.DistributedDataParallel.forward, set()

        def look(model: Any, *positional: Any, **keywords: Any) -> Any:
            if model.training:
                sizes.add(tuple(keywords["input_ids"].shape))
            return forward(model, *positional, **keywords)

        torch.nn.parallel.DistributedDataParallel.forward = look  # type: ignore[method-assign]
        code = train.main(
            [*tiny, *more, "training.max_steps=1", "schedule.warmup_steps=0", "training.micro_batch_size=2"]
        )
        print("sizes", *sizes)
        return code

    finished = Launch(run, 2, launcher_environment(ROOT / "accelerate_configs/ddp.yaml", 2)).wait(60)
    assert finished.codes == [0, 0], finished.outputs
    width = 64 if rows == "padded" else 32
    assert f"sizes (2, {width})\n" in finished.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "num_processes", "what"), [("single", 1, WHOLE), ("ddp", 2, REGIONAL), ("fsdp2", 2, REGIONAL)]
)
def test_a_killed_compiled_run_resumes_and_ends_like_an_uninterrupted_one(
    config: str, num_processes: int, what: str, tiny_recipe: Path, tmp_path: Path
) -> None:
    """kill -9 of every process, with dropout, really compiled; the exported model has the names of an eager one."""
    from safetensors import safe_open

    environment = environment_of(config, num_processes, "inductor", what)
    arguments = [*with_dropout(tiny_recipe), "training.micro_batch_size=6", "data.sequence_length=64"]
    runs = {name: tmp_path / name for name in ("whole", "killed", "eager")}
    run_training([*arguments, f"output_dir={runs['whole']}"], num_processes, environment)
    launch = start_training([*arguments, f"output_dir={runs['killed']}"], num_processes, environment)
    wait_for(runs["killed"] / "checkpoints/step-00000003/manifest.json", 300)
    for pid in launch.pids:
        os.kill(pid, signal.SIGKILL)
    assert launch.wait().codes == [-signal.SIGKILL] * num_processes
    again = run_training([*arguments, f"output_dir={runs['killed']}"], num_processes, environment)
    assert "resumed from" in again.output
    assert_equal_runs(runs["whole"], runs["killed"])
    run_training([*arguments, f"output_dir={runs['eager']}"])
    names = []
    for run in (runs["whole"], runs["eager"]):
        with safe_open(run / "final/model.safetensors", "pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1]
