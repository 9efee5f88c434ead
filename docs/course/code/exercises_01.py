"""Exercises of lab 01: processes, ranks, and launches that cannot work."""

from __future__ import annotations

from pathlib import Path

from answers import BadAnswer, NotYet, summary, whole_number

MACHINES, PER_MACHINE, RANK = 4, 8, 21
MICRO_BATCH_SIZE, NUM_PROCESSES = 4, 2


def exercise_1(answer: str) -> str:
    """4 machines with 8 GPUs each, a process on each GPU. Which machine rank and which local rank has the process with rank 21?
    Answer: both numbers, machine rank first, as in: 0 7"""
    numbers = [whole_number(word) for word in answer.replace(",", " ").split()]
    if len(numbers) != 2:
        raise BadAnswer(f"the answer must be two numbers, got {answer}; give the machine rank and the local rank")
    machine, local = divmod(RANK, PER_MACHINE)
    if numbers == [machine, local]:
        return f"{machine} x {PER_MACHINE} + {local} = {RANK}, in a world of {MACHINES * PER_MACHINE}"
    if numbers == [local, machine]:
        raise NotYet("both numbers are right; the machine rank comes first")
    if numbers == [machine + 1, local] or numbers[1] == local + 1:
        raise NotYet("all ranks count from 0: those of the first machine are 0 to 7")
    raise NotYet("machine 0 has the ranks 0 to 7, machine 1 has 8 to 15; which one has 21?")


def exercise_2(answer: str) -> str:
    """Two processes train docs/course/code/markov.yaml with training.micro_batch_size=4.
    How many micro-batches does each of them compute in a step?"""
    from acc_lm.config.loading import load_config
    from acc_lm.runtime.launch.request import split_global_batch

    file = Path(__file__).with_name("markov.yaml")
    training = load_config(file, [f"training.micro_batch_size={MICRO_BATCH_SIZE}"]).training
    _, num_micro_batches = split_global_batch(training, NUM_PROCESSES, parts=1)
    if (value := whole_number(answer)) == num_micro_batches:
        return (
            f"{training.global_batch_size} rows = {MICRO_BATCH_SIZE} x {NUM_PROCESSES} processes x {num_micro_batches}; "
            "the recipe says how many rows a step has, and the rest follows"
        )
    if value == num_micro_batches * NUM_PROCESSES:
        raise NotYet("that is how many all processes compute together")
    raise NotYet(
        "the start block has it: global batch = micro x processes x accumulation; add --dry-run to print it quickly"
    )


def exercise_3(answer: str) -> str:
    """Make a launch end with exit code 4: ask for something that this machine cannot do, other than in section 5. Answer: its output_dir."""
    if not Path(answer, "summary.json").is_file():
        raise BadAnswer(f"the answer must be the folder of a run with summary.json, got {answer}; give its output_dir")
    found = summary(Path(answer))
    if found["exit_code"] != 4:
        raise NotYet(
            f"it ended with {found['exit_code']} ({found['status']}); 4 means that the recipe is right and the machine is not"
        )
    if "rendezvous" in str(found["reason"]):
        raise NotYet("that is section 5, where a process is missing; find another cause")
    return str(found["reason"])
