"""The Hugging Face hub: the adapter of `datasets` (streaming) and of the download of a tokenizer.

Both libraries are imported where they are used: a run on local files must not wait seconds for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_c4.config.errors import DataError
from llama_c4.data.documents import Document, Reading, SkippedRow, SourceFile, text_of_row

OPEN_DELAYS_SECONDS = (1.0,)
"""Waits before opening a stream again that has not given a row yet; the hub's own client has retried by then."""
READ_DELAYS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)
"""Waits after a break in the middle; a new row starts the count anew."""
BOOKMARK_ROWS = 1000
"""Rows between two places from which a broken stream can be opened again."""

_WITHOUT_THE_HUB = (
    "without the network use local files (data=c4_files data.files=/path/to/en data.tokenizer=/path/to/tokenizer.json) "
    "or the embedded corpus (data=sample)"
)


class HubDataset:
    """The document source over a streamed data set of the hub.

    Args:
        dataset, config: Name and configuration, such as `allenai/c4` and `en`.
        revision: Commit, 40 hexadecimal digits: a branch would change under our feet.
        sleep: Waits so many seconds between two tries.
    """

    def __init__(
        self, dataset: str, config: str, *, revision: str, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._dataset = dataset
        self._config = config
        self._revision = revision
        self._sleep = sleep

    def settings(self) -> dict[str, object]:
        return {
            "kind": "c4",
            "dataset": self._dataset,
            "dataset_config": self._config,
            "revision": self._revision,
        }

    def files(self, split: str) -> list[SourceFile] | None:
        return None

    def documents(self, split: str, reading: Reading) -> Generator[Document, None, None]:
        """Documents of a split in the order of the hub's files, each once, over any number of breaks.

        Raises:
            DataError: The hub cannot be reached, or breaks off and stays away for minutes.
        """
        with contextlib.closing(_rows(lambda: self._open(split), self._name(split), self._sleep)) as rows:
            for row in rows:
                try:
                    text = text_of_row(row)
                except SkippedRow as skipped:
                    reading.seen = reading.seen.skip(split, skipped.kind)
                    continue
                reading.documents += 1
                yield Document(text, reading.seen)

    def _name(self, split: str) -> str:
        return f"{self._dataset} ({self._config}, {split}, revision {self._revision})"

    def _open(self, split: str) -> Any:
        import datasets

        return datasets.load_dataset(self._dataset, self._config, split=split, streaming=True, revision=self._revision)


Row = Mapping[str, Any]


def _rows(open_stream: Callable[[], Any], name: str, sleep: Callable[[float], None]) -> Generator[Row, None, None]:
    """Every row of a stream once: after a break it is opened again and continued."""
    place = _Place()
    failures = 0
    while True:
        given = place.given
        try:
            yield from place.rows(open_stream())
            return
        except _Misplaced:
            continue
        except Exception as error:
            failures = 1 if place.given > given else failures + 1
            delays = READ_DELAYS_SECONDS if place.given else OPEN_DELAYS_SECONDS
            if not _is_transient(error) or failures > len(delays):
                raise DataError(_fault(name, place.given, error)) from error
            sleep(delays[failures - 1])


class _Misplaced(Exception):
    """A stream that was told where to resume began somewhere else."""


@dataclass(frozen=True)
class _Bookmark:
    """A place in a stream: its row number, what `datasets` must hear to get there, and the row that stands there."""

    row: int
    state: dict[str, Any]
    digest: str


class _Place:
    """How far a stream was read, and how to get there again without reading all that lies before.

    Attributes:
        given: Rows handed out.
    """

    def __init__(self) -> None:
        self.given = 0
        self._bookmark: _Bookmark | None = None

    def rows(self, stream: Any) -> Iterator[Row]:
        """The rows that were not handed out yet.

        `datasets` has releases whose second resume starts from the top without a word, so the first row after a resume
        is compared with the one that stood there; where it is another, the stream is read from the top.
        """
        bookmark, resumable, state = self._bookmark, hasattr(stream, "load_state_dict"), None
        if bookmark is not None:
            stream.load_state_dict(bookmark.state)
        first = bookmark.row if bookmark is not None else 0
        for number, row in enumerate(stream, start=first):
            if bookmark is not None and number == first and _digest(row) != bookmark.digest:
                self._bookmark = None
                raise _Misplaced
            if state is not None:
                self._bookmark, state = _Bookmark(number, state, _digest(row)), None
            if number >= self.given:
                self.given = number + 1
                yield row
            if resumable and (number + 1) % BOOKMARK_ROWS == 0:
                state = stream.state_dict()


def _digest(row: Row) -> str:
    return hashlib.sha256(repr(row.get("text")).encode("utf-8", "surrogatepass")).hexdigest()


_PERMANENT = {"DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError"}
_NETWORK_LIBRARIES = {"aiohttp", "fsspec", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3"}


def _is_transient(error: Exception) -> bool:
    """Whether a later try may succeed: a refused or broken connection, a time-out, what a server in trouble answers.

    A busy server's 403 arrives as a missing file, so that one is transient too.
    """
    kinds = type(error).__mro__
    if any(kind.__name__ in _PERMANENT for kind in kinds) or "OfflineModeIsEnabled" in f"{error!r} {error.__cause__!r}":
        return False
    return isinstance(error, OSError | EOFError) or any(
        kind.__module__.partition(".")[0] in _NETWORK_LIBRARIES for kind in kinds
    )


def _fault(name: str, given: int, error: Exception) -> str:
    cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if not given:
        return f"{name}: cannot be read from the hub ({cause}); {_WITHOUT_THE_HUB}"
    return (
        f"{name}: broke off after row {given} ({cause}); run the same command again, it continues after the last "
        f"complete shard; {_WITHOUT_THE_HUB}"
    )


def download_tokenizer(repository: str, revision: str | None) -> tuple[bytes, str]:
    """Fetch a repository's tokenizer.json (from the local hub cache where it is there).

    Returns:
        Its bytes, and the commit that they are of.
    Raises:
        DataError: The hub cannot be reached, or has no such file.
    """
    import huggingface_hub

    try:
        path = Path(huggingface_hub.hf_hub_download(repository, "tokenizer.json", revision=revision))
        return path.read_bytes(), path.parent.name
    except Exception as error:  # whatever the client of the day raises
        name = f"data.tokenizer={repository} (revision {revision})"
        raise DataError(_fault(name, 0, error)) from error
