"""Models by name: published shapes, and small ones that train on anything. No torch.

`ModelSpec` fills its fields from here; whatever is given beside `preset` wins, `experts` and `latent` as a whole.
What a preset leaves out of its model, and where the paper says nothing:

- llama3: the first 8192 positions, without the rotary scaling of the long-context variants.
  "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3.
- gpt3-175b: all layers attend to all positions, where every other one of the paper's is sparse.
  "Language Models are Few-Shot Learners" (2005.14165), table 2.1.
- mt-530b: Megatron-Turing NLG. The vocabulary is GPT-2's, not padded.
  "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B" (2201.11990).
- mixtral-8x7b: how its experts were balanced is not published, so there is no balance loss.
  "Mixtral of Experts" (2401.04088), table 1; `rope_theta` is that of its config.json.
- deepseek-v3: without the multi-token prediction head, and the 4096 positions before YaRN stretched them.
  "DeepSeek-V3 Technical Report" (2412.19437), section 4.2; groups, `scale` and `norm_eps` are those of its
  config.json.
- qwen3-8b: the 32768 positions before YaRN stretched them; the vocabulary is padded, as its tensors are.
  "Qwen3 Technical Report" (2505.09388), table 1; sizes that it doesn't say are those of its config.json.
"""

from __future__ import annotations

from typing import Any

LLAMA3 = {"kv_heads": 8, "vocab_size": 128_256, "rope_theta": 500_000.0, "norm_eps": 1e-5, "seq_len": 8192}
GPT = {
    "seq_len": 2048,
    "vocab_size": 50_257,
    "norm": "layer",
    "activation": "gelu",
    "positions": "learned",
    "bias": "all",
    "tied_embedding": True,
}
TINY = {"layers": 4, "hidden": 64, "heads": 4, "ffn_hidden": 176, "seq_len": 128}

PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": {**LLAMA3, "layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 14_336},
    "llama3-70b": {**LLAMA3, "layers": 80, "hidden": 8192, "heads": 64, "ffn_hidden": 28_672},
    "llama3-405b": {**LLAMA3, "layers": 126, "hidden": 16_384, "heads": 128, "ffn_hidden": 53_248},
    "gpt3-175b": {**GPT, "layers": 96, "hidden": 12_288, "heads": 96, "ffn_hidden": 49_152},
    "mt-530b": {**GPT, "layers": 105, "hidden": 20_480, "heads": 128, "ffn_hidden": 81_920},
    "mixtral-8x7b": {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 14_336,
        "experts": {"count": 8, "top_k": 2, "hidden": 14_336},
        "seq_len": 32_768, "vocab_size": 32_000, "rope_theta": 1e6, "norm_eps": 1e-5,
    },
    "deepseek-v3": {
        "layers": 61, "hidden": 7168, "heads": 128, "ffn_hidden": 18_432,
        "latent": {"query": 1536, "key_value": 512, "plain": 128, "rotary": 64, "value": 128},
        "experts": {
            "count": 256, "top_k": 8, "hidden": 2048, "shared": 2048, "first_dense": 3,
            "score": "sigmoid", "scale": 2.5, "groups": 8, "top_groups": 4, "auxiliary": 1e-4, "bias_rate": 1e-3,
        },
        "seq_len": 4096, "vocab_size": 129_280, "rope_theta": 1e4, "norm_eps": 1e-6, "init_std": 0.006,
    },
    "qwen3-8b": {
        "layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 12_288,
        "qk_norm": True, "seq_len": 32_768, "vocab_size": 151_936, "rope_theta": 1e6, "norm_eps": 1e-6,
    },
    "tiny": TINY,
    "tiny-gqa": {**TINY, "heads": 8, "kv_heads": 2},
    "tiny-moe": {
        **TINY,
        "kv_heads": 2,
        "experts": {"count": 8, "top_k": 2, "hidden": 88, "shared": 88, "first_dense": 1, "auxiliary": 1e-2},
    },
    "tiny-mla": {**TINY, "latent": {"query": 32, "key_value": 16, "plain": 16, "rotary": 8, "value": 16}},
}  # fmt: skip
"""The tiny ones take their vocabulary from the tokenizer."""
