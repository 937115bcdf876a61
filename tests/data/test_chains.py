"""Problems solved step by step: checked by a reader of the texts that knows nothing of how they are made."""

import itertools
import re

import numpy as np
import pytest

from dmc.data import ChainSource, answer_of, build_packed, draw_problem, train_tokenizer

LINE = re.compile(r"([a-zA-Z])[=:<]([a-zA-Z])\+([a-zA-Z])[ ,;/]")
INPUT = re.compile(r"([a-zA-Z])(\d)")


def read_problem(prompt):
    """Return inputs {name: digit} and lines [(name, first, second)] of a problem in any form."""
    given, run = prompt.removesuffix("?\n").split("|")
    inputs, lines = INPUT.findall(given), LINE.findall(run)
    assert given == "".join(match[0] for match in INPUT.finditer(given))
    assert run == "".join(match[0] for match in LINE.finditer(run))
    names = [name for name, *_ in inputs + lines]
    assert len({*names}) == len(names)
    return {name: int(digit) for name, digit in inputs}, lines


def run_program(prompt):
    """Return the value of every variable: Python runs the lines."""
    values, lines = read_problem(prompt)
    for name, first, second in lines:
        assert first != second
        values[name] = eval(f"({first}+{second}) % 10", {}, dict(values))
    return values


@pytest.mark.parametrize("size", [1, 3, 20, 48])
@pytest.mark.parametrize("forms", ["seen", "unseen"])
def test_solutions_run_the_program_line_by_line(size, forms):
    draw = np.random.default_rng(size)
    for split, _ in itertools.product(("train", "test"), range(10)):
        problem = draw_problem(size, draw, split, forms)
        values, (_, lines) = run_program(problem.prompt), read_problem(problem.prompt)
        written = [
            f"{name}={first}+{second}:{first}{values[first]}+{second}{values[second]}={name}{values[name]}"
            for name, first, second in lines
        ]
        last = lines[-1][0]
        assert problem.solution.split("\n") == [*written, f"?{last}{values[last]}"] and len(lines) == size
        assert answer_of(problem.solution) == problem.answer == str(values[last])


def test_an_answer_is_what_a_solution_ends_with():
    assert answer_of("e=a+c:a7+c3=e0\n?e0") == "0"
    assert [answer_of(text) for text in ("e=a+c:a7+c3=e0", "e=a+c:a7+c3=e0\n?e", "", "?e0\n", "?e01")] == [None] * 5


def program_of(prompt):
    """Return a problem whatever its letters and form."""
    inputs, lines = read_problem(prompt)
    places = {name: place for place, name in enumerate([*inputs, *(name for name, *_ in lines)])}
    return (*inputs.values(), *((places[first], places[second]) for _, first, second in lines))


def test_splits_share_no_problem():
    splits = ("train", "validation", "calibration", "test")
    pairs = {split: ChainSource(split, problems=400, smallest=1, largest=1) for split in splits}
    texts = {split: [prompt for prompt, _ in source.read(source.stream())] for split, source in pairs.items()}
    programs = {split: {program_of(prompt) for prompt in prompts} for split, prompts in texts.items()}
    assert all(len(found) < 400 for found in programs.values()), "so few programs are drawn again within a split"
    for first, second in itertools.combinations(splits, 2):
        assert not programs[first] & programs[second]


def test_training_shows_all_sizes_and_no_unseen_form():
    source, draw = ChainSource(problems=600), np.random.default_rng(0)
    prompts = [prompt for prompt, _ in source.read(source.stream())]
    sizes = {len(read_problem(prompt)[1]) for prompt in prompts}
    assert sizes == {*range(2, 49)}

    def form_of(prompt):
        return re.search(r"\|.(.)...(.)", prompt).groups()

    unseen = {form_of(draw_problem(9, draw, "test", "unseen").prompt) for _ in range(60)}
    seen = {form_of(prompt) for prompt in prompts}
    assert len(unseen) == 3 and len(seen) == 9 and not seen & unseen
    for known, new in zip(zip(*seen, strict=True), zip(*unseen, strict=True), strict=True):
        assert {*new} <= {*known}


