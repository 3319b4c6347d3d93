"""The read side of the token cache: complete reads over shards, and every kind of damage found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_c4.config.errors import DataError
from llama_c4.data.cache import MANIFEST, TokenCache, manifest_identity, partial_path
from tests.data.small_cache import SHARD_TOKENS, TRAIN_TOKENS, small_tokens, write_cache


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return write_cache(tmp_path / "cache")


def edit_manifest(path: Path, *, sign: bool, **changes: Any) -> None:
    manifest = {**json.loads((path / MANIFEST).read_text()), **changes}
    if sign:
        manifest["identity"] = manifest_identity(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("start", "count"), [(0, 129), (0, 1), (10, 2), (11, 11), (5, 100), (128, 1), (129, 0), (40, 0)]
)
def test_a_read_gives_the_tokens_whatever_borders_of_shards_it_crosses(
    cache: TokenCache, start: int, count: int
) -> None:
    whole = small_tokens(TRAIN_TOKENS, seed=1)
    assert np.array_equal(cache.train.read(start, count), whole[start : start + count])
    out = np.zeros(count, np.uint16)
    assert cache.train.read(start, count, out) is out
    assert np.array_equal(out, whole[start : start + count])


def test_blocks_are_shifted_by_one_token_and_share_their_look_ahead(cache: TokenCache) -> None:
    whole, length = small_tokens(TRAIN_TOKENS, seed=1), 4
    assert cache.train.num_blocks(length) == 32
    for block in range(32):
        tokens = cache.train.read(block * length, length + 1)
        assert np.array_equal(tokens[1:], whole[block * length + 1 : (block + 1) * length + 1])


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_number_of_full_blocks_counts_the_look_ahead_token(tmp_path: Path, tokens: int, blocks: int) -> None:
    cache = write_cache(tmp_path / "c", train=small_tokens(tokens))
    assert cache.train.num_blocks(4) == blocks


def test_a_read_is_complete_even_if_the_system_returns_short_ones(
    cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Short:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def seek(self, place: int) -> None:
            self.file.seek(place)

        def readinto(self, place: memoryview) -> int:
            return self.file.readinto(place[:3])  # an odd number, so that a token is torn

    true_open = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args, **kw: Short(true_open(self, *args, **kw)))
    assert np.array_equal(cache.train.read(3, 100), small_tokens(TRAIN_TOKENS, seed=1)[3:103])


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 130), (129, 1), (5, -1)])
def test_a_range_outside_the_split_is_a_wrong_argument(cache: TokenCache, start: int, count: int) -> None:
    with pytest.raises(ValueError, match="split of 129 tokens"):
        cache.train.read(start, count)


@pytest.mark.parametrize("out", [np.zeros(4, np.int16), np.zeros(5, np.uint16), np.zeros(8, np.uint16)[::2]])
def test_a_buffer_of_another_type_or_shape_is_refused(cache: TokenCache, out: np.ndarray) -> None:
    with pytest.raises(ValueError, match="contiguous uint16"):
        cache.train.read(0, 4, out)


def test_a_shard_that_shrinks_after_opening_is_an_error_that_names_it(cache: TokenCache) -> None:
    shard = cache.train.shards[2].path
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=rf"{shard.name}: ends before token 11"):
        cache.train.read(0, 129)


def test_opening_finds_a_truncated_or_missing_shard_without_hashing(cache: TokenCache) -> None:
    shard = cache.train.shards[1].path
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{shard.name}: 21 bytes where the manifest says 22"):
        TokenCache.open(cache.path)
    shard.unlink()
    with pytest.raises(DataError, match=f"{shard.name}: the shard cannot be read"):
        TokenCache.open(cache.path)


def test_verification_finds_one_altered_bit(cache: TokenCache) -> None:
    shard = cache.validation.shards[0].path
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    TokenCache.open(cache.path)
    with pytest.raises(DataError, match=f"{shard.name}: sha256"):
        TokenCache.open(cache.path, verify=True)


@pytest.mark.parametrize(
    ("changes", "sign", "message"),
    [
        ({"vocab_size": 99}, False, "was edited after the preparation"),
        ({"identity": "0" * 64}, False, "was edited after the preparation"),
        ({"version": 2}, True, "version 2, but this program reads version 1"),
        ({"dtype": "int16-le"}, True, "dtype 'int16-le'"),
        ({"format": "other"}, True, "not the manifest of a token cache"),
        ({"splits": {}}, True, "not a manifest of version 1"),
        ({"shard_tokens": 12}, True, "do not add up"),
    ],
)
def test_an_edited_or_unknown_manifest_is_refused(
    cache: TokenCache, changes: dict[str, Any], sign: bool, message: str
) -> None:
    edit_manifest(cache.path, sign=sign, **changes)
    with pytest.raises(DataError, match=message):
        TokenCache.open(cache.path)


def test_a_manifest_names_files_of_its_own_folder_only(cache: TokenCache) -> None:
    splits = json.loads((cache.path / MANIFEST).read_text())["splits"]
    splits["train"]["shards"][0]["file"] = "../secret"
    edit_manifest(cache.path, sign=True, splits=splits)
    with pytest.raises(DataError, match="not the name of a file in the cache's folder"):
        TokenCache.open(cache.path)


def test_a_manifest_that_is_no_json_is_refused(cache: TokenCache) -> None:
    (cache.path / MANIFEST).write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        TokenCache.open(cache.path)


def test_a_missing_cache_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no token cache there; make it with `llama-c4 prepare … data.cache_dir="):
        TokenCache.open(tmp_path / "none")
    with pytest.raises(DataError, match="is no token cache; name another folder"):
        TokenCache.open(tmp_path)


def test_an_unfinished_preparation_is_never_taken_for_a_cache(cache: TokenCache) -> None:
    cache.path.rename(partial_path(cache.path))
    with pytest.raises(DataError, match=r"its preparation is incomplete \(cache.partial\)"):
        TokenCache.open(cache.path)


def test_the_identity_depends_on_every_shard_and_not_on_the_order_of_keys(tmp_path: Path) -> None:
    one, two = write_cache(tmp_path / "1"), write_cache(tmp_path / "2")
    other = write_cache(tmp_path / "3", validation=small_tokens(30, seed=9))
    assert one.identity == two.identity != other.identity
    assert manifest_identity(dict(reversed(one.manifest.items()))) == one.identity
    assert one.shard_tokens == SHARD_TOKENS
