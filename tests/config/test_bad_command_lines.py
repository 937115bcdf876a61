"""Command lines that are wrong: one line on stderr that names the value, exit status 1, and nothing written."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import TEXT_VOCAB_SIZE, build_stock, mixed_gates
from scripts_here import run_script

from dmc import retrofit
from dmc.config import build_config
from dmc.data import train_tokenizer
from dmc.training.config import RunConfig
from dmc.training.run import train

TEXT = "".join(f"line {i} of {i % 7} words, {'x' * (i % 5)}\n" for i in range(400))
NESTED = "[" * 200_000
TRAINING = (
    "model={stock} data=text_files data.train.text.name={text} data.validation.text.name={text} data.num_workers=0 "
    "debug=tiny training.sequence_length=16 trainer=cpu output_dir=out data.cache_folder=cache "
)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a stock model, a retrofit, a run, a text, and broken copies of each."""
    root = tmp_path_factory.mktemp("world")
    (root / "text.txt").write_text(TEXT)
    tokenizer = train_tokenizer([TEXT], TEXT_VOCAB_SIZE, root / "tokenizer")
    model = build_stock(vocab_size=len(tokenizer), eos_token_id=0)
    for name, each in (("stock", model), ("retrofit", retrofit(model, mixed_gates()))):
        each.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    _write_broken_models(root)
    _write_run(root)
    (root / "empty").mkdir()
    (root / "numbers.jsonl").write_text("".join(json.dumps({"text": i}) + "\n" for i in range(9)))
    (root / "broken.jsonl").write_text("{oh")
    (root / "empty.txt").touch()
    return root


def _write_broken_models(root):
    contents = {"empty": b"", "broken": b'{"a": ', "binary": bytes(range(256)), "list": b"[1]"}
    contents["nested"] = NESTED.encode()
    for kind, content in contents.items():
        for file, name in (
            ("config.json", "config"),
            ("tokenizer.json", "tokenizer"),
            ("model.safetensors", "weights"),
        ):
            if (kind, name) not in {("nested", "weights"), ("list", "weights")}:
                folder = Path(shutil.copytree(root / "stock", root / f"{kind}_{name}"))
                (folder / file).write_bytes(content)
    for name, changes in (
        ("no_kv_heads", {"num_key_value_heads": 0}),
        ("odd_kv_heads", {"num_key_value_heads": 3}),
        ("negative_layers", {"num_hidden_layers": -1}),
        ("text_layers", {"num_hidden_layers": "two"}),
        ("unknown_type", {"model_type": "nonesuch"}),
        ("small_vocabulary", {"vocab_size": 7}),
        ("more_layers", {"num_hidden_layers": 4}),
    ):
        change_config(Path(shutil.copytree(root / "stock", root / name)), **changes)
    for name, value in (
        ("gates_list", [1]),
        ("gates_null", None),
        ("gates_unknown", {"windw_size": 12}),
        ("gates_text", {"window_size": "twelve"}),
    ):
        change_config(Path(shutil.copytree(root / "retrofit", root / name)), compression=value)
    gateless = Path(shutil.copytree(root / "retrofit", root / "gates_missing"))
    values = json.loads((gateless / "config.json").read_text())
    del values["compression"]
    (gateless / "config.json").write_text(json.dumps(values))
    weightless = Path(shutil.copytree(root / "stock", root / "no_weights"))
    (weightless / "model.safetensors").unlink()
    speechless = Path(shutil.copytree(root / "stock", root / "no_tokenizer"))
    for path in speechless.glob("tokenizer*"):
        path.unlink()
    talkative = Path(shutil.copytree(root / "stock", root / "large_tokenizer"))
    train_tokenizer([TEXT * 2, "".join(map(chr, range(32, 1200)))], TEXT_VOCAB_SIZE + 200, root / "words")
    for path in (root / "words").iterdir():
        shutil.copy(path, talkative)


