"""The rules that are read from Slurm besides nodes and jobs, with a gateway that returns the test's answers."""

from __future__ import annotations

import dataclasses

import pytest

from penstock_scheduler.model import GpuLimit
from penstock_scheduler.simulator import SimulatedClock
from penstock_slurm.gateway import AccountingAway, SlurmFeatures, SlurmJob, SlurmLimit, SlurmQos, SlurmReservation
from penstock_slurm.gateway.abilities import RELEASES
from penstock_slurm.gateway.parse_jobs import Marks, job_fields, parse_jobs
from penstock_slurm.observe.site import SlurmSite, gpu_limits, reserved
from penstock_slurm.settings import SlurmSettings

ALL = SlurmFeatures("loop", topology=True, limits=True, fair_share=True)


class Told:
    """A gateway that records its readings, and fails for those in `away`."""

    def __init__(self, features: SlurmFeatures) -> None:
        self.has = features
        self.asked: list[str] = []
        self.away: set[str] = set()
        self.shares = {("maths", "ada"): 1.0, ("maths", "bob"): 0.0}

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what in self.away:
            raise AccountingAway("connection refused", command=what)

    def features(self) -> SlurmFeatures:
        self._ask("features")
        return self.has

    def switches(self) -> dict[str, str]:
        self._ask("switches")
        return {"t4-00": "leaf0"}

    def limits(self, cluster: str) -> tuple[SlurmLimit, ...]:
        self._ask(f"limits of {cluster}")
        return (SlurmLimit(4, qos="short"),)

    def qos(self) -> tuple[SlurmQos, ...]:
        self._ask("qos")
        return (SlurmQos("high", frozenset({"low"}), None, None, 0.0),)

    def fair_shares(self) -> dict[tuple[str, str], float]:
        self._ask("fair shares")
        return self.shares


def site(told: Told, **settings: object) -> tuple[SlurmSite, SimulatedClock]:
    clock = SimulatedClock()
    return SlurmSite(told, clock, SlurmSettings.model_validate({"partitions": ("all",)} | settings)), clock


def slurm_job(job_id: str, user: str = "ada", account: str = "maths", qos: str = "normal", **gpus: int) -> SlurmJob:
    release = RELEASES[0]
    fields = dict.fromkeys(job_fields(release), "0") | {
        "JobID": job_id,
        "ArrayTaskID": "N/A",
        "NodeList": "",
        "ReqNodes": "",
    }
    (job,) = parse_jobs("|".join(fields.values()) + "~", Marks("|", "~"), release)
    counted = {"" if name == "all_types" else name: count for name, count in gpus.items()}
    return dataclasses.replace(job, user=user, account=account, qos=qos, gpus_counted=counted, unknown=())


def test_a_site_without_accounting_is_asked_for_nothing():
    told = Told(SlurmFeatures("loop"))
    rules = site(told, weight="fair-share")[0].rules()
    assert told.asked == ["features"]
    assert (rules.switches, rules.limits, rules.fair_shares) == ({}, (), {})


def test_qos_are_read_where_they_decide_who_preempts_whom():
    for by, accounting, found in (("qos", True, ["high"]), ("partition", True, []), ("qos", False, [])):
        rules = site(Told(SlurmFeatures("loop", accounting=accounting, preempts_by=by)))[0].rules()
        assert list(rules.qos) == found


def test_old_rules_are_read_again():
    told = Told(ALL)
    reader, clock = site(told)
    for _ in range(3):
        reader.rules()
        clock.sleep(149)
    assert told.asked == ["features", "switches", "limits of loop"], "fair share is not read unless it is the weight"
    clock.sleep(1)
    reader.rules()
    assert told.asked.count("features") == 2


def test_what_cannot_be_read_stays_as_it_was():
    told = Told(ALL)
    reader, clock = site(told, weight="fair-share")
    before = reader.rules()
    told.away = {"limits of loop", "features"}
    told.shares = {}
    clock.sleep(300)
    after = reader.rules()
    assert after.limits == before.limits == (SlurmLimit(4, qos="short"),)
    assert after.fair_shares == {}
    asked = len(told.asked)
    clock.sleep(59)
    reader.rules()
    assert len(told.asked) == asked
    clock.sleep(1)
    reader.rules()
    assert len(told.asked) > asked, "a failed reading is repeated sooner"


