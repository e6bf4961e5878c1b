"""Detached runs on several nodes. The user data of all instances and the cloud runner really run, as in test_detached."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_cloud.settings import CloudSettings
from penstock_cloud.staging import MOST_NODES, OBJECTS, of_cloud_runner, of_instance
from penstock_cloud.templates import detached
from penstock_scheduler.burst.manager.offers import SIZES
from penstock_scheduler.model import Phase
from penstock_scheduler.store.sql import SqlStore
from tests.cloud.conftest import SITE
from tests.cloud.detached import DetachedSite, QuietSite, detached_site, left
from tests.cloud.faults import Ec2, Fault
from tests.cloud.hypervisor import Hypervisor
from tests.cloud.test_storm import STEPS, die_at_every_step

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="instances need curl; install it")

PAIR = "2x g5.xlarge"


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    cloud_settings: Callable[..., CloudSettings],
    store: SqlStore,
    ec2: Ec2,
    tmp_path: Path,
) -> Iterator[DetachedSite]:
    """A DetachedSite, or the class in the test's parameter."""
    with detached_site(getattr(request, "param", DetachedSite), cloud_settings, store, ec2, tmp_path) as made:
        yield made


def send(site: DetachedSite, job: str, script: str, offer: str = PAIR) -> None:
    site.script(job, "#!/bin/bash\n" + script)
    site.submit(job, max_gpus=2)
    site.send(job, offer, 10.0)


def over(site: DetachedSite, ec2: Ec2, lost: str = "") -> None:
    """The run ends, and leaves nothing behind. Of a `lost` job's run, what its other node may have written last stays."""
    site.really_until(lambda: not site.state.runs and not ec2.running(), "the run is over")
    found = left(ec2)
    if lost and any(f"/{lost}." in each and each.endswith("/output") for each in found):
        found = [each for each in found if f"/{lost}." not in each]
    assert found == [f"{SITE}/alive"]
    assert not list((site.settings.share / "detached").iterdir())
    assert not ec2.groups
    spent, owed = site.bill()
    assert spent == pytest.approx(owed, abs=1e-9)


MEETS = """#PENSTOCK input port
#PENSTOCK output results
port=$(cat port)
mkdir -p results
if [ $SLURM_NODEID = 0 ]; then
  python3 -c 'import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server: print(server.accept()[0].recv(9).decode())' \\
    $MASTER_ADDR $port
else
  until python3 -c 'import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2]))).sendall(b"met")' $MASTER_ADDR $port 2>/dev/null; do sleep 0.2; done
fi
echo "$SLURM_PROCID of $SLURM_NTASKS on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST $SLURM_TASKS_PER_NODE $MASTER_PORT"
echo "$SLURM_JOB_ID" >results/node$SLURM_NODEID
echo "by $SLURM_NODEID" >results/all
"""


