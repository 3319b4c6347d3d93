"""The benchmark of preparation: both sides do the same work, and the figures are what their arithmetic says."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_c4.benchmark.preparation import Job, Measurement, measure, summary, table
from tests.data.small_corpus import write_corpus


@pytest.mark.slow
def test_both_sides_give_the_same_number_of_tokens(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    job = Job(files=data.files or "", tokenizer=data.tokenizer, eos_token="</s>", processes=2, working=str(tmp_path))
    results = measure(job, rounds=1)
    assert results["prepare"][0].tokens == results["datasets.map"][0].tokens > 1000
    assert all(run.cpu_seconds > 0 and run.wall_seconds > 0 for runs in results.values() for run in runs)
    assert not list(tmp_path.glob("round-*"))


def test_the_ratio_is_taken_round_by_round() -> None:
    results = {
        "prepare": [Measurement(100, 1.0, 1.0), Measurement(100, 2.0, 1.0), Measurement(100, 4.0, 1.0)],
        "datasets.map": [Measurement(100, 2.0, 3.0), Measurement(100, 2.0, 3.0), Measurement(100, 6.0, 3.0)],
    }
    figures = summary(results)
    assert figures["prepare over datasets.map"] == [1.5, 1.0, 2.0]
    assert figures["prepare"]["tokens_per_cpu_second"] == 50
    assert figures["datasets.map"]["cpu_seconds"] == [2.0, 2.0, 6.0]
    assert "prepare / datasets.map, tokens per CPU second: 1.50 (1.00..2.00)" in table(figures)
