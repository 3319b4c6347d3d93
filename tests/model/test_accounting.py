"""Counts: the published sizes, a model on the meta device, and measured memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from llama_c4.config.compose import compose_config
from llama_c4.config.schema import LlamaConfig
from llama_c4.model import accounting
from llama_c4.model.llama import Llama

PRESETS = {
    "20m": (20_403_520, 10_163_520),
    "50m": (48_507_392, 32_123_392),
    "90m": (91_605_120, 71_125_120),
    "250m": (251_943_360, 221_223_360),
    "500m": (516_814_080, 475_854_080),
}

MEASURE = """
import gc, sys, torch
from llama_c4.runtime.memory import peak_memory_bytes
from llama_c4.config.schema import LlamaConfig
from llama_c4.model.llama import build_model
torch.set_num_threads(1)
def train(layers, width, precision, loss):
    config = LlamaConfig(name="llama", vocab_size=4096, context_length=256, num_layers=layers, hidden_size=width,
        num_heads=4, intermediate_size=3 * width, rope_theta=1e4, norm_eps=1e-5, init_std=0.02)
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = build_model(config, seed=0, device="cpu", dtype=dtype, attention="auto", loss=loss)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 4096, (8, 256))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            total = model.loss_sum(tokens, tokens)
        total.backward(); optimizer.step(); optimizer.zero_grad()
peak = lambda: peak_memory_bytes(torch.device("cpu"))  # ru_maxrss starts from that of the parent
train(1, 8, *sys.argv[1:]); gc.collect()
before = peak(); train(6, 256, *sys.argv[1:]); print(peak() - before)
"""


def preset(name: str) -> LlamaConfig:
    return compose_config([f"model={name}"]).model


@pytest.mark.parametrize(("name", "counts"), PRESETS.items())
def test_presets_have_their_published_parameter_counts(name: str, counts: tuple[int, int]) -> None:
    config = preset(name)
    assert (accounting.num_parameters(config), accounting.num_non_embedding(config)) == counts


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_on_the_meta_device_has_the_counted_parameters(name: str) -> None:
    model = Llama(preset(name), attention="auto", loss="plain", device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name][0]
    assert sum(t.numel() for t in model.state_dict().values()) == PRESETS[name][0]


def test_a_target_of_the_20m_preset_takes_154_million_operations() -> None:
    assert accounting.flops_per_target(preset("20m")) == 6 * 20_403_520 + 12 * 8 * 1024 * 320
    assert round(accounting.flops_per_target(preset("20m")) / 1e6) == 154


def test_the_chunked_loss_is_chosen_where_whole_logits_are_large() -> None:
    def chosen(device: str, batch: int, context: int, vocabulary: int) -> str:
        return accounting.choose_loss(
            device_type=device, micro_batch_size=batch, context_length=context, vocab_size=vocabulary
        )

    assert chosen("cpu", 4, 1024, 32_000) == "chunked"
    assert chosen("cpu", 2, 128, 32_000) == "plain"  # one slice
    assert chosen("cuda", 128, 1024, 32_000) == "chunked"
    assert chosen("cuda", 4, 1024, 32_000) == "plain"  # 0.5 GB


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["plain", "chunked"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_the_memory_estimate_is_within_a_third_of_what_a_process_takes(precision: str, loss: str) -> None:
    command = [sys.executable, "-c", MEASURE, precision, loss]
    measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    config = LlamaConfig(
        name="llama", vocab_size=4096, context_length=256, num_layers=6, hidden_size=256, num_heads=4,
        intermediate_size=768, rope_theta=1e4, norm_eps=1e-5, init_std=0.02,
    )  # fmt: skip
    estimate = accounting.estimate_memory_bytes(config, micro_batch_size=8, precision=precision, loss=loss)
    assert 2 / 3 < estimate / measured < 4 / 3


def test_accounting_needs_no_torch() -> None:
    code = "import sys, llama_c4.model.accounting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_loss_walks_in_the_slices_that_the_estimate_assumes() -> None:
    from llama_c4.model import loss

    assert loss.CHUNK_ROWS is accounting.CHUNK_ROWS
    assert torch.device("cpu").type in accounting.CHUNK_ROWS
