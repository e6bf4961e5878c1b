"""The back end `pyslurm` with a stand-in for pyslurm: the choice of version, and its known mistakes."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from penstock_slurm.gateway import BackendMissing, ControllerAway, JobGone, UnreadableAnswer, open_gateway
from penstock_slurm.gateway import pyslurm as backend
from penstock_slurm.gateway.cli import COMMANDS

JOB = {
    "id": 7,
    "array_id": None,
    "array_task_id": None,
    "array_tasks_waiting": None,
    "heterogeneous_id": None,
    "state": "PENDING",
    "state_reason": "JobHeldUser",
    "name": "wrap",
    "user_id": 0,
    "account": None,
    "partition": "t4,all",
    "allocated_nodes": None,
    "required_nodes": "t4-[00-01]",
    "num_nodes": 2,
    "gres_per_node": {"gpu": 3, "nic": 1},
    "cpus": 6,
    "cpus_per_task": None,
    "ntasks": 2,
    "comment": None,
    "admin_comment": "{}",
    "submit_time": 100,
    "eligible_time": None,
    "start_time": 120,
    "end_time": None,
    "time_limit": 5,
    "requeue_count": 1,
    "is_requeueable": True,
    "priority": 0,
    "qos": None,
}


class RPCError(Exception):
    pass


@pytest.fixture
def pyslurm(tmp_path, monkeypatch):
    """A stand-in for the package pyslurm 22.5.3 on a machine with Slurm 22.05; `jobs` is what it will list."""
    for command in COMMANDS:
        (tmp_path / command).write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_BITSTR_LEN", "64")  # so that it is put back afterwards
    monkeypatch.setenv("SLURM_CONF", "/one/slurm.conf")
    monkeypatch.setattr(backend, "_LOADED", {})
    module = ModuleType("pyslurm")
    module.__version__ = "22.5.3"
    module.RPCError = RPCError
    module.jobs = []
    module.Jobs = SimpleNamespace(load=lambda: dict(enumerate(module.jobs)))
    monkeypatch.setitem(sys.modules, "pyslurm", module)
    return module


def gateway(conf=None):
    return open_gateway("pyslurm", conf=conf, timeout_s=30.0)


def test_without_pyslurm_the_remedy_is_told(pyslurm, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    with pytest.raises(BackendMissing, match=r"cannot be imported.*slurm\.backend to 'cli'"):
        gateway()


@pytest.mark.parametrize("version", ["25.11.2", "22.6.0", "unknown"])
def test_a_pyslurm_of_another_release_is_told(pyslurm, version):
    pyslurm.__version__ = version
    with pytest.raises(BackendMissing, match=r"docs/slurm-gateway\.md"):
        gateway()


def test_a_process_has_one_slurm_conf(pyslurm, tmp_path):
    gateway()
    with pytest.raises(BackendMissing, match=r"uses pyslurm with /one/slurm\.conf already"):
        gateway(tmp_path / "slurm.conf")
    assert os.environ["SLURM_CONF"] == "/one/slurm.conf"


def test_reads_a_job(pyslurm):
    pyslurm.jobs = [SimpleNamespace(**JOB)]
    (job,) = gateway().jobs()
    assert (job.id, job.held, job.partition, job.required_nodes) == ("7", True, ("t4", "all"), ("t4-00", "t4-01"))
    assert (job.gpus_per_node, job.gpu_type, job.cpus_per_task, job.tasks) == (3, None, 1, 2)
    assert (job.submit_s, job.start_s, job.time_limit_s, job.restarts) == (100.0, None, 300.0, 1)


def test_an_array_becomes_its_elements_element_0_too(pyslurm):
    array = {**JOB, "array_id": 7}
    pyslurm.jobs = [
        SimpleNamespace(**{**array, "array_tasks_waiting": "2-3,9"}),
        SimpleNamespace(**{**array, "id": 8, "array_task_id": 1}),
        SimpleNamespace(**{**array, "id": 9}),
    ]
    assert [(job.id, job.number) for job in gateway().jobs()] == [
        ("7_2", 7),
        ("7_3", 7),
        ("7_9", 7),
        ("7_1", 8),
        ("7_0", 9),
    ]


def test_ended_jobs_only_when_asked_for(pyslurm):
    pyslurm.jobs = [SimpleNamespace(**{**JOB, "state": "COMPLETED"})]
    assert gateway().jobs() == ()
    assert [job.state for job in gateway().jobs(finished=True)] == ["COMPLETED"]


def test_a_job_that_pyslurm_cannot_read_is_left_to_squeue(pyslurm, monkeypatch):
    class Unreadable(SimpleNamespace):
        @property
        def gres_per_node(self):
            raise IndexError("list index out of range")  # 22.5.3 on --gres=gpu

    pyslurm.jobs = [Unreadable(**{key: value for key, value in JOB.items() if key != "gres_per_node"})]
    monkeypatch.setattr(backend.CliGateway, "jobs", lambda self, finished: ("squeue's", finished))
    assert gateway().jobs(finished=True) == ("squeue's", True)


@pytest.mark.parametrize(
    ("words", "kind"),
    [("Invalid job id specified", JobGone), ("Unable to contact slurm controller (connect failure)", ControllerAway)],
)
def test_errors_go_through_the_same_table(pyslurm, words, kind):
    class Job:
        def __init__(self, number):
            pass

        def hold(self):
            raise RPCError(words)

    pyslurm.Job = Job
    with pytest.raises(kind) as caught:
        gateway().hold("7")
    assert caught.value.job_id == "7"


@pytest.mark.parametrize(
    ("text", "numbers"), [("5", [5]), ("1-3,7", [1, 2, 3, 7]), ("0-6:3%2", [0, 3, 6]), ("0,4-5", [0, 4, 5])]
)
def test_reads_array_elements(text, numbers):
    assert list(backend.elements(text)) == numbers


def test_says_when_array_elements_are_cut():
    with pytest.raises(UnreadableAnswer):
        list(backend.elements("1,3,5,..."))
