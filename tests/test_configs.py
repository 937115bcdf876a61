import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from scripts_here import run_script

from dmc.config import RunConfig, build_config
from dmc.training.stages import Plan

CONFIGS = Path(__file__).parent.parent / "configs"
sys.path.insert(0, str(CONFIGS.parent / "scripts"))
from train import run_config  # noqa: E402


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return run_config(compose("train", overrides=list(overrides)))


@pytest.mark.parametrize("name", names("experiment"))
def test_every_experiment_composes_and_opens_with_its_command(name):
    config = composed(f"experiment={name}")
    assert Plan(config.training, config.target_ratio).total_steps > 0
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1] == f"# python scripts/train.py experiment={name}"


@pytest.mark.parametrize(
    "override",
    [f"{group}={name}" for group in ("model", "compression", "training", "trainer", "logger") for name in names(group)],
)
def test_every_option_composes(override):
    extra = ["model.path=somewhere"] if override == "model=pretrained" else []
    if override == "compression=none":
        extra = ["training=pretrain"]
    assert isinstance(composed(override, *extra), RunConfig)


@pytest.mark.parametrize("name", names("data"))
def test_every_source_can_be_built(name):
    fill = ["data.train.0.name=a.txt", "data.validation.0.name=b.txt"] if name == "text_files" else []
    config = composed(f"data={name}", *fill)
    for source in config.data.train + config.data.validation:
        assert instantiate(source).weight > 0


@pytest.mark.parametrize("name", names("policy"))
def test_every_policy_is_an_option_of_generate(name):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        settings = compose("generate", overrides=[f"policy={name}", "model.path=somewhere", "prompt=x"])
    assert ("_target_" in settings.policy) == (name != "full")


def test_llama_experiment_is_the_papers_recipe():
    config = composed("experiment=llama2_7b_cr4")
    training = config.training
    assert (training.batch_size, training.sequence_length) == (1024, 4096)
    assert (training.betas, training.adam_eps, training.weight_decay) == ((0.9, 0.95), 1e-5, 0.1)
    assert (training.learning_rate, training.gradient_clip) == (3e-5, 1.0)
    gates = config.compression
    assert (gates.temperature, gates.decision_offset, gates.window_size, gates.delay) == (0.1, 5.0, 12, 0)
    assert gates.target_ratio == 4.0
    zero_out, retrofit, solidify = training.stages
    assert zero_out.steps == 250
    assert retrofit.tokens_per_ratio == 24e9
    assert (solidify.tokens, solidify.final_fraction) == (8e9, 0.1)


def test_composed_settings_survive_json():
    import dataclasses
    import json

    config = composed("experiment=quickstart_retrofit")
    assert build_config(RunConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("compression.target_ratio=0.5", "target_ratio=0.5 is not a compression ratio"),
        ("+training.learning_rte=1", "did you mean 'learning_rate'"),
        ("model=pretrained", "give a value for model.path"),
    ],
)
def test_wrong_settings_give_one_line(override, message, tmp_path):
    said = run_script("train.py", override, f"output_dir={tmp_path / 'out'}")
    assert said.startswith("error: ") and message in said and "\n" not in said


def test_failed_run_of_a_sweep_is_told_to_the_launcher(tmp_path, capsys):
    assert run_script("train.py", "-m", "compression.target_ratio=0.5", f"output_dir={tmp_path / 'out'}") == "1"
    said = capsys.readouterr().err
    assert "ValueError: compression.target_ratio=0.5" in said or "ValueError: target_ratio=0.5" in said
