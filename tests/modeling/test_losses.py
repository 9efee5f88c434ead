"""The fused loss equals the plain one, in value and in every gradient, without its logits."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import acc_lm.modeling.losses
from acc_lm.modeling import losses
from acc_lm.modeling.losses import (
    CHUNK_POSITIONS,
    GPU_CHUNK_LOGITS,
    chunk_positions,
    loss_sums,
    losses_of_logits,
    padded_vocabulary,
    position_losses,
    summed_loss,
    sums_of_logits,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def example(
    dtype: torch.dtype, bias: bool, positions: int = CHUNK_POSITIONS * 2 + 37
) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(1, positions, 24, dtype=dtype, requires_grad=True)
    head = nn.Linear(24, 500, bias=bias, dtype=dtype)
    targets = torch.randint(0, 500, (1, positions))
    targets[0, ::5] = -100
    return hidden, head, targets


def plain(hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor) -> torch.Tensor:
    logits = head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and vocabulary as a GPU gets them, of a size that makes several chunks here."""
    monkeypatch.setattr(acc_lm.modeling.losses, "GPU_CHUNK_LOGITS", 512 * 160)
    monkeypatch.setattr(acc_lm.modeling.losses, "chunk_positions", lambda n, size, _: chunk_positions(n, size, GPU))
    monkeypatch.setattr(acc_lm.modeling.losses, "padded_vocabulary", lambda size, _: padded_vocabulary(size, GPU))


