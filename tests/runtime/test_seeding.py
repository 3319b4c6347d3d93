"""Generators by purpose, and the global ones saved and restored."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from llama_c4.config.errors import CheckpointError
from llama_c4.runtime.seeding import generator, restore_rng_state, rng_state


def draw(*key: Any) -> list[int]:
    return torch.randint(0, 2**62, (4,), generator=generator(*key)).tolist()


def test_a_generator_depends_on_all_of_its_key_and_on_nothing_else() -> None:
    keys = [
        (42, "initial weights"),
        (43, "initial weights"),
        (42, "noise"),
        (42, "noise", 0),
        (42, "noise", 0, 1),
        (42, "noise", 1),
    ]
    streams = [draw(*key) for key in keys]
    assert len({tuple(s) for s in streams}) == len(keys)
    torch.manual_seed(7)
    assert [draw(*key) for key in keys] == streams


def test_making_and_using_a_generator_leaves_the_global_ones_alone() -> None:
    before = rng_state()
    draw(1, "anything")
    assert torch.equal(rng_state()["torch"], before["torch"])


def global_numbers() -> list[float]:
    of_numpy = [float(np.random.rand()), float(np.random.randn())]  # noqa: NPY002
    return [random.random(), random.gauss(0, 1), *of_numpy, float(torch.rand(()))]


def test_restored_state_continues_every_global_stream_also_through_a_file() -> None:
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002
    torch.manual_seed(5)
    global_numbers()  # an odd number of normals, so that a cached one is part of the state
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = global_numbers()
    global_numbers()
    file.seek(0)
    restore_rng_state(torch.load(file, weights_only=True, map_location="cpu"))
    assert global_numbers() == expected


def test_state_without_a_generator_or_of_a_wrong_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match="random number generators is damaged"):
        restore_rng_state({key: value for key, value in rng_state().items() if key != "numpy"})
    with pytest.raises(CheckpointError, match="damaged"):
        restore_rng_state(rng_state() | {"torch": torch.zeros(3, dtype=torch.uint8)})
