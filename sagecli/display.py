"""What a training run shows: a live table in a terminal, a line now and then elsewhere; a summary at the end."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sagecli.engine.train import Round

if TYPE_CHECKING:
    from sagecli.config import Config

LINE_EVERY = 10  # rounds between lines where there is no terminal


class TrainDisplay:
    """Shows a run in progress; a Watcher."""

    def __init__(self, console: Console, config: "Config") -> None:
        self.console = console
        self.config = config
        self.first_round = self.round = 0
        self.first: dict[str, Any] = {}
        """The evaluation before training."""
        self.last: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.calls, self.calls_before = 0, 0
        """Calls of the model in this round, and in the one before."""
        self.started = time.monotonic()
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=True)

    def __enter__(self) -> "TrainDisplay":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def resumed(self, round: int, first: dict[str, Any]) -> None:
        """The run goes on after `round`; `first` is its evaluation before training."""
        self.first_round = self.round = round
        self.first = self.last = first

    def tick(self) -> None:
        """The model is about to be called."""
        self.calls += 1

    def evaluated(self, evaluation: dict[str, Any]) -> None:
        """An evaluation was written."""
        if evaluation["round"] == 0:
            self.first = evaluation
            self.started = time.monotonic()
        self.last = evaluation
        self.calls = 0
        if not self.console.is_terminal:
            self.console.print(f"round {evaluation['round']:>5}  held-out reward {_show(evaluation['reward'])}")

    def round_done(self, round: Round) -> None:
        """A round was written."""
        self.round = round.number + 1
        self.metrics = round.updates[-1]
        self.calls, self.calls_before = 0, self.calls
        if not self.console.is_terminal and self.round % LINE_EVERY == 0:
            self.console.print(
                f"round {self.round:>5}  reward {_show(self.metrics['reward'])}"
                f"  gradient norm {self.metrics.get('gradient_norm', 0):.2e}  left {self._left()}"
            )

    def checked(self, lines: list[str]) -> None:
        """The first round's self-checks, a line each."""
        for line in lines:
            self.console.print(
                f"check: {line}", style="yellow" if line.startswith("warning") else "dim", soft_wrap=True
            )

    def _left(self) -> str:
        """Time left, from the rounds of this session."""
        done = self.round - self.first_round
        if not done:
            return "…"
        return clock((time.monotonic() - self.started) / done * (self.config.train.rounds - self.round))

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_row("progress", ProgressBar(self.config.train.rounds, self.round, width=60))
        for label, value in self._rows():
            table.add_row(label, value)
        return table

    def _rows(self) -> list[tuple[str, str]]:
        now = f"{self.round} of {self.config.train.rounds} · {self._left()} left · call {self.calls}"
        rows = [("round", now + (f" of about {self.calls_before}" if self.calls_before else ""))]
        if self.last:
            change = f" (start {_show(self.first.get('reward'))})"
            rows.append(("held-out reward", f"{_show(self.last['reward'])}{change}, round {self.last['round']}"))
        if not self.metrics:
            return rows
        metrics = self.metrics
        axes = [axis for model in self.config.reward.models for axis in model.weights]
        rows.append(("reward", f"{_show(metrics['reward'])} · " + " · ".join(_named(metrics, axes))))
        rows.append(
            (
                "groups",
                f"spread {metrics['reward_spread']:.3f} · failed {metrics['failed']} videos · "
                f"dropped {metrics['dropped_groups']} groups",
            )
        )
        if metrics.get("not_finite"):
            rows.append(("update", "skipped: its gradient is not finite"))
        if not metrics["skipped"]:
            rows.append(
                (
                    "ratio",
                    f"mean {metrics['ratio']:.6f} · largest |ratio - 1| {metrics['ratio_error']:.1e} · "
                    f"clipped {metrics['clipped']:.0%}",
                )
            )
            kls = [f"{name[3:]} {value:.2e}" for name, value in metrics.items() if name.startswith("kl_")]
            rows.append(("KL", " · ".join([*kls, f"lambda {metrics['lambda_kl']:g}"]) if kls else "none"))
            rows.append(("gradient norm", f"{metrics['gradient_norm']:.2e}"))
        phases = [
            f"{name.removesuffix('_seconds')} {value:.1f}"
            for name, value in metrics.items()
            if name.endswith("_seconds")
        ]
        rows.append(("seconds", " · ".join(phases)))
        return rows


def _named(metrics: dict[str, Any], names: list[str]) -> list[str]:
    return [f"{name} {_show(metrics[name])}" for name in names]


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary_table(summary: dict[str, Any]) -> Table:
    """Before against after on held-out prompts, with the standard error of the paired difference."""
    table = Table(title=f"held-out prompts, before and after {summary['rounds']} rounds", title_justify="left")
    table.add_column("")
    for column in ("before", "after", "difference", "standard error"):
        table.add_column(column, justify="right")
    rows = {"reward": summary["reward"]} | summary["axes"] | summary["monitors"]
    for name, numbers in rows.items():
        before, after, stderr = numbers["before"], numbers["after"], numbers["stderr"]
        change = None if before is None else after - before
        style = "bold" if name == "reward" else "dim" if name in summary["monitors"] else ""
        table.add_row(
            name,
            _show(before),
            _show(after),
            "-" if change is None else f"{change:+.3f}",
            "-" if stderr is None else f"{stderr:.4f}",
            style=style,
        )
    return table


def note(text: str) -> Text:
    """A line of small print."""
    return Text(text, style="dim")


def progress(console: Console) -> Progress:
    """A bar with how many are done and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def show_warnings(console: Console, warnings: dict[str, set[str]]) -> None:
    """What rewards warned of, each once with how many prompts it concerns."""
    for sentence, prompts in warnings.items():
        count = f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
        console.print(f"warning: {sentence} ({count})", style="yellow", soft_wrap=True)
