"""What `penstock slurm check` says of a site's configuration."""

from __future__ import annotations

from penstock_slurm.gateway import SlurmNode, SlurmPartition
from penstock_slurm.install.answers import Finding
from penstock_slurm.install.site_shape import PARTITION, judge_site_shape

PLAIN = SlurmPartition("gpu", ("n0",), up=True, default=True, max_time_s=None)


def judged(
    *gpus: dict[str, int], partition: SlurmPartition = PLAIN, config: str = "CR_Core", unlimited: tuple[str, ...] = ()
) -> list[Finding]:
    nodes = [
        SlurmNode(f"n{index}", each, {}, frozenset({"IDLE"}), ("gpu",), 8, 0, 8000, 0)
        for index, each in enumerate(gpus)
    ]
    return list(judge_site_shape({"SelectTypeParameters": config}, nodes, [partition], {"t4", "a100"}, unlimited))


def test_a_site_of_one_type_a_node_reads_nothing():
    assert judged({"t4": 4}, {"a100": 8}) == []


def test_hosts_with_several_types_and_mig_devices_are_explained_and_a_mixture_without_a_type_fails():
    several, mig, unknown = judged({"a100": 2, "a100_3g.20gb": 4}, {"t4": 1})
    assert "(n0): each type is a node of its own, such as n0[a100]" in several.what
    assert "a100_3g.20gb" in mig.what
    assert "the catalogue has no speed of a100_3g.20gb" in unknown.what
    assert not any(each.remedy for each in (several, mig, unknown))
    (mixture,) = judged({"t4": 2, "": 2})
    assert mixture.what == "host n0 has GPUs with a type and GPUs without one"
    assert mixture.remedy.startswith("give all of them a Type in gres.conf")


def test_what_a_partition_means_for_adaptive_jobs():
    whole = SlurmPartition("gpu", (), up=True, default=True, max_time_s=None, whole_nodes=True, most_cpus=8)
    found = [each.what for each in judged({"t4": 4}, partition=whole, config="CR_CORE_MEMORY", unlimited=("gpu",))]
    assert [text.split()[0:3] for text in found] == [
        ["partition", "gpu", "gives"],
        ["all", "jobs", "of"],
        ["in", "partition", "gpu,"],
    ]
    assert len(judged({"t4": 4}, partition=whole, unlimited=("gpu",))) == 2, "Slurm does not allocate memory"


def test_partitions_without_a_default_of_memory_are_read_from_scontrol():
    text = (
        "PartitionName=gpu AllowGroups=ALL DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED\n"
        "PartitionName=cpu AllowGroups=ALL DefMemPerCPU=2000 MaxMemPerNode=UNLIMITED\n"
    )
    assert PARTITION.findall(text) == ["gpu"]
