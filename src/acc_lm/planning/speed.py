"""Speed of a step, predicted: seconds by part, and bytes that each GPU sends.

    step = A x [compute x (1 + jitter x log2 machines)] + exposed communication + update + offload
    compute = products + attention + memory traffic

A is the number of micro-batches. The parts, each for one micro-batch on one GPU:

- **Products with weights**: 6 FLOP per weight and token (`modeling.flops`), and 2 more for what is computed twice, over the
  peak times an efficiency that falls for narrow models and short micro-batches: e x H / (H + h0) x n / (n + n0).
- **Attention**: the causal half of 12 x width x length FLOP, times 7/6 because fused attention computes the scores again in
  its backward (Dao et al., 2022, arXiv:2205.14135), over the peak times its own efficiency.
- **Memory traffic**: bytes that norms, activations, residuals and rotations read and write, over the memory bandwidth. The
  counts are those of a compiled block; an eager one moves several times as much.
- **Communication**: see `planning.communication`. A part of it is hidden by computation, which then runs slower.
- **Update**: AdamW in fp32 reads weight, gradient and two moments and writes three of them: 28 bytes per weight.

The efficiencies are fitted on published figures (`python -m benchmarks.planning`; docs/planning.md has the errors), so they
are no physics: they depend on each other. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from acc_lm.planning.communication import communication, exchanges, offload_seconds
from acc_lm.planning.constants import FITTED
from acc_lm.planning.hardware import Gpu
from acc_lm.planning.shapes import Layout, Shape, Work


@dataclass(frozen=True)
class Range:
    """A prediction: most likely value, and bounds that hold four times of five."""

    low: float
    middle: float
    high: float


SPREAD = 0.20
"""Half-width of the range of speeds, relative to the middle, where nothing was measured; docs/planning.md: how many runs it holds."""
CALIBRATED_SPREAD = 0.10
"""Half-width after one measured step of the same model, row length and GPU."""
OFFLOAD_SPREAD = 0.5
"""Half-width for offload, which rests on one published run."""
EXTRAPOLATED_RATIO, EXTRAPOLATED_PROCESSES = 0.85, 512
"""Communication over computation, and number of GPUs, up to which published scaling was fitted."""
SHORTEST = 0.005
"""Seconds of a micro-batch's computation below which starting its kernels, which the model leaves out, may take as long."""


@dataclass(frozen=True)
class StepTime:
    """Predicted optimizer step of one GPU: seconds by part, and bytes sent."""

    products: float
    attention: float
    traffic: float
    """Seconds of memory traffic outside of products and attention."""
    communication: float
    """Seconds of communication that computation does not hide, and by which it slows computation."""
    update: float
    offload: float
    bytes_sent: float
    """Bytes that each GPU sends in its rings."""
    network_bytes: float
    """Bytes that each machine sends to other machines; 0 on one machine."""
    tokens: int
    """Tokens of the step on one GPU."""
    flops: float
    """FLOP of the step on one GPU, in the convention of `modeling.flops`."""
    peak: float
    calibrated: bool
    extrapolated: str
    """Reason why no published figure supports this prediction; empty: there is none."""

    @property
    def total(self) -> float:
        """Seconds of the step, the most likely value."""
        return self.products + self.attention + self.traffic + self.communication + self.update + self.offload

    @property
    def seconds(self) -> Range:
        """Seconds of the step."""
        spread = CALIBRATED_SPREAD if self.calibrated else SPREAD
        own = self.total - self.offload
        low = own / (1 + spread) + self.offload / (1 + OFFLOAD_SPREAD)
        return Range(low, self.total, own / (1 - spread) + self.offload / (1 - OFFLOAD_SPREAD))

    @property
    def tokens_per_second(self) -> Range:
        """Tokens per second of one GPU."""
        seconds = self.seconds
        return Range(self.tokens / seconds.high, self.tokens / seconds.middle, self.tokens / seconds.low)

    @property
    def utilization(self) -> float:
        """Model FLOP utilization (MFU) at the most likely speed."""
        return self.flops / self.total / self.peak


