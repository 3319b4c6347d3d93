"""Rules over several keys: what no single bound can say. Each rule yields the keys it is about and one message.

A setting that would have no effect breaks a rule; `auto` never does, it resolves to what the others allow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import final

from llama_c4.config.schema import (
    AccumAdamWConfig,
    C4FilesConfig,
    ConstantConfig,
    MarkovConfig,
    RunConfig,
    SampleConfig,
    WsdConfig,
)

MAX_NAME_BYTES = 200
CUDA_ATTENTION = ("flash", "cudnn", "efficient")


@final
@dataclass(frozen=True)
class Broken:
    """A broken rule: the dotted keys it is about, and the message."""

    keys: tuple[str, ...]
    message: str


Rule = Callable[[RunConfig, Collection[str]], Iterator[Broken]]


def check_rules(config: RunConfig) -> list[str]:
    """The messages of all broken rules; an empty list for a sound configuration."""
    return [broken.message for broken in broken_rules(config)]


def broken_rules(config: RunConfig, *, typed: Collection[str] = ()) -> list[Broken]:
    """All broken rules. `typed` are the keys that the user set, so that a message can say what to type beside them."""
    return [broken for rule in RULES for broken in rule(config, typed)]


def is_local_tokenizer(tokenizer: str) -> bool:
    """Whether `data.tokenizer` is a path (ends in .json or a slash, or begins as paths do), not a name on the hub."""
    return tokenizer.endswith((".json", "/")) or tokenizer.startswith(("/", "./", "../", "~"))


def is_glob(files: str) -> bool:
    """Whether `data.files` is a glob or a file of its own, and not a folder."""
    return any(mark in files for mark in "*?[") or files.endswith((".gz", ".json"))


# --- exactly one of two -----------------------------------------------------------------------------------------------


def one_budget(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    t = config.training
    a, b = "training.tokens_per_parameter", "training.total_tokens"
    yield from _exactly_one("the budget", {a: t.tokens_per_parameter, b: t.total_tokens}, typed)


def one_epoch_length(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    t = config.training
    a, b = "training.epoch_tokens_per_parameter", "training.epoch_tokens"
    yield from _exactly_one("the epoch length", {a: t.epoch_tokens_per_parameter, b: t.epoch_tokens}, typed)


def one_warmup(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    s = config.lr_schedule
    a, b = "lr_schedule.warmup_steps", "lr_schedule.warmup_fraction"
    yield from _exactly_one("the warm-up", {a: s.warmup_steps, b: s.warmup_fraction}, typed)


def _exactly_one(what: str, values: dict[str, float | None], typed: Collection[str]) -> Iterator[Broken]:
    (a, x), (b, y) = values.items()
    if (x is None) is not (y is None):
        return
    if x is None:
        yield Broken((a, b), f"{a}=null and {b}=null: exactly one of them sets {what}; set {a}=NUMBER or {b}=NUMBER")
        return
    own = [key for key in values if key in typed]
    if len(own) == 1:
        way = f"type {a if own[0] == b else b}=null as well"
    else:
        way = f"type {b}=null to keep {a}, or {a}=null to keep {b}"
    yield Broken((a, b), f"{a}={x} and {b}={y} are both set: exactly one of them sets {what}; {way}")


# --- model and batch --------------------------------------------------------------------------------------------------


def even_heads(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    hidden, heads = config.model.hidden_size, config.model.num_heads
    if hidden % (2 * heads) == 0:
        return
    good = [h for h in range(1, hidden // 2 + 1) if hidden % (2 * h) == 0] if hidden <= 1_000_000 else []
    nearest = sorted(sorted(good, key=lambda h: abs(h - heads))[:3])
    way = f"model.num_heads to one of {', '.join(map(str, nearest))}" if nearest else "an even model.hidden_size"
    yield Broken(
        ("model.hidden_size", "model.num_heads"),
        f"model.num_heads={heads} does not divide model.hidden_size={hidden} into heads of an even size "
        f"(rotary embedding turns pairs); set {way}",
    )


def whole_sequences(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    batch, length = config.training.batch_tokens, config.model.context_length
    if batch % length == 0:
        return
    near = [n * length for n in (batch // length, batch // length + 1) if n > 0]
    yield Broken(
        ("training.batch_tokens", "model.context_length"),
        f"training.batch_tokens={batch} is not a multiple of model.context_length={length}; "
        f"set training.batch_tokens={' or '.join(map(str, near))}",
    )


# --- checkpoints and runs ---------------------------------------------------------------------------------------------


def checkpoint_policy(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    policy = config.training.checkpoint_policy
    keys = {
        "interval": ("training.checkpoint_every_epochs", config.training.checkpoint_every_epochs),
        "explicit": ("training.checkpoint_epochs", config.training.checkpoint_epochs),
    }
    for owner, (key, value) in keys.items():
        about = ("training.checkpoint_policy", key)
        shown = "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
        if owner == policy and not value:
            example = "1" if owner == "interval" else "[1,2]"
            yield Broken(about, f"training.checkpoint_policy={policy} needs {key}, found {shown}; set {key}={example}")
        elif owner != policy and value is not None:
            yield Broken(
                about,
                f"{key}={shown} has no effect with training.checkpoint_policy={policy}; "
                f"set {key}=null or training.checkpoint_policy={owner}",
            )


def extendable(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    """What was trained so far must not depend on the budget."""
    if not config.training.extend:
        return
    schedule, keys = config.lr_schedule, ("training.extend", "lr_schedule.name")
    head = "training.extend=true continues to a larger budget, and"
    if not isinstance(schedule, (ConstantConfig, WsdConfig)):
        yield Broken(
            keys,
            f"{head} lr_schedule={schedule.name} depends on it from the start; choose lr_schedule=wsd or constant",
        )
    if schedule.warmup_fraction is not None:
        yield Broken(
            ("training.extend", "lr_schedule.warmup_fraction"),
            f"{head} lr_schedule.warmup_fraction={schedule.warmup_fraction} is a part of the budget; "
            "set lr_schedule.warmup_fraction=null lr_schedule.warmup_steps=NUMBER",
        )
    if config.data.loader == "v1":
        yield Broken(
            ("training.extend", "data.loader"),
            f"{head} the order of data.loader=v1 depends on the budget; set loader=v2",
        )


def folder_name(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    name = config.run.name
    if name is None:
        return
    if name in (".", ".."):
        yield Broken(("run.name",), f"run.name={name} is no name of a folder of its own; set another, or null")
    elif len(name.encode()) > MAX_NAME_BYTES:
        yield Broken(
            ("run.name",),
            f"run.name={name[:20]}… has {len(name.encode())} bytes; set one of at most {MAX_NAME_BYTES}",
        )


# --- runtime ----------------------------------------------------------------------------------------------------------


def deterministic(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    r = config.runtime
    if not r.deterministic:
        return
    forced = {
        "runtime.compile": (r.compile, (False, "auto"), "false"),
        "runtime.attention": (r.attention, ("reference", "auto"), "reference"),
        "runtime.optimizer_kernel": (r.optimizer_kernel, ("plain", "auto"), "plain"),
    }
    for key, (value, allowed, way) in forced.items():
        if value not in allowed:
            shown = str(value).lower()
            yield Broken(
                ("runtime.deterministic", key),
                f"{key}={shown} is not deterministic, and runtime.deterministic=true; "
                f"set {key}={way} or auto, or runtime.deterministic=false",
            )


def attention_backend(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    r = config.runtime
    if r.attention not in CUDA_ATTENTION:
        return
    if r.device == "cpu":
        yield Broken(
            ("runtime.attention", "runtime.device"),
            f"runtime.attention={r.attention} needs CUDA, and runtime.device=cpu; "
            "set runtime.attention=auto, math or reference",
        )
    wanted = ("auto", "bfloat16", "float32") if r.attention == "efficient" else ("auto", "bfloat16")
    if r.precision not in wanted:
        yield Broken(
            ("runtime.attention", "runtime.precision"),
            f"runtime.attention={r.attention} has no {r.precision} kernel, and runtime.precision={r.precision}; "
            "set runtime.attention=auto, math or reference, or runtime.precision=bfloat16",
        )


def compile_mode(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    r = config.runtime
    off = r.compile is False or (r.compile == "auto" and (r.deterministic or r.device == "cpu"))
    if off and r.compile_mode != "default":
        yield Broken(
            ("runtime.compile_mode", "runtime.compile", "runtime.device", "runtime.deterministic"),
            f"runtime.compile_mode={r.compile_mode} has no effect, nothing is compiled with runtime.device={r.device} "
            f"runtime.compile={str(r.compile).lower()} runtime.deterministic={str(r.deterministic).lower()}; "
            "set runtime.compile=true or runtime.compile_mode=default",
        )


def optimizer_kernel(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    if isinstance(config.optim, AccumAdamWConfig) and config.runtime.optimizer_kernel == "fused":
        yield Broken(
            ("runtime.optimizer_kernel", "optim.name"),
            "runtime.optimizer_kernel=fused does not exist for optim=accum_adamw; "
            "set runtime.optimizer_kernel=auto, foreach or plain",
        )


# --- data -------------------------------------------------------------------------------------------------------------


def loader_fields(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    broken = list(_loader_fields(config))
    if broken and "data.loader" in typed:
        name = config.data.loader
        keys = ("data.loader", "data.shuffle_group_size", "data.buffer_size_mib", "data.prefetch")
        yield Broken(
            keys,
            f"data.loader={name} does not bring the other settings of {name}; choose the loader with loader={name}",
        )
    else:
        yield from broken


def _loader_fields(config: RunConfig) -> Iterator[Broken]:
    d = config.data
    own, other = (
        ("shuffle_group_size", "buffer_size_mib") if d.loader == "v2" else ("buffer_size_mib", "shuffle_group_size")
    )
    other_loader = "v1" if d.loader == "v2" else "v2"
    if getattr(d, own) is None:
        yield Broken(
            ("data.loader", f"data.{own}"),
            f"data.{own}=null, and data.loader={d.loader} needs it; "
            f"choose the loader with loader={d.loader}, or set data.{own}=NUMBER",
        )
    if getattr(d, other) is not None:
        yield Broken(
            ("data.loader", f"data.{other}"),
            f"data.{other}={getattr(d, other)} has no effect with data.loader={d.loader}; "
            f"choose the loader with loader={other_loader}, or set data.{other}=null",
        )
    if d.loader == "v1" and d.prefetch:
        yield Broken(
            ("data.loader", "data.prefetch"),
            "data.prefetch=true has no effect with data.loader=v1; "
            "choose the loader with loader=v2, or set data.prefetch=false",
        )


def tokenizer_source(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    d = config.data
    if isinstance(d, MarkovConfig):
        return
    keys, revision = ("data.tokenizer", "data.tokenizer_revision"), d.tokenizer_revision
    if d.tokenizer == "train" and not isinstance(d, SampleConfig):
        yield Broken(
            ("data.tokenizer", "data.name"),
            f"data.tokenizer=train is only for data=sample, and this is data={d.name}; "
            "set data.tokenizer to a tokenizer.json or a name on the hub",
        )
    elif (d.tokenizer == "train" or is_local_tokenizer(d.tokenizer)) and revision is not None:
        yield Broken(
            keys,
            f"data.tokenizer_revision={revision} has no effect with data.tokenizer={d.tokenizer}, "
            "which is not on the hub; type data.tokenizer_revision=null as well",
        )
    elif d.tokenizer != "train" and not is_local_tokenizer(d.tokenizer) and not _is_commit(revision):
        yield Broken(
            keys,
            f"data.tokenizer_revision={revision or 'null'} is no commit of 40 hexadecimal digits, "
            f"and data.tokenizer={d.tokenizer} is a name on the hub; set the commit, or data.tokenizer to a path "
            "that ends in .json",
        )


def _is_commit(revision: str | None) -> bool:
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def corpus_files(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    d = config.data
    if not isinstance(d, C4FilesConfig):
        return
    if d.files is None:
        yield Broken(
            ("data.files",),
            "data.files=null, and data=c4_files reads local files; set data.files=FOLDER with c4-train.*.json.gz "
            "and c4-validation.*.json.gz in it, or a glob",
        )
    elif d.validation_files is not None and not is_glob(d.files):
        yield Broken(
            ("data.files", "data.validation_files"),
            f"data.validation_files={d.validation_files} has no effect beside the folder data.files={d.files}, "
            "which holds both; set data.validation_files=null, or data.files to a glob",
        )


def markov_successors(config: RunConfig, typed: Collection[str]) -> Iterator[Broken]:
    d, vocab = config.data, config.model.vocab_size
    if isinstance(d, MarkovConfig) and d.successors >= vocab:
        yield Broken(
            ("data.successors", "model.vocab_size"),
            f"data.successors={d.successors} is not below model.vocab_size={vocab}; "
            f"set data.successors to at most {vocab - 1}",
        )


RULES: tuple[Rule, ...] = (
    one_budget,
    one_epoch_length,
    one_warmup,
    even_heads,
    whole_sequences,
    checkpoint_policy,
    extendable,
    folder_name,
    deterministic,
    attention_backend,
    compile_mode,
    optimizer_kernel,
    loader_fields,
    tokenizer_source,
    corpus_files,
    markov_successors,
)
