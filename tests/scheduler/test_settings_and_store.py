from __future__ import annotations

import pytest

from penstock_profiles.wire import Checkpointed, Report
from penstock_scheduler import daemon
from penstock_scheduler.errors import ConfigError, StoreError
from penstock_scheduler.model import Hold, Outcome, Progress
from penstock_scheduler.settings import DaemonSettings, load_settings, parse_settings
from penstock_scheduler.store import FileStore
from penstock_slurm.settings import SlurmSettings
from tests.scheduler.test_replay import record


def test_sections_belong_to_their_packages():
    settings = parse_settings(
        '[daemon]\nround_s = 5\n[slurm]\npartitions = ["gpu"]\n[policy.sia]\nfairness_p = -1\n', "here"
    )
    assert settings.section(DaemonSettings).round_s == 5
    assert settings.section(SlurmSettings).partitions == ("gpu",)
    assert settings.policy("sia") == {"fairness_p": -1}
    assert settings.policy("fifo") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[deamon]\n", ["unknown section [deamon]", "did you mean [daemon]?", "slurm"]),
        ("[daemon]\nround = 5\n", ["[daemon]", "unknown key 'round'", "round_s"]),
        ("[daemon]\nround_s = -1\n", ["round_s=-1"]),
        ("[daemon]\nrounds = 'sometimes'\n", ["rounds='sometimes'", "period"]),
        ("[daemon\n", ["here is not TOML", "line 1"]),
        ("policy = 3\n", ["[policy]"]),
        ("[slurm]\npartitions = []\n", ["partitions"]),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(text, words):
    with pytest.raises(ConfigError) as error:
        parse_settings(text, "here")
    for word in words:
        assert word in str(error.value)


def test_a_section_without_defaults_is_missed_by_name():
    with pytest.raises(ConfigError, match=r"section \[slurm\] is missing: partitions"):
        parse_settings("", "here").section(SlurmSettings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus_per_user = -1", "gpus_per_user"),
        ("gpus_per_users = 1", "gpus_per_account, gpus_per_user"),
        ("users = {ada = 'many'}", "users.ada"),
        ("accounts = 4", "accounts"),
    ],
)
def test_limits_that_are_wrong_are_told_with_their_key(text, words):
    with pytest.raises(ConfigError, match=words) as error:
        parse_settings(f"[limits]\n{text}\n", "here")
    assert str(error.value).startswith("here: [limits] ")


def test_the_daemon_tells_settings_that_are_wrong_and_exits_with_2(tmp_path, capsys):
    path = tmp_path / "penstock.toml"
    assert daemon.main(["--config", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    path.write_text("[daemon]\ncluster = 'kubernetes'\n")
    assert daemon.main(["--config", str(path), "--check"]) == 2
    assert "installed are simulated, slurm" in capsys.readouterr().err
    path.write_text("[daemon]\npolicy = 'sai'\ncluster = 'simulated'\nstate_dir = '%s'\n" % (tmp_path / "state"))
    assert daemon.main(["--config", str(path)]) == 2
    assert "the policies are fifo, " in capsys.readouterr().err


def test_check_shows_the_cluster(tmp_path, capsys):
    path = tmp_path / "penstock.toml"
    path.write_text("[daemon]\ncluster = 'simulated'\n[simulated]\nnodes = 't4:2x4'\n")
    assert daemon.main(["--config", str(path), "--check"]) == 0
    assert "2 nodes, 8 GPUs of t4" in capsys.readouterr().out
    assert load_settings(path).source == str(path)


def test_rounds_are_whole_or_absent_and_old_ones_go(tmp_path):
    store = FileStore(tmp_path, keep_rounds=2, writer=True)
    import dataclasses

    first = record()
    for number in (1, 2, 3):
        store.save_round(dataclasses.replace(first, snapshot=dataclasses.replace(first.snapshot, round=number)))
    assert store.round_numbers() == [2, 3]
    (tmp_path / "rounds" / "00000004.json").write_text('{"cut')
    reader = FileStore(tmp_path)
    last = reader.last_round()
    assert last is not None
    assert last.snapshot.round == 3, "a damaged round is passed over"


def test_history_is_appended_and_a_torn_line_is_cut(tmp_path):
    store = FileStore(tmp_path, writer=True)
    report = Report(job_id="1", epoch=1, sequence=0, time_s=1.0, body=Checkpointed(progress=1.0, seconds=0.1))
    store.add_reports([report])
    store.add_outcomes(5.0, [Outcome(Hold("1", 3), Progress.DONE, "done")])
    with (tmp_path / "reports.jsonl").open("a") as file:
        file.write('{"torn')
    store._lock.close()
    again = FileStore(tmp_path, writer=True)
    again.add_reports([report])
    assert list(again.reports()) == [report, report]
    (line,) = again.outcomes()
    assert (line.action, line.progress) == (Hold("1", 3), Progress.DONE)


def test_one_writer_only(tmp_path):
    first = FileStore(tmp_path, writer=True)
    with pytest.raises(StoreError, match="in use by another penstockd"):
        FileStore(tmp_path, writer=True)
    assert first.last_round() is None


def test_a_state_folder_that_cannot_be_is_said_early(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"set \[daemon\] state_dir"):
        FileStore(tmp_path / "file" / "state", writer=True)
    with pytest.raises(StoreError, match="give the daemon's state_dir"):
        FileStore(tmp_path / "none")
