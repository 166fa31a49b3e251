"""`sage export` from real runs, loaded again by the libraries that will load it."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_wan import save_wan
from torch import Tensor
from transformers import UMT5EncoderModel

from sagecli import checkpoint, exportformats, registry
from sagecli.backends import Backbone, VideoSize
from sagecli.engine.update import trainable

FORMATS = ("diffusers", "peft", "merged", "tencent", "comfyui")
ONE_ROUND = (
    "train.rounds=2",
    "train.groups_per_round=1",
    "train.group_size=2",
    "train.save_every=1",
    "eval.seeds=[0]",
    "eval.steps=3",
    "eval.videos=1",
    "sampler.steps=3",
    "sampler.sde_steps=all",
    "optimizer.warmup=0",
    "optimizer.lr=0.02",
    "optimizer.ema=0.5",
    "model.lora.alpha=12.0",
)


@pytest.fixture(scope="module")
def runs(sage, tmp_path_factory) -> dict[str, Path]:
    """A LoRA run and a full run of the embedded model, and a LoRA run of a tiny Wan."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = folder / "p.txt"
    prompts.write_text("a small red circle moving left fast\n")
    wan = save_wan(folder / "wan-model")
    of_wan = ["model.backbone=wan", f"model.path={wan}", "video.frames=5", "model.lora.targets=attention+mlp"]
    settings = {"lora": ["model.lora.targets=attention+mlp"], "full": ["model.train=full"], "wan": of_wan}
    for name, more in settings.items():
        options = [*ONE_ROUND, f"eval.prompts={prompts}", f"train.prompts={prompts}", *more]
        arguments = [part for setting in options for part in ("--set", setting)]
        result = sage("train", "--run", str(folder / name), *arguments)
        assert result.code == 0, result.err
    return {name: folder / name for name in settings}


@pytest.fixture(scope="module")
def exported(runs, sage, tmp_path_factory):
    """Exports a run once in each format."""
    folder = tmp_path_factory.mktemp("exports")

    def export(run: str, kind: str) -> Path:
        out = folder / f"{run}-{kind}"
        if not out.exists():
            result = sage("export", str(runs[run]), "--format", kind, "--out", str(out))
            assert result.code == 0, result.err
        return Path(out)

    return export


def backbone_of(run: Path, train: str | None = None, weights: bool = True) -> Backbone:
    config = checkpoint.config_of(checkpoint.find(run))
    model = config.model.model_copy(update={"train": train or config.model.train})
    backbone: Backbone = registry.load("backends", model.backbone)(model, torch.device("cpu"))
    if weights:
        checkpoint.load_weights(trainable(backbone.module), checkpoint.find(run))
    return backbone


@torch.no_grad()
def velocity(backbone: Backbone) -> Tensor:
    latents = backbone.initial_latents([3], VideoSize(32, 32, 9))
    prompt = "a small red circle moving left fast"
    return backbone.velocity(latents, 0.7, backbone.encode([prompt])[prompt], 1.5)


@pytest.mark.parametrize("run", ["lora", "wan"])
@pytest.mark.parametrize("kind", ["diffusers", "peft", "merged"])
def test_a_lora_loads_with_its_library_and_gives_the_same_velocities(runs, exported, run, kind):
    folder = exported(run, kind)
    trained, fresh = backbone_of(runs[run]), backbone_of(runs[run], "frozen", weights=False)
    base = velocity(fresh)
    module: Any = fresh.module
    if kind == "diffusers":
        module.load_lora_adapter(folder, weight_name="pytorch_lora_weights.safetensors", prefix=None)
    elif kind == "peft":
        PeftModel.from_pretrained(module, folder)
    else:
        module.load_state_dict(type(module).from_pretrained(folder).state_dict())
    expected = velocity(trained)
    torch.testing.assert_close(velocity(fresh), expected, atol=1e-5, rtol=1e-5)
    assert (expected - base).abs().max() > 1e-2


