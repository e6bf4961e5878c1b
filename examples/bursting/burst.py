"""Jobs of a real Slurm that burst: one command, no account, no dollar. README.md explains what it shows.

Real are Slurm, penstockd, its commands, and the requests to EC2, which go over HTTP. moto answers them in EC2's place and keeps
instances that no machine runs. `Machines` plays these machines: it starts a slurmd for each instance that runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import boto3
from moto.ec2.responses import EC2Response
from moto.server import ThreadedMotoServer

from penstock_loopback import LoopbackCluster, wait_for
from penstock_loopback.machine import free_ports

NODES = 2
"""Cloud nodes, so at most so many jobs are in the cloud at a time."""

JOBS = (
    ("home", {"burst": "never", "runtime_s": 120}, 120),
    ("away", {"burst": "allowed", "runtime_s": 30}, 30),
    ("poor", {"burst": "allowed", "runtime_s": 30, "burst_budget_usd": 0.001}, 5),
)
"""Name, job spec, and seconds of work of each job."""

PATIENCE_S = 300.0

DELETED = """<DeletePlacementGroupResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<requestId>none</requestId><return>true</return></DeletePlacementGroupResponse>"""
"""EC2's answer to the only request that moto does not know."""

NOBODY = "http://127.0.0.1:9"
"""The service of prices, which moto lacks. The example sets its price by hand."""

BEGAN_S = time.monotonic()


def answer(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"[{time.monotonic() - BEGAN_S:4.0f} s] {text}", flush=True)


def cloud_nodes(folder: Path) -> dict[str, Any]:
    """What a site adds to slurm.conf and gres.conf for cloud nodes, as docs/admin/bursting.md says. On one machine each node
    also needs a port of its own."""
    port, last = free_ports(NODES), NODES - 1
    for kind in ("resume", "suspend"):
        program = folder / f"penstock-{kind}"  # installed, they are in PATH and find the settings by themselves
        call = f"from penstock_cloud.programs import {kind}; import sys; sys.exit({kind}())"
        paths = f"PENSTOCK_CONFIG={folder}/slurm/etc/penstock.toml PYTHONPATH={shlex.quote(os.pathsep.join(sys.path))}"
        program.write_text(
            f'#!/bin/sh\n{paths} exec {sys.executable} -c {shlex.quote(call)} "$1" 2>>{folder}/{kind}.log\n'
        )
        program.chmod(0o755)
    return {
        "settings": {
            "NodeName": f"cloud-[0-{last}] NodeHostname={socket.gethostname().split('.')[0]} NodeAddr=127.0.0.1 "
            f"Port=[{port}-{port + last}] CPUs=4 RealMemory=8000 Gres=gpu:a10g:1 State=CLOUD",
            "PartitionName": f"burst Nodes=cloud-[0-{last}] MaxTime=INFINITE State=UP",
            "ResumeProgram": f"{folder}/penstock-resume",
            "SuspendProgram": f"{folder}/penstock-suspend",
            "ResumeTimeout": "300",
            "SuspendTimeout": "30",
            "SuspendTime": "600",
            "SuspendExcParts": "t4",
            "SlurmctldParameters": "idle_on_node_suspend,cloud_reg_addrs",
            "PrivateData": "cloud",
            "TreeWidth": "65533",
            "PrologSlurmctld": "/bin/true",  # only before Slurm 23.02: docs/admin/bursting.md
        },
        "files": {
            "gres.conf": "AutoDetect=off\nNodeName=t4-[00-00] Name=gpu Type=t4 File=/dev/null\n"
            f"NodeName=cloud-[0-{last}] Name=gpu Type=a10g File=/dev/null\n"
        },
    }


def settings(slurm: LoopbackCluster, folder: Path, ec2: Any) -> str:
    """penstock.toml, with what the account has: subnets, a security group, an image."""
    (folder / "share").mkdir()
    subnets = [each["SubnetId"] for each in ec2.describe_subnets()["Subnets"]][:2]
    group = ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]
    image = ec2.register_image(Name="cloud-node", RootDeviceName="/dev/xvda", Architecture="x86_64")["ImageId"]
    api = slurm.user_environment()["PENSTOCK_URL"].removeprefix("unix:")
    return f"""
[daemon]
cloud = "ec2"
state_dir = "{folder}/state"
round_s = 5.0

[api]
socket = "{api}"

[slurm]
partitions = ["t4"]
conf = "{slurm.slurm_conf}"
spool_dir = "{slurm.spool}"
cloud_partition = "burst"

[cloud]
site = "{uuid.uuid4()}"
name = "example"
region = "us-east-1"
subnets = {json.dumps(subnets)}
security_groups = ["{group}"]
image = "{image}"
instance_types = ["g5.xlarge"]
share = "{folder}/share"
wait = "no-wait"

[cloud.prices]
"g5.xlarge" = 1.006

[cloud.budget.site]
usd_per_month = 5.0
"""


