"""Exercises of lab 05: memory and traffic of sharded training."""

from __future__ import annotations

from pathlib import Path

from answers import NotYet, curve, environment, largest_difference, number, run

DEEP = Path(__file__).with_name("deep.yaml")
LARGE = Path(__file__).parents[3] / "recipes/pretrain_llama-11b_fineweb-edu.yaml"
GIB = 2**30


def exercise_1(answer: str) -> str:
    """GiB of weights, gradients and moments that each of 8 GPUs keeps of the 48-layer model under FSDP2, without gathered blocks."""
    total = 16 * parameters_of(LARGE, ["model.config.vocab_size=49152"]) / GIB
    value, share = number(answer), total / 8
    if is_near(value, share):
        return f"16 bytes / 8 for each parameter: {share:.2f} GiB, of {total:.0f} in all"
    if is_near(value, total):
        raise NotYet("that is what one process would keep; there are eight")
    if is_near(value, share * GIB / 1e9):
        raise NotYet("that is in GB; a GiB has 2^30 bytes")
    raise NotYet("how many bytes do a weight, its gradient and its two moments have, and which part is on each GPU?")


def exercise_2(answer: str) -> str:
    """MB that each of two processes sends in a step of deep.yaml under ZeRO-2 with two micro-batches."""
    model = 4 * parameters_of(DEEP, []) / 1e6
    processes, accumulation = 2, 2
    sent = (2 * accumulation + 1) * (processes - 1) / processes * model
    value = number(answer)
    if is_near(value, sent):
        return f"(2 A + 1) (N - 1) / N x {model:.1f} MB: {accumulation} all-reduces of gradients, one all-gather of new weights"
    if is_near(value, 3 * (processes - 1) / processes * model):
        raise NotYet("that is one micro-batch per step; ZeRO-2 reduces the gradients of each")
    raise NotYet(
        "how often are the gradients reduced, and how often are the weights gathered? See the table in section 3"
    )


def exercise_3(answer: str) -> str:
    """Train deep.yaml on four processes that keep half of the parameters each, with DDP's losses. Answer: the folder of the run."""
    folder = run(answer)
    found = environment(folder)
    if (processes := found["num_processes"]) != 4:
        raise NotYet(f"{answer} had {processes} processes: which configs are made for four?")
    shares = [own / found["num_parameters"] for own in found["parameters_per_process"]]
    if not all(0.45 < share < 0.55 for share in shares):
        kept = ", ".join(f"{share:.2f}" for share in shares)
        raise NotYet(f"the processes keep {kept} of the parameters: two groups of two would keep half each")
    difference = largest_difference(curve(reference_run()), curve(folder))
    if not difference < 1e-5:
        raise NotYet(f"the losses differ from one process by {difference:.1e}: was it {DEEP.name}, unchanged?")
    return f"{found['strategy']}: {found['placement']}; the losses differ from one process by {difference:.1e}"


def reference_run() -> Path:
    """deep.yaml on one process, trained when it is first needed."""
    import subprocess
    import sys

    folder = Path("runs/course/deep-one")
    if not (folder / "summary.json").is_file():
        command = [sys.executable, "train.py", "--config", str(DEEP), f"output_dir={folder}"]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def parameters_of(recipe: Path, overrides: list[str]) -> int:
    """Number of parameters of a recipe's model, which is built without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from acc_lm.config.loading import load_config

    config = load_config(recipe, overrides).model.config
    assert config is not None
    fields = dict(config) | ({} if "vocab_size" in config else {"vocab_size": vocabulary_of(recipe)})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    return sum(parameter.numel() for parameter in model.parameters())


def vocabulary_of(recipe: Path) -> int:
    from acc_lm.config.loading import load_config
    from acc_lm.data import build_data

    config = load_config(recipe)
    data = build_data(config.data, config.tokenizer, None, config.seed, config.training.global_batch_size)
    return len(data.tokenizer)


def is_near(value: float, right: float) -> bool:
    return abs(value - right) <= 0.02 * right
