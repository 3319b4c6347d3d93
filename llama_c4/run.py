"""The assembler: from a configuration to a trained, evaluated, recorded run. The one place where all parts meet."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast, final

from llama_c4 import __version__
from llama_c4.assemble import cache_of, check_memory, engine_of, plan_of
from llama_c4.checkpoint.header import Position, StateHeader
from llama_c4.checkpoint.policy import export_epochs
from llama_c4.checkpoint.run_folder import RunFolder
from llama_c4.checkpoint.store import CheckpointStore
from llama_c4.config.compose import load_config, to_yaml
from llama_c4.config.errors import DivergedError, TrainingError
from llama_c4.config.identity import recipe_differences, recipe_identity, run_folder, settings_of_kind
from llama_c4.config.schema import RunConfig
from llama_c4.data.cache import TokenCache, describe_cache
from llama_c4.data.loader import BlockStream, build_stream
from llama_c4.evaluation.probe import SubsetProbe, full_record
from llama_c4.evaluation.validator import Validator
from llama_c4.metrics.console import build_display, open_log
from llama_c4.metrics.logger import RunLogger
from llama_c4.metrics.records import to_strict
from llama_c4.metrics.sinks import Display, JsonlSink, StatusDisplay
from llama_c4.metrics.text import Extent
from llama_c4.metrics.throughput import PeakMemory, TrainingClock
from llama_c4.metrics.wandb_sink import WandbSink
from llama_c4.model.accounting import num_non_embedding, num_parameters
from llama_c4.optim.lr_schedule import build_schedule, last_extensible_target
from llama_c4.runtime.context import Runtime, build_runtime
from llama_c4.runtime.environment import environment
from llama_c4.runtime.seeding import seed_global_generators
from llama_c4.runtime.stop import Stopped, StopRequest
from llama_c4.trainer.loop import train
from llama_c4.trainer.plan import Progress, TrainingPlan
from llama_c4.trainer.sync import SyncEngine


class Stop(Protocol):
    """A request to stop, as `StopRequest` is one."""

    @property
    def requested(self) -> bool: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def exit_code(self) -> int: ...


def run_training(config: RunConfig, *, resume: Path | None = None, stop: Stop | None = None) -> int:
    """Train to the end of the budget, or on from where an earlier start of the same run was stopped.

    Args:
        config: The configuration.
        resume: The run folder to go on in; None takes the folder that belongs to the configuration.
        stop: Asks the run to stop; None listens to signals and the deadline of the configuration.
    Returns:
        0 finished; 75 or 130 stopped, with a state from which the same command continues.
    Raises:
        ConfigError, DataError, CheckpointError: The run cannot start; nothing was written.
        TrainingError: The run cannot go on; its folder says why.
    """
    place = run_folder(config) if resume is None else resume
    plan = plan_of(config)
    export_epochs(config.training, num_epochs=plan.num_epochs)
    cache = cache_of(config)
    with ExitStack() as stack:
        if stop is None:
            minutes = config.training.stop_after_minutes
            stop = stack.enter_context(StopRequest(deadline_seconds=None if minutes is None else 60 * minutes))
        clock = TrainingClock()
        clock.pause()
        runtime = build_runtime(config.runtime, run_dir=place)
        check_memory(config, runtime)
        seed_global_generators(config.runtime.seed)
        stream = _open_stream(config, cache, plan, runtime)
        stack.callback(stream.close)
        engine = engine_of(config, runtime)
        folder = stack.enter_context(_claim(config, place))
        if folder.is_finished:
            print(f"{place}: finished already (loss {folder.read_result().get('loss')}); nothing to do")
            return 0
        return _Run(config, plan, cache, runtime, stream, engine, folder, stop, clock).complete()


def _claim(config: RunConfig, place: Path) -> RunFolder:
    return RunFolder.claim(
        place,
        config_yaml=to_yaml(config),
        differences=lambda saved: recipe_differences(load_config(saved), config),
        on_finished=config.run.on_finished,
        extend=config.training.extend,
    )


def _open_stream(config: RunConfig, cache: TokenCache, plan: TrainingPlan, runtime: Runtime) -> BlockStream:
    return build_stream(
        config.data,
        cache,
        context_length=config.model.context_length,
        seed=config.runtime.seed,
        total_blocks=plan.total_blocks,
        device=runtime.device,
    )


@final
class _Run:
    """One start of a run in its claimed folder."""

    def __init__(
        self,
        config: RunConfig,
        plan: TrainingPlan,
        cache: TokenCache,
        runtime: Runtime,
        stream: BlockStream,
        engine: SyncEngine,
        folder: RunFolder,
        stop: Stop,
        clock: TrainingClock,
    ) -> None:
        self.config, self.plan, self.cache, self.runtime = config, plan, cache, runtime
        self.stream, self.engine, self.folder, self.stop = stream, engine, folder, stop
        self.progress = Progress()
        self.environment = environment(runtime)
        self.logger = self._build_logger(clock)
        self.store = self._build_store()
        self.validator = Validator(
            cache,
            config.evaluation,
            context_length=config.model.context_length,
            runtime=runtime,
            stop_requested=lambda: stop.requested,
        )

    def complete(self) -> int:
        """Restore, train, evaluate and write the result; the folder's status says how it went."""
        code = 1
        try:
            with self._failures_told():
                code = self._train_and_evaluate()
            return code
        finally:
            self.logger.close(code)

    def _train_and_evaluate(self) -> int:
        with self.logger.phase("startup"):
            self._restore()
            self._announce()
        schedule = build_schedule(
            self.config.lr_schedule,
            batch_tokens=self.config.training.batch_tokens,
            total_targets=self.plan.total_targets,
        )
        is_done = train(
            self.engine,
            self.stream,
            self.plan,
            self.progress,
            micro_batch_size=self.config.training.micro_batch_size,
            peak_lr=self.config.optim.lr,
            schedule=schedule,
            checkpoints=self.store,
            logger=self.logger,
            probes=[SubsetProbe(self.validator, self.plan)],
            stop=self.stop,
        )
        if not is_done:
            return self._stopped()
        return self._finish()

    def _restore(self) -> None:
        """Continue from the furthest state, or start; then write down which."""
        self.store.load_newest()
        self.logger.begin(update=self.progress.update, targets=self._targets)
        loaded = self.store.loaded
        self.folder.record_start(
            config_yaml=to_yaml(self.config),
            code_version=_code_version(self.environment),
            total_targets=self.plan.total_targets,
            resumed_from=None if loaded is None else loaded.path,
            update=self.progress.update,
            sequences=self.progress.sequences,
            machine_changes=() if loaded is None else loaded.machine_changes,
            is_extended=loaded is not None and loaded.is_extended,
        )
        self.folder.write_environment(self._full_environment())

    def _announce(self) -> None:
        parameters = num_parameters(self.config.model)
        self.logger.message(
            f"{self.folder.path}: {parameters:,} parameters, {self.plan.total_targets:,} targets in "
            f"{self.plan.num_updates:,} updates and {self.plan.num_epochs} epochs, on {self.runtime.device} in "
            f"{self.runtime.precision} with {self.runtime.threads} threads"
        )
        passes = self.plan.total_targets / max(1, self.cache.train.num_tokens)
        self.logger.message(f"{describe_cache(self.cache)}; training reads {passes:.2f} of the training tokens once")

    def _finish(self) -> int:
        """The last update is done and final.pt written: evaluate the whole split, and write the result."""
        record: dict[str, Any] = {}
        if self.config.evaluation.full_at_end:
            try:
                with self.logger.phase("evaluation"):
                    record = full_record(self.validator, self.engine, self.plan, self.progress)
            except Stopped:
                return self._stopped()
            self.logger.log_record(record)
        self.folder.write_result(to_strict(self._result(record)))
        self._status("finished")
        self.store.finish()
        return 0

    def _stopped(self) -> int:
        if self.progress.update == self.plan.num_updates:
            self.store.rescue(self.progress)
        message = f"stopped by {self.stop.reason}; the same command continues"
        self._status("interrupted", message)
        self.logger.message(message)
        return self.stop.exit_code

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """The status says why a run ended early, whatever the reason."""
        try:
            yield
        except TrainingError as error:
            self._status("diverged" if isinstance(error, DivergedError) else "failed", str(error))
            self._log.message(str(error))  # the terminal gets it from whoever catches it
            raise
        except KeyboardInterrupt:
            self._status("interrupted", "interrupted at once; the same command continues from the last state")
            raise
        except BaseException as error:
            self._status("failed", f"{type(error).__name__}: {error}")
            raise

    def _status(self, state: Any, message: str = "") -> None:
        self.folder.write_status(
            state,
            update=self.progress.update,
            targets=self._targets,
            total_targets=self.plan.total_targets,
            message=message,
        )

    @property
    def _targets(self) -> int:
        """Prediction targets consumed."""
        return self.progress.sequences * self.plan.context_length

    # --- parts --------------------------------------------------------------------------------------------------------

    def _build_logger(self, clock: TrainingClock) -> RunLogger:
        extent = Extent(
            num_updates=self.plan.num_updates, num_epochs=self.plan.num_epochs, total_targets=self.plan.total_targets
        )
        screen = build_display(self.config.logging.progress, stream=sys.stdout, extent=extent)
        self._log = log = open_log(self.folder.path / "run.log", extent=extent)
        status = StatusDisplay(
            lambda state, update, targets: self.folder.write_status(
                state, update=update, targets=targets, total_targets=self.plan.total_targets
            )
        )
        displays: list[Display] = [log, status] if screen is None else [screen, log, status]
        return RunLogger(
            JsonlSink(self.folder.path / "metrics.jsonl"),
            sinks=self._views(displays),
            displays=displays,
            log_every=self.config.logging.log_every,
            num_updates=self.plan.num_updates,
            clock=clock,
            memory=PeakMemory(self.runtime.peak_memory_bytes, self.runtime.reset_peak_memory),
            synchronize=self.runtime.synchronize,
            on_best=self._write_best,
        )

    def _views(self, displays: list[Display]) -> list[WandbSink]:
        settings = self.config.logging.wandb
        if settings.mode == "off":
            return []

        def tell(text: str) -> None:
            for display in displays:
                display.message(text)

        tree = dataclasses.asdict(cast("Any", self.config))
        return [WandbSink(self.folder.path, settings=settings, run_id=self.folder.run_id, config=tree, message=tell)]

    def _write_best(self, record: dict[str, Any] | None) -> None:
        if record is not None:
            record = record | {"weights": self.store.weights_of(record["epoch"])}
        self.folder.write_best(record)

    def _build_store(self) -> CheckpointStore:
        return CheckpointStore(
            self.folder.path,
            training=self.config.training,
            num_epochs=self.plan.num_epochs,
            header=self._header(),
            parts={
                "engine": self.engine,
                "progress": self.progress,
                "loader": _LoaderPart(self.stream, self.progress),
                "logger": self.logger,
            },
            weights=lambda: self.engine.evaluation_model().state_dict(),
            message=self.logger.message,
            cache_ancestors=self.cache.ancestors,
            refuse_extension=self._refuse_extension,
            saving=lambda: self.logger.phase("saving"),
        )

    def _refuse_extension(self, header: StateHeader, position: Position) -> str | None:
        """Why a state cannot go on to the larger budget: its learning rates knew the smaller one."""
        last = last_extensible_target(
            self.config.lr_schedule,
            batch_tokens=self.config.training.batch_tokens,
            total_targets=header.total_targets,
        )
        if last is None:
            return f"every learning rate of lr_schedule={self.config.lr_schedule.name} depends on the budget"
        consumed = position.sequences * self.plan.context_length
        if consumed > last:
            return (
                f"its decay began after {last} targets and it has consumed {consumed}; continue from an earlier state"
            )
        return None

    def _header(self) -> StateHeader:
        data = self.config.data
        unit = (
            f"groups of {data.shuffle_group_size} shards"
            if data.loader == "v2"
            else f"ranges of {data.buffer_size_mib} MiB"
        )
        return StateHeader(
            recipe_identity=recipe_identity(self.config),
            recipe=settings_of_kind(self.config, "recipe"),
            machine=settings_of_kind(self.config, "machine"),
            config=to_yaml(self.config),
            cache_identity=self.cache.identity,
            loader=f"{data.loader}, {unit}",
            precision=self.runtime.precision,
            total_targets=self.plan.total_targets,
            code_version=_code_version(self.environment),
        )

    # --- what is written ----------------------------------------------------------------------------------------------

    def _full_environment(self) -> dict[str, Any]:
        return self.environment | {
            "run_id": self.folder.run_id,
            "recipe_identity": recipe_identity(self.config),
            "cache_identity": self.cache.identity,
            "parameters": num_parameters(self.config.model),
            "non_embedding_parameters": num_non_embedding(self.config.model),
        }

    def _result(self, record: dict[str, Any]) -> dict[str, Any]:
        measured = {name: record.get(name) for name in ("loss", "perplexity", "bits_per_byte", "num_targets")}
        return {
            "status": "finished",
            **measured,
            "entropy_floor": self.cache.entropy_floor,
            "update": self.progress.update,
            "targets": self._targets,
            "total_targets": self.plan.total_targets,
            "training_seconds": self.logger.training_seconds,
            "elapsed_seconds": self.logger.elapsed_seconds,
            "best": None if self.logger.best is None else to_strict(self.logger.best),
            "recipe_identity": recipe_identity(self.config),
            "cache_identity": self.cache.identity,
            "num_parameters": num_parameters(self.config.model),
            "run": self.folder.path.name,
            "run_id": self.folder.run_id,
        }


@final
class _LoaderPart:
    """The loader in a checkpoint: scalars that are written with the position and checked against the stream."""

    def __init__(self, stream: BlockStream, progress: Progress) -> None:
        self._stream, self._progress = stream, progress

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict(self._progress.sequences)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.check_state(state)


def _code_version(found: dict[str, Any]) -> str:
    git = found.get("git")
    if not git:
        return __version__
    return f"{__version__} ({git['commit'][:12]}{', changed' if git.get('dirty') else ''})"
