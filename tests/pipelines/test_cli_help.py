from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from headwater.pipelines.cli import main, pipeline

HEAVY = ("polars", "pyarrow", "prefect", "torch", "transformers", "datasets", "datatrove", "jinja2", "numpy", "yaml")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom headwater.pipelines.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as ended:\n    assert not ended.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "Make and curate post-training data" in ended.stdout
    assert ended.stderr == "[]\n"


def test_listing_and_status_import_neither_prefect_nor_torch() -> None:
    code = (
        "import sys\nfrom headwater.pipelines.cli import main\n"
        "for arguments in (['list'], ['--workspace', '/nowhere', 'status']):\n"
        "    try:\n        main(arguments)\n    except SystemExit:\n        pass\n"
        "print([name for name in ('polars', 'prefect', 'torch', 'datasets') if name in sys.modules])"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", list(pipeline.commands))
def test_the_help_of_every_command_has_an_example_of_that_command(name: str) -> None:
    text = CliRunner().invoke(pipeline, [name, "--help"]).output

    assert "Example" in text
    assert f"pipeline {name}" in text.partition("Example")[2]


def test_every_option_and_command_is_explained() -> None:
    for command in pipeline.commands.values():
        assert command.help
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, (command.name, parameter.name)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert not ended.value.code
    assert capsys.readouterr().out.startswith("headwater ")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])

    output = capsys.readouterr()
    lines = (output.out + output.err).splitlines()
    assert lines[0].startswith("Usage: pipeline ")
    assert any(line.split()[:1] == ["run"] for line in lines)
