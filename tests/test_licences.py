"""Licences: every direct dependency is listed, and none in the closure binds whoever uses Headwater."""

from __future__ import annotations

import re
import tomllib
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import cast

ROOT = Path(__file__).parent.parent
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_BINDING = re.compile(r"\b(A?GPL|GNU (Affero )?General Public|NonCommercial|Proprietary)", re.IGNORECASE)
_OPEN_WAY = re.compile(r"LGPL|Lesser|Artistic", re.IGNORECASE)


def _declared() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = {"core": project["dependencies"], **project["optional-dependencies"]}
    return {_name(requirement): group for group, requirements in groups.items() for requirement in requirements}


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found, requirement
    return found[0].lower().replace("_", "-")


def _licence(package: str) -> str:
    metadata = cast(Message, distribution(package).metadata)
    stated = metadata.get("License-Expression") or (metadata.get("License") or "").split("\n")[0]
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    return " ".join([stated, *classifiers])


def test_the_table_lists_just_the_declared_dependencies() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| (\w+) \|", (ROOT / "DEPENDENCIES.md").read_text("utf-8"), re.MULTILINE)
    listed = {name.lower(): group for name, group in rows if name != "package"}
    assert listed == _declared()


def test_no_dependency_has_a_licence_that_binds_the_user() -> None:
    waiting, seen = list(_declared()), set()
    binding = {}
    while waiting:
        package = waiting.pop()
        if package in seen:
            continue
        seen.add(package)
        try:
            found = distribution(package)
        except PackageNotFoundError:
            continue
        licence = _licence(package)
        if _BINDING.search(licence) and not _OPEN_WAY.search(licence):
            binding[package] = licence
        waiting += [_name(r) for r in found.requires or [] if "extra ==" not in r]
    assert len(seen) > 60
    assert binding == {}
