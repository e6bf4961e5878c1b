"""`penstock simulate run` as a user meets it."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from penstock_profiles.sensitivity import Sensitivity, SensitivityProfile, SensitivityStore
from penstock_scheduler.cli import make_app
from penstock_scheduler.cli import simulation as command
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.simulator import results
from tests.scheduler.simulator.toy import write_profiles

JOBS = "id,submit_s,gpus,model\na,0,1,toy\nb,100,4,toy\nc,150,2,toy\n"


def penstock_simulate(folder, *argv: object, cluster: str = "t4:2x4", jobs: str = JOBS) -> Result:
    if not (folder / "p").is_dir():
        write_profiles(folder / "p")
    (folder / "jobs.csv").write_text(jobs)
    own = ["--cluster", cluster, "--workload", folder / "jobs.csv", "--profiles", folder / "p"]
    result = CliRunner().invoke(make_app(), ["simulate", "run", *map(str, own), *map(str, argv)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """(what was said, folder) of two policies over two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    out = folder / "out"
    return penstock_simulate(folder, "--policy", "sia,fifo", "--seeds", 2, "--out", out, "--prices", "t4=1").output, out


def test_policies_side_by_side(compared):
    said, out = compared
    assert "sia" in said
    told = json.loads((out / "summary.json").read_text())
    assert list(told["policies"]) == ["sia", "fifo"]
    assert [seed["seed"] for seed in told["policies"]["fifo"]["seeds"]] == [0, 1]
    assert told["policies"]["fifo"]["ci95"]["avg_jct_h"] is not None
    with (out / "jobs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 3
    assert {row["policy"] for row in rows} == {"sia", "fifo"}
    assert (out / "rounds.csv").read_text().startswith("policy,seed,time_s,jobs,running")


def test_the_policy_of_the_settings_file_decides_without_policy(tmp_path):
    (tmp_path / "site.toml").write_text('[policy]\nname = "fifo"\n[policy.las]\nbackfill = "easy"\n')

    def policies(*argv: object) -> list[str]:
        said = penstock_simulate(tmp_path, "--json", *argv).stdout
        return list(json.loads(said)["policies"])

    config = ("--config", tmp_path / "site.toml")
    assert policies(*config) == ["fifo"]
    assert policies(*config, "--policy", "las") == ["las"]
    assert policies() == ["sia"]
    with pytest.raises(ConfigError, match="--stage refines policies given by name"):
        penstock_simulate(tmp_path, *config, "--stage", "synergy-tune")


def test_cpus_and_memory_are_given_out_by_sensitivity(tmp_path):
    """8 CPUs on 4 GPUs: a part of 2. The image model is twice as fast with 5: an hour's work and 30 s of starting are 1830 s."""
    table = Sensitivity(1, (2, 5), (1000,), ((1.0,), (2.0,)))
    SensitivityStore(tmp_path / "profiles").save(SensitivityProfile("image", (table,)))
    jobs = "id,submit_s,gpus,duration_s,sensitivity\n1,0,1,3600,image\n2,0,1,3600,\n"
    proportional = tmp_path / "proportional.toml"
    proportional.write_text('[policy]\nname = "fifo"\nstages = ["proportional"]\n')
    policies = ("--policy", f"fifo,{proportional}", "--stage", "synergy-tune")
    where = ("--sensitivities", tmp_path / "profiles", "--out", tmp_path / "out")
    result = penstock_simulate(tmp_path, *policies, *where, cluster="t4:1x4:8c:8g", jobs=jobs)
    assert "fifo+synergy-tune " in result.output, "whole, also where there is no terminal"
    with (tmp_path / "out" / "jobs.csv").open() as file:
        jct_s = {(row["policy"], row["id"]): float(row["jct_s"]) for row in csv.DictReader(file)}
    assert jct_s == {
        ("fifo+synergy-tune", "1"): 1830.0,
        ("fifo+synergy-tune", "2"): 3630.0,
        ("fifo+proportional", "1"): 3630.0,
        ("fifo+proportional", "2"): 3630.0,
    }
    with (tmp_path / "out" / "rounds.csv").open() as file:
        held = [(int(row["cpus_held"]), int(row["memory_mb_held"])) for row in csv.DictReader(file)]
    assert max(held) == (5 + 2, 1000 + 2000)


def test_tables_as_parquet_say_the_same_as_csv(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    penstock_simulate(tmp_path, "--policy", "fifo", "--out", tmp_path / "c")
    result = penstock_simulate(tmp_path, "--policy", "fifo", "--out", tmp_path / "p", "--parquet")
    assert "jobs.parquet" in result.output
    for table in ("jobs", "rounds"):
        with (tmp_path / "c" / f"{table}.csv").open() as file:
            expected = list(csv.DictReader(file))
        rows = parquet.read_table(tmp_path / "p" / f"{table}.parquet").to_pylist()
        assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows] == expected


def test_parquet_without_pyarrow_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "parquet_is_there", lambda: False)
    with pytest.raises(ConfigError, match="needs pyarrow"):
        penstock_simulate(tmp_path, "--out", tmp_path / "out", "--parquet")
    assert not (tmp_path / "out").exists()


