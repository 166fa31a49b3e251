"""Whole runs of the embedded model through the command line: files, resuming, kills, refusals."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import save_clip, save_videoalign
from safetensors.torch import load_file

from sagecli import registry

SMALL = (
    "train.rounds=4",
    "train.groups_per_round=2",
    "train.group_size=3",
    "train.micro_batch=2",
    "train.save_every=2",
    "train.eval_every=2",
    "train.diagnose_every=2",
    "eval.steps=3",
    "eval.seeds=[0, 1]",
    "sampler.steps=4",
    "sampler.sde_steps=all",
    "trust_region.anchor_every=2",
    "optimizer.ema=0.9",
)
HELDOUT = "a small red circle moving left fast\na large blue square moving up slowly\n"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = tmp_path_factory.mktemp("prompts") / "heldout.txt"
    prompts.write_text(HELDOUT)
    settings = [*SMALL, f"eval.prompts={prompts}"]
    return [part for setting in settings for part in ("--set", setting)]


@pytest.fixture(scope="module")
def whole_run(arguments, sage, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    result = sage("train", "--run", str(run), *arguments)
    assert result.code == 0, result.err
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.endswith("_seconds")} for row in lines(path)]


def assert_same_run(run: Path, reference: Path) -> None:
    for name in ("weights.safetensors", "policies.safetensors"):
        files = [folder / "checkpoints" / "latest" / name for folder in (run, reference)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert timeless(run / "metrics.jsonl") == timeless(reference / "metrics.jsonl")
    assert timeless(run / "evaluations.jsonl") == timeless(reference / "evaluations.jsonl")
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, reference)]
    assert summaries[0] | {"seconds": 0} == summaries[1] | {"seconds": 0}


def test_a_run_leaves_what_it_promises(whole_run):
    metrics = lines(whole_run / "metrics.jsonl")
    assert [row["update"] for row in metrics] == [1, 2, 3, 4]
    assert [row["round"] for row in metrics] == [0, 1, 2, 3]
    assert metrics[0]["ratio_error"] == 0
    assert all(0 < row[name] < 1 for row in metrics for name in ("VQ", "MQ", "TA", "reward"))
    assert [("gradient_norm_kl" in row) for row in metrics] == [False, True, False, True]
    assert [row["round"] for row in lines(whole_run / "evaluations.jsonl")] == [0, 2, 4]
    for round in ("round-000000", "round-000002", "round-000004"):
        folder = whole_run / "evaluations" / round
        assert {path.name for path in folder.iterdir()} == {"scores.jsonl", "sheet.png", "000.mp4", "001.mp4"}
        assert len(lines(folder / "scores.jsonl")) == 4
    rollouts = lines(whole_run / "rollouts" / "round-000003" / "scores.jsonl")
    assert [row["file"] for row in rollouts] == ["000.mp4", "001.mp4"]
    assert (whole_run / "before-after.png").exists()
    summary = json.loads((whole_run / "summary.json").read_text())
    assert set(summary) == {"reward", "axes", "monitors", "rounds", "seconds", "seed"}
    assert set(summary["axes"]) == {"VQ", "MQ", "TA"}
    assert set(summary["monitors"]) == {"speed_error", "size_error"}
    assert set(summary["reward"]) == {"before", "after", "stderr"}
    assert (summary["rounds"], summary["seed"]) == (4, 0)
    assert not list(whole_run.rglob("*.partial*"))


def test_the_first_round_checks_itself(whole_run, arguments, sage, tmp_path):
    checks = lines(whole_run / "metrics.jsonl")[0]["checks"]
    count = sum(
        value.numel() for value in load_file(whole_run / "checkpoints" / "latest" / "weights.safetensors").values()
    )
    assert checks == {"trained_parameters": count, "ratio_error": 0.0, "reward_change": 0.0, "anchor_unchanged": True}
    assert all("checks" not in row for row in lines(whole_run / "metrics.jsonl")[1:])
    source = tmp_path / "package"
    source.mkdir()
    (source / "moody.py").write_text(
        "import torch\nfrom sagecli.rewards import Reward, Scores\n\n\nclass Moody(Reward):\n    axes = ('mood',)\n\n"
        "    def score(self, videos, prompts, fps):\n        return Scores({'mood': torch.rand(len(videos))})\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(source))
        import moody  # type: ignore[import-not-found]

        load = registry.load
        patch.setattr(registry, "load", lambda kind, name: moody.Moody if name == "moody" else load(kind, name))
        patch.setattr(registry, "names", lambda kind: ["moody"])
        moods = ("--set", "reward.models=[{name='moody', weights={mood=1.0}}]")
        result = sage("train", "--run", str(tmp_path / "run"), *arguments, *moods, "--set", "train.rounds=1")
    assert result.code == 0, result.err
    assert "check: largest |ratio - 1| on policy: 0.0e+00" in result.out
    assert "check: warning: one video scored twice differs by" in result.out


def test_evaluations_use_the_moving_average(whole_run, arguments, sage, tmp_path):
    run = tmp_path / "plain"
    assert sage("train", "--run", str(run), *arguments, "--set", "optimizer.ema=0.0").code == 0
    averaged, plain = (lines(folder / "evaluations.jsonl") for folder in (whole_run, run))
    assert averaged[0]["reward"] == plain[0]["reward"]  # before training they are the same
    assert averaged[-1]["reward"] != plain[-1]["reward"]
    weights = [load_file(folder / "checkpoints" / "latest" / "weights.safetensors") for folder in (whole_run, run)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])  # training is the same
    stored = load_file(whole_run / "checkpoints" / "latest" / "policies.safetensors")
    assert {name.split("/")[0] for name in stored} == {"anchor", "previous", "ema"}


def test_checkpoints_are_kept_and_complete(whole_run):
    names = sorted(path.name for path in (whole_run / "checkpoints").iterdir())
    assert names == ["latest", "round-000002", "round-000004"]
    assert (whole_run / "checkpoints" / "latest").resolve().name == "round-000004"
    first, last = (load_file(whole_run / "checkpoints" / name / "weights.safetensors") for name in names[1:])
    assert first.keys() == last.keys()
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_the_same_command_gives_the_same_run(whole_run, arguments, sage, tmp_path):
    assert sage("train", "--run", str(tmp_path / "again"), *arguments).code == 0
    assert_same_run(tmp_path / "again", whole_run)


def start(run: Path, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "sagecli.cli", "train", *more]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for_lines(path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    while not path.exists() or path.read_text().count("\n") < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


@pytest.mark.parametrize(("signum", "code", "after"), [(signal.SIGKILL, -9, 3), (signal.SIGINT, 130, 1)])
def test_killed_and_resumed_is_the_uninterrupted_run(whole_run, arguments, sage, tmp_path, signum, code, after):
    run = tmp_path / "killed"
    process = start(run, "--run", str(run), *arguments)
    wait_for_lines(run / "metrics.jsonl", after, process)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    if signum == signal.SIGINT:
        assert f"sage train --resume {run}" in output
        assert "Traceback" not in output
    else:  # what a kill in the middle of a line would leave
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"round": 3, "upd')
    result = sage("train", "--resume", str(run))
    assert result.code == 0, result.err
    assert_same_run(run, whole_run)


def test_sigterm_saves_and_ends_with_143(arguments, tmp_path):
    run = tmp_path / "terminated"
    process = start(run, "--run", str(run), *arguments)
    wait_for_lines(run / "metrics.jsonl", 1, process)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert (run / "checkpoints" / "latest" / "manifest.json").exists()


def test_resuming_a_finished_run_shows_its_summary(whole_run, sage):
    before = (whole_run / "metrics.jsonl").read_bytes()
    result = sage("train", "--resume", str(whole_run))
    assert result.code == 0
    assert "held-out prompts, before and after 4 rounds" in result.out
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def test_damaged_checkpoints_are_named_and_the_one_before_is_offered(whole_run, sage, tmp_path):
    run = tmp_path / "damaged"
    shutil.copytree(whole_run, run, symlinks=True)
    good = (run / "checkpoints" / "round-000004" / "weights.safetensors").read_bytes()
    weights = run / "checkpoints" / "round-000004" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = sage("train", "--resume", str(run))
    assert result.code == 2
    assert "weights.safetensors is not what was written" in result.err
    earlier = run / "checkpoints" / "round-000002"
    assert f"the one before it is whole: name {earlier} instead" in result.err
    weights.unlink()
    assert "weights.safetensors is missing" in sage("train", "--resume", str(run)).err
    result = sage("train", "--resume", str(earlier))
    assert result.code == 0, result.err
    assert "resumed after round 2" in result.out
    assert weights.read_bytes() == good
    assert timeless(run / "metrics.jsonl") == timeless(whole_run / "metrics.jsonl")


def test_a_changed_configuration_is_refused_unless_it_is_named(whole_run, sage, tmp_path):
    run = tmp_path / "changed"
    shutil.copytree(whole_run, run, symlinks=True)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("rounds = 4", "rounds = 5").replace("eta = 1.0", "eta = 0.9"))
    result = sage("train", "--resume", str(run))
    assert result.code == 2
    assert "sampler.eta was 1.0 and is 0.9; train.rounds was 4 and is 5" in result.err
    assert "add --override sampler.eta --override train.rounds" in result.err
    assert len(lines(run / "metrics.jsonl")) == 4
    result = sage("train", "--resume", str(run), "--override", "sampler.eta", "--override", "optimizer.lr")
    assert (result.code, "--override optimizer.lr: it does not differ" in result.err) == (2, True)
    allowed = ("--override", "sampler.eta", "--override", "train.rounds")
    result = sage("train", "--resume", str(run), *allowed)
    assert result.code == 0, result.err
    assert [row["round"] for row in lines(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    result = sage("train", "--override", "sampler.eta")
    assert (result.code, "it goes with --resume" in result.err) == (2, True)


def test_a_second_training_in_the_same_folder_is_refused(arguments, sage, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "sagecli.cli", "train", "--run", str(run), *arguments, "--set", "train.rounds=500"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not (run / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.1)
        result = sage("train", "--resume", str(run))
        assert result.code == 2
        assert f"is being trained already, by process {process.pid} on " in result.err
        process.kill()
    assert "process" in (run / "lock").read_text()
    short = run / "config.toml"
    short.write_text(short.read_text().replace("rounds = 500", "rounds = 2"))
    result = sage(
        "train", "--resume", str(run), *(("--override", "train.rounds") if (run / "checkpoints").exists() else ())
    )
    assert result.code == 0, result.err  # a killed process holds nothing


@pytest.mark.slow
def test_a_full_disk_is_said_and_earlier_checkpoints_survive(arguments, tmp_path):
    run = tmp_path / "run"
    first = [sys.executable, "-m", "sagecli.cli", "train", "--run", str(run), *arguments, "--set", "train.rounds=2"]
    subprocess.run(first, check=True, stdout=subprocess.DEVNULL)
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    text = (run / "config.toml").read_text().replace("rounds = 2", "rounds = 4")
    (run / "config.toml").write_text(text)
    command = f"ulimit -f 600; exec {sys.executable} -m sagecli.cli train --resume {run} --override train.rounds"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 1
    assert "the checkpoint round-000004 could not be written" in result.stderr
    assert "Traceback" not in result.stderr
    after = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before
    assert (run / "checkpoints" / "latest").resolve().name == "round-000002"
    resumed = [sys.executable, "-m", "sagecli.cli", "train", "--resume", str(run), "--override", "train.rounds"]
    subprocess.run(resumed, check=True, stdout=subprocess.DEVNULL)
    assert (run / "checkpoints" / "latest").resolve().name == "round-000004"
    assert not list((run / "checkpoints").glob(".*.partial"))


def test_running_out_of_gpu_memory_names_the_keys_to_lower(arguments, sage, tmp_path, monkeypatch):
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr("sagecli.training.train_round", full)
    result = sage("train", "--run", str(tmp_path / "run"), *arguments)
    assert result.code == 1
    assert "out of GPU memory (CUDA out of memory. Tried to allocate 20.00 GiB.)" in result.err
    for key in ("train.micro_batch (now 2)", "video.frames", "gradient_checkpointing (now False)", "vae_tiling"):
        assert key in result.err


@pytest.mark.slow
def test_killed_at_thirty_random_moments_it_is_the_uninterrupted_run(whole_run, arguments, tmp_path):
    """SIGKILL at moments drawn anew from a fixed seed; every attempt resumes what the one before left."""
    moments = random.Random(0)
    run, kills = tmp_path / "killed", 0
    while kills < 30:
        command = [sys.executable, "-m", "sagecli.cli", "train"]
        command += ["--resume", str(run)] if (run / "config.toml").exists() else ["--run", str(run), *arguments]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                process.wait(timeout=moments.uniform(4, 16))
                assert process.returncode == 0, process.stderr
                shutil.rmtree(run)  # it came to its end: the next attempt begins anew
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
    subprocess.run(
        [sys.executable, "-m", "sagecli.cli", "train", "--resume", str(run)], check=True, stdout=subprocess.DEVNULL
    )
    for name in ("weights.safetensors", "policies.safetensors"):
        one, other = (folder / "checkpoints" / "latest" / name for folder in (run, whole_run))
        assert one.read_bytes() == other.read_bytes()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert timeless(run / name) == timeless(whole_run / name)


def test_refusals(whole_run, arguments, sage, tmp_path):
    result = sage("train", "--run", str(whole_run), *arguments)
    assert (result.code, "is not empty; --resume continues it" in result.err) == (2, True)
    result = sage("train", "--resume", str(tmp_path))
    assert (result.code, "is not a run folder" in result.err) == (2, True)
    result = sage("train", "--resume", str(whole_run), "--set", "train.rounds=9")
    assert (result.code, "leave out --set" in result.err) == (2, True)
    (tmp_path / "file").touch()
    result = sage("train", "--run", str(tmp_path / "file"), *arguments)
    assert (result.code, "is a file; a run needs a folder" in result.err) == (2, True)
    result = sage("train", "--run", "/proc/none", *arguments)
    assert (result.code, "Traceback" in result.err, "/proc/none" in result.err) == (2, False, True)
    run = tmp_path / "none"
    seeded = tmp_path / "seeded.jsonl"
    seeded.write_text('{"prompt": "a small red circle moving left fast", "seed": 3}\n')
    for setting, sentence in (
        ("sampler.sde=ode", "leaves no SDE step to train"),
        ("sampler.sde_steps=[3]", "leaves no SDE step to train"),
        (f"train.prompts={seeded}", "its prompts have seeds of their own"),
        ("video.frames=8", "video.frames = 8"),
        ("video.height=33", "video.height = 33"),
        ("model.train=frozen", "trains nothing"),
        *((("train.wandb=true", "pip install wandb"),) if find_spec("wandb") is None else ()),
        ("reward.models=[{name='shapes', weights={XX=1.0}}]", "has no axis 'XX'"),
        ("model.path=/nowhere", "'/nowhere' is no folder"),
        ("model.attention=falsh", "did you mean 'flash'"),
    ):
        result = sage("train", "--run", str(run), *arguments, "--set", setting)
        assert (setting, result.code) == (setting, 2)
        assert sentence in result.err
        assert "Traceback" not in result.err
        assert not run.exists(), setting


def test_a_run_with_reward_networks(arguments, sage, tmp_path):
    align = save_videoalign(tmp_path / "align")
    save_clip(tmp_path / "clip")
    models = (
        f"[{{name='videoalign', path='{align.folder}', weights={{VQ=1.0, MQ=1.0, TA=1.0}}, offload=true}}, "
        f"{{name='clip', path='{tmp_path / 'clip'}', weights={{CLIPScore=1.0}}, options={{frames=2, scale='cosine'}}}}]"
    )
    components = "[{axis='VQ', sigmoid=true}, {axis='MQ', sigmoid=true}, {axis='TA', sigmoid=true}, {axis='CLIPScore'}]"
    taros = ("--set", "reward.combine=taros", "--set", f"reward.taros.components={components}")
    run = tmp_path / "run"
    result = sage("train", "--run", str(run), *arguments, "--set", f"reward.models={models}", *taros)
    assert result.code == 0, result.err
    for row in lines(run / "metrics.jsonl"):
        assert row["failed"] == 0
        assert all(math.isfinite(row[name]) for name in ("VQ", "MQ", "TA", "CLIPScore", "reward"))
        assert 0 < row["reward"] < 1
    assert "the prompt template is not VideoAlign's own" in result.out
    scored = [row for folder in sorted((run / "evaluations").iterdir()) for row in lines(folder / "scores.jsonl")]
    assert len({row["axes"]["CLIPScore"] for row in scored}) > 2


def test_settings_without_weights_or_gpu_stop_before_loading(sage, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = sage("train", "--preset", "setting-b")
    assert result.code == 2
    for part in ("hf download", "GPU", "sage train --preset quickstart", "sage rollout --model tiny"):
        assert part in result.err
    assert not (Path.cwd() / "runs").exists() or "setting-b" not in str(list((Path.cwd() / "runs").iterdir()))
