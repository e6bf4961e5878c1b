"""The rank of a process, from the variables that a real srun (22.05) and torchrun set."""

import pytest

from penstock_executor.environment import EnvironmentDisagrees, Ranks, read_ranks, share

STEP = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "t4-[00-01]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_SRUN_COMM_PORT": "35835",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}


def test_alone_without_slurm_in_a_batch_script_and_in_a_step_of_one():
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    for environ in ({}, batch, STEP | {"SLURM_STEP_NUM_TASKS": "1"}):
        assert read_ranks(environ) == Ranks()


def test_a_step():
    found = read_ranks(STEP)
    assert (found.rank, found.world, found.local_rank, found.local_world) == (3, 4, 1, 2)
    assert (found.nodes, found.first_node, found.master) == (2, "t4-00", None)
    assert 10_000 <= found.port < 30_000
    others = [STEP | {name: "7"} for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_SRUN_COMM_PORT")]
    assert len({found.port, *(read_ranks(other).port for other in others)}) == 4
    assert read_ranks(STEP | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}).port == found.port
    uneven = read_ranks(STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,3"})
    assert uneven.local_world == 3
    named = read_ranks(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (named.master, named.port) == ("10.0.0.1", 1234)


def test_torchrun_goes_before_the_step_it_runs_in():
    found = read_ranks(TORCHRUN)
    assert found == Ranks(1, 4, 1, 2, 2, None, "node-a", 29500)
    agents = STEP | {"SLURM_STEP_NUM_TASKS": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert read_ranks(agents | TORCHRUN) == found


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE is not"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (STEP | TORCHRUN, "Slurm's task is 3 of 4"),
        (STEP | {"SLURM_PROCID": "4"}, "rank 4 of 4"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "2 tasks on 1 nodes"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "2\\(x3\\),1"),
        (STEP | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        (STEP | {"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], words: str):
    with pytest.raises(EnvironmentDisagrees, match=words):
        read_ranks(environ)


def test_a_share_of_a_batch(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert share(64) == 64
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert share(64) == 16
    with pytest.raises(ValueError, match="a batch of 66 cannot be divided evenly among 4 processes"):
        share(66)
