"""What each process of test_processes.py runs: a few rounds of the embedded model, and all that should not depend on
how many processes share them. Started with the variables of a launcher, or without any for one process.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sagecli import launch
from sagecli.backends.hunyuanvideo15 import Conditioning, HunyuanVideo15
from sagecli.backends.sequence_parallel import split_sequence
from sagecli.config import Config
from sagecli.config_parallel import ParallelConfig
from sagecli.engine.samples import Scored
from sagecli.engine.sharding import shard, whole
from sagecli.engine.train import train_round
from sagecli.engine.update import Learner, trainable

PROMPTS = ["a small red circle moving left fast", "a large blue square moving up slowly"]
UNDIAGNOSED = {"diagnose_every": 0}
STRATEGIES = ("none", "fixed", "stepwise", "moving", "dual-moving")


class Exact(HunyuanVideo15):
    """In float64 throughout, so that the order of sums hardly shows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.module.double()
        self._vae.double()

    def encode(self, prompts: list[str]) -> dict[str, Conditioning]:
        found = super().encode(prompts)
        self._empty = Conditioning(self._empty.text.double(), self._empty.glyphs.double())
        return {text: Conditioning(one.text.double(), one.glyphs.double()) for text, one in found.items()}

    def initial_latents(self, *arguments: Any) -> Tensor:
        return super().initial_latents(*arguments).double()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        videos: Tensor = self._vae.decode(latents / self._vae.config.scaling_factor).sample
        return (videos / 2 + 0.5).clamp(0, 1).permute(0, 2, 1, 3, 4)


def brightness(videos: Tensor, prompts: list[str]) -> Scored:
    return Scored({"VQ": videos.double().mean((1, 2, 3, 4))}, {}, {})


def configuration(weights: str, strategy: str, **sections: dict[str, Any]) -> Config:
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": "tiny", "dtype": "float32", "train": weights, "lora": {"rank": 2, "alpha": 4.0}},
        "video": {"height": 16, "width": 16, "frames": 5},
        "sampler": {"steps": 3, "guidance": 2.0, "eta": 0.8},
        "reward": {"models": [{"name": "shapes", "weights": {"VQ": 1.0}}]},
        "trust_region": {
            "strategy": strategy,
            "anchor_every": 2,
            "lambda_kl": {"kind": "adaptive", "start": 0.5, "end": 2.0, "target": 1e-6},
        },
        "optimizer": {"lr": 1e-3},
        "train": {"prompts": "-", "rounds": 3, "groups_per_round": 2, "group_size": 3, "micro_batch": 2},
        "eval": {"prompts": "-", "steps": 3},
    }
    for name, section in sections.items():
        tables[name] = tables.get(name, {}) | section
    return Config.model_validate(tables)


def run_case(config: Config, exact: bool, processes: Any) -> dict[str, Any]:
    """Three rounds; what came out, this process's own samples by (group, sample)."""
    backbone = (Exact if exact else HunyuanVideo15)(config.model, torch.device("cpu"))
    backbone.encode(PROMPTS)
    start = {name: value.detach().clone() for name, value in trainable(backbone.module).items()}
    if processes.sequence > 1:
        split_sequence(backbone.module, processes.sequence, torch.device("cpu"))
    if config.parallel.shard and processes.world > 1:
        shard(backbone.module, torch.float32, torch.device("cpu"))
    learner = Learner(config, backbone, processes)
    found: dict[str, Any] = {"start": start, "metrics": []}
    for number in range(config.train.rounds):
        done = train_round(learner, backbone, brightness, PROMPTS, lambda: None)
        found["metrics"] += done.updates
        if number == 0:
            found["samples"] = {
                (place, sample): (sampled.trajectories.latents[:, row], sampled.trajectories.log_prob[:, row])
                for place, sampled in done.own.items()
                for row, sample in enumerate(done.share[place])
            }
            found["rewards"] = [group.reward for group in done.groups]
            if len(done.updates) == 1:
                found["gradients"] = {name: whole(value.grad) for name, value in learner.parameters.items()}
    found["weights"] = {name: whole(value.detach()) for name, value in learner.parameters.items()}
    found["lambda_kl"] = learner.trust_region.lambda_kl
    return found


def cases(which: str) -> dict[str, tuple[Config, bool]]:
    """Name -> (configuration, in float64)."""
    if which == "sequence":  # the weights of all three ways at once, with and without shards
        return {
            "exact-lora": (_with_eps(configuration("lora", "dual-moving")), True),
            "exact-full": (
                _with_eps(configuration("full", "fixed", parallel={"shard": True}, train=UNDIAGNOSED)),
                True,
            ),
        }
    if which == "short":
        return {"lora": (configuration("lora", "dual-moving"), False)}
    found = {
        f"{train}-{strategy}": (configuration(train, strategy), False)
        for train in ("lora", "full")
        for strategy in STRATEGIES
    }
    slices = {"train": {"groups_per_round": 3}, "objective": {"updates_per_round": 2, "epochs": 2}}
    found["slices"] = (configuration("lora", "dual-moving", **slices), False)
    found["wide"] = (configuration("lora", "dual-moving", train={"groups_per_round": 1, "micro_batch": 3}), False)
    split = {"parallel": {"shard": True}, "train": UNDIAGNOSED}
    found["shard"] = (configuration("full", "dual-moving", **split), False)
    found["shard-muon"] = (configuration("full", "moving", **split, optimizer={"lr": 1e-3, "kind": "muon"}), False)
    found["shard-slices"] = (configuration("full", "fixed", **split, **{"objective": {"updates_per_round": 2}}), False)
    exact = {f"exact-{name}": (_with_eps(config), True) for name, (config, _) in found.items()}
    del exact["exact-shard-slices"]  # slow on few cores
    few = {name: found[name] for name in ("lora-dual-moving", "full-dual-moving")}
    more = {name: found[name] for name in ("lora-none", "slices", "wide", "shard-slices")}
    if which == "all":
        return few | more | exact
    del exact["exact-shard-muon"]  # slow as well: two processes show it
    return few | exact


def _with_eps(config: Config) -> Config:
    """Some gradients are 0 but for rounding (a key's bias, to softmax): with a small eps Adam makes steps of them."""
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"eps": 1e-8})})


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    together = launch.join(ParallelConfig(sequence=2 if sys.argv[1] == "sequence" and count > 1 else 1))
    for name, (config, exact) in cases(sys.argv[1]).items():
        torch.save(run_case(config, exact, together), Path(sys.argv[2]) / f"{name}-{os.environ.get('RANK', '0')}.pt")
    if together.world > 1:
        launch.leave(0, "")
