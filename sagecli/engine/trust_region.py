"""The dual trust region: earlier policies are remembered, and the KL holds the policy near them.

`initial` is the frozen start, `anchor` a snapshot refreshed every N updates, `previous` the policy before the last
optimizer update (METHOD.md section 5). `ema`, a moving average of the policy, is remembered too, but for evaluations:
no KL refers to it. A policy is the list of its trainable tensors, so for a LoRA only the adapter is remembered: the
adapter starts with B = 0, which is the model with the adapter switched off. Of split tensors each process remembers the
part that it keeps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from sagecli.engine.sharding import own_part

if TYPE_CHECKING:
    from sagecli.config import LambdaKl, TrustRegionConfig

POSITION = {"fixed": "initial", "moving": "anchor", "dual-moving": "anchor"}
VELOCITY = {"stepwise": "previous", "dual-moving": "previous"}


class TrustRegion:
    """The remembered policies of one run, and the weight of the KL to them."""

    def __init__(self, config: "TrustRegionConfig", parameters: Sequence[Tensor], ema: float = 0.0) -> None:
        """ema: decay of the moving average; 0 keeps none."""
        self.config = config
        self.ema = ema
        self.parameters = [own_part(parameter) for parameter in parameters]
        self.betas: dict[str, float] = {}
        """Remembered policy -> weight of the KL to it."""
        if config.strategy in POSITION:
            self.betas[POSITION[config.strategy]] = config.beta_pos
        if config.strategy in VELOCITY:
            self.betas[VELOCITY[config.strategy]] = config.beta_vel
        self.policies = {name: self._snapshot() for name in [*self.betas, *(["ema"] if ema else [])]}
        self.lambda_kl = scheduled_lambda(config.lambda_kl, 0)

    def _snapshot(self) -> list[Tensor]:
        copies = [parameter.clone() for parameter in self.parameters]
        return [copy.cpu() for copy in copies] if self.config.offload_anchor else copies

    def _refresh(self, name: str) -> None:
        for remembered, parameter in zip(self.policies[name], self.parameters, strict=True):
            remembered.copy_(parameter)

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """Within the block the model acts as the remembered policy, which meanwhile holds the model's own."""
        self._swap(self.policies[name])
        try:
            yield
        finally:
            self._swap(self.policies[name])

    def _swap(self, tensors: list[Tensor]) -> None:
        for parameter, remembered in zip(self.parameters, tensors, strict=True):
            own = parameter.clone()
            parameter.copy_(remembered)
            remembered.copy_(own)

    def before_update(self) -> None:
        """Remember the policy that the coming optimizer update leaves."""
        if "previous" in self.policies:
            self._refresh("previous")

    def after_update(self, update: int) -> None:
        """Refresh the anchor on its cadence and move lambda on; `update` counts the updates made."""
        if "anchor" in self.policies and update % self.config.anchor_every == 0:
            self._refresh("anchor")
        if "ema" in self.policies:
            for average, parameter in zip(self.policies["ema"], self.parameters, strict=True):
                average.lerp_(parameter.to(average.device), 1 - self.ema)
        if self.config.lambda_kl.kind != "adaptive":
            self.lambda_kl = scheduled_lambda(self.config.lambda_kl, update)

    def after_round(self, kl: float) -> None:
        """Adapt lambda to the round's mean KL, where the schedule is adaptive."""
        config = self.config.lambda_kl
        if config.kind != "adaptive" or not self.betas:
            return
        if kl > 2 * config.target:
            self.lambda_kl = min(self.lambda_kl * 1.5, config.end)
        elif kl < config.target / 2:
            self.lambda_kl = max(self.lambda_kl / 1.5, config.start)


def scheduled_lambda(config: "LambdaKl", update: int) -> float:
    """lambda_KL of the update that follows `update` finished ones; an adaptive one starts at its start."""
    if config.kind == "constant":
        return config.value
    if config.kind == "two-stage":
        return config.start if update < config.switch_at else config.end
    if config.kind == "linear":
        return config.start + (config.end - config.start) * min(update / config.ramp, 1)
    return config.start