def _write_run(root):
    values = {
        "model": {"path": str(root / "stock")},
        "data": {
            "train": {"text": {"_target_": "dmc.data.TextSource", "name": str(root / "text.txt")}},
            "validation": {"text": {"_target_": "dmc.data.TextSource", "name": str(root / "text.txt")}},
            "cache_folder": str(root / "cache"),
        },
        "training": {
            "stages": {"retrofit": {"steps": 1}},
            "sequence_length": 16,
            "batch_size": 1,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
            "calibration_sequences": 1,
            "validation_sequences": 1,
            "hang_timeout_minutes": 0.0,
        },
        "compression": {"target_ratio": 2.0},
        "trainer": {"accelerator": "cpu"},
        "output_dir": str(root / "run"),
    }
    train(build_config(RunConfig, values))
    for kind, content in (("list", "[1]"), ("nested", NESTED), ("empty", ""), ("keys", '{"config": {"modle": 1}}')):
        folder = root / f"{kind}_run"
        folder.mkdir()
        (folder / "run.json").write_text(content)
    shutil.copytree(root / "run", root / "no_checkpoint_run")
    shutil.rmtree(root / "no_checkpoint_run" / "checkpoints")
    torch.save({"other": torch.zeros(2)}, root / "other.pt")
    for kind, content in (("bare", "{}\n"), ("shapeless", '{"status": "done"}\n'), ("broken", "{oh\n")):
        (root / f"{kind}_cells").mkdir()
        (root / f"{kind}_cells" / "cells.jsonl").write_text(content)


@dataclass(frozen=True)
class Case:
    """A command line and what its one line must say."""

    script: str
    settings: str
    said: str

    def __str__(self):
        return f"{self.script} {self.settings}".replace(TRAINING, "").replace("model={stock} ", "")[:90]


def told(script, prefix, words):
    """Cases, one a word: a setting, and behind | what is said of it where that is not its name and value."""
    for word in words.split():
        setting, _, said = word.partition("|")
        name, _, value = setting.partition("=")
        yield Case(script, prefix + setting, said or f"{name.rpartition('.')[2]}={value}")


