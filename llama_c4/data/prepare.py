"""Preparation of a token cache: from a source of documents, or of synthetic tokens, to shards and a manifest.

A cache grows in `NAME.partial` under a lock and becomes `NAME` in one rename at the end, so what bears the name is
complete. Every full shard is noted once it is synced; after an interruption of any kind the same command continues
behind the last of them. A cache that is too small is extended the same way, behind its last full shard.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from llama_c4.config.errors import DataError
from llama_c4.config.schema import DataConfig, MarkovConfig
from llama_c4.data.cache import TokenCache
from llama_c4.data.cache_match import capacity_fault, check_cache
from llama_c4.data.markov_preparation import MarkovPreparation
from llama_c4.data.preparation_display import PreparationDisplay
from llama_c4.data.text_preparation import TextPreparation
from llama_c4.data.working_folder import WorkingFolder, claim_working_folder

__all__ = ["capacity_fault", "check_cache", "prepare"]

EXIT_STOPPED = 75


def prepare(
    data: DataConfig,
    *,
    vocab_size: int,
    context_length: int,
    train_tokens_needed: int | None,
    verify: bool = False,
    progress: bool,
) -> TokenCache:
    """Build the token cache of a configuration at `data.cache_dir`, or reuse, continue or extend the one there.

    An existing cache is compared with the configuration and hashed whole; if it holds enough it is returned as it is.
    If not, more shards are added behind its full ones: those stay as they are, byte for byte, and so do all its
    training tokens, of which it has more now. The bytes do not depend on the number of processes, nor on how often
    the preparation was interrupted.

    Args:
        data: The configuration of the data.
        vocab_size: V of the model.
        context_length: L, targets of a block; a cache without one block is refused.
        train_tokens_needed: What the run's loader needs (see `order.tokens_needed`); decides where `data.train_tokens`
            is null and the source is the hub.
        verify: Build nothing: the cache must be there, and is compared and hashed.
        progress: Whether to say how it goes, on standard error.
    Returns:
        The opened cache.
    Raises:
        DataError: Nothing to read, something damaged, no space, a cache of other settings, one in preparation by
            another process. What was prepared so far is kept.
        SystemExit: 75 on SIGTERM; what was prepared so far is kept.
    """
    path = Path(data.cache_dir)
    with _system_exit_on_sigterm(), PreparationDisplay(enabled=progress) as display:
        preparation: _Preparation
        if isinstance(data, MarkovConfig):
            preparation = MarkovPreparation(data, vocab_size=vocab_size, display=display)
        else:
            preparation = TextPreparation(
                data, vocab_size=vocab_size, train_tokens_needed=train_tokens_needed, display=display
            )
        cache = _existing(path)
        if verify or (cache is not None and preparation.is_enough(cache)):
            cache = cache or TokenCache.open(path)  # which says that there is none
            preparation.check_base(cache)
        else:
            cache = _build(path, preparation)
    if cache.train.num_blocks(context_length) == 0:
        raise DataError(
            f"data.cache_dir={path}: {cache.train.num_tokens} training tokens hold no block of "
            f"model.context_length={context_length} targets; take more text or a shorter context"
        )
    return cache


class _Preparation(Protocol):
    """What is to be prepared."""

    def is_enough(self, cache: TokenCache) -> bool:
        """Whether a cache holds the tokens asked for."""

    def check_base(self, cache: TokenCache) -> None:
        """Raise DataError unless a cache is of these settings and every shard of it is unharmed."""

    def build(self, work: WorkingFolder, base: TokenCache | None) -> dict[str, Any]:
        """Write what `base` does not hold into the working folder, and give the manifest, but for its identity."""


def _existing(path: Path) -> TokenCache | None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    return TokenCache.open(path)


def _build(path: Path, preparation: _Preparation) -> TokenCache:
    with claim_working_folder(path) as work:
        base = _existing(path)  # another process may have finished it before we got the lock
        if base is not None:
            preparation.check_base(base)
            if preparation.is_enough(base):
                work.discard()
                return base
        try:
            return work.publish(preparation.build(work, base))
        except BaseException:
            work.discard_if_empty()
            raise


@contextmanager
def _system_exit_on_sigterm() -> Generator[None, None, None]:
    """Let SIGTERM end the process in order, processes of the pool included; only a main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    stopped = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; a second one would disturb the cleaning up
        raise SystemExit(EXIT_STOPPED)

    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if not stopped:
            signal.signal(signal.SIGTERM, former)
