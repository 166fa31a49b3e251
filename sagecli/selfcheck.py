"""What a run checks of itself in its first round: what silently spoils training when it is wrong."""

import math
from typing import TYPE_CHECKING, Any

import torch

from sagecli.engine.train import Round, Score
from sagecli.engine.update import Learner

if TYPE_CHECKING:
    from sagecli.config import Config


def first_round(config: "Config", learner: Learner, score: Score, done: Round) -> tuple[dict[str, Any], list[str]]:
    """Numbers for the metrics, and a line on each for whoever watches."""
    first = done.updates[0]
    count = sum(parameter.numel() for parameter in learner.parameters.values())
    checks: dict[str, Any] = {"trained_parameters": count}
    lines = [f"{count:,} trained parameters in {len(learner.parameters)} tensors"]
    if "ratio_error" in first:
        checks["ratio_error"] = first["ratio_error"]
        lines.append(_ratio_line(first["ratio_error"], config.objective.clip_range))
    sample = done.groups[0]
    twice = [score(sample.videos[:1], [sample.trajectories.group.prompt]).axes for _ in range(2)]
    changes = [abs(float(twice[0][axis][0] - twice[1][axis][0])) for axis in twice[0]]
    checks["reward_change"] = max((change for change in changes if math.isfinite(change)), default=0.0)
    if checks["reward_change"]:
        lines.append(
            f"warning: one video scored twice differs by {checks['reward_change']:.1e}: a reward is not deterministic"
        )
    else:
        lines.append("one video scored twice: the same")
    anchor, start = learner.trust_region.policies.get("anchor"), learner.trust_region.policies.get("previous")
    if anchor is not None and start is not None and learner.update == 1 < config.trust_region.anchor_every:
        checks["anchor_unchanged"] = all(torch.equal(one, other) for one, other in zip(anchor, start, strict=True))
        lines.append(
            "the anchor is as it was" if checks["anchor_unchanged"] else "warning: training changed the anchor"
        )
    return checks, lines


def _ratio_line(error: float, clip_range: float) -> str:
    """On policy the ratio is exactly 1; what makes it anything else makes the clip act on noise."""
    if error > clip_range:
        return (
            f"warning: largest |ratio - 1| on policy is {error:.1e}, over objective.clip_range = {clip_range:g}: the "
            "model answers differently in rollouts and updates; likely causes are dropout, a kernel that is not "
            "deterministic in this dtype, or another batch shape"
        )
    return f"largest |ratio - 1| on policy: {error:.1e}"
