"""The notebooks run on tiny models, show something, and hold nothing but prose and calls of dmc."""

import ast
import os
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALLOWED = {"dmc", "torch", "matplotlib", "IPython"} | sys.stdlib_module_names
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MAX_CELL_LINES = 20
SMALL = {
    "01_gates_of_a_checkpoint": {"num_sequences": 4, "sequence_length": 48},
    "02_where_the_memory_goes": {"prompt_length": 64, "new_tokens": 20},
    "03_compare_methods": {"num_samples": 3, "context_tokens": 48, "scored_tokens": 8},
}


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def parameters_of(path):
    """Return where the cell of parameters stands, and the names it sets."""
    cells = read(path).cells
    (place,) = (number for number, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    return place, {node.targets[0].id for node in ast.parse(cells[place].source).body}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A process that runs all notebooks: what they call takes seconds to import."""
    home = str(tmp_path_factory.mktemp("home"))
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), home)
    manager = KernelManager()
    manager.start_kernel(env={**os.environ, **environment}, cwd=str(ROOT / "notebooks"))
    yield manager
    manager.shutdown_kernel(now=True)


def execute(path, parameters, home, kernel):
    """Run a notebook as papermill does: a cell with the parameters' new values follows the one with their defaults."""
    notebook = read(path)
    place, names = parameters_of(path)
    values = {name: value for name, value in parameters.items() if name in names}
    source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(source))
    begin = f"%reset -f\nimport tempfile\ntempfile.tempdir = {str(home)!r}"  # nothing is left of the one before
    notebook.cells.insert(0, nbformat.v4.new_code_cell(begin))
    client = NotebookClient(notebook, timeout=120, km=kernel)
    client.execute()
    client.kc.stop_channels()
    return notebook


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_every_notebook_is_run():
    assert [path.stem for path in NOTEBOOKS] == list(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_on_tiny_models_and_shows_pictures(path, folders, tmp_path, kernel):
    parameters = {
        "model_folder": str(folders.compressed),
        "retrofit_folder": str(folders.compressed),
        "control_folder": str(folders.stock),
        "text_file": str(folders.text),
        "cache_folder": str(tmp_path / "cache"),
        **SMALL[path.stem],
    }
    outputs = outputs_of(execute(path, parameters, tmp_path, kernel))
    shown = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in shown
    values = [output.data.get("text/plain", "") for output in outputs if output.output_type == "execute_result"]
    if path.stem.startswith("01"):
        pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
        assert len(pages) == 2 and all("KV head" in page for page in pages)
    if path.stem.startswith("02"):
        assert values[-1] == "{'full cache': 0, 'learned': 0, 'H2O': 0, 'AdaKV': 0}"
    if path.stem.startswith("03"):
        tables = [output.data["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]
        assert tables[0].count("| control, ") == 7 and "retrofit, learned" in tables[0]
        (page,) = tmp_path.glob("dmc_compare_*/report/report.html")
        assert "control with a full cache: " in tables[1] and page.as_uri() in tables[1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_define_nothing_import_little_and_have_no_output(path):
    for cell in code_cells(path):
        assert (cell.outputs, cell.execution_count) == ([], None)
        assert len(cell.source.splitlines()) <= MAX_CELL_LINES
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, DEFINITIONS), f"move {node.name} into dmc"
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= ALLOWED


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_prose_says_what_is_seen_and_what_is_not_and_how_to_get_a_model(path):
    prose = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    assert prose.count("**Seen:**") == prose.count("**Not seen:**") >= 2
    assert "./scripts/quickstart.sh base=tiny" in prose
    assert {"text_file"} < parameters_of(path)[1]
