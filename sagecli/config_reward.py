"""The [reward] table: which rewards, what each axis weighs, and how scores become one number."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sagecli.config_base import Finite, Fraction, NonNegative, Positive, Section


class RewardSource(Section):
    """One reward, and how it is loaded."""

    name: str
    path: str = ""
    """Folder or hub id of its weights; "" is the reward's own choice."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    offload: bool = False
    """Keep its model in main memory but while it scores."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What else the reward's constructor takes."""


class RewardModelConfig(RewardSource):
    """One reward of a run and the weight of each of its axes."""

    weights: Annotated[dict[str, Finite], Field(min_length=1)]


class TarosComponent(Section):
    """One component of TaRoS; signed scores pass a sigmoid first."""

    axis: str
    tau: Finite = 0.75
    sigmoid: bool = False


class TarosConfig(Section):
    """TaRoS: components in order, visual to textual, and the weight of their sparsity (METHOD.md section 4)."""

    components: Annotated[tuple[TarosComponent, ...], Field(min_length=1, strict=False)] = (
        TarosComponent(axis="VQ", sigmoid=True),
        TarosComponent(axis="MQ", sigmoid=True),
        TarosComponent(axis="TA", sigmoid=True),
    )
    beta: NonNegative = 0.3


class RewardConfig(Section):
    """The rewards, how their scores become one number, and when a run gives up on them."""

    models: Annotated[tuple[RewardModelConfig, ...], Field(min_length=1, strict=False)]
    combine: Literal["sum", "taros"] = "sum"
    taros: TarosConfig = TarosConfig()
    max_failed: Fraction = 0.1
    """Largest share of a round's videos whose scoring may fail."""
    timeout: Positive = 600.0
    """Seconds one call of a reward may take."""

    @model_validator(mode="after")
    def _axes_are_known(self) -> "RewardConfig":
        names = [model.name for model in self.models]
        if twins := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models names the reward {twins[0]!r} twice; each may stand once, with all its weights")
        axes = [axis for model in self.models for axis in model.weights]
        if twice := sorted({axis for axis in axes if axes.count(axis) > 1}):
            raise ValueError(f"models give a weight to {twice[0]!r} twice; every axis may have one")
        if self.combine == "taros":
            named = [component.axis for component in self.taros.components]
            if sorted(named) != sorted(axes):
                raise ValueError(f"taros.components must name each weighed axis once: {axes}; it names {named}")
            if any(weight != 1 for model in self.models for weight in model.weights.values()):
                raise ValueError("models must weigh every axis 1.0 with combine = 'taros', which draws its own weights")
        return self
