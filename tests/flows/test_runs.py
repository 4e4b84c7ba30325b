from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_flow import Tiny

from headwater.core.errors import ConfigError
from headwater.core.store import Workspace
from headwater.flows.execute import Execution, execute
from headwater.flows.runs import create_run, find_run, link_dataset


def test_runs_begun_in_the_same_second_get_folders_of_their_own(workspace: Workspace) -> None:
    paths = {create_run(workspace, "p", {}).path for _ in range(3)}

    assert len(paths) == 3


def test_the_newest_run_is_found_by_pipeline_by_name_or_by_nothing(workspace: Workspace) -> None:
    first, other, last = (create_run(workspace, name, {}) for name in ("a", "b", "a"))

    assert find_run(workspace, None).path == last.path
    assert find_run(workspace, "a").path == last.path
    assert find_run(workspace, "b").path == other.path
    assert find_run(workspace, first.name).path == first.path


def test_a_run_that_is_not_there_is_an_error_with_a_guess(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match="No run yet"):
        find_run(workspace, None)
    create_run(workspace, "squares", {})
    with pytest.raises(ConfigError, match=r"Did you mean 'squares'\? There are runs of: squares"):
        find_run(workspace, "square")


def test_a_run_is_alive_while_its_process_is_and_killed_afterwards(workspace: Workspace) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headwater.core.store import Workspace;"
        "from headwater.flows.runs import create_run;"
        "create_run(Workspace(Path(sys.argv[1])), 'p', {}); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(workspace.root)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    run = find_run(workspace, "p")

    assert run.status == "running"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert run.status == "killed"


def test_a_pid_that_somebody_else_got_does_not_make_a_dead_run_look_alive(workspace: Workspace) -> None:
    run = create_run(workspace, "p", {})
    run.set_state("failed")
    run.set_state("running")

    assert run.state["pid"] == os.getpid()
    assert run.status == "killed"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("run.json", '{"a', "can't be read: Unterminated string"),
        ("run.json", "{}", "it has no 'status'"),
        ("lineage.json", "[]", "it holds no mapping"),
        ("recipe.yaml", "a: [", "can't be read"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_with_what_to_do(workspace: Workspace, name: str, text: str, why: str) -> None:
    run = create_run(workspace, "p", {})
    (run.path / name).write_text(text)

    with pytest.raises(ConfigError, match=f"p/.*/{name} can't be read") as caught:
        _ = (find_run(workspace, "p").status, run.lineage, run.recipe)
    assert why in caught.value.what
    assert "Run the pipeline again" in caught.value.todo


def test_a_run_without_its_recipe_is_still_found(workspace: Workspace) -> None:
    run = create_run(workspace, "p", {})
    (run.path / "recipe.yaml").unlink()

    assert find_run(workspace, "p").path == run.path
    with pytest.raises(ConfigError, match=r"recipe\.yaml can't be read"):
        _ = run.recipe


def test_credentials_in_a_recipe_are_not_written_to_the_run_folder(workspace: Workspace) -> None:
    run = create_run(workspace, "p", {"api_key": "swordfish-swordfish", "url": "https://me:swordfish@host/x.csv"})

    assert "swordfish" not in (run.path / "recipe.yaml").read_text()


def test_the_dataset_is_linked_not_copied_and_named_as_the_hub_names_shards(workspace: Workspace) -> None:
    recipe = Tiny(pipeline="tiny")
    run = create_run(workspace, "tiny", recipe.resolved())
    execution = Execution(recipe, run, workspace)
    execute(execution)
    source = execution.results["keep"].output

    link_dataset(run, source)
    (shard,) = (run.path / "dataset").iterdir()

    assert shard.name == "train-00000-of-00001.parquet"
    assert shard.stat().st_ino == source.data_files[0].stat().st_ino


def test_an_output_that_is_gone_is_an_error_that_says_what_to_do(workspace: Workspace) -> None:
    recipe = Tiny(pipeline="tiny")
    run = create_run(workspace, "tiny", recipe.resolved())
    execute(Execution(recipe, run, workspace))
    Path(workspace.stages / run.lineage["keep"]["output"] / "manifest.json").unlink()

    with pytest.raises(ConfigError, match=r"The output of stage 'keep' is gone or damaged\. Run the pipeline again"):
        run.output(workspace, "keep")
    with pytest.raises(ConfigError, match=r"no finished stage 'kep'. Did you mean 'keep'\?"):
        run.output(workspace, "kep")
