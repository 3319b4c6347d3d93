"""The command `prepare`: the token cache that the run of a configuration needs. No torch."""

from __future__ import annotations

from llama_c4.config.schema import RunConfig
from llama_c4.data.cache import describe_cache
from llama_c4.data.order import tokens_needed
from llama_c4.data.prepare import prepare
from llama_c4.model.accounting import num_parameters
from llama_c4.trainer.plan import build_plan


def run_preparation(config: RunConfig, *, verify: bool) -> int:
    """Prepare the token cache, or check the one that is there.

    Raises:
        ConfigError: Budget, epochs and batch do not fit.
        DataError: The source, the tokenizer or an existing cache cannot be used.
    """
    context_length = config.model.context_length
    plan = build_plan(config.training, num_parameters=num_parameters(config.model), context_length=context_length)
    cache = prepare(
        config.data,
        vocab_size=config.model.vocab_size,
        context_length=context_length,
        train_tokens_needed=tokens_needed(config.data, total_blocks=plan.total_blocks, context_length=context_length),
        verify=verify,
        progress=config.logging.progress != "off",
    )
    print(describe_cache(cache))
    return 0
