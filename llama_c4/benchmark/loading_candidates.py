"""The candidates of the loading benchmark: each prepares its form of the same tokens, and delivers one shuffled epoch.

This file is run as a script by the interpreter that has the candidate installed, which need not be ours; so it imports
nothing of ours at the top, and every candidate imports its own library.

    python loading_candidates.py prepare|run|check NAME FOLDER

FOLDER holds `tokens.bin` (little-endian uint16) and `job.json`. The last line printed is one JSON object.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEED = 42


@dataclass(frozen=True)
class Job:
    """What is loaded: `rows` blocks of `context_length` tokens, in batches."""

    folder: Path
    rows: int
    context_length: int
    batch_size: int
    shard_tokens: int

    @property
    def tokens(self) -> np.ndarray:
        """All blocks as they lie in the file, uint16 [rows, T], mapped."""
        flat = np.memmap(self.folder / "tokens.bin", dtype="<u2", mode="r")
        return flat[: self.rows * self.context_length].reshape(self.rows, self.context_length)


def _nothing_to_prepare(job: Job) -> None:
    pass


# --- ours: inputs and targets -----------------------------------------------------------------------------------------


def _prepare_cache(job: Job) -> None:
    from llama_c4.data.cache import DTYPE, FORMAT, MANIFEST, VERSION, manifest_identity

    folder = job.folder / "cache"
    if folder.exists():
        return
    folder.mkdir()
    tokens = np.fromfile(job.folder / "tokens.bin", dtype="<u2")
    shards: list[dict[str, Any]] = []
    for at in range(0, len(tokens), job.shard_tokens):
        part, file = tokens[at : at + job.shard_tokens], f"train-{len(shards):05d}.bin"
        part.tofile(folder / file)
        shards.append({"file": file, "tokens": len(part), "sha256": hashlib.sha256(part.tobytes()).hexdigest()})
    split = {"documents": 0, "text_bytes": None, "complete": False}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": DTYPE,
        "ancestors": [],
        "vocab_size": int(tokens.max()) + 1,
        "eos_id": None,
        "entropy_floor": None,
        "shard_tokens": job.shard_tokens,
        "splits": {
            "train": {**split, "tokens": len(tokens), "shards": shards},
            "validation": {**split, "tokens": 0, "shards": []},
        },
    }
    manifest["identity"] = manifest_identity(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _llama_c4_stream(job: Job, *, prefetch: bool) -> Iterator[torch.Tensor]:
    from llama_c4.data.cache import TokenCache
    from llama_c4.data.loader_v2 import open_group_stream

    stream = open_group_stream(
        TokenCache.open(job.folder / "cache"),
        context_length=job.context_length,
        group_size=2,
        seed=SEED,
        total_blocks=job.rows,
        device=torch.device("cpu"),
        prefetch=prefetch,
    )
    for first in range(0, job.rows, job.batch_size):
        yield stream.batch(first, min(job.batch_size, job.rows - first)).tokens
    stream.close()


def _llama_c4(job: Job) -> Iterator[torch.Tensor]:
    return _llama_c4_stream(job, prefetch=True)


def _llama_c4_without_prefetch(job: Job) -> Iterator[torch.Tensor]:
    return _llama_c4_stream(job, prefetch=False)


# --- a bare gather from a mapped file, and the same behind worker processes -------------------------------------------


def _memmap(job: Job) -> Iterator[torch.Tensor]:
    tokens, order = job.tokens, np.random.default_rng(SEED).permutation(job.rows)
    for at in range(0, job.rows, job.batch_size):
        yield torch.from_numpy(tokens[order[at : at + job.batch_size]].astype(np.int64))


class _MappedRows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, job: Job) -> None:
        self.tokens = job.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.tokens[rows].astype(np.int64))


def _memmap_with_workers(job: Job) -> Iterator[torch.Tensor]:
    return iter(
        torch.utils.data.DataLoader(
            _MappedRows(job), batch_size=job.batch_size, shuffle=True, num_workers=2, collate_fn=_as_it_is
        )
    )


def _as_it_is(batch: Any) -> Any:
    return batch


# --- Hugging Face datasets (Arrow) ------------------------------------------------------------------------------------


def _prepare_datasets(job: Job) -> None:
    import datasets
    import pyarrow

    folder = job.folder / "arrow"
    if folder.exists():
        return
    datasets.disable_progress_bars()
    flat = pyarrow.array(job.tokens.reshape(-1))
    rows = pyarrow.FixedSizeListArray.from_arrays(flat, job.context_length)
    datasets.Dataset(pyarrow.table({"tokens": rows})).save_to_disk(str(folder))


def _arrow_rows(job: Job) -> Any:
    import datasets

    return datasets.load_from_disk(str(job.folder / "arrow")).with_format("numpy")


def _datasets(job: Job) -> Iterator[torch.Tensor]:
    rows, order = _arrow_rows(job), np.random.default_rng(SEED).permutation(job.rows)
    for at in range(0, job.rows, job.batch_size):
        yield torch.from_numpy(rows[order[at : at + job.batch_size].tolist()]["tokens"].astype(np.int64))


def _datasets_dataloader(job: Job) -> Iterator[torch.Tensor]:
    return iter(
        torch.utils.data.DataLoader(_arrow_rows(job), batch_size=job.batch_size, shuffle=True, collate_fn=_stack_rows)
    )


def _stack_rows(rows: list[dict[str, np.ndarray]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([row["tokens"] for row in rows]).astype(np.int64))


# --- litdata ----------------------------------------------------------------------------------------------------------


def _prepare_litdata(job: Job) -> None:
    from litdata import optimize
    from litdata.streaming.item_loader import TokensLoader

    starts = list(range(0, job.rows, 4096))
    optimize(
        fn=_LitdataRows(job),
        inputs=starts,
        output_dir=str(job.folder / "litdata"),
        chunk_bytes="64MB",
        item_loader=TokensLoader(),
        num_workers=1,
        verbose=False,
    )


class _LitdataRows:
    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, start: int) -> Iterator[torch.Tensor]:
        yield torch.from_numpy(self.job.tokens[start : start + 4096].reshape(-1).copy())


def _litdata(job: Job) -> Iterator[torch.Tensor]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.item_loader import TokensLoader

    rows = StreamingDataset(
        str(job.folder / "litdata"), item_loader=TokensLoader(block_size=job.context_length), shuffle=True, seed=SEED
    )
    for batch in StreamingDataLoader(rows, batch_size=job.batch_size, num_workers=0):
        yield batch.long()


@dataclass(frozen=True)
class Candidate:
    """How a loader gets its data ready, how it delivers one epoch, and what is imported before the clock starts."""

    prepare: Callable[[Job], None]
    epoch: Callable[[Job], Iterator[torch.Tensor]]
    modules: tuple[str, ...] = ()


OURS = ("llama_c4.data.cache", "llama_c4.data.loader_v2")
ARROW = ("datasets", "datasets.arrow_dataset", "datasets.formatting")
LITDATA = ("litdata", "litdata.streaming.item_loader")

CANDIDATES = {
    "llama_c4": Candidate(_prepare_cache, _llama_c4, OURS),
    "llama_c4, no prefetch": Candidate(_prepare_cache, _llama_c4_without_prefetch, OURS),
    "numpy memmap": Candidate(_nothing_to_prepare, _memmap),
    "memmap, DataLoader, 2 workers": Candidate(_nothing_to_prepare, _memmap_with_workers),
    "datasets (Arrow), own loop": Candidate(_prepare_datasets, _datasets, ARROW),
    "datasets (Arrow), DataLoader": Candidate(_prepare_datasets, _datasets_dataloader, ARROW),
    "litdata TokensLoader": Candidate(_prepare_litdata, _litdata, LITDATA),
}
"""Ours delivers inputs and targets, the others only blocks."""


def prepare(job: Job, candidate: Candidate) -> None:
    """Write the candidate's form of the data."""
    candidate.prepare(job)


