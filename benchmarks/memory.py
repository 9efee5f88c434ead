"""Peak memory of a process on every sharding engine, compared with the formulas of docs/guides/strategies.md.

    python benchmarks/memory.py [docs/promises/parity.md]      # prints the table, and writes it into the page

Measured on CPU processes: the bytes of all live tensors, around every block and before the update, over three steps. Buffers
of the communication library are not tensors and not included. The rows are short, so that activations are small compared with
parameters, gradients and optimizer state.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, (ROOT / "tests").glob("*/"))]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

CASES = [
    (name, count)
    for name in ("ddp", "fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
    for count in (2, 4)
]
MODEL = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
# Bytes per parameter in fp32 that every process keeps in full, and those that are sharded over N processes. DeepSpeed keeps fp32
# master weights in addition to those that it computes with, even if these are already fp32, and from stage 2 on a copy of the
# gradient's shard at the update.
WHOLE_AND_SHARED = {
    "ddp": (4 + 4 + 8, 0),
    "fsdp2": (0, 4 + 4 + 8),
    "deepspeed_zero1": (4 + 4, 4 + 8),
    "deepspeed_zero2": (4, 4 + 4 + 4 + 8),
    "deepspeed_zero3": (0, 4 + 4 + 4 + 4 + 8),
}
# By default ZeRO-3 keeps a billion gathered parameters, which is all of this model; with these settings it frees each block.
ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
    },
}


class Sampler:
    """Bytes of all live tensors, sampled where they peak: around every block, and before the update."""

    def __init__(self) -> None:
        self.most = 0

    def look(self, *_: Any) -> None:
        storages: dict[int, int] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for value in gc.get_objects():
                if type(value) in (torch.Tensor, torch.nn.Parameter) or hasattr(type(value), "to_local"):
                    for tensor in (value, value.grad if value.is_leaf else None):
                        local = getattr(tensor, "_local_tensor", tensor)
                        if local is not None and local.device.type == "cpu":
                            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        self.most = max(self.most, sum(storages.values()))

    def watch(self, model: torch.nn.Module) -> None:
        update = torch.optim.AdamW.step

        def look_and_update(optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
            self.look()
            return update(optimizer, *arguments, **keywords)

        torch.optim.AdamW.step = look_and_update  # type: ignore[assignment, method-assign]
        for module in model.modules():
            if type(module).__name__.endswith("LlamaDecoderLayer"):
                module.register_forward_hook(self.look)
                module.register_full_backward_hook(self.look)


def measure() -> dict[str, float]:
    """Train three steps and return the peaks, in bytes; called in every process."""
    import backends

    from acc_lm import runtime
    from acc_lm.config import TokenizerConfig
    from acc_lm.modeling.build import build_empty_model, build_model
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.text.tokenizer import make_tokenizer
    from acc_lm.training.step import train_step

    backends.MODELS["big"] = MODEL
    num_processes = int(os.environ["WORLD_SIZE"])
    config = backends.make_config(backends.Scenario("big"), num_processes)
    runtime.quiet_libraries()
    accelerator = runtime.build_accelerator(config)
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    gc.freeze()  # exempt everything loaded so far from gc.get_objects
    sampler = Sampler()
    sampler.look()
    before, sampler.most = sampler.most, 0
    model, _ = runtime.initialise_once(
        accelerator,
        lambda: build_model(config.model, tokenizer, backends.LENGTH, 0),
        lambda facts: build_empty_model(config.model, tokenizer, backends.LENGTH, facts),
    )
    model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
    gradients = runtime.Gradients(accelerator, model)
    sampler.look()
    at_start, sampler.most = sampler.most - before, 0
    sampler.watch(runtime.bare_model(model))
    rows = backends.RaggedRows(1, 1)
    for step in (1, 2, 3):
        train_step(
            accelerator,
            model,
            optimizer,
            [rows.__getitems__([0])],
            step=step,
            seed=0,
            num_targets=16,
            max_grad_norm=1.0,
            gradients=gradients,
        )
    peak = sampler.most - before
    parameters = sum(int(torch_size(shape)) for shape in runtime.whole_shapes(model).values())
    blocks = [s for name, s in runtime.whole_shapes(model).items() if ".layers.0." in name]
    runtime.close(accelerator)
    return {"peak": peak, "start": at_start, "parameters": parameters, "block": sum(torch_size(s) for s in blocks)}


def torch_size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def main(page: Path | None) -> None:
    import conftest  # imports what the forked processes need
    from processes import launcher_environment, run_everywhere

    from acc_lm.studies.tables import machine_line, replace_block

    assert conftest
    lines = [
        "`python benchmarks/memory.py docs/promises/parity.md`: peak memory of the tensors of one process over three steps in fp32, in MB.",
        "",
        machine_line(),
        "",
        "| engine | processes | formula: bytes per parameter | by formula | measured | ratio | peak at the start, on a process other than the first |",
        "|---|---|---|---|---|---|---|",
    ]
    ds_file = Path(tempfile.mkdtemp()) / "zero3.json"
    ds_file.write_text(json.dumps(ZERO3))
    for name, count in CASES:
        environment = launcher_environment(ROOT / "accelerate_configs" / f"{name}.yaml", count)
        if name == "deepspeed_zero3":
            environment |= {
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ds_file),
                "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
            }
        results: list[dict[str, Any]] = run_everywhere(measure, count, 300, environment)
        peak = max(result["peak"] for result in results)
        whole, shared = WHOLE_AND_SHARED[name]
        parameters, block = results[0]["parameters"], results[0]["block"]
        expected = parameters * (whole + shared / count)
        formula = " + ".join(part for part in (str(whole) if whole else "", f"{shared}/N" if shared else "") if part)
        if name == "fsdp2":  # the current block and the next one, gathered: weights and gradients
            expected += 16 * block
            formula += " + 8 for two blocks"
        if name == "deepspeed_zero3":  # nothing is gathered at the update
            expected = max(expected, parameters * (shared - 4) / count + 16 * block)
            formula += f", or {shared - 4}/N + 8 for two blocks"
        line = f"| {name} | {count} | {formula} | {expected / 1e6:.0f} | {peak / 1e6:.0f} | {peak / expected:.2f} | {results[1]['start'] / 1e6:.0f} |"
        print(line, flush=True)
        lines.append(line)
    lines += [
        "",
        f"The model has {parameters / 1e6:.1f} M parameters, {block / 1e6:.1f} M of them in each block. *8 for two blocks*: 8 bytes for each "
        "parameter of two gathered blocks.",
    ]
    if page:
        replace_block(page, "memory", "\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
