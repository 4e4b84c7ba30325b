from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headwater.core.errors import ConfigError
from headwater.pipelines import recipes
from headwater.pipelines.cli import main
from headwater.pipelines.recipes import apply_change, load_recipe, merge

WHOLE = "flow: tiny\n"

BAD_FILES = {
    "unknown key": (WHOLE + "cuont: {rows: 3}\n", "Unknown key 'cuont'", "Did you mean 'count'?"),
    "unknown key below": (WHOLE + "count: {row: 3}\n", "Unknown key 'count.row'", "Did you mean 'rows'?"),
    "wrong type": (WHOLE + "count: {rows: many}\n", "Key 'count.rows'", "(it is 'many')"),
    "out of range": (WHOLE + "deep: {share: 1.5}\n", "Key 'deep.share'", "less than or equal to 1"),
    "a list for a mapping": (WHOLE + "count: [1, 2]\n", "Key 'count'", "valid dictionary"),
    "unknown flow": ("flow: tinny\n", "Unknown flow 'tinny'", "Did you mean 'tiny'?"),
    "a flow that is no name": ("flow: [tiny]\n", "Key 'flow'", "There are:"),
    "broken YAML": (WHOLE + "count: {rows: 3\nseed: 1\n", "line 3", "Mend the YAML"),
    "a tab": (WHOLE + "count:\n\trows: 3\n", "line 3", "Mend the YAML"),
    "a key twice": (WHOLE + "seed: 1\nseed: 2\n", "line 3: the key 'seed' is there twice", "Mend"),
    "a Python object": (WHOLE + "title: !!python/object/apply:os.getcwd []\n", "line 2", "could not determine"),
    "a list": ("- flow: tiny\n", "is a list, not a mapping", "key: value"),
    "nothing": ("", "is empty, not a mapping", "key: value"),
    "a key that is no text": (WHOLE + "1: x\n", "has the key 1", "quotes"),
    "an alias inside its anchor": (
        "flow: tiny\ncount: &a {rows: *a}\n",
        "is not valid YAML: an alias stands inside",
        "",
    ),
    "a pipeline's name with a slash": (WHOLE + "pipeline: a/b\n", "Key 'pipeline'", "(it is 'a/b')"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_recipe_is_exit_code_2_and_one_paragraph(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, what, todo = BAD_FILES[case]
    path = tmp_path / "bad.yaml"
    path.write_text(text)

    assert run("--workspace", str(tmp_path / "w"), "run", "-c", str(path)) == 2
    complaint = capsys.readouterr().err

    assert complaint.startswith("Error: ")
    assert complaint.count("\n") == 1, "one paragraph"
    assert what in complaint
    assert todo in complaint
    assert not (tmp_path / "w").exists(), "a bad recipe leaves nothing behind"


BAD_LINES = {
    "no such command": (["rnu"], "no command 'rnu'. Did you mean 'run'?"),
    "no such option": (["run", "--direkt"], "No such option"),
    "no such pipeline": (["run", "fac-sinthesis"], "There is no pipeline 'fac-sinthesis'. Did you mean"),
    "a file for a name": (["run", "mine.yaml"], "Write `-c mine.yaml`"),
    "no pipeline": (["run"], "No pipeline is named"),
    "no such file": (["run", "-c", "nowhere.yaml"], "nowhere.yaml can't be read: No such file"),
    "a folder for a file": (["run", "-c", "."], "can't be read: Is a directory"),
    "no equals sign": (["run", "-c", "good.yaml", "--set", "seed"], "not of the form key.sub=value"),
    "an unknown key set": (["run", "-c", "good.yaml", "--set", "count.rosw=3"], "Did you mean 'rows'?"),
    "a wrong value set": (["run", "-c", "good.yaml", "--set", "count.rows=[1]"], "Key 'count.rows'"),
    "below a plain value": (["run", "-c", "good.yaml", "--set", "seed.x=1"], "'seed' is 0, which has no keys below it"),
    "YAML that does not parse": (["run", "-c", "good.yaml", "--set", "seed=[1"], "--set seed=[1, line 1"),
    "a budget of nothing": (["run", "-c", "good.yaml", "--max-cost", "0"], "--max-cost"),
    "a seed that is no number": (["run", "-c", "good.yaml", "--seed", "x"], "'x' is not a valid integer"),
    "no run yet": (["status"], "No run yet"),
    "no such run": (["rows", "nope"], "No run 'nope'"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_usage_is_exit_code_2_and_one_paragraph(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, what = BAD_LINES[case]
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text("flow: tiny\nseed: 0\n")
    ship(monkeypatch, tmp_path, "fac-synthesis", "flow: tiny\n")

    assert run("--workspace", "w", *arguments) == 2
    complaint = capsys.readouterr().err

    assert complaint.startswith("Error: ")
    assert complaint.count("\n") == 1
    assert what in complaint


def test_latin_1_is_refused_with_the_place_of_the_first_wrong_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("flow: tiny\ntitle: Größe\n".encode("latin-1"))

    with pytest.raises(ConfigError, match=r"latin.yaml is not UTF-8 \(byte 20\)"):
        load_recipe(None, [path])


def test_a_partial_file_merges_over_the_named_recipe_and_set_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(monkeypatch, tmp_path, "squares", "flow: tiny\npipeline: squares\ncount: {rows: 5, wait_s: 0.5}\nseed: 3\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text("count: {rows: 7}\n")

    recipe = load_recipe("squares", [mine], ["count.wait_s=0.25", "deep.share=0.75"])

    assert recipe.pipeline == "squares"
    assert recipe.resolved()["count"] == {"rows": 7, "file": None, "wait_s": 0.25}
    assert recipe.resolved()["deep"]["share"] == 0.75
    assert recipe.seed == 3
    assert load_recipe("squares", [mine], ["seed=4"], seed=5).seed == 5


def test_a_whole_file_stands_alone_and_is_named_after_itself(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("flow: tiny\n")

    assert load_recipe(None, [mine]).pipeline == "mine"
    assert load_recipe("another", [mine]).pipeline == "another"


def test_a_whole_file_beside_a_name_that_is_not_its_own_is_refused_as_nothing_of_that_would_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(monkeypatch, tmp_path, "squares", "flow: tiny\npipeline: squares\n")
    mine, part = tmp_path / "mine.yaml", tmp_path / "part.yaml"
    part.write_text("seed: 4\n")

    mine.write_text("flow: tiny\npipeline: cubes\n")
    with pytest.raises(ConfigError, match=r"a whole recipe of the pipeline 'cubes' .*nothing of 'squares' would count"):
        load_recipe("squares", [mine])
    assert load_recipe("cubes", [mine, part]).seed == 4
    with pytest.raises(ConfigError, match="the files before it would not count"):
        load_recipe(None, [part, mine])

    mine.write_text("flow: tiny\nseed: 3\n")
    with pytest.raises(ConfigError, match=r"a whole recipe \(it has `flow:`\): nothing of 'squares' would count"):
        load_recipe("squares", [mine])


def test_the_resolved_recipe_is_a_recipe_that_means_the_same(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("flow: tiny\ncount: {rows: 7}\n")
    recipe = load_recipe(None, [mine])
    resolved = tmp_path / "elsewhere" / "resolved.yaml"
    resolved.parent.mkdir()
    resolved.write_text(yaml.safe_dump(recipe.resolved()))

    assert load_recipe(None, [resolved]) == recipe


def test_paths_in_a_file_are_relative_to_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    mine = folder / "mine.yaml"
    mine.write_text(
        "flow: tiny\n"
        "count: {file: numbers.jsonl}\n"
        "paths: [./here, ../up, data/, data/not-there.csv.gz, org/name, text, 'a sentence, not a file.txt',"
        " 's3://bucket/x.jsonl', 'package:pipelines/data/x.jsonl', ~/x]\n"
    )
    monkeypatch.chdir(tmp_path)
    values = load_recipe(None, [Path("project/mine.yaml")]).resolved()

    assert values["count"]["file"] == str(folder / "numbers.jsonl")
    assert values["paths"] == [
        str(folder / "here"),
        str(tmp_path / "up"),
        str(folder / "data"),
        str(folder / "data" / "not-there.csv.gz"),
        "org/name",
        "text",
        "a sentence, not a file.txt",
        "s3://bucket/x.jsonl",
        "package:pipelines/data/x.jsonl",
        str(Path.home() / "x"),
    ]


def test_a_relative_path_in_a_shipped_recipe_is_left_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(monkeypatch, tmp_path, "squares", "flow: tiny\npipeline: squares\npaths: [../shared/x.csv.gz]\n")

    assert load_recipe("squares").resolved()["paths"] == ["../shared/x.csv.gz"]


def test_a_path_given_with_set_is_left_to_the_current_folder(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("flow: tiny\n")

    assert load_recipe(None, [mine], ["count.file=x.jsonl"]).resolved()["count"]["file"] == "x.jsonl"


def test_a_key_with_dots_is_quoted() -> None:
    values = apply_change({"prices": {"a": {"input": 1}}}, 'prices."gpt-4.1".input=2.5')

    assert values == {"prices": {"a": {"input": 1}, "gpt-4.1": {"input": 2.5}}}


def test_values_of_set_are_yaml() -> None:
    changed = [apply_change({}, text)["k"] for text in ("k=3", "k=[a, b]", "k=null", "k=true", "k=", "k='3'")]

    assert changed == [3, ["a", "b"], None, True, None, "3"]


def test_merging_replaces_lists_and_leaves_its_arguments_alone() -> None:
    below = {"a": {"b": 1, "c": [1, 2]}, "d": 4}

    assert merge(below, {"a": {"c": [3]}}) == {"a": {"b": 1, "c": [3]}, "d": 4}
    assert below == {"a": {"b": 1, "c": [1, 2]}, "d": 4}


@pytest.mark.parametrize("name", [path.stem for path in recipes.SHIPPED.glob("*.yaml")])
def test_every_shipped_recipe_is_valid_titled_and_named_after_its_file(name: str) -> None:
    recipe = load_recipe(name)

    assert recipe.pipeline == name
    assert recipe.title
    assert len(recipe.graph().nodes) > 1


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def ship(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> None:
    """Make `text` the only recipe that is shipped."""
    shipped = folder / "shipped"
    shipped.mkdir(exist_ok=True)
    (shipped / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(recipes, "SHIPPED", shipped)
