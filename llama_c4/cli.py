"""The command `llama-c4`, and what `train.py` does: read arguments, compose, hand over to the assembler.

Nothing heavy is imported before a handler needs it, so that help, completion and a wrong setting answer at once.
"""
# PYTHON_ARGCOMPLETE_OK

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import argcomplete

from llama_c4.config.errors import ConfigError, TrainingError, UserError

Handler = Callable[[argparse.Namespace], int]
Train = Callable[[Any], int]

STOPPED = (75, 130)  # exit codes of a run that a signal or a deadline stopped with a rescue state
HYDRA_COMMANDS = (
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--shell-completion",
    "-sc",
)
HYDRA_DETAILS = ("--resolve", "--package", "-p")
EVALUATION_KEYS = ("evaluation.", "runtime.", "data.cache_dir")

OVERRIDES_HELP = "GROUP=CHOICE or KEY=VALUE, such as model=50m optim.lr=1e-3"
EXAMPLES = {
    "prepare": (
        "llama-c4 prepare experiment=demo\n  llama-c4 prepare model=50m\n"
        "  llama-c4 prepare --verify data=sample model=tiny"
    ),
    "train": (
        "llama-c4 train experiment=demo\n  llama-c4 train model=50m optim=adamw_b2_099\n"
        "  llama-c4 train -m experiment=demo run.name=null optim.lr=2e-3,4e-3\n"
        "  llama-c4 train --resume outputs/demo runtime.threads=2"
    ),
    "evaluate": (
        "llama-c4 evaluate outputs/demo\n  llama-c4 evaluate outputs/demo/final.pt --subset\n"
        "  llama-c4 evaluate outputs/demo evaluation.batch_size=8 runtime.device=cpu"
    ),
    "export": "llama-c4 export outputs/demo --to outputs/demo-hf --tokenizer",
    "report": "llama-c4 report outputs/demo --out outputs/demo/report.html",
    "runs": "llama-c4 runs\n  llama-c4 runs outputs",
    "completion": 'eval "$(llama-c4 completion bash)"\n  llama-c4 completion fish | source',
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 done, 1 the run failed, 2 a mistake in the command or its data, 75 or 130 stopped by a signal.
    """
    parser = build_parser()
    argcomplete.autocomplete(parser)
    return guarded(lambda: _dispatch(parser, argv))


def train_main(argv: Sequence[str]) -> int:
    """What `train.py` does: one run from overrides, a sweep with `-m`, or a command of Hydra's such as `--cfg job`."""
    return guarded(lambda: _train_or_hydra(list(argv)))


def guarded(command: Callable[[], int]) -> int:
    """Run a command; a user's mistake becomes its message and exit code, only a fault of ours shows a traceback."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except (UserError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away: what is still buffered has nowhere to go, and the interpreter must not try at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1


# --- arguments --------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llama-c4", description="Train small Llama-style language models on English C4."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    prepare = _command(commands, "prepare", "make the token cache of a configuration, or check it", _prepare)
    _add_overrides(prepare)
    prepare.add_argument("--verify", action="store_true", help="read and hash every shard of the cache")

    train = _command(commands, "train", "train a model, resume a run, or run a sweep", _train)
    _add_overrides(train)
    train.add_argument("-m", "--multirun", action="store_true", help="a sweep: commas in a value make one job each")
    train.add_argument(
        "--resume", type=Path, metavar="RUN_FOLDER", help="go on with a run; overrides change its settings"
    )

    evaluate = _command(commands, "evaluate", "loss of a run or checkpoint on the validation split", _evaluate)
    evaluate.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    _add_overrides(evaluate)
    evaluate.add_argument("--subset", action="store_true", help="the fixed subset alone, not the whole split")

    export = _command(commands, "export", "write a checkpoint in the Hugging Face format", _export)
    export.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    export.add_argument("--tokenizer", action="store_true", help="the tokenizer too")

    report = _command(commands, "report", "curves and tables of runs as one HTML file", _report)
    report.add_argument("rest", nargs="+", metavar="RUN")
    report.add_argument("--out", type=Path, metavar="FILE.html")
    report.add_argument(
        "--wandb", choices=["online", "offline"], help="make a whole W&B run of each run's records, whatever it missed"
    )

    runs = _command(commands, "runs", "list the runs in a folder", _runs)
    runs.add_argument("folder", type=Path, nargs="?", default=Path("outputs"), metavar="FOLDER")

    completion = _command(commands, "completion", "print the completion script of a shell", _completion)
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def _command(
    commands: Any, name: str, what: str, handler: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=what,
        epilog=f"examples:\n  {EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    action = parser.add_argument("rest", nargs="*", metavar="OVERRIDE", help=OVERRIDES_HELP, default=[])
    action.completer = _complete  # type: ignore[attr-defined]


def _complete(prefix: str, action: object, parser: object, parsed_args: object) -> list[str]:
    from llama_c4.config.completion import complete_override

    return complete_override(prefix)


def _dispatch(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    # argparse ends a list of positionals at the first option; the words behind it belong to the same list here.
    args, extra = parser.parse_known_args(argv)
    unknown = [word for word in extra if word.startswith("-") or not hasattr(args, "rest")]
    if unknown:
        parser.error(f"{args.command} does not know {' '.join(unknown)}; see llama-c4 {args.command} --help")
    if extra:
        args.rest = [*args.rest, *extra]
    return args.handler(args)


# --- handlers ---------------------------------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> int:
    from llama_c4.config.compose import compose_config

    config = compose_config(args.rest)
    from llama_c4.prepare import run_preparation

    return run_preparation(config, verify=args.verify)


def _train(args: argparse.Namespace) -> int:
    if args.resume is None:
        return run_sweep(args.rest, train=_run_training) if args.multirun else _train_one(args.rest)
    if args.multirun:
        raise ConfigError("--resume goes on with one run and -m makes many; leave one of them out")
    from llama_c4.config.compose import load_config

    config = load_config(args.resume, args.rest)
    from llama_c4.run import run_training

    return run_training(config, resume=args.resume)


def _train_one(overrides: list[str]) -> int:
    from llama_c4.config.compose import compose_config

    return _run_training(compose_config(overrides))


def _run_training(config: Any) -> int:
    from llama_c4.run import run_training

    return run_training(config)


def _evaluate(args: argparse.Namespace) -> int:
    others = [o for o in args.rest if not o.lstrip("+").startswith(EVALUATION_KEYS)]
    if others:
        allowed = ", ".join(f"{key}*" if key.endswith(".") else key for key in EVALUATION_KEYS)
        raise ConfigError(
            *(f"{o}: evaluate takes {allowed}; the rest is fixed by the run, leave it out" for o in others)
        )
    from llama_c4.evaluate import run_evaluation

    return run_evaluation(args.path, args.rest, subset=args.subset)


def _export(args: argparse.Namespace) -> int:
    from llama_c4.export import run_export

    return run_export(args.path, args.to, tokenizer=args.tokenizer)


def _report(args: argparse.Namespace) -> int:
    runs = [Path(run) for run in args.rest]
    if args.out is None and args.wandb is None:
        raise ConfigError("report: nothing asked for; add --out FILE.html, --wandb offline or --wandb online")
    if args.out is not None:
        from llama_c4.report.html import write_report

        write_report(runs, args.out)
        print(f"wrote {args.out}")
    if args.wandb is not None:
        from llama_c4.metrics.wandb_sink import rebuild_wandb

        for run in runs:
            print(f"{run}: W&B run {rebuild_wandb(run, mode=args.wandb)} ({args.wandb})")
    return 0


def _runs(args: argparse.Namespace) -> int:
    from llama_c4.report.tables import print_runs

    print_runs(args.folder)
    return 0


def _completion(args: argparse.Namespace) -> int:
    print(argcomplete.shellcode(["llama-c4"], shell=args.shell))
    return 0


# --- sweeps and Hydra's own commands ----------------------------------------------------------------------------------


def _train_or_hydra(argv: list[str]) -> int:
    flags = [word.split("=")[0] for word in argv if word.startswith("-")]
    if not flags:
        return _train_one(argv)
    if set(flags) <= {"-m", "--multirun"}:
        return run_sweep([word for word in argv if not word.startswith("-")], train=_run_training)
    unknown = [flag for flag in flags if flag not in HYDRA_COMMANDS + HYDRA_DETAILS]
    if unknown or not set(flags) & set(HYDRA_COMMANDS):
        way = f"it takes overrides, -m for a sweep, or one of {', '.join(HYDRA_COMMANDS)}"
        raise ConfigError(f"{' '.join(unknown or flags)}: is nothing that train.py can do; {way}")
    return _hydra_command(argv)


def _hydra_command(argv: list[str]) -> int:
    from llama_c4.config.overrides import read_overrides

    is_override = [not word.startswith("-") and "=" in word for word in argv]
    request = read_overrides(word for word, yes in zip(argv, is_override, strict=True) if yes)
    if request.faults:
        raise ConfigError(*request.faults)
    others = [word for word, yes in zip(argv, is_override, strict=True) if not yes]
    logging.raiseExceptions = False  # Hydra prints through logging, which would show a traceback where a pipe closes
    try:
        _hydra_main([*others, *request.for_hydra], lambda config: None)
    except ValueError as error:
        raise ConfigError(f"{' '.join(others)}: {error}; see train.py --hydra-help") from error
    return 0


def run_sweep(overrides: list[str], *, train: Train) -> int:
    """Run every job of a sweep in this process, one after another, by Hydra's basic launcher.

    All jobs are composed and checked before the first one starts. A job that fails is named and the others go on; a job
    that a signal stopped ends the sweep.

    Args:
        overrides: As typed; commas sweep.
        train: Runs one configuration and returns its exit code.
    Returns:
        0, 1 if a job failed, or the code of the job that a signal stopped.
    Raises:
        ConfigError: The sweep or one of its jobs is faulty, or two jobs are the same run.
    """
    from hydra.core.hydra_config import HydraConfig

    from llama_c4.config.overrides import read_overrides
    from llama_c4.config.sweep import plan_sweep

    jobs = {job.overrides: job for job in plan_sweep(overrides)}
    print(f"sweep of {len(jobs)} jobs; a run that is finished already is skipped", flush=True)
    failed: list[str] = []

    def run_job(_: object) -> None:
        job = jobs[tuple(HydraConfig.get().overrides.task)]
        print(f"job {job.number} of {len(jobs)}: {job.label}", flush=True)
        code, reason = _run_job(train, job.config)
        if code in STOPPED:
            print(f"job {job.number} was stopped, and with it the sweep; the same command goes on", file=sys.stderr)
            raise SystemExit(code)
        if code:
            failed.append(f"job {job.number} ({job.label}): {reason}")
            print(f"job {job.number} failed: {reason}", file=sys.stderr)

    request = read_overrides(overrides)
    with tempfile.TemporaryDirectory(prefix="llama_c4-sweep-") as scratch:
        # Hydra always writes a multirun.yaml; the run folders hold all that matters, so it goes where it is removed.
        _hydra_main(["--multirun", *request.for_hydra, f"hydra.sweep.dir='{scratch}'"], run_job)
    if failed:
        print(f"{len(failed)} of {len(jobs)} jobs failed:", *failed, sep="\n  ", file=sys.stderr)
    return 1 if failed else 0


def _run_job(train: Train, config: Any) -> tuple[int, str]:
    """Exit code of a job, and why it is not 0. No exception gets past: the next job has nothing to do with it."""
    try:
        code = train(config)
    except (UserError, TrainingError) as error:
        return error.exit_code, str(error)
    except Exception as error:
        traceback.print_exc()
        return 1, f"{type(error).__name__}: {error}"
    return code, f"exit code {code}, see its run folder"


def _hydra_main(argv: list[str], task: Callable[[Any], None]) -> None:
    import hydra

    from llama_c4.config.conf_files import conf_dir

    former = sys.argv
    sys.argv = [former[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(task)()
    finally:
        sys.argv = former


if __name__ == "__main__":
    sys.exit(main())