def test_a_full_run_is_its_transformers_folder(runs, exported):
    folder = exported("full", "merged")
    fresh = backbone_of(runs["full"], "frozen", weights=False)
    module: Any = fresh.module
    stored = type(module).from_pretrained(folder).state_dict()
    for name, value in load_file(checkpoint.find(runs["full"]) / "weights.safetensors").items():
        assert torch.equal(stored[name], value)
    base = velocity(fresh)
    module.load_state_dict(stored)
    torch.testing.assert_close(velocity(fresh), velocity(backbone_of(runs["full"])), atol=1e-5, rtol=1e-5)
    assert (velocity(fresh) - base).abs().max() > 1e-2


def deltas(run: Path) -> dict[str, Tensor]:
    """What the run adds to each layer's weight, from its checkpoint's numbers alone."""
    folder = checkpoint.find(run)
    lora = checkpoint.config_of(folder).model.lora
    weights = load_file(folder / "weights.safetensors")
    names = [name.removesuffix(".lora_A.default.weight") for name in weights if ".lora_A." in name]
    return {
        name: lora.alpha
        / lora.rank
        * weights[f"{name}.lora_B.default.weight"]
        @ weights[f"{name}.lora_A.default.weight"]
        for name in names
    }


def test_comfyui_fuses_q_k_and_v_exactly(runs, exported):
    stored = load_file(exported("lora", "comfyui") / "lora_comfyui.safetensors")
    expected = deltas(runs["lora"])

    def added(layer: str) -> Tensor:
        down, up = stored.pop(f"{layer}.lora_A.weight"), stored.pop(f"{layer}.lora_B.weight")
        return stored.pop(f"{layer}.alpha") / down.shape[0] * up @ down

    for block in range(4):
        ours, theirs = f"transformer_blocks.{block}", f"diffusion_model.double_blocks.{block}"
        for stream, names, mlp in (
            ("img", ("to_q", "to_k", "to_v"), "ff"),
            ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), "ff_context"),
        ):
            parts = [expected.pop(f"{ours}.attn.{name}", None) for name in names]
            present = next(part for part in parts if part is not None)
            whole = torch.cat([torch.zeros_like(present) if part is None else part for part in parts])
            assert stored[f"{theirs}.{stream}_attn.qkv.lora_A.weight"].shape[0] == 16 * sum(
                p is not None for p in parts
            )
            torch.testing.assert_close(added(f"{theirs}.{stream}_attn.qkv"), whole, atol=1e-6, rtol=1e-5)
            for name, other in ((f"{mlp}.net.0.proj", f"{stream}_mlp.0"), (f"{mlp}.net.2", f"{stream}_mlp.2")):
                if f"{ours}.{name}" in expected:
                    torch.testing.assert_close(added(f"{theirs}.{other}"), expected.pop(f"{ours}.{name}"))
        torch.testing.assert_close(added(f"{theirs}.img_attn.proj"), expected.pop(f"{ours}.attn.to_out.0"))
    assert (stored, expected) == ({}, {})


def test_tencent_has_the_original_names(runs, exported):
    file = exported("lora", "tencent") / "pytorch_lora_weights.safetensors"
    stored, expected = load_file(file), deltas(runs["lora"])
    with safe_open(file, "pt") as opened:
        metadata = json.loads(opened.metadata()["lora_adapter_metadata"])
    names = {"attn.to_q": "img_attn_q", "attn.add_v_proj": "txt_attn_v", "attn.to_out.0": "img_attn_proj"}
    names |= {"ff.net.0.proj": "img_mlp.fc1", "ff_context.net.2": "txt_mlp.fc2"}
    for ours, theirs in names.items():
        down, up = (stored[f"double_blocks.1.{theirs}.lora_{part}.weight"] for part in "AB")
        added = metadata["lora_alpha"] / metadata["r"] * up @ down
        torch.testing.assert_close(added, expected[f"transformer_blocks.1.{ours}"], atol=1e-6, rtol=1e-5)
    assert len(stored) == 2 * len(expected)
    assert sorted(metadata["target_modules"]) == sorted({name.split(".lora_")[0] for name in stored})


