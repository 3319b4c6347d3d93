"""Tokenization against `datasets.map`: the same files, tokenizer and number of processes, in one run, by turns.

Every measurement is a process of its own. Counted is the CPU time of its whole tree of processes, from after its
imports and the loading of the tokenizer to its end; CPU seconds hardly depend on what else the machine does, wall
seconds do.

* `prepare`: json.gz files to the finished token cache: decompression, start of the processes, tokenization, shuffle,
  EOS, shards on disk with their hashes.
* `datasets.map`: rows that already lie in Arrow, through `PreTrainedTokenizerFast` in batches, to Arrow. Neither
  decompression nor the way to uint16 is counted for it; `datasets load` is what decompression to Arrow costs there.

    python -m llama_c4.benchmark.preparation --files DIR --tokenizer DIR/tokenizer.json --processes 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CANDIDATES = ("prepare", "datasets load", "datasets.map")


@dataclass(frozen=True)
class Job:
    """What is tokenized, with what, in how many processes."""

    files: str
    tokenizer: str
    eos_token: str
    processes: int
    working: str


@dataclass(frozen=True)
class Measurement:
    """One run of one candidate: tokens, CPU seconds of its processes, wall seconds."""

    tokens: int
    cpu_seconds: float
    wall_seconds: float


def measure(job: Job, *, rounds: int, candidates: tuple[str, ...] = CANDIDATES) -> dict[str, list[Measurement]]:
    """Let the candidates take turns, each time in a new process and a new folder.

    Args:
        job: The work; `working` is the folder for all folders.
        rounds: Measurements of every candidate.
        candidates: Names out of `CANDIDATES`; `datasets.map` needs `datasets load` before it.
    Returns:
        Candidate → its measurements, one a round.
    """
    results: dict[str, list[Measurement]] = {name: [] for name in candidates}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=job.working, prefix=f"round-{number}-") as folder:
            for name in candidates:
                results[name].append(_in_process(name, job, folder))
    return results


def _in_process(name: str, job: Job, folder: str) -> Measurement:
    """Run a candidate and take the CPU time of its tree, less what it had used when its work began."""
    before = _cpu_seconds(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "llama_c4.benchmark.preparation", "--serve", name, folder, json.dumps(vars(job))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    cpu_seconds = _cpu_seconds(resource.RUSAGE_CHILDREN) - before - answer["cpu_seconds_before"]
    return Measurement(answer["tokens"], cpu_seconds, answer["wall_seconds"])


def _cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _serve(name: str, folder: str, job: Job) -> None:
    """The candidate's side: get ready, work, tell."""
    work = SERVERS[name](job, Path(folder))
    ready = _cpu_seconds(resource.RUSAGE_SELF) + _cpu_seconds(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    tokens = work()
    wall_seconds = time.perf_counter() - started
    print(json.dumps({"tokens": tokens, "wall_seconds": wall_seconds, "cpu_seconds_before": ready}), flush=True)


def _prepare(job: Job, folder: Path) -> Callable[[], int]:
    from llama_c4.config.compose import compose_config
    from llama_c4.data.prepare import prepare

    overrides = [
        "data=c4_files",
        f"data.files={job.files}",
        f"data.tokenizer={job.tokenizer}",
        "data.tokenizer_revision=null",
        f"data.eos_token={job.eos_token}",
        f"data.prepare_processes={job.processes}",
        f"data.cache_dir={folder / 'cache'}",
    ]
    config = compose_config(overrides)
    vocab_size = _vocab_size(job)

    def work() -> int:
        cache = prepare(config.data, vocab_size=vocab_size, context_length=1, train_tokens_needed=None, progress=False)
        return cache.train.num_tokens + cache.validation.num_tokens

    return work


def _vocab_size(job: Job) -> int:
    from llama_c4.data.tokenizer import read_tokenizer

    return read_tokenizer(Path(job.tokenizer), eos_token=job.eos_token).vocab_size


def _datasets_load(job: Job, folder: Path) -> Callable[[], int]:
    import datasets

    def work() -> int:
        rows = datasets.load_dataset(
            "json",
            data_files=[str(path) for path in sorted(Path(job.files).glob("c4-*.json.gz"))],
            split="train",
            cache_dir=str(folder / "arrow"),
            num_proc=job.processes,
        )
        rows.save_to_disk(str(folder / "rows"))
        return 0

    return work


def _datasets_map(job: Job, folder: Path) -> Callable[[], int]:
    import datasets
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=job.tokenizer)
    rows = datasets.load_from_disk(str(folder / "rows"))
    eos = _eos_id(job)

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(
            batch["text"], add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
        )
        return {"input_ids": [[*ids, eos] for ids in encoded["input_ids"]]}

    def work() -> int:
        done = rows.map(
            tokenize,
            batched=True,
            num_proc=job.processes,
            remove_columns=rows.column_names,
            cache_file_name=str(folder / "tokens.arrow"),
        )
        return sum(len(chunk.values) for chunk in done.data.column("input_ids").chunks)

    return work


