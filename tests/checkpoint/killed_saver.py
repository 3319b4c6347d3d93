"""Saves states over and over in child processes that are killed at random moments, and tells what was left.

Started by test_kills.py: `killed_saver.py FOLDER rescue|export ROUNDS SEED`. One JSON line a round. Children are
forked, so that a round costs no start of Python.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from llama_c4.checkpoint.header import StateHeader
from llama_c4.checkpoint.run_folder import RunFolder
from llama_c4.checkpoint.store import CheckpointStore
from llama_c4.config.schema import RescueConfig, TrainingConfig
from llama_c4.trainer.plan import Progress, Update

NUMBERS = 2_600_000
"""Float32 numbers of the state: 10.4 MB."""


class Weights:
    """A part whose every number is the update that it was saved at."""

    def __init__(self) -> None:
        self.values = torch.zeros(NUMBERS)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"w": self.values}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = state["w"]


def build(run_dir: Path, policy: str) -> tuple[CheckpointStore, Weights, Progress]:
    weights, progress = Weights(), Progress()
    training = TrainingConfig(
        tokens_per_parameter=None,
        total_tokens=10**9,
        epoch_tokens_per_parameter=None,
        epoch_tokens=1,
        epoch_boundary="exact",
        batch_tokens=1,
        micro_batch_size=1,
        checkpoint_policy="interval" if policy == "export" else "none",
        checkpoint_every_epochs=1 if policy == "export" else None,
        checkpoint_epochs=None,
        rescue=RescueConfig(every_minutes=0.0),
        extend=False,
        stop_after_minutes=None,
    )
    header = StateHeader(
        recipe_identity="",
        recipe={},
        machine={},
        config="a: 1\n",
        cache_identity="",
        loader="v2",
        precision="float32",
        total_targets=10**9,
        code_version="",
    )
    store = CheckpointStore(
        run_dir,
        training=training,
        num_epochs=10_000,
        header=header,
        parts={"engine": weights, "progress": progress},
        weights=lambda: {"w": weights.values},
        message=lambda text: None,
    )
    return store, weights, progress


def save_for_ever(run_dir: Path, policy: str, told: int) -> None:
    """A line for the claim, one when everything is loaded, and one after each save."""
    folder = RunFolder.claim(run_dir, config_yaml="a: 1\n", differences=lambda path: [], on_finished="refuse")
    os.write(told, f"{len(side_files(folder.path))}\n".encode())
    store, weights, progress = build(run_dir, policy)
    store.load_newest()
    os.write(told, f"{progress.update}\n".encode())
    while True:
        update = Update(progress.update, progress.sequences, 1, progress.update + 1, ends_epoch=True, context_length=1)
        progress.finish(update)
        weights.values = torch.full((NUMBERS,), float(progress.update))
        store.save_if_due(progress, update) if policy == "export" else store.rescue_if_due(progress)
        os.write(told, f"{progress.update}\n".encode())


def side_files(run_dir: Path) -> list[str]:
    return [str(path.relative_to(run_dir)) for path in run_dir.glob("*/.*.partial")]


def one_round(
    run_dir: Path, policy: str, *, saves: int, part: float, seconds: float
) -> tuple[dict[str, object], float]:
    """Let a child finish some saves and kill it in the next, after a part of the seconds that a save takes.

    Returns:
        What was found, and the seconds that a save took here.
    """
    listen, told = os.pipe()
    if (child := os.fork()) == 0:
        os.close(listen)
        save_for_ever(run_dir, policy, told)
    os.close(told)
    with os.fdopen(listen) as lines:
        side_files_after_claim, confirmed = int(lines.readline()), int(lines.readline())
        for _ in range(saves):
            began = time.monotonic()
            confirmed = int(lines.readline())
            seconds = time.monotonic() - began
        time.sleep(part * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        confirmed = max([confirmed, *(int(line) for line in lines if line.endswith("\n"))])
    torn = side_files(run_dir)
    store, weights, progress = build(run_dir, policy)
    loaded = store.load_newest()
    is_whole = bool((weights.values == float(progress.update)).all())
    found = {"confirmed": confirmed, "torn": torn, "side_files_after_claim": side_files_after_claim}
    return {**found, "loaded": loaded, "update": progress.update, "is_whole": is_whole}, seconds


def main() -> None:
    run_dir, policy, rounds, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    moments, seconds = random.Random(seed), 0.05
    for number in range(rounds):
        saves = 1 if number % 3 == 0 else 0
        outcome, seconds = one_round(run_dir, policy, saves=saves, part=moments.random(), seconds=seconds)
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
