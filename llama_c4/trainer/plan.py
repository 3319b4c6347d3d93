"""The token budget as a list of updates that is never written down: total, virtual epochs, where each update lies.

A *block* is `context_length` (L) targets. A virtual epoch is an interval of the one stream of blocks; its end resets
nothing. All arithmetic is in exact rationals of the decimal text that the user wrote. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from llama_c4.config.errors import CheckpointError, ConfigError
from llama_c4.config.schema import TrainingConfig

MAX_EPOCHS = 1_000_000
"""Far beyond any run; a typing error in the budget is told instead of being laid out."""


@dataclass(frozen=True)
class Update:
    """One optimizer update: blocks [first_block, end_block) of the stream."""

    index: int
    """Zero-based; equals the number of updates completed before it."""
    first_block: int
    num_blocks: int
    epoch: int
    """One-based virtual epoch it belongs to."""
    ends_epoch: bool
    context_length: int

    @property
    def number(self) -> int:
        """One-based, as records and messages name it."""
        return self.index + 1

    @property
    def targets(self) -> int:
        """Prediction targets of this update."""
        return self.num_blocks * self.context_length

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_blocks

    @property
    def end_targets(self) -> int:
        """Targets consumed once it is done: the position at which the learning rate is evaluated."""
        return self.end_block * self.context_length


@dataclass
class Progress:
    """Where a run stands: four integers from which everything but the tensors follows."""

    update: int = 0
    """Updates completed."""
    micro_step: int = 0
    """Micro-steps done of the update in progress."""
    sequences: int = 0
    """Blocks consumed in all: the position in the stream, inside an update too."""
    observed: int = 0
    """Updates after which the probes have measured; behind `update` only while they do, or if they were cut short."""

    def advance(self, sequences: int) -> None:
        """One micro-step over so many sequences is done."""
        self.micro_step += 1
        self.sequences += sequences

    def finish(self, update: Update) -> None:
        """The update has been applied."""
        self.update, self.micro_step, self.sequences = update.number, 0, update.end_block

    def state_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Raises:
            CheckpointError: other keys than these, or not whole numbers from 0 on.
        """
        if set(state) != {field.name for field in dataclasses.fields(self)}:
            raise CheckpointError(f"progress in the checkpoint has the keys {sorted(state)}, not those of a run")
        if any(type(value) is not int or value < 0 for value in state.values()):
            raise CheckpointError(f"progress in the checkpoint is damaged: {state}")
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class TrainingPlan:
    """Every update of a run, computed when asked for."""

    context_length: int
    """L."""
    batch_blocks: int
    """Blocks of a full update."""
    boundaries: tuple[int, ...]
    """Blocks consumed at the end of each epoch, rising."""
    _last_updates: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ends, done, start = [], 0, 0
        for boundary in self.boundaries:
            done += -(-(boundary - start) // self.batch_blocks)
            start = boundary
            ends.append(done)
        object.__setattr__(self, "_last_updates", tuple(ends))

    @property
    def total_blocks(self) -> int:
        return self.boundaries[-1]

    @property
    def total_targets(self) -> int:
        """N, the realized budget in prediction targets."""
        return self.total_blocks * self.context_length

    @property
    def num_updates(self) -> int:
        return self._last_updates[-1]

    @property
    def num_epochs(self) -> int:
        return len(self.boundaries)

    def update(self, index: int) -> Update:
        """The update with this zero-based index; inside an epoch the last one takes what is left.

        Raises:
            IndexError: the run has no such update.
        """
        if not 0 <= index < self.num_updates:
            raise IndexError(f"update {index} is outside of the run's 0 to {self.num_updates - 1}")
        epoch = bisect_right(self._last_updates, index)
        epoch_start = self.boundaries[epoch - 1] if epoch else 0
        updates_before = self._last_updates[epoch - 1] if epoch else 0
        first = epoch_start + (index - updates_before) * self.batch_blocks
        return Update(
            index=index,
            first_block=first,
            num_blocks=min(self.batch_blocks, self.boundaries[epoch] - first),
            epoch=epoch + 1,
            ends_epoch=index + 1 == self._last_updates[epoch],
            context_length=self.context_length,
        )

    def remaining(self, progress: Progress) -> Iterator[Update]:
        """The updates still to be applied, the one in progress first.

        Raises:
            CheckpointError: the progress belongs to another plan.
        """
        self._check(progress)
        return (self.update(index) for index in range(progress.update, self.num_updates))

    def _check(self, progress: Progress) -> None:
        """The position must lie inside the update that the progress names."""
        if progress.update == self.num_updates:
            first = last = self.total_blocks
        elif progress.update < self.num_updates:
            update = self.update(progress.update)
            first, last = update.first_block, update.end_block if progress.micro_step else update.first_block
        else:
            first = last = -1
        if not first <= progress.sequences <= last:
            raise CheckpointError(
                f"the progress (update {progress.update}, micro-step {progress.micro_step}, {progress.sequences} "
                f"sequences) is no position of this run of {self.num_updates} updates and {self.total_blocks} "
                "sequences; it was saved with another budget, batch or epoch length"
            )


def build_plan(
    training: TrainingConfig, *, num_parameters: int, context_length: int, num_workers: int = 1
) -> TrainingPlan:
    """Lay out a run.

    exact: boundary k = min(ceil(k·epoch/L), ceil(total/L)) blocks. whole_updates: floor(k·epoch/B + 1/2) updates.

    Args:
        training: Budget, epoch length and batch.
        num_parameters: P, unique parameters of one model (also when several are trained together).
        context_length: L.
        num_workers: N; every boundary must divide among them.
    Raises:
        ConfigError: the numbers do not fit one another.
    """
    total = _targets(training.total_tokens, training.tokens_per_parameter, num_parameters)
    epoch = _targets(training.epoch_tokens, training.epoch_tokens_per_parameter, num_parameters)
    batch_blocks = _batch_blocks(training.batch_tokens, context_length, num_workers)
    if training.epoch_boundary == "exact":
        boundaries = _exact_boundaries(total, epoch, context_length, num_workers)
    else:
        updates = _whole_updates(total, epoch, training.batch_tokens)
        boundaries = tuple(batch_blocks * count for count in updates)
    return TrainingPlan(context_length=context_length, batch_blocks=batch_blocks, boundaries=boundaries)


def _targets(tokens: int | None, per_parameter: float | None, num_parameters: int) -> Fraction:
    """A budget in targets, not rounded. The shortest decimal of a float is what the user wrote: 0.1 is 1/10."""
    if tokens is not None:
        return Fraction(tokens)
    return Fraction(str(per_parameter)) * num_parameters


def _batch_blocks(batch_tokens: int, context_length: int, num_workers: int) -> int:
    blocks, rest = divmod(batch_tokens, context_length)
    if rest:
        near = max(1, round(batch_tokens / context_length)) * context_length
        raise ConfigError(
            f"training.batch_tokens={batch_tokens} is not a multiple of model.context_length={context_length}; "
            f"set training.batch_tokens={near}"
        )
    if blocks % num_workers:
        raise ConfigError(
            f"training.batch_tokens={batch_tokens} is {blocks} sequences, which {num_workers} workers cannot share "
            f"equally; set training.batch_tokens={-(-blocks // num_workers) * num_workers * context_length}"
        )
    return blocks


def _exact_boundaries(total: Fraction, epoch: Fraction, context_length: int, num_workers: int) -> tuple[int, ...]:
    """Boundary k = min(ceil(k·epoch/L), ceil(total/L)), until the total is reached."""
    if epoch < context_length and epoch < total:
        raise ConfigError(
            f"training.epoch_tokens: a virtual epoch of {float(epoch):g} targets is shorter than one sequence of "
            f"{context_length}, so some epochs would be empty; set it to {context_length} or more"
        )
    last = math.ceil(total / context_length)
    _check_count(math.ceil(total / epoch))
    count = math.floor((last - 1) * context_length / epoch) + 1  # the first k with ceil(k·epoch/L) >= last
    boundaries = tuple(min(math.ceil(k * epoch / context_length), last) for k in range(1, count + 1))
    for k, boundary in enumerate(boundaries, start=1):
        if boundary % num_workers:
            raise ConfigError(
                f"training.epoch_boundary=exact: virtual epoch {k} ends after {boundary} sequences, which "
                f"{num_workers} workers cannot share equally; set training.total_tokens and training.epoch_tokens "
                f"to multiples of {num_workers * context_length}, or training.epoch_boundary=whole_updates"
            )
    return boundaries


def _check_count(epochs: int) -> None:
    if epochs > MAX_EPOCHS:
        raise ConfigError(
            f"training.total_tokens: the budget is {epochs} virtual epochs, more than {MAX_EPOCHS}; set a longer "
            "training.epoch_tokens, or a smaller budget"
        )


def _whole_updates(total: Fraction, epoch: Fraction, batch_tokens: int) -> list[int]:
    """Cumulative updates after epoch k = floor(k·epoch/B + 1/2), half up.

    The total must be a whole number of epochs: only then has a longer budget the shorter one as an exact prefix.
    """
    count = total / epoch
    if count.denominator != 1:
        raise ConfigError(
            f"training.epoch_boundary=whole_updates needs a whole number of virtual epochs, and {float(total):g} "
            f"targets are {float(count):g} epochs of {float(epoch):g}; change the budget or the epoch length, "
            "or set training.epoch_boundary=exact"
        )
    _check_count(int(count))
    updates = [math.floor(k * epoch / batch_tokens + Fraction(1, 2)) for k in range(1, int(count) + 1)]
    for k, (before, after) in enumerate(zip([0, *updates], updates, strict=False), start=1):
        if after == before:
            raise ConfigError(
                f"training.epoch_boundary=whole_updates: virtual epoch {k} of {float(epoch):g} targets has no update "
                f"of training.batch_tokens={batch_tokens}; set a longer epoch or a smaller batch"
            )
    return updates
