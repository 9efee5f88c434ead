"""Numbers that a plan computes with: sizes of a model, its distribution over GPUs, and the work of a step.

A layout says what is sharded over how many GPUs; the names of strategies are known in `runtime` only. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from acc_lm.modeling.flops import flops_of


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
