"""How much arithmetic a model is: parameters, and model FLOPs a token of training. Knows neither devices nor layouts.

The convention is that of PaLM (arXiv 2204.02311, appendix B) and, without recomputation, of Megatron-LM (2104.04473,
equation 3): a multiply-add is 2 FLOPs, the backward pass twice the forward, only matrix products count. The head is
one, looking up the embedding or a position is none, nor are norms, biases and dropout. Of experts those count that a
token goes to, beside the shared one and the router. What is recomputed never counts: the figure says what was learnt,
not spent.

Of attention's scores PaLM counts all, also those above the diagonal that no kernel need compute: `full`, the default,
since published MFU is mostly that. `causal` counts half of them, as Megatron-LM does today; it is never the larger.
"""

from __future__ import annotations

from typing import Literal

from workers.models.spec import ModelSpec

Attention = Literal["full", "causal"]


def parameters(model: ModelSpec, vocabulary: int) -> int:
    """Of the whole model, embedding and head included, once where they are tied; `vocabulary` is their rows."""
    return _held(model, vocabulary, model.experts.count if model.experts else 0)


def active_parameters(model: ModelSpec, vocabulary: int) -> int:
    """Those that one token meets: all, but of each layer's experts only the chosen. Embedding and head count whole."""
    return _held(model, vocabulary, model.experts.top_k if model.experts else 0)


def per_token(model: ModelSpec, vocabulary: int, seq_len: int, attention: Attention = "full") -> float:
    """Model FLOPs, forward and backward, of one token in samples of `seq_len`."""
    seen = seq_len if attention == "full" else seq_len / 2
    multiplied = _matrices(model, vocabulary, model.experts.top_k if model.experts else 0)
    passes = 2 if model.lora else 3  # of the matrices; what stays as it is has no gradient of its own
    return 2 * (passes * multiplied + 3 * model.layers * model.heads * sum(_head(model)) * seen)


def head(model: ModelSpec, vocabulary: int) -> float:
    """The head's model FLOPs over those of a mean layer."""
    own = 3 * 2 * vocabulary * model.hidden
    return own * model.layers / (per_token(model, vocabulary, model.seq_len) - own)


def _head(model: ModelSpec) -> tuple[int, int]:
    """Sizes of a head's query and value: what its scores and then their sums multiply."""
    if latent := model.latent:
        return latent.plain + latent.rotary, latent.value
    return model.head_dim, model.head_dim


def _held(model: ModelSpec, vocabulary: int, experts: int) -> int:
    """Elements of the parameters, with so many experts a layer."""
    embedding = 0 if model.tied_embedding else vocabulary * model.hidden
    positions = model.seq_len * model.hidden if model.positions == "learned" else 0
    return _matrices(model, vocabulary, experts) + embedding + positions + _vectors(model)


def _matrices(model: ModelSpec, vocabulary: int, experts: int) -> int:
    """Elements of the matrices that a token is multiplied by, with so many experts a layer."""
    layers = model.layers * _attention(model)
    for inner, many in _networks(model):
        layers += many * _gates(model) * model.hidden * inner
    if spec := model.experts:
        one = 3 * model.hidden * spec.hidden
        layers += (model.layers - spec.first_dense) * (experts * one + model.hidden * spec.count)
    return layers + vocabulary * model.hidden


def _attention(model: ModelSpec) -> int:
    if latent := model.latent:
        query, _ = _head(model)
        down = latent.query + latent.key_value + latent.rotary
        up = query * (latent.query or model.hidden) + (latent.plain + latent.value) * latent.key_value
        return model.hidden * down + model.heads * (up + latent.value * model.hidden)
    return 2 * model.hidden * model.head_dim * (model.heads + model.kv_heads)


def _networks(model: ModelSpec) -> list[tuple[int, int]]:
    """(inner size, layers) of the feed-forward networks that every token goes through."""
    if spec := model.experts:
        return [
            (model.ffn_hidden, spec.first_dense),
            (spec.shared, (model.layers - spec.first_dense) * bool(spec.shared)),
        ]
    return [(model.ffn_hidden, model.layers)]


def _gates(model: ModelSpec) -> int:
    """Matrices of a feed-forward network."""
    return 3 if model.activation == "swiglu" else 2


def _vectors(model: ModelSpec) -> int:
    """Elements of norms and biases."""
    norms = (2 * model.layers + 1) * model.hidden * (2 if model.norm == "layer" else 1)
    latent = model.layers * (model.latent.query + model.latent.key_value) if model.latent else 0
    heads = 2 * model.layers * model.head_dim if model.qk_norm else 0
    biases = 0 if model.bias == "none" else model.layers * model.head_dim * (model.heads + 2 * model.kv_heads)
    if model.bias == "all":
        biases += model.layers * model.hidden
        biases += sum(many * ((_gates(model) - 1) * inner + model.hidden) for inner, many in _networks(model))
    return norms + latent + heads + biases
