"""The cloud runner on its own: directives, environment, archives and downloads."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from penstock_cloud import cloud_runner
from penstock_cloud.cloud_runner import Directives, Trouble, directives, environment, get, job_id, pack, unpack


def test_directives_name_paths_inside_the_working_directory() -> None:
    script = "#!/bin/sh\n#SBATCH -n1\n#PENSTOCK input a 'b c'\n#PENSTOCK output d\necho '#PENSTOCK input no'\n"
    assert directives(script) == Directives(("a", "b c"), ("d",))
    for line in ("#PENSTOCK inputs a", "#PENSTOCK input", "#PENSTOCK input /etc/passwd", "#PENSTOCK output ../x"):
        with pytest.raises(Trouble, match="line 1"):
            directives(line)


def test_a_script_names_the_image_of_its_one_container() -> None:
    assert directives("#PENSTOCK container docker://lab/train:2\n#PENSTOCK output d") == Directives(
        (), ("d",), "docker://lab/train:2"
    )
    for line in ("#PENSTOCK container a b", "#PENSTOCK container a\n#PENSTOCK container a"):
        with pytest.raises(Trouble, match="name one image"):
            directives(line)


def test_the_environment_goes_along_but_not_what_is_this_machines() -> None:
    mine = {"PATH": "/site/bin", "A": "it's", "CUDA_VISIBLE_DEVICES": "0", "BASH_FUNC_x%%": "() { :; }"}
    there = "PENSTOCK_DETACHED=1\nSLURM_JOB_NODELIST=localhost\nSLURM_NODELIST=localhost\n"
    assert environment(mine) == "A='it'\"'\"'s'\n" + there
    assert job_id({"SLURM_JOB_ID": "12"}) == "12"
    assert job_id({"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}) == "12_3"


def test_an_input_that_is_a_link_goes_along_as_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "far" / "set").mkdir(parents=True)
    (tmp_path / "far" / "set" / "numbers").write_text("1 2 3\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "data").symlink_to(tmp_path / "far" / "set")
    (tmp_path / "here" / "checkpoint").symlink_to(tmp_path / "far" / "set" / "numbers")
    (tmp_path / "script").write_text("#!/bin/sh\n#PENSTOCK input data\n#PENSTOCK output checkpoint\n")
    pack(tmp_path / "input", tmp_path / "script", {}, tmp_path / "here")
    with tarfile.open(tmp_path / "input") as archive:
        kinds = {each.name: each.type for each in archive if each.name.startswith("work/")}
    assert kinds == {
        "work/data": tarfile.DIRTYPE,
        "work/data/numbers": tarfile.REGTYPE,
        "work/checkpoint": tarfile.REGTYPE,
    }


def archive_of(folder: Path) -> bytes:
    with io.BytesIO() as packed:
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for each in sorted(folder.iterdir()):
                archive.add(each, each.name)
        return packed.getvalue()


OUTPUTS = ["best", "checkpoint", "results"]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    content = b"bad\n" if kind == tarfile.REGTYPE else b""
    info.size = len(content)
    return info, content


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([("/tmp/{name}/outside/file",)], "outside the job's folder|declares no such"),
        ([("results/../../outside/file",)], "outside the job's folder"),
        ([("results/link", tarfile.SYMTYPE, "../../outside"), ("results/link/file",)], "outside the job's folder"),
        ([("results/link", tarfile.SYMTYPE, "/etc")], "a link to /etc"),
        ([("results/link", tarfile.LNKTYPE, "../outside/file")], "outside the job's folder"),
        ([("results/link", tarfile.LNKTYPE, "/etc/passwd")], "outside the job's folder"),
        ([("results/pipe", tarfile.FIFOTYPE)], "neither a file"),
        ([("results/disk", tarfile.BLKTYPE)], "neither a file"),
        ([("results/null", tarfile.CHRTYPE)], "neither a file"),
        ([(".bashrc",)], "declares no such #PENSTOCK output"),
    ],
    ids=[
        *("absolute", "up", "through a link", "absolute link", "hard link", "absolute hard link"),
        *("pipe", "block device", "character device", "not declared"),
    ],
)
def test_nothing_outside_the_jobs_declared_outputs_changes(
    tmp_path: Path, bad: list[tuple[str, bytes, str]], why: str
) -> None:
    """The other files of the archive come back, and the message names what was left out."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("mine\n")
    here = tmp_path / "here"
    here.mkdir()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, *more in [*bad, ("results/good",)]:
            info, content = member(name.replace("/tmp/{name}", str(tmp_path)), *more)
            archive.addfile(info, io.BytesIO(content))
    packed.seek(0)
    with pytest.raises(Trouble, match=why):
        unpack(packed, here, ["results"])
    assert (tmp_path / "outside" / "file").read_text() == "mine\n"
    assert (here / "results" / "good").exists()
    assert [each.name for each in here.iterdir()] == ["results"]
    assert not any(each.is_symlink() for each in here.rglob("*"))


