"""Communication of a step, predicted: messages of the engine, of rows or layers in parts, and of offload.

A ring sends (k - 1) / k of a tensor over k GPUs (NVIDIA nccl-tests, doc/PERFORMANCE.md) and waits for k - 1 hops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from acc_lm.planning.hardware import Gpu
from acc_lm.planning.shapes import Layout, Shape, Work


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
