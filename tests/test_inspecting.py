"""`sage inspect std|gradients|quality` against METHOD.md's numbers and against autograd."""

import json

import pytest

PAPER = ("--set", "sampler.steps=20", "--set", "sampler.shift=5.0", "--set", "sampler.eta=0.5")


def test_std_is_figure_9(sage, tmp_path):
    png, svg = tmp_path / "std.png", tmp_path / "std.svg"
    result = sage("inspect", "std", *PAPER, "--json", "--figure", str(png), "--figure", str(svg))
    assert result.code == 0, result.err
    rows = json.loads(result.out)
    # METHOD.md section 2: std at steps 0, 1, 10, 19
    for name, expected in {
        "dance": (0.0510, 0.0532, 0.0863, 0.2282),
        "flow": (0.5000, 0.5186, 0.1929, 0.1171),
        "precise": (0.5562, 0.4256, 0.1834, 0.0795),
        "cps": (0.6997, 0.6917, 0.5682, 0.0),
    }.items():
        assert [rows[step][name] for step in (0, 1, 10, 19)] == pytest.approx(expected, abs=6e-5)
    assert rows[0]["flow, capped"] == pytest.approx(0.9303, abs=6e-5)
    assert rows[0]["precise, second sigma"] == 0
    assert [row["precise, second sigma"] for row in rows[1:]] == [row["precise"] for row in rows[1:]]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in svg.read_bytes()


def test_cps_is_left_out_where_it_cannot_take_the_eta(sage):
    rows = json.loads(sage("inspect", "std", "--set", "sampler.eta=1.5", "--json").out)
    assert "cps" not in rows[0]
    assert "exact" in rows[0]


def test_measured_gradients_follow_the_prediction(sage, tmp_path):
    result = sage("inspect", "gradients", "--set", "sampler.eta=0.5", "--json", "--figure", str(tmp_path / "g.png"))
    assert result.code == 0, result.err
    rows = json.loads(result.out)
    assert [row["step"] for row in rows] == list(range(8))
    for row in rows:  # but for the noise that happened to be drawn
        assert row["velocity"] == pytest.approx(row["|b|/std"], rel=0.1)
    spread = max(row["|b|/std"] for row in rows) / min(row["|b|/std"] for row in rows)
    measured = max(row["parameters"] for row in rows) / min(row["parameters"] for row in rows)
    assert spread > 5
    assert measured > 2
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_quality_compares_rollouts_from_the_same_noise(sage, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("a small red circle moving left fast\na large blue square moving up slowly\n")
    few = ("--set", "sampler.steps=4", "--set", "eval.seeds=[0]", "--set", f"eval.prompts={prompts}")
    result = sage("inspect", "quality", *few, "--json", "--figure", str(tmp_path / "q.svg"))
    assert result.code == 0, result.err
    rows = json.loads(result.out)
    kinds = {(row["sde"], row["last_step"]) for row in rows}
    assert kinds == {
        ("ode", "ode"),
        *((k, e) for k in ("precise", "dance", "flow") for e in ("sde", "ode")),
        ("cps", "ode"),
        ("exact", "ode"),
    }
    for row in rows[1:]:
        assert row["difference"] == pytest.approx(row["reward"] - rows[0]["reward"])
        assert row["stderr"] > 0
    assert len({row["reward"] for row in rows}) > 10
    assert b"<svg" in (tmp_path / "q.svg").read_bytes()
    again = json.loads(sage("inspect", "quality", *few, "--json").out)
    assert again == rows


def test_refusals(sage):
    result = sage("inspect", "stds")
    assert (
        result.code,
        "unknown inspection 'stds'; there are table, std, gradients, quality; did you mean 'std'" in result.err,
    ) == (2, True)
    result = sage("inspect", "gradients", "--preset", "setting-b")
    assert (result.code, "cannot start here" in result.err) == (2, True)
