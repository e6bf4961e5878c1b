from __future__ import annotations

import pytest
from typer.testing import CliRunner

from penstock_scheduler.cli import make_app
from penstock_scheduler.daemon import penstockd as daemon
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.settings import DaemonSettings, load_settings, parse_settings, reference
from penstock_slurm.settings import SlurmSettings


def test_sections_belong_to_their_packages():
    settings = parse_settings(
        '[daemon]\nround_s = 5\n[slurm]\npartitions = ["gpu"]\n[policy.sia]\nfairness_p = -1\n', "here"
    )
    assert settings.section(DaemonSettings).round_s == 5
    assert settings.section(SlurmSettings).partitions == ("gpu",)
    assert settings.policies == {"sia": {"fairness_p": -1}}
    assert settings.policy == PolicyChoice(name="sia", settings={"sia": {"fairness_p": -1}})


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[daemon]\n\nround = 5\n", "unknown key 'round'.*\\(line 3\\)"),
        ("[slurm]\npartitions = ['a']\n[daemon]\nround_s = '5 min'\n", "a number, in seconds \\(line 4\\)"),
        ("[policy.sia]\ntick_s = 1\n[daemon]\ntick_s = -1\n", "tick_s=-1.*line 4"),
        ("[daemon]\nround_s = 5\n[limits.users]\nada = 'many'\n", "users.ada=.*\\(line 4\\)"),
        ("[daemon]\nround_s = -1\ntick_s = -1 # tick_s = 1\n", "round_s=-1.*line 2.*tick_s=-1.*line 3"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_unit(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_settings(text, "here")


def test_the_reference_describes_every_key():
    page = reference()
    assert "| `round_s` | number above 0 | `60.0` | Seconds from one round to the next. |" in page
    assert "| `partitions` | list of text | **must be given** |" in page
    for line in page.splitlines():
        if line.startswith("| `"):
            assert not line.endswith("|  |"), f"{line} has no description"
            assert "| any |" not in line, f"{line} has no type"


def test_config_check_names_each_mistake(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text("[daemon]\nround_s = 5\n")
    good = CliRunner().invoke(make_app(), ["config", "check", str(path)])
    assert (good.exit_code, good.output.strip()) == (0, f"{path}: ok")
    path.write_text("[daemon]\nround_s = 0\n")
    assert isinstance(CliRunner().invoke(make_app(), ["config", "check", str(path)]).exception, ConfigError)


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
def test_invalid_limits_are_named_with_their_key(text, words):
    with pytest.raises(ConfigError, match=words) as error:
        parse_settings(f"[limits]\n{text}\n", "here")
    assert str(error.value).startswith("here: [limits] ")


def test_the_daemon_names_invalid_settings_and_exits_with_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(daemon, "configure_logging", lambda log_format, writes: None)  # it is for a whole process
    path = tmp_path / "penstock.toml"
    assert daemon.main(["--config", str(path)]) == 2
    assert "No such file" in capsys.readouterr().err
    path.write_text("[daemon]\ncluster = 'kubernetes'\n")
    assert daemon.main(["--config", str(path), "--check"]) == 2
    assert "installed are simulated, slurm" in capsys.readouterr().err
    path.write_text("[daemon]\ncluster = 'simulated'\n[policy]\nstages = ['fifo']\n")
    assert daemon.main(["--config", str(path), "--check"]) == 2
    assert "'fifo' is a policy, not a stage" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="'fifo' is a policy, not a stage"):
        CliRunner().invoke(make_app(), ["config", "check", str(path)], standalone_mode=False, catch_exceptions=False)
    path.write_text(
        "[daemon]\ncluster = 'simulated'\nstate_dir = '%s'\n[policy]\nname = 'sai'\n" % (tmp_path / "state")
    )
    assert daemon.main(["--config", str(path)]) == 2
    assert "the policies are antman, fifo, " in capsys.readouterr().err


def test_check_shows_the_cluster(tmp_path, capsys):
    path = tmp_path / "penstock.toml"
    path.write_text("[daemon]\ncluster = 'simulated'\n[simulated]\nnodes = 't4:2x4'\n")
    assert daemon.main(["--config", str(path), "--check"]) == 0
    assert "2 nodes, 8 GPUs of t4" in capsys.readouterr().out
    assert load_settings(path).source == str(path)


def test_a_table_of_pairs_is_checked_with_the_settings(tmp_path, capsys):
    path, table = tmp_path / "penstock.toml", tmp_path / "pairs.json"
    path.write_text(f"[daemon]\ncluster = 'simulated'\npairs = '{table}'\n[simulated]\nnodes = 't4:1x4,a100:1x4'\n")
    for text, words in (
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"t4": {"net": {"net": [8, 8]}}}', "t4, net beside net: the rate alone is missing"),
        ('{"pairs": []}', "has no pairs"),
    ):
        if text is not None:
            table.write_text(text)
        assert daemon.main(["--config", str(path), "--check"]) == 2
        told = capsys.readouterr().err
        assert words in told
        assert "[daemon] pairs: " in told
        assert "or remove the setting" in told
        with pytest.raises(ConfigError, match="pairs"):
            CliRunner().invoke(
                make_app(), ["config", "check", str(path)], standalone_mode=False, catch_exceptions=False
            )
    table.write_text('{"t4": {"net": {"null": 10, "net": [8, 8]}}}')
    assert daemon.main(["--config", str(path), "--check"]) == 0
    assert "has some on t4; it has none on a100" in capsys.readouterr().out
    assert CliRunner().invoke(make_app(), ["config", "check", str(path)]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[daemon]\nkeep_rounds = 9\n", "'keep_rounds' is not a setting any more: the value is always 50000.*line 2"),
        (
            "[daemon]\nkeep_hourly_days = 9\n",
            "'keep_hourly_days' is not a setting any more: .* for `keep_days`.*line 2",
        ),
        ("[api]\nburst = 9\n", "\\[api\\] 'burst' is not a setting any more: the value is always 500"),
        ("[agent]\ngpu_time = 'nvml'\n", "'gpu_time' is not a setting any more: NVIDIA's driver counts"),
        ("[agent]\ngone = {}\n", "unknown key 'gone'"),
    ],
)
def test_a_key_of_earlier_versions_says_what_happens_instead(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_settings(text, "here")