def test_the_script_runs_on_each_node_and_its_nodes_find_each_other(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        (site.folder / "port").write_text(str(free.getsockname()[1]))
    send(site, "7", MEETS)
    site.really_until(lambda: "7" in site.exits, "the job ends")
    out = site.output("7")
    assert site.exits["7"] == 0, out
    first, second = out.split("penstock: output of node 1:\n")
    assert "met\n0 of 2 on 2 nodes: 127.0.0.1,127.0.0.1 1(x2) 29500\n" in first
    assert second == "1 of 2 on 2 nodes: 127.0.0.1,127.0.0.1 1(x2) 29500\n"
    assert [(site.folder / "results" / f"node{n}").read_text() for n in (0, 1)] == ["7\n", "7\n"]
    assert (site.folder / "results" / "all").read_text() == "by 0\n", "the first node's counts"
    assert len(ec2.instances()) == 2
    (fleet,) = [fields for action, fields in ec2.calls if action == "CreateFleet"]
    assert fleet["OnDemandOptions.MinTargetCapacity"] == "2"
    over(site, ec2)


def both_print(hypervisor: Hypervisor, words: str) -> bool:
    """Whether the scripts of two instances have printed this, by the instances' own logs."""
    logs = [hypervisor.root(each) / "var/lib/penstock/run/log" for each in hypervisor.booted]
    return len(logs) == 2 and all(log.exists() and words in log.read_text() for log in logs)


@pytest.mark.parametrize("fails", [0, 1])
def test_the_first_node_that_fails_ends_the_others_and_gives_the_job_its_exit_status(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor, fails: int
) -> None:
    send(
        site,
        "7",
        f"#PENSTOCK output saved\nmkdir saved\nif [ $SLURM_NODEID = {fails} ]; then echo begins\n"
        "until [ -e go ]; do sleep 0.2; done; echo it fails; exit 5; fi\n"
        "trap 'echo told to end; touch saved/$SLURM_NODEID; exit 9' TERM\necho begins\nwhile :; do sleep 0.2; done\n",
    )
    site.really_until(lambda: both_print(hypervisor, "begins"), "both begin")
    for each in hypervisor.booted:
        (hypervisor.root(each) / str(site.folder).lstrip("/") / "go").touch()
    site.really_until(lambda: "7" in site.exits, "the job ends")
    out = site.output("7")
    assert site.exits["7"] == 5, out
    assert "it fails" in out
    assert "told to end" in out
    assert (site.folder / "saved" / str(1 - fails)).exists()
    over(site, ec2)


SAVES = """#PENSTOCK output checkpoint
mkdir -p checkpoint
mine=checkpoint/$SLURM_NODEID
trap 'echo $((count + 1)) >$mine; exit 0' TERM
count=$(cat $mine 2>/dev/null || echo 0)
echo "node $SLURM_NODEID begins at $count"
while [ $count -lt 1 ]; do sleep 0.2; done
"""


@pytest.mark.parametrize("why", [pytest.param("recall", marks=pytest.mark.long), "notice"])
def test_all_nodes_save_together_and_go_on_from_the_newest_of_each(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor, why: str
) -> None:
    """A recall, and EC2's notice for the second node alone. Each node has copies of the other's older files."""
    (site.folder / "checkpoint").mkdir()
    for number in (0, 1):
        (site.folder / "checkpoint" / str(number)).write_text("0\n")
    send(site, "8", SAVES, f"{PAIR} spot")
    site.really_until(lambda: both_print(hypervisor, "begins at 0") and site.runs(), "it runs")
    if why == "recall":
        site.recall("8")
    else:
        hypervisor.notice(sorted(site.on)[1])
    site.really_until(lambda: site.jobs["8"].phase is Phase.QUEUED, "it is back in the queue")
    assert [(site.folder / "checkpoint" / str(n)).read_text() for n in (0, 1)] == ["1\n", "1\n"], hypervisor.console()
    site.really_until(lambda: not site.state.runs and not ec2.running(), "the run is over")
    site.send("8", f"{PAIR} spot", 10.0)
    site.really_until(lambda: "8" in site.exits, "it ends on the second pair")
    assert site.exits["8"] == 0
    for number in (0, 1):
        assert f"node {number} begins at 1" in site.output("8")
    over(site, ec2)
    assert len(ec2.instances()) == 4


def test_a_lost_node_ends_the_whole_run_and_its_job_is_queued_again(
    site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor
) -> None:
    """Another job in the cloud goes on."""
    site.names["a10g-2"] = "a10g"
    site.script("9", "#!/bin/bash\nuntil [ -e go ]; do sleep 0.2; done\n")
    site.submit("9")
    site.send("9", "g5.xlarge")
    (other,) = ec2.running()
    send(site, "7", "echo begins; while :; do sleep 0.2; done\n")
    site.really_until(lambda: "begins" in site.printed("7"), "it runs")
    site.really_until(lambda: [run.state for run in site.state.runs] == ["running"] * 2, "both are seen to run")
    ec2.direct().terminate_instances(InstanceIds=[[each for each in ec2.running() if each != other][1]])
    site.really_until(lambda: site.jobs["7"].phase is Phase.QUEUED, "it is back in the queue")
    assert "the cloud has taken instance" in site.state.words["7"]
    site.really_until(lambda: ec2.running() == [other] and site.away == ["9"], "the other node is given back")
    machine = hypervisor.root(hypervisor.booted[0])
    (machine / str(site.folder).lstrip("/") / "go").touch()
    site.really_until(lambda: "9" in site.exits, "the other job ends")
    assert site.exits["9"] == 0
    over(site, ec2, lost="7")


def test_no_script_begins_unless_all_instances_are_there(site: DetachedSite, ec2: Ec2, hypervisor: Hypervisor) -> None:
    """EC2 launches one of two instances: it is ended, and the job goes back to the queue."""
    ec2.faults.append(Fault("CreateFleet", "partial"))
    send(site, "7", "touch began\n")
    site.really_until(lambda: not site.state.runs and not ec2.running(), "nothing is left")
    assert "1 of 2 instances" in site.state.words["7"]
    assert site.jobs["7"].phase is Phase.QUEUED
    assert not site.exits
    over(site, ec2)


def test_the_links_of_the_largest_run_fit_into_its_user_data(site: DetachedSite) -> None:
    """EC2 takes 16 KB. A session's token makes each link longer by a kilobyte; it is the same in all."""
    assert max(SIZES) == MOST_NODES
    links = site.staging.links("7.1-x", of_instance(MOST_NODES), 600.0)
    token = "&X-Amz-Security-Token=" + "".join(f"{n * 7919 % 1000003:x}" for n in range(240))
    longer = {name: link + token for name, link in links.items()}
    text = detached(site.settings, longer, [f"a10g-{number}" for number in range(MOST_NODES)])
    assert len(text) < 16_000
    for rights in (of_cloud_runner(MOST_NODES), of_instance(MOST_NODES)):
        assert {name for names in rights.values() for name in names} <= set(OBJECTS), "all of them are tidied"


@pytest.mark.long
@pytest.mark.parametrize("site", [QuietSite], indirect=True)
def test_kill_9_at_every_step_of_a_detached_run_on_two_nodes(site: DetachedSite, ec2: Ec2) -> None:
    steps = die_at_every_step(site, ec2, PAIR, 2, twice=False)
    assert steps >= STEPS | {"create_launch_template", "delete_launch_template", "create_tags"}
    assert left(ec2) == [f"{SITE}/alive"]
