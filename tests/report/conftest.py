"""Run folders in the format of real ones, written in a moment: healthy, diverging, unfinished, torn, resumed."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from llama_c4.config.compose import compose_config, to_yaml

UPDATES, BATCH_TOKENS = 120, 8192
TOTAL = UPDATES * BATCH_TOKENS

Loss = Callable[[int], float]


def healthy(update: int) -> float:
    """A loss that falls from ln 4096 towards 3.4 and shakes a little."""
    return 3.4 + 4.9 * math.exp(-update / 25) + 0.03 * math.sin(1.7 * update)


def nan_at_5_to_9(update: int) -> float:
    return math.nan if 5 <= update <= 9 else healthy(update)


def always_nan(update: int) -> float:
    return math.nan


def inf_at_60(update: int) -> float:
    return math.inf if update == 60 else healthy(update)


@lru_cache
def config_yaml(name: str, *, lr: float, seed: int) -> str:
    """The resolved configuration of the run, as the real thing writes it."""
    budget = [
        f"training.total_tokens={TOTAL}",
        "training.tokens_per_parameter=null",
        f"training.batch_tokens={BATCH_TOKENS}",
    ]
    choices = ["model=tiny", "data=sample", "lr_schedule.warmup_steps=10", f"optim.lr={lr}", f"runtime.seed={seed}"]
    return to_yaml(compose_config([*choices, *budget, f"run.name='{name}'"]))


def strict(record: Mapping[str, Any]) -> str:
    """A record as strict JSON: a number that is not finite is null, with its word beside it."""
    plain: dict[str, Any] = {}
    for key, value in record.items():
        is_odd = isinstance(value, float) and not math.isfinite(value)
        plain |= {key: None, f"{key}_nonfinite": str(value)} if is_odd else {key: value}
    return json.dumps(plain, allow_nan=False)


def train_record(update: int, loss: float, *, lr: float) -> dict[str, Any]:
    warmup = min(update / 10, 1)
    return {
        "kind": "train",
        "update": update,
        "epoch": 1 + (update - 1) // 30,
        "targets": update * BATCH_TOKENS,
        "loss": loss,
        "lr": lr * warmup * (0.55 + 0.45 * math.cos(math.pi * update / UPDATES)),
        "grad_norm": 4 / math.sqrt(update) if math.isfinite(loss) else loss,
        "clipped_updates": int(update < 16),
        "window_updates": 1,
        "targets_per_second": 90_000.0 + 4000 * math.sin(update),
        "elapsed_targets_per_second": 80_000.0,
        "training_seconds": update * 0.09,
        "elapsed_seconds": update * 0.11,
        "peak_memory_bytes": 700 * 2**20,
    }


def validation_record(update: int, loss: float, *, scope: str) -> dict[str, Any]:
    return {
        "kind": "validation" if scope == "subset" else "final_validation",
        "scope": scope,
        "update": update,
        "epoch": update // 30,
        "targets": update * BATCH_TOKENS,
        "loss": loss,
        "perplexity": math.exp(loss) if math.isfinite(loss) else loss,
        "bits_per_byte": loss / (4.1 * math.log(2)),
        "num_targets": 32_768,
        "num_blocks": 128,
        "seconds": 1.5,
    }


def metrics(loss: Loss, *, updates: int, lr: float) -> list[dict[str, Any]]:
    """The records of the first so many updates, validations at epoch ends and the final one among them."""
    records = []
    for update in range(1, updates + 1):
        records.append(train_record(update, loss(update), lr=lr))
        if update % 30 == 0:
            records.append(validation_record(update, loss(update) + 0.05, scope="subset"))
    if updates == UPDATES:
        records.append(validation_record(updates, loss(updates) + 0.06, scope="full"))
    return records


def result(final: Mapping[str, Any], name: str) -> dict[str, Any]:
    kept = {key: final[key] for key in ("loss", "perplexity", "bits_per_byte", "num_targets", "update", "targets")}
    times = {"total_targets": TOTAL, "training_seconds": 10.8, "elapsed_seconds": 13.2}
    return {
        "status": "finished",
        **kept,
        **times,
        "recipe_identity": "ab" * 32,
        "num_parameters": 1_344_000,
        "run": name,
    }


ENVIRONMENT = {
    "versions": {"python": "3.12.1", "torch": "2.13.0"},
    "hardware": {"cpu": "a CPU", "usable_cores": 2, "gpu": None},
    "git": {"commit": "12e4567", "dirty": False},
    "parameters": 1_344_000,
    "non_embedding_parameters": 819_712,
}


def lineage_line(start: int) -> dict[str, Any]:
    return {
        "time": "2026-01-01T00:00:00+0000",
        "host": "node1",
        "resumed_from": f"rescue/update-{start:08d}-sequence-{32 * start:012d}.pt" if start else None,
        "update": start,
        "machine_changes": ["runtime.threads: 2 → 8"] if start else [],
    }


def write_run(
    parent: Path,
    name: str,
    *,
    loss: Loss = healthy,
    updates: int = UPDATES,
    state: str = "finished",
    lr: float = 0.004,
    seed: int = 42,
    host: str | None = None,
    starts: Sequence[int] = (0,),
) -> Path:
    """Write a run folder that has come to `updates` and was started at each of the updates `starts`."""
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / "config.yaml").write_text(config_yaml(name, lr=lr, seed=seed))
    records = metrics(loss, updates=updates, lr=lr)
    (folder / "metrics.jsonl").write_text("".join(strict(record) + "\n" for record in records))
    status = {"state": state, "update": updates, "targets": updates * BATCH_TOKENS, "total_targets": TOTAL, "pid": 1}
    status |= {"host": host or socket.gethostname(), "time": "2026-01-01T00:00:00+00:00", "message": ""}
    (folder / "status.json").write_text(strict(status))
    (folder / "environment.json").write_text(strict(ENVIRONMENT))
    lines = [lineage_line(start) for start in starts]
    (folder / "lineage.jsonl").write_text("".join(strict(line) + "\n" for line in lines))
    if updates == UPDATES:
        (folder / "result.json").write_text(strict(result(records[-1], name)))
    return folder


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A folder of runs of every fate."""
    place = tmp_path / "outputs"
    write_run(place, "lr-0.004")
    write_run(place, "lr-0.008", lr=0.008, loss=lambda update: healthy(update) + 0.1)
    write_run(place, "nan-5-9", loss=nan_at_5_to_9)
    write_run(place, "all-nan", loss=always_nan, lr=1.0, state="diverged", updates=40)
    write_run(place, "inf", loss=inf_at_60, state="failed", updates=61)
    write_run(place, "unfinished", updates=50, state="training")
    torn = write_run(place, "torn", updates=31, state="interrupted")
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "update": 32, "los')
    write_run(place, "resumed", starts=(0, 33, 64, 90), seed=43)
    write_run(place, "lr-0.004.old-1")
    (place / "caches" / "sample-4096").mkdir(parents=True)
    return place
