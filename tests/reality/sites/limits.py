"""Sites that limit jobs: by partition, by QOS, by licence, by the memory of a node."""

from __future__ import annotations

from tests.reality.cluster import NODE, Case, Configuration, beside

GRES = "NodeName=n[1-2] Name=gpu Type=a100 File={gpus}/nvidia[0-3]"

MEMORY = Configuration(
    name="memory",
    shape="memory is allocated, and no default is set: a job without --mem has all of a node's",
    nodes={"n[1-2]": f"{NODE} Gres=gpu:a100:4"},
    gres=(GRES,),
    partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("gpu",),
    settings={"SelectTypeParameters": "CR_Core_Memory"},
    cases=(
        Case(
            "by default all of a node's memory",
            ("--gres=gpu:1", "--gres=gpu:1"),
        ),
        Case("--mem=0", ("--gres=gpu:1 --mem=0", "--gres=gpu:1 --mem=0")),
        Case(
            "with --mem",
            ("--gres=gpu:1 --mem=10G", "--gres=gpu:1 --mem=10G", "--gres=gpu:2 --mem-per-gpu=10G"),
            quick=True,
        ),
        Case(
            "too much",
            ("--gres=gpu:1 --mem=300000", "--gres=gpu:1 --mem-per-cpu=300000"),
        ),
    ),
)

LIMITS = Configuration(
    name="limits",
    shape="the GPU partition keeps CPUs for the partition of CPUs over the same nodes",
    nodes={"n[1-2]": f"{NODE} Gres=gpu:a100:4 TmpDisk=100000"},
    gres=(GRES,),
    partitions=(
        "PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP MaxCPUsPerNode=8 MaxMemPerNode=64000 DefMemPerCPU=2000",
        "PartitionName=cpu Nodes=ALL MaxTime=2-0 State=UP MaxCPUsPerNode=56 DefMemPerCPU=2000",
    ),
    managed=("gpu",),
    settings={"SelectTypeParameters": "CR_Core_Memory"},
    cases=(
        Case("within", ("--gres=gpu:1 -c 4", "--gres=gpu:1 -c 4", "--gres=gpu:2 -c 4")),
        Case(
            "beside jobs of CPUs",
            (beside("-p cpu -N 2 --ntasks-per-node=56"), "--gres=gpu:1 -c 8", "--gres=gpu:1 -c 8"),
        ),
        Case(
            "beyond",
            ("--gres=gpu:1 -c 16", "--gres=gpu:1 --mem=100000", "--gres=gpu:1 --tmp=200G"),
        ),
    ),
)

LICENCES = Configuration(
    name="licences",
    shape="licences of a simulator, of which plain jobs hold some",
    nodes={"n[1-2]": f"{NODE} Gres=gpu:a100:4"},
    gres=(GRES,),
    partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("gpu",),
    settings={"Licenses": "sim:2,scratch:10"},
    cases=(
        Case("free", ("--gres=gpu:1 -L sim", "--gres=gpu:1 -L scratch:2", "--gres=gpu:1"), quick=True),
        Case("taken", (beside("-L sim:2 -n 1"), "--gres=gpu:1 -L sim", "--gres=gpu:1")),
        Case("of two kinds", (beside("-L sim -n 1"), "--gres=gpu:1 -L scratch:9,sim", "--gres=gpu:2 -L scratch:2")),
        Case("for some", ("--gres=gpu:1 -L sim:2", "--gres=gpu:1 -L sim", "--gres=gpu:1 -L sim")),
        Case(
            "more than there are",
            ("--gres=gpu:1 -L sim:3", "--gres=gpu:1 -L unknown"),
        ),
    ),
)

