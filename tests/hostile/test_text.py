"""Text of users, on its way to a person: no character of it steers a terminal, breaks a line or turns the direction of writing.

`POISON` has every such character and the classic attacks. The names of jobs, accounts, nodes and so on are made of it here. Then
every command runs, and every page, log line, mail and metric is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import logging
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.main import get_command

from penstock_scheduler import cli
from penstock_scheduler.api.access_messages import TokenOrder
from penstock_scheduler.api.history_messages import QueueEntry
from penstock_scheduler.api.ledger_messages import LedgerLine
from penstock_scheduler.daemon.notices import Notice, NoticeSettings, _mail
from penstock_scheduler.daemon.service.allocations import AllocationLog
from penstock_scheduler.daemon.service.metrics import of_api
from penstock_scheduler.model import ClusterState, Refusal, Suspension
from penstock_scheduler.people.logs import configure_logging
from penstock_scheduler.people.safe_text import LOG_LINE, exact, guard, guard_table, one_line, visible
from penstock_slurm.agent.main import _Logfmt
from tests.scheduler.builders import snapshot
from tests.scheduler.service.api import ADAS, BOBS, Api, log_in, serving

FORGED = "FORGED"
ATTACKS = (
    "\x1b[2J\x1b[H",  # clears the screen
    "\x1b[31;8m",  # hides text
    "\x1b[1A\x1b[2K",  # writes over the line above
    "\x1b]0;title\x07",  # sets the window's title
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;cm0gLXJmIH4=\x07",  # writes the clipboard
    "\x1bP+q544e\x1b\\",  # asks the terminal, whose answer is typed
    "\x9b31m\x9d0;title\x9c",  # the same in one character each
    "good\rbad",
    f"\n{FORGED} timestamp=2026 level=info event=forged",
    "\x85next\u2028line\u2029paragraph",
    "\u202egpj.exe",
    "\u2066a\u2069\u200e\u200f\u061c",
    "zero\u200b\u200c\u200d\u2060\ufeff\xad",
    "\U000e0041\U000e007f",  # tags, which show nothing
    '"=\\',
)
CONTROLS = [chr(code) for code in (*range(1, 0x20), *range(0x7F, 0xA0))]
POISON = "evil" + "".join(ATTACKS) + "".join(CONTROLS) + "end"
"""Without NUL and halves of surrogate pairs, which no database and no process takes."""
WORST = POISON + "\0\ud800-\udfff"

JOB = dataclasses.replace(ADAS, name=POISON, account=POISON, suspension=Suspension(1.0, POISON))
WAITS = dataclasses.replace(BOBS, name=POISON, account=POISON)


def harmful(text: str) -> list[str]:
    """What a reader must not get: categories Cc, Cf, Cs, Zl and Zp of Unicode, but not the line feed and the tab."""
    wrong = {each for each in set(text) if unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n", "\t"}
    return [f"U+{ord(each):04X}" for each in sorted(wrong)] + ([FORGED] if f"\n{FORGED}" in text else [])


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command, by its words."""
    below = getattr(command, "commands", None)
    for name in below or ():
        yield from leaves(below[name], (*path, name))
    if not below:
        yield " ".join(path), command


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """All that the command prints, to whichever stream."""
    monkeypatch.setattr(sys, "argv", ["penstock", *words])
    monkeypatch.setenv("COLUMNS", "2000")  # no line is broken by its length
    with contextlib.suppress(SystemExit):
        cli.main()
    got = capsys.readouterr()
    return got.out + got.err


# --- the module


def test_every_character_that_steers_or_deceives_is_shown():
    for character in map(chr, range(sys.maxunicode + 1)):
        # Signs of Arabic, Syriac and Kaithi numbers and of hieroglyphs have a picture, although Unicode counts them as formats.
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and not re.match(
            r"ARABIC (NUMBER|SIGN|FOOT|END|DISP|POUND|PIASTRE)|SYRIAC|KAITHI|EGYPTIAN|LANGUAGE|TAG",
            unicodedata.name(character, ""),
        ):
            assert one_line(f"a{character}b").isprintable(), hex(ord(character))
            assert visible(f"a{character}b") in (one_line(f"a{character}b"), "a\nb", "a\tb")
    assert harmful(visible(WORST)) == [FORGED]
    assert harmful(one_line(WORST)) == []


