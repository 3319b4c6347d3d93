"""The loading benchmark on 60 blocks: everybody delivers the same tokens, and who is missing is named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_c4.benchmark import loading

SIZES: dict[str, Any] = {"rows": 60, "context_length": 16, "batch_size": 7, "shard_tokens": 240, "rounds": 1}


@pytest.mark.slow
def test_candidates_deliver_the_same_tokens_and_are_measured(tmp_path: Path) -> None:
    candidates = ["llama_c4", "datasets (Arrow), own loop"]
    results = loading.measure(**SIZES, candidates=candidates, litdata_python=sys.executable, folder=tmp_path)
    assert all(results[name]["tokens"] == [960] for name in candidates)
    assert all(min(results[name]["cpu_seconds"]) > 0 for name in candidates)
    lines = loading.table(results).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == candidates
    assert "1.00x" in lines[1]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("litdata") is not None, reason="litdata is installed here")
def test_a_peer_that_is_not_installed_is_named_and_not_dropped(tmp_path: Path) -> None:
    candidates = ["litdata TokensLoader"]
    results = loading.measure(**SIZES, candidates=candidates, litdata_python=sys.executable, folder=tmp_path)
    assert results == {"litdata TokensLoader": {"missing": "litdata"}}
    assert loading.table(results).endswith("not installed (no module litdata)")


@pytest.mark.slow
def test_a_loader_that_loses_a_block_is_refused(tmp_path: Path) -> None:
    # Shards of 16 blocks and nothing behind the last group but 28 blocks: ours cannot deliver all 60.
    with pytest.raises(SystemExit, match="llama_c4"):
        loading.measure(**{**SIZES, "shard_tokens": 256}, candidates=["llama_c4"], litdata_python="", folder=tmp_path)
