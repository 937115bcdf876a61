import pytest

from dmc.data import StandardLibrarySource
from dmc.target import build_target

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
        ({"_target_": "Recall"}, r"task._target_='Recall': expected a dotted path"),
        ({"_target_": "no_such_module.Recall"}, r"cannot be imported: No module named 'no_such_module'"),
        ({"_target_": "dmc.results.tasks.Recal"}, r"dmc.results.tasks has no Recal; did you mean 'Recall'\?"),
        ({"_target_": "dmc.results.tasks.Recall", "task": "copy", "sed": 1}, r"no option 'sed': did you mean 'seed'"),
        ({"_target_": "dmc.results.tasks.Recall"}, r"task \(dmc.results.tasks.Recall\): option 'task' is missing"),
        ({"_target_": "dmc.results.tasks.Recall", "task": "juggle"}, r"task: task='juggle': expected one of copy"),
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
