"""What tests of several floors share."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine can stall any example: how long one takes proves nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many KiB, really full when it is full; called again, it gives it another size."""
    place = tmp_path / "small"
    mount = shutil.which("mount")

    def sized(kib: int) -> Path:
        fresh = not place.exists()
        place.mkdir(exist_ok=True)
        how = ["-t", "tmpfs", "-o", f"size={kib}k", "tmpfs"] if fresh else ["-o", f"remount,size={kib}k"]
        if mount is None or subprocess.run([mount, *how, place], capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
        return place

    yield sized
    if place.is_mount():
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture(scope="session")
def embedded_cache() -> Path:
    """A cache folder that holds the embedded model, converted once and kept between test runs in `.build/`."""
    pytest.importorskip("torch", reason="the local engines need the extra `local`")
    from headwater.llm.embedded import embedded_model_folder

    cache = Path(__file__).parents[1] / ".build" / "cache"
    embedded_model_folder(cache)
    return cache
