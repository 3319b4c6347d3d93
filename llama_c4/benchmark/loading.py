"""Loading against other libraries, side by side: the same tokens, one machine, one run.

Builds a cache of 97,656 blocks of 1,024 tokens (200 MB), the same tokens in the form of every peer, and lets each
candidate deliver shuffled epochs of int64 batches of 32 blocks. Every epoch runs in a process of its own, with one
torch thread, and the candidates take turns, A B C A B C …. Imports are not timed, opening is. A first, uncounted epoch
of each checks that it delivers every block exactly once, and brings the files into the page cache.

Reported are millions of tokens per second of processor time (of the whole process tree, so that a busy neighbour hardly
matters) and of the clock, medians over the rounds; and how many times as fast the first candidate is, as the median of
the rounds' ratios. A peer that is not installed is reported as such.

    python -m llama_c4.benchmark.loading --litdata-python litdata-env/bin/python

litdata wants torchvision, which replaces a CPU build of torch; so it gets an environment of its own:

    python -m venv litdata-env && litdata-env/bin/pip install torch numpy
    litdata-env/bin/pip install --no-deps litdata
    litdata-env/bin/pip install boto3 filelock lightning-utilities obstore requests tifffile urllib3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_c4.benchmark import loading_candidates
from llama_c4.benchmark.loading_candidates import CANDIDATES

VOCAB_SIZE = 32_000


def measure(
    *,
    rows: int,
    context_length: int,
    batch_size: int,
    shard_tokens: int,
    rounds: int,
    candidates: Sequence[str],
    litdata_python: str,
    folder: Path,
) -> dict[str, dict[str, Any]]:
    """Prepare every candidate's data, check what each delivers, and let them take turns.

    Args:
        rows: Blocks of an epoch.
        context_length: Tokens of a block.
        batch_size: Blocks of a batch.
        shard_tokens: Tokens of a shard of our cache; two make a group.
        rounds: Counted epochs of every candidate.
        candidates: Names out of `CANDIDATES`.
        litdata_python: The interpreter that has litdata.
        folder: An empty folder for about 1 GB of data.
    Returns:
        Candidate → `{"missing": module}`, or a list for each of `cpu_seconds`, `seconds`, `first_batch_seconds`,
        `peak_bytes` and `tokens`, one entry a round.
    Raises:
        SystemExit: A candidate failed, or did not deliver every block once.
    """
    truth = _write_tokens(folder, rows, context_length, batch_size, shard_tokens)
    pythons = {name: litdata_python if "litdata" in name else sys.executable for name in candidates}
    results: dict[str, dict[str, Any]] = {}
    for name in candidates:
        prepared = _child(pythons[name], "prepare", name, folder)
        found = prepared or _child(pythons[name], "check", name, folder)
        results[name] = found if "missing" in found else {}
        if "missing" not in found and found != truth:
            raise SystemExit(f"{name} does not deliver the tokens once: {found} instead of {truth}")
    for _ in range(rounds):
        for name in candidates:
            if "missing" not in results[name]:
                for key, value in _child(pythons[name], "run", name, folder).items():
                    results[name].setdefault(key, []).append(value)
    return results


def _write_tokens(folder: Path, rows: int, context_length: int, batch_size: int, shard_tokens: int) -> dict[str, int]:
    """Write random tokens with one more as look-ahead, and return what `loading_candidates.check` must find."""
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, size=rows * context_length + 1, dtype=np.uint16)
    tokens.astype("<u2", copy=False).tofile(folder / "tokens.bin")
    job = {"rows": rows, "context_length": context_length, "batch_size": batch_size, "shard_tokens": shard_tokens}
    (folder / "job.json").write_text(json.dumps(job))
    sums = tokens[:-1].reshape(rows, context_length).sum(axis=1, dtype=np.int64)
    return {
        "tokens": rows * context_length,
        "sum": int(sums.sum()),
        "block_sum_squares": sum(s * s for s in sums.tolist()),
    }


def _child(python: str, verb: str, name: str, folder: Path) -> Any:
    # -P keeps the script's folder, with our module names, off the import path of another interpreter.
    command = [python, "-P", str(Path(loading_candidates.__file__)), verb, name, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: `{verb}` ended with {done.returncode}; its message stands above")
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row a candidate; spreads are the smallest and largest of the rounds."""
    first = next(iter(results.values()))
    lines = [
        f"{'candidate':31s} {'M tokens/CPU-s':>22s} {'M tokens/s':>22s} {'ours is (CPU)':>14s} "
        f"{'ours is (clock)':>16s} {'first batch s':>14s} {'peak MiB':>9s}"
    ]
    for name, row in results.items():
        if "missing" in row:
            lines.append(f"{name:31s} not installed (no module {row['missing']})")
            continue
        lines.append(
            f"{name:31s} {_rate(row, 'cpu_seconds'):>22s} {_rate(row, 'seconds'):>22s} "
            f"{_times(row, first, 'cpu_seconds'):>14s} {_times(row, first, 'seconds'):>16s} "
            f"{statistics.median(row['first_batch_seconds']):14.3f} {max(row['peak_bytes']) / 2**20:9.0f}"
        )
    return "\n".join(lines)


def _rate(row: dict[str, Any], seconds: str) -> str:
    rates = [tokens / taken / 1e6 for tokens, taken in zip(row["tokens"], row[seconds], strict=True)]
    return f"{statistics.median(rates):.1f} ({min(rates):.0f}..{max(rates):.0f})"


def _times(row: dict[str, Any], first: dict[str, Any], seconds: str) -> str:
    ratios = [theirs / mine for theirs, mine in zip(row[seconds], first[seconds], strict=True)]
    return f"{statistics.median(ratios):.2f}x"


def main() -> None:
    """Measure and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=97_656)
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--shard-tokens", type=int, default=8138 * 1024, help="the default makes 12 whole shards")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--candidates", nargs="+", choices=tuple(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--litdata-python", default=sys.executable, metavar="PATH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(
            rows=options.rows,
            context_length=options.context_length,
            batch_size=options.batch_size,
            shard_tokens=options.shard_tokens,
            rounds=options.rounds,
            candidates=options.candidates,
            litdata_python=options.litdata_python,
            folder=Path(folder),
        )
    print(table(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
