"""Learning-rate schedules: pure functions of the position c, the targets consumed after the update.

Every schedule is a multiplier of the peak. All warm up linearly, c/W for c <= W; they differ in what follows. The
position decides alone, so a resumed run needs no state of a scheduler. No torch here.

N is the realized total in targets, W the warm-up in targets, d the decay fraction, r the ratio at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import ConstantConfig, CosineConfig, LinearConfig, LrScheduleConfig, WsdConfig

Multiplier = Callable[[int], float]


def build_schedule(config: LrScheduleConfig, *, batch_tokens: int, total_targets: int) -> Multiplier:
    """Make the function from consumed targets to the multiplier of the peak learning rate.

    Args:
        config: One schedule.
        batch_tokens: Targets of a full update; `warmup_steps` counts in these.
        total_targets: N, the realized total of the plan.
    """
    warmup = warmup_targets(config, batch_tokens=batch_tokens, total_targets=total_targets)
    return SCHEDULES[type(config)](config, warmup, total_targets)


def warmup_targets(config: LrScheduleConfig, *, batch_tokens: int, total_targets: int) -> Fraction:
    """W = warmup_steps · batch_tokens, or warmup_fraction · N, exactly.

    Raises:
        ConfigError: both are set, or none.
    """
    if (config.warmup_steps is None) == (config.warmup_fraction is None):
        raise ConfigError(
            f"lr_schedule.warmup_steps={config.warmup_steps} and lr_schedule.warmup_fraction={config.warmup_fraction}: "
            "exactly one of them is set and the other is null"
        )
    if config.warmup_steps is not None:
        return Fraction(config.warmup_steps * batch_tokens)
    return Fraction(str(config.warmup_fraction)) * total_targets


def warmed_up(consumed: int, *, warmup: Fraction, after: Callable[[int], float]) -> float:
    """c/W for c <= W, then `after(c)`. A run that ends inside warm-up keeps the linear value."""
    return float(consumed / warmup) if consumed <= warmup and warmup > 0 else after(consumed)


def progress(consumed: int, *, start: Fraction, end: int) -> float:
    """q = (c − start) / (end − start) within [0, 1]; 1 where nothing lies between start and end."""
    if start >= end:
        return 1.0
    return float(min(max((consumed - start) / (end - start), Fraction(0)), Fraction(1)))


def decay_start(decay_fraction: float, *, warmup: Fraction, total_targets: int) -> Fraction:
    """(1 − d)·N, but never inside warm-up: a decay that would overlap it starts at W, from the peak."""
    return max((1 - Fraction(str(decay_fraction))) * total_targets, warmup)


def build_cosine(config: CosineConfig, warmup: Fraction, total: int) -> Multiplier:
    """r + (1 − r)(1 + cos πq)/2 with q = (c − W)/(N − W); r where W >= N and c > W."""
    r = config.min_lr_ratio

    def after(c: int) -> float:
        return r + (1 - r) * (1 + math.cos(math.pi * progress(c, start=warmup, end=total))) / 2

    return lambda c: warmed_up(c, warmup=warmup, after=after)


def build_wsd(config: WsdConfig, warmup: Fraction, total: int) -> Multiplier:
    """1 until (1 − d)N, then 1 − sqrt(q), 0 at N; without a decay (d = 0) it stays at 1."""
    start = decay_start(config.decay_fraction, warmup=warmup, total_targets=total)

    def after(c: int) -> float:
        if config.decay_fraction == 0:
            return 1.0
        return 1 - math.sqrt(progress(c, start=start, end=total))

    return lambda c: warmed_up(c, warmup=warmup, after=after)


def build_linear(config: LinearConfig, warmup: Fraction, total: int) -> Multiplier:
    """1 until (1 − d)N, then 1 − (1 − r)q, r at N; without a decay (d = 0) it stays at 1."""
    start = decay_start(config.decay_fraction, warmup=warmup, total_targets=total)

    def after(c: int) -> float:
        if config.decay_fraction == 0:
            return 1.0
        return 1 - (1 - config.min_lr_ratio) * progress(c, start=start, end=total)

    return lambda c: warmed_up(c, warmup=warmup, after=after)


def build_constant(config: ConstantConfig, warmup: Fraction, total: int) -> Multiplier:
    """1 after warm-up."""
    return lambda c: warmed_up(c, warmup=warmup, after=lambda _: 1.0)


SCHEDULES: dict[type, Callable[..., Multiplier]] = {
    CosineConfig: build_cosine,
    WsdConfig: build_wsd,
    LinearConfig: build_linear,
    ConstantConfig: build_constant,
}


def last_extensible_target(config: LrScheduleConfig, *, batch_tokens: int, total_targets: int) -> int | None:
    """Up to where the schedule does not know its total, so that a run may continue to a larger one.

    Returns:
        constant: the total. wsd: the last target before its decay. None where every rate depends on the total (cosine,
        linear, any warm-up that is a fraction of the total).
    """
    if config.warmup_fraction is not None or not isinstance(config, ConstantConfig | WsdConfig):
        return None
    if isinstance(config, ConstantConfig) or config.decay_fraction == 0:
        return total_targets
    warmup = warmup_targets(config, batch_tokens=batch_tokens, total_targets=total_targets)
    return min(
        math.floor(decay_start(config.decay_fraction, warmup=warmup, total_targets=total_targets)), total_targets
    )
