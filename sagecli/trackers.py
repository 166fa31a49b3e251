"""A run's numbers for TensorBoard and W&B, through accelerate's trackers; metrics.jsonl holds them in any case."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagecli.errors import UserError

if TYPE_CHECKING:
    from sagecli.config import Config


class Trackers:
    """Where a run's numbers go beside its own files."""

    def __init__(self, config: "Config", run: Path) -> None:
        """UserError for a tracker that was asked for and is not installed."""
        self._trackers: list[Any] = []
        names = _wanted(config)
        if not names:
            return
        from accelerate import PartialState
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        PartialState()
        for name in names:
            if name == "tensorboard":
                self._trackers.append(TensorBoardTracker("tensorboard", run))
            else:
                self._trackers.append(WandBTracker("sage", name=run.resolve().name, dir=str(run)))
            self._trackers[-1].start()

    def log(self, prefix: str, row: dict[str, Any]) -> None:
        """A row of metrics or an evaluation, at its update; what is no number is left out."""
        values = {f"{prefix}/{key}": value for key, value in row.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(values, step=row["update"])

    def finish(self) -> None:
        """Write what is still in memory."""
        for tracker in self._trackers:
            tracker.finish()


def _wanted(config: "Config") -> list[str]:
    names = []
    installed = find_spec("tensorboard") is not None
    if config.train.tensorboard == "on" and not installed:
        raise UserError("train.tensorboard = 'on' needs tensorboard: pip install tensorboard, or set it to 'auto'")
    if config.train.tensorboard == "on" or (config.train.tensorboard == "auto" and installed):
        names.append("tensorboard")
    if config.train.wandb:
        if find_spec("wandb") is None:
            raise UserError("train.wandb = true needs wandb: pip install wandb")
        names.append("wandb")
    return names
