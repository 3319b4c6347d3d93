"""Compilation: the full shape alone, the same numbers, the same names, and never again after warm-up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from llama_c4.config.errors import ConfigError
from llama_c4.runtime.compilation import compile_for_shape
from llama_c4.trainer.sync import SyncEngine
from tests.tiny_training import TinyModel, TinyStream, bitwise_equal, tiny_engine, tiny_plan, weights

pytestmark = pytest.mark.slow
PLAN = tiny_plan(total_tokens=1_000, epoch_tokens=36)  # 84 updates; the third of every epoch is one block


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def train(engine: SyncEngine, updates: range) -> None:
    stream = TinyStream()
    for update in map(PLAN.update, updates):
        for first in range(update.first_block, update.end_block, 2):
            engine.accumulate(stream.batch(first, min(2, update.end_block - first)), update)
        engine.apply(0.01 / (1 + update.index), update)


def compilations() -> int:
    return sum(torch._dynamo.utils.counters["stats"][key] for key in ("unique_graphs", "calls_captured"))


def test_50_updates_with_a_schedule_and_short_batches_compile_once() -> None:
    engine = tiny_engine(compile_mode="default")
    train(engine, range(1))
    after_warm_up = compilations()
    assert after_warm_up > 0
    with torch.no_grad():  # an evaluation at another batch size
        engine.evaluation_model().loss_sum(*_inputs(7))  # type: ignore[operator]
    train(engine, range(1, 50))
    assert compilations() == after_warm_up
    assert torch._dynamo.utils.counters["recompiles"] == {}


def _inputs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = TinyStream().batch(0, count)
    return batch.tokens, batch.targets


def test_only_the_full_shape_takes_the_compiled_function() -> None:
    shapes = []

    def loss_sum(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            shapes.append(tuple(tokens.shape))
        return tokens.sum() + targets.sum()

    dispatch = compile_for_shape(loss_sum, shape=(2, 4), mode="default")
    results = [int(dispatch(*_inputs(count))) for count in (2, 1, 2, 3, 2)]
    assert shapes == [(1, 4), (3, 4)]
    assert results == [int(sum(t.sum() for t in _inputs(count))) for count in (2, 1, 2, 3, 2)]


def test_compiled_training_equals_eager_and_state_names_have_no_prefix() -> None:
    eager, compiled = tiny_engine(), tiny_engine(compile_mode="default")
    for engine in (eager, compiled):
        train(engine, range(4))
    for name, p in weights(compiled.evaluation_model()).items():
        torch.testing.assert_close(p, weights(eager.evaluation_model())[name], rtol=1e-12, atol=1e-13)
    assert compiled.state_dict()["model"].keys() == TinyModel().state_dict().keys()


def test_compiled_eager_and_compiled_again_continue_from_one_another() -> None:
    state = None
    for position, mode in enumerate(("default", "default", None, "default")):
        engine = tiny_engine(model=TinyModel(seed=position), compile_mode=mode)
        if state is not None:
            engine.load_state_dict(state)
            assert bitwise_equal(engine.state_dict()["model"], state["model"])
        train(engine, range(position, position + 1))
        state = engine.state_dict()
        assert not any("_orig_mod" in name for name in [*state["model"], *state["optimizer"]["parameters"]])


def test_a_machine_that_cannot_compile_says_so_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    dispatch = compile_for_shape(lambda tokens, targets: (tokens * 2.5 + targets).sum(), shape=(2, 4), mode="default")
    with pytest.raises(ConfigError, match=r"set runtime\.compile=false"):
        dispatch(*_inputs(2))
