"""Who may import whom, read from the code itself, and what the serving core must do without."""

import ast
import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {path.stem for path in (ROOT / "dmc").iterdir() if path.suffix == ".py" or path.is_dir()} - {"__init__"}

# An arrow a: b, c means that files of dmc/a may import dmc.b and dmc.c. docs/architecture.md tells them.
ALLOWED = {
    "budget": set(),
    "ranks": set(),
    "files": set(),
    "config": set(),
    "compression": {"config", "budget", "ranks"},
    "kernels": {"compression", "ranks"},
    "models": {"compression", "ranks", "files"},
    "policies": {"kernels", "compression", "budget", "config"},
    "runtime": {"kernels", "compression", "policies", "budget", "ranks", "config"},
    "data": {"config", "files", "ranks"},
    "results": {"runtime", "policies", "kernels", "compression", "data", "config", "budget", "files"},
    "training": {
        *("models", "compression", "data", "results", "budget", "config", "ranks", "files"),
    },
    "megatron": {"training", "models", "compression", "files"},
    "serving": {"results", "runtime", "policies", "models", "compression", "ranks", "config"},
    "commands": {
        "compression",
        "megatron",
        "training",
        "results",
        "runtime",
        "models",
        "policies",
        "data",
        "config",
        "budget",
        "files",
    },
    "__init__": {"models", "runtime", "compression", "policies", "kernels", "budget"},
}
LAZY = {"dmc/models/modeling.py": {"runtime"}}
"""Imports inside functions, against the arrows: the cache of `generate`, which a model makes when it is called."""
CORE = "budget ranks files compression models kernels policies runtime __init__".split()
FORBIDDEN_IN_CORE = """
lightning pytorch_lightning hydra omegaconf datasets wandb deepspeed matplotlib lm_eval accelerate fastapi
uvicorn openai ray
""".split()
SOURCES = sorted((ROOT / "dmc").rglob("*.py"))


def part_of(path):
    """Name the part of the house a file belongs to: dmc/models/build.py is of `models`."""
    return path.relative_to(ROOT / "dmc").parts[0].removesuffix(".py")


@functools.cache
def imports_of(path):
    """Collect the modules a file imports, inside functions and for type checkers too."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found.add(module)
            if module.split(".")[0] == "dmc":  # what is imported may be a module: `from dmc import budget`
                found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found |= {name for argument in node.args if (name := literal_start(argument))}
    return found


def literal_start(argument):
    """Return the literal text a computed module name starts with: f"dmc.kernels.{name}" is dmc.kernels."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    if isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
        return str(argument.values[0].value).rstrip(".")
    return None


def parts_imported(path):
    """Name the parts of the house that a file imports, "dmc" for the composition root."""
    parts = set()
    for module in imports_of(path):
        names = module.split(".")
        if names[0] == "dmc":
            parts.add(names[1] if len(names) > 1 and names[1] in TOP_LEVEL else "dmc")
    return parts


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_import_follows_an_arrow(path):
    part = part_of(path)
    assert part in ALLOWED, f"dmc/{part} is not on the map: give it its arrows here and in docs/architecture.md"
    imported = parts_imported(path) - {part}
    if part == "__init__":
        imported.discard("dmc")
    allowed = ALLOWED[part] | LAZY.get(str(path.relative_to(ROOT)), set())
    assert imported <= allowed, f"{path.relative_to(ROOT)} imports {sorted(imported - allowed)}"


def test_arrows_never_turn_back():
    order = []
    while len(order) < len(ALLOWED):
        ready = [part for part, imported in ALLOWED.items() if part not in order and imported <= set(order)]
        assert ready, f"a circle among {sorted(set(ALLOWED) - set(order))}"
        order += ready


def test_no_modules_import_each_other():
    """Nor in a circle, nor inside functions."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}
    waiting = {name: imports_of(path) & names.keys() for name, path in names.items()}
    for name, imported in waiting.items():  # a package is there before its modules
        imported -= {name, *(str(each).replace("/", ".") for each in Path(name.replace(".", "/")).parents)}
    while waiting:
        ready = [name for name, imported in waiting.items() if not imported & waiting.keys()]
        assert ready, f"a circle among {sorted(waiting)}"
        waiting = {name: imported for name, imported in waiting.items() if name not in ready}


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("[!h]*.py")), ids=lambda path: path.name)
def test_scripts_stay_short(path):  # but hydra_command.py, which they share
    assert len(path.read_text().splitlines()) <= 60
    assert parts_imported(path) <= {*ALLOWED, "dmc"}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if part_of(path) in CORE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_core_names_no_training_library(path):
    assert not {module.split(".")[0] for module in imports_of(path)} & set(FORBIDDEN_IN_CORE)


def test_nothing_imports_scripts_or_tests():
    roots = {module.split(".")[0] for path in SOURCES for module in imports_of(path)}
    assert not roots & {"scripts", "tests", "oracles", "conftest"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import dmc.models", {"models"}),
        ("from dmc import Engine", {"dmc"}),
        ("from dmc import budget", {"budget", "dmc"}),
        ("from ..models import retrofit", {"models"}),
        ("from . import paged_cache", set()),
        ("def f():\n    from dmc.training import stages", {"training"}),
        ("import importlib\nimportlib.import_module('dmc.data')", {"data"}),
        ("import importlib\nimportlib.import_module(f'dmc.kernels.{name}')", {"kernels"}),
    ],
)
def test_the_reader_of_imports_sees_every_form(source, expected, monkeypatch):
    imports_of.cache_clear()
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    monkeypatch.setitem(globals(), "TOP_LEVEL", {"models", "budget", "training", "data", "kernels", "runtime"})
    assert parts_imported(ROOT / "dmc" / "runtime" / "example.py") - {"runtime"} == expected


def test_core_serves_where_only_torch_and_transformers_are_installed():
    """And `import dmc` alone brings the families to the Auto* classes."""
    program = f"""
    import sys

    class Without:
        def __init__(self, finder):
            self.finder = finder

        def find_spec(self, name, path=None, target=None):
            hidden = name.split(".")[0] in {FORBIDDEN_IN_CORE!r}
            return None if hidden else self.finder.find_spec(name, path, target)

        def __getattr__(self, name):
            return getattr(self.finder, name)

    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    import dmc
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
    assert AutoConfig.for_model("dmc_llama", compression={{"action": "drop", "delay": 4}}).compression["delay"] == 4

    import torch
    from dmc import Engine, SamplingParams, retrofit
    from dmc.compression import CompressionConfig

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
    model = retrofit(LlamaForCausalLM(config), CompressionConfig())
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    (generation,) = Engine(model).generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, temperature=0))
    assert len(generation.token_ids) == 4
    loaded = [name for name in sys.modules if name.split(".")[0] in {FORBIDDEN_IN_CORE!r}]
    assert not loaded, loaded
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
