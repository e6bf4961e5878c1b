from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_executor import Environment, EnvironmentDisagrees, read_environment
from penstock_executor.environment import expand_hostlist

BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "t4-[00-01]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "t4-00",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_GPUS": "0,3",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


def test_reads_what_slurm_sets_in_a_batch_script():
    environ = BATCH | {"SLURM_RESTART_COUNT": "3", "PENSTOCK_SPOOL": "/shared/spool"}
    assert read_environment(environ | {"PENSTOCK_RUN_DIR": "/run/of/%n"}) == Environment(
        "12",
        ("t4-00", "t4-01"),
        "t4-00",
        2,
        (0, 3),
        restarts=3,
        spool=Path("/shared/spool"),
        run_dir=Path("/run/of/t4-00"),
        visible_devices="0,1",
    )


def test_a_laptop_has_no_job():
    assert read_environment({}) == Environment()
    assert read_environment({"PENSTOCK_SPOOL": "/s", "CUDA_VISIBLE_DEVICES": "0"}) == Environment(spool=Path("/s"))


@pytest.mark.parametrize("job", [{}, BATCH])
def test_under_penstock_profile(job: dict[str, str]):
    assert read_environment(job).profile is None
    assert read_environment(job | {"PENSTOCK_PROFILE": "/tmp/request.json"}).profile == Path("/tmp/request.json")


def test_under_penstock_sensitivity():
    measured = read_environment({"SLURM_JOB_ID": "1", "PENSTOCK_MEASURING": "/tmp/m"})
    assert measured.measuring == Path("/tmp/m")
    assert (measured.report_every_s(30), measured.report_every_s(0.5)) == (2, 0.5)
    assert read_environment(BATCH).report_every_s(30) == 30


def test_a_job_without_gpus():
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}
    expected = Environment("1", ("a",), run_dir=Path("/run/penstock"), visible_devices="NoDevFiles")
    assert read_environment(environ) == expected


def test_in_a_step_the_steps_gpus_count():
    """The batch script's SLURM_JOB_GPUS and SLURM_GPUS_ON_NODE are inherited by steps on other nodes."""
    environ = BATCH | {"SLURMD_NODENAME": "t4-01", "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert read_environment(environ).gpu_ids == (1,)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"SLURMD_NODENAME": "rtx-00"}, "SLURMD_NODENAME=rtx-00 is not in SLURM_JOB_NODELIST"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "SLURM_JOB_NUM_NODES=3, but"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "SLURM_GPUS_ON_NODE=4, but SLURM_JOB_GPUS=0,3 names 2"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, "shows 3 GPUs, but Slurm allocated 2"),
        ({"SLURM_JOB_GPUS": "all"}, "SLURM_JOB_GPUS=all is not a list"),
        ({"SLURM_RESTART_COUNT": "twice"}, "SLURM_RESTART_COUNT=twice is not a number"),
        ({"SLURM_JOB_NODELIST": "t4-[00"}, r"SLURM_JOB_NODELIST: 't4-\[00' is not a host list"),
    ],
)
def test_variables_that_disagree_are_named(changed: dict[str, str], says: str):
    with pytest.raises(EnvironmentDisagrees, match=says):
        read_environment(BATCH | changed)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a,b-1", ("a", "b-1")),
        ("t4-[00-02,05],x", ("t4-00", "t4-01", "t4-02", "t4-05", "x")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("r[1-2]n[01,03].site", ("r1n01.site", "r1n03.site", "r2n01.site", "r2n03.site")),
    ],
)
def test_expands_host_lists(text: str, names: tuple[str, ...]):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["a[", "a]", "a[1-]", "a[x]", "a,,b", "a[1[2]]", "a b", "n[0-99999999]", "a,"])
def test_refuses_what_is_no_host_list(text: str):
    with pytest.raises(ValueError, match="is not a host list"):
        expand_hostlist(text)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20), st.integers(1, 4))
def test_host_list_round_trip(numbers: list[int], width: int):
    words = [str(n).zfill(width) for n in numbers]
    assert expand_hostlist(f"n[{','.join(words)}]") == tuple(f"n{word}" for word in words)
