"""`acc-lm plan`: what fits on which GPUs, how fast it is, and what it costs, before anything runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc_lm.cli import replaced_file, split_recipe, stdout_on_stderr
from acc_lm.errors import ConfigError, MachineError
from acc_lm.planning.hardware import GIB

if TYPE_CHECKING:
    from acc_lm.config import Config
    from acc_lm.planning.plan import Candidate, Machine, RunPlan
    from acc_lm.planning.probe import Probe
    from acc_lm.studies.measuring import Compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", metavar="NxGPU", help="number and kind, e.g. 8xH100, or `here`")
    parser.add_argument("--config", dest="only", metavar="NAME", help="consider this Accelerate config alone")
    parser.add_argument(
        "--network", type=float, default=400, metavar="GBIT", help="Gbit/s of each GPU's link to others"
    )
    parser.add_argument("--machine-memory", type=float, default=1000, metavar="GB", help="memory of a machine, in GB")
    parser.add_argument("--price", type=float, metavar="X", help="price of a GPU hour, in any currency")
    parser.add_argument("--all", action="store_true", help="print every combination, not the best of each config")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="launch the dry run of the plan here, print predicted next to measured, and keep the speed for later plans",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="with --measure on a CPU: number of processes")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with a slider for the number of GPUs"
    )
    parser.add_argument("overrides", nargs="*", metavar="RECIPE or section.key=value", help="recipe and its keys")


def run(known: argparse.Namespace) -> int:
    from acc_lm.config.loading import load_config
    from acc_lm.config.project import find_recipe
    from acc_lm.runtime import has_accelerator, quiet_libraries

    _check_options(known)
    name, overrides = split_recipe(None, known.overrides)
    recipe = find_recipe(name or "quickstart")
    with stdout_on_stderr():
        quiet_libraries()
        config = load_config(recipe, overrides)
    if known.measure and not has_accelerator():
        if known.html is not None:
            raise ConfigError(
                f"--html must be left out with --measure on a machine without a GPU, whose rehearsal has no page, got {known.html}; plan for "
                "--gpus 8xH100 without --measure"
            )
        return _rehearse(known, config, [str(recipe), *overrides])
    return _plan(known, config, name, str(recipe), overrides)


def _check_options(known: argparse.Namespace) -> None:
    if known.measure and known.gpus not in (None, "here"):
        raise ConfigError(
            f"--gpus must be here with --measure, which launches on this machine, got {known.gpus}; leave it out"
        )
    if known.html is not None and known.gpus is None:
        raise ConfigError("--html must come with --gpus, whose plan it draws, got none; write for example --gpus here")
    if known.gpus is None and not known.measure:
        raise ConfigError("--gpus must name the hardware, got none; write for example --gpus 8xH100, or --gpus here")
    for option in ("network", "machine_memory", "price"):
        value = getattr(known, option)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{option.replace('_', '-')} must be a positive number, got {value:g}; correct it")
    if known.processes is not None and (not known.measure or known.processes < 1):
        raise ConfigError(
            f"--processes must be a positive number of CPU processes for --measure, got {known.processes}; leave it out"
        )


def _rehearse(known: argparse.Namespace, config: Config, words: list[str]) -> int:
    """Compare the recipe as it stands with its dry run on CPU processes; return the exit code."""
    from acc_lm.config.project import find_accelerate_config
    from acc_lm.studies.measuring import compare_with_dry_run, rehearsed

    file = find_accelerate_config(known.only or ("ddp" if (known.processes or 1) > 1 else "single_gpu"))
    with stdout_on_stderr():
        probe, candidate = rehearsed(config, file, known.processes)
        _say_launch(candidate)
        compared = compare_with_dry_run(config, words, file, probe, candidate, None)
    return _print_measured(compared, candidate, known.json, {})


def _say_launch(candidate: Candidate) -> None:
    count, size = candidate.placement.num_processes, f"{candidate.micro_batch_size} x {candidate.accumulation}"
    print(
        f"measuring {candidate.placement.config} on {count} process(es), micro-batch {size}, checkpointing "
        f"{candidate.checkpointing}, by train.py --dry-run ...",
        file=sys.stderr,
    )


def _print_measured(compared: list[Compared], candidate: Candidate, as_json: bool, values: dict[str, Any]) -> int:
    from acc_lm.studies.measuring import table

    if as_json:
        measured = {
            each.name: {"unit": each.unit, "predicted": each.predicted, "measured": each.measured} for each in compared
        }
        print(json.dumps(values | {"measured": measured}, indent=1))
    else:
        for line in table(compared):
            print(line)
        if candidate.time is None:
            print("no speed is predicted for a CPU, nor for models whose speed is not modelled")
    return 0 if all(each.holds for each in compared) else 1


def _plan(known: argparse.Namespace, config: Config, recipe: str | None, file: str, overrides: list[str]) -> int:
    """Plan for GPUs, and measure the recommended candidate if that was asked for; return the exit code."""
    from acc_lm.planning.advice import ways_out
    from acc_lm.planning.hardware import gpus_here, parse_gpus
    from acc_lm.planning.plan import Machine, command_line, make_plan
    from acc_lm.planning.plan_page import Planned, page_of_plan
    from acc_lm.planning.probe import Probe, vocabulary_of

    num_gpus, gpu = gpus_here() if known.gpus in (None, "here") else parse_gpus(known.gpus)
    machine = Machine(gpu, num_gpus, known.network / 8 * 1e9, known.machine_memory * 1e9)
    with stdout_on_stderr():
        pinned = any(word.startswith("training.micro_batch_size=") for word in overrides)
        probe = Probe(config, vocabulary_of(config))
        micro_batch_size = config.training.micro_batch_size if pinned else None
        found = make_plan(config, probe, machine, micro_batch_size, known.only, every=known.all)
        if known.html is not None:
            planned = Planned(
                path_of(recipe), overrides, config, probe, machine, micro_batch_size, known.only, known.price
            )
            with replaced_file(known.html) as work:
                work.write_text(page_of_plan(planned, found), encoding="utf-8")
    shown, best = found.candidates if known.all else found.best_of_each_config(), found.recommended
    values = {
        "rows": [each.as_json(found.num_tokens, gpu) for each in shown],
        "recommended": best and best.as_json(found.num_tokens, gpu),
        "speed_not_modelled": probe.no_speed or None,
    }
    if not known.json:
        _print_table(config, probe, machine, found, shown, known.price)
        _print_recommendation(machine, found, command_line(best, path_of(recipe), overrides) if best else "")
        if known.html is not None:
            print(f"page: {known.html}")
    if best is not None and known.measure:
        return _measure_here(known, config, [file, *overrides], probe, best, machine, values)
    if known.json:
        print(json.dumps(values, indent=1))
    elif best is None:
        for line in ways_out(config, probe, machine, found, known.only):
            print(line)
    return 0 if best else MachineError.exit_code


def _measure_here(
    known: argparse.Namespace,
    config: Config,
    words: list[str],
    probe: Probe,
    best: Candidate,
    machine: Machine,
    values: dict[str, Any],
) -> int:
    """Compare the recommended candidate with its dry run on the GPUs of this machine; return the exit code."""
    from acc_lm.config.project import find_accelerate_config
    from acc_lm.studies.measuring import compare_with_dry_run

    with stdout_on_stderr():
        _say_launch(best)
        file = find_accelerate_config(known.only or best.placement.config)
        compared = compare_with_dry_run(config, words, file, probe, best, machine.gpu)
    code = _print_measured(compared, best, known.json, values)
    if best.time is not None and not known.json:
        print("the speed is kept: later plans for this model and row length on this GPU start from it")
    return code


def _print_table(
    config: Config, probe: Probe, machine: Machine, found: RunPlan, shown: list[Candidate], price: float | None
) -> None:
    from acc_lm.planning.advice import not_in_plan
    from acc_lm.planning.calibration import calibration_file

    counts, length = probe.parameters, config.data.sequence_length
    rows, steps = config.training.global_batch_size, config.training.max_steps
    trained = "" if counts.trained == counts.total else f", {counts.trained / 1e6:,.1f} million of them trained"
    flops = f"; {found.shape.flops_per_token(length) / 1e9:,.2f} GFLOP a token" if found.shape else ""
    several = f", {machine.num_machines} machines" if machine.num_machines > 1 else ""
    speed = "speed: a range that holds four of five published runs, not measured here"
    if any(each.time is not None and each.time.calibrated for each in found.candidates):
        speed = f"speed: from a step that was measured here, {calibration_file()}"
    print(f"model      {counts.total / 1e6:,.1f} million weights in {counts.num_blocks} blocks{trained}{flops}")
    print(f"step       {rows} rows of {length:,} = {rows * length:,} tokens" + (f"; {steps:,} steps" if steps else ""))
    print(f"hardware   {machine.num_gpus} x {machine.gpu.name}, {machine.gpu.memory_gib:g} GiB each{several}")
    print(
        f"certainty  memory: tensors within a few percent, allocator 8 to 20 % on top, CUDA 0.6 GiB, NCCL 1 GiB{'; ' * bool(found.shape)}{speed * bool(found.shape)}"
    )
    if found.shape is None:
        print(f"speed      not modelled for {probe.no_speed}; measure it with --dry-run")
    for line in not_in_plan(config):
        print(f"left out   {line}")
    print()
    money = f"{'cost':>10}" if price is not None else ""
    print(
        f"  {'config':27}{'micro x accum':>14} {'checkpointing':>13} {'compile':>7} {'GiB a GPU':>10} {'room':>5} "
        f"{'1,000 tokens/s':>15} {'MFU':>5} {'network':>9} {'hours':>11}{money}"
    )
    for each in shown:
        print(_line(each, found, machine, price))
    print()


def _line(each: Candidate, found: RunPlan, machine: Machine, price: float | None) -> str:
    memory = each.memory
    size = f"{each.micro_batch_size} x {each.accumulation}"
    compiled = "yes" if each.compiled else "no"
    text = f"{'*' if each is found.recommended else ' '} {each.placement.config:27}{size:>14} {each.checkpointing:>13} {compiled:>7} "
    text += f"{memory.low / GIB:4.0f}-{memory.high / GIB:<5.0f} "
    if each.fits == "host":
        return f"{text} needs {memory.host / 1e9:,.0f} GB of the machine's memory"
    if each.fits == "no":
        parts = sorted(memory.parts.items(), key=lambda part: -part[1])
        largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts[:3] if size > 0.05 * GIB)
        return f"{text} does not fit: {largest} GiB"
    text += f"{100 * (1 - memory.middle / machine.memory):3.0f} % "
    if each.time is None:
        return text + ("  tight" if each.fits == "tight" else "")
    n, speed = each.placement.num_processes, each.time.tokens_per_second
    text += f"{n * speed.low / 1e3:6,.0f}-{n * speed.high / 1e3:<8,.0f} {100 * each.time.utilization:3.0f} % "
    text += f"{each.time.network_bytes / 1e9:6,.1f} GB " if machine.num_machines > 1 else f"{'-':>9} "
    if hours := each.hours_for(found.num_tokens):
        text += "{:>5}-{:<6}".format(
            *(f"{each:,.1f}" if each >= 1 else f"{each:.1g}" for each in (hours.low, hours.high))
        )
        if price is not None:
            text += f"{hours.low * n * price:,.0f}-{hours.high * n * price:,.0f}"
    in_parts = {"rows": each.placement.rows_in_parts, "layers": each.placement.layers_in_parts}
    notes = [f"{what} in {number} parts" for what, number in in_parts.items() if number > 1]
    notes += ["tight"] * (each.fits == "tight")
    notes += ["extrapolated"] * bool(each.time.extrapolated)
    return f"{text} {', '.join(notes)}".rstrip()


def path_of(recipe: str | None) -> str:
    """Path of a recipe as one would type it in the project's folder."""
    name = recipe or "quickstart"
    return name if "/" in name or "." in name else f"recipes/{name}.yaml"


