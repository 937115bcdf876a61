"""Command lines that are wrong: one line on stderr that names the value, exit status 1, and nothing written."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import TEXT_VOCAB_SIZE, build_stock
from scripts_here import SCRIPTS, run_script

from dmc.data import train_tokenizer

TEXT = "".join(f"line {i} of {i % 7} words, {'x' * (i % 5)}\n" for i in range(400))
WORDS = {
    "GENERATE": "model=STOCK prompt=ab max_new_tokens=2",
    "TRAIN": "model=STOCK data=text_files data.train.text.name=TEXT "
    "data.validation.text.name=TEXT trainer=cpu data.num_workers=0 debug=tiny "
    "training.sequence_length=16 output_dir=out data.cache_folder=cache",
    "COMPARE": "'models={m: STOCK}' policies=[full] budgets=[2] tasks=[passkey] output=out",
}
CASES = """
generate|prompt=ab|give a value for model
generate|model=WORLD/nowhere prompt=ab|nowhere
generate|model=WORLD/broken prompt=ab|config.json
generate|model=STOCK prompt='f(x)'|'prompt="f(x), y"'
generate|GENERATE base=tiny_llama|Could not override 'base'. No match in the defaults list.
generate|GENERATE max_new_tokens=2.5|max_new_tokens
generate|GENERATE top_k=few|top_k
generate|GENERATE kernels=nonesuch|nonesuch
generate|model=nowhere prompt=x block_size=24|block_size=24: expected 16, 32, 64, 128 or 256
generate|model=nowhere prompt=x kernels=nonesuch|kernels='nonesuch' is unknown: expected 'auto' or one of
generate|model=STOCK context=TEXT chat=true|chat=true makes the prompt a user's turn: give prompt=
generate|GENERATE budget=4|budget=4 needs a policy
generate|GENERATE policy=h2o|H2O needs a budget
generate|GENERATE policy=h2o budget=4 policy.recent=-1|recent
generate|GENERATE +policy._target_=nowhere.Policy budget=4|No module named 'nowhere'
generate|GENERATE max_new_tokns=2|unknown setting max_new_tokns: did you mean 'max_new_tokens'?
train|TRAIN model.path=STOCK|unknown setting model.path: the setting above it is a single value
train|TRAIN model=WORLD/nowhere|model=WORLD/nowhere is no folder
train|TRAIN base.shape.hidden_size=3 model=null data.tokenizer.path=STOCK|hidden size (3)
train|TRAIN batch_size=8|unknown setting batch_size: did you mean 'training.batch_size'?
train|TRAIN --training.batch_size=8|error: --training.batch_size=8: settings are NAME=VALUE, without dashes
train|TRAIN compression=null|compression=null: ~NAME leaves a group out
train|TRAIN output_dir='out/${now}'|output_dir: Interpolation key 'now' not found
train|TRAIN callbacks=[evaluation] callbacks.evaluation.every_steps=0|every_steps=0
train|TRAIN training.learning_rte=1|unknown setting training.learning_rte: did you mean 'learning_rate'?
train|TRAIN training.learning_rate=-1|learning_rate=-1: expected greater than 0
train|TRAIN training.stages.retrofitt.length=5|did you mean 'retrofit'?
train|TRAIN training.stages.retrofit.length=250|retrofit.length=250: expected a number and its unit: '250 steps'
train|TRAIN training.stages.retrofit.length='5 stepz'|length=5 stepz: expected a number and its unit: '250 steps'
train|TRAIN +training.stages.solidify.ramp_to=4.0|for the retrofit stage only
train|TRAIN +trainer.lightning.max_steps=5|use training.stages
train|TRAIN +logger.csv.flush=5|CSVLogger.__init__() got an unexpected keyword argument 'flush'
train|TRAIN +callbacks.mine._target_=nowhere.Callback|No module named 'nowhere'
train|TRAIN data.train.text.name=WORLD/nowhere.txt|nowhere.txt
train|TRAIN +data.train.text.colum=x|unexpected keyword argument 'colum'
train|TRAIN data.train.text=null|expected at least 1 item
train|TRAIN compression.target_ratio=2,4|Ambiguous value for argument 'compression.target_ratio=2,4'
train|TRAIN experiment=nonesuch|Could not find 'experiment/nonesuch'
train|TRAIN plan=maybe|plan='maybe': expected a valid boolean or 'json'
train|TRAIN output_dir=TEXT/below|text.txt is a file
train|TRAIN data=text_files data.train.text.name=???|give a value for data.train.text.name
prepare_data|TRAIN data.tokenize_num_proc=0|tokenize_num_proc=0
export|run=WORLD/nowhere output=out|run.json
export|run=WORLD/keys_run output=out|modle
export|run=WORLD/keys_run output=out overwrite=perhaps|overwrite='perhaps': expected a valid boolean
export|run=WORLD/keys_run output=TEXT|text.txt is a file
plan|model=STOCK gpu=0|gpu=0: expected greater than 0
plan|model=STOCK ratios=[]|ratios=[]: expected at least 1 item
report|folders=WORLD|expected a valid list
compare|COMPARE policies=[full,h20]|did you mean 'h2o'?
compare|COMPARE policies=full,h2o|To use it as a list, use key=[value1,value2]
compare|COMPARE tasks=[needel]|did you mean 'needle'?
compare|COMPARE 'models={m: {pth: x}}'|unknown setting models.m.pth: did you mean 'path'?
compare|COMPARE 'tasks=[{name: a, like: needle, digits: 0}]'|digits=0
compare|COMPARE reference=nobody|nobody
compare|COMPARE policies=[] budgets=[]|policies=[] leave nothing to measure
compare|COMPARE engine.memory=lots|engine.memory='lots': expected
compare|COMPARE engine.block_size=24|engine.block_size=24: expected 16, 32, 64, 128 or 256
compare|COMPARE engine.kv_cache_dtype=int4|engine.kv_cache_dtype='int4': expected 'auto' or 'int8'
compare|'models={m: STOCK, cut: WORLD/cut}' policies=[full] tasks=[passkey] output=out|is cut off or is no safetensors
serve|model=STOCK port=70000|port=70000
serve|model=nowhere engine.block_size=24|engine.block_size=24: expected 16, 32, 64, 128 or 256
serve|model=nowhere memory=half|memory='half': expected
serve|model=nowhere 'caches={book: elsewhere}'|caches: elsewhere holds no saved cache: there is no such folder
study|only=[nobody] output=out|nobody
study|further={cr8:[full]} output=out|further.cr8: the setting above it is a single value, or has no entries yet: +
import_megatron|checkpoint=WORLD/nowhere output=out|nowhere
fit_scorer|model=STOCK sequence_length=8|sequence_length=8 leaves
export_megatron|model=STOCK output=out tensor_size=0|tensor_size=0
""".strip().splitlines()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    (root / "text.txt").write_text(TEXT)
    tokenizer = train_tokenizer([TEXT], TEXT_VOCAB_SIZE, root / "tokenizer")
    build_stock(vocab_size=len(tokenizer), eos_token_id=0).save_pretrained(root / "stock")
    tokenizer.save_pretrained(root / "stock")
    shutil.copytree(root / "stock", root / "broken")
    (root / "broken" / "config.json").write_text('{"a": ')
    shutil.copytree(root / "stock", root / "cut")
    os.truncate(root / "cut" / "model.safetensors", 2000)
    (root / "keys_run").mkdir()
    (root / "keys_run" / "run.json").write_text(json.dumps({"config": {"modle": 1}}))
    return root


def filled(case, world):
    """Return a case's script, the words of its command line, and what is expected to be said of it."""
    script, settings, expected = case.split("|")
    for name, text in {**WORDS, "STOCK": f"{world}/stock", "TEXT": f"{world}/text.txt", "WORLD": str(world)}.items():
        settings, expected = settings.replace(name, text), expected.replace(name, text)
    return f"{script}.py", shlex.split(settings), expected


@pytest.mark.parametrize("case", CASES)
def test_a_bad_command_line_ends_in_one_line_before_anything_is_written(case, world, tmp_path, monkeypatch):
    script, words, expected = filled(case, world)
    monkeypatch.chdir(tmp_path)
    said = run_script(script, *words)
    assert said.startswith("error: ") and expected in said and "\n" not in said, said
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[20::20])])
def test_a_process_of_its_own_says_the_same_and_fails(case, world, tmp_path):
    script, words, expected = filled(case, world)
    done = subprocess.run([sys.executable, SCRIPTS / script, *words], cwd=tmp_path, capture_output=True, text=True)
    said = done.stderr.strip()
    assert done.returncode == 1 and said.startswith("error: ") and expected in said and "\n" not in said, said
    assert [*tmp_path.iterdir()] == []
