"""Random numbers: a generator for each (seed, purpose, counters), and the state of the global ones.

Nothing of ours draws from the global generators; their state is saved and restored all the same, so that a library
that does draw from them continues as well.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from llama_c4.config.errors import CheckpointError


def generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """Make a CPU generator that depends on nothing but its arguments.

    Its seed is the first 63 bits of SHA-256 over "seed/purpose/counter/…": different purposes or counters give
    unrelated streams, and the global generators are not touched.
    """
    text = "/".join([str(seed), purpose, *map(str, counters)])
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def seed_global_generators(seed: int) -> None:
    """Start the global generators of python, numpy and torch (all devices) from a seed.

    So a run does not depend on what its process did before, and a library that draws from them is repeatable.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the global one is what is meant)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """State of the global generators of python, numpy and torch (CPU, every CUDA device).

    Returns:
        Tensors, numbers, strings, lists and None only, so `torch.load(weights_only=True)` reads it.
    """
    version, words, gauss_next = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (the global one is what is meant)
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss_next": gauss_next},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Put the global generators into a state that `rng_state` gave.

    Tensors may have been moved by a loader's `map_location`: they are taken to the CPU first. CUDA states are restored
    for the devices that exist here.

    Raises:
        CheckpointError: the state lacks a generator or does not fit it.
    """
    try:
        python, numpy, cpu, cuda = state["python"], state["numpy"], state["torch"].cpu(), state["cuda"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss_next"]))
        keys = numpy["keys"].cpu().numpy().astype(np.uint32)
        np.random.set_state(  # noqa: NPY002
            (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached_gaussian"])
        )
        torch.set_rng_state(cpu)
        for index, device_state in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state.cpu(), index)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the saved state of the random number generators is damaged ({type(error).__name__}: {error})"
        ) from error
