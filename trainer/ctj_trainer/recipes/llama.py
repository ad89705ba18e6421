"""A small Llama with transformers' parameter names: importing transformers costs 20 s, and we need none of the rest.

Equal to `transformers.LlamaForCausalLM` for the same weights (tests/trainer/test_model.py). No cache, no generation.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """What a Llama is made of; `config_json.py` reads and writes it under transformers' names."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    tie_embeddings: bool = False
    norm_epsilon: float = 1e-6
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    initial_deviation: float = INITIAL_DEVIATION


class Linear(nn.Linear):
    """A linear layer left empty: `Llama.initialise` or a file fills it. (torch's own filling costs time twice over, and
    on the meta device imports the whole compiler.)"""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class Embedding(nn.Embedding):
    """An embedding left empty, likewise."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is."""


class RmsNorm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, size: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normed.to(hidden.dtype)


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.grouped = shape.heads != shape.key_value_heads
        self.q_proj = Linear(shape.hidden_size, shape.heads * shape.head_size, bias=False)
        self.k_proj = Linear(shape.hidden_size, shape.key_value_heads * shape.head_size, bias=False)
        self.v_proj = Linear(shape.hidden_size, shape.key_value_heads * shape.head_size, bias=False)
        self.o_proj = Linear(shape.heads * shape.head_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Attend over hidden [batch, length, size]."""
        batch, length, _ = hidden.shape
        split = (batch, length, -1, self.head_size)
        query = rotate(self.q_proj(hidden).view(split).transpose(1, 2), cosine, sine)
        key = rotate(self.k_proj(hidden).view(split).transpose(1, 2), cosine, sine)
        value = self.v_proj(hidden).view(split).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Feed forward."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Block(nn.Module):
    """One layer: the unit that is compiled, sharded and checkpointed."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden_size, epsilon=shape.norm_epsilon)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, epsilon=shape.norm_epsilon)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Attention and MLP, each with its residual."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Trunk(nn.Module):
    """Everything below the output layer; called `model` in transformers."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = Embedding(shape.vocabulary_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden_size, epsilon=shape.norm_epsilon)
        self.register_buffer("frequencies", rope_frequencies(shape), persistent=False)
        self.frequencies: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, length] to hidden states."""
        hidden = self.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = torch.outer(positions, self.frequencies.float())
        angles = torch.cat((angles, angles), dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine)
        out: Tensor = self.norm(hidden)
        return out


class Llama(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocabulary_size, bias=False)
        if shape.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, length] to logits [batch, length, vocabulary]."""
        logits: Tensor = self.lm_head(self.model(tokens))
        return logits

    @torch.no_grad()
    def initialise(self) -> None:
        """Fill every parameter from the current RNG, in the order of the names."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                nn.init.normal_(parameter, std=self.shape.initial_deviation)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of heads [batch, head, length, size], in fp32 whatever autocast made of the input."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (heads * cosine + turned * sine).to(heads.dtype)


def rope_frequencies(shape: LlamaShape) -> Tensor:
    """Inverse frequencies, with the scalings of Llama 3 (`llama3`) and of position interpolation (`linear`)."""
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    frequencies = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / float(scaling["factor"])
    return _llama3_scaled(frequencies, scaling)


def _llama3_scaled(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    factor = float(scaling["factor"])
    lengths = 2 * math.pi / frequencies
    blend = (context / lengths - low) / (high - low)
    between = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(lengths > context / low, frequencies / factor, frequencies)
    is_between = (lengths <= context / low) & (lengths >= context / high)
    return torch.where(is_between, between, scaled)
