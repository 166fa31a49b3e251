"""The [parallel] table: what several processes share beside a round's samples."""

from typing import Annotated

from pydantic import Field

from sagecli.config_base import Count, Section


class ParallelConfig(Section):
    """What several processes share beside a round's samples."""

    data: Annotated[int, Field(ge=0)] = 0
    """Processes that hold different samples; 0: as many as there are (over `sequence`)."""
    sequence: Count = 1
    """Neighbouring processes that share one video's tokens (Ulysses)."""
    shard: bool = False
    """Split parameters, gradients, optimizer states and remembered policies over the processes (FSDP2)."""
