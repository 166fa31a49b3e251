"""`sage rollout` on the embedded model."""

import json
import tomllib
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import pytest
import tomli_w

from sagecli.loading import preset_text
from sagecli.sampling import Request, rollout_config

PROMPTS = "# two captions\r\na small red circle moving left fast\r\n\r\na large blue square moving up slowly\r\n"
FEW_STEPS = ("--set", "sampler.steps=3")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.txt"
    path.write_bytes(b"\xef\xbb\xbf" + PROMPTS.encode())
    return str(path)


@pytest.fixture(scope="module")
def made(sage, prompts, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rollouts") / "out"
    options = ("--videos-per-prompt", "3", "--reward", "shapes", "--out", str(out), *FEW_STEPS)
    result = sage("rollout", "--model", "tiny", "--sde", "precise", "--prompts", prompts, *options)
    assert result.code == 0, result.err
    return out


def manifest(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


def test_one_video_a_sample_and_a_sheet_a_prompt(made):
    rows = manifest(made)
    assert [row["file"] for row in rows] == [f"{place:04d}-{sample:02d}.mp4" for place in (0, 1) for sample in range(3)]
    assert [row["prompt"] for row in rows] == [PROMPTS.split("\r\n")[line] for line in (1, 1, 1, 3, 3, 3)]
    assert len({row["seed"] for row in rows}) == 6
    assert all((row["sde"], row["eta"], row["steps"]) == ("precise", 1.0, 3) for row in rows)
    assert all(set(row["scores"]) == {"VQ", "MQ", "TA"} for row in rows)
    for row in rows:
        assert iio.imread(made / row["file"], plugin="pyav").shape == (9, 32, 32, 3)
        assert iio.immeta(made / row["file"], plugin="pyav")["fps"] == 8
    assert {path.name for path in made.glob("*.png")} == {"0000.png", "0001.png"}


def test_same_seed_same_videos(made, sage, prompts, tmp_path):
    options = ("--videos-per-prompt", "3", "--out", str(tmp_path / "again"), *FEW_STEPS)
    assert sage("rollout", "--model", "tiny", "--sde", "precise", "--prompts", prompts, *options).code == 0
    for row in manifest(made):
        assert (made / row["file"]).read_bytes() == (tmp_path / "again" / row["file"]).read_bytes()
    other = ("--videos-per-prompt", "3", "--seed", "1", "--out", str(tmp_path / "other"), *FEW_STEPS)
    assert sage("rollout", "--model", "tiny", "--sde", "precise", "--prompts", prompts, *other).code == 0
    assert {row["seed"] for row in manifest(made)}.isdisjoint(row["seed"] for row in manifest(tmp_path / "other"))


def test_a_manifest_row_makes_its_video_again(made, sage, tmp_path):
    row = manifest(made)[4]
    again = tmp_path / "one.jsonl"
    again.write_text(json.dumps({"prompt": row["prompt"], "seed": row["seed"]}) + "\n")
    options = ("--videos-per-prompt", "1", "--reward", "shapes", "--out", str(tmp_path / "one"), *FEW_STEPS)
    assert sage("rollout", "--model", "tiny", "--sde", "precise", "--prompts", str(again), *options).code == 0
    (copy,) = manifest(tmp_path / "one")
    assert copy["seed"] == row["seed"]
    assert copy["scores"] == pytest.approx(row["scores"], abs=1e-3)


def test_resume_makes_only_what_is_missing(made, sage, prompts, tmp_path):
    out = tmp_path / "out"
    options = ("--videos-per-prompt", "2", "--out", str(out), *FEW_STEPS)
    command = ("rollout", "--model", "tiny", "--sde", "flow", "--prompts", prompts, *options)
    assert sage(*command).code == 0
    rows = (out / "manifest.jsonl").read_text().splitlines()
    whole = {path.name: path.read_bytes() for path in out.glob("*.mp4")}
    (out / "manifest.jsonl").write_text("\n".join(rows[:2]) + "\n" + rows[2][:20])
    (out / "0001-00.mp4").unlink()
    kept = (out / "0000-00.mp4").stat().st_mtime_ns
    result = sage(*command)
    assert (result.code, "--resume to complete it, or --force to replace it" in result.err) == (2, True)
    assert sage(*command, "--resume").code == 0
    assert (out / "manifest.jsonl").read_text().splitlines() == rows
    assert {path.name: path.read_bytes() for path in out.glob("*.mp4")} == whole
    assert (out / "0000-00.mp4").stat().st_mtime_ns == kept
    assert "made with other settings" in sage(*command, "--resume", "--seed", "3").err


@pytest.mark.parametrize("train", ["lora", "full"])
def test_adapter_of_a_run(sage, prompts, tmp_path, train):
    run = tmp_path / "run"
    settings = ["train.rounds=1", "train.groups_per_round=1", "train.group_size=2", "eval.seeds=[0]", "eval.steps=2"]
    settings += ["sampler.steps=3", "sampler.sde_steps=all", "sampler.guidance=1.0", "optimizer.warmup=0"]
    settings += [f"eval.prompts={prompts}", f"model.train={train}", "optimizer.lr=0.05"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert sage("train", "--run", str(run), *options).code == 0
    outs = {"trained": ("--adapter", str(run)), "base": ("--preset", "quickstart")}
    for name, source in outs.items():
        more = ("--videos-per-prompt", "1", "--sde", "ode", "--out", str(tmp_path / name), *FEW_STEPS)
        result = sage("rollout", *source, "--prompts", prompts, *more)
        assert result.code == 0, result.err
    first, second = (iio.imread(tmp_path / name / "0000-00.mp4", plugin="pyav") for name in outs)
    assert (first != second).any()


def test_force_empties_rollouts_and_nothing_else(made, sage, prompts, tmp_path):
    options = ("--prompts", prompts, "--model", "tiny", "--videos-per-prompt", "1", *FEW_STEPS)
    (tmp_path / "thesis.txt").write_text("mine")
    result = sage("rollout", *options, "--out", str(tmp_path), "--force")
    assert (result.code, (tmp_path / "thesis.txt").read_text()) == (2, "mine")
    assert "holds something else than rollouts (it has no rollout.toml)" in result.err
    out = tmp_path / "out"
    assert sage("rollout", *options, "--out", str(out)).code == 0
    (out / "stale.mp4").touch()
    assert sage("rollout", *options, "--out", str(out), "--force").code == 0
    assert not (out / "stale.mp4").exists()


def test_resuming_with_other_prompts_or_rewards_is_refused(sage, prompts, tmp_path):
    options = ("--model", "tiny", "--videos-per-prompt", "1", "--out", str(tmp_path / "out"), *FEW_STEPS)
    assert sage("rollout", "--prompts", prompts, *options).code == 0
    other = tmp_path / "other.txt"
    other.write_text("a large white circle moving up fast\na small red circle moving left fast\n")
    for change in (("--prompts", str(other)), ("--prompts", prompts, "--reward", "shapes")):
        result = sage("rollout", *change, *options, "--resume")
        assert result.code == 2
        assert "made with other settings, prompts or weights" in result.err
    assert sage("rollout", "--prompts", prompts, *options, "--resume").code == 0


def test_an_sde_asked_for_by_name_replaces_one_with_its_own_log_prob(made, tmp_path):
    (steps,) = {tuple(row["sde_steps"]) for row in manifest(made)}  # the manifest says where noise was added
    assert steps
    assert set(steps) <= {0, 1}  # the last of three steps is an ODE step
    data = tomllib.loads(preset_text("quickstart"))
    data["sampler"] |= {"sde": "cps", "log_prob": "cps", "sde_steps": [1]}
    data["train"]["prompts"] = data["eval"]["prompts"] = "builtin:shapes-train"
    (tmp_path / "cps.toml").write_text(tomli_w.dumps(data))

    def chosen(sde: str | None) -> tuple[object, ...]:
        sampler = rollout_config(Request(str(tmp_path / "cps.toml"), None, None, sde, [])).sampler
        return sampler.sde, sampler.log_prob, sampler.sde_steps

    assert chosen("precise") == ("precise", "gaussian", (1,))
    assert chosen("cps") == chosen(None) == ("cps", "cps", (1,))
    assert chosen("ode") == ("ode", "gaussian", "all")


def test_refusals(sage, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n# nothing\n")
    out = tmp_path / "out"
    for options, sentence in (
        (("--prompts", str(empty)), "empty.txt"),
        (("--prompts", str(tmp_path / "no.txt")), "no.txt"),
        (("--prompts", prompts, "--model", "tiny", "--sde", "precize"), "did you mean 'precise'"),
        (("--prompts", prompts, "--model", "tiny", "--reward", "shape"), "did you mean 'shapes'"),
        (("--prompts", prompts, "--adapter", str(tmp_path)), "holds no checkpoint"),
        (("--prompts", prompts, "--model", "tiny", "--force", "--resume"), "choose one"),
        (("--prompts", prompts, "--model", "tiny", "--resume"), "no rollouts to resume"),
        (("--prompts", prompts), "hf download"),
        (("--prompts", prompts, "--model", "it's"), '"it\'s" is no folder'),
    ):
        result = sage("rollout", "--out", str(out), *options)
        assert (options, result.code) == (options, 2)
        assert sentence in result.err
        assert not out.exists()
