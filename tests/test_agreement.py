import pytest
import torch

from sagecli.agreement import agreement


def by_hand(human: list[int], differences: list[float]) -> tuple[float | None, float]:
    """Straight from METHOD.md section 7: every eps among |d| is tried."""
    preferred = [(h, d) for h, d in zip(human, differences, strict=True) if h]
    without = sum(h * d > 0 for h, d in preferred) / len(preferred) if preferred else None
    best = 0
    for eps in {abs(d) for d in differences}:
        predicted = [0 if abs(d) <= eps else (1 if d > 0 else -1) for d in differences]
        best = max(best, sum(p == h for p, h in zip(predicted, human, strict=True)))
    return without, best / len(human)


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_stated_share(seed):
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 12, (), generator=generator))
    human = (torch.randint(0, 3, (count,), generator=generator) - 1).tolist()
    differences = (torch.randint(-4, 5, (count,), generator=generator) / 4).tolist()  # with ties, and sizes that repeat
    result = agreement(human, differences)
    assert (result.without_ties, result.with_ties) == by_hand(human, differences)
    assert result.eps in {abs(d) for d in differences}
    predicted = [0 if abs(d) <= result.eps else (1 if d > 0 else -1) for d in differences]
    assert sum(p == h for p, h in zip(predicted, human, strict=True)) / count == result.with_ties


def test_a_models_tie_is_wrong_without_ties():
    assert agreement([1, -1, 1], [0.0, -2.0, 3.0]).without_ties == pytest.approx(2 / 3)
    assert agreement([0, 0], [0.5, -0.1]).without_ties is None
