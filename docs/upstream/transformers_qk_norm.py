"""transformers 5.23: under tensor parallel, gradients of q_norm and k_norm are wrong with gradient accumulation.

    torchrun --nproc_per_node 2 --master_port 29511 docs/upstream/transformers_qk_norm.py

The rule `replicated_with_grad_allreduce` all-reduces `parameter.grad` in a hook that runs after each backward. The second
micro-batch adds to a gradient that is summed already, and then all of it is summed again: with n micro-batches on t
processes the first one counts t^(n-1) times. One micro-batch is correct. Expected: the sum of what each process has
accumulated, once per optimizer step, or only of what each backward adds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RULES = ("colwise", "rowwise", "replicated_with_grad_allreduce")


def gradient(num_micro_batches: int, parallel: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    if parallel:
        plan = {name: rule for name, rule in model.tp_plan.items() if rule in RULES}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(plan))
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    for part in ids.chunk(num_micro_batches):
        (model(input_ids=part, labels=part).loss / num_micro_batches).backward()
    found: torch.Tensor = model.model.layers[0].self_attn.q_norm.weight.grad
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number in (1, 2, 4):
        expected, got = gradient(number, parallel=False), gradient(number, parallel=True)
        off = float((got - expected).norm() / expected.norm())
        if dist.get_rank() == 0:
            print(f"{number} micro-batches: gradient of q_norm is off by {off:.1e} of its norm", flush=True)
    dist.destroy_process_group()
