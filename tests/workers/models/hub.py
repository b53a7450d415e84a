"""Folders as Hugging Face writes them, of tiny random models of each family, and what it makes of such folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from workers.checkpoint import manifest
from workers.checkpoint.storage import Storage
from workers.models import huggingface

CONFIG = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, a key for each query": {"model_type": "llama", "num_key_value_heads": 8},
    "llama, one key for all": {"model_type": "llama", "num_key_value_heads": 1},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, wide heads": {"model_type": "llama", "head_dim": 6},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, wide heads": {"model_type": "qwen2", "head_dim": 6},
    "qwen3": {"model_type": "qwen3", "head_dim": 6},
    "qwen3, tied": {"model_type": "qwen3", "head_dim": 4, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "mixtral, wide heads": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 6},
}
TOKENS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(3))

transformers.utils.logging.disable_progress_bar()


def save(
    folder: Path,
    model_type: str = "llama",
    dtype: torch.dtype = torch.float32,
    size: str = "1GB",
    stacked: bool = False,
    **changes: Any,
) -> Path:
    """`save_pretrained` of CONFIG with changes, in files of a size; `stacked`: as the library names it inside."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **CONFIG | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size=size, save_original_format=not stacked)
    return folder


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """By Hugging Face."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    """Whether two folders have the same tensors by name, dtype and every bit."""
    before, after = tensors(one), tensors(other)
    return before.keys() == after.keys() and all(
        tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]) for name, tensor in before.items()
    )


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Put tensors in place, or take them away."""
    kept = {name: tensor for name, tensor in (tensors(folder) | changes).items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def exported(root: Path, document: manifest.Manifest, folder: Path, **options: Any) -> Path:
    huggingface.export(Storage.open(str(root)).child(document.job), document, str(folder), **options)
    return folder
