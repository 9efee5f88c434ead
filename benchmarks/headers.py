"""Memory in the headers of the recipes, from the planner: python -m benchmarks.headers

The shapes of published models are facts from their config.json, so no network is needed.
"""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from acc_lm.config import Config
from acc_lm.config.loading import load_config
from acc_lm.config.project import find_accelerate_config
from acc_lm.planning.hardware import GIB
from acc_lm.planning.memory import MemoryEstimate, memory_of
from acc_lm.planning.probe import SWITCH, Probe
from acc_lm.runtime import placement_of, split_global_batch

ROOT = Path(__file__).parent.parent
PUBLISHED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "HuggingFaceTB/SmolLM2-360M": {
        "model_type": "llama",
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
"""Shapes of the models that recipes name."""
PUBLISHED["Qwen/Qwen3-0.6B-Base"] = PUBLISHED["Qwen/Qwen3-0.6B"]
VOCABULARY = {"openai-community/gpt2": 50257, "HuggingFaceTB/SmolLM2-1.7B": 49152}
"""Ids of the tokenizers that recipes name for models from scratch."""
LAUNCHES = re.compile(r"with (\w+) on (\d+)")
"""Accelerate configs and numbers of GPUs that a header names; the figures before them are generated."""


@cache
def probe_of(file: Path, overrides: tuple[str, ...]) -> tuple[Config, Probe] | None:
    """A recipe and its model; None for a recipe whose model depends on its text."""
    config = load_config(file, list(overrides))
    with tempfile.TemporaryDirectory() as folder:
        if config.model.name_or_path in PUBLISHED:
            AutoConfig.for_model(**PUBLISHED[config.model.name_or_path]).save_pretrained(folder)
            config = load_config(file, [*overrides, f"model.name_or_path={folder}"])
        elif config.tokenizer.name_or_path not in VOCABULARY:
            return None
        return config, Probe(config, VOCABULARY.get(config.tokenizer.name_or_path or "", 0))


def memory_of_recipe(file: Path, overrides: list[str], name: str, num_gpus: int) -> MemoryEstimate | None:
    """Memory of each GPU; None for a recipe whose model depends on its text."""
    found = probe_of(file, tuple(overrides))
    if found is None:
        return None
    config, probe = found
    micro_batch_size, accumulation = split_global_batch(config.training, num_gpus)
    wanted = config.model.gradient_checkpointing
    checkpointing = next(key for key, value in SWITCH.items() if value == wanted)
    placement = placement_of(find_accelerate_config(name), num_gpus, 1, config)
    return memory_of(probe, placement, micro_batch_size, accumulation, checkpointing)


def memory_line(file: Path) -> str | None:
    """The line of a recipe's header about memory, made anew; None if the recipe's is measured."""
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("# Memory")]
    parts = []
    for name, num_gpus in LAUNCHES.findall(line):
        found = memory_of_recipe(file, [], name, int(num_gpus))
        if found is None:
            return None
        parts.append(f"{found.low / GIB:.1f} to {found.high / GIB:.1f} GiB with {name} on {num_gpus}")
    return f"# Memory per GPU: {', '.join(parts)}, by acc-lm plan; not measured on a GPU." if parts else None


def main() -> None:
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        line = memory_line(file)
        if line is not None:
            file.write_text(re.sub(r"^# Memory.*$", line, file.read_text(), count=1, flags=re.M))
            print(f"{file.name}: {line}")


if __name__ == "__main__":
    main()
