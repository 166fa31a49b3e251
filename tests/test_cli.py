"""`sage presets` and `sage inspect`, and what every command has in common."""

import json
import math

import pytest

from sagecli.engine.sampler import build_table
from sagecli.loading import load_config, preset_names


def test_presets_are_listed_with_a_line_each(sage):
    result = sage("presets")
    assert result.code == 0
    rows = result.out.splitlines()
    assert [row.split()[0] for row in rows] == preset_names()
    assert all(len(row.split()) > 4 for row in rows)
    assert 'sde = "precise"' in sage("presets", "setting-b").out
    unknown = sage("presets", "setting-c")
    assert (unknown.code, unknown.out) == (2, "")
    assert "did you mean" in unknown.err


def test_inspect_rows_are_the_table_a_run_would_use(sage):
    result = sage("inspect", "--set", "sampler.steps=100", "--json")
    assert result.code == 0
    rows = json.loads(result.out)
    assert len(rows) == 100
    assert all(set(row) == {"step", "sigma", "sigma_next", "a", "b", "std", "equalizer"} for row in rows)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    config = load_config("quickstart", ["sampler.steps=100"])
    table = build_table(config.sampler, config.objective.equalizer)
    assert [row["std"] for row in rows] == table.std.tolist()
    assert [row["equalizer"] for row in rows] == table.equalizer.tolist()
    assert {row["step"] for row in rows if row["std"] > 0} == set(table.trained_steps)


def test_inspect_shows_figure_9(sage, tmp_path):
    options = ("--preset", "setting-b", "--figure", str(tmp_path / "table.png"))
    result = sage("inspect", *options)
    assert result.code == 0
    for number in ("0.5562", "0.4256", "0.1834", "0.0795"):  # METHOD.md, Figure 9 of the paper
        assert number in result.out
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    wrong = sage("inspect", "--figure", str(tmp_path / "table.xyz"))
    assert (wrong.code, "unknown picture format '.xyz'" in wrong.err) == (2, True)


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("sampler.stepz=3", ("--set", "sampler.stepz", "did you mean 'steps'")),
        ("sampler.sde=precize", ("--set", "sampler.sde", "precise", "did you mean 'precise'")),
        ("sampler.eta=-1", ("--set", "sampler.eta", "-1")),
        ("sampler.sde_steps=[8]", ("step 8", "the last is 7")),
        ("train.group_size=1", ("train.group_size", "2")),
        ("reward.combine=taros", ("models must weigh every axis 1.0",)),
        ("eval.seeds=[1, 1]", ("eval.seeds", "twice")),
        ("trust_region.beta_pos=0", ("strategy", "beta_pos > 0")),
    ],
)
def test_a_wrong_setting_is_one_sentence(sage, setting, parts):
    result = sage("inspect", "--set", setting)
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.strip().splitlines()) == 1
    for part in parts:
        assert part in result.err
