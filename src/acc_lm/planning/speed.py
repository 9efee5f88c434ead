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
- **Communication**: a ring sends (k - 1) / k of a tensor over k GPUs (NVIDIA nccl-tests, doc/PERFORMANCE.md) and waits for
  k - 1 hops. A part of it is hidden by computation, which then runs slower.
- **Update**: AdamW in fp32 reads weight, gradient and two moments and writes three of them: 28 bytes per weight.

The efficiencies are fitted on published figures (`python -m benchmarks.planning`; docs/planning.md has the errors), so they
are no physics: they depend on each other. A layout says what is sharded over how many GPUs; the names of strategies are
known in `runtime` only. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from acc_lm.modeling.flops import flops_of
from acc_lm.planning.constants import FITTED
from acc_lm.planning.hardware import Gpu


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer."""

    layers: int
    hidden: int
    ffn: int
    """Inner size of the feed-forward network."""
    gated: bool
    """True: three matrices (SwiGLU); False: two (GELU)."""
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool
    """True: the output head is the embedding."""
    other_parameters: int = 0
    """Parameters outside of matrix products: norms, biases, positions."""
    vocab_in_parts: bool = True
    """True: GPUs that share each layer share embedding and head, too."""

    def part(self, size: int) -> Shape:
        """Sizes of what one of `size` GPUs computes if they share each layer: some heads, units and ids."""
        vocab = -(-self.vocab // size) if self.vocab_in_parts else self.vocab
        heads, kv_heads = self.heads // size, self.kv_heads // size
        return replace(self, ffn=self.ffn // size, heads=heads, kv_heads=kv_heads, vocab=vocab)

    @property
    def queries(self) -> int:
        """Size of the queries of all heads together."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Size of the keys, or of the values, of all heads together."""
        return self.kv_heads * self.head_size

    @property
    def block_parameters(self) -> int:
        """Weights in the matrices of one block."""
        attention = self.hidden * 2 * (self.queries + self.keys)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, as many as of the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied head counted once."""
        ends = self.head_parameters * (1 if self.tied else 2)
        return self.layers * self.block_parameters + ends + self.other_parameters

    def flops_per_token(self, length: int, causal: bool = False) -> float:
        """FLOP of a token, forward and backward, in the convention of `modeling.flops`."""
        products = self.layers * self.block_parameters + self.head_parameters
        return flops_of(products, self.layers * self.queries).of_token(length, causal)


@dataclass(frozen=True)
class Layout:
    """Distribution of a model over GPUs, in numbers.

    Of `processes` GPUs, a group shares one copy of whatever is sharded, and there are `replicas` such groups.
    """

    weight_shards: int = 1
    """GPUs that share one copy of the weights; 1: each has all of them."""
    gradient_shards: int = 1
    """GPUs that share one copy of the summed gradients."""
    moment_shards: int = 1
    """GPUs that share one copy of the fp32 weights and AdamW's moments."""
    replicas: int = 1
    """Groups of GPUs that each hold a copy."""
    regathers: bool = False
    """True: weights are freed after the forward pass and gathered again for the backward pass."""
    keeps: float = 0.0
    """Weights that are not freed then."""
    keeps_head: bool = False
    """True: the output head and the norm before it are not freed either."""
    reduces_each_micro_batch: bool = False
    """True: gradients are summed over the GPUs after each micro-batch; False: after the last one of a step."""
    scatters_gradients: bool = False
    """True: a reduce-scatter within the group, each GPU receives its shard; False: an all-reduce over all GPUs."""
    overlap: float = 0.9
    """Share of the computation that can hide communication."""
    weight_bytes: int = 2
    """Bytes of a gathered weight."""
    gradient_bytes: int = 4
    """Bytes of a gradient when it is sent."""
    bucket_bytes: float = 25e6
    """Bytes of one message of unsharded gradients; sharded ones are sent block by block."""
    casts_weights: bool = False
    """True: fp32 weights are cast in each micro-batch (autocast)."""
    offloads_moments: bool = False
    """True: fp32 weights and moments are in host memory, where the CPU updates them."""
    offloads_weights: bool = False
    """True: weights are in host memory between their uses."""

    @property
    def group(self) -> int:
        """GPUs that share one copy of what is sharded."""
        return max(self.weight_shards, self.gradient_shards, self.moment_shards)

    @property
    def processes(self) -> int:
        return self.group * self.replicas


