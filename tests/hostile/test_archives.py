"""Archives of output files that attack the user who unpacks them: a program in the cloud wrote them, not the user.

The archives are in `archives.py`. The user's home folder is the job's working directory, the worst case. Afterwards, nothing may
have changed but the output folders that the script declares, and these contain only files, folders, and links that stay inside.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock_cloud import unpacking
from penstock_cloud.cloud_runner import Trouble, unpack
from tests.hostile.archives import (
    DAMAGED,
    DECLARED,
    HARMLESS,
    LEFT_OUT,
    LONG_NAME,
    PAX,
    file,
    head,
    link,
)


def packed(content: bytes, *, whole: bool) -> io.BytesIO:
    """The archive, with an honest file after what is in it."""
    return io.BytesIO(gzip.compress(content + (file("results/good", b"good") + bytes(1024) if whole else b""), 1))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's home folder, with an honest file from an earlier run."""
    found = tmp_path / "home"
    for name in (".ssh", "best", "results"):
        (found / name).mkdir(parents=True)
    (found / ".bashrc").write_text("mine\n")
    (found / ".ssh" / "id").write_text("secret\n")
    (found / ".ssh" / "authorized_keys").write_text("mine\n")
    (found / "results" / "older").write_text("older\n")
    (tmp_path / "beside").mkdir()
    return found


def told(folder: Path, but: tuple[Path, ...] = ()) -> dict[str, Any]:
    """All that is below a folder, and how."""
    found: dict[str, Any] = {}
    for here, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if Path(here) / each not in but]
        for name in (*folders, *files):
            path = Path(here) / name
            about = path.lstat()
            read = path.read_bytes() if stat.S_ISREG(about.st_mode) else b""
            found[str(path)] = (
                about.st_mode,
                about.st_ino,
                about.st_nlink,
                stat.S_ISREG(about.st_mode) and about.st_mtime_ns,
                read,
            )
    return found


def check(home: Path, before: dict[str, Any]) -> None:
    """Nothing but the declared outputs has changed, and what is in these stays in these."""
    declared = tuple(home / each for each in DECLARED)
    assert told(home.parent, declared) == before, "something else has changed"
    assert (home / "results" / "older").read_text() == "older\n"
    for top in declared:
        assert not top.is_symlink() or str(top.readlink()) in DECLARED
        for here, folders, files in os.walk(top):
            for path in (Path(here) / name for name in (*folders, *files)):
                about = path.lstat()
                assert not about.st_mode & 0o7000 or stat.S_ISLNK(about.st_mode)
                assert stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode) or stat.S_ISLNK(about.st_mode), path
                if stat.S_ISLNK(about.st_mode):
                    inside = os.path.realpath(path)
                    assert any(inside == str(each) or inside.startswith(f"{each}/") for each in declared), path
                    assert not path.readlink().is_absolute()


def begin(home: Path) -> dict[str, Any]:
    return told(home.parent, tuple(home / each for each in DECLARED))


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_leads_out_is_left_out_and_the_rest_comes_back(home: Path, kind: str) -> None:
    before = begin(home)
    try:
        with pytest.raises(Trouble, match="cannot be put in their places"):
            unpack(packed(LEFT_OUT[kind](home), whole=True), home, DECLARED)
    finally:
        check(home, before)
    assert (home / "results" / "good").read_bytes() == b"good"


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_second_archive_does_not_go_through_what_the_first_has_left(home: Path, kind: str) -> None:
    """Each node of a gang sends one, and so does each run."""
    before = begin(home)
    for _ in range(2):
        with pytest.raises(Trouble):
            unpack(packed(LEFT_OUT[kind](home), whole=True), home, DECLARED)
        names = (*("results/door/id", "results/a/id", "results/b/id"), "results/escape/id", "best/id")
        unpack_anyway(home, b"".join(file(name) for name in names))
        check(home, before)


def unpack_anyway(home: Path, content: bytes) -> None:
    try:
        unpack(packed(content, whole=True), home, DECLARED)
    except Trouble as trouble:
        if "cannot be put in their places" not in str(trouble):
            raise


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_cannot_be_read_changes_nothing(home: Path, kind: str) -> None:
    before, results = begin(home), told(home / "results")
    with pytest.raises(Trouble, match="cannot be unpacked"):
        unpack(packed(DAMAGED[kind](home), whole=False), home, DECLARED)
    check(home, before)
    assert told(home / "results") == results


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_is_only_odd_comes_back_without_harm(home: Path, kind: str) -> None:
    before = begin(home)
    unpack(packed(HARMLESS[kind](home), whole=True), home, DECLARED)
    check(home, before)
    assert (home / "results" / "good").read_bytes() == b"good"
    for path in (home / "results").rglob("*"):
        assert path.is_symlink() or os.access(path, os.R_OK | os.W_OK)


