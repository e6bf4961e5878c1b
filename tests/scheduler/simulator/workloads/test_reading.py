"""Every format by a few rows of our own, every way that a file can be wrong, and the public traces where they are."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from penstock_scheduler.model import Adaptivity
from penstock_scheduler.simulator.workloads import BadInput, read_workload, table

OWN = "id,submit_s,gpus,duration_s\n"
SACCT = "JobIDRaw|User|Account|State|Submit|ElapsedRaw|TimelimitRaw|ReqTRES|AllocTRES|JobName\n"


def read(folder: Path, text: str, name: str = "trace.csv", **options: object):  # type: ignore[no-untyped-def]
    (folder / name).write_text(text)
    return read_workload(folder / name, **options)  # type: ignore[arg-type]


def test_our_own_csv_needs_four_columns(tmp_path):
    workload = read(tmp_path, OWN + "b,10,2,60\na,0.5,1,30\n")
    assert [(job.id, job.submit_s, job.gpus, job.duration_s, job.user) for job in workload.jobs] == [
        ("a", 0.5, 1, 30.0, "user"),
        ("b", 10.0, 2, 60.0, "user"),
    ]
    assert workload.jobs[1].spec == workload.jobs[1].as_requested
    assert workload.jobs[1].spec.adaptivity is Adaptivity.RIGID
    assert workload.jobs[1].gpu_seconds == 120
    assert (workload.name, workload.span_s) == ("trace", 9.5)


def test_a_spec_stands_in_a_column_as_json(tmp_path):
    text = 'id,submit_s,gpus,model,batch_size,spec\na,0,4,bert-squad,96,"{""max_gpus"": 16, ""gpu_types"": [""t4""]}"\n'
    (job,) = read(tmp_path, text).jobs
    assert (job.spec.max_gpus, job.spec.gpu_types, job.spec.adaptivity) == (16, ("t4",), Adaptivity.ADAPTIVE)
    assert (job.as_requested.min_gpus, job.as_requested.max_gpus, job.as_requested.batch_size) == (4, 4, 96)


def test_sia_windows_are_adaptive_trainings(tmp_path):
    text = "name,time,application,num_replicas,batch_size\ncifar10-0,107,cifar10,6,2048\nnew-1,108.5,new,1,8\n"
    known, new = read(tmp_path, text).jobs
    assert (known.model, known.gpus, known.batch_size, known.duration_s) == ("cifar10", 6, 2048, None)
    assert (known.spec.max_gpus, known.spec.batch_size, known.spec.max_batch_size) == (64, 128, 4096)
    assert known.spec.model_family is None  # the scheduler is not told its speed
    assert (new.model, new.spec.batch_size) == ("new", None)


def test_dates_of_philly_count_from_the_first_submission(tmp_path):
    text = "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-02 00:00:30,66.0,2,132.0,vc1\n2017-10-01 23:59:00,5,1,5,vc2\n"
    first, second = read(tmp_path, text).jobs
    assert (first.id, first.submit_s, first.account) == ("philly-2", 0.0, "vc2")
    assert (second.submit_s, second.gpus, second.duration_s) == (90.0, 2, 66.0)


def test_tiresias(tmp_path):
    text = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n7,8,30,133,vgg11,147,23\n"
    (job,) = read(tmp_path, text).jobs
    assert (job.id, job.name, job.gpus, job.submit_s, job.duration_s, job.model) == ("7", "vgg11", 8, 30, 147, None)


def test_starburst_is_in_hours(tmp_path):
    (job,) = read(tmp_path, "job_id,arrival_h,runtime_h,gpus,cost_gpu_h\n0,0.5,0.25,4,1\n").jobs
    assert (job.submit_s, job.duration_s, job.gpus) == (1800, 900, 4)


def test_synergy_times_iterations_by_the_profiles_beside_it(tmp_path):
    """23,349 iterations of 0.6 s are 14,009.4 s."""
    profiles = {"cpu_per_gpu_3": {"alexnet_1": {"model": "alexnet", "iter_time_s": 0.6}}}
    (tmp_path / "sensitivity_profiles.json").write_text(json.dumps(profiles))
    (job,) = read(tmp_path, "0,alexnet,8,23349,1\n").jobs
    assert (job.id, job.submit_s, job.gpus, job.duration_s) == ("0", 8, 1, pytest.approx(14009.4))
    with pytest.raises(BadInput, match=r"line 1: found model='resnet'; expected one that .*: alexnet"):
        read(tmp_path, "0,resnet,8,100,1\n")


def test_openb_leaves_out_what_used_no_gpu(tmp_path):
    head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    rows = (
        "a,6000,12288,1,460,V100M16|V100M32,LS,Running,100,300,150\n"
        "b,6000,12288,0,0,,BE,Running,100,300,100\n"
        "c,6000,12288,8,1000,,BE,Pending,100,300,\n"
    )
    workload = read(tmp_path, head + rows)
    (job,) = workload.jobs
    assert workload.left_out == (("pods that never ran", 1), ("pods without GPU", 1))
    assert (job.duration_s, job.gpus, job.account, job.cpus, job.mem_mb) == (150, 1, "LS", 6, 12288)
    assert job.spec.gpu_types == ("v100", "v100_32gb")
    with pytest.raises(BadInput, match=r"line 2: found the GPU type 'V900'; expected one of A10, P100"):
        read(tmp_path, head + "a,1,1,1,1,V900,LS,Running,1,3,1\n")


def test_sacct(tmp_path):
    """Asked for any 4 GPUs, got a100; then a type asked for; then what is left out."""
    rows = [
        "12|ada|lab|COMPLETED|2026-11-02T10:00:00|3600|1440|billing=8,cpu=8,gres/gpu=4,mem=64G,node=1"
        "|billing=8,cpu=16,gres/gpu:a100=4,gres/gpu=4,mem=64G,node=1|train|v2",
        "13|bob||TIMEOUT|2026-11-02T10:01:30|60|UNLIMITED|gres/gpu:t4=1|cpu=1,gres/gpu:t4=1,mem=512M|x",
        "13.batch||lab|COMPLETED|2026-11-02T10:01:30|60|||cpu=1,gres/gpu:t4=1|batch",
        "14|ada|lab|CANCELLED by 0|2026-11-02T10:02:00|0|60|gres/gpu=1||never",
        "15|ada|lab|COMPLETED|2026-11-02T10:02:00|10|60|cpu=4|cpu=4,mem=1G|no gpu",
    ]
    workload = read(tmp_path, SACCT + "\n".join(rows) + "\n")
    any_type, typed = workload.jobs
    assert (any_type.name, any_type.user, any_type.account, any_type.submit_s) == ("train|v2", "ada", "lab", 0)
    assert (any_type.gpus, any_type.gpu_type, any_type.spec.gpu_types) == (4, "a100", None)
    assert (any_type.duration_s, any_type.time_limit_s, any_type.cpus, any_type.mem_mb) == (3600, 86400, 16, 65536)
    assert (typed.submit_s, typed.spec.gpu_types, typed.time_limit_s, typed.mem_mb) == (90, ("t4",), None, 512)
    assert workload.left_out == (("job steps", 1), ("jobs that never ran", 1), ("jobs without GPU", 1))
    seconds = SACCT + "1|ada||COMPLETED|1762077600|5||gres/gpu=1|gres/gpu=1|x\n"  # SLURM_TIME_FORMAT=%s
    assert read(tmp_path, seconds).jobs[0].submit_s == 0


def test_a_file_may_be_packed(tmp_path):
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress((OWN + "a,0,1,5\n").encode()))
    workload = read_workload(tmp_path / "x.csv.gz")
    assert (workload.name, len(workload.jobs)) == ("x", 1)


def test_a_type_of_the_cluster_is_known_though_no_catalogue_has_it(tmp_path):
    text = "id,submit_s,gpus,duration_s,gpu_type\na,0,1,5,mi50\n"
    with pytest.raises(BadInput, match=r"line 2: found the GPU type 'mi50'; expected one of k80, .*--gpu-types"):
        read(tmp_path, text)
    assert read(tmp_path, text, gpu_types=["mi50"]).jobs[0].gpu_type == "mi50"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: found nothing; expected a header line"),
        (
            "id,submit_s,gpu\n",
            "line 1: found the columns id,submit_s,gpu; expected gpus too, as Penstock's own CSV has",
        ),
        ("timestamp,num_gpus,cluster\n", "line 1: .*expected duration too, as Philly"),
        ("JobIDRaw|User\n", "line 1: .*expected Account, State, .* too, as `sacct --parsable2` has"),
        ("x,y\n", "line 1: found 'x,y'; expected the columns of one of penstock: id,submit_s,gpus; sacct: JobIDRaw"),
        ("id,submit_s,gpus,gpu\n", "line 1: found the column 'gpu'; expected only id,submit_s,gpus,spec"),
        ("id,submit_s,gpus,id\n", "line 1: found the column 'id' twice"),
        (OWN, "found no job; expected at least one job that uses GPUs"),
        (OWN + "a,0,1,5\nb,-3,1,5\n", r"line 3: found submit_s=-3\.0; expected seconds of at least 0"),
        (OWN + "a,soon,1,5\n", "line 2: found submit_s='soon'; expected a number"),
        (OWN + "a,nan,1,5\n", "line 2: found submit_s='nan'; expected a number"),
        (OWN + "a,0,1,0\n", r"line 2: found duration_s=0\.0; expected a number above 0"),
        (OWN + "a,0,0,5\n", "line 2: found gpus=0; expected at least 1; leave out jobs that use no GPU"),
        (OWN + "a,0,1.5,5\n", "line 2: found gpus='1.5'; expected a whole number"),
        (OWN + "a,0,,5\n", "line 2: found nothing in column gpus; expected a value for every job"),
        (OWN + "a,0,1,\n", "line 2: found neither a model nor duration_s"),
        (OWN + "a,0,1\n", r"line 2: found 3 fields, 'a,0,1'; expected 4: id,submit_s,gpus,duration_s"),
        (
            OWN + "a,0,1,5\n\nb,1,1,5\na,2,1,5\n",
            "line 5: found job 'a', which is in line 2 too; expected each job once",
        ),
        (OWN + 'a,0,1,5\nb,"1\n', "line 3: found unexpected end of data"),
        ("id,submit_s,gpus,spec\na,0,1,{\n", "line 2: found spec='{', which is not JSON"),
        (
            'id,submit_s,gpus,model,spec\na,0,1,m,"{""gpu"": 1}"\n',
            "line 2: found a bad job spec \\(unknown key 'gpu'",
        ),
        (
            "id,submit_s,gpus,model,samples,epochs\na,0,1,m,5,5\n",
            "line 2: found both samples and epochs; expected one of",
        ),
        (SACCT + "1|a||R|yesterday|5||gres/gpu=1|gres/gpu=1|x\n", "line 2: found Submit='yesterday'; expected a date"),
        (SACCT + "1|a||R|2026-01-01|5||x|gres/gpu:t4=1,gres/gpu:l4=1|x\n", "line 2: found GPUs of 2 types"),
        (SACCT + "1|a\n", r"line 2: found 2 fields, '1\|a'; expected 10"),
        ("{", "line 1: found Expecting property name"),
        ("{}", 'found format None; expected an object with "format": "penstock-workload/1"'),
        ('{"format": "penstock-workload/1"}', 'found no list "jobs"'),
        ('{"format": "penstock-workload/1", "jobs": [3]}', r"found in jobs\[0\] 3; expected an object"),
        ('{"format": "penstock-workload/1", "jobs": [{"id": 3}]}', r"found in jobs\[0\] id=3; expected a text"),
        ('{"format": "penstock-workload/1", "jobs": [{"gpu": 3}]}', r"jobs\[0\] the key 'gpu'; expected only id, "),
        ('{"format": "penstock-workload/1", "jobs": [{"id": "a"}]}', r"jobs\[0\] no key 'submit_s'"),
        (
            '{"format": "penstock-workload/1", "jobs": [{"id": "a", "submit_s": 0, "gpus": 1, "duration_s": 1, '
            '"gpu_type": "x"}]}',
            "in job 'a' the GPU type 'x'; expected one of",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, words):
    with pytest.raises(BadInput, match=words) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "trace.csv"))


def test_duplicates_in_json_are_found(tmp_path):
    job = {"id": "a", "submit_s": 0, "gpus": 1, "duration_s": 1}
    with pytest.raises(BadInput, match="found job 'a' twice"):
        read(tmp_path, json.dumps({"format": "penstock-workload/1", "jobs": [job, job]}))


def test_up_to_twenty_problems_are_listed(tmp_path):
    rows = "".join(f"{number},-1,1,5\n" for number in range(30))
    with pytest.raises(BadInput) as caught:
        read(tmp_path, OWN + rows)
    assert [problem.line for problem in caught.value.problems] == list(range(2, 22))


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(BadInput, match="found No such file"):
        read_workload(tmp_path / "away.csv")
    (tmp_path / "bytes.csv").write_bytes(b"id,submit_s,gpus,duration_s\n\xff\xfe,0,1,5\n")
    with pytest.raises(BadInput, match=r"found 'utf-8' codec.*expected a file in UTF-8"):
        read_workload(tmp_path / "bytes.csv")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(OWN.encode() * 100)[:40])
    with pytest.raises(BadInput, match="expected a file in UTF-8, plain or gzip"):
        read_workload(tmp_path / "cut.csv.gz")


class _Endless:
    """A file as large as one likes, of which only what is read exists."""

    def __init__(self, head: str, line: str) -> None:
        self.head, self.line, self.read = head, line, 0

    def readline(self, most: int) -> str:
        self.read += 1
        return self.head if self.read == 1 else self.line[:most]

    def __enter__(self) -> _Endless:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_too_many_jobs_stop_the_reading(tmp_path):
    """A file of any size is read row by row, and no further than the limit."""
    text = OWN + "".join(f"{number},0,1,5\n" for number in range(11))
    with pytest.raises(BadInput, match=r"line 12: found yet another job; expected at most 10 jobs .* split the file"):
        read(tmp_path, text, most_jobs=10)


def test_a_line_without_end_is_not_held(tmp_path, monkeypatch):
    endless = _Endless(OWN, "x" * (table.MAX_LINE + 5))
    monkeypatch.setattr(table, "open_text", lambda file: endless)
    with pytest.raises(BadInput, match="line 2: found a line of more than 1048576 characters"):
        list(table.read_chunks(tmp_path, ("id",)))
    assert endless.read == 2


@pytest.mark.long
def test_two_gigabytes_are_refused_in_little_memory(tmp_path):
    """2 GB of rows, most of which are never read: the 500,001st job stops it."""
    import resource

    row = "{:09d},0,1,5" + " " * 4000 + "\n"
    with (tmp_path / "big.csv").open("w") as out:
        out.write(OWN)
        for number in range(500_100):
            out.write(row.format(number))
    with pytest.raises(BadInput, match="line 500002: found yet another job"):
        read_workload(tmp_path / "big.csv")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1024 * 1024  # KiB


DATA = Path(os.environ.get("PENSTOCK_TEST_DATA", ""))


@pytest.mark.skipif("PENSTOCK_TEST_DATA" not in os.environ, reason="needs the public data: see docs/developer/data.md")
@pytest.mark.parametrize(
    ("file", "jobs", "gpus", "span_h"),
    [
        ("sia/workloads/philly/workload-1.csv", 160, 1612, 7.66),
        ("sia/workloads/newtrace/workload-1.csv", 960, None, 47.8),
        ("sia/workloads/phoebe_workload.csv", 30, None, 1.76),
        ("sia/pollux-workloads/workloads-realistic/workload-1.csv", 160, None, 7.66),
        ("philly/philly_82k_jobs.csv.gz", 82247, None, 2613.5),
        ("tiresias/60_job.csv", 60, 170, 0.494),
        ("synergy/dynamic_100job.csv", 100, 100, 3.34),
        ("starburst/fidelity_s1.1_jobs.csv", 115, None, 3.01),
        ("alibaba/openb_pod_list_default.csv.gz", 6203, None, 3583.8),
    ],
)
def test_public_traces(file, jobs, gpus, span_h):
    workload = read_workload(DATA / file)
    assert len(workload.jobs) == jobs
    assert workload.span_s / 3600 == pytest.approx(span_h, rel=2e-3)
    assert gpus is None or sum(job.gpus for job in workload.jobs) == gpus


@pytest.mark.skipif("PENSTOCK_TEST_DATA" not in os.environ, reason="needs the public data: see docs/developer/data.md")
def test_philly_is_as_heavy_as_starburst_says():
    """Its 978,000 GPU-hours over its span are 73 % of 64 nodes of 8 GPUs."""
    workload = read_workload(DATA / "philly/philly_82k_jobs.csv.gz")
    gpu_s = sum(job.gpu_seconds or 0 for job in workload.jobs)
    assert gpu_s / workload.span_s / 512 == pytest.approx(0.731, abs=0.001)
