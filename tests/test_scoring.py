import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from sagecli.config_reward import RewardConfig, RewardSource
from sagecli.errors import RunStopped, UserError
from sagecli.interrupt import LEFT_BEHIND
from sagecli.rewards import Reward, Scores
from sagecli.scoring import Scorer, check_weights, make_rewards


class Brightness(Reward):
    """A real reward, of the kind a user writes: it refuses dark videos."""

    axes = ("light",)
    monitors = ("darkest",)

    def __init__(self) -> None:
        self.calls: list[int] = []

    def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        self.calls.append(len(videos))
        light = videos.mean((1, 2, 3, 4))
        if (light < 0.1).any():
            raise RuntimeError("too dark to see")
        return Scores({"light": light}, {"darkest": videos.amin((1, 2, 3, 4))})


def videos(*levels: float) -> Tensor:
    return torch.tensor(levels).view(-1, 1, 1, 1, 1).expand(-1, 2, 3, 4, 4)


def test_a_batch_is_scored_at_once():
    reward = Brightness()
    scored = Scorer({"brightness": reward}, 8.0, 60.0)(videos(0.2, 0.4), ["a", "b"])
    assert scored.axes["light"].tolist() == pytest.approx([0.2, 0.4])
    assert scored.monitors["darkest"].tolist() == pytest.approx([0.2, 0.4])
    assert scored.axes["light"].dtype == torch.float64
    assert scored.failures == {}
    assert reward.calls == [2]


def test_only_the_guilty_video_fails_and_is_named():
    reward = Brightness()
    scored = Scorer({"brightness": reward}, 8.0, 60.0)(videos(0.2, 0.0, 0.4), ["a", "night", "b"])
    assert scored.axes["light"].isnan().tolist() == [False, True, False]
    assert scored.axes["light"][[0, 2]].tolist() == pytest.approx([0.2, 0.4])
    assert scored.failures == {1: "brightness raised RuntimeError: too dark to see"}
    assert reward.calls == [3, 1, 1, 1]


def test_a_score_that_is_no_number_is_a_failure():
    class Undecided(Brightness):
        def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
            values = torch.tensor([0.5, float("nan"), float("inf")])
            return Scores({"light": values}, {"darkest": values})

    scored = Scorer({"undecided": Undecided()}, 8.0, 60.0)(videos(0.2, 0.3, 0.4), ["a", "b", "c"])
    assert scored.failures == {1: "light is nan", 2: "light is inf"}


def test_a_reward_that_hangs_stops_the_run():
    released = threading.Event()

    class Hanging(Brightness):
        def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
            released.wait()
            raise ValueError

    with pytest.raises(RunStopped, match=r"'hanging' did not come back within reward.timeout = 0.2 seconds"):
        Scorer({"hanging": Hanging()}, 8.0, 0.2)(videos(0.2), ["a"])
    (left,) = (thread for thread in threading.enumerate() if thread.name == LEFT_BEHIND)
    released.set()
    left.join()


def test_an_offloaded_network_is_on_its_device_only_while_it_scores(monkeypatch):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places: list[str] = []

        def to(self, place: Any) -> "Network":  # type: ignore[override]
            self.places.append(str(place))
            return self

    class Networked(Brightness):
        def load(self) -> str:
            self.module = Network()
            return "loaded"

        def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
            assert self.network.places[-1] == "meta"
            return super().score(videos, prompts, fps)

    monkeypatch.setattr("sagecli.registry.load", lambda kind, name: Networked)
    monkeypatch.setattr("sagecli.preflight.device", lambda: torch.device("meta"))
    for offload, places in ((True, ["meta", "cpu", "meta", "cpu"]), (False, ["meta"])):
        scorer = Scorer.loaded([RewardSource(name="n", offload=offload)], 8.0, 60.0)
        assert scorer.reports == ["loaded"]
        for _ in range(2):
            assert scorer(videos(0.2), ["a"]).failures == {}
        assert scorer.rewards["n"].network.places == places


def test_only_the_frames_that_a_reward_looks_at_are_taken():
    class Ends(Brightness):
        def frames(self, total: int, fps: float) -> list[int]:
            return [0, total - 1]

        def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
            assert videos.shape[1] == 2
            scores = super().score(videos, prompts, fps)
            return Scores(scores.axes, scores.monitors, [{"raw": 1}], [(0, "dim")])

    whole = torch.linspace(0.2, 1, 5).view(1, 5, 1, 1, 1).expand(-1, -1, 3, 4, 4)
    scorer = Scorer({"ends": Ends()}, 8.0, 60.0)
    scored = scorer(whole, ["a"])
    assert float(scored.axes["light"]) == pytest.approx(0.6)
    assert scored.details == [{"ends": {"frames": [0, 4], "raw": 1}}]
    assert scorer.warnings == {"ends: dim": {"a"}}
    assert float(Ends()(whole, ["a"], 8.0).axes["light"]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ({"dark": torch.zeros(2)}, "it returned no 'light', but ['dark']"),
        ({"light": torch.zeros(2, 1)}, "its 'light' of 1 videos has the shape (2, 1), not (1,)"),
    ],
)
def test_a_reward_that_returns_something_else_is_named(returned, reason):
    class Wrong(Brightness):
        def score(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
            return Scores(returned, {"darkest": torch.zeros(len(videos))})

    scored = Scorer({"wrong": Wrong()}, 8.0, 60.0)(videos(0.2, 0.3), ["a", "b"])
    assert scored.failures == {0: f"wrong: {reason}", 1: f"wrong: {reason}"}


@pytest.mark.parametrize("axes", [["VQ"], ["VQ", "MQ", "TA", "TA"], ["VQ", "MQ", "TA", "XX"]])
def test_taros_weighs_every_axis_once(axes):
    models = [{"name": "shapes", "weights": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}}]
    components = [{"axis": axis} for axis in axes]
    with pytest.raises(ValidationError, match=r"taros\.components must name each weighed axis once"):
        RewardConfig.model_validate({"models": models, "combine": "taros", "taros": {"components": components}})


def test_names_of_metrics_are_reserved(monkeypatch):
    class Greedy(Brightness):
        axes = ("round",)

    monkeypatch.setattr("sagecli.registry.load", lambda kind, name: Greedy)
    with pytest.raises(UserError, match="gives 'round', a name that metrics have already"):
        make_rewards([RewardSource(name="greedy")])


def test_rewards_by_name():
    def config(name: str, axis: str) -> RewardConfig:
        return RewardConfig.model_validate({"models": [{"name": name, "weights": {axis: 1.0}}]})

    shapes = make_rewards(config("shapes", "TA").models)
    assert shapes["shapes"].axes == ("VQ", "MQ", "TA")
    check_weights(config("shapes", "TA"), shapes)
    with pytest.raises(UserError, match=r"no reward is called 'shape'; installed: .*shapes.*did you mean 'shapes'"):
        make_rewards(config("shape", "TA").models)
    with pytest.raises(UserError, match=r"'shapes' has no axis 'TV'"):
        check_weights(config("shapes", "TV"), shapes)
