"""The wheel holds the package, its data and its type marker, and claims no other name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LARGEST_WHEEL_BYTES = 5_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network, out of a copy: a `build/` left in place would end up in the next wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*pip, "--wheel-dir", folder, folder / "source"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_claims_no_top_level_name_but_headwater(names: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in names} == {"headwater"}


def test_every_module_is_in_the_wheel_and_no_test(names: set[str]) -> None:
    packages = PROJECT["tool"]["setuptools"]["packages"]
    folders = [ROOT.joinpath(*package.split(".")[1:]) for package in packages]
    modules = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.glob("*.py")}
    assert len(modules) > 30
    assert {f"headwater/{module}" for module in modules} == {name for name in names if name.endswith(".py")}
    assert [name for name in names if "tests" in name or "conftest" in name] == []


def test_types_recipes_and_data_travel_with_it(names: set[str]) -> None:
    assert "headwater/py.typed" in names
    data = [
        folder for folder in ("pipelines/recipes", "pipelines/data", "data_cards/templates") if (ROOT / folder).is_dir()
    ]
    for folder in data:
        there = {f"headwater/{folder}/{path.name}" for path in (ROOT / folder).iterdir() if path.is_file()}
        assert there <= names, folder


def test_the_command_and_the_licence_are_declared(wheel: Path, names: set[str]) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "pipeline = headwater.pipelines.cli:main" in archive.read(entry_points).decode()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text


def test_torch_is_an_extra_not_a_requirement(wheel: Path, names: set[str]) -> None:
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert needed
    assert [line for line in needed if any(heavy in line for heavy in ("torch", "transformers", "sae-lens"))] == []


def test_the_wheel_stays_small(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST_WHEEL_BYTES
