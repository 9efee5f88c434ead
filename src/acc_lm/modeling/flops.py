"""FLOP per token of a model, and peak FLOP/s of devices: the two parts of model FLOP utilization (MFU).

Each weight costs a token one multiplication and one addition in the forward pass, 2 FLOP. Backward costs the same twice
more: for the gradient of the input, if anything before the weight is trained, and for the gradient of the weight, if the
weight itself is trained. So a fully trained model has 6 FLOP per weight, and frozen weights under an adapter have 4. The
output head counts whether it is tied or not; an embedding is only looked up and does not count. Nothing that is computed
twice to save memory counts: these are the FLOP of the model, not of the hardware.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported where a model is: planning reads the peaks and conventions without it
    import torch
    from torch import Tensor, nn

PEAKS: dict[str, dict[str, float]] = {
    # HGX B200 and B300: 36 PFLOP/s for 8 GPUs with sparsity; GB200 and GB300 NVL72: 360 for 72.
    "B200": {"bfloat16": 2250, "float16": 2250},
    "B300": {"bfloat16": 2250, "float16": 2250},
    "GB200": {"bfloat16": 2500, "float16": 2500},
    "GB300": {"bfloat16": 2500, "float16": 2500},
    "H200 NVL": {"bfloat16": 835, "float16": 835, "float32": 60},
    "H200": {"bfloat16": 989, "float16": 989, "tf32": 494, "float32": 67},
    "GH200": {"bfloat16": 989, "float16": 989, "tf32": 494, "float32": 67},
    "H100 NVL": {"bfloat16": 835, "float16": 835, "float32": 60},
    "H100 PCIe": {"bfloat16": 756, "float16": 756, "tf32": 378, "float32": 51},
    "H100": {"bfloat16": 989, "float16": 989, "tf32": 494, "float32": 67},
    "A100": {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5},
    "A800": {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5},  # an A100 with a slower NVLink
    "L4": {"bfloat16": 121, "float16": 121, "tf32": 60, "float32": 30.3},  # half of 242 and 120 with sparsity
    "L40": {"bfloat16": 181, "float16": 181, "tf32": 90.5, "float32": 90.5},
    "L40S": {"bfloat16": 362, "float16": 362, "tf32": 183, "float32": 91.6},
    "A10G": {"bfloat16": 70, "float16": 70, "float32": 35},  # AWS's A10G, slower than the A10: data sheet of the EC2 G5
    "RTX A6000": {"bfloat16": 154.8, "float16": 154.8, "tf32": 77.4, "float32": 38.7},  # the white paper of GA102
    "RTX 5090": {
        "bfloat16": 209.5,
        "float16": 209.5,
        "float32": 104.8,
    },  # the white paper of Blackwell for GeForce, sums in fp32
    "RTX 4090": {"bfloat16": 165, "float16": 165, "float32": 82.6},
    "RTX 3090": {"bfloat16": 71, "float16": 71, "float32": 35.6},  # the white paper of GA102, sums in fp32
    "RTX 3060": {"bfloat16": 25.5, "float16": 25.5, "float32": 12.7},  # GA102's rate of an SM x 28 SMs at 1.777 GHz
    "V100-SXM2": {"float16": 125, "float32": 15.7},
    "V100-PCIE": {"float16": 112, "float32": 14},
    "T4": {"float16": 65, "float32": 8.1},
}
"""Dense TFLOP/s from the data sheets, by words of the device's name (first match) and compute dtype."""
ANOTHER_CHIP = re.compile(r"\b(MIG|Laptop|D|Ti|SUPER)\b")
"""Words in the name of a part of a GPU, or of another GPU that carries the same name."""
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Peak:
    """Peak arithmetic speed of one device."""

    flops: float
    """FLOP per second."""
    name: str


def peak_of(device: str, compute: str, given: float | None = None) -> Peak | None:
    """Peak of a device in its compute dtype; None where no data sheet is known here.

    Args:
        device: its name, as its driver reports it.
        compute: bfloat16, float16, float32, tf32, float64 or fp8; fp8 takes the peak of bf16, as not all is in 8 bits.
        given: TFLOP/s from the recipe, which replace the table; None: use the table.
    """
    if given is not None:
        return Peak(given * 1e12, f"{device}, {given:g} TFLOP/s from the recipe")
    kind = "bfloat16" if compute == "fp8" else compute
    of_device: dict[str, float] = next((of for words, of in PEAKS.items() if re.search(rf"\b{words}\b", device)), {})
    if kind not in of_device or ANOTHER_CHIP.search(device):
        return None
    return Peak(of_device[kind] * 1e12, f"{device}, {of_device[kind]:g} TFLOP/s dense {SHORT.get(kind, kind)}")


@dataclass(frozen=True)
class Flops:
    """FLOP of a model for a token of a row, forward and backward."""

    weights: float
    """FLOP per token in products with weights."""
    attention: float
    """FLOP per token in attention, for each position attended to."""
    unknown: str = ""
    """Reason why no honest figure exists, such as a part that was not counted; empty: everything was counted."""

    def of_token(self, length: int, causal: bool = False) -> float:
        """FLOP for a token in a row of this length.

        Args:
            causal: True: count only the positions that a token may attend to, half of the row on average. False: count the
                full row, the convention of PaLM and nanoGPT (Chowdhery et al., 2022, arXiv:2204.02311, appendix B).
        """
        return self.weights + self.attention * length * (0.5 if causal else 1.0)


def flops_of(num_weights: float, attention_width: float) -> Flops:
    """FLOP of a fully trained model.

    Args:
        num_weights: weights in matrix products, the output head included.
        attention_width: heads x head size, summed over layers.
    """
    return Flops(6.0 * num_weights, 12.0 * attention_width)


def count_flops(
    model: nn.Module, run: Callable[[], Any], num_tokens: int, attention: Callable[[], list[tuple[int, bool]]]
) -> Flops:
    """Count FLOP while the model runs on a few tokens, from the products that run and their gradients.

    Args:
        run: a forward pass with gradients, logits included.
        num_tokens: tokens in that pass.
        attention: called after it; per layer, heads x (size of a key + size of a value), and whether it has a gradient.
    """
    from torch import nn

    sums = {"weights": 0.0}
    known: set[int] = set()

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        given = inputs[0]
        size = given.shape[-1]
        weight: Any = module.weight
        known.add(id(weight))
        times = 1 + int(given.requires_grad) + int(weight.requires_grad)
        sums["weights"] += 2 * times * given.numel() / num_tokens * _columns(module, size)

    handles = [module.register_forward_hook(look) for module in model.modules() if _is_product(module)]
    known |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    of_position = sum(2.0 * width * (3 if has_gradient else 1) for width, has_gradient in attention())
    missed = [name for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in known]
    more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
    return Flops(
        sums["weights"], of_position, f"the FLOP per token of {missed[0]}{more} are not known here" if missed else ""
    )


def _is_product(module: nn.Module) -> bool:
    """Test for torch's Linear and its subclasses (4-bit ones too), and GPT-2's Conv1D, whose weight is transposed."""
    from torch import nn

    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _columns(module: Any, size: int) -> int:
    from torch import nn

    if isinstance(module, nn.Linear):
        return int(module.out_features)
    return int(module.weight.shape[1])


def few_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """Token ids, int64 [1, 8], enough for `count_flops`."""
    import torch

    return (torch.arange(1, 9, device=device) % vocab_size).reshape(1, 8)
