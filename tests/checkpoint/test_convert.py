"""Hugging Face folders: equal logits at every position, equal bits on the way back, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_c4.checkpoint.convert import export_hugging_face, import_hugging_face
from llama_c4.config.errors import CheckpointError
from llama_c4.model.llama import Llama, build_model
from tests.tiny_llama import llama_config

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

ODD = {
    "vocab_size": 61, "context_length": 256, "num_layers": 3, "hidden_size": 48, "num_heads": 6,
    "intermediate_size": 80, "rope_theta": 5123.0, "norm_eps": 3e-3, "init_std": 0.25,
}  # fmt: skip


def odd_model(**changes: Any) -> Llama:
    """Nothing at its default, and norm scales that are not 1."""
    config = llama_config(**(ODD | changes))
    model = build_model(config, seed=7, device="cpu", dtype=torch.float32, attention="auto", loss="plain")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.3, generator=random)
    return model


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Llama, Path]:
    model = odd_model()
    export_hugging_face(model.state_dict(), model.config, tmp_path / "out", eos_id=2)
    return model, tmp_path / "out"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_transformers_computes_the_same_logits_at_every_position(exported: tuple[Llama, Path]) -> None:
    model, folder = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(0, 61, (2, 256), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (theirs(tokens).logits - model(tokens)).abs().amax(dim=(0, 2))
    assert difference.shape == (256,)
    assert difference.max() < 1e-4


def test_transformers_computes_the_same_loss(exported: tuple[Llama, Path]) -> None:
    model, folder = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for seed in range(10):
        tokens = torch.randint(0, 61, (1, 257), generator=torch.Generator().manual_seed(seed))
        inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        with torch.no_grad():
            loss = theirs(inputs, labels=targets, shift_labels=targets).loss
            torch.testing.assert_close(model.loss_sum(inputs, targets) / 256, loss, rtol=1e-5, atol=0)


def test_our_weights_and_configuration_come_back_bit_for_bit(exported: tuple[Llama, Path]) -> None:
    model, folder = exported
    config, state = import_hugging_face(folder)
    assert config == model.config
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_what_transformers_saved_again_comes_back_bit_for_bit(exported: tuple[Llama, Path], tmp_path: Path) -> None:
    model, folder = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert (tmp_path / "again" / "model.safetensors.index.json").exists()
    config, state = import_hugging_face(tmp_path / "again")
    assert config == model.config
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_every_setting_that_changes_a_logit_stands_in_the_exported_configuration(exported: tuple[Llama, Path]) -> None:
    _, folder = exported
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61, "hidden_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8,
        "intermediate_size": 80, "rms_norm_eps": 3e-3, "rope_theta": 5123.0, "tie_word_embeddings": True,
        "max_position_embeddings": 256, "hidden_act": "silu", "bos_token_id": 2, "eos_token_id": 2,
        "dtype": "float32", "rope_parameters": {"rope_type": "default", "rope_theta": 5123.0},
        "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def test_the_tied_head_is_written_once(exported: tuple[Llama, Path]) -> None:
    model, folder = exported
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert sum(t.numel() for t in tensors.values()) == sum(p.numel() for p in model.parameters())


def test_the_tokenizer_travels_with_the_weights(shared: Path, tmp_path: Path) -> None:
    model = odd_model(vocab_size=32_000, hidden_size=8, num_heads=2, intermediate_size=8)
    source = shared / "data" / "tokenizer" / "tokenizer.json"
    out = tmp_path / "out"
    export_hugging_face(model.state_dict(), model.config, out, tokenizer_json=source, eos_token="</s>", eos_id=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == 256
    assert tokenizer.decode(tokenizer("a small model").input_ids, skip_special_tokens=True).strip() == "a small model"
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 2


def test_an_existing_folder_is_not_overwritten(exported: tuple[Llama, Path]) -> None:
    model, folder = exported
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already and is not overwritten"):
        export_hugging_face(odd_model(rope_theta=1.0).state_dict(), model.config, folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    model = odd_model()
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_hugging_face(
            model.state_dict(), model.config, tmp_path / "out", tokenizer_json=tmp_path / "none.json", eos_token="x"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_another_configuration_is_not_exported(tmp_path: Path) -> None:
    state = dict(odd_model().state_dict())
    wider = llama_config(**(ODD | {"intermediate_size": 96}))
    with pytest.raises(
        CheckpointError, match=r"w_gate\.weight has shape \[80, 48\], the configuration says \[96, 48\]"
    ):
        export_hugging_face(state, wider, tmp_path / "out")
    del state["norm.weight"]
    with pytest.raises(CheckpointError, match=r"1 tensors missing, 0 unknown: lacks norm\.weight"):
        export_hugging_face(state, odd_model().config, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is fewer than num_attention_heads=6"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            "rope scaling of type 'llama3'",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling of type 'linear'"),
        ({"head_dim": 16}, "head_dim=16 times 6 heads is not hidden_size=48"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
    ],
)
def test_a_model_that_ours_cannot_represent_is_refused_with_the_reason(
    exported: tuple[Llama, Path], changes: dict[str, Any], reason: str
) -> None:
    _, folder = exported
    edit(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        import_hugging_face(folder)
    assert "cannot represent the model" in str(caught.value)
    assert reason in str(caught.value)


def test_a_configuration_of_transformers_4_is_read(exported: tuple[Llama, Path]) -> None:
    model, folder = exported
    edit(folder, rope_parameters=None, head_dim=None, rope_theta=77.0)
    config, _ = import_hugging_face(folder)
    assert config.rope_theta == 77.0
    assert config.num_heads == model.config.num_heads


def test_a_vocabulary_beyond_uint16_is_refused(exported: tuple[Llama, Path]) -> None:
    _, folder = exported
    edit(folder, vocab_size=128_256)
    with pytest.raises(CheckpointError, match="vocab_size"):
        import_hugging_face(folder)


def test_a_head_of_its_own_in_the_weights_is_refused(exported: tuple[Llama, Path]) -> None:
    model, folder = exported
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": model.embedding.weight.detach().clone()}, folder / "model.safetensors")
    assert import_hugging_face(folder)[0] == model.config
    save_file(tensors | {"lm_head.weight": model.embedding.weight.detach() + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        import_hugging_face(folder)


def test_half_precision_weights_are_widened_exactly(exported: tuple[Llama, Path]) -> None:
    model, folder = exported
    tensors = {name: t.bfloat16() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    _, state = import_hugging_face(folder)
    assert state["norm.weight"].dtype == torch.float32
    assert torch.equal(state["norm.weight"], model.norm.weight.bfloat16().float())


@pytest.mark.parametrize("damage", ["missing", "truncated", "config", "surplus"])
def test_damage_is_named_with_the_file(exported: tuple[Llama, Path], damage: str) -> None:
    _, folder = exported
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "config":
        (folder / "config.json").write_text("{")
    else:
        save_file(load_file(weights) | {"model.extra": torch.zeros(1)}, weights)
    with pytest.raises(CheckpointError, match=str(folder)):
        import_hugging_face(folder)


def test_the_package_does_not_import_transformers() -> None:
    import subprocess
    import sys

    code = "import sys, llama_c4.checkpoint.convert; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
