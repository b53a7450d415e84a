"""Seconds of one layer's passes on one rank, by what takes them. Knows a rank's part of a layer, no pipeline.

A pass: `forward`; `inputs` and `weights`, the two halves of the backward one; `again`, what recomputation adds to it.
"""

from __future__ import annotations

import dataclasses

from service.core.plan import network
from service.core.plan.cluster import Cluster
from service.core.plan.kernels import Device
from service.core.plan.layout import Layout
from service.core.plan.network import Bus
from service.core.plan.shape import Shape
from service.core.plan.stack import Stack

FORWARD_KERNELS, BACKWARD_KERNELS = 16, 28
"""Of a fused layer, attention included; the rest is the stack's factor."""

OUTSIDE_FORWARD, OUTSIDE_BACKWARD = 20, 24
"""Bytes moved for each element of a layer's two norms and two sums with the residual; 2 more with dropout's masks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launch: float = 0.0
    tp: float = 0.0
    ep: float = 0.0
    cp: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.memory + self.launch + self.tp + self.ep + self.cp

    @property
    def by_kind(self) -> tuple[float, ...]:
        return (self.products, self.attention, self.memory, self.launch, self.tp, self.ep, self.cp)

    def scaled(self, by: float) -> Pass:
        return Pass(*(value * by for value in self.by_kind))


NOTHING = Pass()
KINDS = tuple(field.name for field in dataclasses.fields(Pass))


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    forward: Pass = NOTHING
    inputs: Pass = NOTHING
    weights: Pass = NOTHING
    again: Pass = NOTHING


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """What a layer's costs depend on: one rank's device, its groups and its part of a micro-batch."""

    shape: Shape
    layout: Layout
    device: Device
    cluster: Cluster
    tp: Bus
    tokens: float  # of a micro-batch, on this rank's cp part

    @property
    def outside(self) -> float:
        """Tokens between the tensor-parallel parts."""
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)


def layer(rank: Rank, sparse: bool) -> Passes:
    """One layer with experts, or a dense one."""
    products = _attention_products(rank) + (_expert_products(rank) if sparse else _dense_products(rank))
    forward, inputs, weights = _products(rank.device, products)
    attention = _attention(rank)
    memory = _memory(rank, sparse)
    stack = rank.device.stack
    kernels = len(products) - 4
    tp = _tensor_parallel(rank)
    ep = _expert_parallel(rank) if sparse else 0.0
    cp = _context_parallel(rank)
    ahead = _launched(stack, Pass(forward, attention[0], memory[0], 0.0, tp[0], ep, cp), FORWARD_KERNELS + kernels)
    back = Pass(inputs, attention[1], memory[1], 0.0, tp[1], ep, 2 * cp)
    return Passes(
        forward=ahead,
        inputs=_launched(stack, back, BACKWARD_KERNELS + kernels),
        weights=_launched(stack, Pass(products=weights), len(products)),
        again=_again(stack, rank.layout, ahead, FORWARD_KERNELS + kernels),
    )


GAP_S = 1.5e-6
"""Between one kernel and the next, where the host is ahead of the device."""


def _launched(stack: Stack, work: Pass, kernels: float) -> Pass:
    """The host launches kernels one after the other: where they are short, the device waits for it."""
    many = kernels * stack.kernels
    if stack.blocking:
        return dataclasses.replace(work, launch=stack.rates.launch_s * many)
    launch = GAP_S * many + max(0.0, stack.rates.launch_s * many - work.seconds)
    return dataclasses.replace(work, launch=launch)


def _again(stack: Stack, layout: Layout, forward: Pass, kernels: float) -> Pass:
    """`kernels`: of the forward pass."""
    match layout.recompute:
        case "none":
            return NOTHING
        case "attention":
            again = _launched(stack, Pass(attention=forward.attention), kernels / 4)
        case "cheap":
            again = _launched(stack, Pass(memory=forward.memory), kernels / 2)
        case "half":
            again = _launched(stack, Pass(products=forward.products / 2, memory=forward.memory), kernels / 2)
        case "inner":
            again = _launched(stack, dataclasses.replace(forward, tp=0.0, launch=0.0), kernels)
        case "full":
            again = forward
    return again.scaled(layout.recompute_share)


Product = tuple[float, float, float, float]
"""m, n, k and how many of them at once."""


def _products(device: Device, products: list[Product]) -> tuple[float, float, float]:
    """Forward, back to the inputs, and to the weights."""
    forward = sum(device.product_s(m, n, k, count) for m, n, k, count in products)
    inputs = sum(device.product_s(m, k, n, count) for m, n, k, count in products)
    weights = sum(device.product_s(n, k, m, count) for m, n, k, count in products)
    return forward, inputs, weights


def _attention_products(rank: Rank) -> list[Product]:
    shape, tp, tokens = rank.shape, rank.layout.tp, rank.tokens
    if latent := shape.latent:
        small = rank.outside
        query = [(small, latent.query, shape.hidden, 1.0)] if latent.query else []
        return [
            *query,
            (tokens, shape.heads * shape.query_dim / tp, latent.query or shape.hidden, 1.0),
            (small, latent.key_value + latent.rotary, shape.hidden, 1.0),
            (tokens, shape.heads * (latent.plain + latent.value) / tp, latent.key_value, 1.0),
            (tokens, shape.hidden, shape.heads * latent.value / tp, 1.0),
        ]
    heads = shape.heads / tp + 2 * max(1.0, shape.kv_heads / tp)
    return [
        (tokens, heads * shape.head_dim, shape.hidden, 1.0),
        (tokens, shape.hidden, shape.heads * shape.head_dim / tp, 1.0),
    ]


def _dense_products(rank: Rank) -> list[Product]:
    return _network(rank.shape, rank.tokens, rank.shape.ffn / rank.layout.tp, rank.shape.matrices)


def _network(shape: Shape, tokens: float, inner: float, matrices: int, count: float = 1.0) -> list[Product]:
    return [(tokens, (matrices - 1) * inner, shape.hidden, count), (tokens, shape.hidden, inner, count)]


def _expert_products(rank: Rank) -> list[Product]:
    experts, layout = rank.shape.experts, rank.layout
    assert experts is not None
    here = experts.count / layout.ep
    routed = _routed(rank) * layout.expert_tp / here
    found = _network(rank.shape, routed, experts.hidden / layout.expert_tp, 3, here)
    if experts.shared:
        found += _network(rank.shape, rank.tokens, experts.shared / layout.tp, 3)
    return [*found, (rank.tokens / layout.tp, experts.count, rank.shape.hidden, 1.0)]


def _routed(rank: Rank) -> float:
    """Tokens that a rank sends to experts, once for each expert."""
    assert rank.shape.experts is not None
    return rank.tokens / rank.layout.tp * rank.shape.experts.top_k


def _attention(rank: Rank) -> tuple[float, float]:
    shape, layout = rank.shape, rank.layout
    queries = rank.tokens / layout.micro_batch
    dims = (shape.query_dim, shape.value_dim)
    return rank.device.attention_s(layout.micro_batch, shape.heads / layout.tp, queries, shape.seq_len, dims)


def _memory(rank: Rank, sparse: bool) -> tuple[float, float]:
    """Of norms, sums, rotations and activations: forward and backward."""
    shape, tp = rank.shape, rank.layout.tp
    masks = 2 if shape.dropout else 0
    hidden = rank.outside * shape.hidden
    turned = rank.tokens * (shape.heads + 2 * shape.kv_heads) * shape.query_dim / tp
    forward = hidden * (OUTSIDE_FORWARD + masks) + 4 * turned
    backward = hidden * (OUTSIDE_BACKWARD + masks) + 4 * turned
    if sparse and (experts := shape.experts):
        routed, inner = _routed(rank), rank.tokens * experts.shared / tp
        inner += routed * experts.hidden
        forward += 8 * routed * shape.hidden + 6 * inner
        backward += 8 * routed * shape.hidden + 10 * inner
    else:
        inner = rank.tokens * shape.ffn / tp
        forward += inner * (6 if shape.gated else 4)
        backward += inner * (10 if shape.gated else 6)
    device = rank.device
    return device.move_s(forward) * device.stack.traffic, device.move_s(backward) * device.stack.traffic


def _tensor_parallel(rank: Rank) -> tuple[float, float]:
    """Two all-reduces a pass, or as much in gathers and scatters; what the stack hides is gone. Overlaps of the forward
    pass write into other GPUs' memory, which ends with the NVLink domain."""
    if rank.layout.tp == 1:
        return 0.0, 0.0
    seconds = 2 * rank.tp.all_reduce_s(2 * rank.tokens * rank.shape.hidden)
    forward, backward = rank.device.stack.tp_hidden
    if not rank.cluster.in_domain(rank.layout.tp, 1):
        forward = 0.0
    return seconds * (1 - forward), seconds * (1 - backward)


