"""The wheel, installed into an empty environment without the checkout: a Slurm, a job, and nothing left after the removal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback import wait_for
from penstock_loopback.fixtures import skip_without_slurm
from penstock_scheduler import __version__

ROOT = Path(__file__).parent.parent.parent
PROVIDER = ROOT / "airflow_provider/airflow_provider_penstock"

# About two minutes, and 150 MB from the package index: `.ci/run` runs them as a part of its own.
pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel of the committed HEAD, which `script/package` builds."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: script/package builds the committed HEAD")
    done = subprocess.run([ROOT / "script/package"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ROOT / f"dist/penstock_scheduler-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def tools(wheel: Path) -> Path:
    """The wheel of the tools for developers, of the same commit."""
    return wheel.with_name(f"penstock_loopback-{__version__}-py3-none-any.whl")


class Machine:
    """A home folder whose only Penstock is the installed wheel, and the tools that start a Slurm for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packages = Path()
        inherited = ("PIP_", "SSL_", "REQUESTS_", "LANG")
        self.environment = {name: value for name, value in os.environ.items() if name.startswith(inherited)}
        self.environment |= {"HOME": str(folder), "PATH": f"{folder}/env/bin:/usr/local/sbin:/usr/local/bin:"}
        self.environment["PATH"] += "/usr/sbin:/usr/bin:/sbin:/bin"

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=900
        )

    def command(self, *words: str | Path) -> str:
        """A command's output. It fails the test if the command fails."""
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def source(self, lines: str) -> None:
        """Do what a shell would do with lines such as `export NAME=VALUE`."""
        for line in lines.splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            self.environment[name] = value