def test_a_fair_share_factor_becomes_a_weight_between_a_half_and_two():
    rules = site(Told(ALL), weight="fair-share")[0].rules()
    assert [rules.weight(slurm_job("1", user)) for user in ("ada", "bob", "eve")] == [2.0, 0.5, 1.0]
    assert site(Told(ALL))[0].rules().weight(slurm_job("1")) == 1.0
    wild = dataclasses.replace(rules, fair_shares={("maths", "ada"): 7.0})
    assert wild.weight(slurm_job("1")) == 2.0


def reservation(name: str, start_s: float, *nodes: str, active: bool = False) -> SlurmReservation:
    return SlurmReservation(name, start_s, start_s + 3600, nodes, active, frozenset())


def test_nodes_are_kept_from_a_lead_before_the_reservation_begins():
    """At 1000 s, with a lead of 100 s: `on` is active, `near` begins in 100 s, `far` in 101 s, `gone` is over."""
    known = [
        reservation("near", 1100, "a", "b"),
        reservation("far", 1101, "c"),
        reservation("on", 500, "a", active=True),
        reservation("gone", 0, "d"),
    ]
    assert reserved(known, 1000, 100) == {"a": ("on", 500), "b": ("near, soon", 1100)}
    assert reserved(known, 1000, 0) == {"a": ("on", 500)}


def limits_of(limits: list[SlurmLimit], managed: list[SlurmJob], others: list[SlurmJob]) -> set[GpuLimit]:
    return set(gpu_limits(limits, {job.id: job for job in managed}, [*managed, *others]))


def test_what_others_hold_counts_against_a_limit_and_what_ours_hold_does_not():
    """Of 8 GPUs for the QOS, the other job of it holds 3; another QOS's job does not matter; below 0 is 0."""
    ours = slurm_job("1", qos="short", all_types=4)
    others = [slurm_job("2", "eve", qos="short", all_types=3, a100=3), slurm_job("3", all_types=2)]
    assert limits_of([SlurmLimit(8, qos="short")], [ours], others) == {GpuLimit("qos", "short", 5)}
    assert limits_of([SlurmLimit(2, qos="short")], [ours], others) == {GpuLimit("qos", "short", 0)}
    assert limits_of([SlurmLimit(4, "a100", qos="short")], [ours], others) == {GpuLimit("qos", "short", 1, "a100")}
    assert limits_of([SlurmLimit(8, qos="long")], [ours], others) == set()


def test_a_limit_for_each_user_or_account_of_a_qos():
    ours = [slurm_job("1", "ada", "maths", "short"), slurm_job("2", "bob", "algebra", "short")]
    other = slurm_job("3", "bob", "maths", "short", all_types=1)
    assert limits_of([SlurmLimit(2, qos="short", each="user")], ours, [other]) == {
        GpuLimit("qos", "short", 2, user="ada"),
        GpuLimit("qos", "short", 1, user="bob"),
    }
    assert limits_of([SlurmLimit(2, qos="short", each="account")], ours, [other]) == {
        GpuLimit("qos", "short", 1, account="maths"),
        GpuLimit("qos", "short", 2, account="algebra"),
    }


def test_limits_of_associations():
    """maths has 12, with algebra below it. A job of the user nobody in algebra holds 5, and ada has a limit of 3 in maths."""
    ours = slurm_job("1", "ada", "maths")
    known = [SlurmLimit(12, accounts=("maths", "algebra")), SlurmLimit(3, accounts=("maths",), user="ada")]
    assert limits_of(known, [ours], [slurm_job("2", "nobody", "algebra", all_types=5)]) == {
        GpuLimit("account", "maths", 7, below=("algebra",)),
        GpuLimit("account", "maths", 3, user="ada"),
    }


@pytest.mark.parametrize("each", ["", "user"])
def test_a_limit_of_a_qos_takes_the_place_of_the_accounts(each):
    """As Slurm 22.05.8 does; the QOS's jobs use up the account's limit for others. One for each user takes no such place."""
    big, plain = slurm_job("1", qos="big", all_types=4), slurm_job("2", all_types=1)
    known = [SlurmLimit(20, qos="big", each=each), SlurmLimit(6, accounts=("maths",))]  # type: ignore[arg-type]
    found = {limit for limit in limits_of(known, [big, plain], []) if limit.kind == "account"}
    spared = () if each else ("big",)
    assert found == {GpuLimit("account", "maths", 6 if each else 2, spared_qos=spared)}
