"""Rewards in a run: several at once, a time limit on each call, and failures counted by video, never replaced.

A batch that raises is retried one by one, so that only the guilty videos fail (METHOD.md section 4).
"""

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sagecli import preflight, registry
from sagecli.config_reward import RewardSource
from sagecli.engine.samples import Scored
from sagecli.errors import RunStopped, UserError, did_you_mean
from sagecli.interrupt import LEFT_BEHIND
from sagecli.rewards import Reward, Scores

if TYPE_CHECKING:
    from sagecli.config_reward import RewardConfig


@dataclass(frozen=True)
class Clips:
    """B videos of one length and rate, of which each reward takes the frames it looks at."""

    total: int
    """Frames a video."""
    fps: float
    take: Callable[[Sequence[int]], Tensor]
    """Frame numbers -> [B, n, 3, H, W] in [0, 1]."""


RESERVED = re.compile(
    r"round|update|reward(_spread)?|failed|dropped_groups|exploration|skipped|lambda_kl|policy_loss|ratio(_error)?|clipped"
    r"|kl(_.*)?|gradient_norm.*|.*_seconds|.*[.].*"
)
"""Names that a run's metrics have already, and names with a dot, which score files could not take apart."""


def make_reward(source: RewardSource) -> Reward:
    """The reward of a configuration's table, not loaded; UserError for options it does not take and missing weights."""
    options = dict(source.options)
    known = registry.option_names(registry.load("rewards", source.name))
    if source.path:
        options["path"] = source.path
    if source.dtype != "float32" or "dtype" in known:
        options["dtype"] = source.dtype
    reward = registry.construct("rewards", source.name, options)
    if not isinstance(reward, Reward):
        raise UserError(f"the reward {source.name!r} is no subclass of sagecli.rewards.Reward, as its entry point must")
    return reward


def make_rewards(sources: Iterable[RewardSource]) -> dict[str, Reward]:
    """Rewards by name, not loaded; UserError where two of them have an axis or a monitor of the same name."""
    rewards = {source.name: make_reward(source) for source in sources}
    owner: dict[str, str] = {}
    for name, reward in rewards.items():
        for score in (*reward.axes, *reward.monitors):
            if RESERVED.fullmatch(score):
                raise UserError(
                    f"the reward {name!r} gives {score!r}, a name that metrics have already; rename it there"
                )
            if score in owner:
                raise UserError(f"the rewards {owner[score]!r} and {name!r} both give {score!r}; use one at a time")
            owner[score] = name
    return rewards


def missing_rewards(sources: Iterable[RewardSource]) -> list[str]:
    """What each reward lacks, one text a reward: it is not installed, or its weights are not here."""
    lacks = []
    for source in sources:
        try:
            make_reward(source)
        except UserError as error:
            lacks.append(str(error))
    return lacks


def check_weights(config: "RewardConfig", rewards: dict[str, Reward]) -> None:
    """UserError for a weight on an axis that its reward lacks."""
    for model in config.models:
        known = rewards[model.name].axes
        for axis in model.weights:
            if axis not in known:
                hint = did_you_mean(axis, known)
                raise UserError(f"reward.models: {model.name!r} has no axis {axis!r}; its axes are {known}{hint}")


