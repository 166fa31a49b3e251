"""Brightness: the mean of all pixels, to a power."""

from sagecli.rewards import Reward, Scores


class Brightness(Reward):
    axes = ("brightness",)
    needs_prompt = False

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def score(self, videos, prompts, fps):
        return Scores({"brightness": videos.mean((1, 2, 3, 4)) ** self.power})
