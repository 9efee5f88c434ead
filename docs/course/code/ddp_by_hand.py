"""Data parallelism in plain torch: what DDP does, written out.

torchrun --standalone --nproc_per_node 2 docs/course/code/ddp_by_hand.py output_dir=runs/course/by-hand
"""

import os
import sys

import torch
import torch.distributed as dist
from ingredients import Ingredients
from torch.nn.functional import cross_entropy


def main() -> None:
    # The launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; all processes meet there.
    if "RANK" not in os.environ:
        sys.exit(
            "error: RANK must be set, got nothing; start this program with torchrun --standalone --nproc_per_node 2"
        )
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    recipe = Ingredients(sys.argv[1:])

    # 1. The same weights everywhere: those of rank 0.
    model = recipe.model()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = recipe.optimizer(model)

    losses = []
    for step in range(1, recipe.num_steps + 1):
        # 2. Different rows: every world_size-th row of the global batch, beginning with the rank-th.
        ids, targets = (rows[rank::world_size] for rows in recipe.rows_at(step))
        num_targets = torch.tensor(targets.numel())
        dist.all_reduce(num_targets)  # targets in the global batch

        # 3. Forward: the loss of the own rows, as a share of the loss of the global batch.
        logits = model(ids).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_targets

        # 4. Backward: the gradient of that share.
        optimizer.zero_grad()
        loss.backward()

        # 5. All-reduce: the sum of the shares, which every process gets.
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

        # 6. The same update everywhere, because weights, gradients and optimizer state are the same.
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.step()

        total = loss.detach()
        dist.all_reduce(total)  # only for the log
        losses.append(total.item())
    if rank == 0:
        recipe.write_losses(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