GENERATE = "model={stock} prompt=ab max_new_tokens=2 "
COMPARE = "models={{m:{stock}}} policies=full budgets=2 tasks=passkey "
ANALYSIS = "models={{m:{retrofit}}} policies=full tasks=[{{name:i,"
CASES = [
    # A model that is none, and settings of a generation.
    *(
        Case("generate", f"model={{world}}/{folder} prompt=ab max_new_tokens=2", said)
        for said, folders in {
            "config.json": "empty empty_config broken_config binary_config list_config nested_config",
            "num_key_value_heads": "no_kv_heads odd_kv_heads",
            "num_hidden_layers=-1": "negative_layers",
            "num_hidden_layers": "text_layers",
            "nonesuch": "unknown_type",
            "compression": "gates_list gates_null gates_missing",
            "windw_size": "gates_unknown",
            "window_size": "gates_text",
            "tokenizer": " ".join(
                f"{kind}_tokenizer" for kind in ("no", "empty", "broken", "binary", "list", "nested")
            ),
            "model.safetensors": "empty_weights broken_weights binary_weights",
            **{
                name: name
                for name in "nowhere text.txt small_vocabulary more_layers no_weights large_tokenizer".split()
            },
        }.items()
        for folder in folders.split()
    ),
    Case("generate", "prompt=ab", "model.path"),
    Case("generate", "model={stock}", "prompt"),
    Case("generate", "model={stock} prompt=", "prompt"),
    *told(
        "generate",
        GENERATE,
        """
        max_new_tokens=2.5 max_new_tokens=many|max_new_tokens temperature=hot|temperature top_k=few|top_k seed=x|seed
        seed=-1 stop=[1]|stop block_size=0 memory=0 memory=lots|memory memory=100|memory kernels=nonesuch|nonesuch
        kernels=triton|triton policy=nonesuch|nonesuch policy=h2o|budget budget=4 model.dtype=float12|float12
        max_new_tokns=2|max_new_tokns +policy._target_=os.system|os.system
        """,
    ),
    *(
        Case("generate", GENERATE + setting, said)
        for setting, said in (
            ("policy=h2o budget=0.5", "0.5"),
            ("policy=h2o budget=tokens:0", "tokens"),
            ("policy=h2o budget=nan", "nan"),
            ("policy=h2o budget=four", "four"),
            ("policy=h2o budget=4 policy.recent=-1", "recent"),
            ("policy=h2o budget=4 +policy.recnt=1", "recnt"),
            ("policy=snapkv budget=4 policy.kernel_size=4", "kernel_size"),
        )
    ),
    Case("generate", "model={retrofit} prompt=ab policy=h2o budget=4", "H2O"),
    # A training, before its first step; all numbers that it refuses are in test_numbers_of_settings.py.
    *told(
        "train",
        TRAINING,
        """
        model.path={world}/nowhere|nowhere model.dtype=float12|float12 trainer.accelerator=cuda|cuda
        trainer.accelerator=abacus|abacus trainer.precision=8-true|precision
        callbacks.mine._target_=nowhere.Callback|nowhere logger=nonesuch|nonesuch trainer.strategy=nonesuch|strategy
        training.learning_rate=-1 training.learning_rate=fast|learning_rate compression.target_ratio=0.5
        compression.action=swap|swap compression.neuron_index=99 training.snapshot_ratios=[9.0]|snapshot_ratios
        training.learning_rte=1|learning_rte experiment=nonesuch|nonesuch seed=x|seed seed=-1 plan=maybe|plan
        data.train.text.name={world}/nowhere.txt|nowhere.txt data.train.text.name={world}/numbers.jsonl|int
        data.train.text.name={world}/broken.jsonl|broken.jsonl data.train.text.name={world}/empty.txt|empty.txt
        data.train.text.name={world}/empty|empty data.train.text._target_=dmc.data.NoSource|NoSource
        +data.train.text.colum=x|colum output_dir={text}|text.txt output_dir={text}/below|text.txt
        """,
    ),
    *(
        Case("train", TRAINING + setting, said)
        for setting, said in (
            ("trainer.max_step=5", "did you mean 'max_steps'?"),
            ("trainer.max_steps=5", "use training.stages"),
            ("logger.csv.flush_logs_every_n_step=5", "did you mean 'flush_logs_every_n_steps'?"),
            ("training.push_to_hub=a/b/c", "push_to_hub=a/b/c: Repo id must be"),
            ("training.micro_batch_size=3", "micro_batch_size * devices = 3"),
            ("training.stages={{zero_out:null,retrofit:null,solidify:null}}", "training.stages is empty"),
            ("training.stages.retrofit.stepz=1", "stepz: did you mean 'steps'?"),
            ("training.stages.retrofitt.steps=1", "did you mean 'retrofit'?"),
            ("training.stages.retrofit.steps=1 training.stages.retrofit.tokens=5", "give exactly one"),
            ("data.train.text=null", "expected at least 1 item"),
            ("data.validation.text.nam=a", "did you mean 'name'?"),
        )
    ),
    Case("train", TRAINING.replace("data.train.text.name={text} ", ""), "data.train"),
    Case("prepare_data", TRAINING + "data.train.text.name={world}/nowhere.txt", "nowhere.txt"),
    Case("prepare_data", TRAINING + "data.tokenize_num_proc=0", "tokenize_num_proc=0"),
    # What becomes of a run.
    *(
        Case("export", f"run={{world}}/{run} output=exported {setting}", said)
        for run, setting, said in (
            ("nowhere", "", "run.json"),
            ("list_run", "", "run.json"),
            ("nested_run", "", "run.json"),
            ("empty_run", "", "run.json"),
            ("keys_run", "", "modle"),
            ("no_checkpoint_run", "", "checkpoint"),
            ("run", "target_ratio=0.5", "0.5"),
            ("run", "target_ratio=0", "0"),
            ("run", "push_to_hub=a/b/c", "push_to_hub=a/b/c: Repo id must be"),
            ("run", "dtype=float16", "dtype='float16': expected 'float32' or 'bfloat16'"),
            ("run", "target_ratio=much", "target_ratio"),
            ("run", "overwrite=perhaps", "overwrite"),
            ("run", "output={world}/stock", "not empty"),
            ("run", "output={world}/run overwrite=true", "run"),
            ("run", "output={world} overwrite=true", "world"),
            ("run", "output={text}", "text.txt"),
            ("run", "output={text} overwrite=true", "text.txt"),
        )
    ),
    Case("export", "output=exported", "run"),
    Case("export", "run={world}/run", "output"),
    Case("replay", "run={world}/run", "file"),
    Case("replay", "run={world}/run file={world}/nowhere.pt", "nowhere.pt"),
    Case("replay", "run={world}/run file={world}/other.pt", "other.pt"),
    Case("replay", "run={world}/run file={text}", "text.txt"),
    Case("replay", "run={world}/run file={world}/stock/model.safetensors", "model.safetensors"),
    Case("replay", "run={world}/list_run file={world}/other.pt", "run.json"),
    Case("plan", "", "model"),
    Case("plan", "model={world}/nowhere", "nowhere"),
    Case("plan", "model={stock} gpu=0", "gpu=0"),
    Case("plan", "model={stock} context=-4", "context=-4"),
    Case("plan", "model={stock} ratios=[0.5]", "0.5"),
    Case("plan", "model={stock} dtype=int3", "int3"),
    Case("collect", "", "folder"),
    Case("collect", "folder={world}/nowhere", "nowhere"),
    Case("collect", "folder={text}", "text.txt"),
    # Measurements.
    *told(
        "compare",
        COMPARE,
        """
        models={{m:{world}/nowhere}}|nowhere models={{m:{stock}k}}|/stock' models={{m:{world}/empty_config}}|config.json
        models=[{stock}]|models budgets=none|none lm_eval.tasks_folder={world}/nowhere|nowhere lm_eval.limit=0
        lm_eval.limit=some|limit tasks=[{{like:needle}}]|name tasks=[{{name:a,like:needle,digits:0}}]|digits=0
        tasks=[{{name:a,like:needle,digts:1}}]|digts engine.block_size=0 engine.kernels=nonesuch|nonesuch
        reference=nobody|nobody output={text}|text.txt output={text}/below|text.txt
        """,
    ),
    *(
        Case("compare", COMPARE + setting, said)
        for setting, said in (
            ("models={{m:{world}/empty}}", "has no config.json with a model_type"),
            ("models={{m:{{pth:x}}}}", "unknown setting models.m.pth: did you mean 'path'?"),
            ("models={{m:{{path:{stock},policies:[ful]}}}}", "models.m.policies: 'ful' is none of the grid's"),
            ("policies=full,h20", "policies[1]='h20' is not in configs/policy; did you mean 'h2o'?"),
            ("policies=[{{name:mine}}]", "expected a name, or a mapping with name and either _target_ or like"),
            ("policies=h2o budgets=0.5", "0.5"),
            ("policies=h2o budgets=[]", "budgets is empty"),
            ("tasks=needel", "tasks[0]='needel' is not in configs/task; did you mean 'needle'?"),
            ("tasks=[]", "tasks=[]: expected at least 1 item"),
            ("engine.max_batch_size=0", "engine.max_batch_size=0: expected greater than or equal to 1"),
            ("output={world}/bare_cells reference=nobody", "nobody"),
        )
    ),
    Case("compare", "policies=full", "models"),
    Case("compare", "models={{}}", "models"),
    *told(
        "benchmark",
        "prompt_length=8 new_tokens=2 batch_sizes=1 ratios=1 rounds=1 ",
        """
        prompt_length=0 new_tokens=0 batch_sizes=[]|batch_sizes batch_sizes=[0]|batch_sizes ratios=[0.5]|0.5
        ratios=[]|ratios rounds=0 delay=-1 block_size=0 kernels=nonesuch|nonesuch model.dtype=float12|float12
        model.path={world}/nowhere|nowhere model.shape.num_key_value_heads=3|num_key_value_heads
        model.shape.num_key_value_heads=0|num_key_value_heads model.shape.model_type=nonesuch|nonesuch
        output={text}|text.txt output={text}/below|text.txt
        """,
    ),
    *(
        Case("compare", ANALYSIS + setting + "}}]", said)
        for setting, said in (
            ("like:cache_analysis,num_samples:0", "num_samples=0"),
            ("like:cache_analysis,length:0", "length=0"),
            ("like:cache_analysis,new_tokens:0", "new_tokens=0"),
            ("like:cache_analysis,source:null", "source=None"),
            ("like:text_loss,source:null", "source=None"),
            ("like:needle,haystack:null", "haystack=None"),
            ("like:cache_analysis,source:{{_target_:dmc.data.TextSource,name:{world}/nowhere.txt}}", "nowhere.txt"),
        )
    ),
    Case("report", "", "folders"),
    Case("report", "folders=[]", "folders is empty: give folders=outputs/compare"),
    Case("report", "folders={world}/nowhere", "nowhere"),
    Case("report", "folders={world}/empty", "empty"),
    Case("report", "folders={text}", "text.txt"),
    Case("report", "folders={world}/bare_cells", "cells.jsonl"),
    Case("report", "folders={world}/shapeless_cells", "cells.jsonl"),
    Case("report", "folders={world}/broken_cells", "cells.jsonl"),
    Case("study", "runs=null", "runs"),
    Case("study", "seeds=[]", "seeds"),
    Case("study", "processes=0", "processes=0"),
    Case("study", "only=nobody", "nobody"),
    Case("study", "policies=nonesuch", "nonesuch"),
    Case("study", "output={text}", "text.txt"),
    # Megatron-LM's checkpoints.
    Case("import_megatron", "output=imported", "checkpoint"),
    Case("import_megatron", "checkpoint={world}/nowhere output=imported", "nowhere"),
    Case("import_megatron", "checkpoint={world}/empty output=imported", "empty"),
    Case("import_megatron", "checkpoint={world}/stock output=imported", "stock"),
    Case("export_megatron", "model={world}/nowhere output=exported", "nowhere"),
    Case("export_megatron", "model={stock} output=exported tensor_size=3", "cannot be divided among 3 ranks"),
    Case("export_megatron", "model={stock} output=exported tensor_size=0", "tensor_size=0"),
    Case("export_megatron", "model={stock} output=exported vocab_multiple=0", "vocab_multiple=0"),
    Case("export_megatron", "model={stock} output={world}/run", "not empty"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder):
    files = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in files.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_input_is_told_in_one_line_and_nothing_is_written(case, world, folder, capfd):
    places = {"world": world, "stock": world / "stock", "retrofit": world / "retrofit", "text": world / "text.txt"}
    before = listing(world)
    capfd.readouterr()
    said = run_script(f"{case.script}.py", *(each.format(**places) for each in case.settings.split()))
    printed = capfd.readouterr().err
    assert said.startswith("error: ") and "\n" not in said, said
    assert case.said in said, said
    assert printed == "", printed
    assert not list(folder.iterdir())
    assert listing(world) == before


def test_a_run_that_has_saved_nothing_may_be_corrected(world, folder):
    settings = TRAINING.format(world=world, stock=world / "stock", text=world / "text.txt").split()
    said = run_script("train.py", *settings, "training.sequence_length=5000")
    assert said.startswith("error: ") and "sequence" in said and (folder / "out" / "run.json").is_file()
    stages = ["~training.stages.zero_out", "training.stages.solidify=null", "training.stages.retrofit.steps=1"]
    assert run_script("train.py", *settings, *stages, "training.snapshot_ratios=[]") == ""
    assert (folder / "out" / "final" / "config.json").is_file()
