import math

import pytest

from sagecli.summary import compare, means, summarize


def row(prompt: str, reward: float | None, speed: float = 0.0) -> dict[str, object]:
    return {"prompt": prompt, "seed": 0, "reward": reward, "axes": {"VQ": reward}, "monitors": {"speed_error": speed}}


def test_standard_error_is_of_the_paired_difference_over_prompts():
    before = [row("a", 0.1), row("a", 0.3), row("b", 0.5), row("c", 0.2)]
    after = [row("a", 0.2), row("a", 0.6), row("b", 0.6), row("c", 0.8)]
    result = compare(before, after, "reward", "reward")
    assert result["before"] == pytest.approx(0.275)
    assert result["after"] == pytest.approx(0.55)
    differences = [0.2, 0.1, 0.6]  # a's two seeds averaged
    mean = sum(differences) / 3
    expected = math.sqrt(sum((value - mean) ** 2 for value in differences) / 2) / math.sqrt(3)
    assert result["stderr"] == pytest.approx(expected)


def test_videos_that_failed_in_either_are_left_out_of_both():
    before = [row("a", 0.1), row("b", None), row("c", 0.5)]
    after = [row("a", 0.2), row("b", 0.9), row("c", None)]
    assert compare(before, after, "reward", "reward") == {"before": 0.1, "after": 0.2, "stderr": None}
    assert compare([row("a", None)], [row("a", 1.0)], "reward", "reward")["before"] is None


def test_summary_holds_reward_axes_and_monitors():
    summary = summarize([row("a", 0.1, 2.0), row("b", 0.2, 1.0)], [row("a", 0.3, 1.0), row("b", 0.5, 1.0)])
    assert summary["reward"]["after"] == pytest.approx(0.4)
    assert summary["axes"]["VQ"] == summary["reward"]
    assert summary["monitors"]["speed_error"]["before"] == 1.5
    assert means([row("a", 0.1), row("b", None)]) == {"reward": 0.1, "VQ": 0.1, "speed_error": 0.0}
