"""Draws the README's pictures from finished quickstart runs: python scripts/readme_figures.py RUN [RUN ...].

docs/images/curve.png: held-out reward over rounds, one line a run. docs/images/before-after.png: the rows of the
first run's sheet.
"""

import json
import sys
from pathlib import Path

import matplotlib
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot

IMAGES = Path(__file__).parent.parent / "docs" / "images"
ROWS = 12


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw_curves(runs: list[Path]) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    colours = ("#2f6fde", "#e07b39", "#3a9a5b", "#8a5cc9")
    for run, colour in zip(runs, colours, strict=False):
        summary = json.loads((run / "summary.json").read_text())
        label = f"seed {summary['seed']}"
        metrics = read(run / "metrics.jsonl")
        axes[0].plot([row["round"] for row in metrics], [row["reward"] for row in metrics], color=colour, alpha=0.3)
        evaluations = read(run / "evaluations.jsonl")
        rounds = [row["round"] for row in evaluations]
        axes[0].plot(rounds, [row["reward"] for row in evaluations], "o-", color=colour, label=label, markersize=3)
        place = runs.index(run) * 0.25
        names = ["reward", *summary["axes"]]
        numbers = [summary["reward"], *summary["axes"].values()]
        axes[1].bar(
            [index + place for index in range(len(names))],
            [entry["after"] - entry["before"] for entry in numbers],
            yerr=[entry["stderr"] for entry in numbers],
            width=0.22,
            color=colour,
            label=label,
        )
        axes[1].set_xticks([index + 0.25 for index in range(len(names))], names)
    axes[0].set(xlabel="round", title="reward: held out (dots) and in training (faint)")
    axes[1].set(title="held-out change and its standard error")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_size(10)
    axes[0].legend(frameon=False)
    axes[1].axhline(0, color="#888", linewidth=0.8)
    figure.savefig(IMAGES / "curve.png", dpi=130)


def crop_sheet(run: Path) -> None:
    sheet = Image.open(run / "before-after.png")
    rows = len(list((run / "evaluations" / "round-000000").glob("*.mp4")))
    head, foot = 34, 8
    height = head + (sheet.height - head - foot) * min(ROWS, rows) // rows
    sheet.crop((0, 0, sheet.width, height)).quantize(192).save(IMAGES / "before-after.png", optimize=True)


if __name__ == "__main__":
    chosen = [Path(argument) for argument in sys.argv[1:]]
    IMAGES.mkdir(parents=True, exist_ok=True)
    draw_curves(chosen)
    crop_sheet(chosen[0])
