"""Text and tokenizer of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dmc.bounds import Bounds, Count, Share

VOCABULARY = Bounds(least=257, most=2**24, whole=True, note="256 bytes, the separator and what is merged of them")
READERS = Bounds(least=0, most=4096, whole=True, note="processes or threads of one rank")
PROCESSES = Bounds(least=1, most=4096, whole=True, note="processes of this machine; null: one for each core")


@dataclass(frozen=True)
class TokenizerConfig:
    """A pretrained tokenizer, or a byte-level BPE trained on the training text."""

    path: str | None = None
    """Folder or hub name; None: the model's."""
    train_vocab_size: Annotated[int, VOCABULARY] | None = None
    """Train one of this size and keep it in `folder`."""
    folder: str | None = None
    bos: bool | None = None
    """Whether the bos token stands before each document; None: where the tokenizer itself puts it before a text."""
    eod_token: str | None = None
    """Token behind each document; None: the end of a text in pretraining, which is not that of an instruct model's
    turn."""

    def __post_init__(self) -> None:
        if self.train_vocab_size is not None and (self.folder is None or self.path is not None):
            raise ValueError("data.tokenizer.train_vocab_size needs data.tokenizer.folder, and no data.tokenizer.path")


@dataclass(frozen=True)
class LessonConfig:
    """A part of a training on facts: sequences that are shorter or simpler than those that follow."""

    kind: Literal["copies", "pairs", "facts"]
    """Random tokens that come twice; keys and values without text; facts and questions in text."""
    length: Annotated[int, Bounds(least=8, most=2**24, whole=True, note="tokens of a sequence")]
    """It divides the run's."""
    sequences: Count
    """Of the run's length, which the lesson lasts: whole optimizer steps."""
    keys: Count = 4
    """Different ones in a sequence."""
    of_keys: Count | None = None
    """They are drawn from so many; None: from all."""


Words = Literal["all", "first_half", "second_half"]


@dataclass(frozen=True)
class FactsConfig:
    """Facts and questions that are written into the text, see `dmc.data.facts`."""

    keys: Count = 40
    """Asked for in a sequence."""
    num_keys: Count = 57
    """That there are, and as many values."""
    words: Words = "all"
    """Which keys and values are said: a half leaves the other to be said for the first time when a model is asked."""
    rebinding: Share = 0.2
    """Of keys that get a value twice, of which the newer one counts."""
    answer_weight: Annotated[float, Bounds(above=0, most=1e3, note="that of other tokens is 1")] = 9.0
    """Of an answer in the loss."""
    lessons: list[LessonConfig] = field(default_factory=list)
    """One after the other, before sequences of the run's length; empty: no lessons."""
    random_forms: Share = 0.3
    """Of facts in lessons and after them that stand among random tokens, in none of the known forms."""
    asked_last: Share = 0.5
    """Of sequences whose questions come behind all facts; in others each comes somewhere behind its own."""
    asked_twice: Share = 0.1
    """Of questions in lessons and after them that come twice in a row."""

    def __post_init__(self) -> None:
        if self.keys > self.num_keys:
            raise ValueError(f"data.facts.keys={self.keys}: expected at most data.facts.num_keys={self.num_keys}")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from. Sources have names, and are mappings with a `_target_`, see `dmc.data`."""

    train: dict[str, dict[str, Any]]
    validation: dict[str, dict[str, Any]]
    calibration: dict[str, dict[str, Any]] | None = None
    """Held-out text for calibration; None: the validation text."""
    test: dict[str, dict[str, Any]] | None = None
    """Held-out text for what is reported, on which nothing is chosen; None: the validation text, and reports say so."""
    cache_folder: str = "outputs/cache"
    """Where tokenised text is kept."""
    streaming: bool = False
    """Tokenise the training text on the fly."""
    stream_shards: Count = 16
    """Parts that a stream is read in, one sample of each in turn: a multiple of the ranks of all starts of the run."""
    num_workers: Annotated[int, READERS] = 0
    """Processes that read cached text for a rank, or threads that read streams; they change no sample."""
    tokenize_num_proc: Annotated[int, PROCESSES] | None = None
    """Processes that tokenise; None: the cores that the process may use."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    facts: FactsConfig | None = None
    """Written into text of all splits; None: the text is as it is."""

    @property
    def reported_split(self) -> str:
        """What reports are measured on."""
        return "validation" if self.test is None else "test"

    def __post_init__(self) -> None:
        for name in ("train", "validation"):
            if not getattr(self, name):
                raise ValueError(f"data.{name} is empty: name at least one source")
        if self.facts is not None and self.streaming:
            raise ValueError("data.facts are written into cached text: set data.streaming=false")
        for name in ("calibration", "test"):
            if getattr(self, name) == {}:
                raise ValueError(f"data.{name} is empty: name at least one source, or null for the validation text")
