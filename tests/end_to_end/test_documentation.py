"""Every command in README and docs works: `bash` blocks are run, `bash no-run` blocks are composed and checked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, quiet_environment

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT_DEMO = (
    "training.total_tokens=24576 training.epoch_tokens=24576 evaluation.subset_blocks=8 evaluation.full_at_end=false "
    "lr_schedule.warmup_steps=1 logging.log_every=1"
)
BLOCK = re.compile(r"^```bash(?P<mode>[^\n]*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def commands(document: Path, mode: str) -> list[str]:
    """The command lines of a document's blocks of one mode, comments and continuation lines resolved."""
    lines: list[str] = []
    for block in BLOCK.finditer(document.read_text()):
        if block["mode"].strip() == mode:
            text = block["text"].replace("\\\n", " ")
            lines += [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return lines


def reads_shared_data(document: Path) -> bool:
    """Whether a command names the corpus or the tokenizer, which lie outside of the checkout."""
    return any(re.search(r"\$\{?(C4|TOKENIZER)\b", command) for command in commands(document, ""))


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout whose outputs are its own."""
    for name in ("README.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt", "train.py"):
        shutil.copy2(ROOT / name, tmp_path / name)
    for name in ("conf", "llama_c4", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    if (ROOT / ".venv").is_dir():
        (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    return tmp_path


RUNNABLE = [d for d in DOCUMENTS if commands(d, "")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", RUNNABLE, ids=lambda d: d.name)
def test_the_commands_of_a_document_run_in_their_order(
    document: Path, checkout: Path, request: pytest.FixtureRequest
) -> None:
    environment = quiet_environment() | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(checkout),
    }
    if reads_shared_data(document):
        data = request.getfixturevalue("shared") / "data"
        environment |= {"C4": str(data / "c4" / "en"), "TOKENIZER": str(data / "tokenizer" / "tokenizer.json")}
    for command in commands(document, ""):
        if words_of(command)[:2] == ["make", "test"]:
            command = "make -n test"  # this very suite
        if words_of(command)[:2] == ["make", "demo"]:
            command = f"make demo DEMO='{SHORT_DEMO}'"
        done = subprocess.run(["bash", "-ec", command], cwd=checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


COMPOSED = [
    (document.name, command)
    for document in DOCUMENTS
    for command in commands(document, "no-run")
    if re.match(r"(python train\.py|llama-c4 (prepare|train))\b", command)
]


@pytest.mark.parametrize(("document", "command"), COMPOSED)
def test_a_command_that_is_too_long_to_run_has_a_valid_configuration(document: str, command: str) -> None:
    from llama_c4.config.compose import compose_config, expand_sweep

    start = 2
    overrides = [w for w in words_of(command)[start:] if not w.startswith("-")]
    if "--resume" not in command:
        assert all(compose_config(job) for job in expand_sweep(overrides))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = [m["target"].split("#")[0] for m in LINK.finditer(document.read_text())]
    local = [t for t in targets if t and not t.startswith(("http://", "https://", "mailto:"))]
    assert [t for t in local if not (document.parent / t).exists()] == []