def test_json_is_one_object_and_the_same_again(tmp_path):
    def told():
        document = json.loads(penstock_simulate(tmp_path, "--policy", "sia", "--json").stdout)
        for figures in document["policies"].values():
            for part in (figures["mean"], figures["ci95"], *figures["seeds"]):
                del part["cpu_s"]
        return document

    assert told() == told()


def test_a_cluster_may_be_a_file(tmp_path):
    (tmp_path / "cluster.txt").write_text("# ours\nt4:1x4  # old\n\nt4:1x8\n")
    result = penstock_simulate(tmp_path, "--json", cluster=str(tmp_path / "cluster.txt"))
    assert json.loads(result.stdout)["cluster"] == "t4:1x4,t4:1x8"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"jobs": "id,submit_s,gpus,model\na,-1,1,toy\n"},
            r"jobs\.csv, line 2: found submit_s=-1\.0; expected seconds",
        ),
        ({"jobs": "id,submit_s,gpus,model\na,0,1,toy\na,0,1,toy\n"}, "line 3: found job .a., which is in line 2"),
        ({"jobs": "id,submit_s,model\na,0,toy\n"}, "line 1"),
        ({"jobs": "id,submit_s,gpus,model\na,0,1,new\n"}, "found the model 'new'; expected one of"),
        ({"jobs": "id,submit_s,gpus,model\na,0,9,toy\n"}, "found a need of 9 GPUs of t4; expected at most the 8"),
        ({"cluster": "t4:2"}, "write TYPE:NODESxGPUS"),
        ({"cluster": "nowhere.txt"}, "neither a spec such as t4:6x4,a100:2x8 nor a file"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        penstock_simulate(tmp_path, "--out", tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--policy", "sia,fi"), "unknown policy 'fi'; the policies are antman, fifo.*sia, sia:artifact"),
        (("--policy", ","), "names no policy"),
        (("--disturb", "mtbf=1"), "--disturb: unknown 'mtbf'; the faults are estimation_error, "),
        (("--prices", "t4:1"), "--prices: 't4:1' is not NAME=NUMBER"),
        (("--disturb", "interference=2"), "interference=2.0 is out of its range"),
    ],
)
def test_wrong_options_are_named(tmp_path, argv, words):
    with pytest.raises(ConfigError, match=words):
        penstock_simulate(tmp_path, *argv)


SHARING = "id,submit_s,gpus,duration_s,kind\na,0,1,6000,net\nb,0,1,6000,net\n"


def pair_table(folder, share: float = 0.8) -> str:
    """On a p100 two nets have this share of their speed each; on a k80 no net runs."""
    table = {"p100": {"net": {"null": 10.0, "net": [10 * share, 10 * share]}}, "k80": {"net": {"null": 0.0}}}
    (folder / "pairs.json.gz").write_bytes(gzip.compress(json.dumps(table).encode()))
    return str(folder / "pairs.json.gz")


def test_jobs_share_under_a_policy_that_lets_them(tmp_path):
    """One GPU, 6000 s each. Under fifo b waits; gandiva profiles each, and then both run at 0.8: 60 + 60 + 11940 / 1.6 s."""
    staged = tmp_path / "staged.toml"
    staged.write_text('[policy]\nname = "fifo"\nstages = ["gandiva-share"]\n')
    policies = ("--policy", f"fifo,gandiva,{staged}", "--out", tmp_path / "out")
    own = ("--pairs", pair_table(tmp_path), "--pair-types", "t4=p100", "--agents", "switch_s=0")
    result = penstock_simulate(tmp_path, *policies, *own, cluster="t4:1x1", jobs=SHARING)
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    fifo, gandiva, stage = (told["policies"][name]["mean"] for name in ("fifo", "gandiva", "fifo+gandiva-share"))
    assert fifo["makespan_h"] * 3600 == pytest.approx(12_060)
    assert gandiva["makespan_h"] * 3600 == pytest.approx(60 + 60 + 11_940 / 1.6, rel=0.02)
    assert stage["makespan_h"] < fifo["makespan_h"]
    assert fifo["feedback_min"] == pytest.approx((90 + 6030 + 90) / 2 / 60)
    assert gandiva["feedback_min"] < 4
    assert (fifo["packs"], gandiva["packs"], gandiva["packs_at_a_loss"]) == (None, 1, 0)
    assert gandiva["suspends_per_job"] >= 0.5
    assert gandiva["queue_h"] * 3600 == pytest.approx(60 / 2), "one is suspended while the other is profiled"
    assert gandiva["utilisation"] <= 1 < gandiva["gpu_h_per_job"] * 2 / gandiva["makespan_h"], (
        "a shared GPU counts once"
    )
    assert f"Pairs of jobs: {own[1]}" in result.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Pairs of jobs that ran on one GPU at once" in page
    with (tmp_path / "out" / "jobs.csv").open() as file:
        resumes = [int(row["resumes"]) for row in csv.DictReader(file) if row["policy"] == "gandiva"]
    assert sum(resumes) == gandiva["suspends_per_job"] * 2


