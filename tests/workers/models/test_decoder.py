"""The decoder against its definition, written out head by head: causal, relative in its positions, equal if cut."""

from __future__ import annotations

import pytest
import torch

from workers.models.decoder import Decoder, initialise
from workers.models.parts import Rotary
from workers.parallel import pipeline
from workers.spec import ModelSpec, ParallelLayout

pytestmark = pytest.mark.torch

SPEC = ModelSpec(layers=3, hidden=24, heads=6, kv_heads=2, ffn_hidden=40, seq_len=12, rope_theta=100.0, init_std=0.3)
VOCABULARY = 31


def decoder(spec: ModelSpec = SPEC, seed: int = 1, **cut: object) -> Decoder:
    model = Decoder(spec, VOCABULARY, dtype=torch.float64, **cut)
    initialise(model, spec, seed)
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, SPEC.seq_len), generator=torch.Generator().manual_seed(3))


def by_hand(model: Decoder, spec: ModelSpec, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of one sample, from the papers: one head and one position at a time, rotations as complex numbers."""
    weights = dict(model.named_parameters())
    size, shared = spec.head_dim, spec.heads // spec.kv_heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean() + spec.norm_eps).sqrt() * weights[f"{name}.weight"]

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        pairs = torch.complex(x[: size // 2], x[size // 2 :])
        turn = position * spec.rope_theta ** (-torch.arange(size // 2, dtype=torch.float64) * 2 / size)
        turned = pairs * torch.polar(torch.ones_like(turn), turn)
        return torch.cat((turned.real, turned.imag))

    def attended(rows: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        def head(kind: str, number: int, x: torch.Tensor) -> torch.Tensor:
            return weights[f"{name}.{kind}.weight"][number * size : (number + 1) * size] @ x

        out = []
        for here, x in enumerate(rows):
            mixed = []
            for number in range(spec.heads):
                query = rotated(head("wq", number, x), here)
                seen = rows[: here + 1]
                keys = [rotated(head("wk", number // shared, row), at) for at, row in enumerate(seen)]
                values = [head("wv", number // shared, row) for row in seen]
                scores = torch.stack([query @ key / size**0.5 for key in keys]).exp()
                mixed.append(sum(s * value for s, value in zip(scores / scores.sum(), values, strict=True)))
            out.append(weights[f"{name}.wo.weight"] @ torch.cat(mixed))
        return out

    def fed(x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = weights[f"{name}.gate.weight"] @ x, weights[f"{name}.up.weight"] @ x
        return weights[f"{name}.down.weight"] @ (gate / (1 + (-gate).exp()) * up)

    rows = [weights["embedding.weight"][token] for token in tokens]
    for layer in range(spec.layers):
        name = f"layers.{layer}"
        normed = [norm(x, f"{name}.attention_norm") for x in rows]
        rows = [x + out for x, out in zip(rows, attended(normed, f"{name}.attention"), strict=True)]
        rows = [x + fed(norm(x, f"{name}.ffn_norm"), f"{name}.ffn") for x in rows]
    return torch.stack([weights["head.weight"] @ norm(x, "norm") for x in rows])


@torch.no_grad()
def test_the_forward_pass_is_the_one_of_the_papers(tokens: torch.Tensor) -> None:
    model = decoder()
    for parameter in model.parameters():  # norms that are not ones
        if parameter.ndim == 1:
            parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    logits = model(tokens)
    assert logits.shape == (2, SPEC.seq_len, VOCABULARY)
    for sample in range(2):
        torch.testing.assert_close(logits[sample], by_hand(model, SPEC, tokens[sample]), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_shared_key_heads_equal_repeated_ones(tokens: torch.Tensor) -> None:
    shared, full = decoder(), decoder(SPEC.model_copy(update={"kv_heads": SPEC.heads}))
    weights = dict(shared.named_parameters())
    for name, parameter in full.named_parameters():
        value = weights[name]
        if name.endswith(("wk.weight", "wv.weight")):
            heads = value.unflatten(0, (SPEC.kv_heads, SPEC.head_dim))
            value = heads.repeat_interleave(SPEC.heads // SPEC.kv_heads, 0).flatten(0, 1)
        parameter.copy_(value)
    torch.testing.assert_close(full(tokens), shared(tokens), rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("at", [1, 6, SPEC.seq_len - 1])
def test_no_token_sees_a_later_one(tokens: torch.Tensor, at: int) -> None:
    model = decoder()
    other = tokens.clone()
    other[:, at] = (other[:, at] + 1) % VOCABULARY
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at:] - after[:, at:]).abs().amax((0, 2)).min() > 1e-6  # all from there on do


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(SPEC.head_dim, SPEC.seq_len, SPEC.rope_theta, torch.float64)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(SPEC.head_dim, dtype=torch.float64, generator=generator) for _ in range(2))
    everywhere = [rotary(x.expand(1, SPEC.seq_len, 1, -1))[0, :, 0] for x in (query, key)]
    scores = everywhere[0] @ everywhere[1].T
    for distance in range(1 - SPEC.seq_len, SPEC.seq_len):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert len({round(float(scores[0, n]), 9) for n in range(SPEC.seq_len)}) == SPEC.seq_len


def test_a_rotation_keeps_length_and_the_first_position() -> None:
    x = torch.randn(2, SPEC.seq_len, 3, SPEC.head_dim, dtype=torch.float64)
    turned = Rotary(SPEC.head_dim, SPEC.seq_len, SPEC.rope_theta, torch.float64)(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])


def test_half_precision_keeps_its_dtype() -> None:
    x = torch.randn(1, 4, 2, SPEC.head_dim, dtype=torch.bfloat16)
    assert Rotary(SPEC.head_dim, SPEC.seq_len, SPEC.rope_theta, torch.float32)(x).dtype == torch.bfloat16
    logits = decoder().to(torch.bfloat16)(torch.zeros(1, 4, dtype=torch.int64))
    assert logits.dtype == torch.bfloat16


@pytest.mark.parametrize("stages", [1, 2, 3])
@torch.no_grad()
def test_stages_are_the_whole_cut_up(tokens: torch.Tensor, stages: int) -> None:
    whole = decoder()
    parts = [
        decoder(layers=layers, first=stage == 0, last=stage == stages - 1)
        for stage, layers in enumerate(pipeline.stage_layers(SPEC.layers, ParallelLayout(pp=stages)))
    ]
    weights = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    assert sum(len(list(part.parameters())) for part in parts) == len(weights)
    assert weights.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        assert torch.equal(weights[name], parameter), name
    x = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole(tokens))


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.weight", 0.3),
        ("head.weight", 0.3),
        ("layers.1.attention.wq.weight", 0.3),
        ("layers.1.ffn.gate.weight", 0.3),
        ("layers.1.attention.wo.weight", 0.3 / 6**0.5),
        ("layers.1.ffn.down.weight", 0.3 / 6**0.5),
    ],
)
def test_initial_spread(name: str, std: float) -> None:
    weight = dict(decoder().named_parameters())[name].detach()
    assert float(weight.std()) == pytest.approx(std, rel=0.1)
    assert abs(float(weight.mean())) < std / 5


def test_initial_values_belong_to_seed_and_name() -> None:
    one, same, other = (dict(decoder(seed=seed).named_parameters()) for seed in (1, 1, 2))
    matrices = [name for name in one if not name.endswith("norm.weight")]
    for name in matrices:
        assert torch.equal(one[name], same[name])
        assert not torch.equal(one[name], other[name])
    assert not torch.equal(one["layers.0.ffn.gate.weight"], one["layers.1.ffn.gate.weight"])
    assert all(torch.equal(one[name], torch.ones_like(one[name])) for name in one if name not in matrices)
