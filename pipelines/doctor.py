"""`pipeline doctor`: what this machine can do, and the line that installs what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from headwater.core.store import Workspace

_EXTRAS = {
    "local": ("torch", "transformers", "sae_lens", "safetensors", "gguf"),
    "train": ("trl", "peft"),
}
"""Extra → the modules that tell whether it is installed."""
_MIN_FREE_GIB = 5
_GIB = 1 << 30
_GPU_SECONDS = 10

_Finding = tuple[bool | None, str, str]
"""Good, bad, or None for a plain fact; what; details."""


def examine(workspace: Workspace) -> None:
    """Print one line per finding. Missing extras are not failures: they only limit what runs here."""
    checks: tuple[Callable[[], Iterator[_Finding]], ...] = (
        _machine,
        _versions,
        _engines,
        _extras,
        lambda: _workspace(workspace),
    )
    for check in checks:
        for good, what, details in check():
            mark = {True: click.style("ok", fg="green"), False: click.style("--", fg="yellow"), None: "  "}[good]
            click.echo(f"{mark} {what:<30} {details}")


def _machine() -> Iterator[_Finding]:
    yield None, "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield None, "cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    yield None, "bfloat16 on the CPU", _bfloat16()
    yield None, "memory", _memory()
    yield _gpu()


def _bfloat16() -> str:
    """Linux tells by the flags of the processor; without the instructions a bfloat16 model crawls."""
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8").partition("flags")[2].partition("\n")[0].split()
    except OSError:
        return "unknown"
    found = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]
    return ", ".join(found) or "no instructions for it: keep `dtype: float32`, which is several times faster here"


def _memory() -> str:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "unknown"
    return f"{total / _GIB:.1f} GiB"


def _gpu() -> _Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, "gpu", "none found (no nvidia-smi)"
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, "gpu", f"nvidia-smi does not answer: {error}"
    names = "; ".join(answer.stdout.strip().splitlines())
    return (True, "gpu", names) if answer.returncode == 0 and names else (False, "gpu", "nvidia-smi finds none")


def _versions() -> Iterator[_Finding]:
    for name in ("headwater", "prefect", "polars", "pyarrow", "datasets", "datatrove"):
        try:
            yield True, name, version(name)
        except PackageNotFoundError:
            yield False, name, f"missing: pip install {name}"


def _engines() -> Iterator[_Finding]:
    from headwater.llm.registry import engine_status

    for status in engine_status():
        details = "ready" if status.available else f"{status.missing} is missing: {status.line}"
        yield status.available, f"engine {status.engine}", details


def _extras() -> Iterator[_Finding]:
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        line = f"missing {', '.join(missing)}: pip install 'headwater[{extra}]'"
        yield not missing, f"extra {extra}", line if missing else "installed"


def _workspace(workspace: Workspace) -> Iterator[_Finding]:
    root = workspace.root.absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    writable = os.access(there, os.W_OK)
    yield writable, "workspace", f"{root}" + ("" if writable else " can't be written: give another with --workspace")
    yield _free(there)


def _free(there: Path) -> _Finding:
    free = shutil.disk_usage(there).free / _GIB
    enough = free >= _MIN_FREE_GIB
    return enough, "free disk", f"{free:.1f} GiB" + ("" if enough else f", less than {_MIN_FREE_GIB} GiB is little")
