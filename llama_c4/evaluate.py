"""The command `evaluate`: the validation loss of any state."""

from __future__ import annotations

from pathlib import Path

from llama_c4.assemble import cache_of, model_of
from llama_c4.checkpoint.atomic import append_json_line
from llama_c4.checkpoint.places import CONFIG_FILE
from llama_c4.checkpoint.weights import StoredWeights, load_weights
from llama_c4.config.compose import parse_config
from llama_c4.config.errors import CheckpointError
from llama_c4.config.schema import RunConfig
from llama_c4.evaluation.validation import ValidationResult
from llama_c4.evaluation.validator import Validator
from llama_c4.runtime.context import build_runtime

EVALUATIONS_FILE = "evaluations.jsonl"


def run_evaluation(path: Path, overrides: list[str], *, subset: bool) -> int:
    """Evaluate a state on the validation split, print the loss, and note it beside the run.

    Args:
        path: A run folder (its furthest state), an export of an epoch, or a state file.
        overrides: Of evaluation.*, runtime.* and data.cache_dir.
        subset: The fixed subset instead of the whole split.
    Raises:
        CheckpointError: No such state, or it was trained on another cache.
        DataError: The cache cannot be used.
        ConfigError: A faulty override.
    """
    stored = load_weights(path)
    config = parse_config(stored.header.config, overrides, source=stored.path)
    cache = cache_of(config)
    if stored.header.cache_identity not in {cache.identity, *cache.ancestors}:
        raise CheckpointError(
            f"{stored.path}: was trained on the cache {stored.header.cache_identity[:16]}…, and {cache.path} is "
            f"{cache.identity[:16]}…; set data.cache_dir to the cache it was trained on"
        )
    runtime = build_runtime(config.runtime, run_dir=path)
    model = model_of(config, runtime)
    model.load_state_dict(dict(stored.weights))
    validator = Validator(cache, config.evaluation, context_length=config.model.context_length, runtime=runtime)
    measure = validator.subset if subset else validator.full
    result = measure(model, update=stored.position.update)
    scope = "subset" if subset else "full"
    print(_line(result, stored, scope))
    _note(stored, _record(result, stored, config, scope, cache.identity))
    return 0


def _line(result: ValidationResult, stored: StoredWeights, scope: str) -> str:
    bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits per byte"
    return (
        f"{stored.path} ({stored.position}): {scope} validation loss {result.loss:.6f} nats per target, "
        f"perplexity {result.perplexity:.3f}{bits}, {result.num_targets} targets"
    )


def _record(
    result: ValidationResult, stored: StoredWeights, config: RunConfig, scope: str, cache_identity: str
) -> dict[str, object]:
    return {
        "kind": "evaluation",
        "scope": scope,
        "state": stored.path.name,
        "update": stored.position.update,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "num_targets": result.num_targets,
        "num_blocks": result.num_blocks,
        "batch_size": config.evaluation.batch_size,
        "cache_identity": cache_identity,
    }


def _note(stored: StoredWeights, record: dict[str, object]) -> None:
    """One line in the run folder that the state lies in, where it lies in one."""
    run_dir = next(
        (p for p in list(stored.path.parents)[:3] if (p / CONFIG_FILE).exists() and (p / "status.json").exists()), None
    )
    if run_dir is not None:
        append_json_line(run_dir / EVALUATIONS_FILE, record)
