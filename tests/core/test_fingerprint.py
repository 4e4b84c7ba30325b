"""A fingerprint changes with everything that changes rows, and with nothing else."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.core import fingerprint
from headwater.core.errors import ConfigError
from headwater.core.fingerprint import Fingerprint, canonical_json, differences, source_hash

MODULE = '''
"""What the stage does."""
from headwater.core.text import words

LIMIT = 3

class Stage:
    """A stage."""
    kept: int = 1
    """Rows kept."""

    def run(self, text: str) -> list[str]:
        # the first ones
        return words(text)[:LIMIT]
'''


@pytest.fixture
def hash_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Writes `lab/stage.py` and other modules of a package `lab` and hashes `lab.stage`."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").touch()

    def write_and_hash(source: str, **others: str) -> str:
        for name, text in {"stage": source, **others}.items():
            (tmp_path / "lab" / f"{name}.py").write_text(textwrap.dedent(text), "utf-8")
        fingerprint._normalised.cache_clear()
        importlib.invalidate_caches()
        return source_hash("lab.stage")

    yield write_and_hash
    sys.modules.pop("lab", None)


def test_a_digest_is_the_same_forever_and_knows_no_order_of_keys() -> None:
    """What `printf '{"a":[1,2.5],"b":null,"scheme":1}' | sha256sum` begins with."""
    assert Fingerprint({"b": None, "a": (1, 2.5)}).digest == "4d0b35e3adf99fbd4811bfb2"


def test_comments_docstrings_and_layout_do_not_count(hash_of: Callable[..., str]) -> None:
    other = (
        MODULE.replace("What the stage does.", "Other words.")
        .replace("# the first ones", "# just a few\n")
        .replace('"""Rows kept."""', "")
        .replace('"""A stage."""', '"""Said otherwise."""')
        .replace("LIMIT = 3", "LIMIT = (\n    3\n)")
    )
    assert other != MODULE
    assert hash_of(other) == hash_of(MODULE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("LIMIT = 3", "LIMIT = 4"), ("LIMIT = 3", 'LIMIT = "3"'), ("[:LIMIT]", "[LIMIT:]"), ("kept: int = 1", "kept = 1")],
)
def test_code_counts(hash_of: Callable[..., str], old: str, new: str) -> None:
    assert hash_of(MODULE.replace(old, new)) != hash_of(MODULE)


@pytest.mark.parametrize(
    "imports", ["import lab.helper", "from lab.helper import f", "from lab import helper", "from . import helper"]
)
def test_helpers_of_the_stages_own_package_count_however_they_are_imported(
    hash_of: Callable[..., str], imports: str
) -> None:
    first = hash_of(imports, helper="def f(): return 1")
    assert hash_of(imports, helper="def f(): return 2") != first
    assert hash_of(imports, helper="def f():\n    '''Says so.'''\n    return 1") == first


def test_helpers_of_helpers_and_imports_inside_functions_count(hash_of: Callable[..., str]) -> None:
    stage = "def run():\n    from .helper import f\n    return f()"
    helper = "from .deeper import g as f"
    first = hash_of(stage, helper=helper, deeper="def g(): return 1")
    assert hash_of(stage, helper=helper, deeper="def g(): return 2") != first


def test_modules_that_import_each_other_are_no_trouble(hash_of: Callable[..., str]) -> None:
    assert hash_of("import lab.helper", helper="import lab.stage")


@pytest.fixture
def copied_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A little tree in the place of the package, so that its real files stay untouched."""
    for name, text in {
        "stages/fac/measure.py": "from headwater.stages.fac.shared import f\nfrom headwater.sae import pool\n",
        "stages/fac/shared.py": "def f(): return 1\n",
        "stages/base.py": "BASE = 1\n",
        "sae/__init__.py": "",
        "sae/pool.py": "from headwater.core.text import words\nfrom headwater.llm.chat import mask\n",
        "core/text.py": "WORDS = 1\n",
        "core/fingerprint.py": "",
        "llm/chat.py": "from headwater.llm.kv import past\n",
        "llm/kv.py": "KV = 1\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    monkeypatch.setattr(fingerprint, "__file__", str(tmp_path / "core" / "fingerprint.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("stages/fac/shared.py", True),
        ("sae/pool.py", True),
        ("sae/__init__.py", True),
        ("core/text.py", True),
        ("stages/base.py", False),
        ("llm/chat.py", True),
        ("llm/kv.py", False),
    ],
)
def test_libraries_of_the_field_sibling_stages_and_token_masks_count_and_plumbing_does_not(
    copied_tree: Path, file: str, counts: bool
) -> None:
    before = source_hash("headwater.stages.fac.measure")
    with (copied_tree / file).open("a") as source:
        source.write("EDITED = True\n")
    fingerprint._normalised.cache_clear()
    assert (source_hash("headwater.stages.fac.measure") != before) == counts


def test_a_stage_without_a_source_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="no source file"):
        source_hash("defined_in_a_notebook")


def test_a_difference_names_its_leaf() -> None:
    old = {"config": {"k": 8, "engine": {"model": "a"}}, "seed": 0, "inputs": {"rows": "x"}}
    new = {"config": {"k": 16, "engine": {"model": "b"}}, "seed": 0, "inputs": {"rows": "x", "spans": "y"}}
    assert differences(old, new) == [
        "config.engine.model: a → b",
        "config.k: 8 → 16",
        "inputs.spans: (nothing) → y",
    ]


def test_a_difference_inside_a_list_names_its_place() -> None:
    assert differences({"a": [{"k": 1}, {"k": 2}]}, {"a": [{"k": 1}, {"k": 3}]}) == ["a[1].k: 2 → 3"]
    assert differences({"a": [1]}, {"a": [1, 2]}) == ["a: [1] → [1, 2]"]


def test_parts_are_compared_as_the_json_they_are_hashed_as() -> None:
    assert differences({"a": (1, 2)}, {"a": [1, 2]}) == []
    assert differences({"a": None}, {}) == ["a: null → (nothing)"]
    assert differences({"a": 1}, {"a": True}) == ["a: 1 → true"]


def test_differences_are_found_exactly_when_the_digest_differs() -> None:
    parts: list[dict[str, Any]] = [
        {"a": 1},
        {"a": 1.0},
        {"a": None},
        {},
        {"a": [1]},
        {"a": (1,)},
        {"a": {"b": 1}},
        {"a": True},
        {"a": "1"},
    ]
    for old in parts:
        for new in parts:
            same = Fingerprint(old).digest == Fingerprint(new).digest
            assert (differences(old, new) == []) == same, (old, new)


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})
