import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from penstock_executor import Checkpoints, NotSaved, Superseded
from penstock_executor.checkpoint import Shards, Unreadable, fingerprint

from .spool import job_environment, process, wait_for

FULL = Path("/dev/full")


def test_bytes_and_arrays_come_back_as_saved(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, 1)
    assert checkpoints.latest() is None
    checkpoints.save(b"\0\n\xff", 1, {"progress": 1.5, "rng": 2**127})
    found = checkpoints.latest()
    assert (found.epoch, found.step, found.state, found.meta) == (1, 1, b"\0\n\xff", {"progress": 1.5, "rng": 2**127})
    arrays = {"w.0": np.arange(6.0).reshape(2, 3), "file": np.array(7, dtype=np.int8), "empty": np.zeros((0, 2))}
    checkpoints.save(arrays, 2)
    found = checkpoints.latest()
    assert found.step == 2
    assert found.state.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(found.state[name], value)
        assert found.state[name].dtype == value.dtype


def test_the_highest_epoch_wins_then_the_highest_step(tmp_path: Path):
    """The run of epoch 1 got further before it was superseded. Only the present run's checkpoints count."""
    Checkpoints(tmp_path, 1).save(b"far", 900)
    second = Checkpoints(tmp_path, 2)
    assert second.latest().state == b"far"
    second.save(b"near", 100)
    second.save(b"nearer", 99)
    assert second.latest().state == b"near"
    assert Checkpoints(tmp_path, 12).latest().epoch == 2
    Checkpoints(tmp_path, 12).save(b"twelve", 0)
    assert Checkpoints(tmp_path, 12345).latest().epoch == 12


def test_the_last_two_are_kept_and_dead_runs_leave_nothing(tmp_path: Path):
    Checkpoints(tmp_path, 1)
    second = Checkpoints(tmp_path, 2)
    for step in (1, 2, 3):
        second.save(b"", step)
    (tmp_path / "epoch-0002" / "step-000000000004.77.tmp").write_bytes(b"half")
    third = Checkpoints(tmp_path, 3)
    third.save(b"", 4)
    assert names(tmp_path) == ["epoch-0002/step-000000000003.ckpt", "epoch-0003/step-000000000004.ckpt"]
    third.save(b"", 5)
    assert names(tmp_path) == ["epoch-0003/step-000000000004.ckpt", "epoch-0003/step-000000000005.ckpt"]
    assert os.listdir(tmp_path) == ["epoch-0003"]


def test_what_dead_runs_left_half_written_is_removed_before_the_first_save(tmp_path: Path):
    """On a full disk, it may be what the disk is full of: no save would succeed, and so none would remove it."""
    first = Checkpoints(tmp_path, 1)
    whole, half = first.shards_folder(1, 1), first.shards_folder(2, 2)
    for folder in (whole, half):
        folder.mkdir()
        (folder / "0").write_bytes(b"shard")
    first.save(b"", 1, shards=Shards(whole, {"0": fingerprint(whole / "0")}))
    (tmp_path / "epoch-0001" / "step-000000000002.77.tmp").write_bytes(b"half")
    second = Checkpoints(tmp_path, 2)
    assert names(tmp_path) == ["epoch-0001/step-000000000001.1.shards/0", "epoch-0001/step-000000000001.ckpt"]
    assert not half.exists()
    assert second.latest().shards.folder == whole


def test_a_run_left_behind_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stale = Checkpoints(tmp_path, 1)
    stale.save(b"old", 1)
    present = Checkpoints(tmp_path, 2)
    assert (stale.superseded, present.superseded) == (True, False)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("it began to write"))
    with pytest.raises(Superseded, match="the run of epoch 2 has begun, so the run of epoch 1 must stop"):
        stale.save(b"stale", 2)
    with pytest.raises(Superseded):
        Checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["epoch-0001/step-000000000001.ckpt"]


def test_a_run_left_behind_while_it_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stale = Checkpoints(tmp_path, 1)
    sync = os.fsync

    def slowly(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        Checkpoints(tmp_path, 2)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slowly)
    with pytest.raises(Superseded):
        stale.save(b"stale", 2)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: content + b"x",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content.replace(b'"p": 2', b'"p": 3'),
        lambda content: content.replace(b'"format": 1', b'"format": 2'),
        lambda content: b"[]\n",
        lambda content: os.urandom(500),
    ],
)
@pytest.mark.parametrize("state", [b"state", {"w": np.ones(3)}], ids=["bytes", "arrays"])
def test_a_harmed_one_is_passed_over(tmp_path: Path, damage, state, caplog: pytest.LogCaptureFixture):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(b"before", 1)
    path = checkpoints.save(state, 2, {"p": 2})
    assert checkpoints.latest().step == 2
    harmed = damage(path.read_bytes())
    assert harmed != path.read_bytes()
    path.write_bytes(harmed)
    assert checkpoints.latest().state == b"before"
    assert f"path={path} checkpoint skipped" in caplog.text


def test_if_all_are_harmed_nothing_begins_at_zero(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, 1)
    for step in (1, 2):
        checkpoints.save(b"state", step).write_bytes(b"harmed")
    with pytest.raises(
        Unreadable, match=r"none .* is whole .*step-000000000002.ckpt, .*-000000000001.ckpt.*move the folder"
    ):
        Checkpoints(tmp_path, 2).latest()
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("which", ["file", "folder", "shard"])
def test_an_error_of_the_file_system_is_no_damage(tmp_path: Path, which: str):
    """Such as EIO or ESTALE, which pass. Here it is ELOOP, which root gets as well."""
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(b"before", 1)
    folder = checkpoints.shards_folder(2, number=2)
    folder.mkdir()
    (folder / "0").write_bytes(b"shard")
    path = checkpoints.save(b"state", 2, shards=Shards(folder, {"0": fingerprint(folder / "0")}))
    harmed = {"file": path, "folder": path.parent, "shard": folder / "0"}[which]
    harmed.rename(tmp_path / "kept")
    harmed.symlink_to(harmed)
    with pytest.raises(OSError, match="Too many levels") as raised:
        Checkpoints(tmp_path, 2).latest()
    assert str(harmed) in str(raised.value)
    harmed.unlink()
    (tmp_path / "kept").rename(harmed)
    assert Checkpoints(tmp_path, 3).latest().state == b"state"


