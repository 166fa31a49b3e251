import pytest
import torch

from sagecli.config import TrustRegionConfig
from sagecli.engine.trust_region import TrustRegion, scheduled_lambda


def region(strategy: str, **more: object) -> tuple[TrustRegion, torch.nn.Parameter]:
    weight = torch.nn.Parameter(torch.zeros(3))
    settings = {"strategy": strategy, "anchor_every": 3, "lambda_kl": {"kind": "constant", "value": 1.0}} | more
    return TrustRegion(TrustRegionConfig.model_validate(settings), [weight]), weight


def train(trust: TrustRegion, weight: torch.nn.Parameter, updates: int) -> list[dict[str, float]]:
    """Each update adds 1 to the weight; returns what is remembered after each."""
    history = []
    for update in range(1, updates + 1):
        trust.before_update()
        with torch.no_grad():
            weight.add_(1)
        trust.after_update(update)
        history.append({name: float(tensors[0][0]) for name, tensors in trust.policies.items()})
    return history


def test_what_each_strategy_remembers():
    assert train(*region("none"), updates=4) == [{}] * 4
    assert train(*region("fixed"), updates=4) == [{"initial": 0}] * 4
    assert train(*region("stepwise"), updates=4) == [{"previous": value} for value in (0, 1, 2, 3)]
    assert train(*region("moving"), updates=7) == [{"anchor": value} for value in (0, 0, 3, 3, 3, 6, 6)]
    both = train(*region("dual-moving"), updates=4)
    assert both == [{"anchor": a, "previous": p} for a, p in ((0, 0), (0, 1), (3, 2), (3, 3))]


def test_the_moving_average_is_the_stated_mean_and_no_kl_refers_to_it():
    weight = torch.nn.Parameter(torch.zeros(3))
    trust = TrustRegion(TrustRegionConfig(strategy="moving"), [weight], ema=0.9)
    assert set(trust.betas) == {"anchor"}
    history = [entry["ema"] for entry in train(trust, weight, updates=5)]
    assert history == pytest.approx([sum(0.1 * 0.9 ** (k - i) * i for i in range(1, k + 1)) for k in range(1, 6)])
    with trust.acting("ema"):
        assert float(weight[0].detach()) == pytest.approx(history[-1])
    assert float(weight[0].detach()) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_policies_lie_in_main_memory_and_act_on_the_device():
    weight = torch.nn.Parameter(torch.zeros(3, device="cuda"))
    trust = TrustRegion(TrustRegionConfig(strategy="fixed", offload_anchor=True), [weight], ema=0.5)
    train(trust, weight, updates=2)
    assert all(tensor.device.type == "cpu" for tensors in trust.policies.values() for tensor in tensors)
    with trust.acting("initial"):
        assert weight.tolist() == [0, 0, 0]
    assert weight.tolist() == [2, 2, 2]
    assert trust.policies["ema"][0].tolist() == [1.25] * 3


def test_weights_of_the_terms():
    assert region("dual-moving")[0].betas == {"anchor": 1.0, "previous": 0.1}
    assert region("stepwise", beta_vel=1.0)[0].betas == {"previous": 1.0}
    assert region("fixed", beta_pos=2.0)[0].betas == {"initial": 2.0}


def test_acting_swaps_the_policy_in_and_back_even_when_abandoned():
    trust, weight = region("fixed")
    with torch.no_grad():
        weight.add_(5)
    with trust.acting("initial"):
        assert weight.tolist() == [0, 0, 0]
    assert weight.tolist() == [5, 5, 5]
    with pytest.raises(KeyboardInterrupt), trust.acting("initial"):
        raise KeyboardInterrupt
    assert weight.tolist() == [5, 5, 5]
    assert trust.policies["initial"][0].tolist() == [0, 0, 0]


def lambdas(updates: int, **lambda_kl: object) -> list[float]:
    config = TrustRegionConfig.model_validate({"lambda_kl": lambda_kl}).lambda_kl
    return [scheduled_lambda(config, update) for update in range(updates)]


def test_lambda_schedules():
    assert lambdas(3, kind="constant", value=0.5) == [0.5] * 3
    assert lambdas(5, kind="two-stage", start=1e-7, end=1e-5, switch_at=3) == [1e-7] * 3 + [1e-5] * 2
    assert lambdas(6, kind="linear", start=1.0, end=3.0, ramp=4) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]


def test_adaptive_lambda_moves_within_its_limits():
    trust, _ = region("fixed", lambda_kl={"kind": "adaptive", "start": 1.0, "end": 3.0, "target": 0.1})
    seen = []
    for kl in (0.21, 0.3, 0.3, 0.15, 0.06, 0.04, 0.01, 0.0):
        trust.after_round(kl)
        seen.append(trust.lambda_kl)
    assert seen == pytest.approx([1.5, 2.25, 3.0, 3.0, 3.0, 2.0, 4 / 3, 1.0])
    trust.after_update(1)
    assert trust.lambda_kl == 1.0
