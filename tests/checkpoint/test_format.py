"""The state file: what goes in comes out, and nothing that was altered is believed."""

from __future__ import annotations

import random
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_c4.checkpoint.format import (
    FOOTER_BYTES,
    MAGIC,
    VERSION,
    DamagedState,
    read_index,
    read_state,
    write_state,
)
from llama_c4.config.errors import CheckpointError
from llama_c4.runtime.seeding import restore_rng_state, rng_state

HEADER = {"recipe_identity": "ab", "config": "optim:\n  lr: 0.001  # η\n"}
PROGRESS = {"update": 3, "micro_step": 1, "sequences": 17}


def write(path: Path, parts: dict[str, Any], **more: Any) -> Path:
    write_state(path, parts, header=HEADER, progress=PROGRESS, **more)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "state.pt", {"engine": {"w": torch.arange(1000.0)}})


def with_footer(payload: bytes, index: bytes, /, *, version: int = VERSION, **lies: int) -> bytes:
    """A file with right checksums, whatever it says."""
    lengths = {"index": len(index), "payload": len(payload)} | lies
    head = struct.pack("<8sIIQI", MAGIC, version, lengths["index"], lengths["payload"], zlib.crc32(index))
    body = payload + index + head + struct.pack("<I", zlib.crc32(head))
    return body + sha256(body).digest()


def parts_of(path: Path) -> tuple[bytes, bytes]:
    """Payload and index of a good file."""
    data = path.read_bytes()
    index_bytes, payload_bytes = struct.unpack_from("<IQ", data, len(data) - FOOTER_BYTES + 12)
    return data[:payload_bytes], data[payload_bytes : payload_bytes + index_bytes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_of_every_dtype_come_back_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).mul(3).to(dtype)
    empty = torch.empty(0, 4, dtype=dtype)
    state = read_state(write(tmp_path / "s.pt", {"engine": {"a": tensor, "b": [empty, tensor[0, 0]]}}))
    found = state.parts["engine"]
    assert found["a"].dtype == dtype and torch.equal(found["a"], tensor)
    assert found["b"][0].shape == (0, 4) and torch.equal(found["b"][1], tensor[0, 0])


def test_plain_values_come_back_equal(tmp_path: Path) -> None:
    part = {"n": 2**63, "x": 0.1, "s": "η", "none": None, "yes": True, "list": [1, (2, 3.5)], 7: {"deep": -1}}
    state = read_state(write(tmp_path / "s.pt", {"loader": part}))
    assert state.parts["loader"] == part and type(state.parts["loader"]["yes"]) is bool
    assert (state.header, state.progress, state.kind) == (HEADER, PROGRESS, "ordinary")


def test_torch_reads_the_file_as_it_is_without_executing_code(path: Path) -> None:
    payload = torch.load(path, weights_only=True)
    assert torch.equal(payload["parts"]["engine"]["w"], torch.arange(1000.0))
    assert payload["index"]["progress"] == PROGRESS


def test_the_index_is_read_without_the_payload(path: Path) -> None:
    state = read_index(path)
    assert (state.header, state.progress, state.parts) == (HEADER, PROGRESS, {})


def test_a_view_is_saved_without_the_storage_behind_it(tmp_path: Path) -> None:
    large = torch.randn(1_000_000)
    path = write(tmp_path / "s.pt", {"engine": {"view": large[10:20], "column": large.view(1000, 1000)[:, 3]}})
    assert path.stat().st_size < 20_000
    assert torch.equal(read_state(path).parts["engine"]["view"], large[10:20])


def test_a_requires_grad_parameter_is_saved_as_a_plain_tensor(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    found = read_state(write(tmp_path / "s.pt", {"engine": OrderedDict(w=weight)})).parts["engine"]
    assert type(found) is dict and type(found["w"]) is torch.Tensor and not found["w"].requires_grad


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"a": np.float64(1.0)}, "engine.a is a numpy.float64"),
        ({"a": [1, {"b": object()}]}, "engine.a.1.b is a builtins.object"),
        ({(1, 2): 3}, "engine has the key (1, 2)"),
        ({"_orig_mod.w": torch.ones(1)}, "of a compiled module"),
        ({"layers._orig_mod.w": 1}, "of a compiled module"),
    ],
)
def test_what_could_not_be_read_back_everywhere_is_not_written(tmp_path: Path, part: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"state|compiled") as caught:
        write(tmp_path / "s.pt", {"engine": part})
    assert named in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_reading_leaves_the_global_random_numbers_alone(path: Path) -> None:
    before, expected = rng_state(), (random.random(), torch.rand(1).item())
    restore_rng_state(before)
    read_state(path)
    assert (random.random(), torch.rand(1).item()) == expected


