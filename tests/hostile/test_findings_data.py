"""What a review of hostile content has found: each test is an attack that once worked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import MakeLoopback
from penstock_scheduler.api.client import Client
from penstock_scheduler.api.messages import MAX_BODY_BYTES
from penstock_scheduler.model import parse_spec
from penstock_scheduler.people.errors import BadJobSpec
from penstock_slurm.act.submitter import _FIELD, _key
from penstock_slurm.gateway import CliGateway
from penstock_slurm.gateway.hostlist import expand
from penstock_slurm.gateway.parse import parse_gpu_ids
from penstock_slurm.jobs.notes import _notes
from penstock_slurm.jobs.output_files import resolved
from tests.end_to_end.conftest import make_site
from tests.end_to_end.site import UNFORESEEN, Site
from tests.scheduler.service.api import serving

__all__ = ["make_site"]

DEEP = '{"penstock":' + "[" * 1010
"""A comment as long as Slurm 22.05 takes one. Python's reader of JSON gives up with a RecursionError, which is no ValueError."""

UNREADABLE = (DEEP, DEEP + "]" * 1010 + "}", '{"penstock":' + "[" * 100_000, '{"penstock":' + "9" * 5000 + "}")


@pytest.mark.parametrize("text", UNREADABLE, ids=["deep", "closed", "deeper", "digits"])
def test_a_comment_that_no_reader_of_json_can_read_is_no_job_spec(text: str) -> None:
    with pytest.raises(BadJobSpec):
        parse_spec(text)
    try:
        found = json.loads(text)  # Python 3.13 reads the closed one
    except (ValueError, RecursionError):
        found = None
    assert (_notes(text) is None) == (found is None)
    assert _key(text) is None


def test_a_value_that_python_can_read_and_not_show_is_refused() -> None:
    for depth in range(100, 1000, 3):
        with pytest.raises(BadJobSpec):
            parse_spec('{"penstock": {"max_gpus":' + "[" * depth + "]" * depth + "}}")


@pytest.mark.parametrize("value", ["\ud800", "\0", "\x1b[31m", "\u202e", "a\nb"])
@pytest.mark.parametrize(
    "field",
    ["gpu_types", "excluded_gpu_types", "scale_unit", "model_family", "sensitivity", "goodput_table", "trial_group"],
)
def test_a_name_in_a_job_spec_can_be_shown_and_stored(field: str, value: str) -> None:
    of: dict[str, object] = {
        "gpu_types": [value],
        "excluded_gpu_types": ["t4", value],
        "scale_unit": {value: 1},
        "goodput_table": {value: {"1": 1}},
    }
    with pytest.raises(BadJobSpec) as refused:
        parse_spec(json.dumps({"penstock": {field: of.get(field, value)}}))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu_types": [1] * 490},
        {chr(0x100 + at): 0 for at in range(140)},
        {"x" * 1000: 0},
        {"max_gpus": "9" * 1000},
        {"goodput_table": dict.fromkeys(range(100), 0)},
    ],
    ids=["items", "keys", "key", "value", "types"],
)
def test_what_is_wrong_with_a_job_spec_is_told_in_few_words(fields: dict[str, object]) -> None:
    """Slurm keeps the text with the job: a comment of a kilobyte became 46 of them, in each element of an array."""
    with pytest.raises(BadJobSpec) as refused:
        parse_spec(json.dumps({"penstock": fields}))
    assert 20 < len(str(refused.value)) < 2000


ATTACKS = {
    "deep": DEEP,
    "half": json.dumps({"penstock": {"gpu_types": ["\ud800"]}}),
    "half excluded": json.dumps({"penstock": {"excluded_gpu_types": ["\ud800"]}}),
    "half of a unit": json.dumps({"penstock": {"scale_unit": {"\ud800": 1}}}),
}
"""Comments of jobs. A surrogate is half of a character, which cannot be written as UTF-8, into the store for example."""


