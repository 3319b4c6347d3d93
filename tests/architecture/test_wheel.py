"""What is installed from a wheel: the package with its configuration files, and the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "conf", "llama_c4")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network from a copy of the sources."""
    pytest.importorskip("hatchling", reason="building needs hatchling, one of the development tools")
    place = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (place / "source").mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, place / "source" / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(place / "out")]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(place / "source")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (place / "out").iterdir()
    return built


@pytest.mark.slow
def test_a_wheel_holds_every_module_every_configuration_file_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = [n for n in names if n.endswith(".dist-info/entry_points.txt")]
        commands = archive.read(entry_points).decode()
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "llama_c4").rglob("*.py")}
    settings = {f"llama_c4/{p.relative_to(ROOT)}" for p in (ROOT / "conf").rglob("*.yaml")}
    assert "llama_c4/conf/train.yaml" in settings
    assert modules | settings <= names
    assert "llama-c4 = llama_c4.cli:main" in commands
    assert {n.split("/")[0] for n in names} == {"llama_c4", entry_points.split("/")[0]}


@pytest.mark.slow
def test_what_a_wheel_installs_composes_a_configuration_far_from_a_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "from llama_c4.config.conf_files import conf_dir; from llama_c4.config.compose import compose_config;"
        "print(conf_dir(), compose_config(['model=50m']).model.num_layers)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.startswith(f"{tmp_path / 'installed' / 'llama_c4' / 'conf'} "), done.stderr