@pytest.mark.parametrize("cut", range(0, 1000, 83))
def test_an_archive_that_breaks_off_or_is_changed_on_the_way_changes_nothing(home: Path, cut: int) -> None:
    content = packed(b"".join(file(f"results/{each}", os.urandom(100)) for each in range(6)), whole=True).getvalue()
    results = told(home / "results")
    torn = content[: len(content) * cut // 1000]
    changed = content[:-8] + bytes([content[-8] ^ 1 + cut % 255]) + content[-7:]  # its sum
    for each in (torn, changed, os.urandom(cut)):
        with pytest.raises(Trouble, match="cannot be unpacked"):
            unpack(io.BytesIO(each), home, DECLARED)
    assert told(home / "results") == results


def test_the_limits_hold_for_members_that_are_left_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million refused members must not last for ever, and what is said about them stays short."""
    monkeypatch.setattr(unpacking, "MOST_FILES", 1000)
    with pytest.raises(Trouble, match=r"^1001 of") as found:
        unpack(
            packed(b"".join(file(f".ssh/{'x' * 80}{each}", b"") for each in range(2000)), whole=True), home, DECLARED
        )
    assert len(str(found.value)) < 1000
    monkeypatch.setattr(unpacking, "MOST_BYTES", 10**6)
    with pytest.raises(Trouble, match="bytes come back"):
        unpack(packed(head("results/zeros", size=10**7) + bytes(10**7), whole=True), home, DECLARED)
    assert not (home / "results" / "zeros").exists()
    beyond_every_disk = head("results/x", size=b"\x80" + b"\x00" * 4 + b"\x7f" * 7)
    with pytest.raises(Trouble, match="bytes come back"):
        unpack(packed(beyond_every_disk, whole=True), home, DECLARED)


BOMB = """
import io, resource, sys, zlib
from pathlib import Path
from penstock_cloud.cloud_runner import Trouble, unpack
from tests.hostile.archives import (
    DAMAGED,
    DECLARED,
    FILE,
    FOLDER,
    HARMLESS,
    HARD,
    KEY,
    LEFT_OUT,
    LONG_NAME,
    PAX,
    file,
    folder,
    hard,
    head,
    link,
)
pack, end = zlib.compressobj(9, zlib.DEFLATED, 31), int(sys.argv[2]) * 2**20
head = bytes.fromhex(sys.stdin.read())
out = pack.compress(head) + b"".join(pack.compress(bytes(2**20)) for _ in range(end // 2**20)) + pack.flush()
resource.setrlimit(resource.RLIMIT_AS, (400 * 2**20,) * 2)
try:
    unpack(io.BytesIO(out), Path(sys.argv[1]), ["results"])
except Trouble as trouble:
    print(trouble)
"""


@pytest.mark.parametrize(
    "start",
    [head("././@LongLink", LONG_NAME, size=2**30), head("x", PAX, size=2**30), head("results/zeros", size=2**30)],
    ids=["long name", "pax header", "file"],
)
def test_a_gibibyte_of_zeros_in_a_mebibyte_takes_little_memory(home: Path, start: bytes) -> None:
    """The process may have 400 MiB. An honest file of zeros comes back, since a disk holds it."""
    size = 2**10 if start[156:157] == b"0" else 2**9
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(home), str(size)],
        input=start.hex(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the job's output files cannot be unpacked" in done.stdout, "the archive has no end"
    assert not (home / "results" / "zeros").exists()
    assert [each.name for each in home.iterdir() if each.name.startswith(".penstock-")] == []


def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(home: Path) -> None:
    """Another program of the user's exchanges the output folder and a link all the time."""
    before = begin(home)
    target, ended = home / "results" / "d", threading.Event()
    target.mkdir()

    def exchange() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            for step in (
                lambda: target.rename(home / "best" / f"d{number}"),  # noqa: B023
                lambda: target.symlink_to(home / ".ssh"),
                target.unlink,
            ):
                with contextlib.suppress(OSError):  # the folder was made again meanwhile
                    step()

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(100):
            unpack_anyway(home, b"".join(file(f"results/d/authorized_keys{each}") for each in range(3)))
            (home / "results" / "good").unlink()
    finally:
        ended.set()
        thread.join()
    target.unlink() if target.is_symlink() else None
    check(home, before)


def test_honest_output_comes_back_as_it_was(tmp_path: Path) -> None:
    """As GNU tar packs it on the instance: links to the newest checkpoint, hard links, long names, holes, times."""
    there, here = tmp_path / "there", tmp_path / "here"
    checkpoints = there / "checkpoints"
    for step in (50, 100):
        (checkpoints / f"step_{step}").mkdir(parents=True)
        (checkpoints / f"step_{step}" / "model").write_bytes(os.urandom(3 * 2**20 + step))
    (checkpoints / "latest").symlink_to("step_100")
    (checkpoints / "last").symlink_to("latest/model")
    (checkpoints / "snapshots" / "main").mkdir(parents=True)
    (checkpoints / "snapshots" / "main" / "model").symlink_to("../../step_50/model")
    os.link(checkpoints / "step_50" / "model", checkpoints / "best")
    (checkpoints / ("n" * 200)).mkdir()
    (checkpoints / ("n" * 200) / ("é" * 100)).write_text("long\n")
    (checkpoints / "script").write_text("#!/bin/sh\n")
    (checkpoints / "script").chmod(0o755)
    (checkpoints / "empty").mkdir()
    (checkpoints / "nothing").touch()
    with (checkpoints / "holes").open("wb") as sparse:
        sparse.seek(2**20)
        sparse.write(b"end")
    os.utime(checkpoints / "step_50" / "model", (1_600_000_000, 1_600_000_000))
    (there / "metrics.csv").symlink_to("checkpoints/step_50/model")
    here.mkdir()
    (here / "checkpoints").symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    outputs = ["checkpoints", "metrics.csv"]
    for format in ("gnu", "pax", "ustar"):
        options = ["--exclude=nnn*"] if format == "ustar" else []
        tar = subprocess.run(
            ["tar", "-czf", "-", f"--format={format}", *options, *outputs], cwd=there, capture_output=True, check=True
        )
        unpack(io.BytesIO(tar.stdout), here, outputs)
        unpack(io.BytesIO(tar.stdout), here, outputs)
        left = [name for name in outputs if format != "ustar" or name != "checkpoints"]
        for name in left:
            compare(there / name, here / name)
    assert (here / "checkpoints").readlink() == tmp_path / "scratch", "a link of the user's stays"
    assert (here / "checkpoints" / "best").samefile(here / "checkpoints" / "step_50" / "model")
    assert [each.name for each in (*here.iterdir(), *(tmp_path / "scratch").iterdir()) if "penstock" in each.name] == []


def compare(one: Path, other: Path) -> None:
    if one.is_symlink():
        assert one.readlink() == other.readlink()
    elif one.is_dir():
        assert sorted(os.listdir(one)) == sorted(os.listdir(other))
        for name in os.listdir(one):
            compare(one / name, other / name)
    else:
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_mode == other.stat().st_mode
        assert int(one.stat().st_mtime) == int(other.stat().st_mtime)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system to unpack onto")
def test_output_on_another_file_system_is_replaced_whole(home: Path) -> None:
    """The user's output folder is a link to a scratch file system."""
    far = Path("/dev/shm") / f"penstock-hostile-{os.getpid()}"
    far.mkdir()
    try:
        if far.stat().st_dev == home.stat().st_dev:
            pytest.skip("/dev/shm is on the same file system")
        shutil.rmtree(home / "results")
        (home / "results").symlink_to(far)
        (far / "a").symlink_to(home / ".bashrc")
        (far / f".penstock-{os.getpid()}").symlink_to(home / ".bashrc")
        unpack(packed(file("results/a", b"new", 0o750) + link("results/b", "a"), whole=True), home, DECLARED)
        assert (far / "a").read_bytes() == b"new"
        assert not (far / "a").is_symlink()
        assert stat.S_IMODE((far / "a").stat().st_mode) == 0o750
        assert str((far / "b").readlink()) == "a"
        assert (home / ".bashrc").read_text() == "mine\n"
        assert sorted(os.listdir(far)) == ["a", "b", "good"]
    finally:
        shutil.rmtree(far)


def test_the_corpus_is_large_enough() -> None:
    assert len(LEFT_OUT) + len(DAMAGED) + len(HARMLESS) >= 80


def test_the_archives_are_ones_that_other_readers_accept(home: Path) -> None:
    """A corpus of archives that nobody can read would show nothing."""
    for make in LEFT_OUT.values():
        with tarfile.open(fileobj=packed(make(home), whole=True)) as archive:
            assert len(archive.getnames()) > 1
