"""What the engine asks of a reward. Each reward is one file; entry points name them.

A base class where a protocol would do: a reward of one method inherits the rest, and whoever reads only the frames that
a reward looks at (`sage score` does, from long files) calls `score` with what `frames` chose.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Scores:
    """What a reward says of B videos."""

    axes: dict[str, Tensor]
    """Axis -> [B] float, higher is better; NaN where scoring failed."""
    monitors: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [B] float: measured beside the axes, logged, never rewarded."""
    details: list[dict[str, Any]] = field(default_factory=list)
    """One entry a video: what was used (raw scores, model, template), as JSON holds it; may be empty."""
    warnings: list[tuple[int, str]] = field(default_factory=list)
    """(the video's index, a sentence) for what users should know of a score that was given all the same."""


class Reward(ABC):
    """Scores videos against their prompts. What its constructor takes are its options in the configuration."""

    axes: tuple[str, ...]
    """Names of the axes that every call returns, e.g. ("VQ", "MQ", "TA")."""
    monitors: tuple[str, ...] = ()
    """Names of the monitors that every call returns."""
    needs_prompt: bool = True
    """Whether a video without a prompt cannot be scored."""
    module: nn.Module | None = None
    """The network, once loaded; whoever uses the reward moves it between devices."""

    def load(self) -> str:
        """Load the network, in main memory; returns one line on what was loaded. The constructor only looks for it."""
        return ""

    @property
    def network(self) -> Any:
        """The loaded module; RuntimeError before `load`."""
        if self.module is None:
            raise RuntimeError("load() comes before the first score")
        return self.module

    def frames(self, total: int, fps: float) -> list[int]:
        """Numbers of the frames it looks at, of a video of `total` frames at `fps` frames a second."""
        return list(range(total))

    @abstractmethod
    def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        """Scores of videos [B, n, 3, H, W] in [0, 1] that hold only the n frames which `frames` chose.

        fps is that of the whole video. A prompt or video it cannot use raises ValueError.
        """

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        """Scores of whole videos [B, F, 3, H, W] in [0, 1]."""
        return self.score(videos[:, self.frames(videos.shape[1], fps)], prompts, fps)


def even_frames(total: int, count: int) -> list[int]:
    """`count` frame numbers spread evenly from the first to the last; all of them where there are no more."""
    count = min(count, total)
    if count == 1:
        return [(total - 1) // 2]
    return [round(index * (total - 1) / (count - 1)) for index in range(count)]
