"""A block stream and its scalar state: the reader does the work, this says which stream it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_c4.config.errors import CheckpointError
from llama_c4.data.batch import Batch
from llama_c4.data.reader import ShuffledReader

Identity = dict[str, int | str | None]

_NAMES = {
    "cache_identity": "the token cache (data.cache_dir)",
    "context_length": "model.context_length",
    "shuffle_group_size": "data.shuffle_group_size",
    "buffer_size_mib": "data.buffer_size_mib",
    "total_blocks": "the budget in blocks, on which the order of loader v1 depends,",
    "seed": "runtime.seed",
}


class ShuffledStream:
    """The blocks of a cache in a seeded order; implements `BlockStream`.

    Args:
        reader: Gives the blocks at any positions.
        identity: Scalars that decide the order: `version` of the loader, `cache_identity`, what else it depends on.
        ancestors: Identities of caches whose tokens are the first of this one; a state of theirs is continued too.
    """

    def __init__(self, reader: ShuffledReader, *, identity: Identity, ancestors: Mapping[str, int]) -> None:
        self._reader, self._identity, self._ancestors = reader, identity, ancestors

    @property
    def capacity(self) -> int:
        """Blocks of the stream."""
        return self._reader.capacity

    def batch(self, first: int, count: int) -> Batch:
        """The blocks at positions [first, first + count); see `BlockStream.batch`."""
        return self._reader.batch(first, count)

    def close(self) -> None:
        """End the background thread and free the buffers; harmless when repeated."""
        self._reader.close()

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """The scalars that decide the order, and the cursor: blocks committed so far."""
        return {**self._identity, "cursor": cursor}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError, naming both sides, unless this stream continues the one that was saved."""
        saved, version = state.get("version"), self._identity["version"]
        if not self._continues("version", saved, version):
            raise CheckpointError(
                f"data.loader: the checkpoint was written with loader v{saved}, this run uses v{version}, which gives "
                f"another order; go on with loader=v{saved} or start a new run"
            )
        if odd := sorted(state.keys() ^ self.state_dict(0).keys()):
            raise CheckpointError(
                f"the checkpoint's stream state is not one of loader v{version}: odd or missing {', '.join(odd)}"
            )
        for key, mine in self._identity.items():
            if not self._continues(key, state[key], mine):
                raise CheckpointError(
                    f"{_NAMES[key]} is {mine!r} in this run and {state[key]!r} in the checkpoint; go on with the saved "
                    "one, or start a new run"
                )
        cursor = state["cursor"]
        if type(cursor) is not int or not 0 <= cursor <= self.capacity:
            raise CheckpointError(
                f"the checkpoint's stream cursor {cursor!r} is not among the {self.capacity} blocks of the stream"
            )

    def _continues(self, key: str, saved: Any, mine: int | str | None) -> bool:
        if key == "cache_identity" and saved in self._ancestors:
            return True
        return type(saved) is type(mine) and saved == mine  # True is not 1, and 1.0 is not either