def test_comfyui_knows_wan_by_its_original_names(runs, exported):
    stored = load_file(exported("wan", "comfyui") / "lora_comfyui.safetensors")
    expected = deltas(runs["wan"])
    names = {
        "attn1.to_q": "self_attn.q",
        "attn2.to_out.0": "cross_attn.o",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
    }
    for ours, theirs in names.items():
        layer = f"diffusion_model.blocks.1.{theirs}"
        down, up = stored[f"{layer}.lora_A.weight"], stored[f"{layer}.lora_B.weight"]
        added = stored[f"{layer}.alpha"] / len(down) * up @ down
        torch.testing.assert_close(added, expected[f"blocks.1.{ours}"], atol=1e-6, rtol=1e-5)
    assert len(stored) == 3 * len(expected)


def snippet_of(folder: Path) -> str:
    snippet = re.search(r"```python\n(.+?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    return snippet[1]


@pytest.mark.parametrize(
    ("run", "kind"),
    [("lora", "diffusers"), ("lora", "peft"), ("lora", "merged"), ("full", "merged"), ("wan", "diffusers")],
)
def test_the_cards_snippet_runs_as_it_stands(exported, run, kind):
    folder = exported(run, kind)
    assert len(snippet_of(folder).splitlines()) <= 10
    subprocess.run([sys.executable, "-c", snippet_of(folder)], cwd=folder, check=True, capture_output=True)
    from sagecli.videofiles import probe

    info = probe(folder / "video.mp4")
    assert (info.num_frames, info.height, info.width, info.fps) == (5 if run == "wan" else 9, 32, 32, 8.0)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_lies_beside_the_weights(runs, exported, kind):
    folder = exported("lora", kind)
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0"
    assert {"sage-grpo", "text-to-video"} <= set(card.data.tags)
    assert ("lora" in card.data.tags) == (kind != "merged")
    assert json.loads((folder / "summary.json").read_text()) == json.loads((runs["lora"] / "summary.json").read_text())
    facts = json.loads((folder / "export.json").read_text())
    assert (facts["format"], facts["dtype"], facts["round"]) == (kind, "fp32", 2)
    assert 0 <= facts["difference"] <= 1e-5
    assert (folder / "config.toml").read_text() == (checkpoint.find(runs["lora"]) / "config.toml").read_text()


def test_a_hub_id_is_the_cards_base_model(tmp_path, runs):
    from sagecli.exportcard import write_card

    config = checkpoint.config_of(checkpoint.find(runs["wan"]))
    base = str(tmp_path / "owner" / "name")
    shutil.copytree(config.model.path, base)
    facts = {
        "format": "diffusers",
        "dtype": "bf16",
        "ema": False,
        "round": 1,
        "update": 1,
        "transformer": "WanTransformer3DModel",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sagecli.exportcard.local_folder", lambda path, key: Path(base))
        hub = config.model_copy(
            update={"model": config.model.model_copy(update={"path": "owner/name", "dtype": "bfloat16"})}
        )
        write_card(tmp_path, hub, facts, "a cat")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.license) == ("owner/name", "apache-2.0")
    assert "WanPipeline.from_pretrained('owner/name', dtype=torch.bfloat16).to(\"cuda\")" in card.content


@pytest.mark.parametrize(
    ("run", "kind"), [*(("lora", kind) for kind in FORMATS), ("full", "merged"), ("wan", "merged")]
)
def test_bf16_is_stored_and_checked_within_its_rounding(runs, sage, tmp_path, run, kind):
    out = tmp_path / "out"
    result = sage("export", str(runs[run]), "--format", kind, "--dtype", "bf16", "--out", str(out))
    assert result.code == 0, result.err
    (file,) = out.glob("*.safetensors")
    assert {value.dtype for name, value in load_file(file).items() if not name.endswith("alpha")} == {torch.bfloat16}
    facts = json.loads((out / "export.json").read_text())
    assert facts["difference"] <= 1e-5  # against weights rounded likewise, which is exact
    assert 0 < facts["lost"] < 0.1
    assert f"storing it in bf16 changed {facts['lost']:.1%} of that" in result.out
    if facts["changed"] is None:
        assert kind in ("tencent", "comfyui")
    else:
        assert f"training changed them by {facts['changed']:.1e}" in result.out
        assert 1e-2 < facts["changed"] < 2


def fainter(run: Path, folder: Path, factor: float, layer: str = "") -> str:
    """A copy of a run whose adapter, or that of one layer, adds so much less."""
    copy = Path(shutil.copytree(run, folder, symlinks=True))
    file = checkpoint.find(copy) / "weights.safetensors"
    stored = load_file(file)
    save_file({name: value * factor if f"{layer}.lora_B" in name else value for name, value in stored.items()}, file)
    restate(file.parent)
    return str(copy)


def restate(folder: Path) -> None:
    """Let a checkpoint's manifest say what its files are now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({name: checkpoint.statement(folder / name) for name in manifest}))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 1e-2, 1.0), (1e-3, 1e-5, 1e-3), (1e-5, 1e-6, 1e-5)])
def test_the_base_is_not_taken_for_the_trained_model(runs, sage, tmp_path, monkeypatch, factor, dtype, least, most):
    """However little training did, down to less than two computations of one model may differ."""
    run, out = fainter(runs["lora"], tmp_path / "run", factor), tmp_path / "out"
    options = ("export", run, "--format", "diffusers", "--dtype", dtype, "--out", str(out))
    assert sage(*options).code == 0
    assert least < json.loads((out / "export.json").read_text())["changed"] < most
    write = exportformats.write

    def write_base(backbone: Backbone, *arguments: Any) -> None:
        adapters = {name: value for name, value in trainable(backbone.module).items() if "lora_B" in name}
        kept = {name: value.detach().clone() for name, value in adapters.items()}
        for value in adapters.values():
            value.data *= 0
        write(backbone, *arguments)
        for name, value in adapters.items():
            value.data = kept[name].to(value.dtype)

    monkeypatch.setattr(exportformats, "write", write_base)
    result = sage(*options, "--force")
    assert (result.code, "loaded again, gives velocities that differ by" in result.err) == (1, True), result.out


def test_a_training_that_bf16_cannot_hold_is_said(runs, sage, tmp_path):
    run, out = fainter(runs["lora"], tmp_path / "run", 1e-3), tmp_path / "out"
    result = sage("export", run, "--format", "merged", "--dtype", "bf16", "--out", str(out))
    assert result.code == 0, result.err
    lost = json.loads((out / "export.json").read_text())["lost"]
    assert lost > 0.5
    assert f"storing it in bf16 changed {lost:.1%} of that, which --dtype fp32 keeps" in result.out


def test_a_training_that_changed_nothing_is_said(runs, sage, tmp_path):
    run = fainter(runs["lora"], tmp_path / "run", 0.0)
    result = sage("export", run, "--format", "merged", "--dtype", "bf16", "--out", str(tmp_path / "out"))
    assert result.code == 0, result.err
    assert "training changed them by 0.0e+00, too little to tell it from the base model" in result.out


@pytest.mark.parametrize("kind", ["tencent", "comfyui"])
def test_a_layer_that_adds_little_is_checked_like_the_others(runs, sage, tmp_path, monkeypatch, kind):
    run = fainter(runs["lora"], tmp_path / "run", 1e-4, layer="blocks.1.attn.to_out.0")
    name = {"tencent": "blocks.1.img_attn_proj.lora_B", "comfyui": "blocks.1.img_attn.proj.lora_B"}[kind]
    options = ("export", run, "--format", kind, "--dtype", "bf16", "--out", str(tmp_path / "out"))
    assert sage(*options).code == 0
    spoil(monkeypatch, lambda key: name in key, lambda value: value * 0)
    result = sage(*options, "--force")
    assert (result.code, f"the {kind} export, read again, adds other weights to double_" in result.err) == (1, True)


@pytest.mark.parametrize(("out", "inside"), [(".", "."), ("", "."), ("..", "a")])
def test_the_folder_one_is_in_is_not_replaced(runs, sage, tmp_path, monkeypatch, out, inside):
    (tmp_path / inside).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / inside)
    result = sage("export", str(runs["lora"]), "--out", out)
    assert (result.code, f"--out {Path(out)}: you are in this folder; name one in it" in result.err) == (2, True)
    assert not list((tmp_path / inside).iterdir())


@pytest.mark.parametrize("kind", ["diffusers", "peft"])
def test_a_base_named_by_a_relative_path_is_found_from_the_export(runs, sage, tmp_path, monkeypatch, kind):
    """The card's snippet runs in the export; where the base is not found at all, one sentence says so."""
    run = Path(shutil.copytree(runs["wan"], tmp_path / "run", symlinks=True))
    base = Path(checkpoint.config_of(checkpoint.find(run)).model.path)
    (tmp_path / "models").symlink_to(base.parent)
    for file in (run / "config.toml", checkpoint.find(run) / "config.toml"):
        file.write_text(file.read_text().replace(str(base), f"models/{base.name}"))
    restate(checkpoint.find(run))
    monkeypatch.chdir(tmp_path)
    assert sage("export", str(run), "--format", kind, "--out", "out").code == 0
    subprocess.run([sys.executable, "-c", snippet_of(tmp_path / "out")], cwd="out", check=True, capture_output=True)
    assert (tmp_path / "out" / "video.mp4").is_file()
    assert f"models/{base.name}" not in str([path.read_text() for path in (tmp_path / "out").glob("*.json")])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    result = sage("export", str(run), "--format", kind)
    assert (result.code, f"model.path = 'models/{base.name}' is neither a folder" in result.err) == (2, True)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_step_and_the_moving_average(runs, sage, tmp_path):
    stored = checkpoint.find(runs["lora"]) / "policies.safetensors"
    outs = {"latest": (), "first": ("--step", "1"), "average": ("--ema",)}
    for name, options in outs.items():
        result = sage("export", str(runs["lora"]), "--out", str(tmp_path / name), *options)
        assert result.code == 0, result.err
    weights = {name: load_file(tmp_path / name / "pytorch_lora_weights.safetensors") for name in outs}
    key = "transformer_blocks.0.attn.to_q.lora_B"
    expected = {
        "latest": load_file(checkpoint.find(runs["lora"]) / "weights.safetensors"),
        "first": load_file(runs["lora"] / "checkpoints" / "round-000001" / "weights.safetensors"),
        "average": {name.removeprefix("ema/"): value for name, value in load_file(stored).items()},
    }
    for name in outs:
        assert torch.equal(weights[name][f"{key}.weight"], expected[name][f"{key}.default.weight"])
    facts = json.loads((tmp_path / "first" / "export.json").read_text())
    assert (facts["round"], facts["ema"]) == (1, False)
    assert json.loads((tmp_path / "first" / "summary.json").read_text())["evaluations"][0]["round"] == 0


def spoil(monkeypatch: pytest.MonkeyPatch, which: Callable[[str], bool], how: Callable[[Tensor], Tensor]) -> None:
    """Let exports write other numbers into the first tensor whose name is told by `which`."""
    write = exportformats.write

    def spoiled(*arguments: Any) -> None:
        write(*arguments)
        (file,) = arguments[-1].glob("*.safetensors")
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = {name: value.clone() for name, value in load_file(file).items()}
        name = next(filter(which, tensors))
        tensors[name] = how(tensors[name])
        save_file(tensors, file, metadata)

    monkeypatch.setattr(exportformats, "write", spoiled)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_failed_check_leaves_nothing(runs, sage, tmp_path, monkeypatch, kind):
    spoil(monkeypatch, lambda name: ("attn.to_v.weight" if kind == "merged" else "lora_B") in name, lambda v: v + 0.5)
    result = sage("export", str(runs["lora"]), "--format", kind, "--out", str(tmp_path / "out"))
    assert result.code == 1
    assert f"the {kind} export" in result.err
    assert list(tmp_path.iterdir()) == []
    assert sage("export", str(runs["lora"]), "--format", kind, "--no-verify", "--out", str(tmp_path / "out")).code == 0


def test_refusals(runs, sage, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    damaged = Path(shutil.copytree(checkpoint.find(runs["lora"]), tmp_path / "damaged"))
    file = damaged / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    half = Path(shutil.copytree(checkpoint.find(runs["lora"]), tmp_path / "half"))
    (half / "manifest.json").unlink()
    other = Path(shutil.copytree(checkpoint.find(runs["lora"]), tmp_path / "other"))
    text = (other / "config.toml").read_text().replace("rank = 16", "rank = 8")
    (other / "config.toml").write_text(text)
    manifest = json.loads((other / "manifest.json").read_text())
    del manifest["config.toml"]
    (other / "manifest.json").write_text(json.dumps(manifest))
    run = str(runs["lora"])
    before = sorted(tmp_path.iterdir())
    for arguments, sentence in (
        (
            (run, "--format", "difusers"),
            "there are diffusers, peft, merged, tencent, comfyui; did you mean 'diffusers'",
        ),
        ((str(runs["full"]), "--format", "peft"), "this run trained all weights: use --format merged"),
        (
            (str(runs["wan"]), "--format", "tencent"),
            "--format tencent has no name for blocks.0.attn1.to_q of a wan model",
        ),
        ((run, "--dtype", "bf8"), "--dtype 'bf8': there are fp32, bf16, fp16; did you mean 'bf16'"),
        ((run, "--step", "7"), "holds no checkpoint of round 7; there are those of [1, 2]"),
        ((run, "--out", str(full)), "is not empty; name another folder with --out, or --force"),
        ((run, "--out", str(full), "--force"), "holds something else than an export (it has no export.json)"),
        ((str(tmp_path),), "holds no checkpoint"),
        ((str(damaged),), "is damaged: weights.safetensors is not what was written"),
        ((str(half),), "holds no checkpoint"),
        ((str(other),), "does not fit the model"),
    ):
        out = () if "--out" in arguments else ("--out", str(tmp_path / "out"))
        result = sage("export", *arguments, *out)
        assert (arguments, result.code) == (arguments, 2)
        assert sentence in result.err
        assert "Traceback" not in result.err
        assert sorted(tmp_path.iterdir()) == before


def test_force_replaces_an_export(runs, sage, tmp_path):
    out = tmp_path / "out"
    assert sage("export", str(runs["lora"]), "--out", str(out)).code == 0
    (out / "stale").touch()
    for left in (".out.partial", ".out.old"):  # by one that was killed
        shutil.copytree(out, tmp_path / left)
    assert sage("export", str(runs["lora"]), "--format", "peft", "--out", str(out), "--force").code == 0
    assert not (out / "stale").exists()
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "adapter_model.safetensors").exists()


def test_a_full_disk_leaves_nothing(runs, tmp_path):
    command = f"ulimit -f 400; exec {sys.executable} -m sagecli.cli export {runs['lora']} --out {tmp_path / 'out'}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert f"{tmp_path / 'out'} was not written (" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_leaves_none_of_its_parents(runs, sage, tmp_path):
    (tmp_path / "file").touch()
    long = "x" * 300
    for out in ("/proc/no/folder", str(tmp_path / "file" / "out"), str(tmp_path / "a" / "b" / long)):
        result = sage("export", str(runs["lora"]), "--out", out)
        assert (out, result.code, f"{out} was not written (" in result.err) == (out, 2, True), result.err
    result = sage("export", str(runs["wan"]), "--format", "tencent", "--out", str(tmp_path / "a" / "b" / "c"))
    assert result.code == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_link_is_followed_and_names_may_be_any(runs, sage, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "lead").symlink_to("mödel ☃ 1")
    for out in ("link", "lead", "link"):
        result = sage("export", str(runs["lora"]), "--no-verify", "--out", str(tmp_path / out), "--force")
        assert result.code == 0, result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "lead", "link", "mödel ☃ 1"]
    assert (tmp_path / "folder" / "export.json").is_file()
    assert (tmp_path / "mödel ☃ 1" / "export.json").is_file()


def test_a_failed_export_leaves_the_earlier_one(runs, sage, tmp_path, monkeypatch):
    options = ("export", str(runs["lora"]), "--out", str(tmp_path / "out"), "--force")
    assert sage(*options).code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    spoil(monkeypatch, lambda name: "lora_B" in name, lambda value: value + 0.5)
    assert sage(*options).code == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_sigterm_leaves_nothing(runs, sage, tmp_path, monkeypatch):
    write = exportformats.write

    def ended(*arguments: Any) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(exportformats, "write", ended)
    assert sage("export", str(runs["lora"]), "--out", str(tmp_path / "a" / "out")).code == 143
    assert (list(tmp_path.iterdir()), signal.getsignal(signal.SIGTERM)) == ([], before)


@pytest.mark.parametrize("damage", ["", "{cut", "[]\n", "{}\n", "null\n"])
@pytest.mark.parametrize("name", ["state.json", "manifest.json", "config.toml"])
def test_a_damaged_checkpoint_is_one_sentence(runs, sage, tmp_path, name, damage):
    folder = Path(shutil.copytree(checkpoint.find(runs["lora"]), tmp_path / "checkpoint"))
    (folder / name).write_text(damage)
    result = sage("export", str(folder), "--out", str(tmp_path / "out"))
    assert (result.code, str(folder) in result.err, "Traceback" in result.err) == (2, True, False), result.err
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("damage", ["{cut\n", "[]\n", "{}\n", "null\n"])
@pytest.mark.parametrize("name", ["summary.json", "evaluations.jsonl", "evaluations/round-000000/scores.jsonl"])
def test_a_damaged_evaluation_is_one_sentence(runs, sage, tmp_path, name, damage):
    run = Path(shutil.copytree(runs["lora"], tmp_path / "run", symlinks=True))
    if name == "evaluations.jsonl":
        (run / "summary.json").unlink()
    (run / name).write_text(damage)
    options = ("export", str(run), "--no-verify", "--out", str(tmp_path / "out"))
    result = sage(*options)
    assert (result.code, f"{run / name} is damaged; restore it, or move it away" in result.err) == (2, True), result.err
    (run / name).unlink()
    assert sage(*options).code == 0


def test_a_checkpoint_without_its_run(runs, sage, tmp_path, monkeypatch):
    """Its own name is the export's, and nothing is read from the folders above it."""
    (tmp_path / "far").mkdir()
    shutil.copytree(checkpoint.find(runs["lora"]), tmp_path / "far" / "mine")
    (tmp_path / "summary.json").write_text("another's")
    monkeypatch.chdir(tmp_path)
    result = sage("export", "far/mine", "--no-verify")
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "exports/mine-diffusers/summary.json").read_text()) == {"evaluations": []}


def test_a_run_without_its_link_names_a_checkpoint(runs, sage, tmp_path):
    run = Path(shutil.copytree(runs["lora"], tmp_path / "run", symlinks=True))
    (run / "checkpoints" / "latest").unlink()
    result = sage("export", str(run), "--out", str(tmp_path / "out"))
    newest = run / "checkpoints" / "round-000002"
    assert (result.code, f"is the latest; name one, such as {newest}" in result.err) == (2, True)
    assert sage("export", str(newest), "--no-verify", "--step", "2", "--out", str(tmp_path / "out")).code == 0
    result = sage("export", str(newest), "--step", "1")
    assert (result.code, "is one checkpoint and not that of round 1; name its run" in result.err) == (2, True)


def test_the_check_needs_no_text_encoder_in_memory(runs):
    backbone = backbone_of(runs["wan"])
    exportformats.velocities(backbone)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is UMT5EncoderModel]
