"""Sites whose partitions, networks and nodes have rules of their own."""

from __future__ import annotations

from tests.reality.cluster import NODE, Case, Configuration, beside

V100 = "NodeName=n[1-4] Name=gpu Type=v100 File={gpus}/nvidia[0-3]"

EXCLUSIVE = Configuration(
    name="exclusive",
    shape="a supercomputer: whole nodes in one partition, shared ones in another over the same nodes",
    nodes={"n[1-4]": f"{NODE} Gres=gpu:v100:4"},
    gres=(V100,),
    partitions=(
        "PartitionName=standard Nodes=ALL Default=YES MaxTime=2-0 State=UP OverSubscribe=EXCLUSIVE",
        "PartitionName=small Nodes=n[3-4] MaxTime=3-0 State=UP",
        "PartitionName=debug Nodes=n[1-2] MaxTime=30 State=UP OverSubscribe=EXCLUSIVE PriorityTier=10",
    ),
    managed=("standard", "small", "debug"),
    cases=(
        Case(
            "whole nodes",
            ("-N 2 --gpus-per-node=4 --ntasks-per-node=4", "-N 1 --gpus=1", "-p small --gpus=2"),
            quick=True,
        ),
        Case("a debug job", ("-p debug -N 2 --gpus-per-node=4 -t 10", "-p standard -N 1 -t 60 --gres=gpu:4")),
        Case("asked for", ("-p small --exclusive --gres=gpu:1", "-p small -N 1 --exclusive --mem=0 --gpus-per-node=4")),
        Case(
            "beside a small plain job",
            (beside("-w n3 -p small -n 1"), "-N 3 --gpus-per-node=4", "-p small --gpus=3 -N 1"),
        ),
    ),
)

NODESETS = Configuration(
    name="nodesets",
    shape="partitions of node sets, by features and names, and a partition that preempts another",
    nodes={
        "n[1-2]": f"{NODE} Gres=gpu:v100:4 Feature=volta,ib Weight=20",
        "n[3-4]": f"{NODE} Gres=gpu:v100:4 Feature=volta,owner Weight=10",
    },
    gres=(V100,),
    partitions=(
        "NodeSet=infiniband Feature=ib",
        "NodeSet=bought Nodes=n[3-4]",
        "PartitionName=wide Nodes=infiniband MaxTime=2-0 State=UP",
        "PartitionName=owners Nodes=bought MaxTime=7-0 State=UP PriorityTier=20",
        "PartitionName=scavenge Nodes=infiniband,bought Default=YES MaxTime=1-0 State=UP PriorityTier=1 PreemptMode=REQUEUE",
    ),
    managed=("wide", "owners", "scavenge"),
    settings={"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"},
    cases=(
        Case("sets", ("-p wide -N 2 --gpus-per-node=4", "-p owners --gres=gpu:2", "--gres=gpu:1"), quick=True),
        Case("a feature of a set", ("-C ib --gres=gpu:4", "-C owner --gres=gpu:4", "-C volta --gres=gpu:1")),
        Case(
            "a plain job is preempted",
            (beside("-p scavenge -w n3 --gres=gpu:4"), "-p owners -w n3 --gres=gpu:4"),
            quick=True,
        ),
    ),
)

TREE = Configuration(
    name="tree",
    shape="two leaf switches under a spine",
    nodes={"n[1-4]": f"{NODE} Gres=gpu:v100:4"},
    gres=(V100,),
    partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("gpu",),
    settings={"TopologyPlugin": "topology/tree"},
    files={
        "topology.conf": "SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\nSwitchName=spine Switches=leaf[1-2]\n"
    },
    cases=(
        Case("over nodes", ("-N 2 --gpus-per-node=4", "-N 2 --gpus-per-node=4"), quick=True),
        Case("one switch", ("-N 2 --switches=1 --gpus-per-node=4", "-N 2 --switches=1@5 --gpus-per-node=2")),
        Case("over switches", (beside("-w n1 --gres=gpu:4"), beside("-w n4 --gres=gpu:4"), "-N 2 --gpus-per-node=4")),
    ),
)

PLANES = "CPUs=32 Boards=1 SocketsPerBoard=1 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=64000"

WEIGHTS = Configuration(
    name="weights",
    shape="small and large nodes of one type, least loaded first, and more slots than GPUs for plain jobs",
    nodes={
        "n[1-2]": f"{PLANES} Gres=gpu:v100:2 Weight=1 TmpDisk=100000",
        "n3": f"{NODE} Gres=gpu:v100:8 Weight=50 TmpDisk=900000",
    },
    gres=(
        "NodeName=n[1-2] Name=gpu Type=v100 File={gpus}/nvidia[0-1]",
        "NodeName=n3 Name=gpu Type=v100 File={gpus}/nvidia[0-7]",
    ),
    partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP LLN=YES OverSubscribe=NO",),
    managed=("gpu",),
    settings={"SelectTypeParameters": "CR_Core_Memory", "DefMemPerNode": "4000"},
    cases=(
        Case(
            "small and large",
            ("--gres=gpu:8", "--gres=gpu:2 -c 32", "--gres=gpu:1 --mem=60000"),
        ),
        Case(
            "only the large node",
            ("--gres=gpu:1 -c 48", "--gres=gpu:1 --mem=200000", "--gres=gpu:1 --tmp=500G"),
        ),
        Case(
            "memory that plain jobs hold",
            (beside("-w n1 --mem=64000 -n 1"), beside("-w n2 --mem=64000 -n 1"), *["--gres=gpu:1 --mem=8000"] * 3),
        ),
    ),
)

SITES = (EXCLUSIVE, NODESETS, TREE, WEIGHTS)
