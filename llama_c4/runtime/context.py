"""Where a run computes: rank, device, precision, determinism, threads. The only reader of environment variables.

A process is rank 0 of 1. Several ranks would join their process group in `build_runtime` and read their number there;
everything above asks `Runtime.rank` and `Runtime.world_size` already.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import RuntimeConfig
from llama_c4.runtime.allocator import configure_allocator
from llama_c4.runtime.memory import peak_memory_bytes, reset_peak_memory

Precision = Literal["float32", "bfloat16", "float64"]

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""The two settings that NVIDIA documents as reproducible."""
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
SLURM_VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_NODELIST",
    "SLURM_CPUS_PER_TASK",
)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Everything the parts need to know about the machine; `auto` is resolved."""

    rank: int
    world_size: int
    device: torch.device
    precision: Precision
    deterministic: bool
    threads: int
    compile_mode: str | None
    """Mode of torch.compile for the full micro-batch shape; None runs eagerly."""
    optimizer_kernel: str
    """`auto`, `fused`, `foreach` or `plain`; `auto` is `plain` already where the run is deterministic."""
    allocator: Literal["retain", "default"]
    run_dir: Path

    @property
    def param_dtype(self) -> torch.dtype:
        """Of parameters, gradients and moments: float64 in float64 runs, else float32 (under bfloat16 too)."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        """A context in which matrix products run in the run's precision."""
        if self.precision != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def synchronize(self) -> None:
        """Wait until the device has done what it was given; a CPU always has."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int | None:
        """Largest memory since `reset_peak_memory`: of tensors on CUDA, of the whole process on CPU."""
        return peak_memory_bytes(self.device)

    def reset_peak_memory(self) -> bool:
        """Let the peak start again; False where the system does not allow it."""
        return reset_peak_memory(self.device)


def build_runtime(config: RuntimeConfig, *, run_dir: Path) -> Runtime:
    """Resolve every `auto` and set the process up: heap, threads, deterministic mode, compile cache.

    To be called once, before tensors of any size exist. It changes state of the whole process; a later call for another
    run in the same process sets threads and determinism anew.

    Raises:
        ConfigError: the machine cannot do what is asked for.
    """
    device = _resolve_device(config.device)
    precision = _resolve_precision(config.precision, device)
    allocator = configure_allocator(config.allocator, on_cpu=device.type == "cpu")
    _configure_determinism(config.deterministic)
    threads = config.threads or usable_cores()
    torch.set_num_threads(threads)
    wanted = config.compile is True or (config.compile == "auto" and device.type == "cuda" and not config.deterministic)
    if wanted:
        _own_compile_cache()
    return Runtime(
        rank=0,
        world_size=1,
        device=device,
        precision=precision,
        deterministic=config.deterministic,
        threads=threads,
        compile_mode=config.compile_mode if wanted else None,
        optimizer_kernel=_resolve_kernel(config),
        allocator=allocator,
        run_dir=Path(run_dir),
    )


def usable_cores() -> int:
    """Cores this process may use: its affinity, the container's quota and OMP_NUM_THREADS, whichever is least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if CGROUP_QUOTA.exists():
        quota, period = CGROUP_QUOTA.read_text().split()
        cores = cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))
    # OMP_NUM_THREADS may be a list, one number for each nesting level.
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, min(cores, int(asked)) if asked.isdigit() else cores)


def scheduler_ids() -> dict[str, str]:
    """The SLURM variables that say which job this is; nothing else of the environment leaves this file."""
    return {name: os.environ[name] for name in SLURM_VARIABLES if name in os.environ}


def _resolve_device(choice: str) -> torch.device:
    if choice == "cuda" and not torch.cuda.is_available():
        built = "sees no CUDA device" if torch.version.cuda else "was built without CUDA"
        raise ConfigError(
            f"runtime.device=cuda, but torch {torch.__version__} {built}; set runtime.device=cpu (or auto), "
            "or install a CUDA build of torch on a machine with a GPU"
        )
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(choice)


def _resolve_precision(choice: str, device: torch.device) -> Precision:
    resolved = ("bfloat16" if device.type == "cuda" else "float32") if choice == "auto" else choice
    if resolved == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"runtime.precision={choice}: {name} has no bfloat16 arithmetic; set runtime.precision=float32"
        )
    return resolved  # type: ignore[return-value]  # the schema allows these words only


def _resolve_kernel(config: RuntimeConfig) -> str:
    return "plain" if config.deterministic and config.optimizer_kernel == "auto" else config.optimizer_kernel


def _configure_determinism(deterministic: bool) -> None:
    """Strict deterministic algorithms, and the cuBLAS workspace they need before CUDA starts."""
    torch.backends.cudnn.benchmark = False
    if deterministic:
        found = os.environ.get(CUBLAS_WORKSPACE)
        if found is None and torch.cuda.is_initialized():
            raise ConfigError(
                f"runtime.deterministic=true needs {CUBLAS_WORKSPACE} before CUDA starts, and CUDA runs already; "
                f"set {CUBLAS_WORKSPACE}={DETERMINISTIC_WORKSPACES[0]} in the environment"
            )
        if found is not None and found not in DETERMINISTIC_WORKSPACES:
            raise ConfigError(
                f"{CUBLAS_WORKSPACE}={found!r} in the environment is not deterministic; "
                f"unset it or set one of {', '.join(DETERMINISTIC_WORKSPACES)}"
            )
        os.environ.setdefault(CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    torch.use_deterministic_algorithms(deterministic)


def _own_compile_cache() -> None:
    """A cache of compiled code for this process alone, removed at its end.

    Jobs that start together and share one cache race for its files. Set TORCHINDUCTOR_CACHE_DIR to share one.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="llama_c4-compiled-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
