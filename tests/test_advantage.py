import math

import pytest
import torch

from sagecli.config_reward import RewardConfig
from sagecli.engine.advantage import combine, group_advantage, hoyer_sparsity

NAN = float("nan")


def reward_config(**more: object) -> RewardConfig:
    weights = dict.fromkeys(("VQ", "MQ", "TA"), 1.0) if "combine" in more else {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}
    models = [{"name": "shapes", "weights": weights}]
    return RewardConfig.model_validate({"models": models} | more)


def test_standard_score_within_the_group_with_population_std():
    advantage, used = group_advantage(torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 10.0, 10.0, 14.0]), 4, 5.0)
    std = math.sqrt(1.25)
    expected = [value / (std + 1e-6) for value in (-1.5, -0.5, 0.5, 1.5)]
    expected += [value / (math.sqrt(3) + 1e-6) for value in (-1, -1, -1, 3)]
    assert advantage.tolist() == pytest.approx(expected, rel=1e-6)
    assert used.all()
    assert advantage.view(2, 4).sum(1).tolist() == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 16])
def test_shift_and_scale_do_not_matter(size):
    reward = torch.randn(3 * size, generator=torch.Generator().manual_seed(size))
    first, _ = group_advantage(reward, size, 5.0)
    second, _ = group_advantage(reward * 7 + 3, size, 5.0)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_clip():
    reward = torch.zeros(101)
    reward[-1] = 1.0
    advantage, _ = group_advantage(reward, 101, 5.0)
    assert advantage.max() == 5.0
    assert group_advantage(reward, 101, 50.0)[0].max() == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize("lost", [NAN, math.inf, -math.inf])
def test_a_failed_reward_leaves_its_groups_statistics_alone(lost):
    whole, _ = group_advantage(torch.tensor([1.0, 2.0, 4.0]), 3, 5.0)
    partial, used = group_advantage(torch.tensor([1.0, lost, 2.0, 4.0]), 4, 5.0)
    assert used.tolist() == [True, False, True, True]
    assert partial[used].tolist() == whole.tolist()
    assert partial[1] == 0


@pytest.mark.parametrize("group", [[NAN, NAN, 3.0, NAN], [0.1, 0.1, 0.1, 0.1], [0.7, NAN, 0.7, 0.7], [NAN] * 4])
def test_groups_that_teach_nothing(group):
    advantage, used = group_advantage(torch.tensor(group), 4, 5.0)
    assert not used.any()
    assert advantage.tolist() == [0, 0, 0, 0]


def test_spread_is_seen_where_float32_would_lose_it():
    reward = torch.tensor([1000.0, 1000.0001, 1000.0])  # one unit in the last place apart
    advantage, used = group_advantage(reward, 3, 5.0)
    assert used.all()
    assert advantage[1] > 1


def test_weighted_sum_and_failures():
    axes = {"VQ": torch.tensor([1.0, 2.0]), "MQ": torch.tensor([3.0, 4.0]), "TA": torch.tensor([-1.0, NAN])}
    total = combine(axes, reward_config(), 2)
    assert total[0] == 0.5 + 1.5 - 1.0
    assert total[1].isnan()


def test_hoyer_sparsity_at_its_ends():
    scores = torch.tensor([[1.0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.float64)
    count = torch.tensor([4.0, 4, 4, 3], dtype=torch.float64)
    assert hoyer_sparsity(scores, count).tolist() == pytest.approx([0, 1, 0, 0], abs=1e-12)


def test_taros_against_its_formula():
    components = [{"axis": "VQ", "tau": 0.75}, {"axis": "MQ", "tau": 0.6}, {"axis": "TA", "tau": 0.5, "sigmoid": True}]
    config = reward_config(combine="taros", taros={"components": components, "beta": 0.3})
    vq, mq, ta = [0.9, 0.1, 0.4], [0.2, 0.3, 0.9], [-1.0, 0.5, 2.0]
    axes = {"VQ": torch.tensor([*vq, NAN]), "MQ": torch.tensor([*mq, 0.5]), "TA": torch.tensor([*ta, 0.0])}
    total = combine(axes, config, 4)

    sigmoid = lambda value: 1 / (1 + math.exp(-value))  # noqa: E731
    rows = [vq, mq, [sigmoid(value) for value in ta]]
    sparsity = [
        (math.sqrt(3) - sum(row) / math.sqrt(sum(value * value for value in row))) / (math.sqrt(3) - 1) for row in rows
    ] + [0.0]
    gates = [
        sigmoid(sum(row) / 3 - tau) + 0.3 * (sparsity[index] - sparsity[index + 1])
        for index, (row, tau) in enumerate(zip(rows, (0.75, 0.6, 0.5), strict=True))
    ]
    weights = [math.exp(gate) / sum(math.exp(other) for other in gates) for gate in gates]
    expected = [sum(w * row[index] for w, row in zip(weights, rows, strict=True)) for index in range(3)]
    assert total[:3].tolist() == pytest.approx(expected, rel=1e-6)
    assert total[3].isnan()
