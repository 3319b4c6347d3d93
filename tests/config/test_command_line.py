"""The commands as processes: exit codes, messages, completion, and nothing heavy imported on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llama_c4.cli import EXAMPLES, build_parser, guarded, main, train_main
from llama_c4.config.errors import ConfigError, TrainingError

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def train_py(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run(str(ROOT / "train.py"), *words, cwd=cwd)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["optim.lr=1e-3,1e-4"], "add -m"),
        (["model=60m", "optim.beta2=1"], "2 faults in the configuration"),
        (["-m", "optim.lr=1,x"], "job 1 (optim.lr=x)"),
        (["--config-dir", "x"], "--config-dir: is nothing"),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_2(words: list[str], part: str, tmp_path: Path) -> None:
    done = train_py(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and part in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["optim.typo=1"], "there is no setting optim.typo"),
        (["optim.lr"], "is not KEY=VALUE"),
        (["-m", "optim.lr=1,2", "run.name=a"], "would share the run folder"),
        (["--multi", "optim.lr=1"], "--multi: is nothing that train.py can do"),
        (["--resolve"], "--resolve: is nothing that train.py can do"),
        (["--cfg", "job", "--info", "plugins"], "--cfg job --info plugins"),
        (["--cfg", "job", "preset.lr=1"], "set optim.lr"),
    ],
)
def test_a_mistake_in_train_py_names_the_way_out(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main(words) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--cfg", "job", "run.name=1E234"], "name: 1E234"),
        (["--help"], "train.py is powered by Hydra"),
        (["--info", "defaults"], "model/50m"),
    ],
)
def test_hydras_own_commands_work_and_leave_no_files(words: list[str], part: str, tmp_path: Path) -> None:
    done = train_py(*words, "model=50m", cwd=tmp_path)
    assert done.returncode == 0 and part in done.stdout.replace("'", "") + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "required"),
        (["trian"], "invalid choice"),
        (["train", "--fast"], "--fast"),
        (["train", "optim.lr=x"], "optim.lr=x"),
        (["train", "-m", "--resume", "x"], "--resume"),
        (["train", "--resume", "no/such/run"], "no/such/run"),
        (["prepare", "data=markov", "data.successors=0"], "data.successors=0"),
        (["evaluate", "x", "optim.lr=1"], "evaluate takes evaluation.*, runtime.*, data.cache_dir"),
        (["export", "x"], "--to"),
        (["report", "--out", "x.html"], "RUN"),
        (["runs", "a", "b"], "b"),
    ],
)
def test_a_mistake_in_llama_c4_is_a_message_and_code_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_explains_itself_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"llama-c4 {command}" in capsys.readouterr().out.split("examples:")[1]


def test_options_may_stand_between_overrides() -> None:
    args, extra = build_parser().parse_known_args(["train", "model=50m", "-m", "optim.lr=1,2"])
    assert ([*args.rest, *extra], args.multirun) == (["model=50m", "optim.lr=1,2"], True)


@pytest.mark.parametrize("error", [ConfigError("a", "b"), TrainingError("loss is nan")])
def test_an_expected_error_is_printed_without_a_traceback(
    error: ConfigError | TrainingError, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert guarded(fail) == error.exit_code
    assert capsys.readouterr().err == f"{error}\n"


def test_an_unexpected_error_keeps_its_traceback() -> None:
    done = run("-c", "from llama_c4.cli import guarded; guarded(lambda: 1 // 0)")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "Traceback" in done.stderr


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = "from llama_c4.cli import guarded; import sys; sys.exit(guarded(lambda: print('x' * 1_000_000) or 0))"
    command = f'{sys.executable} -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_interrupt_is_code_130() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert guarded(interrupted) == 130


def test_bytes_that_are_no_text_are_a_message() -> None:
    done = subprocess.run([sys.executable, "train.py", b"run.name=\xff"], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 2 and b"UTF-8" in done.stderr and b"Traceback" not in done.stderr


def test_nothing_heavy_is_imported_before_the_configuration_is_known() -> None:
    modules = ["cli", *(f"config.{p.stem}" for p in (ROOT / "llama_c4" / "config").glob("[!_]*.py"))]
    code = f"import importlib, sys; [importlib.import_module('llama_c4.' + m) for m in {modules}]; "
    code += "from llama_c4.config.compose import compose_config; compose_config([]); "
    code += "print({'torch', 'datasets', 'wandb', 'numpy', 'tokenizers', 'matplotlib', 'rich'} & set(sys.modules))"
    assert run("-c", code).stdout.strip() == "set()"


def test_help_and_completion_do_not_even_import_hydra() -> None:
    code = "import sys; from llama_c4.cli import main; main(['train', '--help']); print({'hydra'} & set(sys.modules))"
    assert run("-c", code).stdout.strip().endswith("set()")


# --- completion -------------------------------------------------------------------------------------------------------


def completions(line: str) -> list[str]:
    """What the shell offers, by the protocol between a bash completion function and the program."""
    env = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n",
    }
    return [word.strip() for word in run("-m", "llama_c4.cli", env=env).stdout.split("\n") if word.strip()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("llama-c4 pre", {"prepare"}),
        ("llama-c4 train model=5", {"model=50m", "model=500m"}),
        ("llama-c4 train model=50m lr_sch", {"lr_schedule=", "lr_schedule."}),
        ("llama-c4 prepare data.tokenizer_", {"data.tokenizer_revision="}),
        ("llama-c4 train -m runtime.loss=", {"runtime.loss=auto", "runtime.loss=plain", "runtime.loss=chunked"}),
    ],
)
def test_the_shell_is_offered_groups_choices_and_keys(line: str, expected: set[str]) -> None:
    assert set(completions(line)) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_completion_script_is_valid_bash() -> None:
    script = run("-m", "llama_c4.cli", "completion", "bash").stdout
    assert "llama-c4" in script and subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
