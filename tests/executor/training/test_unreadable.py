"""Checkpoints that are there and cannot be read: no run begins at step 0 beside them."""

from pathlib import Path

import pytest

from ..elastic import SCRIPT, gang, steps

OPTIONS = ("--size=96", "--epochs=1")


def trained(folder: Path, *options: str) -> list[Path]:
    """The checkpoints of a run that two processes have completed; newest first."""
    with gang(SCRIPT, folder, *OPTIONS, *options, processes=2) as job:
        job.finish()
    return sorted((folder / "checkpoints").glob("epoch-*/*.ckpt"), reverse=True)


def refused(folder: Path, *options: str) -> str:
    """What the next run says, which trains nothing."""
    before = len(steps(folder))
    with gang(SCRIPT, folder, *OPTIONS, "--epochs=2", *options, processes=2) as job:
        assert job.wait() == 1, job.said.read_text()
    assert len(steps(folder)) == before
    return job.said.read_text()


def cannot_be_read(path: Path) -> None:
    """Reading it is an error (ELOOP), for root as well. Its content is beside it."""
    path.rename(path.with_suffix(".kept"))
    path.symlink_to(path)


def test_if_no_checkpoint_is_whole_all_processes_say_which_there_are_and_what_to_do(tmp_path: Path):
    paths = trained(tmp_path)
    assert paths
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    said = refused(tmp_path)
    assert said.count(f"Unreadable: {tmp_path / 'checkpoints'}: none of the checkpoints is whole") == 2, said
    assert all(str(path.relative_to(tmp_path / "checkpoints")) in said for path in paths)
    assert "to begin anew, move the folder away" in said
    assert sorted((tmp_path / "checkpoints").glob("epoch-*/*.ckpt"), reverse=True) == paths, "they are kept"


@pytest.mark.parametrize("options", [(), ("--sharded",)], ids=["whole", "sharded"])
def test_an_error_of_the_file_system_is_not_taken_for_damage(options: tuple[str, ...], tmp_path: Path):
    path, *_ = trained(tmp_path, *options)  # the newest
    read = max(path.parent.glob("*.shards/__1_*")) if options else path
    cannot_be_read(read)
    said = refused(tmp_path, *options)
    assert said.count("Unreadable: [Errno 40] Too many levels of symbolic links") == 2, said
    assert str(read) in said
    assert "start the run again when the file system answers" in said
    read.with_suffix(".kept").rename(read)
    with gang(SCRIPT, tmp_path, *OPTIONS, "--epochs=2", *options, processes=2) as job:
        assert "continues" in job.finish()
