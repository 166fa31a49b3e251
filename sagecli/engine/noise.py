"""Random numbers by name, not by order: a sample's noise depends on its seed alone.

No generator lives through a run, so batches, processes, windows and resumed runs cannot shift the noise. NumPy's
generator is used because its normal numbers do not depend on the processor's vector instructions.
"""

import numpy as np
import torch
from torch import Tensor


def sample_seed(run_seed: int, round: int, prompt: int, sample: int) -> int:
    """Seed of one sample of a round, under 2^53 so that JSON keeps it exact."""
    low, high = np.random.SeedSequence([run_seed, round, prompt, sample]).generate_state(2)
    return int(high & 0x1FFFFF) << 32 | int(low)


def gaussian(seed: int, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 tensor on the CPU; stream 0 is the initial noise, 1 + step a step's noise."""
    numbers = np.random.default_rng([seed, stream]).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(numbers)


def shuffled(size: int, *names: int) -> list[int]:
    """A permutation of range(size) that depends on the names alone."""
    return [int(index) for index in np.random.default_rng(names).permutation(size)]