DUALPIPE_SHOWN = 0.2
"""Share of the exchange of experts that another micro-batch's work does not hide."""


def _expert_parallel(rank: Rank) -> float:
    """There and back: every copy of a token on its own."""
    layout = rank.layout
    bytes_ = 2 * _routed(rank) * rank.shape.hidden
    stride = 1 if layout.expert_tp == 1 else layout.tp
    seconds = 2 * network.all_to_all_s(rank.cluster, rank.device.stack, bytes_, layout.ep, stride)
    if layout.expert_tp > 1:
        seconds += rank.tp.all_reduce_s(bytes_ * layout.expert_tp)
    return seconds * (DUALPIPE_SHOWN if layout.schedule == "dualpipe" else 1.0)


def _context_parallel(rank: Rank) -> float:
    """Keys and values go round; what attention hides is gone."""
    layout, shape = rank.layout, rank.shape
    if layout.cp == 1:
        return 0.0
    kv = 2 * rank.tokens * max(1.0, shape.kv_heads / layout.tp) * (shape.query_dim + shape.value_dim)
    around = network.bus(rank.cluster, rank.device.stack, layout.cp, layout.tp)
    return around.all_gather_s(kv * layout.cp) * (1 - rank.device.stack.cp_hidden)


def embedding(rank: Rank) -> Passes:
    """The look-up: traffic, and one collective of tp."""
    moved = rank.device.move_s(6 * rank.outside * rank.shape.hidden)
    tp = rank.tp.all_gather_s(2 * rank.tokens * rank.shape.hidden) if rank.layout.tp > 1 else 0.0
    return Passes(forward=Pass(memory=moved, tp=tp), inputs=Pass(memory=moved))


def head(rank: Rank) -> Passes:
    """The last norm, the product with the vocabulary, and the loss of its logits."""
    shape, tp, device = rank.shape, rank.layout.tp, rank.device
    forward, inputs, weights = _products(device, [(rank.tokens, shape.vocab / tp, shape.hidden, 1.0)])
    logits = device.move_s(device.stack.loss_traffic * rank.tokens * shape.vocab / tp)
    gathered = rank.tp.all_gather_s(2 * rank.tokens * shape.hidden) if tp > 1 else 0.0
    return Passes(
        forward=Pass(products=forward, memory=logits / 2, tp=gathered),
        inputs=Pass(products=inputs, memory=logits / 2, tp=gathered),
        weights=Pass(products=weights),
    )