def test_one_that_is_removed_while_others_are_read_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that is superseded removes old ones until it sees that."""
    checkpoints = Checkpoints(tmp_path, 1)
    paths = [checkpoints.save(b"state", step) for step in (1, 2)]
    found = checkpoints.candidates()
    assert next(found).step == 2
    paths[0].unlink()
    assert list(found) == []


def test_one_with_a_harmed_shard_is_passed_over_and_shards_go_with_their_checkpoint(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, 1)

    def save(step: int) -> Path:
        folder = checkpoints.shards_folder(step, number=step)
        folder.mkdir()
        (folder / "0").write_bytes(b"shard" * step)
        checkpoints.save(b"", step, shards=Shards(folder, {"0": fingerprint(folder / "0")}))
        return folder

    folders = [save(step) for step in (1, 2)]
    assert (checkpoints.latest().step, checkpoints.latest().shards.folder) == (2, folders[1])
    (folders[1] / "0").write_bytes(b"shard")
    assert (checkpoints.latest().step, checkpoints.latest().shards.folder) == (1, folders[0])
    assert [found.step for found in checkpoints.candidates()] == [2, 1]
    assert checkpoints.find(1, 2).shards.folder == folders[1]
    checkpoints.shards_folder(3, 3).mkdir()  # of a save that failed
    folders.append(save(4))
    assert sorted(tmp_path.glob("*/*.shards")) == [folders[1], folders[2]]
    checkpoints.shards_folder(5, 5).mkdir()  # of a run that died while it wrote
    second = Checkpoints(tmp_path, 2)
    assert second.latest().step == 4
    second.save(b"", 5)
    assert sorted(tmp_path.glob("*/*.shards")) == [folders[2]]


def test_shards_of_the_next_save_stay_which_another_process_writes_while_the_first_is_behind(tmp_path: Path):
    """Both are of the same step: the end of an epoch may save just after a regular checkpoint."""
    checkpoints = Checkpoints(tmp_path, 1, keep=1)
    folder, ahead = (checkpoints.shards_folder(8, number) for number in (1, 2))
    for each in (folder, ahead):
        each.mkdir()
        (each / "part-1.pt").write_bytes(b"part")
    files = {"part-1.pt": fingerprint(folder / "part-1.pt")}
    checkpoints.save(b"", 8, shards=Shards(folder, files))
    assert sorted(tmp_path.glob("*/*.shards")) == [folder, ahead]
    checkpoints.save(b"", 8, shards=Shards(ahead, files))
    assert checkpoints.latest().shards == Shards(ahead, files)
    assert sorted(tmp_path.glob("*/*.shards")) == [ahead]


def test_processes_share_out_the_reading_of_shards(tmp_path: Path):
    """Five files and three readers: files 0 and 3, 1 and 4, 2."""
    for name in "01234":
        (tmp_path / name).write_text(name)
    shards = Shards(tmp_path, {name: fingerprint(tmp_path / name) for name in "43210"})
    assert [shards.damage(reader, 3) for reader in range(3)] == [None] * 3
    (tmp_path / "4").write_text("5")
    assert [shards.damage(reader, 3) for reader in range(3)] == [
        None,
        f"4 in {tmp_path.name} is truncated or altered",
        None,
    ]
    assert "altered" in shards.damage()
    (tmp_path / "2").unlink()
    assert "No such file" in shards.damage(2, 3)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_leaves_the_one_before(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(b"before", 1)
    (tmp_path / "epoch-0001" / f"step-000000000002.{os.getpid()}.tmp").symlink_to(FULL)
    with pytest.raises(NotSaved, match=r"No space left.*earlier checkpoints are whole"):
        checkpoints.save(b"x" * 100_000, 2)
    assert names(tmp_path) == ["epoch-0001/step-000000000001.ckpt"]
    assert checkpoints.latest().state == b"before"
    checkpoints.save(b"after", 2)
    assert checkpoints.latest().state == b"after"


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(NotSaved, match="fix the folder's permissions"):
        Checkpoints(tmp_path / "file", 1)


def test_kill_during_saves_leaves_a_whole_one(tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from penstock_executor import Checkpoints, connect\n"
        "run = connect(Path(sys.argv[1])); c = Checkpoints(Path(sys.argv[1]), run.epoch)\n"
        "step = c.latest().step if c.latest() else 0\n"
        "while True: step += 1; c.save(bytes([step % 256]) * 300_000, step)"
    )
    chance = random.Random(8)
    step = 0
    for epoch in range(1, 6):
        with process("-c", script, tmp_path, environment=job_environment(None)) as child:
            folder = tmp_path / f"epoch-{epoch:04d}"
            wait_for(lambda folder=folder: any(folder.glob("*.ckpt")), "checkpoint")
            time.sleep(chance.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
            child.wait()
        found = Checkpoints(tmp_path, epoch).latest()
        assert found.epoch == epoch
        assert found.step > step
        assert found.state == bytes([found.step % 256]) * 300_000
        step = found.step


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