class Machines(threading.Thread):
    """Runs a slurmd for each instance that runs and that Slurm waits for, as the instances' user data does."""

    def __init__(self, slurm: LoopbackCluster, ec2: Any) -> None:
        super().__init__(daemon=True)
        self._slurm, self._ec2 = slurm, ec2
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self.seen: dict[str, str] = {}
        """Instance -> its node, also of those that have ended."""
        self._over = threading.Event()

    def alive(self) -> dict[str, str]:
        """Instance -> its node, of those that run."""
        running = [{"Name": "instance-state-name", "Values": ["running"]}]
        pages = self._ec2.describe_instances(Filters=running)["Reservations"]
        instances = [each for page in pages for each in page["Instances"]]
        tags = {each["InstanceId"]: {tag["Key"]: tag["Value"] for tag in each.get("Tags", [])} for each in instances}
        return {instance: found["penstock:node"] for instance, found in tags.items() if "penstock:node" in found}

    def run(self) -> None:
        """Look twice a second."""
        while not self._over.wait(0.5):
            alive = self.alive()
            for instance in set(alive) - set(self.seen):
                say(f"EC2 has launched {instance} as {alive[instance]}")
            for instance in set(self.seen) & set(self._slurmds) - set(alive):
                say(f"EC2 has ended {instance}")
                self._off(instance)
            self.seen |= alive
            for instance, node in alive.items():
                state = self._slurm.command("scontrol", "show", "node", node).stdout
                wakes = "POWERED_DOWN" not in state and any(
                    each in state for each in ("POWERING_UP", "ALLOCATED", "MIXED")
                )
                if instance not in self._slurmds and wakes:
                    say(f"{instance} boots and joins Slurm")
                    # Slurm ignores a node that says to have booted before it was woken. Both times are whole seconds.
                    command = ["bash", "-c", f"sleep 2; exec slurmd -D -N {node} -b"]
                    environment = os.environ | self._slurm.environment()
                    self._slurmds[instance] = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def end(self) -> None:
        """Switch all machines off."""
        self._over.set()
        self.join()
        for instance in list(self._slurmds):
            self._off(instance)

    def _off(self, instance: str) -> None:
        slurmd = self._slurmds.pop(instance)
        slurmd.kill()
        slurmd.wait()


def example(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Run the example. Returns whether all jobs have completed, and no instance is left."""
    say("a cloud: moto answers in EC2's place")
    os.environ["MOTO_EC2_LOAD_DEFAULT_AMIS"] = "false"  # more than a thousand images
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # a line for each request
    EC2Response.delete_placement_group = lambda self: DELETED
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    stack.callback(moto.stop)
    url = "http://{}:{}".format(*moto.get_host_and_port())
    keys = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_PRICING": NOBODY} | keys
    ec2 = boto3.client("ec2", region_name="us-east-1")

    say(f"a site: a real Slurm with one T4, and {NODES} cloud nodes that do not exist yet")
    slurm = stack.enter_context(LoopbackCluster(folder / "slurm", "t4:1x1", **cloud_nodes(folder)))
    os.environ |= slurm.user_environment() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    slurm.settings_file.write_text(settings(slurm, folder, ec2))

    def shown(*command: str) -> str:
        print(f"\n$ {shlex.join(command)}")
        told = answer(*command).rstrip()
        print(told, end="\n\n", flush=True)
        return told

    shown("penstock", "cloud", "types", "--config", str(slurm.settings_file))
    say("penstockd, with [cloud] in its settings")
    daemon = (sys.executable, "-m", "penstock_scheduler.daemon.penstockd", "--config", str(slurm.settings_file))
    slurm.start_program("penstockd", *daemon, ready=lambda: "t4" in answer("penstock", "nodes"), timeout_s=PATIENCE_S)
    machines = Machines(slurm, ec2)
    machines.start()
    stack.callback(machines.end)

    def state(name: str) -> str:
        return slurm.command("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", jobs[name]).stdout.strip()

    say("three jobs that want a GPU, of which the site has one")
    jobs: dict[str, str] = {}
    for name, spec, work_s in JOBS:
        comment = json.dumps({"penstock": {"adaptivity": "rigid", **spec}})
        options = ["--partition=t4", "--gres=gpu:1", "--hold", "--requeue", f"--job-name={name}"]
        script = f"echo $SLURM_JOB_NAME ran on $SLURMD_NODENAME; sleep {work_s}"
        output = [f"--output={folder}/{name}.out", f"--comment={comment}", f"--wrap={script}"]
        jobs[name] = shown("sbatch", "--parsable", *options, *output)
        if name == "home":  # the others find the GPU taken
            wait_for(lambda: state("home") == "RUNNING", PATIENCE_S, "the first job to run")
    wait_for(lambda: machines.seen, PATIENCE_S, "an instance")
    shown("penstock", "explain", jobs["away"])
    shown("penstock", "explain", jobs["poor"])
    wait_for(lambda: state("away") == "RUNNING", PATIENCE_S, "the second job to run in the cloud")
    shown("squeue", "--format=%i %j %T %N")
    shown("penstock", "cloud", "list", "--config", str(slurm.settings_file))
    ended = [shown("penstock", "wait", job) for job in jobs.values()]
    wait_for(lambda: not machines.alive(), PATIENCE_S, "EC2 to end the instance")
    wait_for(
        lambda: "in the cloud" in answer("penstock", "usage", "--by", "gpu-type"), PATIENCE_S, "the bill", poll_s=2.0
    )
    shown("penstock", "usage", "--by", "gpu-type")
    shown("penstock", "history", jobs["away"])
    ran = "".join((folder / f"{name}.out").read_text() for name in jobs)
    say(f"the jobs' own output:\n{ran}")
    return all("ended COMPLETED" in each for each in ended) and "away ran on cloud-" in ran and len(machines.seen) == 1


def main() -> int:
    """Run the example in a folder of its own, which is deleted if all is well. Returns the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end what was started, as after Ctrl-C
    folder = Path(tempfile.mkdtemp(prefix="bursting-"))
    with contextlib.ExitStack() as stack:
        good = example(folder, stack)
    if not good:
        say(f"this is not what should happen; the logs are in {folder}")
        return 1
    shutil.rmtree(folder)
    say("all jobs have run, the instance has ended, and the ledger has its dollars. Next: docs/admin/bursting.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
