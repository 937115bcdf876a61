import dataclasses
import json
import shlex
from itertools import zip_longest

import pytest
import yaml
from composing import CONFIGS, choose, composed, names, opening, settings_of
from hydra.utils import instantiate
from omegaconf import OmegaConf
from scripts_here import run_script

from dmc.commands.study import StudyConfig, check_measurements
from dmc.config import build_config
from dmc.config.command_line import plain_values
from dmc.results.grid import CompareConfig, named_settings, plan_methods
from dmc.training.config import RunConfig, run_config
from dmc.training.scorer_fit import FitConfig
from dmc.training.stages import Plan


@pytest.mark.parametrize("name", [name for name in names("experiment") if "dmc train " in opening(name)[1]])
def test_every_experiment_opens_with_its_command(name):
    assert opening(name) == ["# @package _global_", f"# dmc train experiment={name}"]


@pytest.mark.parametrize("name", [name for name in names("experiment") if "dmc fit-scorer " in opening(name)[1]])
def test_every_fit_of_a_scorer_composes_and_opens_with_its_command(name):
    assert opening(name) == ["# @package _global_", f"# dmc fit-scorer experiment={name}"]
    settings = settings_of("fit_scorer", f"experiment={name}")
    config = build_config(FitConfig, OmegaConf.to_container(settings, resolve=True))
    assert Plan(config.run.training, 1.0).total_steps == config.steps


@pytest.mark.parametrize("name", [name for name in names("experiment") if "dmc compare " in opening(name)[1]])
def test_every_preset_of_compare_composes_and_opens_with_its_command(name):
    has_no_models = OmegaConf.is_missing(settings_of("compare", f"experiment={name}"), "models")
    overrides = ["models={base: DIR, cr4: DIR}"] if has_no_models else []
    settings = settings_of("compare", f"experiment={name}", *overrides)
    config = build_config(CompareConfig, OmegaConf.to_container(settings, resolve=True))
    assert plan_methods(named_settings(config.policies, CONFIGS / "policy", "policies"), config.budgets)
    words = shlex.split(opening(name)[1])
    assert words == ["#", "dmc", "compare", f"experiment={name}", *overrides]
    assert len(config.models) == 2


STUDIES = [name for name in names("experiment") if "dmc study " in opening(name)[1]]


def runs_in(study):
    return [*study["bases"].items(), *study["runs"].items()]


def study_runs():
    files = [CONFIGS / "experiment" / f"{name}.yaml" for name in STUDIES]
    return [run for file in files for run in runs_in(yaml.safe_load(file.read_text()))]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_composes_and_opens_with_its_command(name):
    assert opening(name) == ["# @package _global_", f"# dmc study experiment={name}"]
    settings = OmegaConf.to_container(settings_of("study", f"experiment={name}"), resolve=True)
    check_measurements(build_config(StudyConfig, settings), CONFIGS)
    assert all(run in study_runs() for run in runs_in(settings))


def test_values_set_after_groups_are_as_hydra_composes_them():
    words = [
        "experiment=recall/retrofit",
        "compression.delay=8",
        "data.facts=null",
        "+trainer.lightning.deterministic=true",
    ]
    assert composed(*words) == run_config(plain_values(choose("train", *words)))