def test_text_that_harms_nobody_stays_as_it_is():
    for text in ("resnet-50", "数据", "Größe ½ µ", "नमस्ते", "emoji ❤️ 👍🏽", "עברית", "", "\\x1b as letters"):
        assert visible(text) == one_line(text) == text
    assert visible("two\nlines\tand a tab") == "two\nlines\tand a tab"


def test_what_is_shown_is_the_same_json():
    told = json.dumps({"name": WORST}, ensure_ascii=False)
    assert harmful(visible(told)) == []
    assert json.loads(visible(told)) == {"name": WORST}


def test_a_long_text_is_cut_and_says_so():
    assert one_line("x" * 50, 10) == "x" * 10 + "… (40 more characters)"
    assert len(one_line("\x1b" * 10_000_000)) < 100_000


# --- commands


def test_no_command_can_print_what_steers_a_terminal_whatever_it_prints(monkeypatch, capsys):
    """Each command is replaced by one that prints in every way that a new command might."""

    def prints(**arguments: object) -> None:
        table = Table("NAME", POISON)
        table.add_row(POISON, Text(POISON, style="red"))
        for error in (False, True):
            typer.echo(WORST, err=error)
            Console(stderr=error, force_terminal=True, color_system="standard").print(table, POISON, Text(POISON))
            print(WORST, file=sys.stderr if error else sys.stdout)
        sys.stdout.write(WORST)
        sys.stdout.writelines([WORST])
        sys.stderr.write(WORST)

    group = get_command(cli.make_app())
    monkeypatch.setattr(cli, "make_app", lambda: group)
    commands = dict(leaves(group))
    assert len(commands) > 60
    for path, command in commands.items():
        monkeypatch.setattr(command, "callback", prints)
        if path == "submit":  # it reads its own arguments
            monkeypatch.setattr("penstock_slurm.submit.cli.submit", lambda words, environ: prints() or 0)
        for needed in command.params:
            monkeypatch.setattr(needed, "required", False)
        said = run(monkeypatch, capsys, *path.split())
        assert "evil" in said, path
        styles = re.sub(r"\x1b\[[0-9;]*m", "", said)  # rich's own
        assert "\x1b[31m" in said, "styles stay"
        assert said.count("\x1b[31;8m") == 0
        assert [each for each in harmful(styles) if each != FORGED] == [], path