QOS = Configuration(
    name="qos",
    shape="a ladder of QOS: a limit a user, a limit of a partition, a high one that preempts a scavenger",
    nodes={"n[1-2]": f"{NODE} Gres=gpu:a100:4"},
    gres=(GRES,),
    partitions=(
        "PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP",
        "PartitionName=test Nodes=n1 MaxTime=60 State=UP",
    ),
    managed=("gpu", "test"),
    settings={
        "AccountingStorageEnforce": "associations,limits,qos",
        "PreemptType": "preempt/qos",
        "PreemptMode": "REQUEUE",
    },
    accounting=(
        ("add", "qos", "scavenger", "MaxWall=60", "PreemptMode=cancel"),
        ("add", "qos", "high", "MaxTRESPerUser=gres/gpu=2", "Priority=1000", "Preempt=scavenger"),
        ("add", "qos", "parttest", "MaxTRESPerJob=gres/gpu=1"),
        ("modify", "user", "root", "set", "qos+=high,scavenger,parttest"),
    ),
    updates=(
        ("PartitionName=gpu", "AllowQos=normal,high,scavenger"),
        ("PartitionName=test", "QOS=parttest"),
    ),
    cases=(
        Case("by QOS", ("--gres=gpu:2", "--qos=high --gres=gpu:1", "--qos=scavenger -t 30 --gres=gpu:1")),
        Case(
            "a limit a user",
            (beside("--qos=high --gres=gpu:1"), "--qos=high --gres=gpu:1", "--qos=high --gres=gpu:1", "--gres=gpu:1"),
        ),
        Case(
            "a plain job is preempted",
            (beside("--qos=scavenger -t 30 -N 2 --gres=gpu:4"), "--gres=gpu:1", "--qos=high --gres=gpu:2"),
        ),
        Case("a limit of a partition", ("-p test --gres=gpu:1 -t 10", "-p test --gres=gpu:2 -t 10")),
        Case(
            "refused",
            ("--qos=none --gres=gpu:1", "-p gpu --qos=parttest --gres=gpu:1"),
        ),
    ),
)

RULES = """
local penstock = dofile(debug.getinfo(1, "S").source:match("^@(.*/)") .. "penstock.lua")

local function own(job)
  for _, field in ipairs({"tres_per_node", "tres_per_job", "tres_per_task", "gres"}) do
    if (job[field] or ""):find("gpu", 1, true) then return slurm.SUCCESS end
  end
  slurm.log_user("this partition is for jobs with GPUs")
  return slurm.ERROR
end

function slurm_job_submit(job, partitions, uid)
  %s
end

slurm_job_modify = penstock.job_modify

return slurm.SUCCESS
"""

FIRST = "return own(job) == slurm.SUCCESS and penstock.job_submit(job, partitions, uid) or slurm.ERROR"
LAST = "return penstock.job_submit(job, partitions, uid) == slurm.SUCCESS and own(job) or slurm.ERROR"

OWN_RULES_FIRST, OWN_RULES_LAST = (
    Configuration(
        name=name,
        shape=f"the site's own job_submit.lua refuses jobs without GPUs, {when} Penstock's part",
        nodes={"n[1-2]": f"{NODE} Gres=gpu:a100:4"},
        gres=(GRES,),
        partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
        managed=("gpu",),
        files={"job_submit.lua": RULES % order},
        cases=(Case("with and without GPUs", ("--gres=gpu:2", "--gpus=1 -N 1", beside("-n 1")), quick=quick),),
    )
    for name, when, order, quick in (("rules first", "before", FIRST, False), ("rules last", "after", LAST, False))
)

ASLEEP = Configuration(
    name="asleep",
    shape="idle nodes are powered down, and woken for a job",
    nodes={"n[1-2]": f"{NODE} Gres=gpu:a100:4"},
    gres=(GRES,),
    partitions=("PartitionName=gpu Nodes=ALL Default=YES MaxTime=2-0 State=UP",),
    managed=("gpu",),
    asleep=True,
    cases=(Case("woken", ("--gres=gpu:2", "-N 2 --gpus-per-node=1")),),
)

SITES = (MEMORY, LIMITS, LICENCES, QOS, OWN_RULES_FIRST, OWN_RULES_LAST, ASLEEP)
