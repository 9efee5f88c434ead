"""Arguments that DDP, DeepSpeed and the process group would get on GPUs, without one: each is replaced by something that writes them down.

    python tests/support/fake_engines.py RECIPE_JSON        in the environment of a launch; prints JSON

The GPU is the one of fake_cuda.py, seen by process 0 of WORLD_SIZE. Weights stay on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import fake_cuda  # first: torch looks once for what a CPU build lacks
import torch
import torch.distributed as dist


class Handed(Exception):
    """Signal that all arguments were handed over; the engine itself needs a GPU."""


def main(recipe: dict[str, Any]) -> None:
    # First, before anything is pretended: these libraries check CUDA while they are imported.
    import deepspeed
    import peft  # noqa: F401
    import torch._dynamo
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import acc_lm.runtime.launch.accelerator
    from acc_lm import runtime
    from acc_lm.config import Config
    from acc_lm.modeling.build import build_model
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.runtime.engines.tensor_parallel import layer_parts
    from acc_lm.text.tokenizer import make_tokenizer

    config = Config.model_validate(recipe)
    seen: dict[str, Any] = {}
    start_group = dist.init_process_group

    def init_process_group(backend: Any = None, **options: Any) -> None:
        seen["group"] = {"backend": backend, **{name: str(value) for name, value in options.items()}}
        start_group("fake", rank=0, world_size=world, store=FakeStore())

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module: torch.nn.Module, **options: Any) -> None:
            super().__init__()
            self.module = module
            seen["ddp"] = options

        def register_comm_hook(self, state: Any, hook: Any) -> None:
            seen["hook"] = hook.__name__

    def initialize(**options: Any) -> None:
        seen["deepspeed"] = options["config_params"]
        raise Handed

    tokenizer = make_tokenizer(config.tokenizer, [])
    world = int(os.environ["WORLD_SIZE"])
    gpu = fake_cuda.pretended_gpu()
    gpu[torch.cuda] |= {"device_count": lambda: world}
    gpu[torch.accelerator] |= {"device_count": lambda: world}
    changes = gpu | {
        dist: {"init_process_group": init_process_group, "is_nccl_available": lambda: True},
        torch.nn.parallel: {"DistributedDataParallel": DistributedDataParallel},
        acc_lm.runtime.launch.accelerator: {
            "build_extensions": lambda **_: None
        },  # nor would any test find its own any more
        deepspeed: {"initialize": initialize},
        deepspeed.zero: {"Init": lambda **options: seen.update(partition=options["config_dict_or_path"])},
        torch.nn.Module: {"to": lambda module, *_, **__: module},
    }
    with fake_cuda.changed(changes):
        accelerator = runtime.build_accelerator(config)
        model, _ = build_model(config.model, tokenizer, config.data.sequence_length, 0)
        with contextlib.suppress(Handed):
            runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
            seen["parts"], seen["layers"] = model.row_parts.size, layer_parts(model).size
        seen["device"] = str(accelerator.device)
    print("\n" + json.dumps(seen, default=str))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
