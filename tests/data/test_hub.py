"""The hub: what is asked of `datasets`, and that breaks neither lose nor double a row."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from llama_c4.config.errors import DataError
from llama_c4.data import hub
from llama_c4.data.documents import Reading
from llama_c4.data.hub import READ_DELAYS_SECONDS, HubDataset, download_tokenizer

REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
ROWS = 1000
EXPECTED = [f"document {number}" for number in range(ROWS)]


def rows_that_break(breaks: dict[int, list[Exception]]) -> Callable[[], Iterator[dict[str, Any]]]:
    """Rows of a stream; before row n the exceptions of `breaks[n]` are raised, one at each try."""

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(ROWS):
            if breaks.get(number):
                raise breaks[number].pop(0)
            yield {"text": f"document {number}", "url": "u", "timestamp": "t"}

    return rows


class FakeHub:
    """Stands in the place of `load_dataset` and remembers what it was asked for."""

    def __init__(self, rows: Callable[[], Iterator[dict[str, Any]]], *, plain: bool = False) -> None:
        self.rows = rows
        self.plain = plain
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls.append((*args, options))
        return self.rows() if self.plain else datasets.IterableDataset.from_generator(self.rows)


def read(fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, waits: list[float] | None = None) -> list[str]:
    monkeypatch.setattr(datasets, "load_dataset", fake)
    monkeypatch.setattr(hub, "BOOKMARK_ROWS", 100)
    source = HubDataset("allenai/c4", "en", revision=REVISION, sleep=(waits if waits is not None else []).append)
    return [document.text.decode() for document in source.documents("train", Reading())]


def test_the_pinned_revision_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(rows_that_break({}))
    assert read(fake, monkeypatch) == EXPECTED
    assert fake.calls == [("allenai/c4", "en", {"split": "train", "streaming": True, "revision": REVISION})]


@pytest.mark.parametrize("plain", [False, True])
def test_a_stream_that_breaks_again_and_again_gives_every_row_once(
    monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    breaks: dict[int, list[Exception]] = {
        150: [FileNotFoundError("403"), TimeoutError()],
        333: [ConnectionError("reset")],
        620: [OSError("stale")],
        621: [EOFError()],
        999: [ConnectionResetError()],
    }
    waits: list[float] = []
    assert read(FakeHub(rows_that_break(breaks), plain=plain), monkeypatch, waits) == EXPECTED
    assert waits == [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_a_continued_stream_is_not_read_from_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    read_rows: list[int] = []
    breaks = [ConnectionError("reset")]
    files = [list(range(start, start + 50)) for start in range(0, ROWS, 50)]

    def rows(numbers: list[list[int]]) -> Iterator[dict[str, Any]]:
        for number in itertools.chain.from_iterable(numbers):
            read_rows.append(number)
            if number == 750 and breaks:
                raise breaks.pop()
            yield {"text": f"document {number}"}

    def in_files(*_: Any, **__: Any) -> datasets.IterableDataset:
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"numbers": files})

    assert read(in_files, monkeypatch) == EXPECTED
    assert len(read_rows) <= ROWS + 100 + 50  # a bookmark's distance and a file


def test_a_library_that_resumes_at_the_wrong_place_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(rows_that_break({555: [ConnectionError("reset")]}))
    monkeypatch.setattr(datasets.IterableDataset, "load_state_dict", lambda self, state: None)  # as if from the top
    assert read(fake, monkeypatch) == EXPECTED


def test_a_hub_that_stays_away_ends_in_a_clear_error_after_waiting_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    with pytest.raises(
        DataError, match=r"broke off after row 400 \(ConnectionError: gone\); run the same command again"
    ):
        read(FakeHub(rows_that_break({400: [ConnectionError("gone")] * 50})), monkeypatch, waits)
    assert waits == list(READ_DELAYS_SECONDS)


def test_an_error_that_no_waiting_mends_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError("no such config"), datasets.exceptions.DatasetNotFoundError("no such data set")):
        waits: list[float] = []
        with pytest.raises(DataError, match="no such"):
            read(FakeHub(rows_that_break({0: [error]}), plain=True), monkeypatch, waits)
        assert waits == []


def test_rows_without_a_text_are_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "a"}, {"text": None}, {"url": "u"}, {"text": ""}, {"text": "b"}]
    monkeypatch.setattr(datasets, "load_dataset", FakeHub(lambda: iter(rows), plain=True))
    reading = Reading()
    documents = HubDataset("allenai/c4", "en", revision=REVISION).documents("validation", reading)
    assert [document.text for document in documents] == [b"a", b"", b"b"]
    assert reading.seen.skipped == {"validation": {"null_text": 1, "missing_text": 1}}


def test_stopping_early_closes_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    def rows() -> Iterator[dict[str, Any]]:
        try:
            yield from ({"text": str(number)} for number in range(ROWS))
        finally:
            closed.append(True)

    monkeypatch.setattr(datasets, "load_dataset", FakeHub(rows, plain=True))
    documents = HubDataset("allenai/c4", "en", revision=REVISION).documents("train", Reading())
    next(documents)
    documents.close()
    assert closed == [True]


def test_offline_the_hub_fails_at_once_and_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    started = time.monotonic()
    with pytest.raises(DataError, match=r"cannot be read from the hub .*OfflineMode.*data=c4_files data.files="):
        list(HubDataset("allenai/c4", "en", revision=REVISION).documents("train", Reading()))
    with pytest.raises(DataError, match=r"data.tokenizer=owner/none .*data=sample"):
        download_tokenizer("owner/none", REVISION)
    assert time.monotonic() - started < 5


def test_a_tokenizer_comes_with_the_commit_that_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "snapshots" / REVISION / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"{}")
    asked: list[Any] = []

    def fake(*args: Any, **options: Any) -> str:
        asked.append((args, options))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake)
    assert download_tokenizer("owner/name", "main") == (b"{}", REVISION)
    assert asked == [(("owner/name", "tokenizer.json"), {"revision": "main"})]
