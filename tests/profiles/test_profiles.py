import errno
import json
import os
from pathlib import Path

import pytest

from penstock_profiles.profiles import Profile, ProfileError, default_folder, load_profile, profile_file, save_profile
from penstock_profiles.wire import Observation


def profile(job: str = "bert", **changes: object) -> Profile:
    seen = [
        Observation(gpu_type="t4", nodes=1, gpus=1, atomic_batch=m, steps=9, step_time_s=m / 8, memory_mb=m, progress=0)
        for m in (1, 2)
    ]
    fields = {
        "gpu_type": "t4",
        "device": "Tesla T4",
        "measured_s": 1.5,
        "versions": {"python": "3.11"},
        "ended": "the largest batch was reached",
        "observations": seen,
    }
    return Profile.model_validate({"job": job, **fields, **changes})


def test_comes_back_as_saved_and_replaces_the_one_before(tmp_path: Path):
    folder = tmp_path / "made" / "for" / "it"
    path = save_profile(profile(too_large_batch=3), folder)
    assert path == profile_file(folder, "bert", "t4")
    assert load_profile(path) == profile(too_large_batch=3)
    with path.open() as reading:  # a concurrent reader gets the whole old one
        save_profile(profile(), folder)
        assert Profile.model_validate_json(reading.read()) == profile(too_large_batch=3)
    assert load_profile(path) == profile()
    save_profile(profile(gpu_type="a100"), folder)
    assert sorted(os.listdir(folder)) == ["bert@a100.json", "bert@t4.json"]


def test_the_file_says_its_version(tmp_path: Path):
    assert json.loads(save_profile(profile(), tmp_path).read_text())["version"] == 1


def test_a_full_disk_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = save_profile(profile(), tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError, match=r"bert@t4.json cannot be written: No space left.*free some space"):
        save_profile(profile(ended="again"), tmp_path)
    assert load_profile(path) == profile()
    assert os.listdir(tmp_path) == ["bert@t4.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ProfileError, match="choose a folder that you may write"):
        save_profile(profile(), tmp_path / "file")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda text: "", "Invalid JSON"),
        (lambda text: text[:-5], "Invalid JSON"),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            "version=2: .*of another version of Penstock; update",
        ),
        (lambda text: text.replace('"job"', '"jobb"'), "job: Field required"),
        (lambda text: text.replace('"ended"', '"end"'), "ended: Field required"),
        (lambda text: text.replace("0.125", "-1"), "observations.0.step_time_s=-1: .*greater than 0; measure it again"),
        (lambda text: text.replace('"bert"', '"../bert"'), "job='../bert': "),
        (lambda text: json.dumps(json.loads(text) | {"observations": []}), "observations: .*at least 1 item"),
    ],
)
def test_the_message_about_a_damaged_file_names_the_file_and_the_fault(tmp_path: Path, harm, says: str):
    path = save_profile(profile(), tmp_path)
    text = path.read_text()
    assert harm(text) != text
    path.write_text(harm(text))
    with pytest.raises(ProfileError, match=f"profile {path}: {says}"):
        load_profile(path)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(
        ProfileError, match=r"nothing.json cannot be read: No such file.*measure it: penstock profile run"
    ):
        load_profile(tmp_path / "nothing.json")


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "a@b", "a b", "a\n"])
def test_names_that_could_lead_out_of_the_folder(tmp_path: Path, name: str):
    with pytest.raises(ProfileError, match=r"job name .* cannot name a file; use letters"):
        profile_file(tmp_path, name, "t4")
    with pytest.raises(ProfileError, match=r"GPU type .* cannot name a file"):
        profile_file(tmp_path, "bert", name)


def test_where_profiles_are_kept():
    assert default_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/penstock/profiles")
    for environ in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert default_folder(environ) == Path.home() / ".local/state/penstock/profiles"