@pytest.mark.slurm
def test_a_comment_with_json_that_cannot_be_read_or_written_stops_no_round(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """`sbatch --comment='{"penstock":[[[[...'` of anybody. Bystander: a job that runs, and one that starts afterwards."""
    site = make_site(make_loopback("t4:1x4"))
    site.start()
    ours = site.submit(3600)
    site.wait_states("RUNNING", ours)
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        for comment in ATTACKS.values():
            site.sbatch("--hold", "--requeue", "--gres=gpu:1", f"--comment={comment}", "--wrap=true")
            number = penstock.cluster().round or 0
            rounds = lambda number=number: (penstock.cluster().round or 0) > number + 2  # noqa: E731
            wait_for(rounds, 60, "rounds to go on", details=site.tail)
            assert penstock.ready().status == "ok", site.tail()
    site.wait_states("RUNNING", site.submit(3600))
    assert site.job(ours).restarts == 0


# --- the arguments of a job's script are part of `scontrol show job`, up to 120,000 characters

BEFORE, AFTER = "JobId=1 JobName=x UserId=root(0) Command=/a", " WorkDir=/root StdOut=/y"


@pytest.mark.parametrize(
    "arguments", [" StdOut=" + " " * 120_000 + "x", " StdOut=" * 13_000, " StdOut=" + " A" * 60_000]
)
def test_no_argument_keeps_a_reader_of_jobs_busy(arguments: str) -> None:
    began_s = time.process_time()
    assert dict(_FIELD.findall(BEFORE + arguments + AFTER))["StdOut"] == "/y"
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize(
    "arguments",
    [
        "".join(f" Nodes=a{at}-[0-99999] CPU_IDs= Mem= GRES=" for at in range(2800)),
        " Nodes=a CPU_IDs= Mem= GRES=" + "gpu:1(IDX:0-99999)," * 6000,
        " Nodes=[" + "0" * 110_000 + "-99999] CPU_IDs= Mem= GRES=",
        " Nodes=" + "a" * 110_000 + "[0-99999] CPU_IDs= Mem= GRES=",
    ],
    ids=["nodes", "GPUs", "digits", "letters"],
)
def test_no_argument_makes_a_reader_of_gpus_fill_the_memory(arguments: str) -> None:
    began_s = time.process_time()
    with pytest.raises(ValueError, match=r"not a host list|more than"):
        parse_gpu_ids(BEFORE + arguments + AFTER)
    assert time.process_time() - began_s < 5


def test_a_long_name_without_ranges_and_a_long_list_are_read_as_before() -> None:
    assert expand("a" * 300) == ("a" * 300,)
    assert len(expand("node[" + ",".join(str(at) for at in range(0, 4000, 2)) + "]")) == 2000


ARGUMENTS = ("ArrayTaskId=²", "ExitCode=²:0", "ExitCode=" + "9" * 5000 + ":0", "ExitCode=99999999999999999999:0")
"""Python takes a superscript 2 for a digit, and no number of it. A database takes no number of 20 digits."""


@pytest.mark.parametrize("text", ["²", "٣", "9" * 5000])
def test_a_path_of_output_takes_any_text_for_numbers(text: str) -> None:
    told = {"ArrayTaskId": text, "JobId": text, "ArrayJobId": text, "JobName": text}
    assert resolved("/a/%3b.%x", told).startswith("/a/") == (len(text) < 4000)
    assert resolved(f"/a/%{'9' * 5000}j", {"JobId": "1"}) == "/a/0000000001"
    assert resolved("/a/" + "%x" * 2000, {"JobName": "x" * 100_000}) == ""


@pytest.mark.slurm
def test_no_argument_of_a_script_passes_for_a_number_of_slurms(
    make_loopback: MakeLoopback, make_site: Callable[..., Site]
) -> None:
    """Bystander: a job that is submitted after jobs with such arguments have run and ended."""
    site = make_site(make_loopback("t4:1x4"))
    site.start()
    script = site.folder / "script"
    script.write_text("#!/bin/sh\nsleep 3; exit 7\n")
    spec = '--comment={"penstock": {"max_gpus": 1}}'
    jobs = [
        site.sbatch("--hold", "--requeue", "--gres=gpu:1", "--output=%x.out", spec, str(script), argument)
        for argument in ARGUMENTS
    ]
    with Client(f"unix:{site.state / 'api.sock'}") as penstock:
        ended = lambda: {job.id for job in penstock.jobs() if job.state == "ended"} >= set(jobs)  # noqa: E731
        wait_for(ended, 90, "the jobs to end", details=site.tail)
        number = penstock.cluster().round or 0
        wait_for(lambda: (penstock.cluster().round or 0) > number + 2, 60, "rounds to go on", details=site.tail)
        assert penstock.ready().status == "ok", site.tail()
    site.wait_states("RUNNING", site.submit(3600))
    assert UNFORESEEN not in site.log.read_text(), site.tail()


# --- bodies of requests


@pytest.mark.parametrize(
    "body",
    [
        {"command": ["x"], "spec": {"gpu_types": [1] * 650_000}},
        {"command": ["x"], "spec": {"goodput_table": {"t4": dict.fromkeys(range(150_000), -1)}}},
        dict.fromkeys(range(170_000), 0),
    ],
    ids=["items", "table", "keys"],
)
def test_a_body_of_very_many_wrong_values_holds_up_nobody(tmp_path: Path, body: dict[str, object]) -> None:
    """Each took all callers' time for seconds, and a user may send a hundred of them in one second."""
    with serving(tmp_path) as api:
        headers = {"Authorization": f"Bearer {api.tokens['ada']}", "Content-Type": "application/json"}
        sent = json.dumps(body, separators=(",", ":"))
        assert len(sent) < MAX_BODY_BYTES
        answer = httpx.post(f"{api.url}/v1/jobs", content=sent, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too-large")
        script = "#!/bin/sh\n" + 'echo 1,2,"3,",\\ ' * 60_000
        made = httpx.post(f"{api.url}/v1/jobs", json={"script": script}, headers=headers, timeout=60)
        assert made.json()["error"]["code"] == "not-allowed", "the body was read; this host has no user ada"


# --- what squeue prints


@pytest.mark.slurm
def test_a_long_dependency_of_an_array_does_not_fill_the_answer_of_squeue(make_loopback: MakeLoopback) -> None:
    """Slurm keeps it once and squeue prints it with each element: a few arrays filled penstockd's memory in each tick."""
    slurm = make_loopback("t4:1x4")

    def sbatch(*words: str) -> str:
        return slurm.command("sbatch", "--parsable", "--hold", *words, "--wrap=true").stdout.strip()

    before = sbatch("--array=1-900")
    one = sbatch(f"--dependency=afterany:{before}_1")
    many = sbatch("--array=1-100", "--dependency=afterany:" + ":".join(f"{before}_{at}" for at in range(1, 900)))
    gateway = CliGateway(conf=slurm.slurm_conf, timeout_s=60)
    jobs = {job.id: job for job in gateway.jobs()}
    assert len(jobs) == 1001
    assert not any(job.unknown for job in jobs.values())
    assert jobs[one].dependency == f"afterany:{before}_1(unfulfilled)"
    assert jobs[f"{before}_1"].dependency == ""
    elements = [jobs[f"{many}_{at}"] for at in range(1, 101)]
    assert all(f"afterany:{before}_1(unfulfilled)" in job.dependency for job in elements)
    assert all(len(job.dependency) < 300 for job in elements)
