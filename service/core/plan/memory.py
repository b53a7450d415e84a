"""Bytes on one rank's device: parameters, gradients, optimizer, activations, logits and what the framework takes.

Activations follow "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), for grouped
heads, gated networks and experts too: what each operator keeps of its inputs for its backward pass.
"""

from __future__ import annotations

import dataclasses

from service.core.plan.layout import Layout
from service.core.plan.shape import Shape
from service.core.plan.stack import Kind, Stack
from service.core.plan.stages import Held


@dataclasses.dataclass(frozen=True, slots=True)
class Bytes:
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    overhead: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.overhead


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of activations: of a layer and micro-batch, dense or with experts; and of the layer being recomputed."""

    dense: float
    sparse: float
    whole: float


def parameters(shape: Shape, layout: Layout, held: Held) -> tuple[float, float]:
    """Elements on one rank before sharding: those that all of dp has, and those of experts."""
    tp, hidden = layout.tp, shape.hidden
    vectors = (8 if shape.dropout else 2) * hidden
    attention = _attention_parameters(shape, tp)
    common = held.dense * (attention + shape.matrices * hidden * shape.ffn / tp + vectors)
    routed = 0.0
    if held.sparse and (experts := shape.experts):
        common += held.sparse * (attention + vectors + hidden * experts.count + 3 * hidden * experts.shared / tp)
        routed = held.sparse * 3.0 * hidden * experts.hidden * experts.count / layout.ep / layout.expert_tp
    if held.first:
        common += shape.vocab * hidden / tp + (shape.seq_len * hidden if shape.positions else 0)
    if held.last and not (shape.tied and held.first):
        common += shape.vocab * hidden / tp
    return common, routed


def _attention_parameters(shape: Shape, tp: int) -> float:
    if shape.latent:
        latent = shape.latent
        down = shape.hidden * (latent.query + latent.key_value + latent.rotary)
        return down + (shape.attention - down) / tp
    return 2 * shape.hidden * shape.head_dim * (shape.heads / tp + max(1.0, shape.kv_heads / tp))


def states(stack: Stack, layout: Layout, common: float, routed: float) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer."""
    zero = layout.zero
    shards = layout.dp * layout.cp / layout.replicate
    copies = max(1.0, shards * layout.tp / (layout.ep * layout.expert_tp))
    share = common / shards + routed / copies
    all_ = common + routed
    weights = stack.weight_bytes * (share if zero >= 3 else all_)
    gradients = stack.gradient_bytes * (share if zero >= 2 else all_)
    optimizer = stack.optimizer_bytes * (share if zero >= 1 else all_)
    if stack.sharded_weights and zero == 1:  # gradients are in shards beside whole ones while they are reduced
        gradients += stack.gradient_bytes * share
    return weights, gradients, optimizer


def kept(shape: Shape, layout: Layout, stack: Stack) -> Kept:
    """What a micro-batch leaves on a rank."""
    whole = 0.0
    if layout.recompute in ("full", "inner"):
        whole = _layer(shape, layout, stack, shape.experts is not None, "none")
    return Kept(
        dense=_layer(shape, layout, stack, False, layout.recompute),
        sparse=_layer(shape, layout, stack, True, layout.recompute) if shape.experts else 0.0,
        whole=whole,
    )


def _layer(shape: Shape, layout: Layout, stack: Stack, sparse: bool, recompute: str) -> float:
    tokens = layout.micro_batch * shape.seq_len / layout.cp
    tp = layout.tp
    outside = 2 * tokens * shape.hidden / (tp if layout.sequence_parallel else 1)  # bytes of a layer's input
    heads = shape.heads / tp
    pairs = heads if shape.latent else max(1.0, shape.kv_heads / tp)
    qkv = 2 * tokens * (heads * shape.query_dim + pairs * (shape.query_dim + shape.value_dim))
    out = 2 * tokens * heads * shape.value_dim
    products, network = _network(shape, layout, tokens, sparse)
    masks = outside if shape.dropout else 0.0
    match recompute:
        case "inner":  # what enters the norms, attention and the network
            return 4 * outside + masks
        case "cheap":  # the layer's input and the results of products and attention
            return 2 * outside + qkv + out + products + outside
        case "half":
            return outside + (qkv + products + 2 * outside) / 2 + out
        case "full" if layout.recompute_share >= 1:
            return outside
    scores = 0.0
    if not stack.flash and recompute == "none":
        scores = 5 * layout.micro_batch * heads * shape.seq_len**2 / layout.cp
    free = 4 * outside + masks + qkv + out + scores + network
    if recompute == "full":
        return layout.recompute_share * outside + (1 - layout.recompute_share) * free
    return free


def _network(shape: Shape, layout: Layout, tokens: float, sparse: bool) -> tuple[float, float]:
    """Bytes inside the feed-forward network: results of its products alone, and all."""
    tp = layout.tp
    if sparse and (experts := shape.experts):
        routed = tokens / tp * experts.top_k
        inner = 2 * (tokens * experts.shared / tp + routed * experts.hidden)
        moved = 4 * routed * shape.hidden  # rows sent to experts, and what came back
        return 2 * inner + moved, 3 * inner + moved
    inner = 2 * tokens * shape.ffn / tp
    return (2 * inner, 3 * inner) if shape.gated else (inner, 2 * inner)


def rank(
    shape: Shape, layout: Layout, stack: Stack, held: Held, elements: tuple[float, float], per: Kept, flight: float,
    counted: Kind,
) -> Bytes:  # fmt: skip
    """Of one pipeline rank with `flight` micro-batches at once; `counted`: by the driver, or by the allocator."""
    common, routed = elements
    weights, gradients, optimizer = states(stack, layout, common, routed)
    tokens = layout.micro_batch * shape.seq_len / layout.cp
    outside = tokens * shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    activations = flight * (held.dense * per.dense + held.sparse * per.sparse) + per.whole
    if held.first and shape.dropout:
        activations += flight * outside  # the embedding's mask
    logits = stack.logit_bytes * tokens * shape.vocab / layout.tp + 4 * outside if held.last else 0.0
    if layout.zero >= 3:  # two layers are whole at once
        layer = (common + routed) / max(1, held.dense + held.sparse)
        weights += 2 * layer * stack.weight_bytes
        gradients += layer * stack.gradient_bytes
    overhead = (stack.reserve_gb if counted == "nvidia-smi" else stack.peak_gb) * 1e9
    return Bytes(weights, gradients, optimizer, activations, logits, overhead)