class Scorer:
    """Scores videos with several rewards."""

    def __init__(self, rewards: dict[str, Reward], fps: float, timeout: float, offload: Iterable[str] = ()) -> None:
        self.rewards = rewards
        self.fps = fps
        self.timeout = timeout
        self.offload = frozenset(offload)
        self.warnings: dict[str, set[str]] = {}
        """What the rewards warned of -> the prompts of those videos."""
        self.reports: list[str] = []
        """A line on what was loaded, of each reward that loads something."""

    @classmethod
    def loaded(cls, sources: Sequence[RewardSource], fps: float, timeout: float) -> "Scorer":
        """With the rewards of a configuration, loaded and on their device."""
        rewards = make_rewards(sources)
        offload = [source.name for source in sources if source.offload]
        reports = []
        for name, reward in rewards.items():
            reports.append(reward.load())
            if reward.module is not None and name not in offload:
                reward.module.to(preflight.device())
        scorer = cls(rewards, fps, timeout, offload)
        scorer.reports = [report for report in reports if report]
        return scorer

    def __call__(self, videos: Tensor, prompts: list[str]) -> Scored:
        """Scores of decoded videos [B, F, 3, H, W] at the scorer's fps."""
        return self.score(Clips(videos.shape[1], self.fps, lambda frames: _frames(videos, frames)), prompts)

    def score(self, clips: Clips, prompts: list[str]) -> Scored:
        """Axes and monitors [B] of the videos; a score that is not finite is a failure."""
        axes: dict[str, Tensor] = {}
        monitors: dict[str, Tensor] = {}
        details: list[dict[str, Any]] = [{} for _ in prompts]
        reasons: dict[int, str] = {}
        for name, reward in self.rewards.items():
            frames = reward.frames(clips.total, clips.fps)
            with self._on_device(name):
                scores = self._score(name, clips.take(frames), prompts, clips.fps, reasons)
            axes |= scores.axes
            monitors |= scores.monitors
            for entry, detail in zip(details, scores.details or [{}] * len(prompts), strict=True):
                entry[name] = {"frames": frames} | detail
            for index, warning in scores.warnings:
                self.warnings.setdefault(f"{name}: {warning}", set()).add(prompts[index])
        for axis, values in axes.items():
            for index in (~values.isfinite()).nonzero().flatten().tolist():
                reasons.setdefault(index, f"{axis} is {float(values[index])}")
        return Scored(axes, monitors, dict(sorted(reasons.items())), details)

    def _score(self, name: str, videos: Tensor, prompts: list[str], fps: float, reasons: dict[int, str]) -> Scores:
        try:
            return self._call(name, videos, prompts, fps)
        except RunStopped:
            raise
        except Exception as error:  # a plugin may raise anything; who is guilty is found one by one
            if len(prompts) == 1:
                reasons[0] = _reason(name, error)
                return self._lost(name)
        found: list[dict[int, str]] = [{} for _ in prompts]
        parts = [
            self._score(name, videos[index : index + 1], [prompt], fps, found[index])
            for index, prompt in enumerate(prompts)
        ]
        reasons |= {index: reason for index, one in enumerate(found) for reason in one.values()} | reasons
        return _joined(parts)

    def _lost(self, name: str) -> Scores:
        """The scores of a video that could not be scored."""
        nan = torch.tensor([math.nan], dtype=torch.float64)
        return Scores(dict.fromkeys(self.rewards[name].axes, nan), dict.fromkeys(self.rewards[name].monitors, nan))

    def _call(self, name: str, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        scores = with_timeout(lambda: _without_gradient(self.rewards[name], videos, prompts, fps), self.timeout)
        if scores is None:
            raise RunStopped(f"the reward {name!r} did not come back within reward.timeout = {self.timeout:g} seconds")
        return scores

    @contextmanager
    def _on_device(self, name: str) -> Iterator[None]:
        """An offloaded reward's network is on the device within the block."""
        module = self.rewards[name].module if name in self.offload else None
        if module is not None:
            module.to(preflight.device())
        yield
        if module is not None:
            module.to("cpu")


def _frames(videos: Tensor, frames: Sequence[int]) -> Tensor:
    """Those frames of videos [B, F, 3, H, W]."""
    return videos if list(frames) == list(range(videos.shape[1])) else videos[:, list(frames)]


def _reason(name: str, error: Exception) -> str:
    """Why a video could not be scored."""
    return f"{name}: {error}" if isinstance(error, ValueError) else f"{name} raised {type(error).__name__}: {error}"


def _joined(parts: list[Scores]) -> Scores:
    """The scores of several videos from those of each."""
    return Scores(
        {axis: torch.cat([part.axes[axis] for part in parts]) for axis in parts[0].axes},
        {monitor: torch.cat([part.monitors[monitor] for part in parts]) for monitor in parts[0].monitors},
        [part.details[0] if part.details else {} for part in parts],
        [(index, warning) for index, part in enumerate(parts) for _, warning in part.warnings],
    )


@torch.no_grad()
def _without_gradient(reward: Reward, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
    scores = reward.score(videos, prompts, fps)
    return Scores(
        {axis: _checked(axis, scores.axes, len(videos)) for axis in reward.axes},
        {monitor: _checked(monitor, scores.monitors, len(videos)) for monitor in reward.monitors},
        scores.details,
        scores.warnings,
    )


def _checked(name: str, scores: dict[str, Tensor], count: int) -> Tensor:
    """A plugin's score [B] in float64 on the CPU."""
    if name not in scores:
        raise ValueError(f"it returned no {name!r}, but {sorted(scores)}")
    if scores[name].shape != (count,):
        raise ValueError(f"its {name!r} of {count} videos has the shape {tuple(scores[name].shape)}, not ({count},)")
    return scores[name].double().cpu()


def with_timeout(call: Callable[[], Scores], seconds: float) -> Scores | None:
    """The call's result or exception, or None where it takes longer than `seconds`; it is then left behind.

    sagecli.cli.main ends a process that has left one behind.
    """
    result: list[tuple[Scores | None, Exception | None]] = []

    def run() -> None:
        try:
            result.append((call(), None))
        except Exception as error:  # handed to the caller's thread
            result.append((None, error))

    thread = threading.Thread(target=run, name=LEFT_BEHIND, daemon=True)
    thread.start()
    thread.join(min(seconds, threading.TIMEOUT_MAX))
    if not result:
        return None
    value, error = result[0]
    if error is not None:
        raise error
    return value