@pytest.mark.parametrize(("name", "arguments"), study_runs(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_run_of_the_study_composes(name, arguments):
    config = composed(*arguments)
    lengths = {"4096": 4096, "base_short": 256, "=hybrid/": 256, "medium_5": 256, "medium": 256, "large": 512}
    lengths |= {"=reasoning/base_lesson": 33, "=reasoning/base_small": 128}
    length = next((number for part, number in lengths.items() if part in arguments[0] or part == name), 1024)
    assert config.training.sequence_length == length
    assert Plan(config.training, config.target_ratio, config.compression).total_steps > 0


def test_every_option_composes():
    groups = ("compression", "base", "trainer", "logger", "callbacks", "debug")
    for options in zip_longest(*([f"{group}={name}" for name in names(group)] for group in groups)):
        composed(*filter(None, options), *(["training=pretrain"] if options[0] == "compression=none" else []))
    hidden = dict.fromkeys(("short_measured", "retrofit_measured", "regress", "regress_distill"), "dmc_hidden")
    needed = {"write_gate": "write_gate", **hidden}
    for name in names("training"):
        composed(f"training={name}", "model=somewhere", f"compression={needed.get(name, 'dmc')}")


def test_loggers_and_callbacks_are_chosen_several_at_once():
    config = composed("logger=[wandb,tensorboard]", "logger.wandb.project=mine", "callbacks=[device_stats]")
    assert [*config.logger] == ["wandb", "tensorboard"] and config.logger["wandb"]["project"] == "mine"
    assert [*config.callbacks] == ["device_stats"]
    config = composed("callbacks=[evaluation,device_stats]", "+task@callbacks.evaluation.tasks.recall=recall")
    assert [*config.callbacks["evaluation"]["tasks"]] == ["needle", "recall"]
    config = composed("debug=profiler", "+callbacks.mine._target_=module.Mine", "+trainer.lightning.deterministic=true")
    assert [*config.callbacks] == ["mine"]
    assert config.trainer.lightning == {"profiler": "pytorch", "deterministic": True}


@pytest.mark.parametrize("name", names("data"))
def test_every_source_can_be_built(name):
    fill = ["data.train.text.name=a.txt", "data.validation.text.name=b.txt"] if name == "text_files" else []
    no_facts = ["data.facts=null"] if name == "recall" else []  # which are written into cached text
    if name in ("text_files", "hub_blend", "mixed"):  # else the model's own
        fill += ["data.tokenizer.path=somewhere"]
    config = composed(f"data={name}", *fill, "data.streaming=true", "data.stream_shards=8", *no_facts)
    assert config.data.stream_shards == 8
    for source in (*config.data.train.values(), *config.data.validation.values()):
        assert instantiate(source).weight > 0


@pytest.mark.parametrize("length", ["500 steps", "1e9 tokens", "1.5B tokens_per_ratio"])
def test_a_stages_length_is_one_setting(length):
    plain, other = composed().training.stages, composed(f"training.stages.retrofit.length={length}").training.stages
    assert [*other] == [*plain] == ["zero_out", "retrofit", "solidify"]
    assert other["retrofit"] == dataclasses.replace(plain["retrofit"], length=length)


def test_stages_and_sources_are_left_out_by_null_and_added_by_name():
    config = composed("training.stages.zero_out.length=null", "training.stages.pretrain.length=3 steps",
                      "training.stages={solidify: {length: null}}")  # fmt: skip
    assert [*config.training.stages] == ["pretrain", "retrofit"]
    config = composed("data=python_code", "data.train.stdlib=null", "data.train.packages.weight=2",
                      "+data.train.mine={_target_: dmc.data.TextSource, name: a.txt}")  # fmt: skip
    assert [*config.data.train] == ["packages", "mine"] and config.data.train["packages"]["weight"] == 2


def test_llama_experiment_is_the_papers_recipe():
    config = composed("experiment=llama2_7b_cr4")
    training = config.training
    assert (training.batch_size, training.sequence_length) == (1024, 4096)
    assert (training.betas, training.adam_eps, training.weight_decay) == ((0.9, 0.95), 1e-5, 0.1)
    assert (training.learning_rate, training.gradient_clip) == (3e-5, 1.0)
    gates = config.compression
    assert (gates.temperature, gates.decision_offset, gates.window_size, gates.delay) == (0.1, 5.0, 12, 0)
    assert gates.target_ratio == 4.0
    assert [*training.stages] == ["zero_out", "retrofit", "solidify"]
    assert [stage.length for stage in training.stages.values()] == ["250 steps", "24B tokens_per_ratio", "8B tokens"]
    assert training.stages["solidify"].final_fraction == 0.1


DMS = ["compression=dms_hidden", "training=dms", "compression.target_ratio=8", "training.micro_batch_size=4"]


@pytest.mark.parametrize(
    ("words", "window"),
    [
        (["experiment=qwen3_8b_dms_cr8"], 512),
        (["experiment=llama31_8b_cr4", *DMS], 256),
        (["experiment=qwen3_0p6b_cr4", *DMS], 256),
    ],
    ids=str,
)
def test_dms_is_its_authors_recipe_beside_every_other(words, window):
    config = composed(*words)
    plan = Plan(config.training, config.target_ratio, config.compression)
    assert [plan.at(100 * number).target_ratio for number in range(9)] == [*range(1, 9), 8]
    gates, training = config.compression, config.training
    assert (gates.action, gates.delay, gates.gate_input, gates.decision_scale) == ("drop", window, "hidden", 100)
    assert (gates.target_counts, training.distillation.direction, training.loss_average) == (
        "decided", "reverse", "token",
    )  # fmt: skip
    assert training.gates_only and training.sequence_length == 8192
    training.accumulation(config.trainer.devices * config.trainer.num_nodes)


@pytest.mark.parametrize(
    "name", ["qwen3_0p6b_cr4", "llama32_1b_cr4", "llama31_8b_cr4", "qwen3_30b_a3b_cr4", "gpt_oss_20b_cr4"]
)
def test_the_best_recipe_known_reaches_cr_4_in_300_steps_and_stays_there(name):
    config = composed(f"experiment={name}")
    plan = Plan(config.training, config.target_ratio, config.compression)
    assert [plan.at(step).target_ratio for step in (0, 100, 200, 300, 399)] == pytest.approx([1, 2, 3, 4, 4])
    gates, training = config.compression, config.training
    assert (plan.total_steps, training.tokens_per_step) == (400, 2**18)
    assert (gates.action, gates.delay, gates.gate_input, gates.decision_scale) == ("drop", 256, "hidden", 40)
    assert training.distillation.weight == 0.5 and training.ratio_control and training.sensitivity_init


GATES = {
    "compression=dmc_hardc": {"decisions": "per_layer"},
    "compression=dmc_uniform": {"weighting": "uniform"},
    "compression=dmc_exact": {"window_size": None},
    "compression=dmc_first_neuron": {"neuron_index": 0},
    "compression=fixed_pooling": {"decisions": "fixed", "weighting": "uniform", "window_size": None},
    "compression.decisions=per_layer": {"decisions": "per_layer"},
}
TRAINING = {
    "training.head_agreement_weight=1": {"head_agreement_weight": 1.0, "head_agreement": "mean"},
    "training.ratio_prior=local": {"ratio_prior": "local"},
    "training.soft_ratio_loss=true": {"soft_ratio_loss": True},
}


@pytest.mark.parametrize("override", [*GATES, *TRAINING])
def test_every_variant_of_the_paper_is_one_override_away(override):
    plain, variant = (composed("experiment=llama2_7b_cr2", *words) for words in ([], [override]))
    assert variant.compression == dataclasses.replace(plain.compression, **GATES.get(override, {}))
    assert variant.training == dataclasses.replace(plain.training, **TRAINING.get(override, {}))
    assert variant.model == plain.model


def test_regimes_have_the_papers_lengths():
    lengths = {}
    for name in ("retrofit", "retrofit_short", "retrofit_immediate"):
        config = composed("experiment=llama2_7b_cr4", f"training={name}", "training.snapshot_ratios=[]")
        plan = Plan(config.training, config.target_ratio, config.compression)
        lengths[name] = dict(plan.lengths())["retrofit"]
        ramp = [plan.at(250 + lengths[name] * third // 3).target_ratio for third in range(3)]
        assert ramp == ([4.0] * 3 if name == "retrofit_immediate" else pytest.approx([1.0, 2.0, 3.0], abs=1e-3))
        assert (plan.at(0).stage, plan.total_steps - lengths[name]) == ("zero_out", 250 + 1907)
        changed = {"stages": config.training.stages, "micro_batch_size": config.training.micro_batch_size}
        assert dataclasses.replace(config.training, snapshot_ratios=[]) == dataclasses.replace(
            composed().training, **changed
        )
    assert lengths == {"retrofit": 17167, "retrofit_short": 8584, "retrofit_immediate": 17167}  # 6K, 3K per +1 of CR


def test_composed_settings_survive_json():
    config = composed("experiment=quickstart_tiny_retrofit")
    assert build_config(RunConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_failed_run_of_a_sweep_is_told_to_the_launcher(tmp_path, capsys):
    said = run_script("train.py", "-m", "compression.target_ratio=0.5", f"output_dir={tmp_path / 'out'}")
    assert said.startswith("error: ") and "target_ratio=0.5" in said and "\n" not in said
    assert "Error executing job with overrides: ['compression.target_ratio=0.5'" in capsys.readouterr().err