def _eos_id(job: Job) -> int:
    from llama_c4.data.tokenizer import read_tokenizer

    return read_tokenizer(Path(job.tokenizer), eos_token=job.eos_token).eos_id


SERVERS: dict[str, Callable[[Job, Path], Callable[[], int]]] = {
    "prepare": _prepare,
    "datasets load": _datasets_load,
    "datasets.map": _datasets_map,
}


def summary(results: dict[str, list[Measurement]]) -> dict[str, Any]:
    """Median and range of every candidate, and the median of the ratios of the rounds."""
    figures: dict[str, Any] = {}
    for name, runs in results.items():
        cpu = [run.cpu_seconds for run in runs]
        figures[name] = {
            "tokens": runs[0].tokens,
            "cpu_seconds": [statistics.median(cpu), min(cpu), max(cpu)],
            "wall_seconds": statistics.median(run.wall_seconds for run in runs),
            "tokens_per_cpu_second": statistics.median(run.tokens / run.cpu_seconds for run in runs),
        }
    if {"prepare", "datasets.map"} <= results.keys():
        pairs = list(zip(results["prepare"], results["datasets.map"], strict=True))
        ratios = [b.cpu_seconds / a.cpu_seconds * a.tokens / b.tokens for a, b in pairs]
        figures["prepare over datasets.map"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures as lines of text."""
    lines = [f"{'':16}{'tokens':>12}{'CPU s (min..max)':>24}{'tokens per CPU s':>18}{'wall s':>9}"]
    for name in CANDIDATES:
        if name in figures:
            row = figures[name]
            middle, least, most = row["cpu_seconds"]
            spread = f"{middle:.2f} ({least:.2f}..{most:.2f})"
            lines.append(
                f"{name:16}{row['tokens']:>12,}{spread:>24}{row['tokens_per_cpu_second']:>18,.0f}{row['wall_seconds']:>9.2f}"
            )
    if (ratio := figures.get("prepare over datasets.map")) is not None:
        lines.append(f"prepare / datasets.map, tokens per CPU second: {ratio[0]:.2f} ({ratio[1]:.2f}..{ratio[2]:.2f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", help="folder of c4-train.* and c4-validation.* json.gz files")
    parser.add_argument("--tokenizer", help="tokenizer.json")
    parser.add_argument("--eos-token", default="</s>")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=3, metavar=("NAME", "FOLDER", "JOB"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        name, folder, job = args.serve
        _serve(name, folder, Job(**json.loads(job)))
        return
    if not args.files or not args.tokenizer:
        parser.error("--files and --tokenizer are needed")
    with tempfile.TemporaryDirectory() as working:
        job = Job(args.files, args.tokenizer, args.eos_token, args.processes, working)
        figures = summary(measure(job, rounds=args.rounds))
    print(table(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
