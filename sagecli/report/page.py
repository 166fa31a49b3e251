"""The page itself: report.html and report_files/ beside it, which hold plotly's script, the videos and the sheets."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from sagecli.report.charts import all_charts, colour
from sagecli.report.collect import Group
from sagecli.rundir import round_name, write_text

FILES = "report_files"


def write_page(groups: Sequence[Group], folder: Path, title: str, tables: Sequence[dict[str, Any]] = ()) -> Path:
    """Write folder/report.html and folder/report_files/, anew.

    tables: each {"title", "note", "columns", "rows"}, shown before the charts; a cell may be {"text", "class"}.
    """
    files = folder / FILES
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    (files / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    charts = all_charts(groups)
    figures = json.dumps([chart.figure for chart in charts], cls=PlotlyJSONEncoder)
    environment = Environment(loader=PackageLoader("sagecli.report", "."), autoescape=True, trim_blocks=True)
    html = environment.get_template("page.html.j2").render(
        title=title,
        groups=[
            {"name": group.name, "colour": colour(place), "runs": group.runs} for place, group in enumerate(groups)
        ],
        tables=tables,
        charts=charts,
        figures=figures.replace("<", "\\u003c"),
        videos=[_videos(group, files) for group in groups],
        sheets=[sheet for group in groups for run in group.runs for sheet in _sheets(run.path, run.name, files)],
        settings=_settings(groups),
    )
    page = folder / "report.html"
    write_text(page, html)
    return page


def _videos(group: Group, files: Path) -> dict[str, Any]:
    """The first run's held-out videos, copied."""
    run = group.runs[0]
    rows = []
    for prompt, before, after in run.videos():
        names = []
        for which, source in (("before", before), ("after", after)):
            name = f"{_safe(run.name)}-{source.stem}-{which}.mp4"
            shutil.copyfile(source, files / name)
            names.append(f"{FILES}/{name}")
        rows.append({"prompt": prompt, "before": names[0], "after": names[1]})
    return {"name": run.name, "rows": rows}


def _sheets(run: Path, name: str, files: Path) -> list[dict[str, str]]:
    """Contact sheets of the first and the last evaluation, copied."""
    rounds = sorted(folder.name for folder in (run / "evaluations").glob("round-*") if (folder / "sheet.png").is_file())
    found = []
    for round in dict.fromkeys([*rounds[:1], *rounds[-1:]]):
        target = f"{_safe(name)}-{round}.png"
        shutil.copyfile(run / "evaluations" / round / "sheet.png", files / target)
        number = int(round.removeprefix(round_name(0)[:6]))
        found.append({"file": f"{FILES}/{target}", "label": f"{name}, after {number} rounds"})
    return found


def _safe(name: str) -> str:
    """A name that may stand in a file's name and in a link."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)


def _settings(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Every key with its value in each group; differing where they are not all the same."""
    first = [group.runs[0].settings for group in groups]
    keys = sorted({key for settings in first for key in settings})
    rows = []
    for key in keys:
        values = ["" if key not in settings else json.dumps(settings[key], ensure_ascii=False) for settings in first]
        rows.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return rows
