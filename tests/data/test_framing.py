"""What stands around each packed document: the convention of the pretraining of each family, and what settings say."""

import copy
import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dmc.data import StreamLoader, TextSource, build_packed, train_tokenizer
from dmc.data.tokenizer import Framing, framing_of, tokenizer_digest

TEXTS = ["the cache holds every key", "and value of the sequence", "until it is merged"] * 4
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONVENTIONS = {
    # name: special tokens, eos, bos, whether the tokenizer puts bos before a text, pretraining's framing
    "llama 2": (("<unk>", "<s>", "</s>"), "</s>", "<s>", True, ("<s>", "</s>")),
    "mistral instruct": (("<unk>", "<s>", "</s>", "[INST]"), "</s>", "<s>", True, ("<s>", "</s>")),
    "llama 3": (LLAMA3, "<|end_of_text|>", LLAMA3[0], True, (LLAMA3[0], "<|end_of_text|>")),
    "llama 3 instruct": (LLAMA3, "<|eot_id|>", LLAMA3[0], True, (LLAMA3[0], "<|end_of_text|>")),
    "qwen 2": (QWEN, "<|endoftext|>", None, False, (None, "<|endoftext|>")),
    "qwen 2 instruct": (QWEN, "<|im_end|>", None, False, (None, "<|endoftext|>")),
    "chatml on mistral": (("<s>", "</s>", "<|im_end|>"), "<|im_end|>", "<s>", True, ("<s>", "</s>")),
    "gpt 2": (("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", False, (None, "<|endoftext|>")),
    "a turn's end alone": (("<|im_end|>",), "<|im_end|>", None, False, (None, "<|im_end|>")),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train_tokenizer(TEXTS, 300, tmp_path_factory.mktemp("tokenizer") / "bpe")


def like(plain, name):
    """Make a tokenizer with a family's special tokens; that of `plain` is renamed unless the family has it."""
    special, eos, bos, puts_bos, _ = CONVENTIONS[name]
    backend = copy.deepcopy(plain.backend_tokenizer)
    if "<|endoftext|>" not in special:
        content = json.loads(backend.to_str().replace("<|endoftext|>", "<|unused|>"))
        backend = type(backend).from_str(json.dumps(content))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if puts_bos:
        bos_id = tokenizer.convert_tokens_to_ids(bos)
        template = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)])
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


@pytest.mark.parametrize("name", CONVENTIONS)
def test_documents_are_framed_as_in_pretraining(plain, name):
    tokenizer = like(plain, name)
    begin, end = CONVENTIONS[name][-1]
    framing = framing_of(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(framing.begin)) == ([] if begin is None else [begin])
    assert tokenizer.convert_ids_to_tokens(framing.end) == end
    assert list(framing.begin) == tokenizer("some text")["input_ids"][: len(framing.begin)]  # as evaluation begins


def naive(tokenizer, texts, framing):
    """One document after the other."""
    flat = []
    for text in texts:
        flat += [*framing.begin, *tokenizer(text, add_special_tokens=False)["input_ids"], framing.end]
    return flat


@pytest.mark.parametrize("name", ["llama 3 instruct", "qwen 2 instruct", "llama 2"])
def test_cached_and_streamed_text_hold_the_same_framed_documents(plain, name, tmp_path):
    tokenizer = like(plain, name)
    (corpus := tmp_path / "corpus").mkdir()
    for number, text in enumerate(TEXTS):
        (corpus / f"{number:02d}.txt").write_text(text)
    expected = naive(tokenizer, TEXTS, framing_of(tokenizer))
    packed = build_packed(TextSource(str(corpus)), tokenizer, 8, tmp_path / "cache", document_starts=True)
    cached = torch.cat([packed[index]["input_ids"] for index in range(len(packed))])
    assert cached.tolist() == expected[: len(cached)] and len(cached) > len(expected) - 8
    loader = StreamLoader(
        [TextSource(str(corpus), streaming=True)],
        tokenizer,
        8,
        num_stream_shards=1,
        batch_size=1,
        num_draws=len(packed),
    )
    assert torch.cat([batch["input_ids"][0] for batch in loader]).tolist() == cached.tolist()
    starts = torch.cat([packed[index]["document_starts"] for index in range(len(packed))]).nonzero().flatten().tolist()
    lengths = [len(naive(tokenizer, [text], framing_of(tokenizer))) for text in TEXTS]
    begins = {sum(lengths[:number]) for number in range(len(TEXTS))} | {*range(0, len(cached), 8)}
    assert starts == sorted(begin for begin in begins if begin < len(cached))


def test_settings_overrule_the_convention(plain):
    tokenizer = like(plain, "llama 3 instruct")
    bos, end_of_text, end_of_turn = (tokenizer.convert_tokens_to_ids(token) for token in LLAMA3)
    assert framing_of(tokenizer, bos=False) == Framing((), end_of_text)
    assert framing_of(tokenizer, separator="<|eot_id|>") == Framing((bos,), end_of_turn)
    quiet = like(plain, "gpt 2")
    assert framing_of(quiet, bos=True) == Framing((0,), 0)


def test_a_framing_that_the_vocabulary_does_not_have_is_refused(plain):
    with pytest.raises(ValueError, match=r"has no token '</s>': choose data\.tokenizer\.eod_token from"):
        framing_of(plain, separator="</s>")
    with pytest.raises(ValueError, match="has no bos token to begin documents with"):
        framing_of(plain, bos=True)
    bare = copy.deepcopy(plain)
    bare.eos_token = None
    with pytest.raises(ValueError, match=r"has no eos token to separate documents; set data\.tokenizer"):
        framing_of(bare)


def test_tokens_cached_under_another_framing_are_not_reused(plain):
    for name in ("llama 2", "llama 3 instruct", "qwen 2 instruct"):
        tokenizer = like(plain, name)
        framings = {framing_of(tokenizer), framing_of(tokenizer, separator=tokenizer.eos_token)}
        if tokenizer.bos_token is not None:
            framings |= {framing_of(tokenizer, bos=False, separator=end) for end in (None, tokenizer.eos_token)}
        digests = {tokenizer_digest(tokenizer, framing) for framing in framings}
        assert len(digests) == len(framings)
