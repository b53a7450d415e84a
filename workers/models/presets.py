"""Models by name: published shapes of the Llama family, and small ones that train on anything. No torch.

`ModelSpec` fills its fields from here; whatever is given beside `preset` wins. Llama 3 with its first 8192 positions,
without the rotary scaling of its long-context variants.
Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3.
"""

from __future__ import annotations

from typing import Any

LLAMA3 = {"kv_heads": 8, "vocab_size": 128_256, "rope_theta": 500_000.0, "norm_eps": 1e-5, "seq_len": 8192}

PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": {**LLAMA3, "layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 14_336},
    "llama3-70b": {**LLAMA3, "layers": 80, "hidden": 8192, "heads": 64, "ffn_hidden": 28_672},
    "llama3-405b": {**LLAMA3, "layers": 126, "hidden": 16_384, "heads": 128, "ffn_hidden": 53_248},
    "tiny": {"layers": 4, "hidden": 64, "heads": 4, "ffn_hidden": 176, "seq_len": 128},
    "tiny-gqa": {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn_hidden": 176, "seq_len": 128},
}
"""The tiny ones take their vocabulary from the tokenizer."""
