"""What build_runtime resolves, sets and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import RuntimeConfig
from llama_c4.runtime import context
from llama_c4.runtime.context import CUBLAS_WORKSPACE, build_runtime, usable_cores
from llama_c4.runtime.environment import environment, source_sha256
from tests.tiny_training import tiny_runtime

RUN_DIR = Path("läufe/名前 with spaces")


def config(**changes: Any) -> RuntimeConfig:
    values: dict[str, Any] = {
        "seed": 42, "precision": "auto", "deterministic": False, "device": "cpu", "compile": "auto",
        "compile_mode": "default", "attention": "auto", "loss": "auto", "optimizer_kernel": "auto", "threads": 1,
        "allocator": "default",
    }  # fmt: skip
    return RuntimeConfig(**(values | changes))


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def test_on_a_cpu_auto_is_float32_eager_and_free_of_autocast() -> None:
    runtime = build_runtime(config(), run_dir=RUN_DIR)
    assert (runtime.device.type, runtime.precision, runtime.compile_mode) == ("cpu", "float32", None)
    assert (runtime.rank, runtime.world_size, runtime.run_dir) == (0, 1, RUN_DIR)
    with runtime.autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("precision", "param_dtype", "product_dtype"),
    [
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("float64", torch.float64, torch.float64),
    ],
)
def test_precision_is_of_products_and_parameters_are_never_half(
    precision: str, param_dtype: torch.dtype, product_dtype: torch.dtype
) -> None:
    runtime = build_runtime(config(precision=precision), run_dir=RUN_DIR)
    assert runtime.param_dtype == param_dtype
    x = torch.ones(2, 2, dtype=runtime.param_dtype)
    with runtime.autocast():
        assert (x @ x).dtype == product_dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"runtime.device=cuda, but torch .* set runtime.device=cpu"):
        build_runtime(config(device="cuda"), run_dir=RUN_DIR)
    assert build_runtime(config(device="auto"), run_dir=RUN_DIR).device.type == "cpu"


def test_threads_are_set_and_null_takes_the_usable_cores() -> None:
    assert build_runtime(config(threads=3), run_dir=RUN_DIR).threads == 3 == torch.get_num_threads()
    assert build_runtime(config(threads=None), run_dir=RUN_DIR).threads == usable_cores() == torch.get_num_threads()


def test_usable_cores_are_the_least_of_affinity_quota_and_omp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(context.os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr(context, "CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert usable_cores() == 8
    for text, cores in (("max 100000", 8), ("350000 100000", 4), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert usable_cores() == cores
    (tmp_path / "cpu.max").write_text("max 100000\n")
    for text, cores in (("2", 2), ("4,2", 4), ("99", 8), ("", 8), ("0", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert usable_cores() == cores


def test_deterministic_switch_sets_the_frameworks_state_and_back() -> None:
    runtime = build_runtime(config(deterministic=True), run_dir=RUN_DIR)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ[CUBLAS_WORKSPACE] == ":4096:8" and not torch.backends.cudnn.benchmark
    assert runtime.optimizer_kernel == "plain"
    build_runtime(config(), run_dir=RUN_DIR)
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_operations_without_such_a_form_raise() -> None:
    build_runtime(config(deterministic=True), run_dir=RUN_DIR)
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)


def test_users_cublas_workspace_is_kept_if_deterministic_and_refused_if_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":16:8")
    build_runtime(config(deterministic=True), run_dir=RUN_DIR)
    assert os.environ[CUBLAS_WORKSPACE] == ":16:8"
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":0:0")
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=':0:0' .* unset it"):
        build_runtime(config(deterministic=True), run_dir=RUN_DIR)
    build_runtime(config(deterministic=False), run_dir=RUN_DIR)


@pytest.mark.slow
def test_each_of_several_compiling_processes_has_a_cache_of_its_own_and_removes_it() -> None:
    code = (
        "import os, pathlib, sys\nfrom llama_c4.runtime.context import _own_compile_cache\n"
        "_own_compile_cache()\nfolder = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
        "(folder / 'kernel').mkdir(); print(folder.is_dir(), folder)"
    )
    env = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, "-c", code]
    jobs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    existed, folders = zip(*(job.communicate()[0].split() for job in jobs), strict=True)
    assert existed == ("True",) * 2 and len(set(folders)) == 2
    assert not any(Path(folder).exists() for folder in folders)


def test_compile_is_on_when_asked_for_and_keeps_a_cache_that_the_user_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere/shared")
    runtime = build_runtime(config(compile=True, compile_mode="max-autotune-no-cudagraphs"), run_dir=RUN_DIR)
    assert runtime.compile_mode == "max-autotune-no-cudagraphs"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere/shared"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux")
def test_peak_memory_of_a_cpu_process_rises_and_falls_after_a_reset() -> None:
    # A process of its own: where freed pages are retained, as after other tests, nothing falls.
    code = (
        "import torch\nfrom llama_c4.runtime.memory import peak_memory_bytes as peak, reset_peak_memory as reset\n"
        "cpu = torch.device('cpu')\nblock = torch.ones(2**25)\nhigh = peak(cpu)\ndel block\n"
        "print(high, peak(cpu) if reset(cpu) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    high, low = map(int, done.stdout.split())
    assert high >= 2**27 and low < high


def test_environment_is_plain_json_with_versions_hardware_source_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "se-cr-et")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JWT", "to-k-en")
    described = environment(tiny_runtime(threads=3))
    text = json.dumps(described, allow_nan=False)
    assert "se-cr-et" not in text and "to-k-en" not in text
    assert described["slurm"]["SLURM_JOB_ID"] == "4711" and described["threads"] == 3
    assert described["versions"]["torch"] == torch.__version__ and described["hardware"]["cores"] >= 1
    assert described["hardware"]["memory_bytes"] > 2**28 and described["source_sha256"] == source_sha256()


def test_environment_knows_the_commit_only_in_a_checkout(tmp_path: Path) -> None:
    from llama_c4.runtime.environment import _git_state

    assert _git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "datei ü.py").write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    clean = _git_state(tmp_path)
    assert clean is not None and len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "datei ü.py").write_text("2")
    assert _git_state(tmp_path) == {"commit": clean["commit"], "dirty": True}
