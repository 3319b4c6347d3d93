"""The memory of a preparation does not grow with its corpus, nor much with one huge document."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from llama_c4.config.schema import C4FilesConfig
from tests.data.small_corpus import text, write_corpus, write_rows
from tests.data.test_prepare_interrupted import ROOT, SCRIPT

PEAK = (
    SCRIPT
    + """
import resource
own, children = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(own, children)
"""
)


def peak_megabytes(data: C4FilesConfig) -> tuple[float, float]:
    """Peak resident memory of a preparation with two processes: its own, and that of the larger one of them."""
    command = [sys.executable, "-c", PEAK, json.dumps({**asdict(data), "prepare_processes": 2})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    own, children = map(float, done.stdout.splitlines()[-1].split())
    return own, children


def corpus(folder: Path, files: int) -> C4FilesConfig:
    """So many files of 3 MB of different documents."""
    data = write_corpus(folder)
    base = [text(seed, words=400) for seed in range(100)]
    for number in range(files):
        rows = [f"{base[seed % 100]} {number} {seed}" for seed in range(1500)]
        write_rows(folder / "en" / f"c4-train.{number:05d}-of-01024.json.gz", rows)
    return replace(data, shard_tokens=1_000_000, shuffle_documents=1000)


@pytest.mark.slow
def test_four_times_the_corpus_takes_the_same_memory(tmp_path: Path) -> None:
    small, large = peak_megabytes(corpus(tmp_path / "1", 3)), peak_megabytes(corpus(tmp_path / "4", 12))
    assert large[0] < 1.2 * small[0]
    assert large[1] < 1.2 * small[1]


@pytest.mark.slow
def test_a_document_of_forty_megabytes_takes_a_bounded_multiple_of_its_size(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    usual = peak_megabytes(data)
    huge = (text(1, words=400) + " ") * 20_000
    write_rows(tmp_path / "en" / "c4-train.00002-of-01024.json.gz", ["before", huge[:40_000_000], "behind"])
    own, children = peak_megabytes(replace(data, cache_dir=f"{tmp_path}/huge", shard_tokens=10_000_000))
    assert own - usual[0] < 12 * 40
    assert children - usual[1] < 12 * 40
