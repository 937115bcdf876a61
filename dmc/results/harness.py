"""lm-evaluation-harness on the engine: its tasks run on the cache as compressed during generation."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from tqdm import tqdm

from dmc.results.tasks.voting import VotingOptions, voted, write_chains
from dmc.runtime import Engine, Generation, GenerationStats, SamplingParams
from dmc.special_tokens import encode_text

SAMPLING_SETTINGS = {"until", "do_sample", "temperature", "top_p", "top_k", "max_gen_toks"}


ScoringInput = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and its continuation without the last token: continuations that differ only in that share a pass."""
FindQuestion = Callable[[str, dict[str, Any]], int]
"""See `Benchmark.question_at`."""


class EngineLM(HFLM):
    """lm-eval's HFLM with scoring and generation by the engine.

    With a full cache its results equal HFLM's. A likelihood is that of a continuation after a compressed prompt; the
    continuation's own tokens are compressed like generated ones. Under a policy the last token of a prompt is fed after
    the others have been compressed, so that no token of an answer is predicted by the prompt's own pass. Rolling
    likelihoods have a prompt of one token. Results do not depend on the batch; each sampled one has its own seed.

    Args:
        engine: an engine with a tokenizer.
        requests_at_once: number of likelihoods handed to the engine at once; progress is shown after each group.
        seed: seed of sampled generations.
        voting: how many chains answer a prompt, and which counts; lm-eval gets the text that the vote has chosen.
        answer_pattern: regular expression of an answer in a chain, by whose last match chains vote.
        temperature: of the sampling, in place of a task's; None: the task's.
        question_at: returns where, in a prompt and its document, the question begins, which is fed after the text
            before it has been compressed; likelihoods are then refused. None: prompts are compressed whole.
    Raises:
        ValueError: the engine has no tokenizer, or one without an end of text.
    """

    def __init__(
        self,
        engine: Engine,
        requests_at_once: int = 64,
        seed: int = 0,
        question_at: FindQuestion | None = None,
        voting: VotingOptions | None = None,
        answer_pattern: str | None = None,
        temperature: float | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise ValueError("lm-eval's tasks are text, and the model's folder has no tokenizer: add tokenizer.json")
        if engine.tokenizer.eos_token_id is None:
            raise ValueError(
                "lm-eval needs to know where a text ends, and the tokenizer has no eos token: set eos_token"
            )
        logger = logging.getLogger(HFLM.__module__)
        logger.disabled = True  # it warns that a model is loaded already
        super().__init__(engine.model, tokenizer=engine.tokenizer, backend="causal", batch_size=requests_at_once)
        logger.disabled = False
        self.engine, self.requests_at_once, self.seed = engine, requests_at_once, seed
        self.question_at = question_at
        self.voting, self.answer_pattern, self.temperature = voting or VotingOptions(), answer_pattern, temperature
        self.stats: list[GenerationStats] = []
        """Memory statistics of all sequences."""
        self.num_cut = 0
        """Number of prompts truncated on the left, to `max_length` tokens with the continuation."""
        self.memory: list[dict[str, float]] = []
        """Memory of all chains of each prompt together, see `Chains`; empty where prompts have one."""

    def mean_memory(self) -> dict[str, float]:
        """Average `memory` over prompts; empty where they have one chain."""
        return {name: fmean(one[name] for one in self.memory) for name in {**self.memory[0]}} if self.memory else {}

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score (text, prompt, continuation): its log-likelihood in nats, and whether greedy decoding gives it."""
        if self.question_at is not None:
            raise ValueError(
                "question=hidden: a task that compares likelihoods has no separate question; use question=known"
            )
        requests_by_input: dict[ScoringInput, list[int]] = {}
        for index, (_, prompt, continuation) in enumerate(requests):
            requests_by_input.setdefault(self._feed(prompt, continuation), []).append(index)
        # Longest first: a lack of memory shows at once.
        feeds = sorted(requests_by_input, key=lambda feed: (-len(feed[0]) - len(feed[1]), feed))
        answers = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), desc="likelihoods", disable=disable_tqdm or None) as bar:
            for begin in range(0, len(feeds), self.requests_at_once):
                group = feeds[begin : begin + self.requests_at_once]
                asking = [requests_by_input[feed] for feed in group]
                last = sorted({requests[index][2][-1] for indices in asking for index in indices})
                prompts, after = self._parts([list(prompt) for prompt, _ in group])
                continuations = [requests[indices[0]][2] for indices in asking]
                scorings = self.engine.score_with_stats(prompts, continuations, Likelihoods(last), after)
                for scoring, indices in zip(scorings, asking, strict=True):
                    self.stats.append(scoring.stats)
                    for index in indices:
                        answers[index] = Likelihoods(last).of(scoring.logprobs, requests[index][2])
                bar.update(sum(map(len, asking)))
        return answers

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text; HFLM's also ends it where the tokenizer does, and scores that end in place of an answer."""
        tokens = encode_text(self.tokenizer, string, add_special_tokens is not False)
        return tokens[-left_truncate_len:] if left_truncate_len else tokens

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode both as HFLM does; a continuation whose tokens all begin in the context is encoded alone."""
        prompt, rest = super()._encode_pair(context, continuation)
        space = context[len(context.rstrip()) :]  # which HFLM takes to the continuation
        return prompt, rest or self.tok_encode(space + continuation, add_special_tokens=False)

    def _parts(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """Split prompts into the part to compress and the part to feed after that: under a policy the last token."""
        cuts = [len(prompt) - int(self.engine.policy is not None and len(prompt) > 1) for prompt in prompts]
        parts = list(zip(prompts, cuts, strict=True))
        return [prompt[:cut] for prompt, cut in parts], [prompt[cut:] for prompt, cut in parts]

    def _feed(self, prompt: list[int], continuation: list[int]) -> ScoringInput:
        """Truncate from the left as HFLM does; the last token is not fed and needs no room.

        Raises:
            ValueError: the continuation alone is too long, or one of the two is empty.
        """
        room = self.max_length + 1 - len(continuation)
        if not 0 < room <= self.max_length or not prompt:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and a continuation of {len(continuation)}: expected at least one "
                f"token in each, and at most {self.max_length}, the model's positions, in the continuation"
            )
        return tuple(self._cut(prompt, room)), tuple(continuation[:-1])

    def _cut(self, prompt: list[int], room: int) -> list[int]:
        self.num_cut += len(prompt) > room
        return prompt[-room:]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue texts until a stop string, the end of the text, or the task's number of tokens.

        Raises:
            ValueError: a task's generation setting is unknown, or leaves no room for its prompts.
        """
        repeats: Counter[str] = Counter()
        prompts, questions, params = [], [], []
        for request in requests:
            text, settings = request.args
            repeats[text] += 1
            params.append(self._sampling(settings, f"{self.seed} {repeats[text]} {text}"))
            cut = len(text) if self.question_at is None else self.question_at(text, request.doc)
            questions.append(self.tok_encode(text[cut:], add_special_tokens=False) if text[cut:] else [])
            room = self.max_length - params[-1].max_new_tokens - len(questions[-1])
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={params[-1].max_new_tokens} leaves no room for a prompt: the model has "
                    f"{self.max_length} positions; lower it"
                )
            prompts.append(self._cut(self.tok_encode(text[:cut]), room))
        fed, after = self._parts(prompts) if self.question_at is None else (prompts, questions)
        if self.voting.chains > 1:
            generations = self._votes(fed, after, params, progress=False if disable_tqdm else None)
        else:
            generations = self.engine.generate(fed, params, progress=False if disable_tqdm else None, after=after)
            self.stats += [generation.stats for generation in generations]
        # special tokens among the stop strings do not appear in the text: `_sampling` stops at their ids
        return [
            postprocess_generated_text(generation.text or "", list(sampling.stop), None)
            for generation, sampling in zip(generations, params, strict=True)
        ]

    def _votes(
        self, prompts: list[list[int]], after: list[list[int]], params: list[SamplingParams], progress: bool | None
    ) -> list[Generation]:
        """Write the chains of each prompt, and return the first with the answer that the vote has chosen."""
        fed = [prompt if question else prompt[:-1] for prompt, question in zip(prompts, after, strict=True)]
        after = [question or prompt[-1:] for prompt, question in zip(prompts, after, strict=True)]
        winners = []
        for chains in write_chains(self.engine, fed, after, params, progress):
            self.memory.append({"peak_bytes": float(chains.peak_bytes), "bytes_read": chains.bytes_read})
            self.stats += [generation.stats for generation in chains.generations]
            found = [re.findall(self.answer_pattern or "(?s).+", one.text or "") for one in chains.generations]
            answers = [_stripped(matches[-1]) if matches else None for matches in found]
            chosen = voted(answers, self.voting.vote, [len(one.token_ids) for one in chains.generations])
            winners.append(chains.generations[0 if chosen is None else answers.index(chosen)])
        return winners

    def _sampling(self, settings: dict[str, Any], identity: str) -> SamplingParams:
        """Read a task's generation settings; `identity` seeds the draw."""
        values: dict[str, Any] = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
        if unknown := sorted(set(values) - SAMPLING_SETTINGS):
            raise ValueError(
                f"generation setting {unknown[0]!r}: expected one of {', '.join(sorted(SAMPLING_SETTINGS))}"
            )
        if self.temperature is not None:
            values |= {"temperature": self.temperature, "do_sample": self.temperature > 0}
        temperature = float(values.get("temperature", 0.0))
        self.voting.check_temperature(temperature if values["do_sample"] else 0.0)
        if values["do_sample"] and temperature == 0:
            raise ValueError("do_sample=true needs a temperature above 0")
        stop_ids, stop = [self.eot_token_id], []
        for text in filter(None, handle_stop_sequences(values["until"], eos=None)):
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) == 1 and tokens[0] in self.tokenizer.all_special_ids:
                stop_ids.append(tokens[0])
            else:
                stop.append(text)
        return SamplingParams(
            max_new_tokens=values["max_gen_toks"],
            temperature=temperature if values["do_sample"] else 0.0,
            top_k=values.get("top_k") or None,
            top_p=values.get("top_p", 1.0),
            seed=int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7], "big"),
            stop_token_ids=tuple(stop_ids),
            stop=tuple(stop),
            n=self.voting.chains,
        )


