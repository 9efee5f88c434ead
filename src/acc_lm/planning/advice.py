"""Reasons for the recommended candidate and against others, and the changes with which something fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from acc_lm.errors import UserError
from acc_lm.planning.hardware import GIB
from acc_lm.planning.plan import AS_FAST, ROOM, Candidate, Machine, RunPlan, make_plan
from acc_lm.planning.speed import StepTime

if TYPE_CHECKING:
    from acc_lm.config import Config
    from acc_lm.planning.probe import Probe

MORE = (2, 4, 8, 16, 32, 64)
"""Multiples of the number of GPUs that are tried if nothing fits."""


def not_in_plan(config: Config) -> list[str]:
    """Properties of a recipe that its plan leaves out."""
    lines = []
    if config.optimizer.name == "muon":
        lines.append(
            "Muon holds one moment of a matrix, not AdamW's two, which are counted: up to 4 bytes of a weight less"
        )
    if config.data.packing and not config.data.attend_across_documents:
        lines.append("masks of packed documents: small on a GPU, a byte per pair of positions on a CPU")
    return lines


def shares_of(time: StepTime) -> dict[str, float]:
    """Parts of a step that take more than half a percent of it."""
    seconds = {
        "products": time.products,
        "attention": time.attention,
        "memory traffic": time.traffic,
        "communication": time.communication,
        "update": time.update,
        "offload": time.offload,
    }
    return {name: value / time.total for name, value in seconds.items() if value > 0.005 * time.total}


def reason_for(best: Candidate) -> str:
    """Reason for the recommended candidate."""
    if best.time is None:
        return "the simplest that fits; speed is not modelled, so it is not compiled and has the recipe's micro-batch or the next that fits"
    return f"the simplest of those within {100 * (1 - AS_FAST):.0f} % of the fastest that fits"


def why_not(each: Candidate, best: Candidate, machine: Machine) -> str:
    """Reason against a candidate, compared with the recommended one."""
    if each.fits == "no":
        return f"does not fit, {each.memory.low / GIB:.0f} GiB at least"
    if each.fits == "host":
        return f"needs {each.memory.host / 1e9:,.0f} GB of the machine's memory"
    if not best.tokens_per_second:
        return "less simple"
    gain = 100 * (each.tokens_per_second / best.tokens_per_second - 1)
    if each.fits == "tight" and best.fits == "yes":
        return f"{gain:+.0f} %, and it only just fits"
    if gain < -5:
        return f"{-gain:.0f} % slower"
    if each.memory.middle > ROOM * machine.memory:
        return f"{gain:+.0f} %, within the error, with little room"
    return f"{gain:+.0f} %, within the error, and less simple"


def ways_out(config: Config, probe: Probe, machine: Machine, found: RunPlan, only: str | None) -> list[str]:
    """Smallest changes with which something fits."""
    lines = ["nothing fits"]
    on_host = [each for each in found.candidates if each.fits == "host"]
    if on_host:
        least = min(on_host, key=lambda each: each.memory.host)
        lines.append(
            f"  {least.placement.config} fits with {least.memory.host / 1e9:,.0f} GB of memory in each machine"
        )
    else:
        least = min(found.candidates, key=lambda each: each.memory.low)
        needed = f"{least.memory.low / GIB:.0f} GiB of {machine.gpu.memory_gib:g}"
        lines[0] += f": {least.placement.config} with checkpointing {least.checkpointing} needs {needed} at least"
    for times in MORE:
        larger = replace(machine, num_gpus=machine.num_gpus * times)
        try:
            better = make_plan(config, probe, larger, 1, only).recommended
        except UserError:
            continue
        if better is not None:
            lines.append(
                f"  {larger.num_gpus} x {machine.gpu.name} fit: {better.placement.config}, micro-batch 1, checkpointing {better.checkpointing}"
            )
            break
    if config.adapter.kind == "none" and config.model.name_or_path:
        lines.append("  adapter.kind=lora trains a thousandth of the weights")
    if (config.training.mixed_precision or "no") == "no":
        lines.append(f"  training.mixed_precision={machine.gpu.precision} halves the activations")
    if config.data.sequence_length > 1024:
        lines.append("  a shorter data.sequence_length needs less for activations")
    return lines
