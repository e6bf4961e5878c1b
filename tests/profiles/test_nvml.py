"""`penstock_profiles.nvml` through the real pynvml, on a stand-in for NVIDIA's driver (see fake_nvml.c)."""

import ctypes.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_profiles.gpus import load_gpus
from penstock_profiles.nvml import Device, Process, Reading, Sample, Use, by_job, device_type

from . import fake_nvml
from .fake_nvml import TWO_GPUS

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")

SAY = """
import dataclasses, json, os, pathlib
from penstock_profiles.gpus import load_gpus
from penstock_profiles.nvml import *
scenario = pathlib.Path(os.environ["FAKE_NVML"])
def say(**facts):
    print(json.dumps(facts, default=dataclasses.asdict))
"""
ALL = (
    SAY + "with Nvml() as nvml:\n    say(devices=nvml.devices, driver=nvml.driver, **dataclasses.asdict(nvml.sample()))"
)
WHY = SAY + "try:\n    Nvml().__enter__()\nexcept NoNvml as error:\n    say(reason=error.reason, text=str(error))"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def ask(library: Path, tmp_path: Path):
    """Runs a program on a machine with this driver in this state; returns its output, one dictionary per line."""

    def run(program: str, scenario: str, library: Path = library):
        file = tmp_path / "scenario"
        file.write_text(scenario)
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=fake_nvml.environment(library, file), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def without(text: str, key: str) -> str:
    kept = [line for line in text.splitlines() if not line.startswith(key + " ")]
    assert len(kept) < len(text.splitlines())
    return "\n".join(kept) + "\n"


def test_lists_gpus_and_reads_them(ask):
    (said,) = ask(ALL, TWO_GPUS + "0.pids 100:900 200:-\n0.shares 100:60\n0.stamp 5\n")
    a100 = {
        "index": 0,
        "uuid": "GPU-aaaa",
        "name": "NVIDIA A100-SXM4-40GB",
        "gpu_type": "a100",
        "memory_mb": 40960.0,
        "parent": None,
    }
    assert said["driver"] == "550.54"
    assert [gpu["gpu_type"] for gpu in said["devices"]] == ["a100", "t4"]
    assert said["devices"][0] == a100
    assert said["lost"] == []
    assert said["readings"][0] == {
        "device": a100,
        "used_mb": 1024.0,
        "utilisation": 0.75,
        "memory_utilisation": 0.2,
        # A process whose memory the driver does not tell has None, and one that it leaves out of the shares idled.
        "processes": [
            {"pid": 100, "used_mb": 900.0, "utilisation": 0.6},
            {"pid": 200, "used_mb": None, "utilisation": 0.0},
        ],
        "xids": [],
    }
    assert said["readings"][1]["processes"] == []
    assert said["readings"][1]["utilisation"] == 0.0


def test_shares_of_a_period_are_reported_once(ask):
    """The second sample falls into the same period, the third into a new one."""
    program = SAY + (
        "with Nvml() as nvml:\n"
        "    for stamp in (5, 5, 6):\n"
        "        scenario.write_text(scenario.read_text() + f'0.stamp {stamp}\\n')\n"
        "        say(share=nvml.sample().readings[0].processes[0].utilisation)\n"
        "        scenario.write_text(scenario.read_text().replace(f'0.stamp {stamp}\\n', ''))\n"
    )
    assert [said["share"] for said in ask(program, TWO_GPUS + "0.pids 7:1\n0.shares 7:50\n")] == [0.5, None, 0.5]


def test_a_sites_own_catalogue(ask, tmp_path: Path):
    own = tmp_path / "gpus.toml"
    own.write_text(
        '[turing]\nvendor = "nvidia"\narchitecture = "turing"\nmemory_gb = 16\nproducts = ["Tesla T4"]\nsource = "us"'
    )
    program = (
        f"from penstock_profiles.gpus import load_gpus\nwith Nvml(load_gpus(pathlib.Path({str(own)!r}))) as nvml:\n"
    )
    (said,) = ask(SAY + program + "    say(types=[device.gpu_type for device in nvml.devices])", TWO_GPUS)
    assert said["types"] == ["a100", "turing"]


