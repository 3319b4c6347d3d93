"""Learning-rate schedules at hand-computed points; a position is in targets, here 8 an update."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import ConstantConfig, CosineConfig, LinearConfig, WsdConfig
from llama_c4.optim.lr_schedule import SCHEDULES, build_schedule, last_extensible_target

B = 8


def cosine(ratio: float = 0.1, **warmup: Any) -> CosineConfig:
    return CosineConfig(name="cosine", min_lr_ratio=ratio, **_warmup(warmup))


def wsd(decay: float = 0.1, **warmup: Any) -> WsdConfig:
    return WsdConfig(name="wsd", decay_fraction=decay, **_warmup(warmup))


def linear(decay: float = 0.8, ratio: float = 0.3, **warmup: Any) -> LinearConfig:
    return LinearConfig(name="linear", decay_fraction=decay, min_lr_ratio=ratio, **_warmup(warmup))


def constant(**warmup: Any) -> ConstantConfig:
    return ConstantConfig(name="constant", **_warmup(warmup))


def _warmup(given: dict[str, Any]) -> dict[str, Any]:
    return {"warmup_steps": None, "warmup_fraction": None} | (given or {"warmup_steps": 50})


def at(config: Any, update: float, *, total: int = 1000) -> float:
    """The multiplier after so many updates of a run of `total`."""
    return build_schedule(config, batch_tokens=B, total_targets=total * B)(int(update * B))


@pytest.mark.parametrize(
    ("config", "update", "multiplier"),
    [
        (cosine(), 0, 0), (cosine(), 1, 0.02), (cosine(), 25, 0.5), (cosine(), 50, 1), (cosine(), 525, 0.55),
        (cosine(), 1000, 0.1), (cosine(), 1001, 0.1), (cosine(), 5000, 0.1),
        (cosine(ratio=0), 1000, 0), (cosine(ratio=1), 777, 1),
        (wsd(), 25, 0.5), (wsd(), 50, 1), (wsd(), 900, 1), (wsd(), 925, 0.5), (wsd(), 964, 0.2), (wsd(), 1000, 0),
        (wsd(), 2000, 0),
        (linear(), 25, 0.5), (linear(), 50, 1), (linear(), 200, 1), (linear(), 600, 0.65), (linear(), 1000, 0.3),
        (linear(), 1500, 0.3),
        (constant(), 25, 0.5), (constant(), 50, 1), (constant(), 1000, 1), (constant(), 9999, 1),
    ],
)  # fmt: skip
def test_multiplier_at_hand_computed_points(config: Any, update: int, multiplier: float) -> None:
    assert at(config, update) == pytest.approx(multiplier, abs=1e-12)


GUIDE = {  # the table of docs/schedules.md, which has three digits
    "update": [1, 25, 50, 200, 525, 600, 900, 925, 964, 1000, 2000],
    "cosine": [0.02, 0.5, 1, 0.946, 0.55, 0.440, 0.124, 0.114, 0.103, 0.1, 0.1],
    "wsd": [0.02, 0.5, 1, 1, 1, 1, 1, 0.5, 0.2, 0, 0],
    "linear": [0.02, 0.5, 1, 1, 0.716, 0.65, 0.388, 0.366, 0.332, 0.3, 0.3],
    "constant": [0.02, 0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
}


@pytest.mark.parametrize("build", [cosine, wsd, linear, constant])
def test_the_guides_table_is_what_the_schedules_give(build: Any) -> None:
    assert [at(build(), update) for update in GUIDE["update"]] == pytest.approx(GUIDE[build().name], abs=5.1e-4)


@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (12, 10), (0, 1), (0, 10)])
@pytest.mark.parametrize("build", [cosine, wsd, linear, constant])
def test_short_runs_warm_up_linearly_and_never_divide_by_zero(build: Any, warmup: int, total: int) -> None:
    values = [at(build(warmup_steps=warmup), update, total=total) for update in range(1, total + 3)]
    inside = [update / warmup for update in range(1, min(warmup, total + 2) + 1)]
    assert values[: len(inside)] == pytest.approx(inside, abs=1e-15)
    end = {"cosine": 0.1, "wsd": 0.0, "linear": 0.3, "constant": 1.0}[build().name]
    assert values[-1] == pytest.approx(end if warmup < total + 2 else 1, abs=1e-15)


def test_a_run_that_ends_inside_warm_up_keeps_the_linear_value() -> None:
    assert at(cosine(warmup_steps=12), 10, total=10) == pytest.approx(10 / 12)
    assert at(cosine(warmup_steps=10), 10, total=10) == 1
    assert at(cosine(warmup_steps=11), 12, total=10) == pytest.approx(0.1)


def test_peak_is_reached_exactly_at_the_end_of_warm_up_and_first_update_gets_its_share() -> None:
    for build in (cosine, wsd, linear, constant):
        assert at(build(warmup_steps=312), 1, total=3120) == 1 / 312
        assert at(build(warmup_steps=312), 312, total=3120) == 1.0


def test_fraction_of_the_realized_total_is_the_other_form_of_warm_up() -> None:
    assert at(cosine(warmup_fraction=0.05), 25) == pytest.approx(0.5)
    assert at(cosine(warmup_fraction=0.05), 50) == 1.0
    assert at(constant(warmup_fraction=0.3), 0.3, total=1) == pytest.approx(2 / 2.4)  # 2 of 2.4 targets
    assert at(wsd(warmup_fraction=0), 1) == 1.0 and at(wsd(warmup_fraction=1), 500) == 0.5


def test_warm_up_in_updates_depends_neither_on_budget_nor_on_what_a_batch_is_split_into() -> None:
    short, long = (build_schedule(cosine(), batch_tokens=B, total_targets=n * B) for n in (200, 90_000))
    assert [short(c) for c in range(50 * B + 1)] == [long(c) for c in range(50 * B + 1)]


@pytest.mark.parametrize(
    ("decay", "update", "multiplier"),
    [
        (0, 999, 1), (0, 1000, 1), (0, 1001, 1),  # no decay
        (1, 50, 1), (1, 287.5, 0.5), (1, 1000, 0),  # decay over all that warm-up left
        (1e-20, 999, 1), (1e-20, 1000, 0),  # shorter than a target, and still 0 at the end
        (0.97, 50, 1), (0.97, 287.5, 0.5),  # would begin inside warm-up: begins after it
    ],
)  # fmt: skip
def test_wsd_with_no_short_full_and_overlapping_decay(decay: float, update: float, multiplier: float) -> None:
    assert at(wsd(decay), update) == pytest.approx(multiplier, abs=1e-12)


def test_wsd_decay_equals_its_formula_on_the_last_tenth() -> None:
    for update in range(901, 1001):
        assert at(wsd(), update) == pytest.approx(1 - ((update - 900) / 100) ** 0.5, abs=1e-12)


@given(
    warmup=st.integers(0, 30),
    total=st.integers(1, 60),
    decay=st.sampled_from([0, 1e-20, 0.1, 0.3, 1]),
    at=st.integers(0, 700),
)
def test_every_schedule_stays_within_0_and_1_and_falls_after_warm_up(
    warmup: int, total: int, decay: float, at: int
) -> None:
    builders = (cosine(warmup_steps=warmup), wsd(decay, warmup_steps=warmup), linear(decay, warmup_steps=warmup))
    for config in builders:
        multiplier = build_schedule(config, batch_tokens=B, total_targets=total * B)
        assert 0 <= multiplier(at) <= 1
        if at > warmup * B:
            assert multiplier(at + 1) <= multiplier(at)


def test_table_has_every_schedule_of_the_configuration() -> None:
    assert set(SCHEDULES) == {CosineConfig, WsdConfig, LinearConfig, ConstantConfig}


@pytest.mark.parametrize("warmup", [{"warmup_steps": 3, "warmup_fraction": 0.1}, {"warmup_fraction": None}])
def test_both_or_no_form_of_warm_up_is_refused(warmup: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="exactly one of them"):
        at(cosine(**warmup), 1)


def test_where_a_longer_budget_would_still_have_given_the_same_rates() -> None:
    def last(config: Any) -> int | None:
        return last_extensible_target(config, batch_tokens=B, total_targets=1000 * B)

    assert last(constant()) == 8000 and last(wsd()) == 7200 and last(wsd(0)) == 8000
    assert last(cosine()) is None and last(linear()) is None and last(constant(warmup_fraction=0.1)) is None
    longer = build_schedule(wsd(), batch_tokens=B, total_targets=5000 * B)
    shorter = build_schedule(wsd(), batch_tokens=B, total_targets=1000 * B)
    assert all(longer(c) == shorter(c) for c in range(7201)) and longer(7201) != shorter(7201)