def _print_recommendation(machine: Machine, found: RunPlan, command: str) -> None:
    from acc_lm.planning.advice import reason_for, shares_of, why_not

    best = found.recommended
    if best is None:
        return
    memory = best.memory
    print(f"take {best.placement.config}: {reason_for(best)}")
    unit, scale = ("GiB", GIB) if memory.tensors >= GIB else ("MiB", 2**20)
    parts = " + ".join(f"{name} {size / scale:,.1f}" for name, size in memory.parts.items() if size > 0.05 * scale)
    print(
        f"  memory   {parts} = {memory.tensors / scale:,.1f} {unit} of tensors, {memory.low / GIB:.0f} to {memory.high / GIB:.0f} GiB in all"
    )
    if best.time is not None:
        time = best.time
        text = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares_of(time).items())
        print(f"  step     {text} of {time.seconds.low:.3g} to {time.seconds.high:.3g} s")
        if energy := best.most_energy(found.num_tokens, machine.gpu):
            print(f"  energy   {energy:,.2g} kWh at most, each GPU at its limit of {machine.gpu.watts} W")
        if time.extrapolated:
            print(f"  unsure   {time.extrapolated}")
    others = [each for each in found.best_of_each_config() if each is not best]
    for each in sorted(others, key=lambda each: -each.tokens_per_second)[:2]:
        print(f"  not {each.placement.config}: {why_not(each, best, machine)}")
    print(f"\n  {command}")
    print("  the same with --dry-run first runs every stage once")
