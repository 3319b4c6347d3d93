"""The model as a whole: names, initial weights, causality, limits."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from llama_c4.model.llama import Llama, build_model
from tests.tiny_llama import llama_config, tiny_llama

LAYER = [
    "attention_norm.weight",
    *(f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")),
    "ffn_norm.weight",
    *(f"ffn.{name}.weight" for name in ("w_gate", "w_up", "w_down")),
]


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 17, shape, generator=torch.Generator().manual_seed(seed))


def built(seed: int = 42, **changes: object) -> Llama:
    config = llama_config(**changes)
    return build_model(config, seed=seed, device="cpu", dtype=torch.float32, attention="auto", loss="chunked")


def test_the_state_has_exactly_the_documented_names_and_the_embedding_once() -> None:
    model = built(num_layers=2)
    expected = ["embedding.weight", *(f"layers.{i}.{name}" for i in range(2) for name in LAYER), "norm.weight"]
    assert list(model.state_dict()) == expected
    assert [name for name, _ in model.named_parameters()] == expected


def test_building_a_model_leaves_every_global_generator_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    built()
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def test_initial_weights_have_the_documented_spread() -> None:
    config = {"num_layers": 8, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 2000, "init_std": 0.02}
    for name, parameter in built(**config).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        std = 0.02 / 4 if name.endswith(("wo.weight", "w_down.weight")) else 0.02  # sqrt(2 · 8 layers) = 4
        standard_error = std / (2 * parameter.numel()) ** 0.5
        assert abs(parameter.std().item() - std) < 5 * standard_error, name
        assert abs(parameter.mean().item()) < 5 * std / parameter.numel() ** 0.5, name


def test_a_seed_decides_the_weights_in_every_dtype() -> None:
    wide = tiny_llama(dtype=torch.float64).state_dict()
    narrow = tiny_llama(dtype=torch.float32).state_dict()
    assert all(torch.equal(wide[name], narrow[name].double()) for name in wide)
    assert not torch.equal(built(seed=1).embedding.weight, built(seed=2).embedding.weight)


def test_no_two_matrices_start_alike() -> None:
    model = built(num_layers=3)
    queries = [layer.attention.wq.weight for layer in model.layers]
    assert not any(torch.equal(queries[0], other) for other in [*queries[1:], model.layers[0].attention.wk.weight])


@pytest.mark.parametrize("attention", ["auto", "reference", "math", "flash"])
def test_a_later_token_changes_no_earlier_logit(attention: str) -> None:
    model = tiny_llama(attention=attention)
    first = tokens(2, 4)
    for position in range(4):
        changed = first.clone()
        changed[:, position] = (changed[:, position] + 1) % 17
        difference = (model(first) - model(changed)).abs().amax(dim=(0, 2))
        assert torch.all(difference[:position] == 0)
        assert torch.all(difference[position:] > 1e-9)


def test_leading_axes_are_only_batches() -> None:
    model = tiny_llama()
    batch = tokens(3, 2, 4)
    torch.testing.assert_close(model(batch), torch.stack([model(part) for part in batch]), rtol=0, atol=1e-14)


def test_a_shorter_sequence_gives_the_first_logits_of_a_longer_one() -> None:
    model = tiny_llama()
    batch = tokens(2, 4)
    torch.testing.assert_close(model(batch[:, :2]), model(batch)[:, :2], rtol=0, atol=1e-14)


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_a_fully_padded_batch_has_no_loss_and_zero_gradients(loss: str) -> None:
    model = tiny_llama(loss=loss, attention="auto", dtype=torch.float32)
    total = model.loss_sum(tokens(2, 4), torch.full((2, 4), -100))
    total.backward()
    assert total.item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_the_model_learns_a_tiny_batch_by_heart(loss: str) -> None:
    model = tiny_llama(loss=loss, attention="auto", dtype=torch.float32)
    batch, targets = tokens(2, 4), tokens(2, 4, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        (model.loss_sum(batch, targets) / 8).backward()
        optimizer.step()
    assert model.loss_sum(batch, targets).item() / 8 < 0.02
    assert torch.equal(model(batch).argmax(-1), targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"lose small updates.*runtime\.precision=bfloat16"):
        build_model(llama_config(), seed=0, device="cpu", dtype=dtype, attention="auto", loss="plain")


def test_heads_that_do_not_divide_the_width_into_even_parts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.num_heads=3 does not divide model\.hidden_size=8"):
        built(num_heads=3)
    with pytest.raises(ValueError, match=r"model\.num_heads=8"):
        built(num_heads=8)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens are more than the context length of the model, 4"):
        tiny_llama()(tokens(1, 5))


def test_small_updates_move_norm_scales() -> None:
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for seed in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.loss_sum(tokens(2, 4, seed=seed), tokens(2, 4, seed=seed + 1)).backward()
        optimizer.step()
    assert all(torch.all(p != 1) for p in model.parameters() if p.dim() == 1)


def test_a_copy_is_independent_and_equal() -> None:
    model = built()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.embedding.weight.add_(1)
    assert not torch.equal(model(tokens(1, 4)), twin(tokens(1, 4)))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens(1, 4)), twin(tokens(1, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_compiled_loss_equals_the_eager_one_and_leaves_the_names_alone(loss: str) -> None:
    model = tiny_llama(loss=loss, attention="auto", dtype=torch.float32)
    names = list(model.state_dict())
    batch, targets = tokens(2, 4), tokens(2, 4, seed=1)
    compiled = torch.compile(model.loss_sum, dynamic=False, fullgraph=True)
    gradients = []
    for function in (compiled, model.loss_sum):
        model.zero_grad()
        function(batch, targets).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names
    tiny_llama(dtype=torch.float32).load_state_dict(model.state_dict(), strict=True)
