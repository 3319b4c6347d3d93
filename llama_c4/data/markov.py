"""A first-order Markov chain over token ids: text-free tokens of exactly known entropy.

Every token has a place on a circle of V places, hidden by a random permutation, and a step goes m ways: from place i to
i + d_j (mod V) with probability p_j. So every token has m successors and m predecessors, the stationary distribution is
uniform whatever p is, the chain is irreducible (d_0 = 1), and its entropy rate is H(p) = -Σ p_j ln p_j nats per token.
The places of a stretch are a cumulative sum of its steps, so millions of tokens take a fraction of a second.

No model's mean loss can honestly lie below H(p), but for the chance of a finite sample: the standard error of -ln p
over n tokens is `entropy_std` / sqrt(n).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llama_c4.config.errors import DataError
from llama_c4.config.schema import MarkovConfig
from llama_c4.data.cache import Tokens

CHUNK_TOKENS = 1 << 16
_TABLE, _STREAMS = 0, {"train": 1, "validation": 2}


class MarkovChain:
    """The chain of one seed.

    Args:
        vocab_size: V.
        successors: m, at most V.
        seed: Decides the hidden circle, the steps, their probabilities, and the sampled streams.
    Attributes:
        successors: [V, m], the tokens that may follow each token; row v, column j with probability `probabilities[j]`.
        probabilities: p, [m], drawn uniformly from the simplex.
        entropy_rate: H(p) in nats per token.
        entropy_std: Standard deviation of -ln p of one step, in nats.
    """

    def __init__(self, *, vocab_size: int, successors: int, seed: int) -> None:
        if successors > vocab_size:
            raise DataError(
                f"data.successors={successors} is more than model.vocab_size={vocab_size}; "
                f"set data.successors to at most {vocab_size}"
            )
        random = np.random.default_rng(np.random.SeedSequence([seed, _TABLE]))
        self._seed = seed
        self._token_at: NDArray[np.int64] = random.permutation(vocab_size)  # place → token
        others = random.permutation(vocab_size)
        self._steps = np.concatenate([[1 % vocab_size], others[others != 1 % vocab_size]])[:successors]
        self.probabilities: NDArray[np.float64] = random.dirichlet(np.ones(successors))
        self._thresholds = np.cumsum(self.probabilities)[:-1]
        self.entropy_rate, self.entropy_std = _entropy(self.probabilities)
        place_of = np.argsort(self._token_at)
        self.successors: NDArray[np.int64] = self._token_at[(place_of[:, None] + self._steps) % vocab_size]

    def tokens(self, split: str, num_tokens: int) -> Iterator[Tokens]:
        """The first tokens of a split's stream, in chunks; a shorter stream is the beginning of a longer one.

        The streams of the two splits are independent and start in the stationary distribution.
        """
        stream = np.random.SeedSequence([self._seed, _STREAMS[split]])
        vocab_size = len(self._token_at)
        place = int(np.random.default_rng(stream).integers(vocab_size))
        for start in range(0, num_tokens, CHUNK_TOKENS):
            chunk = np.random.default_rng(np.random.SeedSequence([self._seed, _STREAMS[split], start // CHUNK_TOKENS]))
            ways = np.searchsorted(self._thresholds, chunk.random(CHUNK_TOKENS), side="right")  # way j: p_j
            places = (place + np.cumsum(self._steps[ways])) % vocab_size
            place = int(places[-1])
            yield self._token_at[places[: num_tokens - start]].astype(np.uint16)


def _entropy(probabilities: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation of -ln p under p itself, in nats."""
    nats = -np.log(probabilities)
    mean = float(probabilities @ nats)
    return mean, float(probabilities @ np.square(nats - mean)) ** 0.5


def build_chain(data: MarkovConfig, *, vocab_size: int) -> MarkovChain:
    """The chain of a configuration."""
    return MarkovChain(vocab_size=vocab_size, successors=data.successors, seed=data.chain_seed)
