"""Exercises of lab 02: what data parallelism is made of."""

from __future__ import annotations

from pathlib import Path

from answers import BadAnswer, NotYet, curve, environment, largest_difference, run, whole_number

ONE = Path("runs/course/one")
ROUNDING = 1e-5


def exercise_1(answer: str) -> str:
    """Leave out step 5 of ddp_by_hand.py (the all-reduce of the gradients), in a copy. Answer: the folder of its run."""
    losses, reference = losses_of(Path(answer)), reference_losses()
    if losses[1] != reference[1] and largest_difference({1: losses[1]}, reference) > ROUNDING:
        raise NotYet(
            f"step 1 has another loss than in {ONE}: the first weights or the rows differ too; change step 5 only"
        )
    if (difference := largest_difference(reference, losses)) < ROUNDING:
        raise NotYet(f"the losses are those of {ONE}: each process still gets the gradient of all rows")
    return f"the curves part by up to {difference:.1e}, and no error says so: each process trains a model of its own"


def exercise_2(answer: str) -> str:
    """Bytes of gradient that each of two processes sends in a step of the course's recipe, by a ring all-reduce in fp32."""
    from ingredients import Ingredients

    num_parameters = sum(parameter.numel() for parameter in Ingredients([]).model().parameters())
    gradient, processes = 4 * num_parameters, 2
    sent = 2 * (processes - 1) * gradient // processes
    match whole_number(answer):
        case value if value == sent:
            return f"2 (N - 1) / N x {gradient:,} bytes; with many processes it is almost twice the gradient, and never more"
        case value if value == num_parameters:
            raise NotYet("that is the number of parameters; how many bytes has a number in fp32?")
        case value if value == 2 * gradient:
            raise NotYet("twice the gradient is the limit for many processes; what is 2 (N - 1) / N for two?")
    raise NotYet("the start block prints the number of parameters; a ring sends 2 (N - 1) / N times the gradient")


def exercise_3(answer: str) -> str:
    """Train the recipe on two processes by another strategy than DDP, with the same losses. Answer: the folder of its run."""
    found = environment(run(answer))
    strategy, num_processes = found["strategy"], found["num_processes"]
    if strategy in ("single", "ddp") or num_processes != 2:
        raise NotYet(
            f"{answer} ran as {strategy} on {num_processes}: choose another file of accelerate_configs/, and 2 processes"
        )
    difference = largest_difference(reference_losses(), curve(Path(answer)))
    if not difference < ROUNDING:
        raise NotYet(f"the losses differ from those of {ONE} by {difference:.1e}: was it the same recipe?")
    return f"{strategy} on two processes, and the losses differ by {difference:.1e}"


def reference_losses() -> dict[int, float]:
    if not (ONE / "metrics.jsonl").is_file():
        raise BadAnswer(f"{ONE} must be the run of section 1, got nothing there; train it first")
    return curve(ONE)


def losses_of(folder: Path) -> dict[int, float]:
    if not (folder / "metrics.jsonl").is_file():
        raise BadAnswer(f"the answer must be the folder of a run, got {folder}; give its output_dir")
    return curve(folder)
