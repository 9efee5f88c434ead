"""Each process of a launch says who it is, and all of them add up their ranks.

torchrun --standalone --nproc_per_node 2 docs/course/code/hello.py
"""

import os

import torch
import torch.distributed as dist


def main() -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)  # waits until all processes are there
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    total = torch.tensor(rank, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(total)
    for turn in range(world_size):  # one after the other, so that the lines are in order
        dist.barrier()
        if turn == rank:
            place = f"rank {rank} of {world_size}, local rank {local_rank}, {backend}"
            print(f"{place}: the ranks add up to {total}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