@pytest.fixture(scope="module")
def machine(wheel: Path, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    skip_without_slurm(accounting=False)
    machine = Machine(tmp_path_factory.mktemp("machine"))
    subprocess.run([sys.executable, "-m", "venv", machine.folder / "env"], check=True)
    pip = ("pip", "install", "-q", "--disable-pip-version-check", "--no-deps")
    machine.command(*pip, "--require-hashes", "--only-binary=:all:", "-r", wheel.parent / "requirements.lock")
    machine.command(*pip, wheel, tools)
    machine.packages = Path(machine.command("python", "-c", "import penstock_slurm; print(penstock_slurm.__file__)"))
    machine.packages = machine.packages.parent.parent
    return machine


@pytest.fixture
def slurm(machine: Machine) -> Iterator[Path]:
    """The folder of a Slurm that `penstock loopback` starts."""
    machine.command("penstock", "loopback", "up", "--dir", "slurm", "--nodes", "t4:1x4", "--no-agents")
    try:
        machine.source(machine.command("penstock", "loopback", "env", "--dir", "slurm"))
        yield machine.folder / "slurm"
    finally:
        print(machine.command("penstock", "loopback", "down", "--dir", "slurm"))


@pytest.fixture
def settings(machine: Machine) -> Path:
    path = machine.folder / "penstock.toml"
    path.write_text(
        f'[daemon]\nround_s = 1.0\nstate_dir = "{machine.folder}/state"\n'
        f'[slurm]\npartitions = ["all"]\nspool_dir = "{machine.folder}/spool"\n'
    )
    return path


def test_the_lock_is_complete_but_for_the_large_solver(machine: Machine) -> None:
    done = machine.run("pip", "check")
    said = [line for line in done.stdout.splitlines() if "cbcbox" not in line]
    assert said in ([], ["No broken requirements found."]), done.stdout


def test_the_environment_is_the_wheels_and_has_no_large_solver(machine: Machine) -> None:
    assert machine.command("penstock", "--version").strip() == f"penstock {__version__}"
    assert machine.packages.is_relative_to(machine.folder)
    assert not list(machine.packages.glob("cbcbox*"))
    for name in ("spank/penstock.c", "spank/version.h", "lua/penstock.lua", "systemd/penstockd.service"):
        assert (machine.packages / "penstock_slurm" / name).is_file()


def test_a_job_runs_with_the_flags_and_nothing_is_left_in_slurm(machine: Machine, slurm: Path, settings: Path) -> None:
    for name in ("job_submit.lua", "penstock.lua", "penstock_site.lua"):
        (slurm / "etc" / name).unlink(missing_ok=True)  # a loopback cluster has the flags already
    before = {path: path.read_bytes() for path in (slurm / "etc").iterdir() if path.is_file()}
    options = ("--config", str(settings), "--apply")
    cron = ("--schedule", "cron", "--schedule-dir", str(machine.folder))
    print(machine.command("penstock", "slurm", "install", *options, "--prefix", f"{machine.folder}/lib", *cron))

    log = (machine.folder / "penstockd.log").open("w")
    daemon = subprocess.Popen(
        ["penstockd", "--config", settings], cwd=machine.folder, env=machine.environment, stderr=log
    )
    try:
        train = f"{machine.folder}/env/bin/penstock-emulated-trainer --family bert-squad --work 2e3 --checkpoint-dir ."
        machine.environment["PENSTOCK_SPOOL"] = f"{machine.folder}/spool"
        flags = ("--adaptive", "--max-gpus=4", "--model-family=bert-squad", "--output=job.out")
        job = machine.command("sbatch", "--parsable", *flags, f"--wrap=exec {train}").strip()
        wait_for(
            lambda: "JobState=COMPLETED" in machine.command("scontrol", "show", "job", job),
            400,
            "the job to end",
            details=lambda: (machine.folder / "penstockd.log").read_text()[-3000:],
        )
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0
        log.close()
    assert "progress=2000 ends status=0" in (machine.folder / "job.out").read_text()

    machine.command("penstock", "slurm", "uninstall", *options)
    after = {path: path.read_bytes() for path in (slurm / "etc").iterdir() if path.is_file()}
    assert {path.name for path in after if path not in before} <= {"penstock-install.json"}
    assert {path: after.get(path) for path in before} == before


def test_the_wheel_of_sites_has_no_tools_for_developers_and_names_their_package(machine: Machine, tools: Path) -> None:
    machine.command("pip", "uninstall", "-q", "-y", "penstock-loopback")
    try:
        ours = [path for package in machine.packages.glob("penstock_*") for path in (package, *package.rglob("*"))]
        assert len(ours) > 500
        left = [path for path in ours if re.search("loopback|demo|playground", path.name)]
        assert left == []
        listed = machine.command("penstock", "--help").split()
        assert not {"demo", "loopback", "playground"} & {*listed}
        for name in ("demo", "loopback", "playground"):
            done = machine.run("penstock", name)
            assert done.returncode == 2
            assert "penstock-loopback" in done.stderr
    finally:
        machine.command("pip", "install", "-q", "--disable-pip-version-check", "--no-deps", tools)
    assert {"demo", "loopback", "playground"} <= {*machine.command("penstock", "--help").split()}
    assert "28 of 28" in machine.command("penstock", "demo", "--simulated", "--out", "report")


def test_pip_removes_every_file_of_ours(machine: Machine, wheel: Path, tools: Path) -> None:
    machine.command("pip", "uninstall", "-q", "-y", "penstock-scheduler", "penstock-loopback")
    try:
        left = [path for path in machine.packages.glob("*penstock*") if any(each.is_file() for each in path.rglob("*"))]
        assert left == []
        assert list((machine.folder / "env/bin").glob("penstock*")) == []
    finally:
        machine.command("pip", "install", "-q", "--disable-pip-version-check", "--no-deps", wheel, tools)


def test_the_sdist_has_what_the_wheel_is_built_from(wheel: Path) -> None:
    with tarfile.open(wheel.with_name(f"penstock_scheduler-{__version__}.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "slurm_plugin/spank/penstock.c", "script/test", "tests/conftest.py"} <= names


def test_the_wheel_of_the_provider_for_airflow_is_complete(wheel: Path) -> None:
    (built,) = wheel.parent.glob("airflow_provider_penstock-*.whl")
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
        metadata, points = (archive.read(f"{info}{name}").decode() for name in ("METADATA", "entry_points.txt"))
        licence = archive.read(f"{info}licenses/LICENSE")
    there = {path.relative_to(PROVIDER.parent).as_posix() for path in PROVIDER.rglob("*") if path.suffix != ".pyc"}
    assert {name for name in there if not (PROVIDER.parent / name).is_dir()} <= names
    assert "airflow_provider_penstock/py.typed" in names
    assert not [name for name in names if name.startswith("tests")]
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert "PenstockSubmitOperator(" in metadata, "the README is the project's page on the index"
    assert "provider_info = airflow_provider_penstock:get_provider_info" in points
    kinds = (
        "Framework :: Apache Airflow :: Provider",
        "Intended Audience :: Developers",
        "Topic :: System :: Monitoring",
    )
    assert [kind for kind in kinds if f"Classifier: {kind}\n" not in metadata] == []
    assert "airflow-provider" in metadata.partition("Keywords: ")[2].splitlines()[0]