def measure(job: Job, candidate: Candidate) -> dict[str, float]:
    """One epoch: tokens delivered, seconds of processor time (child processes included) and of the clock."""
    start, cpu, tokens, first = time.perf_counter(), _cpu_seconds(), 0, 0.0
    for batch in candidate.epoch(job):
        if not tokens:
            first = time.perf_counter() - start
        tokens += batch.numel()
    seconds = time.perf_counter() - start
    return {
        "tokens": tokens,
        "cpu_seconds": _cpu_seconds() - cpu,
        "seconds": seconds,
        "first_batch_seconds": first,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def check(job: Job, candidate: Candidate) -> dict[str, int]:
    """What an epoch delivers: how many tokens, the sum of their ids, and the sum of the squares of the blocks' sums."""
    tokens = total = squares = 0
    for batch in candidate.epoch(job):
        sums = batch.sum(dim=1)
        tokens, total, squares = tokens + batch.numel(), total + int(sums.sum()), squares + int((sums**2).sum())
    return {"tokens": tokens, "sum": total, "block_sum_squares": squares}


VERBS: dict[str, Callable[[Job, Candidate], Any]] = {"prepare": prepare, "check": check, "run": measure}


def main() -> None:
    verb, name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    job = Job(folder=Path(folder), **json.loads((Path(folder) / "job.json").read_text()))
    candidate = CANDIDATES[name]
    try:
        for module in candidate.modules:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": error.name}))
        return
    print(json.dumps(VERBS[verb](job, candidate)))


if __name__ == "__main__":
    main()
