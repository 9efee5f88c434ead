"""A recipe's parts for programs that train by hand: the model with its first weights, the rows of each step, the learning rate.

They come from the functions that train.py calls, so that the programs differ from it in the training alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acc_lm import runtime
from acc_lm.config.loading import load_config
from acc_lm.data import build_data
from acc_lm.modeling.build import build_model
from acc_lm.modeling.pretrained import scratch_config
from acc_lm.optimization.optimizer import build_optimizer
from acc_lm.optimization.schedule import build_schedule

RECIPE = Path(__file__).with_name("markov.yaml")


class Ingredients:
    """Parts of the course's recipe, with the overrides of the command line (`training.max_steps=20`)."""

    def __init__(self, overrides: list[str]) -> None:
        runtime.quiet_libraries()
        self.config = load_config(RECIPE, overrides)
        training = self.config.training
        assert training.max_steps is not None
        self.num_steps, self.max_grad_norm = training.max_steps, self.config.optimizer.max_grad_norm
        self._data = build_data(
            self.config.data, self.config.tokenizer, None, self.config.seed, training.global_batch_size
        )
        self._order = self._data.order(self.config.seed, training.global_batch_size)
        self.learning_rate_at = build_schedule(self.config.schedule, self.config.optimizer, self.num_steps)

    def model(self) -> Any:
        """The model of plain transformers, with the weights that the recipe's seed draws."""
        from transformers import AutoModelForCausalLM

        config, tokenizer = self.config, self._data.tokenizer
        ours, _ = build_model(config.model, tokenizer, config.data.sequence_length, config.seed)
        model = AutoModelForCausalLM.from_config(scratch_config(config.model, tokenizer))
        model.load_state_dict(ours.state_dict())
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW with the recipe's settings."""
        return build_optimizer(model, self.config.optimizer)

    def rows_at(self, step: int) -> tuple[Tensor, Tensor]:
        """Ids and targets of the global batch of a step (first = 1), int64 [B, L] each."""
        rows = [self._data.train[int(row)] for row in self._order.rows_at(step)]
        return torch.cat([row["input_ids"] for row in rows]), torch.cat([row["targets"] for row in rows])

    def write_losses(self, losses: list[float]) -> None:
        """Print the last loss, and write all of them as a run does, so that programs can compare them."""
        folder = Path(self.config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"step": step, "train/loss": loss}) + "\n" for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        print(f"step {len(losses)}/{self.num_steps}  loss {losses[-1]:.4f}  losses in {folder}/metrics.jsonl")


if __name__ == "__main__":
    ids, targets = Ingredients(sys.argv[1:]).rows_at(1)
    print(f"ids {tuple(ids.shape)}, targets {tuple(targets.shape)}")
