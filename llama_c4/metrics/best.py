"""The best subset validation so far."""

from __future__ import annotations

import math
from typing import Any, final

from llama_c4.metrics.records import Record


@final
class BestTracker:
    """Remembers the validation record with the least finite loss; the earlier one of equals. NaN is never best.

    Attributes:
        record: The best record; None while there is none.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] | None = None

    def offer(self, record: Record) -> bool:
        """Take a record in; returns whether it is the best now."""
        loss = record["loss"]
        # Comparisons with NaN are false whichever way they are put, so finiteness is asked first.
        if loss is None or not math.isfinite(loss):
            return False
        if self.record is not None and loss >= self.record["loss"]:
            return False
        self.record = dict(record)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The record, for a checkpoint."""
        return {"record": self.record}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.record = state["record"]
