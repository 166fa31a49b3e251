import tomllib
from pathlib import Path
from typing import Any

import pytest

from sagecli import config as schema
from sagecli.config import Config
from sagecli.errors import UserError
from sagecli.loading import dump_config, load_config, preset_names, preset_text

SMALLEST = """
[[reward.models]]
name = "shapes"
weights = { VQ = 1 }
[train]
prompts = "prompts/p.txt"
rounds = 1
[eval]
prompts = "builtin:shapes-heldout"
"""


def config_file(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def all_keys(table: Any, above: str = "") -> set[str]:
    """Every dotted key of nested tables; the items of a list share theirs."""
    if isinstance(table, dict):
        return {key for name, value in table.items() for key in {above + name, *all_keys(value, f"{above}{name}.")}}
    if isinstance(table, list | tuple):
        return {key for item in table for key in all_keys(item, above)}
    return set()


def keys_of(section: type[schema.Section]) -> str:
    return ", ".join(section.model_fields)


def refusal(preset: str | Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(str(preset), overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["quickstart", "setting-a", "setting-b", "setting-b-lora", "wan-lora"])
def test_presets_are_complete_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert all_keys(tomllib.loads(preset_text(name))) == all_keys(config.model_dump())
    assert config.train.prompts.startswith("builtin:")
    assert config.eval.prompts.startswith("builtin:")
    assert config.about
    assert len(config.about) <= 100
    assert load_config(str(config_file(tmp_path, dump_config(config)))) == config


def test_presets_are_listed() -> None:
    assert preset_names() == ["quickstart", "setting-a", "setting-b", "setting-b-lora", "wan-lora"]


@pytest.mark.parametrize(
    ("name", "weights"),
    [("setting-a", {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}), ("setting-b", {"VQ": 0.5, "MQ": 0.5, "TA": 1.0})],
)
def test_settings_hold_the_papers_numbers(name: str, weights: dict[str, float]) -> None:
    """METHOD.md section 6."""
    config = load_config(name)
    model, video, sampler, optimizer = config.model, config.video, config.sampler, config.optimizer
    assert (model.path, model.dtype) == ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", "bfloat16")
    assert (model.train, model.gradient_checkpointing) == ("full", True)
    assert (video.height, video.width, video.frames, video.fps) == (352, 624, 81, 24)
    assert (sampler.sde, sampler.eta, sampler.steps, sampler.shift, sampler.guidance) == ("precise", 0.5, 20, 5, 6)
    assert (sampler.last_step, sampler.sde_steps) == ("sde", "all")
    assert [(model.name, model.weights) for model in config.reward.models] == [("videoalign", weights)]
    assert config.objective.model_dump() == {
        "equalizer": "velocity",
        "clip_range": 1e-4,
        "advantage_clip": 5,
        "updates_per_round": 1,
        "epochs": 1,
    }
    assert config.trust_region.model_dump() == {
        "strategy": "dual-moving",
        "anchor_every": 10,
        "beta_pos": 1.0,
        "beta_vel": 0.1,
        "offload_anchor": False,
        "lambda_kl": {"kind": "two-stage", "start": 1e-7, "end": 1e-5, "switch_at": 50},
    }
    assert (optimizer.kind, optimizer.lr, optimizer.betas) == ("muon", 1e-5, (0.95, 0.95))
    assert (optimizer.weight_decay, optimizer.grad_clip) == (0.01, 1.0)
    assert optimizer.muon.model_dump() == {"momentum": 0.95, "nesterov": True, "ns_steps": 5}
    assert (config.train.groups_per_round, config.train.group_size) == (16, 4)
    assert (config.eval.steps, config.eval.guidance) == (40, 6)


def test_setting_b_lora_differs_from_setting_b_only_where_one_gpu_asks_for_it() -> None:
    changed = {"about", "model.train", "model.vae_tiling", "model.lora", "sampler.sde_steps", "optimizer.kind"}
    changed |= {"optimizer.lr", "optimizer.warmup", "train.groups_per_round", "train.eval_every", "eval.seeds"}
    one, other = load_config("setting-b").model_dump(), load_config("setting-b-lora").model_dump()
    differing = {key for key in one if key == "about" and one[key] != other[key]}
    for section in set(one) - {"about"}:
        differing |= {f"{section}.{key}" for key in one[section] if one[section][key] != other[section][key]}
    assert differing == changed


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("sampler.eta=1", "sampler.eta", 1.0),
        ("sampler.sde=flow", "sampler.sde", "flow"),
        ("sampler.sde = 'flow'", "sampler.sde", "flow"),
        ('model.lora.targets="attention"', "model.lora.targets", "attention"),
        (r"model.lora.targets=blocks\.\d+\.attn", "model.lora.targets", r"blocks\.\d+\.attn"),
        ("model.path=/models/hunyuan=1.5", "model.path", "/models/hunyuan=1.5"),
        ("about=two words", "about", "two words"),
        ("sampler.shared_noise=true", "sampler.shared_noise", True),
        ("sampler.sde_steps=[1, 2]", "sampler.sde_steps", (1, 2)),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
    ],
)
def test_overrides_take_toml_values_and_bare_words(override: str, key: str, value: object) -> None:
    found: Any = load_config("quickstart", [override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_overrides_replace_whole_tables_and_the_last_one_wins() -> None:
    config = load_config(
        "quickstart",
        [
            "sampler.sde_steps={size=3, draw='random'}",
            'reward.models=[{name="clip", weights={CLIP=1}}, {name="shapes", weights={TA=2.5}}]',
            'trust_region.lambda_kl={kind="linear", start=0, end=1, ramp=5}',
            "train.rounds=5",
            "train.rounds=7",
        ],
    )
    assert config.sampler.model_dump()["sde_steps"] == {
        "size": 3, "start": 0, "stride": 1, "every": 1, "draw": "random",
    }  # fmt: skip
    assert [model.weights for model in config.reward.models] == [{"CLIP": 1.0}, {"TA": 2.5}]
    assert config.trust_region.model_dump()["lambda_kl"] == {"kind": "linear", "start": 0, "end": 1, "ramp": 5}
    assert config.train.rounds == 7
    assert load_config("quickstart").train.rounds != 7


def test_prompt_files_start_at_the_file_or_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    config_file(tmp_path / "configs", SMALLEST)
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/run.toml")
    assert config.train.prompts == str(tmp_path / "configs" / "prompts" / "p.txt")
    assert config.eval.prompts == "builtin:shapes-heldout"
    assert load_config("configs/run.toml", ["train.prompts=p.txt"]).train.prompts == str(tmp_path / "p.txt")
    assert load_config("configs/run.toml", ["eval.prompts=../e.txt"]).eval.prompts == str(tmp_path.parent / "e.txt")
    assert load_config("configs/run.toml", ["eval.prompts=/e.txt"]).eval.prompts == "/e.txt"
    config_file(tmp_path, dump_config(config), "elsewhere.toml")
    assert load_config("elsewhere.toml") == config


def test_a_file_may_leave_out_what_has_a_default_and_overrides_may_complete_it(tmp_path: Path) -> None:
    config = load_config(str(config_file(tmp_path, "\ufeff" + SMALLEST)))
    assert config == Config.model_validate({**tomllib.loads(SMALLEST), "train": config.train.model_dump()})
    without = config_file(tmp_path, SMALLEST.replace("rounds = 1", ""), "without.toml")
    assert load_config(str(without), ["train.rounds=3"]).train.rounds == 3


SDE_STEPS = (
    '"all", or a list of one or more items, each a whole number of 0 or more, '
    f"or a table of {keys_of(schema.WindowConfig)}"
)

KINDS = '"adaptive", "constant", "linear" or "two-stage"'


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampler.steps='20'", 'sampler.steps = "20"; it takes a whole number of 2 or more'),
        ("sampler.steps=20.0", "sampler.steps = 20.0; it takes a whole number of 2 or more"),
        ("train.rounds=true", "train.rounds = true; it takes a whole number of 1 or more"),
        ("sampler.eta=0", "sampler.eta = 0; it takes a number over 0"),
        ("sampler.eta=true", "sampler.eta = true; it takes a number over 0"),
        ("sampler.shared_noise=1", "sampler.shared_noise = 1; it takes true or false"),
        ("train.prompts=5", "train.prompts = 5; it takes a text"),
        ("optimizer.lr=inf", "optimizer.lr = inf; it takes a finite number over 0"),
        ("reward.max_failed=2", "reward.max_failed = 2; it takes a number from 0 to 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]; it takes a list of 2 items, each a number from 0 to "
         "below 1"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas[1] = 1; it takes a number from 0 to below 1"),
        ("eval.seeds=[0, -1]", "eval.seeds[1] = -1; it takes a whole number of 0 or more"),
        ("eval.seeds=[-1]", "eval.seeds[0] = -1; it takes a whole number of 0 or more"),
        ("optimizer.kind=Muon", "optimizer.kind = \"Muon\"; it takes \"adamw\" or \"muon\"; did you mean 'muon'?"),
        ("model=tiny", f"model = \"tiny\"; it takes a table of {keys_of(schema.ModelConfig)}"),
        ("sampler.sde_steps=3", f"sampler.sde_steps = 3; it takes {SDE_STEPS}"),
        ("sampler.sde_steps=al", f"sampler.sde_steps = \"al\"; it takes {SDE_STEPS}; did you mean 'all'?"),
        ("sampler.sde_steps=[]", f"sampler.sde_steps = []; it takes {SDE_STEPS}"),
        ("sampler.sde_steps=['1']", 'sampler.sde_steps[0] = "1"; it takes a whole number of 0 or more'),
        ("sampler.sde_steps={start=1}", "sampler.sde_steps.size is missing; it takes a whole number of 1 or more"),
        ("sampler.sde_steps={size=3, strat=1}", "unknown key sampler.sde_steps.strat; [sampler.sde_steps] has "
         f"{keys_of(schema.WindowConfig)}; did you mean 'start'?"),
        ("trust_region.lambda_kl=0.3", f"trust_region.lambda_kl = 0.3; it takes a table whose kind is {KINDS}"),
        ("trust_region.lambda_kl={value=1}", f"trust_region.lambda_kl.kind is missing; it takes {KINDS}"),
        ("trust_region.lambda_kl={kind='linea'}", f"trust_region.lambda_kl.kind = \"linea\"; it takes {KINDS}; "
         "did you mean 'linear'?"),
        ("trust_region.lambda_kl={kind='constant', value=0}", "trust_region.lambda_kl.value = 0; it takes a number "
         "over 0"),
        ("trust_region.lambda_kl={kind='constant', vale=1}", "unknown key trust_region.lambda_kl.vale; "
         "[trust_region.lambda_kl] with kind = \"constant\" has kind, value; did you mean 'value'? (and 1 more)"),
        (
            "reward.models=[]",
            "reward.models = []; it takes a list of one or more items, "
            "each a table of name, path, dtype, offload, options, weights",
        ),
        ("reward.models=[{name='clip', weights={}}]", "reward.models[0].weights = {}; it takes a table of one or more "
         "names, each with a number"),
        ("reward.models=[{name='clip', weights={CLIP=nan}}]", "reward.models[0].weights.CLIP = nan; it takes a finite "
         "number"),
        ("train.group_sizes=4", f"unknown key train.group_sizes; [train] has {keys_of(schema.TrainConfig)}; "
         "did you mean 'group_size'?"),
        ("sampler.group_size=4", f"unknown key sampler.group_size; [sampler] has {keys_of(schema.SamplerConfig)}; "
         "did you mean 'train.group_size'?"),
        ("smpler.eta=1", f"unknown key smpler; a configuration has {keys_of(Config)}; did you mean 'sampler'?"),
        ("train.group_size=1", "train.group_size = 1; it takes a whole number of 2 or more"),
    ],
)  # fmt: skip
def test_a_bad_override_is_one_sentence(override: str, said: str) -> None:
    assert refusal("quickstart", override) == f"--set: {said}"


def test_rules_over_several_keys_are_one_sentence() -> None:
    assert refusal("quickstart", "objective.updates_per_round=9", "train.groups_per_round=4") == (
        "--set: objective.updates_per_round = 9 needs as many groups a round; train.groups_per_round is 4"
    )
    assert refusal("quickstart", "trust_region.strategy=moving", "trust_region.beta_pos=0") == (
        "--set: trust_region.strategy = 'moving' needs beta_pos > 0; it is 0"
    )
    assert refusal("quickstart", "sampler.sde=cps", "sampler.eta=1.5") == (
        "--set: sampler.eta = 1.5 is out of range for sde = 'cps', which takes 0 < eta <= 1"
    )
    assert refusal("quickstart", "trust_region.lambda_kl={kind='linear', start=0, end=0, ramp=3}") == (
        "--set: trust_region.lambda_kl.start and end are both 0, so the KL would have no weight"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampler.eta", "--set 'sampler.eta': not of the form key=value, such as sampler.eta=0.3"),
        ("sampler.eta=", "--set 'sampler.eta=': not of the form key=value"),
        ("=3", "--set '=3': not of the form key=value"),
        ("sampler..eta=3", "--set 'sampler..eta=3': not of the form key=value"),
        ("sampler.sde_steps=[1, 2", "--set sampler.sde_steps: [1, 2 is not a TOML value (Unclosed array)"),
        ("sampler.eta.x=1", "--set sampler.eta.x: sampler.eta is no table here; set sampler.eta as a whole"),
        ("reward.models.0.name=a", "--set reward.models.0.name: reward.models is no table here; set reward.models as"),
    ],
)
def test_an_override_that_is_none_says_how_one_looks(override: str, said: str) -> None:
    assert refusal("quickstart", override).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", f"reward is missing; it takes a table of {keys_of(schema.RewardConfig)} (and 2 more)"),
        (SMALLEST.replace("rounds = 1", ""), "train.rounds is missing; it takes a whole number of 1 or more"),
        (
            SMALLEST + "step = 3",
            f"unknown key eval.step; [eval] has {keys_of(schema.EvalConfig)}; did you mean 'steps'?",
        ),
        (SMALLEST + "steps = 1", "eval.steps = 1; it takes a whole number of 2 or more"),
        (SMALLEST + "[model.lora]\nrank = 0", "model.lora.rank = 0; it takes a whole number of 1 or more"),
        (
            "train = 3\neval = { prompts = 'e.txt' }\nreward = { models = [{ name = 'a', weights = { A = 1 } }] }",
            f"train = 3; it takes a table of {keys_of(schema.TrainConfig)}",
        ),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    path = config_file(tmp_path, text)
    sentence = refusal(path)
    assert sentence.startswith(f"{path}: ")
    assert said in sentence


