"""Eight and 1,024 processes, one of them real: a process group whose collectives transfer nothing, and tensors sharded as they would be.

Shown: each of that many processes gets its pieces (or none), and prepares, clips, steps and splits its global batch without
an error. Not shown: numbers, since nothing is added up; DDP, whose reducer needs what such a group does not have.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from backends import MODELS
from processes import ROOT, launcher_environment, run_everywhere

CONFIGS = ("fsdp2", "fsdp2_grad_op", "hsdp")
CASES = [(config, world, place) for config in CONFIGS for world in (8, 1024) for place in ("first", "last")]


def one_step(rank: int, world: int) -> dict[str, Any]:
    """Take a training step on this process; returns its pieces of the parameters before the step."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from acc_lm import runtime
    from acc_lm.config import Config, TokenizerConfig
    from acc_lm.modeling.build import build_model
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.text.tokenizer import make_tokenizer
    from acc_lm.training.step import train_step

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    config = Config.model_validate(
        {"output_dir": "unused", "model": {"config": MODELS["llama"]}, "tokenizer": {"kind": "byte"},
         "data": {"source": "synthetic", "sequence_length": 16}, "tracking": {"report_to": []},
         "training": {"max_steps": 1, "global_batch_size": 2 * world, "micro_batch_size": 1}, "schedule": {"name": "constant"}}
    )  # fmt: skip
    assert runtime.split_global_batch(config.training, world) == (1, 2)
    runtime.quiet_libraries()
    accelerator = runtime.build_accelerator(config)
    assert (accelerator.num_processes, accelerator.process_index) == (world, rank)
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    model, _ = build_model(config.model, tokenizer, 16, 0)
    whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
    bare = runtime.bare_model(model)
    pieces = {name: tuple(getattr(p, "_local_tensor", p).shape) for name, p in bare.named_parameters()}
    ids = torch.randint(0, 250, (1, 17))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    train_step(
        accelerator, model, optimizer, [batch, batch], step=1, seed=0, num_targets=32 * world, max_grad_norm=1.0,
        gradients=runtime.Gradients(accelerator, model),
    )  # fmt: skip
    os.environ["RANK"] = "0"  # by which `run_everywhere` finds the result
    return {
        "engine": type(model).__mro__[0].__name__,
        "whole": whole,
        "pieces": pieces,
    }


@pytest.mark.parametrize(("config", "world", "place"), CASES, ids=lambda value: str(value))
def test_one_of_many_processes_takes_its_step(config: str, world: int, place: str) -> None:
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", world)
    rank = 0 if place == "first" else world - 1
    sharing = world
    if config == "hsdp":
        sharing = 8
        sizes = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(world // 8), "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8"}
        environment |= sizes
    names = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    (seen,) = run_everywhere(lambda: one_step(rank, world), environment=environment | names)
    print(seen["engine"], {name: (seen["whole"][name], piece) for name, piece in seen["pieces"].items()})
    for name, shape in seen["whole"].items():
        share = math.ceil(shape[0] / sharing)
        of_place = rank % sharing
        rows = max(0, min(share, shape[0] - of_place * share))
        assert seen["pieces"][name] == (rows, *shape[1:]) or (rows == 0 and 0 in seen["pieces"][name]), name