def test_mig_devices_are_devices_without_utilisation(ask):
    slices = "".join(
        f"0.m{i}.name NVIDIA A100-SXM4-40GB MIG 3g.20gb\n0.m{i}.uuid MIG-{i}\n0.m{i}.total 20096\n0.m{i}.used {i}\n"
        f"0.m{i}.busy 99\n0.m{i}.pids 10{i}:5\n0.m{i}.shares 10{i}:99\n"
        for i in range(2)
    )
    (said,) = ask(ALL, TWO_GPUS + "0.mig 2\n" + slices)
    assert [(gpu["uuid"], gpu["parent"], gpu["gpu_type"]) for gpu in said["devices"]] == [
        ("MIG-0", "GPU-aaaa", "a100_3g.20gb"),
        ("MIG-1", "GPU-aaaa", "a100_3g.20gb"),
        ("GPU-tttt", None, "t4"),
    ]
    second = said["readings"][1]
    assert (second["device"]["index"], second["device"]["memory_mb"], second["used_mb"]) == (0, 20096.0, 1.0)
    assert (second["utilisation"], second["memory_utilisation"]) == (None, None)
    assert second["processes"] == [{"pid": 101, "used_mb": 5.0, "utilisation": None}]


def test_a_gpu_in_mig_mode_without_mig_devices_can_run_nothing(ask):
    (said,) = ask(ALL, TWO_GPUS + "0.mig -1\n")
    assert [gpu["uuid"] for gpu in said["devices"]] == ["GPU-tttt"]


@pytest.mark.parametrize(
    ("happens", "reason", "xids"),
    [
        ("0.error 15", "GPU is lost", []),
        ("0.error 16", "GPU requires restart", []),
        ("0.error 27", "not ready", []),
        ("0.xid 79", "XID 79: the GPU has fallen off the bus", [79]),
    ],
)
def test_a_gpu_lost_in_mid_run_is_reported_and_the_other_still_read(ask, happens: str, reason: str, xids: list[int]):
    program = SAY + (
        "with Nvml() as nvml:\n"
        "    say(**dataclasses.asdict(nvml.sample()))\n"
        f"    scenario.write_text({happens + chr(10)!r} + scenario.read_text())\n"
        "    for _ in range(2):\n"
        "        say(**dataclasses.asdict(nvml.sample()))\n"
    )
    before, *after = ask(program, TWO_GPUS)
    assert (len(before["readings"]), before["lost"]) == (2, [])
    for said, codes in zip(after, (xids, []), strict=True):
        assert [reading["device"]["uuid"] for reading in said["readings"]] == ["GPU-tttt"]
        assert said["lost"] == [{"index": 0, "uuid": "GPU-aaaa", "reason": reason, "xids": codes}]


def gpus(count: int) -> str:
    """This many V100s."""
    return f"count {count}\n" + "".join(
        f"{i}.name Tesla V100\n{i}.uuid GPU-{i}\n{i}.total 16160\n" for i in range(count)
    )


LINKS = SAY + "with Nvml() as nvml:\n    say(links=nvml.links())"

FOUR = gpus(4) + (
    "0.nvlinks 1 1 - 2\n1.nvlinks 0 0\n2.nvlinks 0 -\n3.nvlinks -\n"
    "0.over_1 10\n0.over_2 30\n0.over_3 50\n1.over_2 10\n2.over_3 40\n"
)
"""GPU 0 has two NVLinks to 1, one to 2, and one that is down. The common ancestor of 1 and 3 is not reported."""


