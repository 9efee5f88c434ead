"""Exercises of lab 07: rows in parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from answers import NotYet, curve, environment, largest_difference, needed, recipe, run, whole_number

LONG = Path(__file__).with_name("long.yaml")
TWO_PARTS = Path("runs/course/long-2")


def exercise_1(answer: str) -> str:
    """Bytes that each of two processes sends in a step of long.yaml with rows in two parts, gradients included."""
    found, trained = recipe(needed(TWO_PARTS, 1)), environment(TWO_PARTS)
    shape, parts = found["model"]["config"], trained["rows_in_parts"]
    gradients = 2 * (parts - 1) * 4 * trained["num_parameters"] // parts
    exchanged = exchanged_elements(shape, found["data"]["sequence_length"] // parts) * 4 * (parts - 1) // parts
    backward = 2 * exchanged
    match whole_number(answer):
        case value if value == backward + gradients:
            return f"{backward:,} bytes of the row and {gradients:,} of the gradients"
        case value if value == backward:
            raise NotYet("that is the row; the gradients are sent too")
        case value if value == exchanged + gradients:
            raise NotYet("the gradients of queries, keys, values and outputs are exchanged too, in the backward pass")
        case value if value == 2 * backward + gradients:
            raise NotYet("each process keeps 1 / S of what it exchanges")
    raise NotYet(
        "add up the all-to-alls of section 3 in each layer, forward and backward, and the ring of the gradients"
    )


def exchanged_elements(shape: dict[str, Any], positions: int) -> int:
    """Elements of queries, keys, values and outputs of a process's positions, in all layers."""
    size = shape["hidden_size"] // shape["num_attention_heads"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    return int(shape["num_hidden_layers"] * positions * heads * size)


def exercise_2(answer: str) -> str:
    """Train long.yaml with rows in two parts and two rows per step on four processes, under FSDP2. Answer: the folder of the run."""
    folder = run(answer)
    found = environment(folder)
    shown = (found["strategy"], found["num_processes"], found["rows_in_parts"])
    if shown != ("fsdp2", 4, 2):
        raise NotYet("it ran as {} on {} processes with rows in {} parts; see sequence_parallel.yaml".format(*shown))
    if (rows := recipe(folder)["training"]["global_batch_size"]) != 2:
        raise NotYet(f"it trained on {rows} rows per step; two groups of processes can read two")
    difference = largest_difference(curve(reference_run()), curve(folder))
    if not difference < 1e-5:
        raise NotYet(
            f"the losses differ from one process by {difference:.1e}: was it {LONG.name}, otherwise unchanged?"
        )
    return f"{found['placement']}; the losses differ from one process by {difference:.1e}"


def reference_run() -> Path:
    """Two rows per step on one process, trained when it is first needed."""
    folder = Path("runs/course/long-two-rows")
    if not (folder / "summary.json").is_file():
        command = [sys.executable, "train.py", "--config", str(LONG), "training.global_batch_size=2"]
        subprocess.run([*command, f"output_dir={folder}"], check=True, capture_output=True)
    return folder


def exercise_3(answer: str) -> str:
    """The largest number of processes that can share a row of long.yaml."""
    from acc_lm.config.loading import load_config

    config = load_config(LONG).model.config
    assert config is not None
    heads, value = config["num_attention_heads"], whole_number(answer)
    if value > heads or heads % value:
        raise NotYet(f"{value} does not divide the {heads} attention heads: which process would compute which?")
    if value < heads:
        raise NotYet("a process can do with fewer heads")
    return f"each process has one of the {heads} heads; a larger model has more"
