"""Grids, their runs and what they show; small but real runs of the embedded model."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sagecli.ablation.grid import grid_names, load_grid, plan
from sagecli.ablation.results import Difference, paired_bootstrap
from sagecli.ablation.table import result_table
from sagecli.errors import UserError
from sagecli.rundir import read_jsonl

GRID = """
about = "a strong and a weak step"
seeds = 2
ranked = true
plot = ["reward", "axes", "exploration", "kl_share"]
columns = ["exploration", "kl_share"]
set = { "train.diagnose_every" = 1 }

[[cells]]
name = "small steps"
set = { "optimizer.lr" = 1e-4 }

[[cells]]
name = "large steps"
set = { "optimizer.lr" = 2e-2, "optimizer.warmup" = 0 }
"""
SMALL = (
    "train.rounds=2",
    "train.groups_per_round=1",
    "train.group_size=3",
    "eval.seeds=[0, 1]",
    "eval.steps=2",
    "sampler.steps=3",
    "sampler.sde_steps=all",
    "train.tensorboard=off",
)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    prompts = tmp_path / "p.txt"
    prompts.write_text("a small red circle moving left fast\na large blue square moving up slowly\n")
    (tmp_path / "grid.toml").write_text(GRID)
    settings = [*SMALL, f"eval.prompts={prompts}"]
    return [str(tmp_path / "grid.toml"), *(part for setting in settings for part in ("--set", setting))]


@pytest.mark.parametrize("name", ["equalizer", "kl-strategy", "kl-weight", "methods", "sde", "setting"])
@pytest.mark.parametrize("preset", ["quickstart", "setting-b"])
def test_every_packaged_grid_fits_its_presets(name, preset):
    assert name in grid_names()
    grid = load_grid(name)
    cells = plan(grid, preset, ["train.rounds=6"])
    assert [cell.name for cell in cells] == [cell.name for cell in grid.cells]
    assert all(cell.config.train.rounds == 6 for cell in cells)
    dumps = [cell.config.model_dump() for cell in cells]
    assert all(one != other for index, one in enumerate(dumps) for other in dumps[:index])


def test_the_papers_kl_weights_hold_on_its_presets_and_larger_ones_on_the_embedded_model():
    weights = {
        preset: [c.config.trust_region.lambda_kl for c in plan(load_grid("kl-weight"), preset, [])]
        for preset in ("setting-b", "quickstart")
    }
    assert [weights["setting-b"][0].value, weights["setting-b"][1].start, weights["setting-b"][1].end] == [
        1e-5,
        1e-7,
        1e-5,
    ]
    for paper, embedded in zip(weights["setting-b"], weights["quickstart"], strict=True):
        assert paper.kind == embedded.kind
        for key in ("value", "start", "end"):
            if hasattr(paper, key):
                assert getattr(embedded, key) == pytest.approx(1e6 * getattr(paper, key))


def test_setting_a_and_b_weigh_every_axis(tmp_path):
    for preset in ("quickstart", "setting-b"):
        a, b = (cell.config.reward.models[0].weights for cell in plan(load_grid("setting"), preset, []))
        assert (a, b) == ({"VQ": 1.0, "MQ": 1.0, "TA": 1.0}, {"VQ": 0.5, "MQ": 0.5, "TA": 1.0})


def test_rewards_of_other_weights_are_not_compared(sage, arguments, tmp_path):
    grid = tmp_path / "weights.toml"
    grid.write_text(
        'about = "two weighings"\n'
        'compare = ["TA", "VQ"]\n'
        '[[cells]]\nname = "A"\nweights = { VQ = 1.0, MQ = 1.0, TA = 1.0 }\n'
        '[[cells]]\nname = "B"\nweights = { VQ = 0.5, MQ = 0.5, TA = 1.0 }\n'
    )
    assert load_grid("setting").compare == ("VQ", "MQ", "TA")
    out = tmp_path / "out"
    result = sage("ablate", str(grid), *arguments[1:], "--seeds", "1", "--set", "train.rounds=1", "--out", str(out))
    assert result.code == 0, result.err
    differences = json.loads((out / "results.json").read_text())["cells"]["B"]["difference_to_first"]
    (row,) = (line for line in result.out.splitlines() if line.startswith("│ B"))
    shown = [cell.strip() for cell in row.split("│")[6:8]]
    for cell, axis in zip(shown, ("TA", "VQ"), strict=True):
        assert f"[{differences[axis]['low']:+.4f}, {differences[axis]['high']:+.4f}]" in cell


def test_methods_are_all_of_table_2():
    cells = plan(load_grid("methods"), "setting-b", [])
    assert [(c.config.sampler.sde, c.config.trust_region.strategy) for c in cells] == [
        *((sde, kl) for sde in ("dance", "flow", "cps", "precise") for kl in ("none", "fixed")),
        ("precise", "dual-moving"),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("about = 'x'\ncells = []", "cells: "),
        ("about = 'x'\nplots = []\n[[cells]]\nname = 'a'", "plots: extra inputs"),
        ("about = 'x'\n[[cells]]\nname = 'a'\n[[cells]]\nname = 'a'", "two cells are called 'a'"),
        (
            "about = 'x'\ncompare = ['TB']\n[[cells]]\nname = 'a'",
            "compare has 'TB'; with these rewards there are reward, VQ, MQ, TA",
        ),
        (
            "about = 'x'\nplot = ['speed']\n[[cells]]\nname = 'a'",
            "plot has 'speed'; with these rewards there are reward, VQ, MQ, TA, axes, exploration, kl_share, speed",
        ),
        (
            "about = 'x'\ncolumns = ['speed']\n[[cells]]\nname = 'a'",
            "columns has 'speed'; there are exploration, kl_share",
        ),
        ("about =", "line 1: not TOML"),
    ],
)
def test_a_bad_grid_is_one_sentence(sage, tmp_path, text, sentence):
    (tmp_path / "g.toml").write_text(text)
    result = sage("ablate", str(tmp_path / "g.toml"), "--out", str(tmp_path / "o"))
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert sentence in result.err
    assert not (tmp_path / "o").exists()


def test_bad_cells_and_names_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"unknown ablation 'kl-strat'; there are equalizer, kl-strategy.*did you mean"):
        load_grid("kl-strat")
    (tmp_path / "g.toml").write_text("about = 'x'\n[[cells]]\nname = 'a'\nset = {'sampler.sde' = 'dense'}")
    with pytest.raises(UserError, match=r"cell 'a': --set: sampler.sde = .dense.*did you mean 'dance'"):
        plan(load_grid(str(tmp_path / "g.toml")), "quickstart", [])
    (tmp_path / "g.toml").write_text("about = 'x'\n[[cells]]\nname = 'a'\nweights = {XQ = 1.0}")
    with pytest.raises(UserError, match="cell 'a': no reward of this preset weighs 'XQ'; they weigh VQ, MQ, TA"):
        plan(load_grid(str(tmp_path / "g.toml")), "quickstart", [])


def test_the_bootstrap_is_paired_and_covers():
    generator = np.random.default_rng(1)
    noise = generator.normal(0, 0.05, (3, 40))
    certain = paired_bootstrap(0.03 + noise)
    assert certain.mean == pytest.approx(float((0.03 + noise).mean()))
    assert certain.low < certain.mean < certain.high
    assert certain.shown
    assert not paired_bootstrap(noise - noise.mean()).shown
    constant = paired_bootstrap(np.full((2, 5), 0.25))
    assert (constant.low, constant.high) == (pytest.approx(0.25), pytest.approx(0.25))
    # over independent prompts of one seed it is nearly the normal interval
    one = generator.normal(0, 1, (1, 400))
    found, error = paired_bootstrap(one), one.std() / math.sqrt(400)
    assert (found.high - found.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.05)
    # seeds that disagree widen it
    apart = paired_bootstrap(np.array([[0.1] * 40, [-0.02] * 40, [0.05] * 40]))
    assert not apart.shown


def test_a_grid_runs_to_a_table_figures_and_a_page(sage, arguments, tmp_path):
    out = tmp_path / "out"
    result = sage("ablate", *arguments, "--out", str(out))
    assert result.code == 0, result.err
    results = json.loads((out / "results.json").read_text())["cells"]
    assert list(results) == ["small steps", "large steps"]
    for name, folder in (("small steps", "small-steps"), ("large steps", "large-steps")):
        final = [read_jsonl(out / f"{folder}-seed{seed}" / "evaluations.jsonl")[-1]["reward"] for seed in (0, 1)]
        numbers = results[name]["numbers"]["reward"]
        assert numbers["runs"] == final
        assert (numbers["mean"], numbers["std"]) == (pytest.approx(np.mean(final)), pytest.approx(np.std(final)))
        assert f"{np.mean(final):.4f} ± {np.std(final):.4f}" in result.out
    rows = [
        [read_jsonl(out / f"{one}-seed{seed}" / "evaluations" / "round-000002" / "scores.jsonl") for seed in (0, 1)]
        for one in ("small-steps", "large-steps")
    ]
    change = np.mean(
        [b["reward"] - a["reward"] for seed in (0, 1) for a, b in zip(rows[0][seed], rows[1][seed], strict=True)]
    )
    difference = results["large steps"]["difference_to_first"]["reward"]
    assert difference["mean"] == pytest.approx(change)
    assert difference["shown"] == (difference["low"] > 0 or difference["high"] < 0)
    assert ("not shown" in result.out) == (not difference["shown"])
    for key in ("reward", "VQ", "MQ", "TA", "exploration", "kl-share"):
        assert (out / f"{key}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (out / f"{key}.svg").read_bytes()
    assert "small steps (2 seeds; bands" in " ".join((out / "report.html").read_text().split())
    # both cells began from the same noise and prompts
    starts = [read_jsonl(out / f"{one}-seed0" / "metrics.jsonl")[0]["reward"] for one in ("small-steps", "large-steps")]
    assert starts[0] == starts[1]
    # a second call redoes nothing
    before = {path: path.stat().st_mtime_ns for path in out.glob("*-seed*/**/*") if path.is_file()}
    assert sage("ablate", *arguments, "--out", str(out)).code == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    result = sage("ablate", *arguments, "--set", "sampler.eta=0.3", "--out", str(out))
    assert (result.code, "holds an ablation with other settings" in result.err) == (2, True)


def test_a_failed_cell_is_shown_and_the_others_go_on(sage, arguments, tmp_path):
    grid = tmp_path / "grid.toml"
    grid.write_text(GRID.replace("2e-2", "1e30") + '\n[[cells]]\nname = "third"\n')
    out = tmp_path / "out"
    result = sage("ablate", *arguments, "--seeds", "1", "--out", str(out))
    assert result.code == 1
    assert "failed: large-steps-seed0: " in result.out
    results = json.loads((out / "results.json").read_text())["cells"]
    assert (results["large steps"]["numbers"], list(results["large steps"]["failures"])) == ({}, ["0"])
    assert results["third"]["numbers"]["reward"]["runs"]
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_killed_half_way_it_finishes_without_redoing(arguments, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "sagecli.cli", "ablate", *arguments, "--jobs", "1", "--out", str(out)]
    for signum in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            finished = len(list(out.glob("*/summary.json")))
            while process.poll() is None and len(list(out.glob("*/summary.json"))) <= finished:
                time.sleep(0.05)
            if signum == signal.SIGKILL:
                os.killpg(process.pid, signum)
                subprocess.run(["pkill", "-9", "-f", str(out)], check=False)
            else:
                os.kill(process.pid, signum)
            text = process.communicate(timeout=120)[0]
        if signum == signal.SIGINT:
            assert process.returncode == 130
            assert "the same command goes on" in text
    done = {path: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    assert len(done) >= 2
    assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0
    assert len(list(out.glob("*/summary.json"))) == 4
    assert {path: path.stat().st_mtime_ns for path in done} == done


@pytest.mark.slow
def test_a_dry_run_runs_one_round_and_keeps_nothing(sage, arguments, tmp_path):
    result = sage("ablate", *arguments, "--dry-run", "--out", str(tmp_path / "out"))
    assert result.code == 0, result.err
    assert "optimizer.lr=0.0001" in result.out
    assert "a round took" in result.out
    assert "4 runs" in result.out
    assert not (tmp_path / "out").exists()


def test_the_table_marks_best_second_and_third():
    from sagecli.ablation.grid import Cell, Grid
    from sagecli.ablation.results import CellResult
    from sagecli.report.collect import Run

    names = ["a", "b", "c", "d"]
    grid = Grid(about="x", ranked=True, cells=tuple(Cell(name=name) for name in names))
    run = Run("r", Path(), {}, [], [], [])
    values = dict(zip(names, (0.2, 0.4, 0.1, 0.3), strict=True))
    results = [
        CellResult(
            name,
            [run],
            {},
            {"reward": [values[name]]},
            {"reward": Difference(0.1, 0.05 if name == "b" else -0.05, 0.2)},
        )
        for name in names
    ]
    rows = result_table(results, grid, "")["rows"]
    assert [row[1]["class"] for row in rows] == ["number third", "number best", "number", "number second"]
    assert [row[2]["text"] for row in rows] == [
        "the first",
        "+0.1000 [+0.0500, +0.2000]",
        "not shown [-0.0500, +0.2000]",
        "not shown [-0.0500, +0.2000]",
    ]
