"""What the engine asks of a video model. Each backbone is one file; entry points name them.

Convention: sigma in [0, 1], 1 = noise; velocity = noise - data; latents [B, C, F', H', W'] float32.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class VideoSize:
    """Size of a video in pixels and frames."""

    height: int
    width: int
    frames: int


class Backbone(Protocol):
    """A text-to-video flow-matching model."""

    module: nn.Module
    """What is trained, sharded and saved; its parameters that require a gradient are the policy."""

    @classmethod
    def weight_bytes(cls, path: str) -> int:
        """Size of the weights to train, from their files alone; UserError, in one sentence, for what is missing."""

    @classmethod
    def check_size(cls, path: str, size: VideoSize) -> None:
        """UserError, in one sentence, for a size that the model at `path` cannot make; nothing is loaded."""

    def encode(self, prompts: list[str]) -> dict[str, Any]:
        """Conditioning of every prompt; each is encoded once and kept, so later calls are free."""

    def free_text_encoders(self) -> None:
        """Drop the text encoders from memory; prompts encoded so far stay."""

    def initial_latents(self, seeds: list[int], size: VideoSize) -> Tensor:
        """Standard normal latents [B, C, F', H', W'], one per seed, drawn on the CPU: the same in any batch."""

    def velocity(self, latents: Tensor, sigma: float, conditioning: Any, guidance: float) -> Tensor:
        """Velocity at latents, in their shape and dtype; one prompt's conditioning for the whole batch."""

    def decode(self, latents: Tensor) -> Tensor:
        """Videos [B, F, 3, H, W] in [0, 1], float32, of clean latents."""
