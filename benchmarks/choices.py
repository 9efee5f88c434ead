"""Configs that a plan recommends, next to an expert's choice: python -m benchmarks.choices [docs/planning.md]

Shapes of published models are facts from their config.json, so no network is needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from acc_lm.config import Config
from acc_lm.config.loading import load_config
from acc_lm.planning.hardware import GIB, parse_gpus
from acc_lm.planning.plan import Machine, RunPlan, make_plan
from acc_lm.studies.tables import machine_line, replace_block
from benchmarks.headers import PUBLISHED, VOCABULARY

if TYPE_CHECKING:
    from acc_lm.planning.probe import Probe

RECIPES = Path(__file__).parent.parent / "recipes"


def llama_shape(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": layers == 16,
        "max_position_embeddings": 8192,
    }


def pretraining(shape: dict[str, Any], global_batch_size: int, length: int) -> dict[str, Any]:
    """Recipe of a model from scratch."""
    training = {"max_steps": 1000, "mixed_precision": "bf16", "micro_batch_size": 1}
    return {
        "output_dir": "runs/x",
        "model": {"config": shape},
        "tokenizer": {"kind": "byte"},
        "data": {"sequence_length": length},
        "training": {**training, "global_batch_size": global_batch_size},
    }


MODELS: dict[str, dict[str, Any] | str] = {
    "quickstart": "quickstart",
    "GPT-2 124M": "pretrain_gpt2-124m_fineweb-edu",
    "1B": pretraining(llama_shape(2048, 8192, 16, 32), 256, 2048),
    "8B": pretraining(llama_shape(4096, 14336, 32, 32), 128, 8192),
    "70B": pretraining(llama_shape(8192, 28672, 80, 64), 256, 8192),
    "SmolLM2 360M, LoRA": "chat_smollm2-360m_alpaca_lora",
    "Qwen3 0.6B, LoRA": "chat_own_files_lora",
    "Llama 3.2 1B, LoRA": "finetune_llama-3.2-1b_lora",
}
"""Recipe, or name of a shipped one, by the name of its model."""


Choice = tuple[str, str]
"""Config and checkpointing."""


@dataclass(frozen=True)
class Case:
    """A model on some GPUs, and an expert's choice."""

    model: str
    gpus: str
    expert: Choice | None
    """None: an expert would not train it there."""
    why: str
    """Reason for the choice, and for the difference where the plan makes another one."""
    differs: tuple[Choice, ...] = ()
    """The plan's choice, where it is another one."""

    @property
    def planned(self) -> Choice | None:
        return self.differs[0] if self.differs else self.expert


CARDS = ("RTX 4090", "RTX 3060", "T4")
"""GPUs with 24, 12 and 16 GB."""
OFFLOADED: Choice = ("deepspeed_zero2_offload", "selective")
CASES = [
    Case("GPT-2 124M", "H100", ("single_gpu", "no"), "state of 2 GB, nothing to share"),
    Case("GPT-2 124M", "8xH100", ("ddp", "no"), "a small model stays complete, as in nanoGPT and llm.c"),
    Case(
        "GPT-2 124M",
        "64xH100",
        ("multi_node_ddp", "no"),
        "differs: HSDP is predicted 9 % faster, which is within the error. An expert would also ask for fewer GPUs",
        (("multi_node_hsdp", "no"),),
    ),
    Case("1B", "H100", ("single_gpu", "no"), "state of 18 GiB leaves room for activations without checkpointing"),
    Case("1B", "8xH100", ("ddp", "no"), "the same; sharding is as fast and less simple"),
    Case("1B", "64xH100", ("multi_node_hsdp", "no"), "DDP's sums are hidden by the backward pass only: 11 % slower"),
    Case(
        "8B",
        "H100",
        ("deepspeed_zero2_offload", "full"),
        "differs: as fast, with twice the rows; ZeRO-2 holds the fp32 sums of all gradients on the GPU, 30 GiB, and leaves less than 15 % room",
        (("deepspeed_zero3_offload", "full"),),
    ),
    Case("8B", "8xH100", ("fsdp2", "selective"), "torchtitan's own choice for this size"),
    Case("8B", "64xH100", ("multi_node_hsdp", "selective"), "a copy in each machine, sums between them"),
    Case("70B", "H100", None, "state of 1,051 GiB"),
    Case("70B", "8xH100", None, "an offload needs 1.1 TB of memory in the machine; 32 GPUs would do"),
    Case(
        "70B", "64xH100", ("fsdp2", "full"), "a copy does not fit into a machine; tensor parallelism is the alternative"
    ),
    *(
        Case("quickstart", gpus, ("single_gpu", "no"), "anything does; its speed is that of starting kernels")
        for gpus in CARDS
    ),
    *(Case("GPT-2 124M", gpus, ("single_gpu", "no"), "a micro-batch of 16 rows fits") for gpus in CARDS),
    Case(
        "1B",
        "RTX 4090",
        OFFLOADED,
        "state of 18 GiB and the activations do not fit together; 20 tokens a weight take over a month",
    ),
    *(
        Case(
            "1B",
            gpus,
            None,
            "differs: the plan says what fits; an expert looks at the time, months for 20 tokens a weight",
            (OFFLOADED,),
        )
        for gpus in ("RTX 3060", "T4")
    ),
    Case(
        "1B",
        "8xRTX 4090",
        ("fsdp2_grad_op", "selective"),
        "over PCIe, weights are gathered once a micro-batch rather than twice",
    ),
    *(Case("SmolLM2 360M, LoRA", gpus, ("single_gpu", "no"), "the recipe's micro-batch fits") for gpus in CARDS),
    *(Case("Qwen3 0.6B, LoRA", gpus, ("single_gpu", "no"), "the recipe's micro-batch, or its half") for gpus in CARDS),
    Case("Llama 3.2 1B, LoRA", "RTX 4090", ("single_gpu", "no"), "the recipe's micro-batch fits"),
    Case(
        "Llama 3.2 1B, LoRA",
        "RTX 3060",
        ("single_gpu", "no"),
        "differs: an expert would hold the frozen weights in 16 or 4 bits; a plan changes no number of a recipe",
        (("single_gpu", "selective"),),
    ),
    Case("Llama 3.2 1B, LoRA", "T4", ("single_gpu", "no"), "a smaller micro-batch than the recipe's"),
]


