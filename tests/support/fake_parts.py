"""Steps whose rows or layers are shared by processes, on a GPU that is not there: what waits, what is copied, what is sent.

    python tests/support/fake_parts.py RECIPE_JSON          in the environment of a launch of several processes; prints JSON

The GPU is the one of fake_cuda.py, seen by process 0. Its tensors are fake, and so is the process group: collectives check their
arguments and send nothing. DDP is replaced by a wrapper, because its reducer needs memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import fake_cuda  # first: torch looks once for what a CPU build lacks
import torch
import torch.distributed as dist

STEPS = 3


class Wrapper(torch.nn.Module):
    """Stand-in for DDP."""

    def __init__(self, module: torch.nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.module(*arguments, **keywords)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def main(recipe: dict[str, Any]) -> None:
    # First, before anything is pretended: these libraries check CUDA while they are imported.
    import peft  # noqa: F401
    import torch._dynamo
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import acc_lm.runtime.engines.prepare as preparing
    from acc_lm import runtime
    from acc_lm.config import Config
    from acc_lm.modeling.build import build_model
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.text.tokenizer import make_tokenizer
    from acc_lm.training.step import train_step

    config, world = Config.model_validate(recipe), int(os.environ["WORLD_SIZE"])
    start_group, empty = dist.init_process_group, torch.empty
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def init_process_group(backend: Any = None, **_: Any) -> None:
        start_group("fake", rank=0, world_size=world, store=FakeStore())

    gpu = fake_cuda.pretended_gpu()
    gpu[torch.cuda] |= {"device_count": lambda: world}
    gpu[torch.accelerator] |= {"device_count": lambda: world}
    cut_layers = preparing.cut_layers
    changes = gpu | {
        torch: {"empty": lambda *sizes, pin_memory=False, **how: empty(*sizes, **how)},
        FakeTensor: {"tolist": fake_cuda.tolist},
        dist: {"init_process_group": init_process_group, "is_nccl_available": lambda: True},
        torch.nn.parallel: {"DistributedDataParallel": Wrapper},
        preparing: {"cut_layers": lambda *_: None},  # done before, with weights that exist
        torch.nn.Module: {"to": lambda module, *_, **__: module},
    }
    length, size = config.data.sequence_length, config.training.micro_batch_size
    tokenizer = make_tokenizer(config.tokenizer, [])
    with fake_cuda.changed(changes):
        accelerator = runtime.build_accelerator(config)
        model, _ = build_model(config.model, tokenizer, length, 0)
        if runtime.parts_of_layers() > 1:
            cut_layers(model, runtime.parts_of_layers())
        with mode, fake_cuda.Watcher(), torch.compiler.set_stance("force_eager"):
            fake_cuda.move(model, mode)
            model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
            gradients = runtime.Gradients(accelerator, model)
            for step in range(1, STEPS + 1):
                batches = [
                    {
                        "input_ids": torch.zeros(size, length, dtype=torch.int64),
                        "targets": torch.zeros(size, length, dtype=torch.int64),
                    }
                    for _ in range(accelerator.gradient_accumulation_steps)
                ]
                fake_cuda.PHASE["now"] = "step" if step >= fake_cuda.FIRST_STEP else ""
                with runtime.Traffic() as traffic:
                    outcome = train_step(
                        accelerator, model, optimizer, batches, step=step, seed=0, num_targets=64, max_grad_norm=1.0, gradients=gradients
                    )  # fmt: skip
            fake_cuda.PHASE["now"] = "other"
            gradients.not_finite()
    inner: Any = getattr(model, "module", model)
    seen = {
        "device": str(accelerator.device),
        "devices": sorted({str(p.device) for p in inner.parameters()} | {str(outcome.grad_norm.device)}),
        "rows": inner.row_parts.size,
        "layers": runtime.parts_of_layers(),
        "micro_batches": accelerator.gradient_accumulation_steps,
        "steps": {line: count for line, count in fake_cuda.SEEN.items() if line.startswith("step")},
        "other": {line: count for line, count in fake_cuda.SEEN.items() if line.startswith("other")},
        "sent": runtime.summarize_traffic(traffic.calls),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
