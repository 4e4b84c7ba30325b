"""Find, read, merge and validate recipes.

A recipe is a YAML mapping. The shipped ones lie in `pipelines/recipes/`. A file given with `-c` is either a whole
recipe (it has `flow:`, and a name beside it must be its own) or changes to the named one; `--set key.sub=value` comes
last.

Paths: in a file given with `-c`, a value that begins with `./` or `../`, ends like a data file, or holds a slash and
is there, is meant relative to the folder of that file. In a shipped recipe and with `--set` a path is relative to the
current folder. `~/` is the home.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError
from headwater.flows.suggest import did_you_mean
from headwater.pipelines.yaml_text import read_mapping, read_value

if TYPE_CHECKING:
    from headwater.flows.recipe import Recipe

SHIPPED = Path(__file__).parent / "recipes"

_DATA_FILE = re.compile(
    r"\.(jsonl?|ndjson|csv|tsv|txt|parquet|arrow|safetensors|pth?|npz|ya?ml)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE
)
_KEY_PART = re.compile(r"\"([^\"]*)\"|'([^']*)'|([^.\"']+)")


def shipped_recipes() -> dict[str, str]:
    """Name → title of every shipped recipe."""
    return {path.stem: str(read_mapping(path).get("title", "")) for path in sorted(SHIPPED.glob("*.yaml"))}


def load_recipe(
    name: str | None, files: Sequence[Path] = (), changes: Sequence[str] = (), seed: int | None = None
) -> Recipe:
    """The validated recipe: the named one, then each file, then each `key=value`.

    Raises ConfigError for an unknown name, an unreadable file, YAML that does not parse, an unknown key or a wrong
    value; the message names the key and what is allowed.
    """
    values = _start(name, files)
    source = f"recipe {name!r}" if name else "the recipe"
    for file in files:
        own = _with_paths(read_mapping(file), file.absolute().parent)
        if "flow" in own:
            _check_whole(own, name, file, first=file is files[0])
        values = own if "flow" in own else merge(values, own)
        values.setdefault("pipeline", name or file.stem)
        source = str(file)
    for change in changes:
        values = apply_change(values, change)
    if seed is not None:
        values = {**values, "seed": seed}
    return build(values, f"{source} with --set" if changes else source)


def build(values: Mapping[str, Any], source: str) -> Recipe:
    """The recipe object of resolved values (with `flow`). `source` is how messages call where they came from."""
    from headwater.flows.recipe import validate
    from headwater.flows.registry import flow_names, recipe_class

    flow = values.get("flow")
    if not isinstance(flow, str):
        raise ConfigError(
            f"Key 'flow' in {source} must name a flow (it is {flow!r}).", todo=f"There are: {', '.join(flow_names())}."
        )
    own = {key: value for key, value in values.items() if key != "flow"}
    return validate(recipe_class(flow), own, source)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings merge key by key, everything else (lists too) is replaced.

    So is a mapping by an empty one: `where: {}` says that nothing is to be left out.
    """
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping) and value
        merged[key] = merge(under or {}, value) if both else value
    return merged


def apply_change(values: Mapping[str, Any], change: str) -> dict[str, Any]:
    """`values` with one `key.sub=value`. A key that holds dots is quoted: `prices."gpt-4.1".input=2`."""
    key, equals, text = change.partition("=")
    parts = [next(filter(None, groups)) for groups in _KEY_PART.findall(key) if any(groups)]
    if not equals or not parts:
        raise ConfigError(f"--set {change!r} is not of the form key.sub=value.", todo="Write for example --set seed=7.")
    value = read_value(text, f"--set {change}")
    for part in reversed(parts[1:]):
        value = {part: value}
    return _merge_checked(values, {parts[0]: value}, change, "")


def _merge_checked(below: Mapping[str, Any], above: Mapping[str, Any], change: str, path: str) -> dict[str, Any]:
    ((key, value),) = above.items()
    merged = dict(below)
    if not isinstance(value, Mapping) or key not in below or below[key] is None:
        return {**merged, key: _home(value)}
    if not isinstance(below[key], Mapping):
        raise ConfigError(
            f"--set {change}: {path + key!r} is {below[key]!r}, which has no keys below it.",
            todo=f"Write --set {path}{key}=… to replace it.",
        )
    if len(value) != 1:
        return merge(below, {key: value})
    return {**merged, key: _merge_checked(below[key], value, change, f"{path}{key}.")}


def _start(name: str | None, files: Sequence[Path]) -> dict[str, Any]:
    whole = any("flow" in read_mapping(file) for file in files)
    if name is None:
        if not whole:
            raise ConfigError(
                "No pipeline is named.",
                todo="Write `pipeline run NAME`, or give a whole recipe (with `flow:`) with -c.",
            )
        return {}
    path = SHIPPED / f"{name}.yaml"
    if path.parent == SHIPPED and path.is_file():
        return read_mapping(path)
    if whole:
        return {}
    if Path(name).suffix in (".yaml", ".yml"):
        raise ConfigError(f"{name!r} is a file, not a pipeline's name.", todo=f"Write `-c {name}`.")
    names = sorted(shipped_recipes())
    raise ConfigError(
        f"There is no pipeline {name!r}.",
        todo=f"{did_you_mean(name, names)}There are: {', '.join(names)}. A recipe of your own is given with -c.",
    )


def _check_whole(own: Mapping[str, Any], name: str | None, file: Path, *, first: bool) -> None:
    """A whole recipe takes nothing from the pipeline named before it or from other files: none may seem to count."""
    if not first:
        raise ConfigError(
            f"{file} is a whole recipe (it has `flow:`): the files before it would not count.",
            todo="Give it first, and then the files that change it.",
        )
    called = own.get("pipeline", None if name in shipped_recipes() else name)
    if name is not None and called != name:
        its = f" of the pipeline {called!r}" if called else ""
        raise ConfigError(
            f"{file} is a whole recipe{its} (it has `flow:`): nothing of {name!r} would count.",
            todo=f"Leave {name!r} out to run the file as it is, or take out its `flow:` to have it change {name!r}.",
        )


def _with_paths(value: Any, folder: Path) -> Any:
    """The same values with relative paths made absolute, as the module's docstring says."""
    if isinstance(value, Mapping):
        return {key: _with_paths(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_paths(inner, folder) for inner in value]
    if isinstance(value, str) and _means_a_path(value, folder):
        return str((folder / Path(value).expanduser()).resolve())
    return value


def _means_a_path(value: str, folder: Path) -> bool:
    if "://" in value or "\n" in value or not value or ":" in value.partition("/")[0]:
        return False
    if value.startswith(("./", "../", "~/")):
        return True
    if _DATA_FILE.search(value):
        return " " not in value or (folder / value).exists()
    return "/" in value and " " not in value and (folder / value).exists()


def _home(value: Any) -> Any:
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value