def test_how_gpus_are_connected(ask):
    """6 plus the NVLinks, else the common ancestor on PCIe: 50 (the system) is 1, 40 (a NUMA node) 2, 10 (a switch) 5."""
    assert ask(LINKS, FOUR) == [{"links": [[0, 8, 7, 1], [8, 0, 5, 0], [7, 5, 0, 2], [1, 0, 2, 0]]}]


def test_gpus_on_an_nvswitch_are_all_connected(ask):
    """By the smaller number of links of the two. One link of GPU 1 is down; GPU 2 has none."""
    links = "0.nvlinks s s s\n1.nvlinks s s -\n2.nvlinks - - -\n0.over_1 50\n0.over_2 20\n1.over_2 0\n"
    assert ask(LINKS, gpus(3) + links) == [{"links": [[0, 8, 4], [8, 0, 6], [4, 6, 0]]}]


def test_a_driver_that_does_not_report_the_other_end_of_a_link(ask, tmp_path: Path):
    """Links to other GPUs are known by their address; those to a switch lead nowhere that is known."""
    links = "0.nvlinks 1 s\n1.nvlinks 0 s\n2.nvlinks s s\n"
    said = ask(LINKS, gpus(3) + links, fake_nvml.build(tmp_path, "-DOLD_DRIVER"))
    assert said == [{"links": [[0, 7, 0], [7, 0, 0], [0, 0, 0]]}]


def test_of_a_gpu_that_is_lost_or_hidden_no_links_are_known(ask):
    unknown = [[0, 0, 7, 1], [0, 0, 0, 0], [7, 0, 0, 2], [1, 0, 2, 0]]
    assert ask(LINKS, FOUR + "1.handle_error 4\n") == [{"links": unknown}]
    program = LINKS.replace("say(links", f"scenario.write_text({'1.error 15' + chr(10) + FOUR!r})\n    say(links")
    assert ask(program, FOUR) == [{"links": unknown}]


@pytest.mark.parametrize(
    ("scenario", "links"),
    [
        ("count 0\n", []),
        (gpus(1), [[0]]),
        (gpus(2), [[0, 0], [0, 0]]),
        (FOUR + "1.mig 1\n1.m0.name Tesla V100 MIG 1g\n1.m0.uuid MIG-0\n1.m0.total 5\n", []),
    ],
)
def test_where_nothing_is_known_of_links(ask, scenario: str, links: list[list[int]]):
    """MIG devices have no index of their own."""
    assert ask(LINKS, scenario) == [{"links": links}]


def test_an_xid_of_a_program_is_reported_once_and_loses_no_gpu(ask):
    program = SAY + (
        "with Nvml() as nvml:\n"
        "    scenario.write_text('1.xid 31\\n' + scenario.read_text())\n"
        "    for _ in range(2):\n"
        "        say(xids=[reading.xids for reading in nvml.sample().readings])\n"
    )
    assert ask(program, TWO_GPUS) == [{"xids": [[], [31]]}, {"xids": [[], []]}]


def test_an_xid_that_names_no_gpu_is_passed_over(ask):
    (said,) = ask(ALL, "stray_xid 45\n" + TWO_GPUS.replace("1.xid 0", "1.xid 31"))
    assert [reading["xids"] for reading in said["readings"]] == [[], [31]]


def test_a_gpu_that_is_lost_at_the_begin(ask):
    (said,) = ask(ALL, TWO_GPUS + "0.handle_error 15\n")
    assert [gpu["uuid"] for gpu in said["devices"]] == ["GPU-tttt"]
    assert said["lost"] == [{"index": 0, "uuid": None, "reason": "GPU is lost", "xids": []}]


def test_what_a_driver_does_not_tell_is_none(ask):
    """As of a GPU that shares the host's memory; 3 is NVML's `not supported`, 4 `no permission`."""
    scenario = without(TWO_GPUS, "0.total") + "0.busy_error 3\n0.pids_error 4\n"
    reading = ask(ALL, scenario)[0]["readings"][0]
    assert reading["device"]["memory_mb"] is None
    assert [reading[field] for field in ("used_mb", "utilisation", "memory_utilisation", "processes")] == [None] * 4


