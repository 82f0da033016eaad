"""Two small models that train on a CPU in a minute: a language model of bytes, and a denoiser of generated images.

Random weights have no structure, so errors of attention are measured on these as well. Their attention is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: (q, k, v, is_causal) -> the output, all bfloat16 (B, H, S, D).
Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

_ROOT = Path(__file__).resolve().parents[1]
_WIDTH, _HEADS, _LAYERS = 128, 2, 2
_BATCH, _TEXT_LENGTH = 8, 128
_IMAGE, _PATCH = 32, 4  # pixels of a side
_LEARNING_RATE = 2e-3


class _PreNormLayer(nn.Module):
    """A transformer layer with RMSNorm before attention and before the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor, attention: Attention, causal: bool) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4).bfloat16()
        x = x + self.out(attention(heads[0], heads[1], heads[2], causal).float().transpose(1, 2).flatten(2))
        added: Tensor = self.down(nn.functional.gelu(self.up(self.between(x))))
        return x + added


class LanguageModel(nn.Module):
    """Predicts the next byte of this project's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.position = nn.Embedding(256, _WIDTH), nn.Embedding(_TEXT_LENGTH, _WIDTH)
        self.layers = nn.ModuleList(_PreNormLayer() for _ in range(_LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(_WIDTH), nn.Linear(_WIDTH, 256))
        pages = [_ROOT / "LICENSE", *sorted((_ROOT / "docs").glob("*.md"))]
        self.text = torch.tensor(list(b"".join(page.read_bytes() for page in pages)))

    def loss(self, attention: Attention, generator: torch.Generator) -> Tensor:
        """Return the cross entropy, in nats for a byte, of a random batch."""
        first = torch.randint(0, len(self.text) - _TEXT_LENGTH, (_BATCH, 1), generator=generator)
        rows = self.text[first + torch.arange(_TEXT_LENGTH + 1)]
        x = self.symbol(rows[:, :-1]) + self.position.weight
        for layer in self.layers:
            x = layer(x, attention, True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), rows[:, 1:].flatten())


class Denoiser(nn.Module):
    """Predicts the noise in images of bright rectangles, from patches as tokens."""

    def __init__(self) -> None:
        super().__init__()
        tokens, pixels = (_IMAGE // _PATCH) ** 2, _PATCH**2
        self.patch, self.position = nn.Linear(pixels, _WIDTH), nn.Embedding(tokens, _WIDTH)
        self.time = nn.Sequential(nn.Linear(1, _WIDTH), nn.SiLU(), nn.Linear(_WIDTH, _WIDTH))
        self.layers = nn.ModuleList(_PreNormLayer() for _ in range(_LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(_WIDTH), nn.Linear(_WIDTH, pixels))

    def loss(self, attention: Attention, generator: torch.Generator) -> Tensor:
        """Return the mean squared error of the predicted noise of a random batch."""
        images = _draw_images(_BATCH, generator)
        patches = images.unfold(1, _PATCH, _PATCH).unfold(2, _PATCH, _PATCH).flatten(3).flatten(1, 2)
        noise = torch.randn(patches.shape, generator=generator)
        share = torch.rand(_BATCH, 1, 1, generator=generator)
        x = self.patch(patches * (1 - share) + noise * share) + self.position.weight + self.time(share)
        for layer in self.layers:
            x = layer(x, attention, False)
        return nn.functional.mse_loss(self.head(x), noise)


def _draw_images(count: int, generator: torch.Generator) -> Tensor:
    """Draw images of three rectangles, (count, _IMAGE, _IMAGE)."""
    places = torch.arange(_IMAGE)
    corners = torch.randint(0, _IMAGE, (count, 3, 2, 2), generator=generator).sort(-1).values
    inside = (places >= corners[..., :1]) & (places <= corners[..., 1:])  # (count, 3, 2, _IMAGE)
    brightness = torch.rand(count, 3, 1, 1, generator=generator)
    return (inside[:, :, 0].unsqueeze(-1) & inside[:, :, 1].unsqueeze(-2)).mul(brightness).amax(1)


MODELS: dict[str, type[Any]] = {"language model": LanguageModel, "denoiser": Denoiser}


def train(name: str, attention: Attention, steps: int) -> tuple[Any, Tensor]:
    """Train a model of MODELS with AdamW from fixed seeds. Return it and the losses, (steps,)."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        loss = model.loss(attention, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)
