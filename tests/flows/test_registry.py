from __future__ import annotations

import subprocess
import sys

import pytest

from headwater.core.errors import ConfigError
from headwater.flows import registry


def test_an_installed_package_adds_a_flow_with_an_entry_point() -> None:
    assert "tiny" in registry.flow_names()
    assert registry.recipe_class("tiny").flow == "tiny"


def test_an_unknown_flow_is_named_with_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"Unknown flow 'tinny'. Did you mean 'tiny'\?"):
        registry.recipe_class("tinny")


def test_a_flow_whose_class_is_gone_says_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "gone", "headwater.flows.graph:Nothing")

    with pytest.raises(ConfigError, match=r"'gone' could not be loaded from headwater\.flows\.graph:Nothing"):
        registry.recipe_class("gone")


def test_naming_the_flows_imports_none_of_them() -> None:
    code = (
        "import sys; from headwater.flows.registry import flow_names; flow_names();"
        "print([m for m in ('headwater.flows.fac_synthesis', 'pyarrow', 'polars', 'torch') if m in sys.modules])"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
