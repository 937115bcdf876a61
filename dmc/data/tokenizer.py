"""Tokenizers: the framing of documents, their identity, and training of a small BPE."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dmc.data.hub import wait_for_first
from dmc.files import json_digest, locked, refuse_occupied, replacement
from dmc.special_tokens import tokens_before

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXTS = ("<|end_of_text|>", END_OF_TEXT, "</s>", "<eos>")
"""End-of-text tokens of pretraining: Llama 3; GPT, Qwen and most others; Llama 2 and Mistral; Gemma."""
ENDS_OF_TURNS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|return|>"}
)
"""End-of-turn tokens of instruct models, which are their tokenizers' eos token."""
_TRAINING_FILE = "trained_on.json"


@dataclass(frozen=True)
class Framing:
    """Special tokens around each document of packed text."""

    begin: tuple[int, ...]
    """Token ids before the document."""
    end: int
    """Token id after the document, the separator."""


def framing_of(tokenizer: PreTrainedTokenizerBase, bos: bool | None = None, separator: str | None = None) -> Framing:
    """Find the framing of documents: by default as in the pretraining of the tokenizer's model.

    A document begins with the tokens that the tokenizer itself puts before a text (`<s>`, `<|begin_of_text|>` or none)
    and ends with the end-of-text token. If the eos token ends a turn of a conversation, as in instruct models, that is
    the token of pretraining, which is still in the vocabulary.

    Args:
        tokenizer: any tokenizer with an eos token.
        bos: whether its bos token begins each document; None: as the tokenizer does.
        separator: token after each document, such as `<|endoftext|>`; None: the end-of-text token.
    Raises:
        ValueError: the tokenizer has no such token.
    """
    vocabulary = tokenizer.get_vocab()
    name = f"The tokenizer {tokenizer.name_or_path!r}"
    if separator is None:
        separator = tokenizer.eos_token
        if separator in ENDS_OF_TURNS:
            separator = next((token for token in ENDS_OF_TEXTS if token in vocabulary), separator)
    if separator is None:
        raise ValueError(
            f"{name} has no eos token to separate documents; set data.tokenizer.eod_token, or tokenizer.eos_token."
        )
    if separator not in vocabulary:
        raise ValueError(f"{name} has no token {separator!r}: choose data.tokenizer.eod_token from its vocabulary.")
    if bos and tokenizer.bos_token_id is None:
        raise ValueError(f"{name} has no bos token to begin documents with: leave data.tokenizer.bos=null, or false.")
    if bos is None:
        return Framing(tokens_before(tokenizer), vocabulary[separator])
    return Framing((tokenizer.bos_token_id,) if bos else (), vocabulary[separator])


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase, framing: Framing) -> str:
    """Return a hash of everything that determines a document's ids (not of names, padding or truncation)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content.update(padding=None, truncation=None)
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    content["separator"] = framing.end
    if framing.begin:
        content["begin"] = framing.begin
    return json_digest(content)


def _texts_digest(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _train(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, folder: str | Path, *, sources: str | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE and save it as a folder that `AutoTokenizer.from_pretrained` loads.

    `<|endoftext|>` (id 0) is the eos token, the document separator and the pad token. Deterministic. The folder is
    reused if it holds a tokenizer trained on the same texts with the same `vocab_size`, and replaced if it holds one
    trained on others. One process trains, others wait for it.

    Args:
        texts: the training texts; all are held in memory.
        vocab_size: tokens in the vocabulary, at least 257 (256 bytes and the separator); fewer where the texts hold no
            more pairs to merge.
        folder: where the tokenizer is saved.
        sources: what the texts were read from; with the same as before they are not read again. None: they are.
    Raises:
        ValueError: `vocab_size` is too small, or there is no text.
        FileExistsError: `folder` holds other files.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size={vocab_size} is below 257: 256 bytes and {END_OF_TEXT}.")
    if sources is None:
        texts = _read(texts)
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    known = folder.with_name(f".{folder.name}.sources")
    source = f"{vocab_size} {sources}"
    if sources is not None:
        wait_for_first(lambda: known.is_file() and known.read_text() == source)
    with locked(folder.with_name(f".{folder.name}.lock"), timeout=-1):
        try:
            refuse_occupied(folder, overwrite=True, marker=_TRAINING_FILE)
        except FileExistsError as error:
            raise FileExistsError(f"data.tokenizer.folder: {error}") from None
        file = folder / _TRAINING_FILE
        trained_on = json.loads(file.read_text()) if file.is_file() else {}
        is_known = sources is not None and known.is_file() and known.read_text() == source
        if not is_known or trained_on.get("vocab_size") != vocab_size:
            texts = _read(texts)
            record = {"texts_sha256": _texts_digest(texts), "vocab_size": vocab_size}
            if trained_on != record:
                if trained_on:
                    logger.warning("%s holds a tokenizer trained otherwise; it is replaced.", folder)
                known.unlink(missing_ok=True)  # a kill after the replacement must not leave it for other texts
                with replacement(folder, overwrite=True, marker=_TRAINING_FILE) as partial:
                    _train(texts, vocab_size).save_pretrained(partial)
                    (partial / _TRAINING_FILE).write_text(json.dumps(record))
            if sources is not None:
                known.write_text(source)
        return PreTrainedTokenizerFast.from_pretrained(folder)


def _read(texts: Iterable[str]) -> list[str]:
    texts = list(texts)
    if not any(texts):
        raise ValueError(f"No text to train a tokenizer on ({len(texts)} documents, all empty).")
    return texts
