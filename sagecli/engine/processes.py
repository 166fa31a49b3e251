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
    """This process among those that hold different samples."""

    rank: int = 0
    count: int = 1
    group: Any = None
    """Their torch.distributed group; None: all there are."""
    first: bool = True
    """Whether this one prints and writes the run's files."""

    def gather(self, value: T) -> list[T]:
        """Everyone's value, in order of rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found

    def together(self, work: Callable[[], T]) -> list[T]:
        """What everyone's work came to; what one of them stops for is raised in all."""
        if self.count == 1:
            return [work()]
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except SHARED_ERRORS as raised:
            error = raised
        found = self.gather((result, error))
        for _, raised_there in found:
            if raised_there is not None:
                raise raised_there
        return [value for value, _ in found]  # type: ignore[misc]

    def by_first(self, work: Callable[[], Any]) -> None:
        """Work of the one that writes files; the others wait for it, and stop where it does."""

        def mine() -> None:
            if self.first:
                work()

        self.together(mine)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes; all come with the same shapes."""
        if self.count > 1:
            for work in [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]:
                work.wait()


ALONE = Processes()