@dataclass(frozen=True)
class Recomputed:
    """Shares of a block's forward pass that are computed a second time for the backward pass."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0


RECOMPUTED = {"no": Recomputed(), "selective": Recomputed(elementwise=1.0), "yes": Recomputed(1.0, 1.0, 1.0)}
"""Recomputation by value of model.gradient_checkpointing; selective keeps the results of all products and of attention."""


@dataclass(frozen=True)
class Work:
    """One optimizer step of one GPU."""

    length: int
    """Tokens of a row."""
    rows: int
    """Rows of a micro-batch."""
    accumulation: int = 1
    """Micro-batches of a step."""
    recomputed: Recomputed = field(default_factory=Recomputed)
    compiled: bool = False
    compute: str = "bfloat16"
    """Dtype of the products: bfloat16, float16, tf32, float32 or fp8."""
    parts: int = 1
    """GPUs that share each row."""
    layer_parts: int = 1
    """GPUs that share each layer."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU."""
        return -(-self.length // self.parts) * self.rows


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


@dataclass(frozen=True)
class Communication:
    """Messages of a step."""

    during: tuple[tuple[float, float, float], ...]
    """(times per step, seconds, number of messages that these are made of) of what computation can hide."""
    after_update: float
    """Seconds of what follows the update, hidden by nothing."""
    bytes_sent: float
    network_bytes: float


def communication(
    shape: Shape, gpu: Gpu, layout: Layout, micro_batches: int, network: float, c: dict[str, float]
) -> Communication:
    """Collectives of an optimizer step: their time one after the other, and bytes sent."""
    processes, total = layout.processes, shape.parameters
    if processes == 1:
        return Communication((), 0.0, 0.0, 0.0)
    sums = micro_batches if layout.reduces_each_micro_batch else 1
    weights, gradients = float(layout.weight_bytes * total), float(layout.gradient_bytes * total)
    net = _Network(gpu, network, c)
    each = during = 0.0  # seconds that every micro-batch takes, and that only those with a sum take
    pieces = float(shape.layers)
    sent = wire = 0.0
    if layout.weight_shards > 1:
        kept = layout.keeps + layout.keeps_head * (shape.head_parameters + shape.hidden)
        gathers = 1 + layout.regathers * max(0.0, 1 - kept / total)
        each = gathers * net.ring(weights, layout.weight_shards, pieces)
        part = micro_batches * gathers * weights * _share(layout.weight_shards)
        sent, wire = sent + part, wire + net.leaves(part, layout.weight_shards)
    if layout.scatters_gradients:
        during = net.ring(gradients, layout.gradient_shards, pieces)
        part = sums * gradients * _share(layout.gradient_shards)
        sent, wire = sent + part, wire + net.leaves(part, layout.gradient_shards)
        if layout.replicas > 1:
            own = gradients / layout.gradient_shards
            during += net.between_groups(own, layout.gradient_shards, layout.replicas, pieces)
            part = sums * 2 * own * _share(layout.replicas)
            sent += part
            wire += part * min(layout.gradient_shards, gpu.per_machine) if processes > gpu.per_machine else 0.0
    else:
        pieces = max(1.0, math.ceil(gradients / layout.bucket_bytes))
        during = net.all_reduce(gradients, processes, pieces)
        part = sums * 2 * gradients * _share(processes)
        sent, wire = sent + part, wire + net.leaves(part, processes)
    after = 0.0
    if layout.moment_shards > 1 and layout.weight_shards == 1:
        after = net.ring(weights, layout.moment_shards, 1.0)
        part = weights * _share(layout.moment_shards)
        sent, wire = sent + part, wire + net.leaves(part, layout.moment_shards)
    messages = [(float(sums), each + during, pieces)]
    if each and micro_batches > sums:
        messages.append((float(micro_batches - sums), each, pieces))
    return Communication(tuple(messages), after, sent, wire)


@dataclass(frozen=True)
class Exchanges:
    """Messages of a step within its layers, where rows or layers are shared; nothing hides them."""

    seconds: float
    bytes_sent: float


def exchanges(shape: Shape, gpu: Gpu, layout: Layout, work: Work, c: dict[str, float]) -> Exchanges:
    """Messages of rows or layers in parts, within a machine (docs/guides/strategies.md).

    Rows in parts exchange queries, keys, values and outputs of attention. Layers in parts sum the outputs of attention and
    feed-forward module, and the gradients of their inputs; embedding and head the embedded tokens, the gradient of the last
    hidden states, and three numbers for the loss of each token.
    """
    found = Exchanges(0.0, 0.0)
    if work.layer_parts > 1:
        others, share = work.layer_parts - 1, 2 * _share(work.layer_parts)
        width = 4 if work.compute in ("float32", "tf32") else 2
        of_weights = 4 if layout.casts_weights else width  # autocast: inputs of the modules are in float32
        sums = (2 + bool(work.recomputed.elementwise)) * width + 2 * of_weights
        sent = shape.layers * work.tokens * shape.hidden * sums * share
        hops = (4 + bool(work.recomputed.elementwise)) * shape.layers * 2 * others
        if shape.vocab_in_parts:
            sent += work.tokens * (shape.hidden * (of_weights + width) * share + 12 * others)
            hops += 5 * others
        sent, hops = work.accumulation * sent, work.accumulation * hops
        found = Exchanges(sent / gpu.ring_bandwidth + hops * c["hop"], sent)
    if work.parts == 1:
        return found
    keys = max(shape.kv_heads, work.parts) * shape.head_size  # fewer heads than parts are repeated
    width = 4 if work.compute in ("float32", "tf32") else 2
    passes = 3 if work.recomputed.elementwise else 2  # forward, once more where results are recomputed, backward
    times = work.accumulation * passes * shape.layers
    sent = times * work.tokens * 2 * (shape.queries + keys) * width * _share(work.parts)
    seconds = sent / gpu.ring_bandwidth + 4 * times * c["hop"] * (work.parts - 1)
    return Exchanges(found.seconds + seconds, found.bytes_sent + sent)


def _share(count: int) -> float:
    """Share of a tensor that each of `count` GPUs sends in one round of a ring."""
    return (count - 1) / count


class _Network:
    """Links within a machine and between machines; seconds of collectives over them (docs/planning.md)."""

    def __init__(self, gpu: Gpu, network: float, c: dict[str, float]) -> None:
        self.per_machine, self.inside = gpu.per_machine, gpu.ring_bandwidth
        self.link = network * NETWORK_EFFICIENCY
        self.outside = min(self.inside, gpu.per_machine * self.link)
        self.hop, self.far_hop = c["hop"], c["far_hop"]

    def ring(self, size: float, count: int, pieces: float) -> float:
        """Seconds of an all-gather or a reduce-scatter of `size` bytes in `pieces` messages."""
        if count <= 1:
            return 0.0
        is_near = count <= self.per_machine
        bandwidth, hop = (self.inside, self.hop) if is_near else (self.outside, self.far_hop)
        return size * _share(count) / bandwidth + pieces * hop * (count - 1)

    def all_reduce(self, size: float, count: int, pieces: float) -> float:
        """Seconds of an all-reduce: by rings, or by trees between machines where these are faster."""
        rings = 2 * self.ring(size, count, pieces)
        if count <= self.per_machine:
            return rings
        hops = 2 * math.log2(count / self.per_machine) * self.far_hop + 2 * (self.per_machine - 1) * self.hop
        return min(rings, 2 * size / self.outside + pieces * hops)

    def between_groups(self, size: float, shards: int, replicas: int, pieces: float) -> float:
        """Seconds of all-reduces of a shard over the groups, each GPU over its own link."""
        if shards * replicas <= self.per_machine:
            return 2 * self.ring(size, replicas, pieces)
        rings = 2 * size * _share(replicas) / self.link + pieces * 2 * self.far_hop * (replicas - 1)
        return min(rings, 2 * size / self.link + pieces * 2 * math.log2(replicas) * self.far_hop)

    def leaves(self, sent: float, count: int) -> float:
        """Bytes that leave a machine when each GPU of a ring sends `sent`: the ring has one way out of each machine."""
        return sent if count > self.per_machine else 0.0


NETWORK_EFFICIENCY = 0.85
"""Share of a link's data rate that NCCL reaches (stas00/ml-engineering, network/benchmarks/README.md)."""
BUS, HOST_UPDATE = 25e9, 12e9
"""Bytes per second: of a GPU's PCIe bus, and of AdamW's 28 bytes per weight on a machine's CPUs.

The second is set so that the one published run with an offload whose table is consistent is met; an order of magnitude.
"""


def offload_seconds(shape: Shape, gpu: Gpu, layout: Layout, micro_batches: int) -> float:
    """Seconds of an optimizer step spent on the bus and in the CPU's update; computation hides none of it."""
    bytes_on_bus = 0.0
    if layout.offloads_moments:
        sums = micro_batches if layout.reduces_each_micro_batch else 1
        bytes_on_bus += sums * layout.gradient_bytes * shape.parameters / layout.gradient_shards
        bytes_on_bus += layout.weight_bytes * shape.parameters / layout.moment_shards
    if layout.offloads_weights:
        gathers = 2 if layout.regathers else 1
        bytes_on_bus += micro_batches * gathers * layout.weight_bytes * shape.parameters / layout.weight_shards
    on_machine = min(layout.processes, gpu.per_machine)
    on_cpu = 28 * shape.parameters / layout.moment_shards * on_machine if layout.offloads_moments else 0.0
    return bytes_on_bus / BUS + on_cpu / HOST_UPDATE
