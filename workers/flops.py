"""How much arithmetic a model is: parameters, and model FLOPs a token of training. Knows neither devices nor layouts.

The convention is that of PaLM (arXiv 2204.02311, appendix B) and, without recomputation, of Megatron-LM (2104.04473,
equation 3): a multiply-add is 2 FLOPs, the backward pass twice the forward, only matrix products count. The head is
one, looking up the embedding is none. What is recomputed never counts: the figure says what was learnt, not spent.

Of attention's scores PaLM counts all, also those above the diagonal that no kernel need compute: `full`, the default,
since published MFU is mostly that. `causal` counts half of them, as Megatron-LM does today; it is never the larger.
"""

from __future__ import annotations

from typing import Literal

from workers.spec import ModelSpec

Attention = Literal["full", "causal"]


def parameters(model: ModelSpec, vocabulary: int) -> int:
    """Of the whole model, embedding and head included, once where they are tied; `vocabulary` is their rows."""
    norms = (2 * model.layers + 1) * model.hidden
    embedding = 0 if model.tied_embedding else vocabulary * model.hidden
    return embedding + norms + _multiplied(model, vocabulary)


def per_token(model: ModelSpec, vocabulary: int, seq_len: int, attention: Attention = "full") -> float:
    """Model FLOPs, forward and backward, of one token in samples of `seq_len`."""
    seen = seq_len if attention == "full" else seq_len / 2
    scores = 2 * model.layers * model.heads * model.head_dim * seen  # queries by keys, then weights by values
    return 3 * 2 * (_multiplied(model, vocabulary) + scores)


def _multiplied(model: ModelSpec, vocabulary: int) -> int:
    """Elements of the matrices that every token is multiplied by."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 2 * model.hidden * queries + 2 * model.hidden * keys
    return model.layers * (attention + 3 * model.hidden * model.ffn_hidden) + vocabulary * model.hidden
