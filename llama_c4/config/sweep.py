"""A sweep before its first job runs: all jobs composed and checked, and none in the folder of another."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, final

from llama_c4.config.compose import compose_config, expand_sweep
from llama_c4.config.errors import ConfigError
from llama_c4.config.identity import recipe_identity, run_folder, run_label
from llama_c4.config.overrides import read_overrides
from llama_c4.config.rules import MAX_NAME_BYTES
from llama_c4.config.schema import RunConfig


@final
@dataclasses.dataclass(frozen=True)
class Job:
    """One job of a sweep: its number from 0, its overrides in Hydra's grammar, what varies in it, its configuration."""

    number: int
    overrides: tuple[str, ...]
    label: str
    config: RunConfig


def plan_sweep(overrides: Sequence[str]) -> list[Job]:
    """All jobs of a sweep, valid and with folders of their own.

    `run.on_finished=refuse` becomes `skip`: a sweep that is started again goes on where it ended. Jobs of one recipe
    (only machine or observation settings vary) get names of their own; every other job is the run that it is alone.
    Raises:
        ConfigError: The sweep cannot be read, jobs are faulty (each named) or two jobs are the same run.
    """
    fixed = [o for o in read_overrides(overrides).hydra if o.key == "hydra.job.chdir"]
    if fixed:
        raise ConfigError(f"{fixed[0].text}: relative paths mean the working directory in every job; leave it out")
    expanded = expand_sweep(overrides)
    labels = _labels(expanded)
    jobs, faults = [], []
    for number, (job, label) in enumerate(zip(expanded, labels, strict=True)):
        try:
            jobs.append(Job(number, tuple(job), label, _skip_finished(compose_config(job))))
        except ConfigError as error:
            faults += [(f"job {number} ({label})", fault) for fault in error.faults]
    if faults:
        raise ConfigError(*_merge(faults, len(expanded)))
    return _with_own_folders(jobs)


def _labels(expanded: list[list[str]]) -> list[str]:
    """What varies in each job, as typed: `optim.lr=0.001 runtime.seed=2`; all of it where nothing varies."""
    varying = [len(set(values)) > 1 for values in zip(*expanded, strict=True)]
    shown = varying if any(varying) else [True] * len(varying)
    return [
        " ".join(o.lstrip("+") for o, show in zip(job, shown, strict=True) if show) or "defaults" for job in expanded
    ]


def _merge(faults: list[tuple[str, str]], num_jobs: int) -> list[str]:
    """One message a fault, with the jobs that have it; a fault of every job is said once."""
    jobs_of: dict[str, list[str]] = {}
    for job, fault in faults:
        jobs_of.setdefault(fault, []).append(job)
    return [f"{'every job' if len(jobs) == num_jobs else ', '.join(jobs)}: {fault}" for fault, jobs in jobs_of.items()]


def _skip_finished(config: RunConfig) -> RunConfig:
    if config.run.on_finished != "refuse":
        return config
    # For the type checker the schema's decorator hides that these are dataclasses.
    folder = dataclasses.replace(cast("Any", config.run), on_finished="skip")
    return dataclasses.replace(cast("Any", config), run=folder)


def _with_own_folders(jobs: list[Job]) -> list[Job]:
    """The jobs, those of one recipe named apart by what varies in them; two that cannot be told apart are refused."""
    jobs_of: dict[Path, list[Job]] = {}
    for job in jobs:
        jobs_of.setdefault(run_folder(job.config), []).append(job)
    own = {job.number: _named(job) if len(jobs_of[run_folder(job.config)]) > 1 else job for job in jobs}
    folders: dict[Path, Job] = {}
    for job in own.values():
        former = folders.setdefault(run_folder(job.config), job)
        if former is not job:
            raise ConfigError(_shared(former, job))
    return list(own.values())


def _named(job: Job) -> Job:
    """A job whose recipe another one has too, in a folder that says what else varies; a name that was given stays."""
    if job.config.run.name is not None:
        return job
    return _with_folder(
        job, name=f"{run_label(job.config)}-{re.sub(r'[^A-Za-z0-9._-]+', '_', job.label)}"[:MAX_NAME_BYTES]
    )


def _shared(a: Job, b: Job) -> str:
    folder, name = run_folder(a.config), a.config.run.name
    key = next((o.split("=")[0] for o in a.label.split(" ") if not o.startswith("run.name=")), "runtime.seed")
    way = f"leave run.name={name} out, or let it vary with the rest: run.name='{name}-${{{key}}}'"
    if recipe_identity(a.config) == recipe_identity(b.config):
        way = "they are the same run; leave one of them out"
    return f"jobs {a.number} ({a.label}) and {b.number} ({b.label}) would share the run folder {folder}: {way}"


def _with_folder(job: Job, *, name: str) -> Job:
    folder = dataclasses.replace(cast("Any", job.config.run), name=name)
    return dataclasses.replace(job, config=dataclasses.replace(cast("Any", job.config), run=folder))
