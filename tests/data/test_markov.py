"""The Markov chain: its transitions, its entropy and the independence of its streams, from the sampled tokens alone."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from llama_c4.config.errors import DataError
from llama_c4.data.markov import CHUNK_TOKENS, MarkovChain


def sample(chain: MarkovChain, split: str = "train", num_tokens: int = 1 << 19) -> np.ndarray:
    return np.concatenate(list(chain.tokens(split, num_tokens)))


def transitions(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Relative frequency of every pair, [V, V]."""
    counts = np.zeros((vocab_size, vocab_size))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    return counts / counts.sum()


def test_a_token_is_followed_by_its_successors_with_their_probabilities() -> None:
    chain = MarkovChain(vocab_size=32, successors=4, seed=7)
    joint = transitions(sample(chain), 32)
    expected = np.zeros((32, 32))
    for token in range(32):
        expected[token, chain.successors[token]] = chain.probabilities / 32
    assert ((joint > 0) == (expected > 0)).all()
    assert np.abs(joint - expected).max() < 5 * np.sqrt(expected.max() / (1 << 19))


@pytest.mark.parametrize(("vocab_size", "successors"), [(64, 4), (17, 17), (50, 1), (2, 2)])
def test_the_floor_is_the_entropy_of_the_sampled_pairs(vocab_size: int, successors: int) -> None:
    chain = MarkovChain(vocab_size=vocab_size, successors=successors, seed=3)
    joint = transitions(sample(chain), vocab_size)
    conditional = joint / joint.sum(axis=1, keepdims=True)
    estimate = -np.sum(joint * np.log(np.where(conditional > 0, conditional, 1.0)))
    assert estimate == pytest.approx(chain.entropy_rate, abs=0.01)
    nats = -np.log(conditional[conditional > 0])
    std = np.sqrt(np.sum(joint[joint > 0] * (nats - estimate) ** 2))
    assert std == pytest.approx(chain.entropy_std, abs=0.02)


def test_the_stationary_distribution_is_uniform_from_the_first_token_on() -> None:
    chain = MarkovChain(vocab_size=32, successors=3, seed=1)
    matrix = np.zeros((32, 32))
    np.add.at(matrix, (np.arange(32)[:, None], chain.successors), np.broadcast_to(chain.probabilities, (32, 3)))
    assert np.allclose(np.full(32, 1 / 32) @ matrix, 1 / 32, atol=1e-15)
    firsts = [int(next(MarkovChain(vocab_size=4, successors=2, seed=s).tokens("train", 1))[0]) for s in range(400)]
    assert np.abs(np.bincount(firsts, minlength=4) - 100).max() < 5 * np.sqrt(75)


def test_the_chain_reaches_every_token() -> None:
    for vocab_size, successors in ((64, 1), (64, 2), (65, 3)):
        assert len(np.unique(sample(MarkovChain(vocab_size=vocab_size, successors=successors, seed=0)))) == vocab_size


def test_a_shorter_stream_is_the_beginning_of_a_longer_one() -> None:
    chain = MarkovChain(vocab_size=64, successors=4, seed=0)
    long = sample(chain, num_tokens=3 * CHUNK_TOKENS)
    for num_tokens in (1, 1000, CHUNK_TOKENS, CHUNK_TOKENS + 1):
        assert np.array_equal(sample(chain, num_tokens=num_tokens), long[:num_tokens])


def test_the_splits_are_different_streams_of_one_chain() -> None:
    chain = MarkovChain(vocab_size=64, successors=4, seed=0)
    train, validation = sample(chain, num_tokens=4000), sample(chain, "validation", num_tokens=4000)
    assert np.mean(train == validation) < 0.05
    pairs = {(a, b) for a in range(64) for b in chain.successors[a].tolist()}
    assert {(int(a), int(b)) for a, b in itertools.pairwise(validation)} <= pairs


def test_another_seed_is_another_chain() -> None:
    one, two = (MarkovChain(vocab_size=64, successors=4, seed=seed) for seed in (1, 2))
    assert not np.array_equal(np.sort(one.successors), np.sort(two.successors))


def test_more_successors_than_tokens_are_refused() -> None:
    with pytest.raises(DataError, match=r"data\.successors=9 is more than model\.vocab_size=8"):
        MarkovChain(vocab_size=8, successors=9, seed=0)


def test_eight_million_tokens_take_seconds() -> None:
    chain = MarkovChain(vocab_size=32_000, successors=8, seed=42)
    started = time.process_time()
    assert sum(map(len, chain.tokens("train", 8 << 20))) == 8 << 20
    assert time.process_time() - started < 15
