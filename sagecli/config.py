"""The run configuration: every setting, its default and its limits. No default stands anywhere else."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from sagecli.config_base import Count, Decay, Guidance, NonNegative, Positive, Section
from sagecli.config_parallel import ParallelConfig
from sagecli.config_reward import RewardConfig


class LoraConfig(Section):
    """A low-rank adapter; its output is scaled by alpha / rank."""

    rank: Count = 16
    alpha: Positive = 16.0
    targets: str = "attention"
    """"attention", "attention+mlp", or a regular expression over the transformer's module names."""


class ModelConfig(Section):
    """Which model is trained, and which of its weights."""

    backbone: str = "hunyuanvideo15"
    path: str = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    """A hub id, a local folder, or "tiny" for the embedded checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: str = "native"
    train: Literal["lora", "full", "frozen"] = "lora"
    """"frozen" trains nothing: for rollouts of the model as it is."""
    lora: LoraConfig = LoraConfig()
    gradient_checkpointing: bool = False
    vae_tiling: bool = False


class VideoConfig(Section):
    """Size of the videos; fps is what files are written with and rewards are told."""

    height: Count = 352
    width: Count = 624
    frames: Count = 81
    fps: Positive = 24.0


class WindowConfig(Section):
    """A window of SDE steps; the steps outside are ODE steps (MixGRPO, Flow-GRPO-Fast)."""

    size: Count
    start: Annotated[int, Field(ge=0)] = 0
    stride: Annotated[int, Field(ge=0)] = 1
    every: Count = 1
    draw: Literal["slide", "random"] = "slide"


def _shape_of_sde_steps(value: Any) -> str | None:
    if isinstance(value, str):
        return "all"
    if isinstance(value, list | tuple):
        return "steps"
    return "window" if isinstance(value, dict | WindowConfig) else None


Steps = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)]
SdeSteps = Annotated[
    Annotated[Literal["all"], Tag("all")] | Annotated[Steps, Tag("steps")] | Annotated[WindowConfig, Tag("window")],
    Discriminator(
        _shape_of_sde_steps,
        custom_error_type="sde_steps",
        custom_error_message='Input should be "all", a list of steps, or a table {size, start, stride, every, draw}',
    ),
]


class SamplerConfig(Section):
    """How videos are sampled in rollouts (METHOD.md sections 1 and 2)."""

    sde: Literal["precise", "dance", "flow", "cps", "exact", "ode"] = "precise"
    eta: Positive = 0.5
    steps: Annotated[int, Field(ge=2)] = 20
    shift: Positive = 5.0
    guidance: Guidance = 6.0
    last_step: Literal["ode", "sde"] = "ode"
    sde_steps: SdeSteps = "all"
    shared_noise: bool = False
    log_prob: Literal["gaussian", "cps"] = "gaussian"

    @model_validator(mode="after")
    def _possible(self) -> "SamplerConfig":
        if self.sde == "cps" and self.eta > 1:
            raise ValueError(f"eta = {self.eta:g} is out of range for sde = 'cps', which takes 0 < eta <= 1")
        if self.log_prob == "cps" and self.sde != "cps":
            raise ValueError(f"log_prob = 'cps' is legal with sde = 'cps' alone; sde is {self.sde!r}")
        if isinstance(self.sde_steps, tuple) and max(self.sde_steps) >= self.steps:
            raise ValueError(
                f"sde_steps names step {max(self.sde_steps)}; with steps = {self.steps} the last is {self.steps - 1}"
            )
        if isinstance(window := self.sde_steps, WindowConfig) and window.start + window.size > self.steps:
            raise ValueError(f"sde_steps ends at step {window.start + window.size}, past steps = {self.steps}")
        if self.sde_steps != "all" and self.sde == "ode":
            raise ValueError("sde_steps chooses SDE steps, and sde = 'ode' has none; leave sde_steps = 'all'")
        return self


class ObjectiveConfig(Section):
    """The policy loss (METHOD.md sections 3 and 5)."""

    equalizer: Literal["velocity", "mean", "off"] = "velocity"
    clip_range: Positive = 1e-4
    advantage_clip: Positive = 5.0
    updates_per_round: Count = 1
    epochs: Count = 1


class ConstantLambda(Section):
    """One weight of the KL term for the whole run."""

    kind: Literal["constant"]
    value: Positive


class TwoStageLambda(Section):
    """`start` before the update `switch_at`, `end` from it on."""

    kind: Literal["two-stage"]
    start: NonNegative
    end: Positive
    switch_at: Count


class LinearLambda(Section):
    """From `start` to `end` over `ramp` updates."""

    kind: Literal["linear"]
    start: NonNegative
    end: NonNegative
    ramp: Count

    @model_validator(mode="after")
    def _acts(self) -> "LinearLambda":
        if self.start == self.end == 0:
            raise ValueError("start and end are both 0, so the KL would have no weight")
        return self


class AdaptiveLambda(Section):
    """Times 1.5 when a round's KL is over twice `target`, divided by 1.5 when under half of it, within limits."""

    kind: Literal["adaptive"]
    start: Positive
    end: Positive
    target: Positive

    @model_validator(mode="after")
    def _ordered(self) -> "AdaptiveLambda":
        if self.start > self.end:
            raise ValueError(f"start = {self.start:g} is over end = {self.end:g}; lambda moves within [start, end]")
        return self


