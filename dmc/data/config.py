"""Text and tokenizer of a run."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from dmc.config.settings import Count, Named, Share, checked_dataclass
from dmc.gguf import ModelName

Sources = Annotated[Named[dict[str, Any]], Field(min_length=1)]


@checked_dataclass(frozen=True)
class TokenizerConfig:
    """A pretrained tokenizer, or for a fresh model a byte-level BPE trained on the training text."""

    path: ModelName | None = None
    """Folder, hub name or GGUF file; None: the model's."""
    train_vocab_size: Annotated[StrictInt, Field(ge=257, le=2**24)] | None = None
    """Size of the tokenizer that is trained for a fresh model and kept in `folder`; a model that has one keeps it."""
    folder: str | None = None
    bos: StrictBool | None = None
    """Whether the bos token precedes each document; None: as the tokenizer itself does before a text."""
    eod_token: str | None = None
    """Token after each document; None: the end-of-text token of pretraining, not an instruct model's end of turn."""

    def __post_init__(self) -> None:
        if self.train_vocab_size is not None and (self.folder is None or self.path is not None):
            raise ValueError("data.tokenizer.train_vocab_size needs data.tokenizer.folder, and no data.tokenizer.path")


@checked_dataclass(frozen=True)
class LessonConfig:
    """A part of the curriculum of facts: sequences that are shorter or simpler than later ones."""

    kind: Literal["copies", "pairs", "facts"]
    """copies: random tokens repeated once; pairs: keys and values without text; facts: facts and questions in text."""
    length: Annotated[StrictInt, Field(ge=8, le=2**24)]
    """Tokens of a sequence, a divisor of the run's length."""
    sequences: Count
    """Length of the lesson in sequences of the run's length: whole optimizer steps."""
    keys: Count = 4
    """Number of different keys in a sequence."""
    of_keys: Count | None = None
    """Number of words to draw them from, the first ones; for keys of several words others in each sequence, so that
    keys share words and every word of them counts. None: all."""


Words = Literal["all", "first_half", "second_half"]


@checked_dataclass(frozen=True)
class FactsConfig:
    """Facts and questions that are written into the text, see `dmc.data.facts`."""

    keys: Count = 40
    """Number of keys asked for in a sequence."""
    num_keys: Count = 57
    """Number of words of keys in all, and of values; fewer where the tokenizer has fewer."""
    key_words: Annotated[StrictInt, Field(ge=1, le=4)] = 1
    """Number of words of a key."""
    words: Words = "all"
    """Words of keys and values to use: a half leaves the other half unseen, for measuring generalization."""
    rebinding: Share = 0.2
    """Share of keys that are assigned twice, where the newer value counts."""
    answer_weight: Annotated[StrictFloat, Field(gt=0, le=1e3)] = 9.0
    """Weight of an answer in the loss."""
    lessons: list[LessonConfig] = field(default_factory=list)
    """Lessons, one after the other, before sequences of the run's length; empty: no lessons."""
    random_forms: Share = 0.3
    """Share of training facts that are written among random tokens, in none of the known forms."""
    asked_last: Share = 0.5
    """Share of sequences whose questions follow all facts; in others each question follows anywhere after its fact."""
    asked_twice: Share = 0.1
    """Share of training questions that are asked twice in a row."""

    def __post_init__(self) -> None:
        available = self.num_keys if self.words == "all" else self.num_keys // 2
        if self.keys > available**self.key_words:
            raise ValueError(
                f"data.facts.keys={self.keys}: expected at most {available**self.key_words}, the keys of "
                f"data.facts.num_keys={self.num_keys} with data.facts.words={self.words}, key_words={self.key_words}"
            )
        for number, lesson in enumerate(self.lessons):
            drawn_from = (available if lesson.of_keys is None else min(lesson.of_keys, available)) ** self.key_words
            wrong = "of_keys" if (lesson.of_keys or 0) > available else "keys" if lesson.keys > drawn_from else None
            if wrong is not None and lesson.kind != "copies":
                most = available if wrong == "of_keys" else drawn_from
                raise ValueError(
                    f"data.facts.lessons[{number}].{wrong}={getattr(lesson, wrong)}: expected at most {most}, the keys "
                    f"that data.facts.num_keys={self.num_keys}, words={self.words} and of_keys={lesson.of_keys} leave"
                )


@checked_dataclass(frozen=True)
class DataConfig:
    """Text of a run. Sources have names, and are mappings with a `_target_`, see `dmc.data`."""

    train: Sources
    validation: Sources
    calibration: Sources | None = None
    """Held-out text for calibration; None: the validation text."""
    test: Sources | None = None
    """Held-out text for reports, never for choosing; None: the validation text, and reports say so."""
    cache_folder: str = "outputs/cache"
    """Folder of tokenized text."""
    streaming: StrictBool = False
    """Tokenize the training text on the fly."""
    stream_shards: Count = 16
    """Number of parts of a stream, read in turn: a multiple of the number of ranks at every start of the run."""
    num_workers: Annotated[StrictInt, Field(ge=0, le=4096)] = 0
    """Processes per rank that read cached text; streams are read ahead by one. Samples do not depend on it."""
    tokenize_num_proc: Annotated[StrictInt, Field(ge=1, le=4096)] | None = None
    """Processes that tokenize; None: as many as the process may use cores."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    facts: FactsConfig | None = None
    """Facts written into the text of all splits; None: no facts."""

    @property
    def reported_split(self) -> str:
        """Name of the split that reports are measured on."""
        return "validation" if self.test is None else "test"

    def __post_init__(self) -> None:
        if self.facts is not None and self.streaming:
            raise ValueError("data.facts are written into cached text: set data.streaming=false")
