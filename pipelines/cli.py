"""The `pipeline` command. Starting it imports click and nothing heavy: each command loads what it uses.

Exit codes: 0 done, 1 failed, 2 bad usage or recipe, 130 stopped with everything kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headwater.core.errors import ConfigError
from headwater.flows.suggest import did_you_mean
from headwater.pipelines.failures import exit_code_of

if TYPE_CHECKING:
    from headwater.core.store import Workspace

_WORKSPACE = "Where outputs, runs and caches lie."
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = pipeline.main(given, prog_name="pipeline", standalone_mode=False)
    except BaseException as error:
        code = exit_code_of(error)
    sys.exit(code or 0)


def _workspace_here(context: click.Context, _: click.Parameter, value: Path | None) -> None:
    if value is not None:
        context.obj = value


class _Commands(click.Group):
    """Lists commands in the order in which one meets them, and guesses at misspelt ones.

    Every command takes `--workspace` too: people type it where they are, after the command.
    """

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        where = click.Path(file_okay=False, path_type=Path)
        cmd.params.append(
            click.Option(["--workspace"], type=where, expose_value=False, help=_WORKSPACE, callback=_workspace_here)
        )
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise ConfigError(
                f"There is no command {args[0]!r}.",
                todo=f"{did_you_mean(args[0], self.commands)}There are: {', '.join(self.commands)}.",
            )
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings=_CONTEXT)
@click.option(
    "--workspace",
    type=click.Path(file_okay=False, path_type=Path),
    default=".headwater",
    envvar="HEADWATER_HOME",
    show_default=True,
    show_envvar=True,
    help=_WORKSPACE,
)
@click.version_option(package_name="headwater", message="headwater %(version)s")
@click.pass_context
def pipeline(context: click.Context, workspace: Path) -> None:
    """Make and curate post-training data for language models.

    \b
    Example:
      pipeline run fac-synthesis
    """
    context.obj = workspace


@pipeline.command("list")
def list_pipelines() -> None:
    """Name the pipelines, one line each.

    \b
    Example:
      pipeline list
    """
    from headwater.pipelines.recipes import shipped_recipes

    recipes = shipped_recipes()
    width = max(map(len, recipes), default=0)
    for name, title in recipes.items():
        click.echo(f"{name:<{width}}  {title}".rstrip())


def _recipe_options(command: Any) -> Any:
    """What `show` and `run` share: which recipe, and changes to it."""
    for option in reversed(
        (
            click.argument("name", required=False),
            click.option(
                "-c",
                "files",
                multiple=True,
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="A recipe file: a whole recipe (with `flow:`), or changes to NAME. Its paths are relative to it.",
            ),
            click.option(
                "--set",
                "changes",
                multiple=True,
                metavar="KEY=VALUE",
                help="Change one key, e.g. --set missing.limit=20; the value is YAML.",
            ),
            click.option("--seed", type=int, help="Seed of every random draw (the recipe's `seed`)."),
        )
    ):
        command = option(command)
    return command


@pipeline.command()
@_recipe_options
@click.pass_obj
def show(
    workspace: Path, name: str | None, files: tuple[Path, ...], changes: tuple[str, ...], seed: int | None
) -> None:
    """Show what a recipe means and what it would take.

    Prints the resolved recipe, its stages, what would be reused and what the rest would cost. Runs nothing.

    \b
    Example:
      pipeline show fac-synthesis --set seed=7
    """
    from headwater.pipelines.recipes import load_recipe
    from headwater.pipelines.show import show_recipe

    show_recipe(load_recipe(name, files, changes, seed), _workspace(workspace))


@pipeline.command()
@_recipe_options
@click.option("--direct", is_flag=True, help="Run without Prefect: the same stages, the same bytes.")
@click.option("--max-cost", type=click.FloatRange(min=0, min_open=True), help="Spend at most so many dollars.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Use at most so many tokens, in and out.")
@click.pass_obj
def run(
    workspace: Path,
    *,
    name: str | None,
    files: tuple[Path, ...],
    changes: tuple[str, ...],
    seed: int | None,
    direct: bool,
    max_cost: float | None,
    max_tokens: int | None,
) -> None:
    """Run a pipeline, or run on after a stop.

    Finished stages are reused, an unfinished one continues at its first missing row.

    Ctrl+C stops after what is in flight and keeps everything; a second Ctrl+C stops at once.

    \b
    Examples:
      pipeline run fac-synthesis
      pipeline run fac-synthesis -c mine.yaml --set seed=7 --max-cost 5
    """
    from headwater.pipelines.recipes import load_recipe
    from headwater.pipelines.run import run_recipe

    recipe = load_recipe(name, files, changes, seed)
    run_recipe(recipe, _workspace(workspace), direct=direct, max_cost=max_cost, max_tokens=max_tokens)


@pipeline.command()
@click.argument("run_name", metavar="[RUN]", required=False)
@click.pass_obj
def status(workspace: Path, run_name: str | None) -> None:
    """Show where a run stands.

    Reads the disk only. RUN is PIPELINE/TIME, PIPELINE, or nothing for the newest.

    \b
    Example:
      pipeline status fac-synthesis
    """
    from headwater.flows.runs import find_run
    from headwater.pipelines.status import show_status

    show_status(find_run(_workspace(workspace), run_name), _workspace(workspace))


@pipeline.command()
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--stage", help="Rows of this stage rather than of the dataset.")
@click.option("--rejects", is_flag=True, help="The rejected rows and why.")
@click.option("-n", "count", type=click.IntRange(min=1), default=10, show_default=True, help="How many rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.pass_obj
def rows(workspace: Path, *, run_name: str | None, stage: str | None, rejects: bool, count: int, as_json: bool) -> None:
    """Look at rows in the terminal.

    \b
    Examples:
      pipeline rows fac-synthesis -n 3
      pipeline rows fac-synthesis --stage texts.1 --rejects --json | head
    """
    from headwater.flows.runs import find_run
    from headwater.pipelines.rows import show_rows

    space = _workspace(workspace)
    show_rows(find_run(space, run_name), space, stage=stage, rejects=rejects, count=count, as_json=as_json)


@pipeline.command()
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--open", "open_it", is_flag=True, help="Open it in the browser.")
@click.pass_obj
def report(workspace: Path, run_name: str | None, open_it: bool) -> None:
    """Print the path of a run's HTML report.

    A report that is missing is written anew.

    \b
    Example:
      pipeline report fac-synthesis --open
    """
    from headwater.flows.runs import find_run
    from headwater.pipelines.reports import report_path

    space = _workspace(workspace)
    path = report_path(find_run(space, run_name), space)
    click.echo(path)
    if open_it:
        click.launch(str(path))


@pipeline.command()
@click.pass_obj
def doctor(workspace: Path) -> None:
    """Say what this machine can do.

    Names the line that installs what is missing.

    \b
    Example:
      pipeline doctor
    """
    from headwater.pipelines.doctor import examine

    examine(_workspace(workspace))


def _workspace(root: Path) -> Workspace:
    from headwater.core.store import Workspace

    return Workspace(root)
