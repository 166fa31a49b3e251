"""Rewards in a run: several at once, a time limit on each call, and failures counted by video, never replaced.

A batch that raises is retried one by one, so that only the guilty videos fail (METHOD.md section 4).
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sagecli import registry
from sagecli.engine.train import Scored
from sagecli.errors import RunStopped, UserError, did_you_mean
from sagecli.rewards import Reward, Scores

if TYPE_CHECKING:
    from sagecli.config_reward import RewardConfig


def named_rewards(names: Sequence[str]) -> dict[str, Reward]:
    """Rewards by name, each with its defaults."""
    return {name: registry.load("rewards", name)() for name in names}


def build_rewards(config: "RewardConfig") -> dict[str, Reward]:
    """The configured rewards by name; UserError for a weight on an axis that its reward lacks."""
    rewards = named_rewards([model.name for model in config.models])
    for model in config.models:
        known = rewards[model.name].axes
        for axis in model.weights:
            if axis not in known:
                hint = did_you_mean(axis, known)
                raise UserError(f"reward.models: {model.name!r} has no axis {axis!r}; its axes are {known}{hint}")
    return rewards


class Scorer:
    """Scores decoded videos in memory with every reward of a run."""

    def __init__(self, rewards: dict[str, Reward], fps: float, timeout: float) -> None:
        self.rewards = rewards
        self.fps = fps
        self.timeout = timeout

    def __call__(self, videos: Tensor, prompts: list[str]) -> Scored:
        """Axes and monitors [B] of videos [B, F, 3, H, W]; a score that is not finite is a failure."""
        axes: dict[str, Tensor] = {}
        monitors: dict[str, Tensor] = {}
        reasons: dict[int, str] = {}
        for name, reward in self.rewards.items():
            scores = self._score(name, reward, videos, prompts, reasons)
            axes |= scores.axes
            monitors |= scores.monitors
        for axis, values in axes.items():
            for index in (~values.isfinite()).nonzero().flatten().tolist():
                reasons.setdefault(index, f"{axis} is {float(values[index])}")
        failures = [f"sample {index} of {prompts[index]!r}: {reason}" for index, reason in sorted(reasons.items())]
        return Scored(axes, monitors, failures)

    def _score(self, name: str, reward: Reward, videos: Tensor, prompts: list[str], reasons: dict[int, str]) -> Scores:
        try:
            return self._call(name, reward, videos, prompts)
        except RunStopped:
            raise
        except Exception:  # a plugin may raise anything; who is guilty is found one by one
            parts = [self._score_one(name, reward, videos, prompts, index, reasons) for index in range(len(prompts))]
        return Scores(
            {axis: torch.cat([part.axes[axis] for part in parts]) for axis in reward.axes},
            {monitor: torch.cat([part.monitors[monitor] for part in parts]) for monitor in reward.monitors},
        )

    def _score_one(
        self, name: str, reward: Reward, videos: Tensor, prompts: list[str], index: int, reasons: dict[int, str]
    ) -> Scores:
        try:
            return self._call(name, reward, videos[index : index + 1], prompts[index : index + 1])
        except RunStopped:
            raise
        except Exception as error:  # a plugin may raise anything; the video fails, named with the reason
            reasons[index] = f"{name} raised {type(error).__name__}: {error}"
            lost = torch.tensor([math.nan], dtype=torch.float64)
            return Scores(dict.fromkeys(reward.axes, lost), dict.fromkeys(reward.monitors, lost))

    def _call(self, name: str, reward: Reward, videos: Tensor, prompts: Sequence[str]) -> Scores:
        scores = with_timeout(lambda: _without_gradient(reward, videos, prompts, self.fps), self.timeout)
        if scores is None:
            raise RunStopped(f"the reward {name!r} did not come back within reward.timeout = {self.timeout:g} seconds")
        return scores


@torch.no_grad()
def _without_gradient(reward: Reward, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
    scores = reward(videos, prompts, fps)
    return Scores(
        {axis: scores.axes[axis].double().cpu() for axis in reward.axes},
        {name: scores.monitors[name].double().cpu() for name in reward.monitors},
    )


def with_timeout(call: Callable[[], Scores], seconds: float) -> Scores | None:
    """The call's result or exception, or None where it takes longer than `seconds`; it is then left behind."""
    result: list[tuple[Scores | None, Exception | None]] = []

    def run() -> None:
        try:
            result.append((call(), None))
        except Exception as error:  # handed to the caller's thread
            result.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        return None
    value, error = result[0]
    if error is not None:
        raise error
    return value
