"""`sage rollout`: videos of a prompt file, a manifest that says how each was made, a contact sheet a prompt.

A sample's seed comes from (--seed, the prompt's place, the sample's number). A prompt that brings its own seed gives
it to its first sample, so that a manifest's row makes the same video again.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagecli import checkpoint, media
from sagecli.backends import Backbone
from sagecli.engine.noise import sample_seed
from sagecli.engine.rollout import Group, Sampling, Tick, decode, rollout, start_seeds, video_size
from sagecli.engine.sampler import build_table
from sagecli.engine.samples import Scored
from sagecli.loading import load_config
from sagecli.prompts import Prompt
from sagecli.rundir import append_jsonl, read_jsonl, write_jsonl
from sagecli.scoring import Scorer
from sagecli.summary import finite

if TYPE_CHECKING:
    from sagecli.config import Config, ModelConfig

DEFAULT_PRESET = "setting-b"  # whose model is the default backbone


@dataclass(frozen=True)
class Request:
    """What `sage rollout` was asked for."""

    preset: str | None
    model: str | None
    adapter: Path | None
    sde: str | None
    overrides: Sequence[str]


def rollout_config(request: Request) -> "Config":
    """The configuration of a rollout: the preset's, else that of the adapter's run, else the model's own preset."""
    implied = ["parallel.data=0", "parallel.sequence=1", "parallel.shard=false"]  # how a run was trained
    if request.sde:
        implied.append(f"sampler.sde={request.sde}")
    if request.sde == "ode":
        implied.append("sampler.sde_steps=all")
    if request.sde not in (None, "cps"):
        implied.append("sampler.log_prob=gaussian")
    if request.adapter is None:
        source = request.preset or ("quickstart" if request.model == "tiny" else DEFAULT_PRESET)
        implied.append("model.train=frozen")
    else:
        trained = str(checkpoint.find(request.adapter) / "config.toml")
        source = request.preset or trained
        implied += _as_overrides(load_config(trained).model)
    if request.model is not None:
        implied.append(f"model.path={json.dumps(request.model)}")
    return load_config(source, [*implied, *request.overrides])


def _as_overrides(model: "ModelConfig") -> list[str]:
    """The model table as overrides; JSON's strings, numbers and booleans are TOML's too."""
    table = model.model_dump()
    lora = table.pop("lora")
    flat = table | {f"lora.{key}": value for key, value in lora.items()}
    return [f"model.{key}={json.dumps(value)}" for key, value in flat.items()]


class Rollouts:
    """An output folder being filled."""

    def __init__(self, config: "Config", backbone: Backbone, score: Scorer | None, out: Path) -> None:
        self.config = config
        self.backbone = backbone
        self.score = score
        self.out = out
        self.manifest = out / "manifest.jsonl"
        table = build_table(config.sampler)
        self.sampling = Sampling(table, video_size(config), config.sampler.guidance, config.train.micro_batch)

    def done(self) -> list[int]:
        """The prompt's number of every video that the manifest has."""
        return [row["prompt_number"] for row in read_jsonl(self.manifest)]

    def rewind(self, count: int) -> None:
        """Drop from the manifest what an interruption left of a prompt's `count` videos, and a broken last line."""
        rows = read_jsonl(self.manifest)
        of_prompt = Counter(row["prompt_number"] for row in rows)
        write_jsonl(self.manifest, (row for row in rows if of_prompt[row["prompt_number"]] == count))

    def sort(self) -> None:
        """Put the manifest in the prompts' order, in which several processes did not write it."""
        write_jsonl(self.manifest, sorted(read_jsonl(self.manifest), key=lambda row: str(row["file"])))

    def make(self, place: int, group: Group, tick: Tick) -> list[str]:
        """Sample one prompt's videos, write them and their manifest lines; returns what could not be scored."""
        group = replace(group, start=start_seeds(self.config, group.seeds))
        micro_batch = min(self.sampling.micro_batch, len(group.seeds))
        trajectories = rollout(self.backbone, group, replace(self.sampling, micro_batch=micro_batch), tick)
        videos = decode(self.backbone, trajectories.latents[-1], micro_batch)
        scored = self.score(videos, [group.prompt] * len(videos)) if self.score else Scored({}, {}, {})
        rows = [self._row(place, group, index, scored) for index in range(len(videos))]
        for row, video in zip(rows, videos, strict=True):
            media.write_video(self.out / row["file"], video, self.config.video.fps)
        sheet = [media.sheet_row(video, row | {"axes": row["scores"]}) for row, video in zip(rows, videos, strict=True)]
        media.write_sheet(self.out / f"{place:04d}.png", group.prompt, sheet)
        for row in rows:
            append_jsonl(self.manifest, row)
        return [f"{rows[index]['file']}, {group.prompt!r}: {reason}" for index, reason in scored.failures.items()]

    def _row(self, place: int, group: Group, index: int, scored: Scored) -> dict[str, Any]:
        sampler = self.config.sampler
        return {
            "file": f"{place:04d}-{index:02d}.mp4",
            "prompt_number": place,
            "prompt": group.prompt,
            "seed": group.seeds[index],
            "sde": sampler.sde,
            "eta": sampler.eta,
            "steps": sampler.steps,
            "sde_steps": self.sampling.table.trained_steps,
            "scores": {axis: finite(values[index]) for axis, values in scored.axes.items()},
        }


def prompt_group(prompt: Prompt, place: int, count: int, seed: int) -> Group:
    """The samples of a prompt and their seeds."""
    if prompt.seed is None:
        return Group(prompt.text, tuple(sample_seed(seed, 0, place, sample) for sample in range(count)))
    more = (sample_seed(prompt.seed, 0, 0, sample) for sample in range(1, count))
    return Group(prompt.text, (prompt.seed, *more))
