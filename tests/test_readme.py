import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dmc.command_line import plain_settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SLURM_README = (ROOT / "slurm" / "README.md").read_text()
COMMANDS = re.findall(r"`((?:python scripts|\./scripts)/[^`]+)`", README + SLURM_README)
JOBS = re.findall(r"`[^`]*sbatch [^`]*?(slurm/\w+\.sbatch) ?([^`]*)`", README + SLURM_README)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_a_script_and_settings_that_exist(command):
    words = [word for word in shlex.split(command) if word not in ("python", "-m")]
    script = ROOT / words[0]
    assert script.is_file()
    if script.suffix == ".py" and not (ROOT / "configs" / f"{script.stem}.yaml").is_file():
        assert len(words) == 1  # it has no settings
    elif script.suffix == ".py":
        overrides = [re.sub(r"^model=DIR$", "model=folder/DIR", word) for word in words[1:]]
        if "-m" in shlex.split(command):  # of a sweep the first value
            overrides = [re.sub(r"=([^,\s]+),\S+$", r"=\1", word) for word in overrides]
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            compose(script.stem, overrides=plain_settings(script.stem, overrides, ROOT / "configs"))


@pytest.mark.parametrize(("job", "settings"), JOBS)
def test_every_job_file_exists_and_its_settings_compose(job, settings):
    assert (ROOT / job).is_file()
    name = {"train": "train", "sweep": "train", "export": "export"}.get(Path(job).stem)
    if name is not None:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            compose(name, overrides=shlex.split(settings))


def test_files_named_in_the_readme_exist():
    named = re.findall(r"`((?:dmc|configs|scripts|notebooks)/[\w/]+\.\w+)`", README)
    assert len(named) > 8
    missing = [name for name in named if "foo" not in name and not (ROOT / name).exists()]
    assert missing == []


def test_reading_list_has_eight_entries():
    section = README.split("## Read the code")[1].split("## ")[0]
    assert len(re.findall(r"^\d\. ", section, flags=re.M)) == 8
