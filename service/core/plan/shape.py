"""A model as the cost model sees it: elements of its parts and sizes of its products. Neither devices nor layouts.

Parameters and FLOPs agree with `workers.flops`, which tests hold.
"""

from __future__ import annotations

import dataclasses
import functools

from workers.models.spec import ModelSpec
from workers.spec import BYTE_VOCABULARY


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    count: int
    top_k: int
    hidden: int
    shared: int
    first_dense: int


@dataclasses.dataclass(frozen=True, slots=True)
class Latent:
    query: int
    key_value: int
    plain: int
    rotary: int
    value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq_len: int
    gated: bool = True
    dropout: bool = False
    tied: bool = False
    positions: bool = False  # learned ones: rows of an embedding
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def query_dim(self) -> int:
        return self.latent.plain + self.latent.rotary if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.latent.value if self.latent else self.head_dim

    @property
    def dense_layers(self) -> int:
        """At the model's beginning."""
        return self.experts.first_dense if self.experts else self.layers

    @property
    def attention(self) -> int:
        """Elements of a layer's attention matrices."""
        if latent := self.latent:
            down = latent.query + latent.key_value + latent.rotary
            up = self.query_dim * (latent.query or self.hidden) + (latent.plain + latent.value) * latent.key_value
            return self.hidden * down + self.heads * (up + latent.value * self.hidden)
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def matrices(self) -> int:
        """Of a feed-forward network."""
        return 3 if self.gated else 2

    @property
    def dense(self) -> int:
        """Elements of a dense layer, the few of its norms and biases left out."""
        return self.attention + self.matrices * self.hidden * self.ffn

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden + (self.seq_len * self.hidden if self.positions else 0)

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        total = self.dense_layers * self.dense + self.head
        if experts := self.experts:
            sparse = self.attention + 3 * self.hidden * (experts.count * experts.hidden + experts.shared)
            total += (self.layers - experts.first_dense) * (sparse + self.hidden * experts.count)
        return total + (0 if self.tied else self.embedding)

    def flops(self, causal: bool = False) -> float:
        """Model FLOPs of one token, forward and backward; all scores count, or half of them."""
        active = self.dense_layers * self.dense + self.head
        if experts := self.experts:
            one = self.attention + 3 * self.hidden * (experts.top_k * experts.hidden + experts.shared)
            active += (self.layers - experts.first_dense) * (one + self.hidden * experts.count)
        seen = self.seq_len / 2 if causal else self.seq_len
        return 6.0 * (active + self.layers * self.heads * (self.query_dim + self.value_dim) * seen)


@functools.lru_cache(maxsize=256)
def of(model: ModelSpec) -> Shape:
    experts = latent = None
    if spec := model.experts:
        experts = Experts(spec.count, spec.top_k, spec.hidden, spec.shared, spec.first_dense)
    if parts := model.latent:
        latent = Latent(parts.query, parts.key_value, parts.plain, parts.rotary, parts.value)
    return Shape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn=model.ffn_hidden,
        vocab=model.vocab_size or BYTE_VOCABULARY,
        seq_len=model.seq_len,
        gated=model.activation == "swiglu",
        dropout=model.dropout > 0,
        tied=model.tied_embedding,
        positions=model.positions == "learned",
        experts=experts,
        latent=latent,
    )
