"""The commands that ask penstockd, against a real service over its socket; and while it is away."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock_profiles.sensitivity import Sensitivity, SensitivityProfile
from penstock_profiles.wire import Observation, Report
from penstock_scheduler import client as client_module
from penstock_scheduler.cli import main, make_app
from penstock_scheduler.cli.summary import summary
from penstock_scheduler.model import Phase
from penstock_scheduler.policies import make_policy
from penstock_scheduler.ports import Fate
from penstock_scheduler.records import RoundRecord
from penstock_scheduler.sharing.messages import NodeStatus, status_file
from tests.scheduler.builders import job, on, snapshot, with_facts
from tests.scheduler.service.api import BOBS, serving


@pytest.fixture
def api(tmp_path):
    with serving(tmp_path) as api:
        yield api


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    """A service that nobody changes."""
    with serving(tmp_path_factory.mktemp("api")) as api:
        yield api


def penstock(api, *words: str, who: str | None = None):
    """The command's result, as root over the socket or as somebody with a token."""
    place = {"PENSTOCK_URL": api.url, "PENSTOCK_TOKEN": api.tokens[who]} if who else {"PENSTOCK_URL": api.socket}
    return CliRunner().invoke(make_app(), list(words), env={"COLUMNS": "120"} | place)


def test_who_asks_does_not_wait_for_what_decides_to_load():
    """`penstock list` took 2.6 s of processor time to load with SciPy and SQLAlchemy, and takes 1.1 without."""
    code = "import sys, penstock_slurm.submit.cli\n"
    code += "from penstock_scheduler.cli import admin, cluster, doctor, jobs\n"
    code += "from penstock_scheduler.settings import parse_settings; parse_settings('', 'here')\n"
    code += "print(*sorted({'scipy', 'sqlalchemy', 'alembic', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("list", ["1 ", "ada", "running", "2 t4", "bob"]),
        ("list --user bob", ["bob", "queued"]),
        ("show 1", ["ada", "running", "2 t4", "t4-00 (2)"]),
        ("explain 1", ["Job 1 runs", "goodput"]),
        ("efficiency 1", ["GPU-hours", "relative", "restarts"]),
        ("cost", ["GPU"]),
        ("queue", ["t4: 6 of 8 GPUs are free", "bob"]),
        ("nodes", ["t4-00", "t4-01", "FREE"]),
        ("rounds", ["sia", "decide 0.100 s"]),
        ("plan", ["Round 1,", "policy sia", "REASON"]),
        ("plan --dry-run", ["The job would get", " on t4-0"]),
        ("policy list", ["* ", "fifo", "fairness_p"]),
        ("token list", ["boss", "admin"]),
        ("budget", ["ledger is empty"]),
    ],
)
def test_answers_for_people_and_as_json(looked_at, words, says):
    told = penstock(looked_at, *words.split())
    assert told.exit_code == 0, told.output
    for text in says:
        assert text in told.output
    assert json.loads(penstock(looked_at, *words.split(), "--json").stdout) is not None


def test_a_user_sees_own_jobs_alone(api):
    assert "bob" not in penstock(api, "list", who="ada").output
    assert penstock(api, "show", "2", who="ada").exit_code != 0
    refused = penstock(api, "pause", who="ada")
    assert refused.exit_code != 0
    assert not api.changes["paused"]


def test_an_admin_pauses_resumes_and_sets_the_policy(api):
    assert "Paused" in penstock(api, "pause").output
    assert api.changes["paused"]
    assert "Rounds are paused" in penstock(api, "queue").output
    penstock(api, "resume")
    assert not api.changes["paused"]
    assert penstock(api, "policy", "set", "sia", "fairness_p=-1.0").exit_code == 0
    assert api.changes["policy"][1]["fairness_p"] == -1.0
    assert penstock(api, "policy", "set", "sia", "fairness_p").exception is not None
    both = penstock(api, "policy", "set", "sia debug=fifo", "sia.fairness_p=-0.5", "sia.gap=0.02")
    assert both.exit_code == 0
    assert api.changes["policy"][1]["sia"].items() >= {"fairness_p": -0.5, "gap": 0.02}.items()
    assert "give each key once" in str(penstock(api, "policy", "set", "sia", "gap=0.1", "gap=0.2").exception)
    assert "names no policy" in str(penstock(api, "policy", "set", "").exception)


