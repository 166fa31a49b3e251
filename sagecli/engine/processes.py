"""The processes of a run, and all that they say to each other.

Each holds the samples of its share. Scores are gathered, so that all compute the same advantages, and gradients are
summed once an update. What one of them stops for, all stop for, with the same sentence. A process alone says nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from sagecli.errors import RunStopped, UserError
from sagecli.interrupt import Interrupted

T = TypeVar("T")
SHARED_ERRORS = (RunStopped, UserError, Interrupted)
"""What a process may stop for between two collectives; anything else ends it, and the others notice (launch.py)."""


@dataclass(frozen=True)
class Processes:
    """This process among those of a run. Where neighbours share one video's tokens, they count as one."""

    rank: int = 0
    """Of those that hold different samples."""
    count: int = 1
    sequence: int = 1
    """Neighbours that share the tokens of the same samples."""
    turn: int = 0
    """Its place among these."""

    @property
    def world(self) -> int:
        """All processes."""
        return self.count * self.sequence

    @property
    def leads(self) -> bool:
        """Whether it writes what its neighbours have too."""
        return self.turn == 0

    @property
    def first(self) -> bool:
        """Whether it prints and writes the run's files."""
        return self.rank == self.turn == 0

    def gather_all(self, value: T) -> list[T]:
        """The value of every process."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def gather(self, value: T) -> list[T]:
        """The values of those that hold different samples, in order of rank."""
        return self.gather_all(value)[self.turn :: self.sequence]

    def together(self, work: Callable[[], T]) -> list[T]:
        """What everyone's work came to, as gather has it; what one of them stops for is raised in all."""
        if self.world == 1:
            return [work()]
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except SHARED_ERRORS as raised:
            error = raised
        found = self.gather_all((result, error))
        for _, raised_there in found:
            if raised_there is not None:
                raise raised_there
        return [value for value, _ in found[self.turn :: self.sequence]]  # type: ignore[misc]

    def by_first(self, work: Callable[[], Any]) -> None:
        """Work of the one that writes files; the others wait for it, and stop where it does."""

        def mine() -> None:
            if self.first:
                work()

        self.together(mine)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes; all come with the same shapes."""
        if self.world > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()


ALONE = Processes()
