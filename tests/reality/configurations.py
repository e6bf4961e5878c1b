"""Site configurations in shapes that centres publish, each with few nodes. Sources are in README.md."""

from __future__ import annotations

from tests.reality.cluster import Case, Configuration, beside

NODE = "CPUs=64 Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=256000"

DGX = Configuration(
    name="dgx",
    shape="identical nodes of 8 GPUs on two sockets, one partition, memory and CPUs by default from the GPU",
    nodes={"dgx[1-2]": f"{NODE} Gres=gpu:a100:8"},
    gres=(
        "NodeName=dgx[1-2] Name=gpu Type=a100 File={gpus}/nvidia[0-3] Cores=0-31",
        "NodeName=dgx[1-2] Name=gpu Type=a100 File={gpus}/nvidia[4-7] Cores=32-63",
    ),
    partitions=("PartitionName=batch Nodes=ALL Default=YES MaxTime=7-0 State=UP DefMemPerCPU=4000 DefCpuPerGPU=8",),
    managed=("batch",),
    settings={"SelectTypeParameters": "CR_Core_Memory"},
    cases=(
        Case(
            "nodes and parts of nodes",
            ("--nodes=1 --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=8", "--gres=gpu:2 -c 16", "--gpus=1"),
            quick=True,
        ),
        Case(
            "one GPU on each socket",
            (beside("--gres=gpu:3 -n 4 --mem=10G"), "--gres=gpu:4 --gres-flags=enforce-binding -n 8", "--gpus=1"),
        ),
        Case(
            "a plain job holds a node's CPUs",
            (
                beside("--nodelist=dgx1 -n 64 --gres=gpu:1 --mem-per-cpu=100"),
                *("--gpus=1 -c 1", "--gpus=1 -c 1", "--gpus=2 -c 1"),
                *("--gpus=1 -c 1", "--gpus=2 -c 1", "--gpus=1 -c 1"),
            ),
        ),
        Case(
            "more than a node has",
            ("--gres=gpu:9", "-c 128 --gpus=1", "--mem=300000 --gpus=1"),
            differs="item 1: not validated by Slurm",
        ),
    ),
)

TYPES = Configuration(
    name="types",
    shape="a university cluster that grew: a type a partition, features, weights, and one partition over all",
    nodes={
        "v[1-2]": f"{NODE} Gres=gpu:v100:4 Feature=v100,volta,gpu32g Weight=10",
        "t1": f"{NODE} Gres=gpu:t4:2 Feature=t4,turing,gpu16g Weight=1",
        "cpu1": f"{NODE} Feature=cpu Weight=5",
    },
    gres=(
        "NodeName=v[1-2] Name=gpu Type=v100 File={gpus}/nvidia[0-3]",
        "NodeName=t1 Name=gpu Type=t4 File={gpus}/nvidia[0-1]",
    ),
    partitions=(
        "PartitionName=cpu Nodes=cpu1 Default=YES MaxTime=2-0 State=UP",
        "PartitionName=volta Nodes=v[1-2] MaxTime=2-0 State=UP",
        "PartitionName=gpu Nodes=v[1-2],t1 MaxTime=1-0 State=UP",
        "PartitionName=interactive Nodes=t1,v1 MaxTime=4:00:00 MaxNodes=1 State=UP PriorityTier=10",
    ),
    managed=("volta", "gpu", "interactive"),
    cases=(
        Case(
            "by type",
            ("-p gpu --gres=gpu:t4:1", "-p volta --gres=gpu:v100:4", "-p gpu --gpus=v100:2 --nodes=1"),
            quick=True,
        ),
        Case(
            "by feature",
            (
                "-p gpu -C volta --gres=gpu:1",
                "-p gpu -C 'turing|volta' --gres=gpu:1",
                "-p gpu -C 'gpu16g&turing' --gres=gpu:1",
            ),
        ),
        Case(
            "several partitions",
            ("-p volta,gpu --gres=gpu:1 -t 60", "-p interactive --gres=gpu:1 -t 30", "-p gpu --gres=gpu:1 -t 1-0"),
        ),
        Case(
            "limits of a partition",
            ("-p interactive --nodes=2 --gres=gpu:1", "-p gpu --gres=gpu:1 -t 3-0", "-p gpu --gres=gpu:a100:1"),
        ),
        Case("the partition without GPUs", ("--gres=gpu:1", "-p cpu --gres=gpu:1")),
        Case("arrays", ("-p gpu --gres=gpu:1 --array=1-4", "-p gpu --gres=gpu:1 --array=1-6%2")),
    ),
)

ALL = (DGX, TYPES)
