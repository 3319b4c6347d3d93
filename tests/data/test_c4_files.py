"""Local C4 files: which are taken, in what order, and what bad rows and damaged archives do."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_c4.config.errors import DataError
from llama_c4.data.c4_files import C4Files, find_c4_files
from llama_c4.data.documents import Reading
from tests.data.small_corpus import write_rows


def texts_of(*files: Path) -> tuple[list[str], Reading]:
    """All texts of some files, and how they were read."""
    reading = Reading()
    source = C4Files(train=list(files), validation=[])
    return [document.text.decode() for document in source.documents("train", reading)], reading


def names(source: C4Files, split: str) -> list[str]:
    return [file.name for file in source.files(split) or []]


def touch(folder: Path, *file_names: str) -> None:
    for name in file_names:
        write_rows(folder / name, [name])


def test_only_the_clean_english_files_of_a_folder_are_taken(tmp_path: Path) -> None:
    train, validation = "c4-train.00000-of-01024.json.gz", "c4-validation.00000-of-00008.json.gz"
    touch(tmp_path, train, validation, "c4-train.00001-of-01024.json.gz.part", "c4-en-train.00000-of-00008.json.gz")
    touch(tmp_path, "c4-train.tfrecord-00000-of-01024", "README.json.gz", "c4-train.00002-of-01024.json")
    (tmp_path / "en.noclean").mkdir()
    touch(tmp_path / "en.noclean", "c4-train.00003-of-07168.json.gz")
    source = find_c4_files(str(tmp_path), None)
    assert (names(source, "train"), names(source, "validation")) == ([train], [validation])


def test_the_english_subfolder_of_a_whole_copy_is_taken(tmp_path: Path) -> None:
    for folder in ("en", "en.noclean", "realnewslike"):
        touch(tmp_path / folder, "c4-train.00000-of-00002.json.gz", "c4-validation.00000-of-00001.json.gz")
    texts, _ = texts_of(*find_c4_files(str(tmp_path), None)._paths["train"])
    assert texts == ["c4-train.00000-of-00002.json.gz"]
    assert find_c4_files(str(tmp_path), None)._paths["train"][0].parent.name == "en"


def test_files_are_read_by_number_whatever_the_listing_and_the_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, *(f"c4-train.{number}-of-12.json.gz" for number in (10, 2, 1)), "c4-validation.0-of-1.json.gz")
    expected = [f"c4-train.{number}-of-12.json.gz" for number in (1, 2, 10)]
    assert names(find_c4_files(str(tmp_path), None), "train") == expected
    assert names(find_c4_files(f"{tmp_path}/c4-train*", None), "train") == expected
    listing = Path.iterdir

    def reversed_listing(path: Path) -> Iterator[Path]:
        return iter(sorted(listing(path), reverse=True))

    monkeypatch.setattr(Path, "iterdir", reversed_listing)
    assert names(find_c4_files(str(tmp_path), None), "train") == expected


def test_two_files_of_one_number_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "c4-train.1-of-12.json.gz", "c4-train.00001-of-01024.json.gz")
    with pytest.raises(DataError, match="carry one number; keep one of them"):
        find_c4_files(str(tmp_path), None)


def test_a_glob_never_trains_on_the_validation_files(tmp_path: Path) -> None:
    touch(tmp_path, "c4-train.0-of-2.json.gz", "c4-train.1-of-2.json.gz", "c4-validation.0-of-1.json.gz")
    source = find_c4_files(f"{tmp_path}/*.json.gz", None)
    assert names(source, "train") == ["c4-train.0-of-2.json.gz", "c4-train.1-of-2.json.gz"]
    source = find_c4_files(f"{tmp_path}/*.json.gz", f"{tmp_path}/c4-train.1-*")
    assert names(source, "train") == ["c4-train.0-of-2.json.gz", "c4-validation.0-of-1.json.gz"]
    assert names(source, "validation") == ["c4-train.1-of-2.json.gz"]


def test_missing_files_say_which_setting_to_change(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.files=null: name the folder"):
        find_c4_files(None, None)
    with pytest.raises(DataError, match="no training files there"):
        find_c4_files(str(tmp_path), None)
    touch(tmp_path, "c4-train.0-of-2.json.gz")
    with pytest.raises(DataError, match=r"no validation files there; set data\.validation_files"):
        find_c4_files(str(tmp_path), None)
    with pytest.raises(DataError, match=r"data.validation_files=/none\*: no validation files"):
        find_c4_files(str(tmp_path), "/none*")


BAD_ROWS = {
    "not_utf8": b'{"text": "caf\xe9"}',
    "not_json": b'{"text": "no end',
    "not_an_object": b'["text"]',
    "missing_text": b'{"txt": "x"}',
    "null_text": b'{"text": null}',
    "text_not_a_string": b'{"text": 7}',
    "lone_surrogate": rb'{"text": "half \ud83d a pair"}',
}


def test_bad_rows_are_skipped_and_counted_by_kind_and_spoil_nothing(tmp_path: Path) -> None:
    rows = ["first", *BAD_ROWS.values(), b"[" * 100_000, "", b'{"text": "whole \\ud83d\\ude00"}', "last"]
    path = write_rows(tmp_path / "a.json.gz", rows)
    texts, reading = texts_of(path, write_rows(tmp_path / "b.json.gz", ["other", BAD_ROWS["null_text"]]))
    assert texts == ["first", "", "whole 😀", "last", "other"]
    assert reading.seen.skipped == {
        "a.json.gz": {**dict.fromkeys(BAD_ROWS, 1), "not_json": 2},
        "b.json.gz": {"null_text": 1},
    }
    assert reading.documents == 5


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    texts, reading = texts_of(write_rows(tmp_path / "a.json.gz", ["one", b"", b"  ", b"\r", "two"]))
    assert texts == ["one", "two"]
    assert reading.seen.skipped == {}


def test_raw_line_separators_of_unicode_survive(tmp_path: Path) -> None:
    line = '{"text": "a\u2028b\u2029c\u0085d"}'.encode()
    assert texts_of(write_rows(tmp_path / "a.json.gz", [line]))[0] == ["a\u2028b\u2029c\u0085d"]


def test_all_members_of_an_archive_are_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.json.gz", ["one"])
    path.write_bytes(path.read_bytes() + gzip.compress(b'{"text": "two"}\n') + gzip.compress(b'{"text": "three"}'))
    assert texts_of(path)[0] == ["one", "two", "three"]


def test_a_plain_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}')
    assert texts_of(tmp_path / "a.jsonl")[0] == ["one", "two"]


def test_a_line_of_forty_megabytes_is_read_whole(tmp_path: Path) -> None:
    long = "word and " * 4_500_000
    texts, _ = texts_of(write_rows(tmp_path / "a.json.gz", ["before", long, "behind"]))
    assert texts == ["before", long, "behind"]


def damaged(path: Path, kind: str) -> Path:
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        del content[len(content) * 6 // 10 :]
    elif kind == "flipped":
        content[len(content) // 2] ^= 0x10
    elif kind == "checksum":
        content[-6] ^= 1
    elif kind == "garbage behind":
        content += b"garbage"
    else:
        content[:2] = b"PK"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["truncated", "flipped", "checksum", "garbage behind", "no archive"])
def test_a_damaged_archive_is_an_error_that_names_the_file(tmp_path: Path, kind: str) -> None:
    path = damaged(write_rows(tmp_path / "c4.json.gz", [f"text {n} {n * n}" for n in range(2000)]), kind)
    with pytest.raises(DataError, match=r"c4.json.gz: the archive is truncated or corrupt .*; fetch the file again"):
        texts_of(path)


def test_files_are_recorded_with_size_and_hash_once_they_are_read_to_the_end(tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "1.json.gz", ["a", "b"]), write_rows(tmp_path / "2.json.gz", ["c", "d"])
    reading = Reading()
    documents = list(C4Files(train=[one, two], validation=[]).documents("train", reading))
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, two)]
    assert [file.sha256 for file in reading.seen.files] == hashes
    assert [file.num_bytes for file in reading.seen.files] == [one.stat().st_size, two.stat().st_size]
    assert [[file.sha256 for file in document.seen.files] for document in documents] == [
        [None],
        [None],
        [hashes[0], None],
        [hashes[0], None],
    ]
    assert reading.fraction == 1.0
