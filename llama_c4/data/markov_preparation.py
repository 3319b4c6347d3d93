"""The preparation of a synthetic cache: the tokens of a Markov chain."""

from __future__ import annotations

from typing import Any

import numpy as np

from llama_c4.config.schema import MarkovConfig
from llama_c4.data.cache import FORMAT, VERSION, TokenCache
from llama_c4.data.cache_match import is_enough, refuse, setting_differences
from llama_c4.data.markov import build_chain
from llama_c4.data.preparation_display import PreparationDisplay
from llama_c4.data.shards import EncodedBatch, FullShards, SplitWriter
from llama_c4.data.sources import markov_settings
from llama_c4.data.working_folder import WorkingFolder


class MarkovPreparation:
    """Writes a chain's two streams. It takes seconds, so it always starts from the beginning."""

    def __init__(self, data: MarkovConfig, *, vocab_size: int, display: PreparationDisplay) -> None:
        self._data = data
        self._chain = build_chain(data, vocab_size=vocab_size)
        self._settings = markov_settings(data, vocab_size=vocab_size)
        self._display = display

    def is_enough(self, cache: TokenCache) -> bool:
        """A synthetic corpus is as long as its settings say; `check_base` compares them."""
        return is_enough(cache.train, None) and is_enough(cache.validation, None)

    def check_base(self, cache: TokenCache) -> None:
        refuse(cache, setting_differences(cache.manifest, self._settings))
        cache.verify()

    def build(self, work: WorkingFolder, base: TokenCache | None) -> dict[str, Any]:
        work.resume({"settings": self._settings}, base=None)
        return {
            **self._settings,
            "format": FORMAT,
            "version": VERSION,
            "eos_id": None,
            "tokenizer": None,
            "entropy_floor": self._chain.entropy_rate,
            "entropy_std": self._chain.entropy_std,
            "ancestors": [],
            "validation_complete": True,
            "splits": {
                "train": self._write(work, "train", self._data.train_tokens),
                "validation": self._write(work, "validation", self._data.validation_tokens),
            },
        }

    def _write(self, work: WorkingFolder, split: str, num_tokens: int) -> dict[str, Any]:
        self._display.start(split)
        writer = SplitWriter(
            work.path, split, shard_tokens=self._data.shard_tokens, start=FullShards(), on_full_shard=lambda _: None
        )
        try:
            for tokens in self._chain.tokens(split, num_tokens):
                writer.add(EncodedBatch(tokens, [], np.empty(0, np.int64)))
                self._display.update(documents=0, tokens=writer.num_tokens, fraction=writer.num_tokens / num_tokens)
            record = writer.finish()
        finally:
            writer.abort()
        return {**record, "text_bytes": None, "cursor": None, "complete": True, "files": [], "skipped": {}}