def _stripped(match: str | tuple[str, ...]) -> str:
    """Return what an answer's pattern has matched, of several groups the first that has; 1,000 is 1000."""
    text = match if isinstance(match, str) else next(filter(None, match), "")
    return text.strip().rstrip(".").replace(",", "")


class Likelihoods:
    """Reduces log-probabilities, [n, vocab], to those of the given tokens, the likeliest, and some others.

    Args:
        others: last tokens of the continuations that share a pass.
    """

    def __init__(self, others: list[int]) -> None:
        self.others = others

    def __call__(self, logprobs: Tensor, tokens: Tensor) -> Tensor:
        """Return float32 [n, 2 + others], which represents token ids exactly."""
        given, likeliest = logprobs.gather(-1, tokens[:, None]), logprobs.argmax(-1, keepdim=True).float()
        return torch.cat([given, likeliest, logprobs[:, self.others]], dim=-1)

    def of(self, kept: Tensor, tokens: list[int]) -> tuple[float, bool]:
        """Return a continuation's log-probability in nats and whether all its tokens are likeliest, from `__call__`."""
        last = kept[-1, 2 + self.others.index(tokens[-1])]
        total = kept[:-1, 0].double().sum() + last.double()
        return float(total), kept[:, 1].long().tolist() == tokens