def flipped(position: int) -> Callable[[bytes], bytes]:
    """Invert one bit of the byte at a position, negative from the end."""

    def damage(data: bytes) -> bytes:
        at = position % len(data)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return damage


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in the payload": lambda data: data[: len(data) // 2],
    "cut in the footer": lambda data: data[:-10],
    "footer gone": lambda data: data[:-FOOTER_BYTES],
    "first bytes gone": lambda data: data[3:],
    "flipped first byte": flipped(0),
    "flipped weight": flipped(2000),
    "flipped index": flipped(-FOOTER_BYTES - 5),
    "flipped magic": flipped(-FOOTER_BYTES),
    "flipped length": flipped(-FOOTER_BYTES + 16),
    "flipped digest": flipped(-1),
    "bytes added": lambda data: data + b"\0" * 7,
    "bytes added before the footer": lambda data: data[:-FOOTER_BYTES] + b"x" + data[-FOOTER_BYTES:],
    "zeros": lambda data: bytes(len(data)),
    "text": lambda data: b"update,loss\n" * 100,
    "another archive": lambda data: b"PK\x03\x04" + bytes(500),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_with_the_file_and_the_reason(path: Path, name: str) -> None:
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with pytest.raises(DamagedState) as caught:
        read_state(path)
    assert str(path) in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_anywhere_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write(tmp_path_factory.mktemp("s") / "s.pt", {"engine": {"w": torch.arange(50.0)}})
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_state(path)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_shorter_file_is_taken_for_a_state(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write(tmp_path_factory.mktemp("s") / "s.pt", {"engine": {"w": torch.arange(50.0)}})
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    for read in (read_state, read_index):
        with pytest.raises(DamagedState):
            read(path)


@pytest.mark.parametrize(("version", "age"), [(VERSION + 1, "newer"), (99, "newer"), (1, "older"), (0, "older")])
def test_another_version_is_refused_and_is_not_taken_for_damage(path: Path, version: int, age: str) -> None:
    path.write_bytes(with_footer(*parts_of(path), version=version))
    with pytest.raises(CheckpointError, match=f"version {version}, {age} than the 2") as caught:
        read_state(path)
    assert not isinstance(caught.value, DamagedState)


@pytest.mark.parametrize("lengths", [{"payload": 2**63}, {"index": 2**32 - 1}, {"payload": 0}, {"payload": 10}])
def test_lengths_that_do_not_fit_the_file_are_not_followed(path: Path, lengths: dict[str, int]) -> None:
    path.write_bytes(with_footer(*parts_of(path), **lengths))
    with pytest.raises(DamagedState, match="bytes where its footer says"):
        read_index(path)


class Malice:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def test_code_in_a_payload_is_refused_and_not_executed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"index": {}, "parts": Malice()}, tmp_path / "evil.pt")
    path.write_bytes(with_footer((tmp_path / "evil.pt").read_bytes(), parts_of(path)[1]))
    with pytest.raises(CheckpointError, match="was not written by llama_c4"):
        read_state(path)
    assert not (tmp_path / "executed").exists()


def test_a_payload_under_a_foreign_index_is_refused(path: Path) -> None:
    payload, index = parts_of(path)
    path.write_bytes(with_footer(payload, index.replace(b'"update":3', b'"update":4')))
    with pytest.raises(CheckpointError, match="not the one that its index describes"):
        read_state(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.pt: cannot be read \(No such file"):
        read_state(tmp_path / "gone.pt")


def test_an_index_that_a_zip_reader_could_not_pass_over_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="index of a state has"):
        write_state(tmp_path / "s.pt", {}, header={"config": "x" * 70_000}, progress=PROGRESS)
    write_state(tmp_path / "s.pt", {"a": {}}, header={"config": "x" * 59_000}, progress=PROGRESS)
    assert torch.load(tmp_path / "s.pt", weights_only=True)["parts"] == {"a": {}}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    tensor = torch.randn(100, device="cuda")
    found = read_state(write(tmp_path / "s.pt", {"engine": {"w": tensor[3:50]}})).parts["engine"]["w"]
    assert found.device.type == "cpu" and torch.equal(found, tensor[3:50].cpu())