@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_BYTES"])
def test_an_archive_beyond_the_limits_comes_back_up_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A folder and three files of four bytes each. Two files are within the limits."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "results").mkdir(parents=True)
    here.mkdir()
    for name in "abc":
        (there / "results" / name).write_text("1234")
    monkeypatch.setattr(f"penstock_cloud.unpacking.{limit}", {"MOST_FILES": 3, "MOST_BYTES": 11}[limit])
    with pytest.raises(Trouble, match="results/c and what follows: only"):
        unpack(io.BytesIO(archive_of(there)), here, ["results"])
    assert sorted(each.name for each in (here / "results").iterdir()) == ["a", "b"]


def test_what_comes_back_is_there_whole_or_as_before(tmp_path: Path) -> None:
    """A link inside, folders without write permission, a folder on site that is a link, and an archive that ends early."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "results" / "sealed").mkdir(parents=True)
    (there / "best").symlink_to("results")
    (there / "checkpoint").write_bytes(os.urandom(100_000))
    (there / "results" / "sealed" / "sum").write_text("6\n")
    (there / "results" / "sealed").chmod(0o555)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "older").write_text("5\n")
    here.mkdir()
    (here / "results").symlink_to(tmp_path / "far")
    (here / "checkpoint").write_text("old\n")
    packed = archive_of(there)
    for torn in (packed[:60_000], b"no archive"):
        with pytest.raises(Trouble, match="cannot be unpacked"):
            unpack(io.BytesIO(torn), here, OUTPUTS)
        assert (here / "checkpoint").read_text() == "old\n"
    unpack(io.BytesIO(packed), here, OUTPUTS)
    assert (here / "checkpoint").read_bytes() == (there / "checkpoint").read_bytes()
    assert str((here / "best").readlink()) == "results"
    assert (tmp_path / "far" / "sealed" / "sum").read_text() == "6\n"
    assert (tmp_path / "far" / "older").read_text() == "5\n", "files that are not in the archive stay"
    assert sorted(each.name for each in here.iterdir()) == ["best", "checkpoint", "results"]


def test_a_file_that_cannot_be_replaced_does_not_stop_the_others(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here / "a"):
        folder.mkdir(parents=True)
    for name in ("a", "b"):
        (there / name).write_text(name)
    with pytest.raises(Trouble, match="1 of the job's output files"):
        unpack(io.BytesIO(archive_of(there)), here, ["a", "b"])
    assert (here / "b").read_text() == "b"


def test_a_download_that_ends_early_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for size in (9, 5):
                connection = server.accept()[0]
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n12345" % size)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        link = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with io.BytesIO() as content:
            assert not get(link, content)
            assert get(link, content)
            assert content.read() == b"12345"
        thread.join()


def test_a_job_whose_run_has_ended_waits_until_it_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "control.json").write_text("{}")
    env = {"SLURM_JOB_ID": "5", "PENSTOCK_SPOOL": str(tmp_path)}
    command = [sys.executable, "-m", "penstock_cloud.cloud_runner", str(tmp_path), "script"]
    with subprocess.Popen(command, env=os.environ | env, stderr=subprocess.PIPE, text=True) as waits:
        assert waits.stderr is not None
        assert "run in the cloud had ended before Slurm" in waits.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            waits.wait(3)
        waits.send_signal(signal.SIGTERM)
        waits.wait(20)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_runner, "QUEUED_S", 0.1)
    monkeypatch.setattr(cloud_runner, "STOPS", ())
    assert cloud_runner.main(command[3:]) == 1
    assert "submit it again" in capsys.readouterr().err


def test_a_job_without_an_ordered_instance_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock_cloud.cloud_runner", str(tmp_path), "script"],
        env=os.environ | {"SLURM_JOB_ID": "5", "PENSTOCK_SPOOL": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no instance was ordered for this job; submit it" in done.stderr
