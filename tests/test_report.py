"""The page, from real runs; with a real browser where one is installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sagecli.report.collect import exploration, kl_share, mean_and_std, read_run, step_gradients
from sagecli.rundir import read_jsonl

SMALL = (
    "train.rounds=3",
    "train.groups_per_round=1",
    "train.group_size=3",
    "train.diagnose_every=1",
    "train.report_every=2",
    "eval.seeds=[0, 1]",
    "eval.steps=2",
    "sampler.steps=4",
    "sampler.sde_steps=all",
)


@pytest.fixture(scope="module")
def runs(sage, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    prompts = folder / "p.txt"
    prompts.write_text("a small red circle moving left fast\na large blue square moving up slowly\n")
    made = []
    for seed in (0, 1):
        settings = [*SMALL, f"eval.prompts={prompts}", f"train.seed={seed}", f"sampler.eta={0.5 + seed / 4}"]
        arguments = [part for setting in settings for part in ("--set", setting)]
        result = sage("train", "--run", str(folder / f"run</script>{seed}".replace("/", "")), *arguments)
        assert result.code == 0, result.err
        made.append(folder / f"run<script>{seed}")
    return made


def figures(page: Path) -> list[dict]:
    match = re.search(r"^const figures = (.*);$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return json.loads(match[1])


def test_a_run_writes_its_page_and_tensorboard_events(runs):
    page = runs[0] / "report.html"
    assert page.is_file()
    assert (runs[0] / "report_files" / "plotly.min.js").stat().st_size > 1e6
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {file.parent for file in runs[0].rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    rows = read_jsonl(runs[0] / "metrics.jsonl")
    logged = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert logged == [(row["update"], pytest.approx(row["reward"])) for row in rows]
    assert len(events.Scalars("heldout/TA")) == len(read_jsonl(runs[0] / "evaluations.jsonl"))


def test_the_curves_are_the_runs_numbers(runs):
    rows, evaluations = read_jsonl(runs[0] / "metrics.jsonl"), read_jsonl(runs[0] / "evaluations.jsonl")
    found = {trace["name"]: trace for figure in figures(runs[0] / "report.html")[:1] for trace in figure["data"]}
    name = runs[0].name
    assert found[f"{name}, held out"]["x"] == [row["update"] for row in evaluations]
    assert found[f"{name}, held out"]["y"] == [row["reward"] for row in evaluations]
    assert found[f"{name}, training"]["y"] == [row["reward"] for row in rows]
    run = read_run(runs[0])
    for (x, share), row in zip(kl_share(run), rows, strict=True):
        parts = [row[f"gradient_norm_{part}"] for part in ("policy", "kl")]
        assert (x, share) == (row["update"], pytest.approx(parts[1] / sum(parts)))
    assert exploration(run)[0][1] == 1
    steps = step_gradients(run)
    for entry in rows[0]["step_gradients"]:
        values = [one["before"] for row in rows for one in row["step_gradients"] if one["sigma"] == entry["sigma"]]
        assert steps[entry["sigma"]][0] == pytest.approx(sum(values) / len(values))


def test_several_runs_are_overlaid_and_what_differs_is_marked(sage, runs, tmp_path):
    result = sage("report", *map(str, runs), "--out", str(tmp_path / "page"))
    assert result.code == 0, result.err
    text = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    names = {trace["name"] for trace in figures(tmp_path / "page" / "report.html")[0]["data"]}
    assert names == {f"{run.name}, {which}" for run in runs for which in ("held out", "training")}
    marked = re.findall(r'<tr class="differs"><td><code>([^<]+)</code>', text)
    assert sorted(marked) == ["sampler.eta", "train.seed"]
    assert "<script>0" not in text  # a run's name is text, not markup
    assert "https://" not in re.sub(r"<script src[^>]*></script>", "", text)  # nothing is fetched
    for name in re.findall(r'(?:src|href)="([^"]+)"', text):
        assert (tmp_path / "page" / name).is_file()
    for run in runs:  # the same videos as the runs kept
        copied = next((tmp_path / "page" / "report_files").glob(f"*{run.name[-1]}-000-after.mp4"))
        assert copied.read_bytes() == (run / "evaluations" / "round-000003" / "000.mp4").read_bytes()


def test_refusals(sage, runs, tmp_path):
    (tmp_path / "config.toml").write_text((runs[0] / "config.toml").read_text())
    for arguments, sentence in (
        ((str(tmp_path / "no"),), "is not a run folder"),
        ((str(tmp_path),), "has nothing to show yet"),
        (tuple(map(str, runs)), "name the folder of a page of several runs with --out"),
        ((str(runs[0]), str(runs[0]), "--out", str(tmp_path / "o")), "a run is named twice"),
    ):
        result = sage("report", *arguments)
        assert (result.code, sentence in result.err) == (2, True), result.err


def test_mean_and_std_are_over_what_all_curves_have():
    curves = [[(0, 1.0), (1, 2.0), (2, 9.0)], [(0, 3.0), (1, 2.0)]]
    assert mean_and_std(curves) == [(0, 2.0, 1.0), (1, 2.0, 0.0)]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium is installed")
def test_a_browser_draws_every_chart_and_can_play_every_video(sage, runs, tmp_path):
    assert sage("report", *map(str, runs), "--out", str(tmp_path)).code == 0
    page = tmp_path / "report.html"
    probe = """<script>addEventListener("load", () => setTimeout(() => {
      const charts = [...document.querySelectorAll(".chart")].filter(one => one.querySelector(".main-svg")).length;
      const videos = [...document.querySelectorAll("video")].filter(one => one.readyState >= 2 && !one.error).length;
      document.title = `charts ${charts} videos ${videos}`; }, 3000));</script></html>"""
    page.write_text(page.read_text(encoding="utf-8").replace("</html>", probe), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--dump-dom"]
    text = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120).stdout
    assert f"<title>charts {len(figures(page))} videos 8</title>" in text
