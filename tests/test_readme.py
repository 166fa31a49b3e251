"""The README's commands exist as they are written."""

import re
import shlex
from pathlib import Path

import typer

from sagecli.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_every_command_and_option_of_the_readme_exists():
    group = typer.main.get_command(app)
    options = {name: {flag for p in command.params for flag in p.opts} for name, command in group.commands.items()}
    written = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    sage ")]
    written += re.findall(r"`(sage [^`]*)`", README)
    assert len(written) >= 10
    for line in written:
        _, command, *rest = shlex.split(line.split(" > ")[0])
        assert command in options, line
        assert {part for part in rest if part.startswith("--")} <= options[command], line


def test_pictures_and_files_of_the_readme_exist():
    root = Path(__file__).parent.parent
    named = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"`((?:backends|sagecli)/[\w./]+)`", README)
    assert len(named) >= 4
    for path in named:
        assert (root / path).exists(), path


def test_no_placeholder_is_left():
    assert not re.search(r"\b(TABLE|MINUTES|NOTE|TODO)\b", README)