def test_wrong_arguments_are_shown_without_harm(monkeypatch, capsys):
    for words in ([POISON], ["list", POISON], ["list", f"--{POISON}"], ["logs", "1", "--tail", POISON]):
        said = run(monkeypatch, capsys, *words)
        assert "--help" in said or "evil" in said
        assert [each for each in harmful(said) if each != FORGED] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A site in which every text that a user or a cluster can choose is `POISON`."""
    folder = tmp_path_factory.mktemp("hostile")
    with serving(folder) as api:
        (folder / "1.out").write_text(POISON)
        store = api.board.store
        nodes = tuple(dataclasses.replace(each, state=POISON) for each in snapshot("t4:2x4", []).nodes)
        refused = (Refusal("3", POISON, POISON, POISON), Refusal("2", POISON, POISON, POISON))
        state = ClusterState(nodes, (JOB, WAITS), refused=refused)
        api.board.observed(state, time.time(), {"1": {POISON: 5.0}})
        AllocationLog(store, None, list).observed(state, time.time())
        store.save_waits(
            [
                QueueEntry(
                    position=None, job=job, name=POISON, user=POISON, account=POISON, partition=POISON, submit_s=1.0,
                    since_s=1.0, code=code, text=POISON, needs=POISON,
                )
                for code, job in ((POISON, "2"), ("refused", "3"))
            ],
            {},
        )  # fmt: skip
        store.note(POISON, "user", POISON, POISON, allowed=False, text=POISON, address=POISON)
        line = LedgerLine(
            id=0, key="k", time_s=time.time(), account=POISON, user=POISON, job=POISON, kind="gpu-seconds", amount=1.0,
            text=POISON,
        )  # fmt: skip
        store.charge([line])
        with httpx.Client(transport=httpx.HTTPTransport(uds=api.socket.removeprefix("unix:"))) as root:
            order = TokenOrder(user="ada", role="user", note=POISON[:200]).model_dump(mode="json")
            made = root.post("http://penstock/v1/tokens", json=order)
            assert made.status_code in (200, 201), made.text
        yield api


ON_A_SITE = {
    "list": ["list", "list --all", "list --waiting"],
    "show": ["show 1", "show 2", "show 3"],
    "explain": ["explain 1", "explain 2", "explain 3"],
    "history": ["history 1"],
    "logs": ["logs 1"],
    "wait": ["wait 1 --timeout 0.1"],
    "hold": ["hold 2 3"],
    "release": ["release 2 3"],
    "cancel": ["cancel 3"],
    "usage": ["usage", "usage --by account", "usage 1", "usage --ledger"],
    "nodes": ["nodes"],
    "rounds list": ["rounds list"],
    "plan": ["plan"],
    "top": ["top --once"],
    "audit": ["audit"],
    "token list": ["token list"],
    "doctor": ["doctor"],
    "policy list": ["policy list"],
    "drain": ["drain"],
    "leader show": ["leader show"],
    "models list": ["models list"],
}
"""Commands that show what others wrote. The others show the site's settings or the caller's own files."""

POISONED = (
    *("list", "list --waiting", "show 1", "explain 3", "logs 1", "nodes", "usage --ledger", "audit", "token list"),
    "top --once",
)


@pytest.mark.parametrize("words", list(itertools.chain.from_iterable(ON_A_SITE.values())))
def test_on_a_hostile_site_each_command_shows_everything_without_harm(site, words, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_URL", site.socket)
    said = run(monkeypatch, capsys, *words.split())
    assert words not in POISONED or "evil" in said
    wrong = harmful(said)
    assert [each for each in wrong if each != FORGED or words != "logs 1"] == [], repr(said)


@pytest.mark.parametrize(
    "words", ["list", "show 1", "list --waiting", "nodes", "audit", "token list", "logs 1", "top --once"]
)
def test_json_for_programs_is_exact_and_harms_no_terminal(site, words, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_URL", site.socket)
    said = run(monkeypatch, capsys, *words.split(), "--json")
    assert harmful(said) == []
    assert any(POISON[:200] in each for each in texts(json.loads(said)))


# --- logs


@pytest.mark.parametrize("form", ["logfmt", "json"])
def test_a_log_record_is_one_line_without_harm(form, capsys):
    guard()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging(form)
        log = logging.getLogger("penstock_scheduler.hostile")
        log.warning(WORST, extra={"text": WORST, "job": WORST, "none": POISON.replace(" ", "").replace("=", "")})
        try:
            raise ValueError(WORST)
        except ValueError:
            log.exception("failed %s", WORST)
        log.error("long", extra={"text": POISON * 1000})
    finally:
        root.handlers[:], root.level = before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert harmful("\n".join(lines)) == []
    assert all(len(line.encode()) < 48 * 1024 for line in lines)
    if form == "json":
        assert json.loads(lines[0])["text"] == WORST


def test_a_record_of_the_agent_is_one_line_without_harm():
    for text in (WORST, POISON.replace(" ", "").replace("=", "").replace('"', "").replace("\n", "")):
        record = logging.makeLogRecord({"msg": text, "levelname": "INFO", "node": text})
        said = _Logfmt().format(record)
        assert harmful(said) == []
        assert len(said.splitlines()) == 1


def test_a_record_is_shorter_than_what_journald_splits():
    for character in ("\U0001f600", "\x1b", "\U000e0041"):
        assert len(one_line(character * 1_000_000, LOG_LINE).encode()) < 48 * 1024


# --- pages, pictures, answers, mails, metrics


def texts(value: Any) -> Iterator[str]:
    """All strings in a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