def test_a_source_is_a_function_of_its_settings_and_can_be_read_in_parts():
    source, again = ChainSource(problems=520, largest=4), ChainSource(problems=520, largest=4)
    pairs = list(source.read(source.stream()))
    assert pairs == list(again.read(again.stream())) and len(pairs) == 520
    shards = [source.stream().shard(3, part) for part in range(3)]
    assert [pair for shard in shards for pair in source.read(shard)] == pairs
    others = [ChainSource(problems=520, largest=4, seed=1), ChainSource("test", problems=520, largest=4)]
    assert source.digest() == again.digest() and source.digest() not in {other.digest() for other in others}
    assert not any(next(other.read(other.stream())) == pairs[0] for other in others)


def test_every_letter_is_a_token_and_only_solutions_are_trained_on(tmp_path):
    source = ChainSource(problems=40, largest=9)
    tokenizer = train_tokenizer(source.documents(), 257, tmp_path / "tokenizer")
    packed = build_packed(source, tokenizer, 256, tmp_path / "cache", document_starts=True, whole_documents=True)
    pairs, found = list(source.read(source.stream())), 0
    for item in (packed[index] for index in range(len(packed))):
        starts = [*item["document_starts"].nonzero().flatten().tolist(), 256]
        for begin, end in itertools.pairwise(starts):
            learned = item["loss_mask"][begin:end]
            if not learned.any():
                continue
            text, (prompt, solution) = tokenizer.decode(item["input_ids"][begin:end]), pairs[found]
            assert text == prompt + solution + tokenizer.eos_token
            assert end - begin == len(prompt) + len(solution) + 1
            assert learned.tolist() == [False] * len(prompt) + [True] * (len(solution) + 1)
            found += 1
    assert found == 40


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="expected 1 <= smallest <= largest <= 48"):
        ChainSource(smallest=9, largest=49)
    with pytest.raises(ValueError, match="problems=0: expected at least one"):
        ChainSource(problems=0)
    with pytest.raises(ValueError, match="split='dev'"):
        ChainSource("dev")
    with pytest.raises(ValueError, match="lesson='sums', letters=52"):
        ChainSource(lesson="sums")
    with pytest.raises(ValueError, match="digits=11: expected 1 to 10"):
        ChainSource(digits=11)


def test_lessons_repeat_symbols_and_pairs_of_names_and_symbols():
    copies = ChainSource(problems=20, lesson="copies")
    for first, second, end in copies.read(copies.stream()):
        assert first == second and len(first) == 16 and not end
    pairs, names = ChainSource(problems=200, lesson="pairs", letters=8), set()
    for first, *others in pairs.read(pairs.stream()):
        said, asked, end = first[:8], [first[8:], *others[:-1]], others[-1]
        values = dict(re.findall("([a-h])([^a-zA-Z])", said))
        assert len(values) == 4 and "".join(map("".join, values.items())) == said and not end
        assert asked[1::2] == [values[name] for name in asked[::2]]
        assert all(sorted(asked[begin : begin + 8 : 2]) == sorted(values) for begin in (0, 8, 16)) and len(asked) == 24
        names |= {*values}
    assert names == {*"abcdefgh"}


def test_inputs_can_be_of_few_digits():
    source = ChainSource(problems=100, largest=3, digits=3)
    found = {digit for prompt, _ in source.read(source.stream()) for digit in read_problem(prompt)[0].values()}
    assert found == {0, 1, 2}


@pytest.fixture(scope="module")
def lesson_tokenizer(tmp_path_factory):
    copies = ChainSource(problems=4000, lesson="copies")  # of pairs the tokenizer would learn some as one token
    return train_tokenizer(copies.documents(), 641, tmp_path_factory.mktemp("lessons") / "tokenizer")


@pytest.mark.parametrize("lesson", ["copies", "pairs"])
def test_of_a_lesson_every_second_part_is_trained_on_and_its_end_is_not(tmp_path, lesson, lesson_tokenizer):
    source, tokenizer = ChainSource(problems=40, lesson=lesson), lesson_tokenizer
    packed = build_packed(source, tokenizer, 33, tmp_path / "cache", document_starts=True, whole_documents=True)
    for item, parts in zip((packed[index] for index in range(40)), source.read(source.stream()), strict=True):
        assert tokenizer.decode(item["input_ids"]) == "".join(parts) + tokenizer.eos_token
        expected = [place % 2 == 1 for place, part in enumerate(parts) for _ in part]
        assert item["loss_mask"].tolist() == [*expected, False] and any(expected)
