"""A run's display for a few seconds, for a look at it in a real terminal: `demo_bar.py [auto|bar|plain] [SECONDS]`."""

from __future__ import annotations

import sys
import time
from typing import Any

from llama_c4.metrics.console import build_display
from llama_c4.metrics.text import Extent

UPDATES, EPOCH = 60, 20
TARGETS = 6_801_408
EXTENT = Extent(num_updates=UPDATES, num_epochs=UPDATES // EPOCH, total_targets=UPDATES * TARGETS)


def show(display: Any, seconds: float) -> None:
    """Start-up, updates with a record after each second one, and a validation after each epoch."""
    display.phase("startup")
    display.message("outputs/demo: 20,403,520 parameters")
    time.sleep(seconds / 12)
    display.phase("training")
    for update in range(1, UPDATES + 1):
        time.sleep(seconds / UPDATES)
        position = {"update": update, "epoch": (update - 1) // EPOCH + 1, "targets": update * TARGETS}
        measured = {"loss": 9.0 - update / 12, "lr": 0.0056, "grad_norm": 1.0}
        rate = {"targets_per_second": TARGETS * UPDATES / seconds, "elapsed_seconds": update * seconds / UPDATES}
        display.advance(update, update * TARGETS)
        if update % 2 == 0:
            display.write({"kind": "train"} | position | measured | rate)
        if update % EPOCH == 0:
            display.phase("evaluation")
            time.sleep(seconds / 12)
            display.phase("training")
            scores = {"perplexity": 50.0, "bits_per_byte": 1.25, "num_targets": 1_048_576, "seconds": 0.5}
            display.write({"kind": "validation", "scope": "subset"} | position | measured | scores)


def main() -> None:
    mode: Any = sys.argv[1] if len(sys.argv) > 1 else "auto"
    display = build_display(mode, stream=sys.stdout, extent=EXTENT)
    assert display is not None
    show(display, float(sys.argv[2]) if len(sys.argv) > 2 else 6.0)
    display.close(0)
    print("the end")


if __name__ == "__main__":
    main()