def test_an_operator_drains_and_ends_it(api):
    assert "Nothing is drained" in penstock(api, "drain").output
    assert penstock(api, "drain", "node", "t4-01", who="ada").exit_code != 0
    told = penstock(api, "drain", "node", "t4-01", "--why", "a fan", who="oz")
    assert "The node t4-01 is drained for adaptive jobs" in told.output
    assert "a fan" in penstock(api, "drain").output
    assert "drained by oz" in " ".join(penstock(api, "nodes").output.split())
    assert "4 are out of service" in penstock(api, "queue").output
    for words in ("node nosuch", "rack 7", "node"):
        assert penstock(api, "drain", *words.split()).exit_code != 0
    penstock(api, "drain", "node", "t4-01", "--end")
    assert json.loads(penstock(api, "drain", "--json").stdout) == []
    lines = [(line.user, line.action, line.allowed) for line in api.board.store.audit() if "drains" in line.action]
    assert lines[1:] == [("oz", "POST /v1/drains", True), ("ada", "POST /v1/drains", False)]
    assert lines[0][1] == "DELETE /v1/drains/{kind}/{name}"


def test_a_token_is_made_used_and_revoked(api):
    made = json.loads(penstock(api, "token", "create", "--user", "ada", "--json").stdout)
    api.tokens["new"] = made["token"]
    assert penstock(api, "list", who="new").exit_code == 0
    penstock(api, "token", "revoke", made["view"]["id"])
    assert penstock(api, "list", who="new").exit_code != 0


@pytest.mark.parametrize(("state", "status"), [("COMPLETED", 0), ("FAILED", 4)])
def test_wait_tells_how_it_ended_by_its_exit_status(api, state, status):
    api.look(BOBS, finished={"1": Fate(state, 0, None)})
    told = penstock(api, "wait", "1")
    assert (told.exit_code, told.output.split()[-1]) == (status, state)
    assert penstock(api, "wait", "2", "--timeout", "0").exit_code == 5


def test_logs_follow_to_the_end(api, tmp_path):
    (tmp_path / "1.out").write_text("a line\nanother\n")
    assert penstock(api, "logs", "1").output == "a line\nanother\n"
    assert penstock(api, "logs", "1", "--tail", "8").output == "another\n"
    assert penstock(api, "logs", "1", "--tail", "0").output == ""
    api.look(BOBS, finished={"1": Fate("COMPLETED", 0, None)})
    assert penstock(api, "logs", "-f", "1").output == "a line\nanother\n"


def test_cancel_tries_all_and_says_what_was_refused(api):
    told = penstock(api, "cancel", "9", "1")
    assert told.exit_code == 1
    assert api.submitter.cancelled == ["1"]
    assert "no job 9" in told.stderr


def test_cost_is_used_gpu_hours_times_their_price(api):
    used = job("1", user="ada", max_gpus=4, phase=Phase.RUNNING, allocation=on("t4", t4_00=2))
    record = api.board.record
    attained = {"1": {"t4": 7200.0}}
    api.board.record = dataclasses.replace(record, snapshot=with_facts(record.snapshot, attained_gpu_s=attained))
    api.look(dataclasses.replace(used, restarts=1), BOBS)
    assert "2.00" in penstock(api, "cost").output
    assert "1.00" in penstock(api, "cost", "--prices", "t4=0.5").output
    assert penstock(api, "cost", "--prices", "a100=1").exception is not None
    api.look(BOBS, finished={used.id: Fate("COMPLETED", 0, None)})
    line = json.loads(penstock(api, "cost", "--prices", "t4=0.5", "--json").stdout)
    assert line == [{"user": "ada", "gpu_type": "t4", "gpu_hours": 2.0, "cost": 1.0}]
    assert "2.00 GPU-hours of t4" in penstock(api, "budget").output


def test_efficiency_shows_what_was_measured(api):
    """8 samples on each of 2 GPUs, twice accumulated, in half a second: 3 x 16 / 0.5 samples/s."""
    body = Observation(
        gpu_type="t4", nodes=1, gpus=2, atomic_batch=8, accumulation_steps=2, steps=5, step_time_s=0.5, progress=10.0
    )
    api.board.store.add_reports([Report(job_id="1", epoch=1, sequence=0, time_s=1.0, body=body)])
    figures = json.loads(penstock(api, "efficiency", "1", "--json").stdout)
    assert figures["measured_throughput"] == pytest.approx(96.0)
    # It holds 2 GPUs and the round gives it 4: the figures are of the 2, and this model is linear.
    assert figures["share_of_best"] == pytest.approx(0.5)
    assert figures["scaling"] == pytest.approx(1.0)


