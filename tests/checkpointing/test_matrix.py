"""Checkpoints written by any engine, read by any other: weights, moments, step count and position in the data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from backends import STEPS, Curve, Scenario, run_backend

from acc_lm.run_files.differences import TOLERANCE, largest_differences

ENGINES = {
    "single": ("single", 1), "ddp x2": ("ddp", 2), "fsdp2 x2": ("fsdp2", 2), "hsdp 2x2": ("hsdp", 4),
    "deepspeed_zero1 x2": ("deepspeed_zero1", 2), "deepspeed_zero2 x2": ("deepspeed_zero2", 2),
    "deepspeed_zero3 x2": ("deepspeed_zero3", 2), "deepspeed_zero3_offload x2": ("deepspeed_zero3_offload", 2),
    "ddp_sequence x2": ("ddp_sequence", 2), "sequence_parallel 2x2": ("sequence_parallel", 4),
    "deepspeed_zero3_sequence x2": ("deepspeed_zero3_sequence", 2),
}  # fmt: skip
FEW = {name: ENGINES[name] for name in ("single", "fsdp2 x2", "deepspeed_zero2 x2", "deepspeed_zero3 x2")}
"""One engine for each way to hold parameters and moments: unsharded, in shards of each tensor, in shards of a flat group, in flat shards of each."""
IN_PARTS = {
    name: ENGINES[name] for name in ("single", "deepspeed_zero2 x2", *(name for name in ENGINES if "sequence" in name))
}
"""Engines whose processes share rows, and two whose processes do not."""
LAYERS_IN_PARTS = {
    "tensor_parallel x2": ("tensor_parallel", 2),
    "fsdp2_tensor_parallel 2x2": ("fsdp2_tensor_parallel", 4),
}
"""Engines whose processes share layers, for models whose heads divide."""
HALF = STEPS // 2

Engines = dict[str, tuple[str, int]]


def whole_matrix(
    scenario: Scenario, folder: Path, engines: Engines = ENGINES
) -> dict[str, dict[str, tuple[float, bool]]]:
    """{writer: {reader: (largest relative difference of loss and norm after the load, bit-identical to the writer)}}.

    The reference is one process that was never interrupted; the identity is with the writer's own uninterrupted run.
    """
    whole: dict[str, Curve] = {}
    for writer, (config, num_processes) in engines.items():
        whole[writer] = run_backend(config, num_processes, [replace(scenario, save=folder / writer)])[0]
    matrix: dict[str, dict[str, tuple[float, bool]]] = {writer: {} for writer in engines}
    for reader, (config, num_processes) in engines.items():
        loads = [replace(scenario, load=folder / writer / f"checkpoints/step-{HALF:08d}") for writer in engines]
        for writer, curve in zip(engines, run_backend(config, num_processes, loads), strict=True):
            assert sorted(curve.metrics) == list(range(HALF + 1, STEPS + 1))
            assert curve.ledger == whole["single"].ledger
            expected = {step: whole["single"].metrics[step] for step in curve.metrics}
            differences = largest_differences(expected, curve.metrics)
            assert differences.pop("train/learning_rate") == 0
            same_as_writer = curve.end == whole[writer].end and all(
                curve.metrics[step] == whole[writer].metrics[step] for step in curve.metrics
            )
            matrix[writer][reader] = max(differences.values()), same_as_writer
    return matrix


def check(matrix: dict[str, dict[str, tuple[float, bool]]], bound: float, engines: Engines = ENGINES) -> None:
    print(json.dumps(matrix, indent=1))
    assert {(writer, reader) for writer in matrix for reader in matrix[writer]} == {
        (writer, reader) for writer in engines for reader in engines
    }
    for writer, row in matrix.items():
        for reader, (difference, same) in row.items():
            assert difference <= bound, (writer, reader)
            assert same or writer != reader, f"{writer} continues as if uninterrupted, bit for bit"


def test_one_engine_of_each_kind_resumes_from_any_other(tmp_path: Path) -> None:
    check(whole_matrix(Scenario("gpt2"), tmp_path, FEW), TOLERANCE["no"]["train/loss"], FEW)


def test_rows_in_parts_resume_from_complete_ones_and_back(tmp_path: Path) -> None:
    check(whole_matrix(Scenario("llama", accumulation=2), tmp_path, IN_PARTS), TOLERANCE["no"]["train/loss"], IN_PARTS)


@pytest.mark.slow
def test_any_engine_resumes_from_any_other(tmp_path: Path) -> None:
    check(whole_matrix(Scenario("gpt2"), tmp_path), TOLERANCE["no"]["train/loss"])


@pytest.mark.slow
def test_any_engine_resumes_from_layers_in_parts_and_back(tmp_path: Path) -> None:
    engines = ENGINES | LAYERS_IN_PARTS
    check(whole_matrix(Scenario("wide", accumulation=2), tmp_path, engines), TOLERANCE["no"]["train/loss"], engines)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [
    Scenario("llama", accumulation=4, gradient_checkpointing=True),
    Scenario("gpt2", accumulation=4, mixed_precision="bf16"),
], ids=str)  # fmt: skip
def test_any_engine_resumes_from_any_other_untied_and_in_bf16(scenario: Scenario, tmp_path: Path) -> None:
    bounds = {"no": TOLERANCE["no"]["train/loss"], "bf16": TOLERANCE["bf16"]["train/grad_norm"]}
    check(whole_matrix(scenario, tmp_path), bounds[scenario.mixed_precision])


@pytest.mark.parametrize(("fault", "at_least"), [
    ("step count not restored", 1e-2), ("first moment not restored", 1e-2), ("second moment not restored", 1e-2),
    ("decay group not restored", 1e-5),
])  # fmt: skip
def test_state_that_is_not_restored_is_detected(fault: str, at_least: float, tmp_path: Path) -> None:
    """Negative controls: without them the matrix could not fail."""
    scenario = Scenario("gpt2")
    whole = run_backend("single", 1, [replace(scenario, save=tmp_path)])[0]
    load = tmp_path / f"checkpoints/step-{HALF:08d}"
    intact, broken = run_backend("single", 1, [replace(scenario, load=load), replace(scenario, load=load, fault=fault)])
    expected = {step: whole.metrics[step] for step in intact.metrics}
    assert max(largest_differences(expected, intact.metrics).values()) == 0
    worst = max(largest_differences(expected, broken.metrics).values())
    print(fault, f"{worst:.1e}")
    assert worst > at_least