@cache
def probe_of(model: str) -> tuple[Config, Probe]:
    """Recipe with the shape and the vocabulary that are published for it, and its measured model."""
    from acc_lm.planning.probe import Probe, vocabulary_of

    given = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        file, overrides = Path(folder, "recipe.yaml"), []
        if isinstance(given, dict):
            file.write_text(json.dumps(given))
        else:
            file = RECIPES / f"{given}.yaml"
            start = load_config(file)
            if start.model.name_or_path in PUBLISHED:
                AutoConfig.for_model(**PUBLISHED[start.model.name_or_path]).save_pretrained(folder)
                overrides = [f"model.name_or_path={folder}"]
            elif start.tokenizer.name_or_path in VOCABULARY:
                overrides = [f"model.config.vocab_size={VOCABULARY[start.tokenizer.name_or_path]}"]
        config = load_config(file, overrides)
        return config, Probe(config, vocabulary_of(config))


def plan_for(model: str, gpus: str) -> RunPlan:
    """Plan with the precision that the GPU is good at."""
    num_gpus, gpu = parse_gpus(gpus)
    config, probe = probe_of(model)
    training = config.training.model_copy(update={"mixed_precision": gpu.precision})
    return make_plan(config.model_copy(update={"training": training}), probe, Machine(gpu, num_gpus), None, None)


def choice_of(plan: RunPlan) -> Choice | None:
    """Config and checkpointing that a plan recommends."""
    best = plan.recommended
    return best and (best.placement.config, best.checkpointing)


def choices_page() -> str:
    """Generated table of docs/planning.md."""
    lines = ["`python -m benchmarks.choices docs/planning.md`; no GPU takes part.", "", machine_line(), ""]
    lines += [
        "| model | GPUs | the plan takes | GiB of a GPU | tokens/s | an expert takes | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        plan = plan_for(case.model, case.gpus)
        best, (count, gpu) = plan.recommended, parse_gpus(case.gpus)
        is_same = case.expert == choice_of(plan)
        expert = "the same" if is_same else _words(*case.expert) if case.expert else "nothing"
        if best is None:
            cells = ["nothing fits", "", ""]
        else:
            size = f"{best.micro_batch_size} x {best.accumulation} rows"
            what = f"{_words(*(choice_of(plan) or ('', '')))}, {size}{', compiled' if best.compiled else ''}"
            speed = best.time and best.time.tokens_per_second
            rate = f"{_round(count * speed.low)} to {_round(count * speed.high)}" if speed else "not modelled"
            rate += ", extrapolated" * bool(best.time and best.time.extrapolated)
            cells = [what, f"{best.memory.low / GIB:.1f} to {best.memory.high / GIB:.1f} of {gpu.memory_gib:g}", rate]
        lines.append(f"| {case.model} | {count} x {gpu.name} | {' | '.join(cells)} | {expert} | {case.why} |")
    return "\n".join(lines)


def _round(value: float, digits: int = 3) -> str:
    return f"{float(f'{value:.{digits}g}'):,.0f}"


def _words(config: str, checkpointing: str) -> str:
    return f"{config}, checkpointing {checkpointing}"


if __name__ == "__main__":
    text = choices_page()
    print(text)
    if sys.argv[1:]:
        replace_block(Path(sys.argv[1]), "choices", text)
