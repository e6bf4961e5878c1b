"""The help, the manual pages, and how little is imported for them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.cli.summary import summary
from tests.scheduler.service.api import serving

HEAVY = (
    "numpy",
    "scipy",
    "pandas",
    "highspy",
    "sqlalchemy",
    "alembic",
    "penstock_scheduler.rounds",
    "penstock_scheduler.store",
)
"""What no question to penstockd may import: the time to load them would be most of the command's time."""


def imported(*words: str) -> list[str]:
    """The modules of `HEAVY`, and pydantic, that the process of a command has imported at its end."""
    code = f"""
import sys
from penstock_scheduler.cli import main
try:
    main()
except SystemExit:
    pass
print(*(name for name in {(*HEAVY, "pydantic", "httpx")} if name in sys.modules), file=sys.stderr)
"""
    away = os.environ | {"PENSTOCK_URL": "unix:/none"}
    done = subprocess.run([sys.executable, "-c", code, *words], env=away, capture_output=True, text=True, timeout=60)
    return done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize(
    "words", ["list", "usage", "plan", "rounds list", "nodes", "show", "explain", "wait", "cancel", "audit", "drain"]
)
def test_the_help_of_a_command_imports_only_its_options(words):
    """`penstock list --help` took 1.2 s of processor time with NumPy, pydantic and rich, and takes 0.2 without."""
    assert imported(*words.split(), "--help") == []


@pytest.mark.parametrize(
    "words",
    [
        "list --waiting",
        "cancel 1",
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in ("usage", "nodes", "logs 1", "rounds pause", "policy list")
        ),
    ],
)
def test_a_question_to_penstockd_imports_only_the_client(words):
    assert imported(*words.split()) == ["pydantic", "httpx"]


def test_the_list_of_jobs_imports_only_the_client(tmp_path):
    """With a penstockd that answers: without one, the command would read the store."""
    with serving(tmp_path) as api:
        code = "import sys; from penstock_scheduler.cli import make_app; make_app()(['list'], standalone_mode=False)\n"
        code += f"print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
        where = os.environ | {"PENSTOCK_URL": api.socket}
        done = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, timeout=60)
    assert "ada" in done.stdout
    assert done.stderr == "\n"


def test_without_penstockd_and_a_store_that_the_user_may_read_nothing_is_imported_for_one():
    """Users meet it whenever penstockd is away: it took 4.6 s of processor time."""
    assert imported("list", "--store=/none") == ["pydantic", "httpx"]


def test_manual_pages_are_written_for_every_command(tmp_path):
    told = CliRunner().invoke(make_app(), ["man", "--out", str(tmp_path)])
    assert told.exit_code == 0, told.output
    page = (tmp_path / "penstock-wait.1").read_text()
    assert page.startswith(".TH PENSTOCK-WAIT 1")
    assert "\\-\\-timeout" in page
    assert (tmp_path / "penstock-token-create.1").exists()
    assert "explain" in (tmp_path / "penstock.1").read_text()
    assert "\\-\\-preset NAME" in (tmp_path / "penstock-submit.1").read_text(), "it reads its options itself"


@pytest.mark.parametrize("words", ["demo", "playground up --port 9000", "loopback --help"])
def test_a_command_for_developers_names_its_package_where_it_is_not_installed(words: str, monkeypatch):
    def of_sites(group: str) -> list[EntryPoint]:
        return [entry for entry in entry_points(group=group) if not entry.value.startswith("penstock_loopback")]

    monkeypatch.setattr("penstock_scheduler.cli.entry_points", of_sites)
    told = CliRunner().invoke(make_app(), words.split())
    assert told.exit_code == 2
    assert f"{words.split()[0]} is a command of the package penstock-loopback" in told.output
    assert "pip install ./loopback" in told.output
    assert "No such command" in CliRunner().invoke(make_app(), ["simulate", "demo"]).output
    assert "Trying Penstock" not in CliRunner().invoke(make_app(), ["--help"]).output


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
        first, _, second = name.partition(" ")
        command = group.commands[first].commands[second] if second else group.commands[first]
        assert summary(where) == inspect.cleandoc(command.help), name
