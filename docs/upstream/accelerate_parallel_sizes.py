"""accelerate 1.15: `sp_size` without DeepSpeed does nothing and says nothing; `tp_size` under FSDP2 cannot be prepared.

    torchrun --nproc_per_node 2 --master_port 29512 docs/upstream/accelerate_parallel_sizes.py

On a CPU Accelerate calls several processes MULTI_CPU, which it refuses with a ParallelismConfig, so the type is switched
to MULTI_GPU as soon as the state exists; nothing else is replaced. Expected: `sp_size` is refused without DeepSpeed, and
`_prepare_tp` (accelerator.py) does not import `ReplicateParallel`, which transformers 5 no longer has.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ParallelismConfig, TorchDynamoPlugin


def build(sizes: ParallelismConfig) -> Accelerator:
    PartialState(cpu=True)
    keywords = {"parallelism_config": sizes, "cpu": True}
    state = AcceleratorState(dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True, **keywords)
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(**keywords)


if __name__ == "__main__":
    accelerator = build(ParallelismConfig(sp_size=2))
    accelerator.print("sp_size=2 without DeepSpeed: accepted; mesh:", accelerator.torch_device_mesh)
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.print(
        f"prepared: {type(model).__name__} over {model.process_group.size()} processes, as without sp_size"
    )
    try:
        from transformers.integrations.tensor_parallel import ReplicateParallel  # noqa: F401
    except ImportError as error:
        accelerator.print("tp_size under FSDP2, in Accelerator._prepare_tp:", str(error).partition(" (")[0])
    torch.distributed.destroy_process_group()
