"""Fast steps, checked for every shipped recipe without a clock: nothing is waited for, searched for or made unnecessarily."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub import PUBLISHED
from processes import ROOT, run_everywhere
from torch.utils._python_dispatch import TorchDispatchMode

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# Sizes only; all other model settings of a recipe stay.
SMALL = {
    "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "head_dim": 8,
}  # fmt: skip
# The own config.json of each name on the Hub: the tests have no network.
ARCHITECTURES = {
    name: {key: shape[key] for key in ("model_type", "tie_word_embeddings", "num_key_value_heads")}
    for name, shape in PUBLISHED.items()
} | {"runs/quickstart/final": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1}}
LENGTH, VOCABULARY, READS = 160, 3000, ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy")


def small(file: Path, global_batch_size: int, micro_batch_size: int) -> Any:
    """The recipe with a small model of its architecture and few rows, and without its adapter."""
    from acc_lm.config.loading import load_config

    whole = load_config(file)
    fields = dict(whole.model.config or {})
    if whole.model.name_or_path:
        assert whole.model.name_or_path in ARCHITECTURES, "say here what architecture it is"
        fields = {**SMALL, **ARCHITECTURES[whole.model.name_or_path]}
        fields = {key: value for key, value in fields.items() if not key.startswith("n_")}
    fields |= {key: SMALL[key] for key in fields if key in SMALL} | {"vocab_size": VOCABULARY}
    fields.setdefault("n_positions" if fields["model_type"] == "gpt2" else "max_position_embeddings", 256)
    return load_config(file, [
        "model.name_or_path=null", f"model.config={fields}".replace("True", "true").replace("False", "false"),
        "tokenizer={kind: byte}", f"data.sequence_length={LENGTH}", f"training.global_batch_size={global_batch_size}",
        f"training.micro_batch_size={micro_batch_size}", "tracking.report_to=[]",
        "adapter.kind=none",  # the base must be a folder; here it is the model itself
    ])  # fmt: skip


def batch_of(rows: int, packs: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(rows))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:].contiguous()}
    if packs:
        half = LENGTH // 2
        batch["position_ids"] = (torch.arange(LENGTH) % half).expand(rows, LENGTH)
        batch["document_ids"] = (torch.arange(LENGTH) // half).expand(rows, LENGTH)
    return batch


def make(config: Any, file: Path) -> tuple[Any, bool]:
    """The model that the recipe builds, and whether its rows hold documents that must not see each other."""
    from acc_lm.modeling.build import build_model
    from acc_lm.text.tokenizer import make_tokenizer

    packs = (
        config.data.format not in (None, "text")
        or file.stem.startswith("chat")
        or not config.data.attend_across_documents
    )
    tokenizer = make_tokenizer(config.tokenizer, [])
    return build_model(config.model, tokenizer, LENGTH, 0, config.adapter, packs)[0], packs


class Wholes(TorchDispatchMode):
    """Recorder of every tensor as large as the logits of the complete batch."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.shape[-1:] == (VOCABULARY,)
                and tensor.numel() >= self.positions * VOCABULARY
            ):
                self.found.append(f"{function} {tuple(tensor.shape)} {tensor.dtype}")
        return output


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipes_model_is_one_causal_graph_that_never_makes_all_logits(file: Path) -> None:
    config = small(file, 4, 4)
    model, packs = make(config, file)
    batch = batch_of(4, packs)
    precision = config.training.mixed_precision
    calls: list[dict[str, Any]] = []
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        for node in graph.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                calls.append(dict(node.kwargs))
        return graph.forward

    def loss(run: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return run(**batch)

    with Wholes(4 * LENGTH) as plain:
        torch.nn.functional.linear(torch.zeros(4, LENGTH, 2), torch.zeros(VOCABULARY, 2))
    assert plain.found, "the trap must see them"
    with Wholes(4 * LENGTH) as wholes:
        loss(model).backward()
    assert wholes.found == []
    torch._dynamo.reset()
    model.eval()
    with torch.no_grad():
        expected = loss(model).nll
        got = loss(torch.compile(model, backend=backend)).nll
    assert torch.allclose(got, expected, rtol=1e-5)
    assert len(graphs) == 1, "no graph break"
    assert len(calls) == 2, "one attention a layer"
    for call in calls:
        if packs:  # on a CPU; on a GPU the blocks of FlexAttention take its place
            assert call["is_causal"] is False
        else:
            assert (call["is_causal"], call.get("attn_mask")) == (True, None)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipes_step_reads_no_tensor_and_reduces_its_gradient_once(file: Path) -> None:
    """On two processes with accumulation of 3: each bucket of gradients is sent once a step, and nothing waits for the device."""

    def run() -> tuple[list[str], list[int], int]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        from acc_lm.optimization.optimizer import build_optimizer
        from acc_lm.runtime import Gradients, build_accelerator, prepare
        from acc_lm.training.step import train_step

        config = small(file, 6, 1)
        accelerator = build_accelerator(config)
        assert (accelerator.num_processes, accelerator.gradient_accumulation_steps) == (2, 3)
        assert accelerator.mixed_precision == (config.training.mixed_precision or "no")
        model, packs = make(config, file)
        model, optimizer = prepare(accelerator, model, build_optimizer(model, config.optimizer))
        assert type(model).__name__ == "DistributedDataParallel"
        gradients = Gradients(accelerator, model)
        buckets: list[int] = []
        reads: list[str] = []

        def count(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks the annotations by identity
            buckets.append(bucket.index())
            return default_hooks.allreduce_hook(None, bucket)

        model.register_comm_hook(None, count)

        def step(number: int) -> Any:
            batches = [batch_of(1, packs) for _ in range(3)]
            return train_step(
                accelerator, model, optimizer, batches, step=number, seed=0, num_targets=6 * LENGTH,
                max_grad_norm=config.optimizer.max_grad_norm, gradients=gradients,
            )  # fmt: skip

        step(1)  # DDP reorders its buckets after the first
        buckets.clear()
        for name in READS:
            original = getattr(torch.Tensor, name)

            def trap(self: torch.Tensor, *arguments: Any, name: str = name, original: Any = original) -> Any:
                reads.append(name)
                return original(self, *arguments)

            setattr(torch.Tensor, name, trap)
        for number in range(2, 5):
            outcome = step(number)
        unread = list(reads)
        outcome.nll.item()
        assert reads == [*unread, "item"], "the trap must work"
        return unread, [buckets.count(index) for index in sorted(set(buckets))], len(set(buckets))

    for reads, counts, num_buckets in run_everywhere(run, 2):
        assert reads == []
        assert num_buckets >= 1
        assert counts == [3] * num_buckets, "once in each of three steps"


def test_a_start_loads_what_it_needs_and_the_collector_does_not_look_at_it(tiny: list[str], tmp_path: Path) -> None:
    """The collector is on again when the steps begin: collections took a third of the time up to the first step, peft a quarter."""
    code = f"""
import gc, os, runpy, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
before = gc.get_stats()[2]["collections"]
def first_step(*_):
    print("full collections", gc.get_stats()[2]["collections"] - before, gc.isenabled(), gc.get_freeze_count() > 200_000)
    print("loaded", *[name for name in ("peft", "bitsandbytes", "datasets", "matplotlib", "deepspeed") if name in sys.modules], ".")
    import transformers.trainer_utils
    from transformers import get_scheduler, trainer_utils
    print("whole", trainer_utils.PeftModel is sys.modules["peft"].PeftModel, trainer_utils is transformers.trainer_utils, flush=True)
    os._exit(0)
register_optimizer_step_post_hook(first_step)
sys.argv = {["train.py", *tiny]!r}
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    number, is_on, is_kept = re.search(r"full collections (\d+) (\w+) (\w+)", done.stdout).groups()  # type: ignore[union-attr]
    assert (is_on, is_kept) == ("True", "True")
    assert "loaded .\n" in done.stdout
    assert "whole True True\n" in done.stdout, "who trains with transformers afterwards has all of it"
    assert int(number) <= 3, "that of `prepare`, that of `warm_up`, and one of the data's own"


def test_a_failure_before_the_steps_leaves_the_collector_on(tiny: list[str]) -> None:
    import gc

    import train

    assert train.main([*tiny, "training.max_steps=0"]) == 2
    assert gc.isenabled()
