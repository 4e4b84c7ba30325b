"""The shape of the house: imports run downward, the lower floors carry no torch, files stay readable."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    "core": 1,
    "llm": 2,
    "sae": 3,
    "verifiers": 3,
    "data_cards": 3,
    "stages": 4,
    "flows": 5,
    "pipelines": 6,
}
TORCH_FREE = ("core/", "llm/types.py", "llm/openai.py", "flows/", "pipelines/")
HEAVY = {"torch", "transformers", "sae_lens", "vllm", "safetensors", "trl", "peft"}
LONGEST_FILE = 400
MODULES = sorted(path.relative_to(ROOT) for folder in FLOORS for path in (ROOT / folder).rglob("*.py"))


def _imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Full names of what a module imports, inside functions too unless `module_level`."""
    package = ".".join(("headwater", *path.parent.parts))
    waiting: list[ast.AST] = [ast.parse((ROOT / path).read_bytes())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{source}.{alias.name}" for alias in node.names)
        if module_level and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _only_for_types(node)):
            continue
        waiting += ast.iter_child_nodes(node)


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _house(names: Iterator[str]) -> set[str]:
    """The top folders of this package among the imported names."""
    return {name.split(".")[1] for name in names if name.startswith("headwater.")} & FLOORS.keys()


def test_there_are_modules_to_look_at() -> None:
    assert len(MODULES) > 30
    assert {path.parts[0] for path in MODULES} == FLOORS.keys()


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_run_downward_and_siblings_of_a_floor_leave_each_other_alone(path: Path) -> None:
    own = path.parts[0]
    wrong = {other for other in _house(_imports(path)) if other != own and FLOORS[other] >= FLOORS[own]}
    assert wrong == set(), f"{path} (floor {FLOORS[own]}) imports {wrong}"


def test_tests_are_no_part_of_the_package() -> None:
    for path in MODULES:
        roots = {name.split(".")[0] for name in _imports(path)}
        assert roots.isdisjoint({"tests", "pytest", "hypothesis"}), path


@pytest.mark.parametrize("path", [path for path in MODULES if str(path).startswith(TORCH_FREE)], ids=str)
def test_the_light_modules_import_nothing_heavy_when_they_are_loaded(path: Path) -> None:
    assert {name.split(".")[0] for name in _imports(path, module_level=True)} & HEAVY == set()


@pytest.mark.parametrize(
    "modules",
    [
        "headwater.core.store, headwater.core.journal, headwater.stages.run, headwater.stages.row_runner",
        "headwater.llm.types, headwater.llm.openai",
    ],
)
def test_a_process_that_loads_the_light_modules_has_nothing_heavy_in_memory(modules: str) -> None:
    script = f"import sys, {modules}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {"headwater", "asyncio"} <= set(loaded)
    assert set(loaded) & (HEAVY | {"datasets", "prefect", "datatrove", "polars"}) == set()


def test_every_folder_with_modules_is_a_package_that_gets_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = {path.parent for path in MODULES}
    assert {f"headwater.{'.'.join(folder.parts)}" for folder in folders} | {"headwater"} == set(settings["packages"])
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_file_outgrows_what_can_be_read_in_one_go(path: Path) -> None:
    assert len((ROOT / path).read_text("utf-8").splitlines()) <= LONGEST_FILE
