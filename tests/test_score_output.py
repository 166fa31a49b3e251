"""The file that `sage score` writes: resumed, refused, cut short."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from example_plugin import install_reward
from score_rows import rows
from video_files import moving, save


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_resume_scores_what_the_file_lacks(sage, clips, clip, tmp_path, suffix):
    out, whole = tmp_path / f"s.{suffix}", tmp_path / f"whole.{suffix}"
    options = ("--reward", "clip", "--path", clip, "--batch", "1")  # batches of other sizes round otherwise
    assert sage("score", str(clips), *options, "--out", str(whole)).code == 0
    text = whole.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    kept = len(lines) - 2
    cut = lines[kept][:40].encode() + "\u20ac".encode()[:2]  # a kill cut the next line short, within a letter
    out.write_bytes("".join(lines[:kept]).encode() + cut)
    result = sage("score", str(clips), *options, "--out", str(out))
    assert (result.code, "--resume completes it, --force replaces it" in result.err) == (2, True)
    result = sage("score", str(clips), *options, "--out", str(out), "--resume")
    assert result.code == 0, result.err
    assert out.read_text(encoding="utf-8") == text
    assert sage("score", str(clips), *options, "--out", str(out), "--resume").code == 0
    assert out.read_text(encoding="utf-8") == text
    assert sage("score", str(clips), *options, "--out", str(out), "--force").code == 0
    assert out.read_text(encoding="utf-8") == text


def test_scores_of_two_models_do_not_mix(sage, clips, clip, align, tmp_path):
    out = tmp_path / "s.jsonl"
    options = ("score", str(clips), "--out", str(out))
    assert sage(*options, "--reward", "clip", "--path", clip).code == 0
    before = out.read_text()
    result = sage(*options, "--reward", "videoalign", "--path", align, "--resume")
    assert (result.code, "holds scores on CLIPScore, not VQ, MQ, TA" in result.err) == (2, True)
    other = shutil.copytree(clip, tmp_path / "other")
    save(clips / "d.mp4", moving(4))
    result = sage(*options, "--reward", "clip", "--path", str(other), "--prompt", "x", "--resume")
    assert (result.code, "was scored with clip.path = " in result.err) == (2, True)
    for option, differs in (
        (("--option", "clip.scale=cosine"), "clip.scale = x2.5, not cosine"),
        (("--option", "clip.frames=2"), "clip.frames = 8, not 2"),
        (("--weights", "CLIPScore=2"), "weights.CLIPScore = None, not 2.0"),
    ):
        result = sage(*options, "--reward", "clip", "--path", clip, *option, "--resume")
        assert (result.code, differs in result.err) == (2, True), result.err
    assert out.read_text() == before
    (clips / "d.mp4").unlink()
    result = sage(
        *options, "--reward", "clip", "--path", os.path.relpath(clip), "--option", "clip.frames=8", "--resume"
    )
    assert result.code == 0, result.err
    assert out.read_text() == before


ODD_ROWS = {
    "list.jsonl": "[1, 2]\n",
    "no-prompt.jsonl": '{"video": "a.mp4", "scores": {"CLIPScore": 1.0}}\n',
    "null.jsonl": '{"video": "a.mp4", "prompt": "x", "scores": {"CLIPScore": null}}\n',
    "text.csv": "video,prompt,scores.CLIPScore\na.mp4,x,high\n",
    "other.csv": "a,b\n1,2\n",
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_a_file_of_something_else_is_not_completed(sage, clips, clip, tmp_path, name):
    (tmp_path / name).write_text(ODD_ROWS[name])
    result = sage("score", str(clips), "--reward", "clip", "--path", clip, "--out", str(tmp_path / name), "--resume")
    assert (result.code, "is not a file of scores" in result.err) == (2, True)
    assert (tmp_path / name).read_text() == ODD_ROWS[name]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_prompts_with_line_ends_and_quotes_are_resumed(sage, clips, clip, tmp_path, suffix):
    for beside in clips.glob("*.txt"):
        beside.unlink()
    out = tmp_path / f"s.{suffix}"
    options = ("--reward", "clip", "--path", clip, "--prompt", 'a\r\nb, "c"\rd\ne', "--out", str(out))
    assert sage("score", str(clips), *options).code == 0
    before = out.read_bytes()
    result = sage("score", str(clips), *options, "--resume")
    assert (result.code, "3 of 3 videos scored" in result.out) == (0, True)
    assert out.read_bytes() == before
    assert "1 of 1 videos scored" in sage("score", str(clips / "a.mp4"), *options, "--resume").out


def test_the_output_is_refused_before_anything_is_loaded(sage, clips, clip, tmp_path):
    broken = Path(shutil.copytree(clip, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"")  # what loading would complain of
    prompts = tmp_path / "map.csv"
    prompts.write_text("video,prompt\na.mp4,x\n")
    (tmp_path / "folder.jsonl").mkdir()
    for out, sentence in (
        (prompts, "this file is read too"),
        (clips / "manifest.jsonl", "this name is that of a rollout's manifest"),
        (tmp_path / "folder.jsonl", "this is a folder; name a file"),
        (clips / "a.mp4" / "s.jsonl", "cannot be written to"),
        (tmp_path / ("s" * 245 + ".jsonl"), "a name may have 240 bytes"),
        (tmp_path / ("s" * 300 + ".jsonl"), "File name too long"),
    ):
        options = ("--prompts", str(prompts), "--out", str(out), "--force")
        result = sage("score", str(clips), "--reward", "clip", "--path", str(broken), *options)
        assert (result.code, sentence in result.err) == (2, True), result.err
    assert prompts.read_text() == "video,prompt\na.mp4,x\n"
    assert not list(tmp_path.rglob("*.partial"))


STUCK = """
import torch
from sagecli.rewards import Reward, Scores

