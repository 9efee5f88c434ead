"""Exercises of lab 06: targets, adapters, and what a loss is a mean of."""

from __future__ import annotations

import re
from pathlib import Path

from answers import BadAnswer, NotYet, curve, needed, number, recipe, run, whole_number

LAB, LORA = Path("runs/lab"), Path("runs/lab-lora")
RANK = 4


def exercise_1(answer: str) -> str:
    """Share of the ids of the training rows that are targets, in percent."""
    targets, ids = learned(needed(LAB, 5))
    value, share = number(answer), 100 * targets / ids
    if abs(value - share) <= 0.5:
        return f"{targets:,} of {ids:,} ids, {share:.1f} %; the model reads the others and is not trained to write them"
    if abs(value - share / 100) <= 0.005:
        raise NotYet("in percent, please")
    if abs(value - (100 - share)) <= 0.5:
        raise NotYet("that is the share of the ids that are no targets")
    raise NotYet(f"see the line `learned` of the start block, in {LAB}/train.log")


def learned(folder: Path) -> tuple[int, int]:
    """(targets, ids) of the training rows, from the log of a run."""
    found = re.findall(r"(\d+) targets of (\d+) ids", (folder / "train.log").read_text())
    if not found:
        raise BadAnswer(f"{folder}/train.log must have the start block of the run, got none; run section 5 again")
    return int(found[-1][0]), int(found[-1][1])


def exercise_2(answer: str) -> str:
    """Number of parameters that a LoRA of rank 4 trains on the model of this lab."""
    from safetensors import safe_open

    rank = recipe(needed(LORA, 7))["adapter"]["rank"]
    with safe_open(LORA / "final/adapter_model.safetensors", "pt") as file:
        trained = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118, it is no mapping
    match whole_number(answer):
        case value if value == trained * RANK // rank:
            return (
                f"rank x (inputs + outputs) of each linear layer: {trained:,} at rank {rank}, {value:,} at rank {RANK}"
            )
        case value if value == trained:
            raise NotYet(f"that is rank {rank}, the default")
    raise NotYet("two matrices for each linear layer, rank x inputs and outputs x rank: proportional to the rank")


def exercise_3(answer: str) -> str:
    """Fine-tune on the lab's data with data.train_on=all. Answer: the folder of the run."""
    folder, reference = run(answer), needed(LAB, 5)
    if recipe(folder)["data"]["train_on"] != "all":
        raise NotYet(f"{answer} was trained with another data.train_on")
    (targets, ids), (answers, _) = learned(folder), learned(reference)
    if targets <= answers:
        raise NotYet(f"{answer} has as few targets as {LAB}: was it the same data?")
    (*_, every), (*_, only) = (curve(each, "eval/loss").values() for each in (folder, reference))
    return f"{every:.3f} over {targets:,} of {ids:,} ids, {only:.3f} over {answers:,}: means over different tokens, not comparable"
