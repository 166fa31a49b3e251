"""The page's charts, as plotly figures: a colour a group, a band where a group has several seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plotly import graph_objects

from sagecli.report.collect import Group, Points, Run, exploration, kl_share, mean_and_std, step_gradients

COLOURS = (
    *("#2f6fde", "#d9622b", "#2a9d6f", "#9b51c9", "#c2383f", "#8a7a3c"),
    *("#4aa3b8", "#d45fa0", "#e0a82e", "#7d8ba8", "#7fb13d", "#a56a4b"),
)
"""That tell each other apart on light and on dark."""
Curve = Callable[[Run], Points]


@dataclass(frozen=True)
class Chart:
    """One figure and what to say about it."""

    title: str
    note: str
    figure: dict[str, Any]
    """plotly's JSON."""


def colour(place: int) -> str:
    """Of the place-th group; they repeat after twelve."""
    return COLOURS[place % len(COLOURS)]


def all_charts(groups: Sequence[Group]) -> list[Chart]:
    """Every chart that the runs have numbers for."""
    axes = list(dict.fromkeys(axis for group in groups for run in group.runs for axis in run.axes))
    monitors = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.monitors))
    found = [_rewards(groups, "reward", "Reward")]
    found += [_rewards(groups, axis, axis) for axis in axes]
    found += [_rewards(groups, name, f"{name} (a monitor: measured, never rewarded)") for name in monitors]
    found += [
        _curves(
            groups, "KL to remembered policies", "nats an element; before lambda_kl", _keys(groups, "kl_"), log=True
        ),
        _curves(
            groups,
            "KL's share of the gradient",
            "norm of the weighted KL's gradient over the sum of both norms, in diagnosed updates",
            {"share": kl_share},
        ),
        _curves(groups, "Gradient norm", "before clipping", {"gradient norm": _metric("gradient_norm")}, log=True),
        _step_gradients(groups),
        _curves(groups, "Largest |ratio - 1|", "0 means exactly on policy", {"|ratio - 1|": _metric("ratio_error")}),
        _curves(groups, "Share of clipped pairs", "", {"clipped": _metric("clipped")}),
        _curves(
            groups,
            "Exploration",
            "distance between a group's final latents, over its value in the first round",
            {"exploration": exploration},
        ),
        _curves(groups, "Spread of rewards within a group", "standard deviation", {"spread": _metric("reward_spread")}),
        _curves(
            groups,
            "Videos not scored, groups without spread",
            "",
            {"videos": _metric("failed"), "groups": _metric("dropped_groups")},
        ),
        _curves(
            groups,
            "Seconds a round, by phase",
            "",
            {name: _metric(f"{name}_seconds") for name in ("rollout", "reward", "update")},
        ),
    ]
    return [chart for chart in found if chart.figure["data"]]


def _metric(key: str) -> Curve:
    return lambda run: run.trained(key)


def _keys(groups: Sequence[Group], prefix: str) -> dict[str, Curve]:
    names = {
        key for group in groups for run in group.runs for row in run.metrics for key in row if key.startswith(prefix)
    }
    return {name.removeprefix(prefix): _metric(name) for name in sorted(names)}


def _rewards(groups: Sequence[Group], key: str, title: str) -> Chart:
    """Held-out and training values of one number."""
    figure = graph_objects.Figure()
    for place, group in enumerate(groups):
        curves = {
            "held out": [run.heldout(key) for run in group.runs],
            "training": [run.trained(key) for run in group.runs],
        }
        for name, style in (("held out", {"width": 2.5}), ("training", {"width": 1, "dash": "dot"})):
            _draw(figure, curves[name], f"{group.name}, {name}", colour(place), style, markers=name == "held out")
    note = "solid: held-out prompts; dotted: the rollouts that it trained on"
    if len(groups) > 1:  # their noise would hide the held-out curves
        for trace in figure.data:
            if trace.legendgroup.endswith(", training"):
                trace.visible = "legendonly"
        note += " (click a name to see it)"
    return Chart(title, note, _finished(figure))


def _curves(groups: Sequence[Group], title: str, note: str, curves: dict[str, Curve], log: bool = False) -> Chart:
    """Several numbers of every group; the second and later ones dashed."""
    figure = graph_objects.Figure()
    dashes = ("solid", "dash", "dot", "dashdot")
    for place, group in enumerate(groups):
        for index, (name, curve) in enumerate(curves.items()):
            label = group.name if len(curves) == 1 else f"{group.name}, {name}"
            style = {"width": 2, "dash": dashes[index % len(dashes)]}
            points = [curve(run) for run in group.runs]
            if log:  # a KL is 0 right after its policy was refreshed
                points = [[(x, value) for x, value in one if value > 0] for one in points]
            _draw(figure, points, label, colour(place), style)
    if log:
        figure.update_yaxes(type="log")
    return Chart(title, note, _finished(figure))


def _draw(
    figure: Any, curves: Sequence[Points], name: str, shade: str, style: dict[str, Any], markers: bool = False
) -> None:
    """A mean line, and a band of one standard deviation where there are several curves."""
    rows = mean_and_std([curve for curve in curves if curve])
    if not rows:
        return
    x, mean, std = (list(column) for column in zip(*rows, strict=True))
    if len(curves) > 1:
        edge = [m + s for m, s in zip(mean, std, strict=True)] + [m - s for m, s in zip(mean, std, strict=True)][::-1]
        figure.add_scatter(
            x=[*x, *x[::-1]],
            y=edge,
            fill="toself",
            fillcolor=shade,
            opacity=0.15,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
        )
    figure.add_scatter(
        x=x,
        y=mean,
        name=name,
        legendgroup=name,
        mode="lines+markers" if markers or len(x) == 1 else "lines",
        line={"color": shade, **style},
        marker={"color": shade, "size": 6},
    )


def _step_gradients(groups: Sequence[Group]) -> Chart:
    """Norms over the noise level, before and after the equalizer."""
    figure = graph_objects.Figure()
    for place, group in enumerate(groups):
        tables = [table for run in group.runs if (table := step_gradients(run))]
        shared = set.intersection(*map(set, tables)) if tables else set()
        sigmas = sorted(shared, reverse=True)
        for index, (name, dash) in enumerate((("before", "dot"), ("after", "solid"))):
            if sigmas:
                values = [sum(table[sigma][index] for table in tables) / len(tables) for sigma in sigmas]
                figure.add_scatter(
                    x=sigmas,
                    y=values,
                    name=f"{group.name}, {name}",
                    mode="lines+markers",
                    line={"color": colour(place), "dash": dash},
                    marker={"color": colour(place)},
                )
    figure.update_yaxes(type="log")
    figure.update_xaxes(title="sigma (1 is noise)", autorange="reversed")
    note = "norm of the policy loss's gradient in the velocity, by denoising step, in diagnosed updates"
    return Chart(
        "Gradient of each denoising step, before and after the equalizer", note, _finished(figure, updates=False)
    )


def _finished(figure: Any, updates: bool = True) -> dict[str, Any]:
    figure.update_layout(
        margin={"l": 55, "r": 15, "t": 10, "b": 40}, height=320, hovermode="x unified", template="none"
    )
    if updates:
        figure.update_xaxes(title="update")
    json: dict[str, Any] = figure.to_plotly_json()
    return json
