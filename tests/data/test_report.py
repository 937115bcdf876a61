import json
from collections import Counter

import pytest

from dmc.data import Blend, TextSource, build_packed, format_report, report_sources, write_report

LENGTH = 16


@pytest.mark.parametrize("num_draws", [0, 1, 7, 10, 333])
def test_epochs_are_the_draws_over_the_length_of_each_source(num_draws, corpus, tmp_path, tokenizer):
    sources = [
        TextSource(str(corpus), files="00*.txt", weight=0.7),
        TextSource(str(corpus), files=["01*.txt", "02*.txt"], weight=0.3),
    ]
    blend = build_packed(sources, tokenizer, LENGTH, tmp_path / "cache", seed=3)
    assert isinstance(blend, Blend) and blend.seed == 3
    drawn = Counter(blend[position]["source"] for position in range(num_draws))
    reports = report_sources("train", sources, blend, num_draws)
    for number, report in enumerate(reports):
        assert report.epochs == drawn[number] / len(blend.datasets[number])
    assert [report.share for report in reports] == [0.7, 0.3]
    assert [report.num_documents for report in reports] == [10, 20]
    assert all(report.num_bytes == 2 * report.num_tokens for report in reports)


def test_report_is_a_table_and_a_file(corpus, tmp_path, tokenizer):
    source = TextSource(str(corpus))
    packed = build_packed(source, tokenizer, LENGTH, tmp_path / "cache")
    reports = [*report_sources("train", [source, source]), *report_sources("validation", [source], packed)]
    assert [report.share for report in reports] == [0.5, 0.5, 1.0]
    assert [report.num_tokens for report in reports] == [None, None, len(packed.tokens)]
    lines = format_report(reports).splitlines()
    assert len(lines) == 5 and all(line.count("|") == 9 for line in lines)
    assert lines[-1].startswith(f"| validation | {corpus} | 100.0% | {len(packed.tokens):,} | 40 | 0 |")
    write_report(reports, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "data.json").read_text())[2]["num_documents"] == 40
