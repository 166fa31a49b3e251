"""What the engine asks of a reward. Each reward is one file; entry points name them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What a reward says of B videos."""

    axes: dict[str, Tensor]
    """Axis -> [B] float, higher is better; NaN where scoring failed."""
    monitors: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [B] float: measured beside the axes, logged, never rewarded."""
    details: list[dict[str, Any]] = field(default_factory=list)
    """One entry a video: what was used (frames, raw scores, model); may be empty."""


class Reward(Protocol):
    """Scores videos against their prompts."""

    axes: tuple[str, ...]
    """Names of the axes every call returns, e.g. ("VQ", "MQ", "TA")."""
    monitors: tuple[str, ...]
    """Names of the monitors every call returns."""

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        """Scores of videos [B, F, 3, H, W] in [0, 1]; a prompt it cannot use raises ValueError."""