@pytest.mark.parametrize(
    "path", ["/cluster", "/queue", "/queue?state=running", "/queue?state=refused", "/jobs/1", "/jobs/2", "/site"]
)
def test_a_page_shows_everything_without_harm(site, path):
    headers = log_in(site, site.tokens["oz"])
    answer = httpx.get(f"{site.url}{path}", headers=headers | {"Accept": "text/html"})
    assert answer.status_code == 200
    assert "evil" in answer.text or path in ("/cluster",)
    found = [each for each in harmful(unescape(answer.text)) if each != FORGED]
    assert found == []
    live = f"{site.url}{path.partition('?')[0]}/live?{path.partition('?')[2]}"
    with httpx.stream("GET", live, headers=headers, timeout=30) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                sent = "".join(texts(json.loads(line[6:])))
                assert [each for each in harmful(unescape(sent)) if each != FORGED] == []
                break


def test_the_map_of_the_past_shows_no_harm(site):
    headers = log_in(site, site.tokens["oz"])
    answer = httpx.get(f"{site.url}/cluster/at?ago=0", headers=headers)
    assert answer.status_code == 200
    assert harmful("".join(texts(answer.json()))) == []


def test_the_text_of_an_error_is_one_line_without_harm(site):
    for path in (f"/v1/jobs/{httpx.URL('/x').copy_with(path='/' + POISON.encode().hex()).path[1:]}", "/v1/jobs/3"):
        answer = httpx.get(site.url + path, headers={"Authorization": f"Bearer {site.tokens['oz']}"})
        assert answer.status_code == 404
        assert harmful(answer.json()["error"]["message"]) == []
    assert "evil" in answer.json()["error"]["message"], "why Penstock refuses the job"
    answer = httpx.post(
        f"{site.url}/v1/jobs",
        headers={"Authorization": f"Bearer {site.tokens['oz']}"},
        json={POISON: POISON, "spec": {POISON: POISON}},
    )
    assert answer.status_code == 422
    assert harmful(answer.json()["error"]["message"]) == []
    answer = httpx.get(
        f"{site.url}/v1/jobs/3", headers={"Authorization": f"Bearer {site.tokens['oz']}", "Accept": "text/html"}
    )
    assert harmful(answer.text.replace(f"\n{FORGED}", "")) == []


def test_a_report_and_its_pictures_show_no_harm():
    from penstock_scheduler.people.drawing.svg import Axis, Dot, Line, chart, legend, page

    drawn = chart(
        POISON,
        POISON,
        [Line("red", [(0, 0), (1, 1)], dots=[Dot((1, 1), POISON, POISON)])],
        Axis(0, 1, [(0, POISON)]),
        Axis(0, 1, [(0, POISON)]),
    )
    said = page(POISON, [legend({POISON: "red"}), drawn])
    assert "evil" in said
    assert [each for each in harmful(unescape(said)) if each != FORGED] == []


def test_a_mail_has_no_added_header_and_no_harm(monkeypatch):
    sent = []

    class Server:
        def __init__(self, *arguments: object, **more: object) -> None: ...
        def __enter__(self) -> Server:
            return self

        def __exit__(self, *arguments: object) -> None: ...
        def send_message(self, message: Any) -> None:
            sent.append(message)

    monkeypatch.setattr("smtplib.SMTP", Server)
    settings = NoticeSettings(smtp="127.0.0.1:25", mail_domain="example.org")
    _mail(settings, ["ada@example.org"], Notice("job-ended", WORST, WORST, "ada"))
    (mail,) = sent
    assert harmful(mail["Subject"]) == []
    assert harmful(mail.get_content()) == []
    assert "evil" in mail.get_content()
    assert len(mail.keys()) == 7