class Stuck(Reward):
    axes = ("mood",)
    needs_prompt = False

    def score(self, videos, prompts, fps):
        while videos.shape[-1] == 47:
            torch.ones(600, 600) @ torch.ones(600, 600)
        return Scores({"mood": videos.mean((1, 2, 3, 4))})
"""


def test_a_reward_that_does_not_come_back_leaves_what_was_scored(clips, tmp_path):
    """In a process of its own, which would abort if it waited for torch's work to end."""
    install_reward(tmp_path, "stuck", "Stuck", STUCK)
    out = tmp_path / "s.jsonl"
    command = [sys.executable, "-m", "sagecli.cli", "score", str(clips), "--reward", "stuck", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    result = subprocess.run([*command, "--timeout", "2"], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "")
    assert "2 of 3 videos scored" in result.stdout
    assert "the reward 'stuck' did not come back within reward.timeout = 2 seconds" in result.stdout
    assert "│ mood" in result.stdout
    assert len(rows(out)) == 2


def test_a_time_limit_may_be_endless(sage, clips):
    for limit in ("inf", "1e12"):
        result = sage("score", str(clips), "--reward", "shapes", "--timeout", limit)
        assert "shapes cannot read" not in result.err
        assert "OverflowError" not in result.out


def test_ctrl_c_leaves_a_whole_file_that_can_be_completed(clips, align, tmp_path):
    for number in range(300):
        shutil.copy(clips / "a.mp4", clips / f"n{number:03d}.mp4")
    out = tmp_path / "s.jsonl"
    command = [sys.executable, "-m", "sagecli.cli", "score", str(clips), "--reward", "videoalign", "--path", align]
    command += ["--prompt", "a square", "--batch", "2", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        for _ in range(1200):
            if out.exists() and out.read_text().count("\n") >= 2:
                break
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "add --resume to score the rest" in output
    assert 2 <= len(rows(out)) < 303
    assert out.read_text().endswith("\n")


def test_rows_are_those_of_their_files_wherever_they_were_named_from(sage, clips, clip, tmp_path, monkeypatch):
    """Another folder's file of the same relative name is another video; a link to the folder changes nothing."""
    other = tmp_path / "other" / "clips"
    other.mkdir(parents=True)
    save(other / "a.mp4", moving(9, seed=7))
    out = tmp_path / "s.jsonl"
    options = ("--reward", "clip", "--path", clip, "--prompt", "x", "--out", str(out))
    monkeypatch.chdir(tmp_path)
    assert sage("score", "clips/a.mp4", *options).code == 0
    monkeypatch.chdir(tmp_path / "other")
    result = sage("score", "clips/a.mp4", *options, "--resume")
    assert (result.code, "1 of 1 videos scored" in result.out) == (0, True)
    assert [row["video"] for row in rows(out)] == [str(clips / "a.mp4"), str(other / "a.mp4")]
    assert rows(out)[0]["scores"] != rows(out)[1]["scores"]
    (tmp_path / "link").symlink_to(clips)
    before = out.read_bytes()
    for name in (str(clips / "a.mp4"), "../clips/../clips/a.mp4", str(tmp_path / "link" / "a.mp4")):
        assert sage("score", name, *options, "--resume").code == 0
        assert out.read_bytes() == before


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_videos_written_anew_are_scored_again(sage, clips, clip, tmp_path, suffix):
    out, fresh = tmp_path / f"s.{suffix}", tmp_path / f"fresh.{suffix}"
    options = ("--reward", "clip", "--path", clip, "--batch", "1")
    assert sage("score", str(clips), *options, "--out", str(out)).code == 0
    lines = out.read_text().splitlines()
    save(clips / "a.mp4", moving(9, seed=5))
    result = sage("score", str(clips), *options, "--out", str(out), "--resume")
    assert (result.code, "1 of its scores are of videos that have been written anew" in result.out) == (0, True)
    assert sage("score", str(clips), *options, "--out", str(fresh)).code == 0
    assert sorted(out.read_text().splitlines()) == sorted(fresh.read_text().splitlines())
    assert len(set(lines) & set(out.read_text().splitlines())) == len(lines) - 1


def test_a_disk_that_takes_no_more_is_a_sentence_and_leaves_whole_rows(clips, clip, tmp_path):
    """A limit on the size of files stands for the full disk: the same error at the same call."""
    out = tmp_path / "s.jsonl"
    command = [sys.executable, "-m", "sagecli.cli", "score", str(clips), "--reward", "clip", "--path", clip]
    command += ["--out", str(out), "--batch", "1"]
    subprocess.run(command, check=True, cwd=tmp_path)
    text = out.read_text()
    out.unlink()
    limited = ["bash", "-c", f'ulimit -f {len(text) * 2 // 3 // 1024 or 1}; exec "$@"', "sage"]
    result = subprocess.run([*limited, *command], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert f"{out}: File too large; --resume scores what it lacks" in result.stdout
    assert "Traceback" not in result.stderr
    kept = out.read_text()
    assert text.startswith(kept)
    assert kept.endswith("\n")
    subprocess.run([*command, "--resume"], check=True, cwd=tmp_path)
    assert out.read_text() == text


def test_a_link_as_output_stays_one_and_a_broken_one_is_refused(sage, clips, clip, tmp_path):
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    options = ("--reward", "clip", "--path", clip, "--out", str(link))
    link.symlink_to(target)
    result = sage("score", str(clips), *options)
    assert (result.code, "this link leads nowhere" in result.err) == (2, True)
    target.write_text("")
    assert sage("score", str(clips), *options, "--force").code == 0
    assert link.is_symlink()
    assert len(rows(target)) == 3


def test_a_broken_row_in_the_middle_is_refused(sage, clips, clip, tmp_path):
    out = tmp_path / "s.csv"
    options = ("--reward", "clip", "--path", clip, "--out", str(out))
    assert sage("score", str(clips), *options).code == 0
    lines = out.read_text().splitlines(keepends=True)
    broken = "".join([*lines[:2], "a,b\n", *lines[2:]])
    out.write_text(broken)
    result = sage("score", str(clips), *options, "--resume")
    assert (result.code, "row 2 has not as many cells as its first line" in result.err) == (2, True)
    assert out.read_text() == broken
