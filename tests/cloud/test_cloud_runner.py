"""The cloud runner on its own: directives, environment, archives and downloads."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from penstock_cloud.cloud_runner import Directives, Trouble, directives, environment, get, job_id, pack, unpack


def test_directives_name_paths_inside_the_working_directory() -> None:
    script = "#!/bin/sh\n#SBATCH -n1\n#PENSTOCK input a 'b c'\n#PENSTOCK output d\necho '#PENSTOCK input no'\n"
    assert directives(script) == Directives(("a", "b c"), ("d",))
    for line in ("#PENSTOCK inputs a", "#PENSTOCK input", "#PENSTOCK input /etc/passwd", "#PENSTOCK output ../x"):
        with pytest.raises(Trouble, match="line 1"):
            directives(line)


def test_the_environment_goes_along_but_not_what_is_this_machines() -> None:
    mine = {"PATH": "/site/bin", "A": "it's", "CUDA_VISIBLE_DEVICES": "0", "BASH_FUNC_x%%": "() { :; }"}
    assert environment(mine) == "A='it'\"'\"'s'\nSLURM_JOB_NODELIST=localhost\nSLURM_NODELIST=localhost\n"
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


def test_what_comes_back_is_there_whole_or_as_before(tmp_path: Path) -> None:
    """Links to anywhere, folders without write permission, a folder on site that is a link, and an archive that ends early."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "results" / "sealed").mkdir(parents=True)
    (there / "absolute").symlink_to("/opt/somewhere")
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
            unpack(io.BytesIO(torn), here)
        assert (here / "checkpoint").read_text() == "old\n"
    unpack(io.BytesIO(packed), here)
    assert (here / "checkpoint").read_bytes() == (there / "checkpoint").read_bytes()
    assert str((here / "absolute").readlink()) == "/opt/somewhere"
    assert str((here / "best").readlink()) == "results"
    assert (tmp_path / "far" / "sealed" / "sum").read_text() == "6\n"
    assert (tmp_path / "far" / "older").read_text() == "5\n", "files that are not in the archive stay"
    assert sorted(each.name for each in here.iterdir()) == ["absolute", "best", "checkpoint", "results"]


def test_a_file_that_cannot_be_replaced_does_not_stop_the_others(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here / "a"):
        folder.mkdir(parents=True)
    for name in ("a", "b"):
        (there / name).write_text(name)
    with pytest.raises(Trouble, match="1 of the job's output files"):
        unpack(io.BytesIO(archive_of(there)), here)
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


def test_a_job_without_an_ordered_instance_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock_cloud.cloud_runner", str(tmp_path), "script"],
        env=os.environ | {"SLURM_JOB_ID": "5"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no instance was ordered for this job; submit it" in done.stderr
