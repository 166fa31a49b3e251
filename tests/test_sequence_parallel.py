"""One video's tokens on two processes: the same velocity and the same gradients."""

from pathlib import Path

import pytest
import torch
from distributed_start import start

SCRIPT = Path(__file__).parent / "sequence_cases.py"


@pytest.mark.distributed
def test_shared_tokens_give_the_same_velocity_and_gradients(random_pipeline, tmp_path):
    for count in (1, 2):
        start(SCRIPT, count, str(random_pipeline), str(tmp_path), str(count))
    alone = torch.load(tmp_path / "1-0.pt")
    for turn in (0, 1):
        shared = torch.load(tmp_path / f"2-{turn}.pt")
        assert shared["refusals"] == [
            "parallel.sequence = 3 does not divide the model's 2 attention heads",
            "a video of 1 tokens cannot be shared by parallel.sequence = 2",
        ]
        for name in alone:
            torch.testing.assert_close(shared[name]["velocity"], alone[name]["velocity"], atol=1e-5, rtol=0)
            largest = max(float(value.abs().max()) for value in alone[name]["gradients"].values())
            for key, value in alone[name]["gradients"].items():
                torch.testing.assert_close(shared[name]["gradients"][key], value, atol=1e-5 * largest, rtol=1e-4)