def test_unknown_pairs_gain_nothing(tmp_path):
    result = penstock_simulate(tmp_path, "--policy", "gandiva", "--json", cluster="t4:1x1", jobs=SHARING)
    figures = json.loads(result.stdout)["policies"]["gandiva"]["mean"]
    assert (figures["packs"], figures["packs_at_a_loss"]) == (1, 0), "as much as in time slices"
    assert "No pairs of jobs are known (--pairs)" in result.stderr
    assert "The utilisation of 2 of 2 jobs is unknown (net x2): they are assumed to use all of a GPU" in result.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ("--policy", "fifo", "--pairs", "FILE"),
            "--pairs is for policies that let jobs share GPUs, and none of fifo does",
        ),
        (("--policy", "gandiva", "--draw-kinds"), "--draw-kinds applies to the table of --pairs; give --pairs, too"),
        (("--policy", "gandiva", "--pairs", "FILE"), "no pairs on t4; it has p100: say which .* --pair-types t4=p100"),
        (("--policy", "gandiva", "--pairs", "FILE", "--pair-types", "t4=v100"), "'t4=v100' is not TYPE=TYPE of the cl"),
        (("--policy", "gandiva", "--pairs", "none.json"), "--pairs=none.json: No such file"),
        (("--policy", "gandiva", "--pairs", "jobs.csv"), "jobs.csv: not JSON"),
        (
            ("--policy", "gandiva", "--agents", "slice=3"),
            "--agents: unknown 'slice'; there are noise, step_noise and switch_s",
        ),
        (("--policy", "gandiva", "--agents", "noise=-1"), "--agents: noise=-1: .*greater than or equal to 0"),
        (
            ("--policy", "gandiva", "--pairs", "FILE", "--pair-types", "t4=p100"),
            "none of the jobs' kinds, such as 'toy'; it has net, …: name them in .*`kind`, or draw them",
        ),
    ],
)
def test_what_is_wrong_about_sharing_is_said_before_anything_runs(tmp_path, argv, words):
    own = {"FILE": pair_table(tmp_path), "jobs.csv": str(tmp_path / "jobs.csv")}
    with pytest.raises(ConfigError, match=words):
        penstock_simulate(tmp_path, *(own.get(word, word) for word in argv), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_line_of_a_cluster_file_is_named(tmp_path):
    (tmp_path / "cluster.txt").write_text("t4:1x4\nt4;1x8\n")
    with pytest.raises(ConfigError, match=r"cluster\.txt, line 2: part 1"):
        penstock_simulate(tmp_path, cluster=str(tmp_path / "cluster.txt"))


def test_ctrl_c_leaves_what_was_computed(tmp_path, monkeypatch):
    """It comes while the second policy runs: the first is whole, the second as far as it got, and the third never began."""
    whole, ran = results.simulate_policy, []

    def interrupting(scenario, choice, settings, driving, on_tick, agents, cloud):
        ran.append(str(choice))

        def stop(simulation):
            if str(choice) == "fifo":
                raise KeyboardInterrupt
            on_tick(simulation)

        return whole(scenario, choice, settings, driving, on_tick=stop)

    monkeypatch.setattr(results, "simulate_policy", interrupting)
    result = penstock_simulate(tmp_path, "--policy", "sia,fifo,sia:artifact", "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert ran == ["sia", "fifo"]
    told = json.loads((tmp_path / "out" / "summary.json").read_text())["policies"]
    assert told["sia"]["seeds"][0]["ended"] == 3
    assert told["fifo"]["seeds"][0]["interrupted"]


def test_the_page_opens_offline(compared):
    """All in one file: nothing is fetched, every policy is there, and every tag that must be closed is."""
    page = (compared[1] / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    assert page.count("<svg") == page.count("</svg>") == 7
    for words in ("sia: a job takes", "than with fifo", "sia: the job on each GPU", "over 2 seeds"):
        assert words in page


TRACE = "id,submit_s,gpus,duration_s\n" + "".join(
    f"{i},{i * 400},{1 + i % 4},{1200 + 300 * (i % 7)}\n" for i in range(60)
)


def test_what_a_waiting_budget_buys(tmp_path):
    out, jobs = tmp_path / "out", "".join(TRACE.splitlines(keepends=True)[:31])
    argv = ("--cloud", "usd_per_gpu_h=2.5", "--frontier", "--out", out)
    result = penstock_simulate(tmp_path, *argv, cluster="t4:1x4", jobs=jobs)
    assert "compute-wait, out of order" in result.output
    points = json.loads((out / "frontier.json").read_text())["points"]
    assert {point["way"] for point in points} == {"compute-wait, out of order", "compute-wait, EASY", "constant-wait"}
    none, most = (
        next(p for p in points if p["way"] == "compute-wait, out of order" and p["percent"] == percent)
        for percent in (0, 100)
    )
    assert most["usd"] < none["usd"]
    assert most["avg_jct_h"] > none["avg_jct_h"]
    page = (out / "frontier.html").read_text()
    assert page.count("<circle") == len(points)


def test_a_cloud_behind_a_policy(tmp_path):
    """The table says what the cloud costs, also where the policy and `[cloud]` come from a settings file."""
    file = tmp_path / "site.toml"
    file.write_text(
        """[policy]
name = "fifo"
[cloud]
site = "0b6a1c1e-9c1f-4d55-8f3e-6c1d9a3f2b70"
name = "physics"
by_default = true
wait = "no-wait"
budget = { site = { usd_total = 20.0 } }
"""
    )
    argv = ["--cloud", "usd_per_gpu_h=2.5", "--json"]
    free = json.loads(penstock_simulate(tmp_path, *argv, "--policy", "fifo", cluster="t4:1x4", jobs=TRACE).stdout)
    capped = json.loads(penstock_simulate(tmp_path, *argv, "--config", file, cluster="t4:1x4", jobs=TRACE).stdout)
    unbound, bound = (document["policies"]["fifo"]["mean"] for document in (free, capped))
    assert unbound["cloud_usd"] > 20
    assert unbound["ended"] == bound["ended"] == 60
    assert 0 < bound["cloud_usd"] <= 20, "the budget of the settings file is hard in a simulation, too"
    assert unbound["cloud_usd"] == pytest.approx(2.5 * unbound["cloud_gpu_h"], rel=0.01)
    argv[1] += ",nodes=1,suspend_s=3600"
    few = json.loads(penstock_simulate(tmp_path, *argv, "--policy", "fifo", cluster="t4:1x4", jobs=TRACE).stdout)
    assert 0 < few["policies"]["fifo"]["mean"]["cloud_usd"] < 0.8 * unbound["cloud_usd"], "one node of each kind"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cloud", "dollars=2"], "unknown 'dollars'"),
        (["--cloud", "wait=no-wait"], "needs the price"),
        (["--cloud", "usd_per_gpu_h=-1"], "not a number above 0"),
        (["--cloud", "usd_per_gpu_h=1,boot_s=never"], "boot_s=never is not a number above 0"),
        (["--cloud", "usd_per_gpu_h=1,nodes=0.5"], "nodes=0.5 is not a number of at least 1"),
        (["--cloud", "usd_per_gpu_h=1,wait=forever"], "wait"),
        (["--cloud", "usd_per_gpu_h=2", "--cluster", "t4:1x4,a100:1x8"], "gpu_type=t4"),
        (["--frontier"], "add --cloud"),
    ],
)
def test_what_is_wrong_with_a_cloud(tmp_path, argv, words):
    with pytest.raises(ConfigError, match=words):
        penstock_simulate(tmp_path, *argv, jobs=TRACE)


@pytest.mark.parametrize("words", [["--version"], ["simulate", "run", "--help"]])
def test_what_answers_at_once_imports_no_other_command(words):
    """All commands together take seconds to import, most of them for these."""
    program = (
        "import contextlib, sys; from penstock_scheduler.cli import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print('slow:', sorted({'numpy', 'scipy', 'sqlalchemy'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert told.stdout.endswith("slow: []\n"), told.stdout
