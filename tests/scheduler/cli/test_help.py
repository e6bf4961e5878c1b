"""The help, the manual pages, and how little is imported for them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from typer.main import get_command
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.cli.summary import summary


def test_commands_that_ask_import_neither_the_solver_nor_the_database():
    """`penstock list` took 2.6 s of processor time to load with SciPy and SQLAlchemy, and takes 1.1 without."""
    code = "import sys, penstock_slurm.submit.cli\n"
    code += "from penstock_scheduler.cli import admin, cluster, doctor, jobs\n"
    code += "from penstock_scheduler.rounds.settings import parse_settings; parse_settings('', 'here')\n"
    code += "print(*sorted({'scipy', 'sqlalchemy', 'alembic', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_manual_pages_are_written_for_every_command(tmp_path):
    told = CliRunner().invoke(make_app(), ["man", "--out", str(tmp_path)])
    assert told.exit_code == 0, told.output
    page = (tmp_path / "penstock-wait.1").read_text()
    assert page.startswith(".TH PENSTOCK-WAIT 1")
    assert "\\-\\-timeout" in page
    assert (tmp_path / "penstock-token-create.1").exists()
    assert "explain" in (tmp_path / "penstock.1").read_text()
    assert "\\-\\-preset NAME" in (tmp_path / "penstock-submit.1").read_text(), "it reads its options itself"


def test_no_help_has_brackets_that_rich_would_take_for_markup():
    """Text such as that of a section of the settings, in its brackets, is not shown at all."""

    def texts(command, path: str) -> Iterator[tuple[str, str]]:
        for text in (command.help, *(getattr(each, "help", None) for each in command.params)):
            yield path, text or ""
        for name, below in getattr(command, "commands", {}).items():
            yield from texts(below, f"{path} {name}")

    found = [
        (path, text) for path, text in texts(get_command(make_app()), "penstock") if re.search(r"\[[a-z/#@]", text)
    ]
    assert found == []


def test_the_list_of_commands_imports_none_of_them_and_shows_their_own_help():
    """For the help and for the shell's completion; also of the commands that other packages bring."""
    code = """
import sys
from penstock_scheduler.cli import main
try:
    main()
except SystemExit:
    pass
here = [name for name in sys.modules if name.startswith("penstock_") and ".people" not in name]
print("imported:", [name for name in here if name.count(".") > 1 and not name.endswith(".cli.summary")], file=sys.stderr)
print("numpy" in sys.modules, file=sys.stderr)
"""
    for words, more in (
        (["--help"], {}),
        ([], {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock ", "COMP_CWORD": "1"}),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], env=os.environ | more, capture_output=True, text=True, timeout=60
        )
        assert "explain" in done.stdout
        assert done.stderr.splitlines()[-2:] == ["imported: []", "False"]
    group = get_command(make_app())
    for name, where in group.sources.items():
        assert summary(where) == inspect.cleandoc(group.commands[name].help), name