def test_doctor_says_what_is_missing(api, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    told = penstock(api, "doctor", "--json")
    found = {line["check"]: line["ok"] for line in json.loads(told.stdout)}
    assert (told.exit_code, found["sbatch"], found["penstockd"]) == (1, False, True)


def test_doctor_says_whose_agents_do_not_answer(api, monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_SPOOL", str(tmp_path))
    for node, late_s in (("n0", 0), ("n1", 60)):
        status_file(tmp_path, node).parent.mkdir(parents=True)
        status = NodeStatus(node=node, order=0, time_s=time.time() - late_s, history="h")
        status_file(tmp_path, node).write_text(status.model_dump_json())
    found = {line["check"]: line for line in json.loads(penstock(api, "doctor", "--json").stdout)}
    assert not found["agents"]["ok"]
    assert "from n1;" in found["agents"]["text"]


@pytest.fixture
def away(tmp_path, monkeypatch):
    """What a daemon that has gone leaves: its store."""
    monkeypatch.setattr(client_module, "RETRY_PAUSES_S", ())
    with serving(tmp_path) as api:
        pass
    monkeypatch.setenv("PENSTOCK_URL", api.socket)
    return str(tmp_path / "state")


def status(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    try:
        code = main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_the_daemon_the_store_answers_and_this_is_said(away, monkeypatch, capsys):
    for words, says in {"list": "ada", "show 1": "ada", "explain 2": "Job 2", "rounds": "sia"}.items():
        code, out, err = status(monkeypatch, capsys, *words.split(), "--store", away)
        assert code == 0
        assert says in out
        assert "does not answer" in err
        assert "read from its store" in err


def test_without_daemon_and_store_it_says_what_still_works(away, monkeypatch, capsys):
    for words in (["list", "--store", away + "-not"], ["queue"]):
        code, out, err = status(monkeypatch, capsys, *words)
        assert (code, out) == (3, "")
        assert "does not answer" in err
    assert "squeue" in status(monkeypatch, capsys, "list", "--store", away + "-not")[2]


def test_manual_pages_are_written_for_every_command(tmp_path):
    told = CliRunner().invoke(make_app(), ["man", "--out", str(tmp_path)])
    assert told.exit_code == 0, told.output
    page = (tmp_path / "penstock-wait.1").read_text()
    assert page.startswith(".TH PENSTOCK-WAIT 1")
    assert "\\-\\-timeout" in page
    assert (tmp_path / "penstock-token-create.1").exists()
    assert "explain" in (tmp_path / "penstock.1").read_text()
    assert "\\-\\-preset NAME" in (tmp_path / "penstock-submit.1").read_text(), "it reads its options itself"


def test_no_help_has_brackets_that_the_terminal_would_take_for_markup():
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


def test_a_job_that_outgrew_its_memory_is_told_the_remedy_wherever_its_user_looks(api):
    told = "ended because it outgrew the 100 MB on a node; measure it again"
    api.look(BOBS, finished={"1": Fate("OUT_OF_MEMORY", 137, None, told)})
    for command in ("show", "explain", "wait"):
        assert told in penstock(api, command, "1").output
    assert json.loads(penstock(api, "show", "1", "--json").stdout)["ended_text"] == told
    with httpx.Client(base_url=api.url, headers={"Authorization": f"Bearer {api.tokens['ada']}"}) as http:
        assert told in http.get("/v1/jobs/1/page").text


def test_efficiency_shows_the_share_of_a_job_and_what_others_are_worth_to_it(api):
    """4 GPUs of a node of 8 CPUs: a part of 1 CPU a GPU."""
    table = Sensitivity(4, (1, 2), (1000,), ((1.0,), (1.5,)))
    shot = with_facts(
        snapshot("t4:2x4:8c", [job("1", max_gpus=4)]), sensitivity={"1": SensitivityProfile("image", (table,))}
    )
    policy, settings = make_policy("fifo+synergy-tune")
    api.board.record = RoundRecord(shot, policy.name, settings, policy.decide(shot))
    told = penstock(api, "efficiency", "1").output
    assert (
        "share       8 CPUs on each node; proportional to its GPUs would be 8 CPUs; 1.00 times as fast as with that"
        in told
    )
    assert "sensitivity 0.67 with 4 CPUs, 1.00 with 8 CPUs, by the profile image" in told
    assert json.loads(penstock(api, "efficiency", "1", "--json").stdout)["share"]["profile"] == "image"


def test_a_list_of_the_commands_imports_none_of_them_and_says_what_they_say():
    """For the help and for the shell's completion; also of the commands that other packages bring."""
    code = """
import sys
from penstock_scheduler.cli import main
try:
    main()
except SystemExit:
    pass
here = [name for name in sys.modules if name.startswith("penstock_")]
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