def test_what_the_file_has_wrong_is_not_blamed_on_the_overrides(tmp_path: Path) -> None:
    path = config_file(tmp_path, SMALLEST + "steps = 1")
    assert refusal(path, "train.rounds=2").startswith(f"{path}: eval.steps = 1;")
    assert refusal(path, "eval.steps=0").startswith("--set: eval.steps = 0;")


def test_toml_that_does_not_parse_names_file_and_line(tmp_path: Path) -> None:
    path = config_file(tmp_path, "[train]\nrounds = \n")
    assert refusal(path) == f"{path}, line 2: not TOML (Invalid value)"


def test_presets_that_are_not_there_are_named(tmp_path: Path) -> None:
    known = "there are quickstart, setting-a, setting-b, setting-b-lora, wan-lora"
    assert refusal("quickstrt") == f"unknown preset 'quickstrt'; {known}; did you mean 'quickstart'?"
    assert refusal("zzz") == f"unknown preset 'zzz'; {known}; a file of your own is given as its path, ending in .toml"
    assert refusal(tmp_path / "gone.toml") == f"{tmp_path / 'gone.toml'}: no such file"
    assert refusal(tmp_path) == f"{tmp_path}: this is a folder, not a file"
    latin = tmp_path / "latin.toml"
    latin.write_bytes('about = "über"'.encode("latin-1"))
    assert refusal(latin) == f"{latin}: not UTF-8 text (byte 9); save it as UTF-8"