def step_time(
    shape: Shape,
    gpu: Gpu,
    layout: Layout,
    work: Work,
    network: float = 50e9,
    calibration: float | None = None,
    constants: dict[str, float] | None = None,
) -> StepTime:
    """Predict an optimizer step.

    Args:
        network: bytes per second of each GPU's link to other machines; 400 Gb/s is 50e9.
        calibration: measured seconds of a step of this model, row length and GPU over the predicted ones; None: nothing was
            measured. It scales all parts and narrows the range.
        constants: efficiencies; None: those fitted on published figures.
    """
    c = FITTED if constants is None else constants
    micro_batches, whole, shape = work.accumulation, shape, shape.part(work.layer_parts)
    products, attention, traffic = compute_seconds(shape, gpu, layout, work, c)
    compute = products + attention + traffic
    machines = max(1.0, layout.processes * work.layer_parts / gpu.per_machine)
    jitter = 1 + c["jitter"] * math.log2(machines)
    sent = communication(shape, gpu, layout, micro_batches, network, c)
    exchanged = exchanges(shape, gpu, layout, work, c)
    hideable = layout.overlap * compute * (1.0 if layout.weight_shards > 1 else 2 / 3)  # else in the backward pass only
    exposed = 0.0
    for times, seconds, pieces in sent.during:
        hidden = min(seconds, hideable)
        last = seconds / pieces if layout.overlap else 0.0  # nothing is left that could hide the last piece
        exposed += times * (c["interference"] * hidden + seconds - hidden + last)
    factor = 1.0 if calibration is None else calibration
    update_of = 0.0 if layout.offloads_moments else 28 * shape.parameters / layout.moment_shards
    ratio = sum(times * seconds for times, seconds, _ in sent.during) / (micro_batches * compute)
    return StepTime(
        products=factor * micro_batches * jitter * products,
        attention=factor * micro_batches * jitter * attention,
        traffic=factor * micro_batches * jitter * traffic,
        communication=factor * (exposed + sent.after_update + exchanged.seconds),
        update=factor * update_of / (gpu.memory_bandwidth * UPDATE_EFFICIENCY),
        offload=factor * offload_seconds(shape, gpu, layout, micro_batches),
        bytes_sent=sent.bytes_sent + exchanged.bytes_sent,
        network_bytes=sent.network_bytes,
        tokens=micro_batches * work.tokens // work.layer_parts,
        flops=micro_batches * work.tokens * whole.flops_per_token(work.length) / work.layer_parts,
        peak=gpu.peak(work.compute),
        calibrated=calibration is not None,
        extrapolated=_beyond_published(gpu, layout, ratio, compute, work),
    )


UPDATE_EFFICIENCY = 0.7
"""Share of the memory bandwidth that a fused AdamW reaches; assumed, a few percent of a step at most."""


PLAIN_BLOCK = 0.15
"""Extra traffic of an eager block with layer norm, GELU and no rotation, as a share of a gated one's: norm and activation are
single kernels in torch. Counted: 108 bytes per hidden element instead of 76 compiled, a gated block about 4 times as many."""


def _beyond_published(gpu: Gpu, layout: Layout, ratio: float, seconds: float, work: Work) -> str:
    if seconds < SHORTEST:
        return f"{1000 * seconds:.1g} ms of computation in a micro-batch, without the time to start its kernels"
    if layout.processes > EXTRAPOLATED_PROCESSES:
        return f"more than {EXTRAPOLATED_PROCESSES} GPUs"
    if ratio > EXTRAPOLATED_RATIO:
        return f"communication takes {ratio:.1f} of the time of computation, published runs up to {EXTRAPOLATED_RATIO}"
    if not gpu.has_published_rows:
        return f"no published run on a {gpu.name} was fitted: data sheet and the constants of other GPUs"
    if work.parts * work.layer_parts > 1:
        return f"no published run with {'rows' if work.parts > 1 else 'layers'} in parts was fitted"
    return "" if work.compute in ("bfloat16", "fp8") else f"no published run in {work.compute} was fitted"


def compute_seconds(
    shape: Shape, gpu: Gpu, layout: Layout, work: Work, c: dict[str, float]
) -> tuple[float, float, float]:
    """Seconds of one micro-batch on one GPU: products with weights, attention, memory traffic."""
    n, again = work.tokens, work.recomputed
    peak = gpu.peak(work.compute) * gpu.power_share ** c["power"]
    eight_bits = c["fp8"] if work.compute == "fp8" else 1.0
    fill = shape.hidden / (shape.hidden + c[f"width_{gpu.family}"]) * n / (n + c["tokens"])
    blocks = (6 + 2 * again.products) * shape.layers * shape.block_parameters
    products = (blocks / eight_bits + 6 * shape.head_parameters) * n / (peak * c[f"products_{gpu.family}"] * fill)
    of_causal = 6 * shape.layers * shape.queries * work.length * n
    attention = of_causal * (7 / 6 + again.attention / 3) / (peak * c[f"attention_{gpu.family}"])
    width = 4 if work.compute in ("float32", "tf32") else 2
    moved = 18 * shape.hidden + 4 * (shape.queries + shape.keys) + (8 if shape.gated else 5) * shape.ffn
    unfused = 0.0 if work.compiled else 1.0 if shape.gated else PLAIN_BLOCK
    eager = 1 + (c["eager"] - 1) * unfused
    elementwise = shape.layers * moved * width * eager * (1 + 0.3 * again.elementwise)
    logits = 6 * shape.vocab * min(eager, 2.5)
    casts = 16.0 * shape.parameters if layout.casts_weights else 0.0
    traffic = ((elementwise + logits) * n + casts) / (gpu.memory_bandwidth * c["traffic"])
    return products, attention, traffic
