"""The shuffle buffer, and what documents know of the reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from llama_c4.data.documents import Document, Seen, SourceFile, shuffle_documents


def numbered(count: int) -> Iterator[Document]:
    """Documents 0, 1, …; each has seen as many skipped rows as its number."""
    seen = Seen()
    for number in range(count):
        yield Document(str(number).encode(), seen)
        seen = seen.skip("f", "null_text")


def shuffled(count: int, *, buffer_size: int, seed: int = 42) -> list[int]:
    return [int(document.text) for document in shuffle_documents(numbered(count), buffer_size=buffer_size, seed=seed)]


@pytest.mark.parametrize(("count", "buffer_size"), [(0, 5), (3, 5), (5, 5), (2500, 5), (2500, 1000), (50, 1)])
def test_a_shuffle_gives_every_document_once(count: int, buffer_size: int) -> None:
    assert Counter(shuffled(count, buffer_size=buffer_size)) == Counter(range(count))


def test_a_buffer_of_zero_or_one_keeps_the_order() -> None:
    assert shuffled(30, buffer_size=0) == shuffled(30, buffer_size=1) == list(range(30))


def test_the_order_depends_on_the_seed_and_nothing_else() -> None:
    assert shuffled(500, buffer_size=50) == shuffled(500, buffer_size=50)
    assert shuffled(500, buffer_size=50) != shuffled(500, buffer_size=50, seed=43)


def test_a_longer_corpus_begins_as_the_shorter_one_until_that_ends() -> None:
    assert shuffled(500, buffer_size=50)[:450] == shuffled(900, buffer_size=50)[:450]


def test_a_document_travels_far_only_backwards() -> None:
    order = shuffled(1000, buffer_size=10)
    assert all(number <= place + 10 for place, number in enumerate(order))


def test_a_shuffled_document_has_seen_what_was_read_before_it_was_handed_out() -> None:
    documents = list(shuffle_documents(numbered(30), buffer_size=10, seed=1))
    skipped = [document.seen.skipped.get("f", {}).get("null_text", 0) for document in documents]
    assert skipped == [*range(10, 30), *[29] * 10]


def test_what_was_seen_is_never_changed_behind_a_document() -> None:
    first = Seen().begin(SourceFile("a", 10))
    later = first.skip("a", "null_text").finish("00").begin(SourceFile("b", 20)).skip("a", "null_text")
    assert first == Seen(files=(SourceFile("a", 10),))
    assert later.files == (SourceFile("a", 10, "00"), SourceFile("b", 20))
    assert later.skipped == {"a": {"null_text": 2}}
