from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dmc.budget import Budget
from dmc.results.policies import budget_name, parse_budget, policy_from_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "policy").glob("*.yaml"))
MODULE = """
class Mine:
    def __init__(self, *, budget, width=1):
        if width < 1:
            raise ValueError(f"width={width}: expected a whole number >= 1")
        self.budget, self.width = budget, width
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_policies.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_policy_can_be_built(path):
    settings = OmegaConf.to_container(OmegaConf.load(path))
    if path.stem == "full":
        assert policy_from_config(settings, None) is None
    else:
        policy = policy_from_config(settings, 4)
        assert type(policy).__name__ == settings["_target_"].removeprefix("dmc.policies.")
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("text", "budget", "name"),
    [
        (4, Budget(ratio=4.0), "4"),
        ("4.0", Budget(ratio=4.0), "4"),
        (2.5, Budget(ratio=2.5), "2.5"),
        ("tokens:128", Budget(tokens=128), "tokens:128"),
        (Budget(tokens=7), Budget(tokens=7), "tokens:7"),
    ],
)
def test_budgets_are_ratios_or_entries(text, budget, name):
    assert parse_budget(text) == budget
    assert budget_name(budget) == name
    assert parse_budget(name) == budget


@pytest.mark.parametrize("text", ["four", 0.5, "tokens:", "tokens:0", "tokens:1.5", "bytes:128", True, None, "nan"])
def test_other_budgets_are_refused(text):
    with pytest.raises(ValueError, match="budget="):
        parse_budget(text)


def test_a_users_own_policy_is_built_with_its_budget(users_module):
    policy = policy_from_config({"_target_": "users_policies.Mine", "width": 3}, "tokens:9")
    assert (policy.budget, policy.width) == (Budget(tokens=9), 3)


@pytest.mark.parametrize(
    ("settings", "budget", "message"),
    [
        ({"_target_": "users_policies.Mine"}, None, "users_policies.Mine needs a budget"),
        ({}, 4, "budget=4 needs a policy that keeps to it"),
        (None, 4, "budget=4 needs a policy that keeps to it"),
        ({"_target_": "users_policies.Mine", "widht": 3}, 4, "no option 'widht': did you mean 'width'"),
        ({"_target_": "users_policies.Mine", "width": 0}, 4, "width=0: expected a whole number >= 1"),
        ({"_target_": "users_policies.mine"}, 4, "has no mine; did you mean 'Mine'"),
    ],
)
def test_wrong_settings_give_one_clear_error(users_module, settings, budget, message):
    with pytest.raises(ValueError, match=message):
        policy_from_config(settings, budget)
