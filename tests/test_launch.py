"""Runs of several real processes through the command line: the same run, and nothing lost or left when one ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_plugin import install_reward
from safetensors.torch import load_file

SMALL = (
    "train.rounds=3",
    "train.groups_per_round=2",
    "train.group_size=3",
    "train.micro_batch=2",
    "train.save_every=1",
    "train.eval_every=2",
    "train.diagnose_every=0",
    "eval.steps=3",
    "eval.seeds=[0]",
    "sampler.steps=4",
    "sampler.sde_steps=all",
    "trust_region.anchor_every=2",
    "optimizer.ema=0.9",
)
FULL = ("model.train=full", "parallel.shard=true", "optimizer.lr=1e-5")
HELDOUT = (
    "a small red circle moving left fast\na large blue square moving up slowly\na large green circle moving up fast\n"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = tmp_path_factory.mktemp("prompts") / "heldout.txt"
    prompts.write_text(HELDOUT)
    return as_options([*SMALL, f"eval.prompts={prompts}", f"train.prompts={prompts}"])


def as_options(settings: Any) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sagecli.cli", *arguments]


def sage(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.endswith("_seconds")} for row in lines(path)]


def processes_of(run: Path) -> list[int]:
    """Every process whose command line names the run's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(run) in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def workers_of(run: Path) -> list[int]:
    """Those that train."""
    return [
        pid for pid in processes_of(run) if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes().split(b"WORLD")[0]
    ]


@pytest.fixture
def running(tmp_path: Path, settings: list[str]) -> "Iterator[tuple[subprocess.Popen[str], Path]]":
    """A long run of two processes that has finished a round."""
    run = tmp_path / "run"
    long = command("train", "--num-processes", "2", "--run", str(run), *settings, "--set", "train.rounds=500")
    with subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(1200):
            if len(lines(run / "metrics.jsonl")) >= 1 or process.poll() is not None:
                break
            time.sleep(0.1)
        try:
            yield process, run
        finally:
            for pid in processes_of(run):
                os.kill(pid, signal.SIGKILL)


def ended(process: "subprocess.Popen[str]", run: Path, seconds: float = 60) -> tuple[int, str, str]:
    """The exit code and what was said; nothing of the run is left."""
    out, err = process.communicate(timeout=seconds)
    for _ in range(50):
        if not processes_of(run):
            break
        time.sleep(0.1)
    assert not processes_of(run)
    return process.returncode, out, err


