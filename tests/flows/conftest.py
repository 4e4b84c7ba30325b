"""The tiny flow, installed the way any package's flow would be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

PLUGIN = str(Path(__file__).parent / "plugin")
if PLUGIN not in sys.path:
    sys.path.insert(0, PLUGIN)

from headwater.core.store import Workspace  # noqa: E402


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def tiny_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({"flow": "tiny", "count": {"rows": 12}}))
    return path