def test_a_driver_without_xid_events(ask):
    scenario = without(without(TWO_GPUS, "0.xid"), "1.xid")
    assert len(ask(ALL, scenario)[0]["readings"]) == 2


def test_an_old_drivers_list_of_processes(ask, tmp_path: Path):
    (said,) = ask(ALL, TWO_GPUS + "1.pids 9:2\n", fake_nvml.build(tmp_path, "-DOLD_DRIVER"))
    assert said["readings"][1]["processes"] == [{"pid": 9, "used_mb": 2.0, "utilisation": None}]


def test_gpus_of_other_jobs_are_left_out(ask):
    (said,) = ask(ALL, TWO_GPUS + "0.handle_error 4\n")
    assert [gpu["index"] for gpu in said["devices"]] == [1]
    assert said["lost"] == []


def test_a_driver_without_gpus_is_no_error(ask):
    (said,) = ask(ALL, "count 0\n")
    assert (said["devices"], said["readings"], said["lost"], said["driver"]) == ([], [], [], None)


@pytest.mark.parametrize(
    ("scenario", "reason", "words"),
    [
        ("init 9\n", "driver", "installed but not loaded; ask the node's admin to load it"),
        ("init 18\n", "mismatch", "different versions; reboot the node after a driver update"),
        ("init 4\n", "permission", "run this inside a job that has GPUs"),
        ("init 999\n", "other", "NVML does not work: Unknown Error"),
        (TWO_GPUS + "0.handle_error 4\n1.handle_error 4\n", "permission", "none of the 2 GPUs of this machine"),
    ],
)
def test_why_there_is_no_nvml(ask, scenario: str, reason: str, words: str):
    (said,) = ask(WHY, scenario)
    assert said["reason"] == reason
    assert words in said["text"]


def test_a_library_of_another_age(ask, tmp_path: Path):
    (tmp_path / "empty.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "empty.c"], check=True)
    (said,) = ask(WHY, "", tmp_path)
    assert (said["reason"], "too old" in said["text"]) == ("mismatch", True)


def test_without_the_package(ask):
    (said,) = ask("import sys\nsys.modules['pynvml'] = None\n" + WHY, TWO_GPUS)
    assert said["reason"] == "package"
    assert "pip install nvidia-ml-py" in said["text"]


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has NVIDIA's driver")
def test_without_a_driver():
    """The real machine, without the stand-in."""
    program = WHY.replace('os.environ["FAKE_NVML"]', '"unused"')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    said = json.loads(done.stdout)
    assert said["reason"] == "library"
    assert "libnvidia-ml.so.1" in said["text"]


def test_what_is_opened_is_closed_and_can_be_opened_again(ask, tmp_path: Path):
    log = tmp_path / "log"
    program = SAY + (
        "nvml = Nvml()\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        with nvml: 1 / 0\n"
        "    except ZeroDivisionError: pass\n"
        "scenario.write_text('0.handle_error 4\\n1.handle_error 4\\n' + scenario.read_text())\n"
        "try:\n    nvml.__enter__()\nexcept NoNvml: pass\n"
    )
    ask(program, TWO_GPUS + f"open_log {log}\n")
    assert log.read_text().split("\n") == [*(["init", "events freed", "shutdown"] * 2), "init", "shutdown", ""]


def test_importing_the_module_needs_no_nvidia_ml_py():
    code = "import sys; import penstock_profiles.nvml; assert 'pynvml' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("product", "gpu_type"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100_1g.5gb"),
        ("NVIDIA TITAN RTX", "nvidia_titan_rtx"),
        ("NVIDIA TITAN RTX MIG 1g.5gb", "nvidia_titan_rtx_1g.5gb"),
    ],
)
def test_names_the_type_as_the_catalogue_does_else_as_slurm(product: str, gpu_type: str):
    assert device_type(product, load_gpus()) == gpu_type