LambdaKl = Annotated[
    ConstantLambda | TwoStageLambda | LinearLambda | AdaptiveLambda,
    Field(discriminator="kind"),
]


class TrustRegionConfig(Section):
    """Which earlier policies the KL holds the policy to, and how hard (METHOD.md section 5)."""

    strategy: Literal["none", "fixed", "stepwise", "moving", "dual-moving"] = "dual-moving"
    anchor_every: Count = 10
    beta_pos: NonNegative = 1.0
    beta_vel: NonNegative = 0.1
    lambda_kl: LambdaKl = TwoStageLambda(kind="two-stage", start=1e-7, end=1e-5, switch_at=50)
    offload_anchor: bool = False
    """Keep the remembered policies in main memory."""

    @model_validator(mode="after")
    def _has_weight(self) -> "TrustRegionConfig":
        for name, strategies in (
            ("beta_pos", ("fixed", "moving", "dual-moving")),
            ("beta_vel", ("stepwise", "dual-moving")),
        ):
            if self.strategy in strategies and not dict(self)[name]:
                raise ValueError(f"strategy = {self.strategy!r} needs {name} > 0; it is 0")
        return self


class MuonConfig(Section):
    """torch.optim.Muon's own numbers."""

    momentum: Decay = 0.95
    nesterov: bool = True
    ns_steps: Count = 5


class OptimizerConfig(Section):
    """The optimizer. Muon takes the matrices; what is not a matrix goes to AdamW with the same lr."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 1e-5
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    eps: Positive = 1e-15
    """Gradients are 1e-5 to 1e-3 here: Adam's usual 1e-8 would not be negligible (METHOD.md section 9)."""
    weight_decay: NonNegative = 0.01
    grad_clip: Positive = 1.0
    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly to lr."""
    max_skipped: Annotated[int, Field(ge=0)] = 2
    """Updates in a row that may be skipped because their gradient is not finite; one more stops the run."""
    ema: Decay = 0.0
    """Decay of a moving average of the weights, which evaluations then use and `sage export --ema` offers; 0: none."""
    muon: MuonConfig = MuonConfig()


class TrainConfig(Section):
    """The loop: what a round draws, how long it goes on, what is kept."""

    prompts: str
    """A prompt file, relative to this file, or builtin:NAME."""
    rounds: Count
    groups_per_round: Count = 16
    group_size: Annotated[int, Field(ge=2)] = 4
    micro_batch: Count = 1
    seed: Annotated[int, Field(ge=0)] = 0
    eval_every: Annotated[int, Field(ge=0)] = 10
    """Rounds between evaluations; 0 evaluates at the start and the end only."""
    save_every: Count = 10
    """Rounds between checkpoints; one is always written at the end."""
    keep: Count = 3
    """Checkpoints kept, the newest."""
    videos_per_round: Annotated[int, Field(ge=0)] = 2
    """Rollout videos written to the run folder each round."""
    diagnose_every: Annotated[int, Field(ge=0)] = 10
    """Updates between measurements of the policy loss's and the KL's gradient norms apart; 0 never."""
    report_every: Annotated[int, Field(ge=0)] = 0
    """Updates between writings of the run's page; 0 writes it at the end only."""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """Write TensorBoard events into the run folder; auto: where the tensorboard package is installed."""
    wandb: bool = False
    """Send the numbers to Weights & Biases."""


class EvalConfig(Section):
    """Evaluation: ODE sampling of held-out prompts from fixed seeds."""

    prompts: str
    """A prompt file, relative to this file, or builtin:NAME."""
    steps: Annotated[int, Field(ge=2)] = 40
    guidance: Guidance = 6.0
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)] = (0,)
    videos: Annotated[int, Field(ge=1)] = 12
    """Videos kept of every evaluation, spread over the prompts: as files and on its contact sheet."""

    @model_validator(mode="after")
    def _seeds_differ(self) -> "EvalConfig":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds = {list(self.seeds)} names one twice, which would make the same videos again")
        return self


class Config(Section):
    """A whole run."""

    about: str = ""
    """What the preset is for, in one line."""
    model: ModelConfig = ModelConfig()
    video: VideoConfig = VideoConfig()
    sampler: SamplerConfig = SamplerConfig()
    reward: RewardConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    trust_region: TrustRegionConfig = TrustRegionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    eval: EvalConfig
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _can_be_split(self) -> "Config":
        for given, wanted, key in (
            (self.model.train, "full", "model.train"),
            (self.train.diagnose_every, 0, "train.diagnose_every"),
        ):
            if self.parallel.shard and given != wanted:
                raise ValueError(f"parallel.shard = true needs {key} = {wanted!r}; it is {given!r}")
        return self

    @model_validator(mode="after")
    def _slices_hold_groups(self) -> "Config":
        if self.objective.updates_per_round > self.train.groups_per_round:
            raise ValueError(
                f"objective.updates_per_round = {self.objective.updates_per_round} needs as many groups a round; "
                f"train.groups_per_round is {self.train.groups_per_round}"
            )
        return self
