"""Vocabulary in parts: losses, gradients and logits are those of the complete embedding and head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_everywhere
from torch import Tensor, nn

from acc_lm.modeling import losses
from acc_lm.modeling.loss_head import LossHead
from acc_lm.modeling.vocabulary_parts import VocabularyParts, divide_embedding, is_plain_embedding, parts_add_up
from acc_lm.rows.batch import IGNORE_INDEX

VOCABULARY, WIDTH, POSITIONS = 101, 12, 300  # no number of parts divides the ids; three chunks, the last one short


class Scaled(nn.Embedding):
    """Embedding as Gemma has it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class Centred(nn.Embedding):
    """Embedding whose rows depend on all others."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) - self.weight.mean(dim=0)


def problem(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(0, VOCABULARY, (3, POSITIONS // 3), generator=draw)
    targets[torch.rand(targets.shape, generator=draw) < 0.3] = IGNORE_INDEX
    return {
        "hidden": torch.randn(3, POSITIONS // 3, WIDTH, generator=draw, dtype=torch.float64).to(dtype),
        "weight": (4 * torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64)).to(dtype),
        "bias": torch.randn(VOCABULARY, generator=draw, dtype=torch.float64).to(dtype),
        "targets": targets,
    }


def head_of(given: dict[str, Tensor], parts: VocabularyParts | None, biased: bool) -> LossHead:
    cut = (lambda tensor: tensor.clone()) if parts is None else parts.cut
    head = LossHead(1, 1, bias=biased)
    head.weight, head.parts = nn.Parameter(cut(given["weight"])), parts
    if biased:
        head.bias = nn.Parameter(cut(given["bias"]))
    return head


def results(given: dict[str, Tensor], parts: VocabularyParts | None, biased: bool = True) -> dict[str, Tensor]:
    """Everything that a head computes, and the gradients of its loss; cut ones as they are."""
    head, hidden = head_of(given, parts, biased), given["hidden"].clone().requires_grad_()
    loss = head(hidden, given["targets"])
    (loss * 0.5).backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    found = {"loss": loss.detach(), "of hidden": hidden.grad, "of weight": head.weight.grad}
    if head.bias is not None and head.bias.grad is not None:
        found["of bias"] = head.bias.grad
    with torch.no_grad():
        head.eval()
        sums, by_position = head(hidden, given["targets"]), head(hidden, given["targets"], by_position=True)
        found |= {f"sum of {name}": value for name, value in sums._asdict().items()}
        found |= {f"{name} of each": value for name, value in by_position._asdict().items()}
        found["logits"] = head(hidden)
        found["nothing"] = head.train()(hidden, torch.full_like(given["targets"], IGNORE_INDEX))
    return found


def compared(given: dict[str, Tensor], biased: bool = True) -> dict[str, float]:
    """Largest difference between a head in parts and the complete one, relative to the largest element."""
    division = VocabularyParts(VOCABULARY, dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    found = {}
    wanted, got = results(given, None, biased), results(given, division, biased)
    assert wanted.keys() == got.keys()
    for name, whole in wanted.items():
        if name in ("of weight", "of bias"):
            whole = division.cut(whole)
        assert (whole.shape, whole.dtype) == (got[name].shape, got[name].dtype), name
        off = (whole.double() - got[name].double()).abs().max()
        found[name] = float(off / whole.double().abs().max().clamp(min=1e-9))
    return found


def on_each_process() -> dict[str, dict[str, float]]:
    from acc_lm.runtime.engines.collectives import PATIENCE

    dist.init_process_group("gloo", timeout=PATIENCE)
    found = {
        "float64": compared(problem()),
        "without bias": compared(problem(), biased=False),
        "float32": compared(problem(torch.float32)),
        "bfloat16": compared(problem(torch.bfloat16)),
    }
    with losses.as_on_gpu():
        found["as on a GPU"] = compared(problem())
    # Many equal logits, of integers and so exact: the first one counts, wherever it is.
    equal = problem()
    equal["hidden"] = equal["hidden"].round()
    equal["weight"] = equal["weight"].sign().clamp(min=0)[torch.arange(VOCABULARY) % 5]
    found["equal logits"] = compared(equal, biased=False)
    found["embedding"] = embedded()
    return found


def embedded() -> dict[str, float]:
    division = VocabularyParts(VOCABULARY, dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    found = {}
    for kind in (nn.Embedding, Scaled):
        for padding in (None, 0, VOCABULARY - 1):
            torch.manual_seed(0)
            whole, cut = (kind(VOCABULARY, WIDTH, padding_idx=padding, dtype=torch.float64) for _ in range(2))
            cut.weight.data = division.cut(whole.weight.data)
            divide_embedding(cut, division)
            ids = torch.cat([torch.arange(VOCABULARY), torch.tensor([0, 0, VOCABULARY - 1])])[None]
            outputs = [each(ids) for each in (whole, cut)]
            weights = torch.randn(outputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            for output in outputs:
                (output * weights).sum().backward()
            assert whole.weight.grad is not None
            assert cut.weight.grad is not None
            name = f"{kind.__name__} {padding}"
            found[name] = float((outputs[0] - outputs[1]).abs().max())
            found[f"gradient of {name}"] = float((division.cut(whole.weight.grad) - cut.weight.grad).abs().max())
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_vocabulary_in_parts_is_the_vocabulary(size: int) -> None:
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2}
    for found in run_everywhere(on_each_process, size):
        for case, differences in found.items():
            print(case, {name: f"{value:.1e}" for name, value in differences.items()})
            assert max(differences.values()) <= tolerance.get(case, 1e-13), case
        assert len(found["embedding"]) == 12
        assert found["bfloat16"]["sum of num_correct"] == found["equal logits"]["is_correct of each"] == 0


def test_parts_hold_each_id_once() -> None:
    ids = torch.arange(7)
    for size in (1, 2, 3, 7):
        parts = [VocabularyParts(7, size, index) for index in range(size)]
        assert torch.equal(torch.cat([each.cut(ids) for each in parts]), ids)
        assert torch.stack([each.here(ids)[1] for each in parts]).sum(dim=0).tolist() == [1] * 7


def test_embeddings_that_are_no_plain_tables_stay_complete() -> None:
    assert is_plain_embedding(Scaled(8, 2))
    others: list[Any] = [nn.Linear(8, 2), nn.Embedding(8, 2, max_norm=1.0), nn.Embedding(8, 2, sparse=True)]
    assert not any(map(is_plain_embedding, others))
    assert not is_plain_embedding(nn.Embedding(8, 2, scale_grad_by_freq=True))
    for embedding, adds_up in ((nn.Embedding(7, 2, padding_idx=6), True), (Scaled(7, 2), True), (Centred(7, 2), False)):
        before = embedding.weight.detach().clone()
        assert parts_add_up(embedding, 3) is adds_up
        assert torch.equal(embedding.weight, before)
        assert embedding.padding_idx in (None, 6)
