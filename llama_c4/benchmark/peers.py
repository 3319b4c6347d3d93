"""One training update against transformers, side by side: same weights, same tokens, same machine, one run.

Every candidate lives in a process of its own (an allocator setting belongs to a process), all are built first, and
then they take turns, one update each, A B C A B C …, so that a drift of the machine's speed touches all of them.
Reported are the median seconds of an update, the median of the ratios round by round, the peak memory of the process,
and the loss of every candidate after the last round, which shows that they did the same work.

    python -m llama_c4.benchmark.peers --model 20m --precision float32
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CANDIDATES = ("llama_c4", "transformers loop", "transformers Trainer", "transformers loop, same levers")


def measure(
    *,
    size: str,
    precision: str,
    micro_batch_size: int,
    context_length: int | None,
    rounds: int,
    warmup: int,
    candidates: tuple[str, ...],
) -> dict[str, dict[str, Any]]:
    """Let the candidates take turns and collect seconds, memory and losses.

    Args:
        size: A model preset, such as `20m`.
        precision: `float32` or `bfloat16` (autocast).
        micro_batch_size: Sequences of one update (there is one micro-step).
        context_length: Targets of a sequence; None takes the preset's.
        rounds: Counted updates of every candidate.
        warmup: Updates before them, not counted.
        candidates: Names out of `CANDIDATES`.
    Returns:
        Candidate → `seconds` (one an update), `peak_bytes`, `losses` (nats a target, one an update).
    """
    with tempfile.TemporaryDirectory() as folder:
        job = _Job(
            size=size,
            precision=precision,
            micro_batch_size=micro_batch_size,
            context_length=context_length,
            weights=Path(folder) / "weights",
            updates=rounds + warmup,
        )
        _in_process(job.export_weights)
        workers = {name: _Worker(name, job) for name in candidates}
        for worker in workers.values():
            worker.wait_until_ready()
        for _ in range(rounds + warmup):
            for worker in workers.values():
                worker.update()
        return {name: worker.finish(warmup) for name, worker in workers.items()}


def _in_process(function: Callable[[], None]) -> None:
    """Run a function in a process of its own, so that this one never loads torch."""
    process = multiprocessing.get_context("spawn").Process(target=function)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the process of {function.__qualname__} ended with {process.exitcode}")


class _Worker:
    """A candidate's process: `update` lets it make exactly one."""

    def __init__(self, name: str, job: _Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(name, job, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def wait_until_ready(self) -> None:
        self._receive()

    def update(self) -> None:
        self.pipe.send("update")
        seconds, loss = self._receive()
        self.seconds.append(seconds)
        self.losses.append(loss)

    def finish(self, warmup: int) -> dict[str, Any]:
        self.pipe.send("end")
        peak = self._receive()
        self.process.join(30)
        return {"seconds": self.seconds[warmup:], "peak_bytes": peak, "losses": self.losses}

    def _receive(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit(f"the process of {self.name!r} died; its message stands above") from None


def _serve(name: str, job: _Job, pipe: Connection) -> None:
    """The candidate's side: one update for every request, timed here."""
    updates = STEPPERS[name](job)
    pipe.send("ready")
    if name == "transformers Trainer":
        _serve_trainer(job, pipe)
        return
    while pipe.recv() == "update":
        start = time.perf_counter()
        loss = next(updates)
        pipe.send((time.perf_counter() - start, loss))
    pipe.send(_peak_bytes())


def _peak_bytes() -> int:
    """Of this process alone; ru_maxrss would start from that of its parent."""
    import torch

    from llama_c4.runtime.memory import peak_memory_bytes

    return peak_memory_bytes(torch.device("cpu")) or 0


class _Job:
    """What is trained: shapes, precision, weights on disk and the tokens of every update."""

    def __init__(
        self,
        *,
        size: str,
        precision: str,
        micro_batch_size: int,
        context_length: int | None,
        weights: Path,
        updates: int,
    ) -> None:
        from llama_c4.config.compose import compose_config

        overrides = [f"model={size}", "data=markov", "runtime=cpu", f"runtime.precision={precision}"]
        if context_length is not None:
            overrides.append(f"model.context_length={context_length}")
        overrides.append(f"training.micro_batch_size={micro_batch_size}")
        config = compose_config(overrides)
        tokens = micro_batch_size * config.model.context_length
        self.config = compose_config([*overrides, f"training.batch_tokens={tokens}"])
        self.weights = weights
        self.updates = updates

    @property
    def grad_clip(self) -> float:
        clip = self.config.optim.grad_clip
        assert clip is not None
        return clip

    def export_weights(self) -> None:
        import torch

        from llama_c4.checkpoint.convert import export_hugging_face
        from llama_c4.model.llama import build_model

        model = build_model(
            self.config.model,
            seed=self.config.runtime.seed,
            device=torch.device("cpu"),
            dtype=torch.float32,
            attention="auto",
            loss="plain",
        )
        export_hugging_face(model.state_dict(), self.config.model, self.weights)

    def batches(self) -> Iterator[Any]:
        """[B, T + 1] token ids of every update: the same for all candidates."""
        import torch

        generator = torch.Generator().manual_seed(0)
        shape = (self.config.training.micro_batch_size, self.config.model.context_length + 1)
        for _ in range(self.updates):
            yield torch.randint(0, self.config.model.vocab_size, shape, generator=generator)


def _llama_c4(job: _Job) -> Iterator[float]:
    """Our engine, built as the command `train` builds it."""
    from llama_c4.assemble import engine_of
    from llama_c4.data.loader import Batch
    from llama_c4.runtime.context import build_runtime
    from llama_c4.trainer.plan import Update

    runtime = build_runtime(job.config.runtime, run_dir=job.weights.parent)
    engine = engine_of(job.config, runtime)
    blocks = job.config.training.micro_batch_size
    for index, rows in enumerate(job.batches()):
        update = Update(
            index=index,
            first_block=index * blocks,
            num_blocks=blocks,
            epoch=1,
            ends_epoch=False,
            context_length=job.config.model.context_length,
        )
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        engine.accumulate(Batch(tokens=tokens, targets=targets, num_targets=targets.numel()), update)
        yield float(engine.apply(lr=job.config.optim.lr, update=update).loss)


def _hugging_face_model(job: _Job) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(job.weights).train()


def _adamw(job: _Job, model: Any, *, fused: bool | None) -> Any:
    import torch

    decayed = [p for p in model.parameters() if p.ndim >= 2]
    other = [p for p in model.parameters() if p.ndim < 2]
    optim = job.config.optim
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": other, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=fused)


def _transformers_loop(job: _Job, *, levers: bool = False) -> Iterator[float]:
    """A tutorial's loop: forward with labels, backward, clip, step. `levers` are our allocator and fused AdamW."""
    import torch

    if levers:
        from llama_c4.runtime.context import build_runtime

        build_runtime(job.config.runtime, run_dir=job.weights.parent)
    model = _hugging_face_model(job)
    optimizer = _adamw(job, model, fused=True if levers else None)
    for rows in job.batches():
        with _autocast(job):
            loss = model(input_ids=rows[:, :-1], labels=rows[:, :-1], shift_labels=rows[:, 1:].contiguous()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss)


def _autocast(job: _Job) -> AbstractContextManager[Any]:
    import torch

    if job.config.runtime.precision == "float32":
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _nothing_to_iterate(job: _Job) -> Iterator[float]:
    return iter(())


def _serve_trainer(job: _Job, pipe: Connection) -> None:
    """The Trainer owns its loop: a callback at both ends of an update waits for the turn and takes the time."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Turns(TrainerCallback):
        start = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if pipe.recv() != "update":
                control.should_training_stop = True
            self.start = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                pipe.send((time.perf_counter() - self.start, float(logs["loss"])))

    rows = torch.cat(list(job.batches()))
    data = [{"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]} for row in rows]
    model = _hugging_face_model(job)
    arguments = TrainingArguments(
        output_dir=str(job.weights.parent / "trainer"),
        per_device_train_batch_size=job.config.training.micro_batch_size,
        max_steps=job.updates,
        max_grad_norm=job.grad_clip,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=job.config.runtime.precision == "bfloat16",
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        optimizers=(_adamw(job, model, fused=None), None),
        callbacks=[Turns()],
    )
    trainer.train()
    pipe.recv()
    pipe.send(_peak_bytes())


def _transformers_loop_with_levers(job: _Job) -> Iterator[float]:
    return _transformers_loop(job, levers=True)


STEPPERS: dict[str, Callable[[_Job], Iterator[float]]] = {
    "llama_c4": _llama_c4,
    "transformers loop": _transformers_loop,
    "transformers Trainer": _nothing_to_iterate,
    "transformers loop, same levers": _transformers_loop_with_levers,
}


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row a candidate: median seconds, our speed as a multiple (median of the rounds), peak memory, last loss."""
    ours = results["llama_c4"]["seconds"]
    lines = [f"{'candidate':34s} {'s/update':>9s} {'ours is':>8s} {'peak MiB':>9s} {'last loss':>10s}"]
    for name, row in results.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(row["seconds"], ours, strict=True))
        seconds, mebibytes = statistics.median(row["seconds"]), row["peak_bytes"] / 2**20
        lines.append(f"{name:34s} {seconds:9.3f} {ratio:7.2f}x {mebibytes:9.0f} {row['losses'][-1]:10.5f}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="20m")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--context-length", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    options = parser.parse_args()
    results = measure(
        size=options.model,
        precision=options.precision,
        micro_batch_size=options.micro_batch_size,
        context_length=options.context_length,
        rounds=options.rounds,
        warmup=options.warmup,
        candidates=tuple(options.candidates),
    )
    print(table(results))
    print(json.dumps({"benchmark": "peers", **vars(options), "results": results}))


if __name__ == "__main__":
    main()