def reading(uuid: str, busy: float | None, *processes: Process) -> Reading:
    return Reading(Device(0, uuid, "Tesla T4", "t4", 15360.0), 999.0, busy, None, processes)


def test_use_by_job():
    """Job a is alone on G1 (two processes) and with b on G2. Pid 99 belongs to no job. On G3, a is with an unknown process."""
    sample = Sample(
        (
            reading("G1", 0.9, Process(1, 100.0, None), Process(2, 50.0, 0.1)),
            reading("G2", 0.8, Process(3, 10.0, 0.25), Process(4, 20.0, 0.25), Process(5, None, 0.3)),
            reading("G3", 0.7, Process(6, 30.0, None), Process(99, 1.0, 0.5)),
        ),
        (),
    )
    job_of = {1: "a", 2: "a", 3: "a", 4: "a", 5: "b", 6: "a"}.get
    assert by_job(sample, job_of) == {
        ("a", "G1"): Use(150.0, 0.9),
        ("a", "G2"): Use(30.0, 0.5),
        ("b", "G2"): Use(None, 0.3),
        ("a", "G3"): Use(30.0, None),
    }


def test_use_of_a_device_with_unknown_processes():
    silent = Reading(Device(0, "G", "Tesla T4", "t4", None), 1.0, 0.5, None, None)
    assert by_job(Sample((silent,), ()), lambda pid: "a") == {}


def test_gpu_time_by_process_adds_up(ask):
    """Half of half a second, then a fifth of a quarter; the third time the GPU idled for a minute before."""
    program = SAY + (
        "with Nvml() as nvml:\n"
        "    for stamp, share in ((1_000_000, 90), (1_500_000, 50), (1_750_000, 20), (61_750_000, 10)):\n"
        "        before = scenario.read_text()\n"
        "        scenario.write_text(before + f'0.stamp {stamp}\\n0.shares 7:{share}\\n')\n"
        "        say(times=[(uuid, pid, s) for (uuid, pid), s in nvml.gpu_times().items()])\n"
        "        scenario.write_text(before)\n"
    )
    said = [each["times"] for each in ask(program, TWO_GPUS + "0.pids 7:1\n")]
    seconds = [each[0][2] if each else 0.0 for each in said]
    assert seconds == pytest.approx([0.0, 0.25, 0.3, 0.4])
    assert said[-1][0][:2] == ["GPU-aaaa", 7]


def test_gpu_time_of_processes_that_are_gone_is_forgotten(ask):
    """A process uses a tenth of the GPU for 100 s, beside 500 others that end at once. No process has such a number."""
    program = SAY + (
        "with Nvml() as nvml:\n"
        "    before, counts = scenario.read_text(), []\n"
        "    for second in range(101):\n"
        "        ended = ' '.join(f'{2**22 + 5 * second + each + 1}:1' for each in range(5))\n"
        "        text = f'0.stamp {1_000_000 * (second + 1)}\\n0.shares {os.getpid()}:10 {ended}\\n'\n"
        "        scenario.write_text(before + text)\n"
        "        times = nvml.gpu_times()\n"
        "        counts.append(len(times))\n"
        "    say(seconds=times['GPU-aaaa', os.getpid()], most=max(counts))\n"
    )
    (said,) = ask(program, TWO_GPUS)
    assert said["seconds"] == pytest.approx(10.0)
    assert said["most"] <= 256 + 5


def test_gpu_time_of_mig_devices_is_unknown(ask):
    mig = "0.m0.name NVIDIA A100-SXM4-40GB MIG 3g.20gb\n0.m0.uuid MIG-0\n0.m0.total 20096\n"
    (said,) = ask(SAY + "with Nvml() as nvml:\n    say(times=nvml.gpu_times())", TWO_GPUS + "0.mig 1\n" + mig)
    assert said["times"] is None
