"""YAML in, plain values out. Whatever is wrong with the text becomes one sentence that names the line."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from headwater.core.errors import ConfigError


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError when there is none, or a key is there twice."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}).", todo="Save it as UTF-8.") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.", todo="Check the path given with -c.") from error
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        kind = "empty" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{path} is {kind}, not a mapping of keys.", todo="Write `key: value` lines.")
    odd = next((key for key in values if not isinstance(key, str)), None)
    if odd is not None:
        raise ConfigError(f"{path} has the key {odd!r}, which is not text.", todo="Put the key into quotes.")
    return values


def read_value(text: str, where: str) -> Any:
    """One value, as YAML reads it: `3` is a number, `[a, b]` a list, `null` nothing."""
    return _parse(text, where)


class _Loader(yaml.SafeLoader):
    """Like SafeLoader, but a key that is there twice is an error rather than a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str, where: str) -> Any:
    try:
        value = yaml.load(text, Loader=_Loader)
        _refuse_cycles(value, set())
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = (error.problem or error.context or "it can't be parsed").strip()
        raise ConfigError(f"{where}{line}: {problem}.", todo="Mend the YAML there.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{where} is not valid YAML: {what}.", todo="Mend it.") from error


def _refuse_cycles(value: Any, around: set[int]) -> None:
    """An alias may repeat an anchor, but not stand inside it: such a value has no end."""
    if not isinstance(value, dict | list):
        return
    if id(value) in around:
        raise ValueError("an alias stands inside what it repeats")
    for item in value.values() if isinstance(value, dict) else value:
        _refuse_cycles(item, around | {id(value)})