def test_a_metric_label_shows_no_harm():
    from collections import Counter

    from penstock_scheduler.daemon.service.counts import Counts

    said = of_api(Counter({POISON: 1}), Counts(), up=True).decode()
    assert "evil" in said
    assert harmful(said) == []
    from prometheus_client.parser import text_string_to_metric_families

    found = [each for family in text_string_to_metric_families(said) for each in family.samples]
    assert any(one_line(POISON) in each.labels.values() for each in found)


# --- the screen


def test_the_screen_of_top_shows_everything_without_harm(site, monkeypatch):
    import asyncio

    from penstock_scheduler.api.client import Client
    from penstock_scheduler.cli.terminal.app import TopApp
    from penstock_scheduler.cli.terminal.source import Daemon

    async def look() -> str:
        with Client(site.socket) as penstock:
            app = TopApp(Daemon(penstock), interval_s=0.1)
            async with app.run_test(size=(200, 50)) as pilot:
                for _ in range(600):
                    await pilot.pause(0.05)
                    if app.table.row_count:
                        break
                shown = ["".join(part.text for part in line) for line in app.screen._compositor.render_strips()]
                await pilot.press("enter")
                await pilot.pause(1.0)
                shown += ["".join(part.text for part in line) for line in app.screen._compositor.render_strips()]
        return "\n".join(shown)

    said = asyncio.run(look())
    assert "evil" in said
    assert harmful(said) == []


def test_the_libraries_still_look_at_text_where_it_is_made_visible():
    """`guard` changes tables of rich and Textual, which a new version may move."""
    guard()
    assert Text("a\x1bb").plain == "a\\u001bb"
    from textual.content import Content

    from penstock_scheduler.cli.terminal.app import TopApp

    assert TopApp(source=None) is not None  # type: ignore[arg-type]
    assert Content("a\x1bb").plain == "a\\u001bb"
    table: dict[int, str] = {}
    guard_table(table)
    assert harmful(WORST.translate(table)) == [FORGED]


# --- programs


OF_USERS = {"penstock-cloud-runner", "penstock-report", "penstock-emulated-trainer"}
"""They run within a user's own job, as that user, and print what is the user's own."""


def test_each_program_makes_safe_what_it_prints():
    import inspect
    from importlib import import_module
    from importlib.metadata import entry_points

    found = {each.name: each for each in entry_points(group="console_scripts") if each.value.startswith("penstock_")}
    assert found.keys() > OF_USERS
    for name in found.keys() - OF_USERS:
        module, _, function = found[name].value.partition(":")
        text = inspect.getsource(getattr(import_module(module), function)) + (
            inspect.getsource(import_module(module)._tell) if name in ("penstock-resume", "penstock-suspend") else ""
        )
        assert "guard(" in text, f"{name} in {module} must call safe_text.guard() first"


def test_a_file_is_printed_byte_for_byte_but_visible_on_a_terminal(monkeypatch):
    data = b"a\x1b[2J\xff\r\n\x00" + ATTACKS[0].encode()
    shown = {}
    for terminal in (False, True):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr(sys, "stdout", stream)
        guard()
        exact(data)
        shown[terminal] = raw.getvalue()
    assert shown[False] == data
    assert shown[True] == b"a\\u001b[2J\\xff\\r\n\\u0000\\u001b[2J\\u001b[H"


def test_no_product_code_prints_around_the_guard():
    """`sys.__stdout__` and file descriptors 1 and 2 are not guarded."""
    root = Path(__file__).parents[2]
    for package in ("scheduler", "slurm_plugin", "cloud", "loopback"):
        for file in (root / package).rglob("*.py"):
            assert not re.search(r"sys\.__std(out|err)__|os\.write\([12],", file.read_text()), file
