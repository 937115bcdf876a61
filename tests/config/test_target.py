import pytest

from dmc.config.target import build_target
from dmc.data import StandardLibrarySource

MODULE = """
import absent_library
"""


def test_nested_targets_are_built_first():
    settings = {
        "_target_": "dmc.results.tasks.TextLoss",
        "source": {"_target_": "dmc.data.StandardLibrarySource", "split": "validation"},
        "num_samples": 2,
    }
    task = build_target(settings, "tasks.text")
    assert (task.source, task.num_samples) == (StandardLibrarySource("validation"), 2)
    assert "_target_" in settings["source"]  # the settings stay what they are


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"task has no _target_"),
        ({"_target_": "Needle"}, r"task._target_='Needle': expected a dotted path"),
        ({"_target_": "no_such_module.Needle"}, r"cannot be imported: No module named 'no_such_module'"),
        ({"_target_": "dmc.results.tasks.Needl"}, r"dmc.results.tasks has no Needl; did you mean 'Needle'\?"),
        ({"_target_": "dmc.results.tasks.Needle", "sed": 1}, r"no option 'sed': did you mean 'seed'"),
        ({"_target_": "dmc.results.tasks.Needle"}, r"task \(dmc.results.tasks.Needle\): option 'haystack' is missing"),
        (
            {"_target_": "dmc.results.tasks.Needle", "haystack": "a", "question": "no"},
            r"question='no': expected 'known' or 'hidden'",
        ),
        (
            {"_target_": "dmc.results.tasks.TextLoss", "source": {"_target_": "dmc.data.TextSource", "nme": "a"}},
            r"task.source \(dmc.data.TextSource\) has no option 'nme': did you mean 'name'\?",
        ),
    ],
)
def test_wrong_settings_name_what_was_expected(settings, message):
    with pytest.raises(ValueError, match=message):
        build_target(settings, "task")


def test_what_a_users_module_lacks_is_named(tmp_path, monkeypatch):
    (tmp_path / "module_with_a_gap.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported: No module named 'absent_library'"):
        build_target({"_target_": "module_with_a_gap.Anything"}, "policy")
