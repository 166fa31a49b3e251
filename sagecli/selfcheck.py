"""What a run checks of itself in its first round: what silently spoils training when it is wrong."""

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from sagecli.engine.samples import Score
from sagecli.engine.train import Round
from sagecli.engine.update import Learner
from sagecli.errors import RunStopped

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
    changes = learner.processes.together(lambda: _reward_change(score, done))
    checks["reward_change"] = max(changes)
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
    if learner.processes.world > 1 and not learner.sharded:
        sums = learner.processes.gather_all(_checksum(learner))
        checks["same_on_all"] = len(set(sums)) == 1
        if not checks["same_on_all"]:
            raise RunStopped(f"after one round the parameters of the {len(sums)} processes differ: {sums}")
        lines.append(f"the parameters are the same in all {len(sums)} processes")
    return checks, lines


def _reward_change(score: Score, done: Round) -> float:
    """Largest difference between an axis of one video scored twice."""
    changes = []
    for sample in list(done.own.values())[:1]:  # a process may hold none
        first, second = (score(sample.videos[:1], [sample.trajectories.group.prompt]).axes for _ in range(2))
        changes += [abs(float(first[axis][0] - second[axis][0])) for axis in first]
    return max((change for change in changes if math.isfinite(change)), default=0.0)


def _checksum(learner: Learner) -> str:
    """Of the trained parameters' bytes."""
    total = hashlib.sha256()
    for parameter in learner.parameters.values():
        total.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _ratio_line(error: float, clip_range: float) -> str:
    """On policy the ratio is exactly 1; what makes it anything else makes the clip act on noise."""
    if error > clip_range:
        return (
            f"warning: largest |ratio - 1| on policy is {error:.1e}, over objective.clip_range = {clip_range:g}: the "
            "model answers differently in rollouts and updates; likely causes are dropout, a kernel that is not "
            "deterministic in this dtype, or another batch shape"
        )
    return f"largest |ratio - 1| on policy: {error:.1e}"
