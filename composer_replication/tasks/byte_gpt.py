"""A small GPT over bytes: pre-norm transformer, rotary positions, tied embedding. Plain torch, no other package.

Invariant: `forward` maps byte ids of shape (batch, time) to logits of shape (batch, time, 256); position t sees only
positions up to t.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ByteGPT"]

VOCABULARY = 256


class ByteGPT(nn.Module):
    """Decoder-only transformer over the 256 byte values.

    Args:
        width: size of the residual stream; a multiple of 2 * heads (rotary positions turn pairs).
        layers: number of blocks.
        heads: attention heads.
        context: the longest sequence that `forward` takes.
        dropout: on the residual branches, while training.

    Raises ValueError for sizes that don't fit together.
    """

    def __init__(self, *, width: int = 96, layers: int = 3, heads: int = 4, context: int = 128, dropout: float = 0.0):
        super().__init__()
        for name, value in {"width": width, "layers": layers, "heads": heads, "context": context}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if width % (2 * heads):
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * heads}, got {width}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied
        cosine, sine = _rotation(context, width // heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.apply(_initialise)
        for block in self.blocks:  # keep the residual stream's variance independent of the depth
            assert isinstance(block, _Block)
            for last in (block.attention_out, block.mlp_out):
                nn.init.normal_(last.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Byte ids (batch, time), int64 -> logits (batch, time, 256). `time` at most `context`."""
        time = input_ids.shape[1]
        if time > self.context:
            raise ValueError(f"a sequence of {time} bytes is longer than the model's context of {self.context}")
        cosine, sine = self.get_buffer("cosine")[:time], self.get_buffer("sine")[:time]
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.attention_in(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, time, size)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        changed = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + F.dropout(changed, self.dropout, self.training)


def _rotation(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (context, size / 2)."""
    rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * rates[None, :]
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
