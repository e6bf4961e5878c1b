"""Sites with GPUs of several types and parts, on one node and on several."""

from __future__ import annotations

from tests.reality.cluster import NODE, Case, Configuration, beside

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
            differs="a GRES request is the most that the job can use, and eight GPUs are enough for it",
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
                "-p gpu -C volta,gpu32g --gres=gpu:1",
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
        Case("the partition without GPUs", ("-p cpu --gres=gpu:1", "-p cpu,gpu --gres=gpu:1")),
        Case("arrays", ("-p gpu --gres=gpu:1 --array=1-4", "-p gpu --gres=gpu:1 --array=1-6%2")),
        Case("--mem=0 where memory is not allocated", ("-p volta --gres=gpu:2 --mem=0",) * 4, quick=True),
    ),
)


MIXED = Configuration(
    name="mixed",
    shape="a laboratory whose nodes have GPUs of two types each",
    nodes={"lab[1-2]": f"{NODE} Gres=gpu:gtx1060:2,gpu:gtx970:2"},
    gres=(
        "NodeName=lab[1-2] Name=gpu Type=gtx1060 File={gpus}/nvidia[0-1]",
        "NodeName=lab[1-2] Name=gpu Type=gtx970 File={gpus}/nvidia[2-3]",
    ),
    partitions=("PartitionName=lab Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("lab",),
    cases=(
        Case("any GPU", ("--gres=gpu:1", "--gres=gpu:1")),
        Case(
            "by type",
            ("--gres=gpu:gtx970:2", "--gres=gpu:gtx1060:1", "--gres=gpu:gtx970:2"),
            quick=True,
        ),
        Case(
            "a plain job holds one type",
            (beside("--gres=gpu:gtx970:2 -w lab1"), "--gres=gpu:gtx970:1", "--gres=gpu:gtx1060:2"),
        ),
    ),
)

MIG = Configuration(
    name="mig",
    shape="a node of whole GPUs, a node of MIG devices, and a node of both",
    nodes={
        "whole1": f"{NODE} Gres=gpu:a100:4",
        "part1": f"{NODE} Gres=gpu:a100_1g.5gb:14",
        "both1": f"{NODE} Gres=gpu:a100:2,gpu:a100_3g.20gb:4",
    },
    gres=(
        "NodeName=whole1 Name=gpu Type=a100 File={gpus}/nvidia[0-3]",
        "NodeName=part1 Name=gpu Type=a100_1g.5gb File={gpus}/nvidia[0-13]",
        "NodeName=both1 Name=gpu Type=a100 File={gpus}/nvidia[0-1]",
        "NodeName=both1 Name=gpu Type=a100_3g.20gb File={gpus}/nvidia[2-5]",
    ),
    partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("gpu",),
    cases=(
        Case("parts", ("--gres=gpu:a100_1g.5gb:1", "--gres=gpu:a100_1g.5gb:1", "--gpus=a100_1g.5gb:2")),
        Case("whole GPUs of the node of whole GPUs", ("-w whole1 --gres=gpu:a100:4",)),
        Case(
            "parts of the node of both",
            ("--gres=gpu:a100_3g.20gb:1", "--gres=gpu:a100_3g.20gb:1", "-w both1 --gres=gpu:a100:2"),
        ),
    ),
)

UNTYPED = Configuration(
    name="untyped",
    shape="GPUs without a type, and a node of CPUs in the same partition",
    nodes={"gn[1-2]": f"{NODE} Gres=gpu:4", "cn1": NODE},
    gres=("NodeName=gn[1-2] Name=gpu File={gpus}/nvidia[0-3]",),
    partitions=("PartitionName=main Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("main",),
    cases=(
        Case("GPUs", ("--gres=gpu:4", "--gpus=1", "-N 1 --gpus-per-node=2"), quick=True),
        Case(
            "a plain job of CPUs on a GPU node",
            (beside("-w gn1 -n 64"), "--gres=gpu:4", "--gpus=1 -N 1"),
        ),
    ),
)

SOCKETS = Configuration(
    name="sockets",
    shape="GPUs bound to sockets, two threads a core, and whole sockets for each job",
    nodes={
        "s[1-2]": (
            "CPUs=64 Boards=1 SocketsPerBoard=2 CoresPerSocket=16 ThreadsPerCore=2 RealMemory=256000 Gres=gpu:rtxa5000:8"
        )
    },
    gres=(
        "NodeName=s[1-2] Name=gpu Type=rtxa5000 File={gpus}/nvidia[0-3] Cores=0-15",
        "NodeName=s[1-2] Name=gpu Type=rtxa5000 File={gpus}/nvidia[4-7] Cores=16-31",
    ),
    partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("gpu",),
    settings={"SelectTypeParameters": "CR_Socket_Memory", "DefMemPerCPU": "2000"},
    cases=(
        Case(
            "a socket each",
            ("--gres=gpu:1 -c 4", "--gres=gpu:1 -c 4", "--gres=gpu:2 -c 8", "--gres=gpu:4 -c 2"),
        ),
        Case(
            "more jobs than sockets",
            ("--gres=gpu:1", "--gres=gpu:1", "--gres=gpu:1", "--gres=gpu:1", "--gres=gpu:1"),
        ),
        Case(
            "one task a core",
            ("-N 1 --gres=gpu:2 --ntasks-per-node=2 --ntasks-per-core=1", "--gres=gpu:4 -n 8 --ntasks-per-core=1"),
        ),
        Case("one thread a core", ("--gres=gpu:2 --hint=nomultithread -c 8", "--gres=gpu:1 --threads-per-core=1 -c 4")),
        Case("bound", ("--gres=gpu:4 --gres-flags=enforce-binding -n 4", "--gres=gpu:6 -n 2")),
    ),
)

SITES = (DGX, TYPES, MIXED, MIG, UNTYPED, SOCKETS)
