"""The sigma schedule: u = linspace(1, 0, T + 1), sigma = shift * u / (1 + (shift - 1) * u).

sigma = 1 is noise, 0 is data; METHOD.md section 1.
"""

import torch
from torch import Tensor


def sigma_schedule(steps: int, shift: float) -> Tensor:
    """Sigmas [T + 1] float64, falling from exactly 1 to exactly 0."""
    uniform = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    sigma = shift * uniform / (1 + (shift - 1) * uniform)
    sigma[0] = 1  # exactly, where 1 + (shift - 1) is rounded
    return sigma