def test_two_processes_write_one_run(settings, tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for run, count in ((alone, "1"), (shared, "2")):
        result = sage("train", "--num-processes", count, "--run", str(run), *settings)
        assert result.returncode == 0, result.stderr
    assert "the parameters are the same in all 2 processes" in result.stdout
    assert result.stdout.count("held-out reward") == 3
    elsewhere = {"tensorboard", "report_files"}  # whose files have the run's name or the time in theirs
    names = [
        {path.relative_to(run).as_posix() for path in run.rglob("*") if not elsewhere & set(path.parts)}
        for run in (alone, shared)
    ]
    assert names[0] == names[1]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        for row, other in zip(timeless(shared / name), timeless(alone / name), strict=True):
            assert row["reward"] == pytest.approx(other["reward"], abs=1e-4)
            assert row.keys() - {"checks"} == other.keys() - {"checks"}
    first, second = (lines(run / "rollouts" / "round-000000" / "scores.jsonl") for run in (alone, shared))
    assert first == second
    weights = [load_file(run / "checkpoints" / "latest" / "weights.safetensors") for run in (alone, shared)]
    start = load_file(alone / "checkpoints" / "round-000001" / "weights.safetensors")
    far = sum(float((weights[0][name] - start[name]).square().sum()) for name in start)
    apart = sum(float((weights[0][name] - weights[1][name]).square().sum()) for name in start)
    assert apart < 1e-4 * far
    assert not list(shared.rglob("*.partial*"))


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.distributed)])
def test_a_signal_saves_and_the_run_goes_on_exactly(running, settings, tmp_path, signum):
    process, run = running
    process.send_signal(signum)
    code, out, err = ended(process, run)
    assert (code, err) == (128 + signum, "")
    done = len(lines(run / "metrics.jsonl"))
    assert f"stopped after round {done}; saved up to round-{done:06d}" in out
    if signum == signal.SIGINT:
        return
    config = run / "config.toml"
    config.write_text(config.read_text().replace("rounds = 500", f"rounds = {done + 1}"))
    result = sage("train", "--resume", str(run), "--override", "train.rounds", "--num-processes", "2")
    assert result.returncode == 0, result.stderr
    whole = tmp_path / "whole"
    more = as_options([f"train.rounds={done + 1}"])
    assert sage("train", "--num-processes", "2", "--run", str(whole), *settings, *more).returncode == 0
    files = [folder / "checkpoints" / "latest" / "weights.safetensors" for folder in (run, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert timeless(run / "metrics.jsonl") == timeless(whole / "metrics.jsonl")


def test_a_killed_process_ends_the_run_with_a_sentence(running):
    process, run = running
    started = time.monotonic()
    os.kill(max(workers_of(run)), signal.SIGKILL)
    code, _, err = ended(process, run, 30)
    assert time.monotonic() - started < 30
    assert code == 1
    assert len(err.strip().splitlines()) == 1
    assert "was ended by SIGKILL, and the others with it" in err
    assert (run / "checkpoints" / "latest" / "manifest.json").exists()


@pytest.mark.distributed
def test_a_signal_before_the_processes_have_begun_ends_them(settings, tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen(
        command("train", "--num-processes", "2", "--run", str(run), *settings), stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(600):
            if len(processes_of(run)) > 1:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process, run)
    assert (code, err) == (130, "")
    assert not run.exists()


@pytest.mark.distributed
def test_a_killed_launcher_leaves_no_process_and_a_saved_run(running):
    process, run = running
    process.kill()
    process.wait()
    for _ in range(600):
        if not processes_of(run):
            break
        time.sleep(0.1)
    assert not processes_of(run)
    done = len(lines(run / "metrics.jsonl"))
    assert (run / "checkpoints" / "latest").resolve().name == f"round-{done:06d}"


@pytest.mark.distributed
def test_what_is_wrong_is_said_once(settings, tmp_path):
    run = str(tmp_path / "run")
    for arguments, sentence in (
        (("--set", "train.round=3"), "did you mean"),
        (("--num-processes", "7"), "7 processes for 6 samples a round"),
        (("--set", "model.path=/nowhere"), "cannot start here"),
        (("--num-machines", "2"), "need --main-process-ip and --main-process-port"),
    ):
        result = sage("train", "--num-processes", "2", "--run", run, *settings, *arguments)
        assert (result.returncode, result.stderr.count("error: ")) == (2, 1), result.stderr
        assert sentence in result.stderr
        assert not Path(run).exists()


MOODY = """
import os, time
from sagecli.rewards import Reward, Scores

class Moody(Reward):
    axes = ("mood",)
    needs_prompt = False

    def score(self, videos, prompts, fps):
        time.sleep(60 if os.environ.get("RANK") == "1" else 0)
        return Scores({"mood": videos.mean((1, 2, 3, 4))})
"""


@pytest.mark.distributed
def test_a_reward_that_gives_up_in_one_process_ends_all_with_its_sentence(settings, tmp_path):
    install_reward(tmp_path, "moody", "Moody", MOODY)
    run = tmp_path / "run"
    moods = as_options(["reward.models=[{name='moody', weights={mood=1.0}}]", "reward.timeout=2.0"])
    for more in ((), as_options(FULL)):
        result = subprocess.run(
            command("train", "--num-processes", "2", "--run", str(run), *settings, *moods, *more),
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 1, result.stderr
        assert result.stderr.count("the reward 'moody' did not come back within reward.timeout = 2 seconds") == 1
        shutil.rmtree(run)


def third_round(first: Path, count: str) -> Path:
    """A copy of a run of two rounds, continued on so many processes."""
    run = Path(shutil.copytree(first, first.with_name(count), symlinks=True))
    config = run / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    result = sage("train", "--resume", str(run), "--override", "train.rounds", "--num-processes", count)
    assert result.returncode == 0, result.stderr
    return run


@pytest.mark.distributed
def test_an_adapter_is_resumed_on_another_number_of_processes(settings, tmp_path):
    first = tmp_path / "first"
    result = sage("train", "--num-processes", "2", "--run", str(first), *settings, "--set", "train.rounds=2")
    assert result.returncode == 0, result.stderr
    before, one, two = (
        load_file(run / "checkpoints" / "latest" / "weights.safetensors")
        for run in (first, third_round(first, "1"), third_round(first, "2"))
    )
    moved = sum(float((two[name] - before[name]).square().sum()) for name in two) ** 0.5
    apart = sum(float((two[name] - one[name]).square().sum()) for name in two) ** 0.5
    assert moved > 0
    assert apart < 0.01 * moved


@pytest.mark.distributed
def test_a_split_run_is_resumed_on_any_number_of_processes_and_used(settings, tmp_path):
    """Two rounds on two processes, the third on one, two or three: the same evaluation; the weights are loaded."""
    first = tmp_path / "first"
    options = (*settings, *as_options(FULL))
    result = sage("train", "--num-processes", "2", "--run", str(first), *options, "--set", "train.rounds=2")
    assert result.returncode == 0, result.stderr
    assert (first / "checkpoints" / "latest" / "sharded" / ".metadata").exists()
    after = {count: timeless(third_round(first, count) / "metrics.jsonl")[-1] for count in ("1", "2", "3")}
    for name in ("reward", "kl", "gradient_norm"):
        assert after["1"][name] == pytest.approx(after["2"][name], rel=1e-3)
        assert after["3"][name] == pytest.approx(after["2"][name], rel=1e-3)
    prompts = tmp_path / "p.txt"
    prompts.write_text("a small red circle moving left fast\n")
    videos = tmp_path / "videos"
    made = sage("rollout", "--adapter", str(first), "--prompts", str(prompts), "--out", str(videos))
    assert made.returncode == 0, made.stderr
    damaged = first / "checkpoints" / "latest" / "sharded" / "__1_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    result = sage("train", "--resume", str(first), "--num-processes", "2")
    assert (result.returncode, "is damaged: sharded/__1_0.distcp is not what was written" in result.stderr) == (2, True)


@pytest.mark.distributed
def test_a_full_disk_is_said_by_a_split_run_and_its_checkpoint_survives(settings, tmp_path):
    run = tmp_path / "run"
    options = (*settings, *as_options(FULL), "--set", "train.rounds=1")
    assert sage("train", "--num-processes", "2", "--run", str(run), *options).returncode == 0
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("rounds = 1", "rounds = 2"))
    sharded = run / "checkpoints" / "latest" / "sharded"
    before = {file.name: file.read_bytes() for file in sharded.iterdir()}
    resumed = command("train", "--resume", str(run), "--override", "train.rounds", "--num-processes", "2")
    limit = len(before["__0_0.distcp"]) * 2 // 3 // 1024  # a limit on the size of files stands for the full disk
    limited = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "sage", *resumed]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr.count("error: ")) == (1, 1), result.stderr
    assert "the checkpoint round-000002 could not be written (process 0: " in result.stderr
    assert "Traceback" not in result.stderr
    assert {file.name: file.read_bytes() for file in sharded.iterdir()} == before


@pytest.mark.distributed
def test_rollouts_and_grids_of_several_processes(settings, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text(HELDOUT)
    made = {}
    for count in ("1", "2"):
        out = tmp_path / count
        options = ("--model", "tiny", "--prompts", str(prompts), "--out", str(out), "--videos-per-prompt", "2")
        result = sage("rollout", *options, "--reward", "shapes", "--num-processes", count)
        assert result.returncode == 0, result.stderr
        assert "6 videos, manifest.jsonl" in result.stdout
        made[count] = lines(out / "manifest.jsonl")
    assert made["1"] == made["2"]
    for row in made["1"]:
        files = [tmp_path / count / row["file"] for count in ("1", "2")]
        assert files[0].read_bytes() == files[1].read_bytes()
    out = tmp_path / "grid"
    options = ("--seeds", "1", "--num-processes", "2", "--out", str(out), *settings, "--set", "train.rounds=1")
    result = sage("ablate", "setting", "--preset", "quickstart", *options)
    assert result.returncode == 0, result.stderr
    assert all("same_on_all" in lines(path)[0]["checks"] for path in out.glob("*/metrics.jsonl"))


@pytest.mark.distributed
def test_torchrun_starts_the_same_run(settings, tmp_path):
    """Without sage's own launcher, as schedulers of several machines do."""
    run = tmp_path / "run"
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29641"]
    result = subprocess.run(
        [*start, "-m", "sagecli.cli", "--", "train", "--run", str(run), *settings, "--set", "train.rounds=1"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "the parameters are the same in all 2 processes" in result.stdout
    assert torch.isfinite(torch.tensor(lines(run / "metrics.jsonl")[0]["reward"]))
