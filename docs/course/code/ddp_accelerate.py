"""The same training with Accelerate: any number of processes, any strategy of the Accelerate config.

accelerate launch --config_file accelerate_configs/ddp.yaml docs/course/code/ddp_accelerate.py output_dir=runs/course/accelerate
"""

import sys

import torch
from accelerate import Accelerator
from ingredients import Ingredients
from torch.nn.functional import cross_entropy


def main() -> None:
    accelerator = Accelerator(
        cpu=True
    )  # init_process_group, rank and world size; without cpu=True: a GPU if there is one
    recipe = Ingredients(sys.argv[1:])

    model = recipe.model()
    model, optimizer = accelerator.prepare(
        model, recipe.optimizer(model)
    )  # broadcasts the weights, hooks the all-reduce in
    rank, world_size = accelerator.process_index, accelerator.num_processes

    losses = []
    for step in range(1, recipe.num_steps + 1):
        ids, targets = (rows[rank::world_size] for rows in recipe.rows_at(step))
        num_targets = accelerator.reduce(torch.tensor(targets.numel(), device=accelerator.device))

        logits = model(ids).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_targets

        optimizer.zero_grad()
        accelerator.backward(loss * world_size)  # DDP averages the gradients, and a sum is needed
        accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.step()

        losses.append(accelerator.reduce(loss.detach()).item())
    if accelerator.is_main_process:
        recipe.write_losses(losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