def test_a_gpu_gets_few_large_chunks_and_an_even_vocabulary() -> None:
    assert [padded_vocabulary(size, GPU) for size in (50257, 50304, 128256, 257)] == [50304, 50304, 128256, 320]
    assert padded_vocabulary(50257, CPU) == 50257
    assert chunk_positions(32768, 50257, CPU) == CHUNK_POSITIONS
    for num_positions, size, num_chunks in ((32768, 50304, 7), (32768, 128256, 16), (300, 50304, 1), (0, 50304, 0)):
        positions = chunk_positions(num_positions, size, GPU)
        assert -(-num_positions // positions) == num_chunks
        assert positions * size <= GPU_CHUNK_LOGITS + CHUNK_POSITIONS * size
        assert positions % CHUNK_POSITIONS == 0


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_added_vocabulary_rows_affect_neither_loss_nor_gradient(dtype: torch.dtype, bound: float, bias: bool) -> None:
    hidden, head, targets = example(dtype, bias)
    leaves = [hidden, *head.parameters()]
    expected = plain(hidden, head, targets)
    wanted = torch.autograd.grad(expected * 0.3, leaves)
    with LargestTensor() as largest:
        got = summed_loss(hidden, head.weight, head.bias, targets)
    assert largest.numel == 256 * 512, "two chunks of 256 positions, 12 logits added to each"
    gradients = torch.autograd.grad(got * 0.3, leaves)
    assert abs(got - expected) <= bound * expected
    for gradient, want in zip(gradients, wanted, strict=True):
        assert gradient.shape == want.shape
        assert (gradient - want).abs().max() <= bound * want.abs().max()
    with torch.no_grad():
        assert torch.allclose(loss_sums(hidden, head.weight, head.bias, targets).nll, expected, rtol=bound)
        assert torch.allclose(position_losses(hidden, head.weight, head.bias, targets).nll.sum(), expected, rtol=bound)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_loss_of_a_gpu_compiles_to_one_graph_with_the_same_gradients() -> None:
    torch._dynamo.reset()
    hidden, head, targets = example(torch.float32, bias=False)
    leaves = [hidden, *head.parameters()]
    wanted = torch.autograd.grad(plain(hidden, head, targets), leaves)
    run = torch.compile(summed_loss, backend="aot_eager", fullgraph=True)
    for gradient, want in zip(
        torch.autograd.grad(run(hidden, head.weight, None, targets), leaves), wanted, strict=True
    ):
        assert (gradient - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_value_and_gradients_equal_the_plain_path(dtype: torch.dtype, bound: float, bias: bool) -> None:
    hidden, head, targets = example(dtype, bias)
    leaves = [hidden, *head.parameters()]
    expected = plain(hidden, head, targets)
    wanted = torch.autograd.grad(expected * 0.3, leaves)
    got = summed_loss(hidden, head.weight, head.bias, targets)
    gradients = torch.autograd.grad(got * 0.3, leaves)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    assert abs(got - expected) <= bound * expected
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient - want).abs().max() <= bound * want.abs().max()


def test_bf16_autocast_is_as_close_to_exact_as_the_plain_path() -> None:
    hidden, head, targets = example(torch.float32, bias=True)
    leaves = [hidden, *head.parameters()]
    exact = torch.autograd.grad(plain(hidden, head, targets), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        fused_loss = summed_loss(hidden, head.weight, head.bias, targets)
        plain_loss = plain(hidden, head, targets)
    assert fused_loss.dtype == torch.float32
    assert abs(fused_loss - plain_loss) <= 2e-3 * plain_loss
    fused, usual = torch.autograd.grad(fused_loss, leaves), torch.autograd.grad(plain_loss, leaves)
    for f, u, e in zip(fused, usual, exact, strict=True):
        assert (f - e).norm() <= 1.2 * (u - e).norm()


def test_no_target_means_zero_loss_and_zero_gradients() -> None:
    hidden, head, targets = example(torch.float32, bias=True)
    loss = summed_loss(hidden, head.weight, head.bias, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0
    for gradient in (hidden.grad, head.weight.grad, head.bias.grad):
        assert gradient is not None
        assert not gradient.any()


def test_evaluation_sums_equal_the_plain_path() -> None:
    hidden, head, targets = example(torch.float64, bias=True)
    with torch.no_grad():
        sums = loss_sums(hidden, head.weight, head.bias, targets)
        correct = (head(hidden).argmax(-1) == targets).sum()
    assert torch.allclose(sums.nll, plain(hidden, head, targets), rtol=1e-12)
    assert (sums.num_targets, sums.num_correct) == ((targets >= 0).sum(), correct)


class LargestTensor(TorchDispatchMode):
    """Recorder of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


class PeakBytes(TorchDispatchMode):
    """Recorder of the most bytes that tensors of at least `numel` elements hold at the same time."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.peak = numel, 0
        self.held: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.numel:
                self.held[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        self.held = {storage: size for storage, size in self.held.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.held.values()))
        return output


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("dtype", "per_logit"), [(torch.bfloat16, 2 + 4 + 4), (torch.float32, 4 + 4)])
def test_a_chunk_is_freed_before_the_next_is_computed(
    dtype: torch.dtype, per_logit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maximum at once is a chunk's logits, their copy in fp32 where they are not, and their log-softmax."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # no buffers that are kept for all chunks
    hidden, head, targets = example(dtype, bias=False, positions=256 * 4)
    with PeakBytes(256 * 500) as seen:
        summed_loss(hidden, head.weight, head.bias, targets)
    assert seen.peak == 256 * 512 * per_logit


def test_logits_of_full_size_never_exist() -> None:
    hidden, head, targets = example(torch.float32, bias=False, positions=CHUNK_POSITIONS * 8)
    with LargestTensor() as usual:
        plain(hidden, head, targets).backward()
    assert usual.numel == CHUNK_POSITIONS * 8 * 500, "the trap must see the plain path's logits"
    with LargestTensor() as fused:
        summed_loss(hidden, head.weight, head.bias, targets).backward()
    with LargestTensor() as evaluation, torch.no_grad():
        loss_sums(hidden, head.weight, head.bias, targets)
    assert max(fused.numel, evaluation.numel) <= CHUNK_POSITIONS * 500


def test_logits_that_exist_may_have_any_shape() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 5, 11), torch.randint(0, 11, (2, 3, 5))
    targets[0, 1] = -100
    nll = nn.functional.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none", ignore_index=-100)
    correct = (logits.argmax(-1) == targets).sum()
    sums, each = sums_of_logits(logits, targets), losses_of_logits(logits, targets)
    assert (sums.num_targets, sums.num_correct) == (25, correct)
    assert torch.allclose(sums.nll, nll.sum())
    assert torch.equal(each.nll, nll.view(2, 3, 5))
    assert each.is_correct.shape == (2, 3, 5)
    assert each.is_correct.sum() == correct


def test_the_branch_of_a_gpu_computes_the_same_softmax_in_slices() -> None:
    logits = torch.randn(37, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(losses._log_softmax_in_slices(logits, torch.float32), logits.float().log_softmax(-1))
    hidden, weight = torch.randn(300, 16, dtype=torch.float64), torch.randn(70, 16, dtype=torch.float64)
    targets = torch.arange(300) % 70
    found = []
    for branch in (contextlib.nullcontext(), losses.as_on_gpu()):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        with branch:
            loss = losses.summed_loss(leaves[0], leaves[1], None, targets)
            loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
