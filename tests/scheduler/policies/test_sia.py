import dataclasses
from typing import Any

import pytest

from penstock_profiles.estimators import PipelineEstimator, PipelineGpu
from penstock_profiles.throughput import ThroughputParams
from penstock_scheduler.errors import ConfigError
from penstock_scheduler.model import Configuration, GpuLimit, Job, Node, Phase, Placement, ReasonCode, Share, Snapshot
from penstock_scheduler.policies import make_policy
from penstock_scheduler.policies.sia import Sia, SiaSettings, restart_factor
from tests.scheduler.builders import job, on, snapshot, table, with_facts

sia = Sia(SiaSettings())
greedy = Sia(SiaSettings(fairness_p=1.0, allocation_lambda=-1e-6))


def test_picks_the_schedule_of_sia_table_1():
    """One node of 2 A GPUs, one of 4 B: 3.5 + 2.1 = 5.6 beats 1.5 + 3.6 = 5.1 (p = 1: the sum itself is maximised).

    Each row's smallest entry is 1, so that normalising leaves Table 1 as it is.
    """
    models = {
        "j1": table(a={1: 1.0, 2: 1.5}, b={1: 1.5, 2: 2.5, 4: 3.5}),
        "j2": table(a={1: 1.2, 2: 2.1}, b={1: 1.0, 2: 1.9, 4: 3.6}),
    }
    plan = greedy.decide(snapshot("a:1x2,b:1x4", [job("j1"), job("j2")], models))
    assert plan.chosen == {"j1": Configuration(1, 4, "b"), "j2": Configuration(1, 2, "a")}
    assert plan.solve is not None
    assert -plan.solve.objective == pytest.approx(5.6, abs=1e-3)


@pytest.mark.parametrize("solver", [{"solver": "milp", "backend": "highs"}, {"solver": "dual"}, {"solver": "auto"}])
def test_all_solvers_agree(solver):
    models = {f"j{i}": table(t4={1: 1.0, 2: 1.9, 4: 3.0 + i / 10}, a100={1: 3.0, 8: 9.0 + i}) for i in range(6)}
    plans = [
        make_policy("sia", settings | {"gap": 0.0})[0].decide(
            snapshot("t4:3x4,a100:1x8", [job(f"j{i}", submit_s=i) for i in range(6)], models)
        )
        for settings in (solver, {"solver": "milp", "backend": "cbc"})
    ]
    assert plans[0].assignments == plans[1].assignments


def test_a_rigid_job_gets_its_count_on_the_type_that_suits_it():
    models = {"r": table(t4={4: 1.0}, a100={4: 3.0})}
    plan = sia.decide(snapshot("t4:2x4,a100:1x8", [job("r", adaptivity="rigid", min_gpus=4, max_gpus=4)], models))
    assert plan.chosen == {"r": Configuration(1, 4, "a100")}


def test_a_fixed_or_unpreemptible_job_stays_when_a_better_place_is_free():
    here = on("t4", t4_00=1)
    for spec in ({"adaptivity": "fixed", "min_gpus": 1, "max_gpus": 1}, {"preemptible": False}):
        each = job("j", phase=Phase.RUNNING, allocation=here, **spec)
        plan = sia.decide(snapshot("t4:1x4,a100:1x8", [each], {"j": table(t4={1: 1.0}, a100={1: 9.0})}))
        assert plan.assignments["j"].placement == here
        assert plan.assignments["j"].reason.code is ReasonCode.PINNED


def test_moving_must_pay_for_the_restart():
    """1.2x faster elsewhere, but a restart keeps (100 - 0)/(100 + 60) = 0.63 of it: stay. At age 10,000 s 0.99: move."""
    model = {"j": table(t4={1: 1.0}, a100={1: 1.2})}
    each = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1)
    young = snapshot("t4:1x1,a100:1x1", [each], model, time_s=100.0, restart_cost_s=60.0)
    assert sia.decide(young).chosen["j"].gpu_type == "t4"
    old = dataclasses.replace(young, time_s=10_000.0)
    assert sia.decide(old).chosen["j"].gpu_type == "a100"


def test_equal_jobs_are_served_by_age_and_keep_what_they_have():
    jobs = [job("young", submit_s=5), job("old", submit_s=1)]
    plan = sia.decide(snapshot("t4:1x1", jobs))
    assert set(plan.chosen) == {"old"}
    held = [job("young", submit_s=5, phase=Phase.RUNNING, allocation=on("t4", t4_00=1)), job("old", submit_s=1)]
    assert set(sia.decide(snapshot("t4:1x1", held)).chosen) == {"young"}


def test_jobs_on_their_way_are_not_sent_elsewhere():
    going = on("t4", t4_00=1)
    for phase in (Phase.STARTING, Phase.STOPPING):
        each = job("j", phase=phase, allocation=on("t4", t4_00=2), target=going)
        plan = sia.decide(snapshot("t4:1x4,a100:1x8", [each], {"j": table(t4={1: 1.0}, a100={1: 9.0})}))
        assert plan.assignments["j"].placement == going
        assert plan.assignments["j"].reason.code is ReasonCode.IN_FLIGHT


def test_a_job_on_its_way_to_a_node_that_went_down_is_sent_elsewhere():
    state = snapshot("t4:2x4", [job("j", phase=Phase.STARTING, target=on("t4", t4_00=4), max_gpus=4)])
    down = dataclasses.replace(state.nodes[0], usable=False)
    plan = sia.decide(dataclasses.replace(state, nodes=(down, state.nodes[1])))
    assert plan.assignments["j"].placement == on("t4", t4_01=4)


def test_a_job_leaves_a_node_that_drains():
    state = snapshot("t4:2x4", [job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=4), max_gpus=4)])
    drained = dataclasses.replace(state.nodes[0], usable=False)
    plan = sia.decide(dataclasses.replace(state, nodes=(drained, state.nodes[1])))
    assert plan.assignments["j"].placement == on("t4", t4_01=4)


def test_gpus_of_unmanaged_jobs_are_not_given_out():
    state = snapshot("t4:1x4", [job("j")])
    busy = dataclasses.replace(state.nodes[0], gpus_others=3)
    assert sia.decide(dataclasses.replace(state, nodes=(busy,))).assignments["j"].placement == on("t4", t4_00=1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"gpu_types": ["h100"]}, "no node here has h100; the types are t4"),
        ({"min_gpus": 64}, "needs 64 GPUs, but jobs can have 1, 2, 4, 8"),
        ({"min_gpus": 5, "max_gpus": 7}, "needs 5 to 7 GPUs"),
        ({"min_gpus": 7, "max_gpus": 7}, "needs 7 GPUs"),
        ({"excluded_gpu_types": ["t4"]}, "no node here is of another type than those excluded; the types are t4"),
        ({"scale_unit": 5}, "no count that jobs can have here is a multiple of scale_unit=5"),
    ],
)
def test_a_job_that_can_never_run_is_told_so(spec, words):
    plan = sia.decide(snapshot("t4:2x4", [job("j", **spec)]))
    assert plan.waiting["j"].code is ReasonCode.NEVER_FITS
    assert words in plan.waiting["j"].text


def test_whole_replicas_and_no_excluded_type():
    """Units of 3 on nodes of 4: 3 GPUs, the same on a100 though that is excluded."""
    plan = sia.decide(snapshot("t4:2x4,a100:1x8", [job("j", scale_unit=3, max_gpus=8, excluded_gpu_types=["a100"])]))
    assert plan.assignments["j"].placement == on("t4", t4_00=3)


def test_a_job_that_waits_knows_what_it_needs():
    plan = sia.decide(snapshot("t4:1x1", [job("a", submit_s=1), job("b", submit_s=2)]))
    assert plan.waiting["b"].code is ReasonCode.WAITING_CAPACITY
    assert plan.waiting["b"].needs == "1 GPU of type any"


def test_an_odd_allocation_is_kept_by_its_holder_only():
    """Slurm itself started a job on 3 GPUs: it may keep them, but nobody else is offered 3 who could do with 2 or 4."""
    holder = job("holder", phase=Phase.RUNNING, allocation=on("t4", t4_00=3), max_gpus=4)
    other = job("other", min_gpus=3, max_gpus=3, phase=Phase.RUNNING, allocation=on("t4", t4_01=2))
    flexible = job("flexible", min_gpus=3, max_gpus=5)
    plan = sia.decide(snapshot("t4:2x4", [holder, flexible]))
    assert plan.chosen.get("flexible") != Configuration(1, 3, "t4")
    assert sia.decide(snapshot("t4:2x4", [holder, other])).chosen["other"] == Configuration(1, 3, "t4")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fairness_p": 0}, "use a non-zero value"),
        ({"fairness_p": -0.5, "allocation_lambda": 1.0}, "leave every job out"),
        ({"fairness_p": -0.5, "allocation_lambda": -1.0}, "leave every job out"),
        ({"fairness_p": 0.5}, "reward leaving jobs out"),
        ({"lamda": 2}, "unknown key 'lamda'"),
        ({"solver": "glpk"}, "solver='glpk'"),
    ],
)
def test_settings_that_would_schedule_nothing_are_errors(settings, words):
    with pytest.raises(ConfigError, match=r"policy\.sia") as error:
        make_policy("sia", settings)
    assert words in str(error.value)


def test_restart_factor():
    assert restart_factor(100, 2, 10) == pytest.approx(80 / 110)
    assert restart_factor(10, 2, 10) == 0.0
    with pytest.raises(ConfigError, match="restart_cost_s=0"):
        restart_factor(10, 2, 0)


def test_a_job_whose_goodput_is_not_a_number_waits_and_is_told_so_and_the_others_run():
    broken = table(t4={1: 1.0})
    object.__setattr__(broken, "rates", {"t4": {1: float("nan")}})
    plan = sia.decide(snapshot("t4:1x1", [job("j"), job("sane")], {"j": broken}))
    assert set(plan.chosen) == {"sane"}
    assert plan.waiting["j"].code is ReasonCode.NEVER_FITS
    assert "not a number" in plan.waiting["j"].text


def test_a_job_that_slurm_started_outside_its_spec_is_moved():
    """It asks for at least 2 GPUs and holds 1, and somebody else stands where it would stay."""
    small = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), min_gpus=2, max_gpus=2)
    assert sia.decide(snapshot("t4:1x4", [small])).chosen == {"j": Configuration(1, 2, "t4")}


def nodes(*of: tuple[str, str, int, tuple[str, ...], str]) -> tuple[Node, ...]:
    """(name, type, GPUs, partitions, reservation) each."""
    return tuple(Node(name, kind, gpus, inside, reservation=kept) for name, kind, gpus, inside, kept in of)


def test_partitions_that_overlap_are_rows_of_the_program():
    """x is in a, y in a and b. Of three jobs that want a node, the two oldest are in b: one of them and the one in a run."""
    where = nodes(("x", "t4", 4, ("a",), ""), ("y", "t4", 4, ("a", "b"), ""))
    jobs = [job(f"j{i}", submit_s=i, min_gpus=4, max_gpus=4, partitions=("b",) if i < 2 else ("a",)) for i in range(3)]
    plan = sia.decide(snapshot(where, jobs))
    assert {name: a.placement.nodes for name, a in plan.assignments.items()} == {"j0": ("y",), "j2": ("x",)}
    assert plan.waiting["j1"].code is ReasonCode.WAITING_CAPACITY


def test_what_is_scarce_of_one_type_leaves_the_others_free():
    """In b there are 4 T4 and 8 A100; the two jobs in b get one node each."""
    where = nodes(("x", "t4", 4, ("a",), ""), ("y", "t4", 4, ("a", "b"), ""), ("z", "a100", 8, ("b",), ""))
    jobs = [job(f"j{i}", submit_s=i, min_gpus=4, max_gpus=4, partitions=("b",)) for i in range(3)]
    assert len(sia.decide(snapshot(where, jobs)).assignments) == 3


def test_a_reservation_is_for_its_own_jobs_alone():
    where = nodes(("x", "t4", 4, ("all",), "exam"), ("y", "t4", 2, ("all",), ""))
    plan = sia.decide(snapshot(where, [job("in", reservation="exam"), job("out", submit_s=1)]))
    assert plan.assignments["in"].placement.nodes == ("x",)
    assert plan.assignments["out"].placement.nodes == ("y",)
    assert "scattered" not in plan.assignments["out"].reason.text
    alone = sia.decide(snapshot(where[:1], [job("out")]))
    assert alone.waiting["out"].code is ReasonCode.WAITING_CAPACITY


def test_a_job_leaves_a_partition_that_it_may_not_use_any_more():
    where = nodes(("x", "t4", 4, ("old",), ""), ("y", "t4", 4, ("new",), ""))
    held = Placement("t4", "old", (Share("x", 4),))
    each = job("j", phase=Phase.RUNNING, allocation=held, max_gpus=4, partitions=("new",))
    assert sia.decide(snapshot(where, [each])).assignments["j"].placement.nodes == ("y",)


def test_a_job_that_nobody_knows_grows_by_doubling():
    """Never run: 1 GPU. Having run on 2: at most 4. Known scaling: all that it may have."""
    for ran_on, gets in ((0, 1), (2, 4), (None, 8)):
        state = snapshot("t4:1x8", [job("j")])
        if ran_on is not None:
            state = with_facts(state, largest_run_gpus={"j": ran_on})
        assert sia.decide(state).chosen["j"].gpus == gets
    free = Sia(SiaSettings(growth=None))
    assert free.decide(with_facts(snapshot("t4:1x8", [job("j")]), largest_run_gpus={"j": 0})).chosen["j"].gpus == 8


THREE = "a100:1x4,rtx:1x4,t4:1x4"
ALL = ("a100", "rtx", "t4")


def new(where: str | None, *unknown: str, nodes: str = THREE, others: tuple[Job, ...] = (), **more: Any) -> Snapshot:
    """A job that has, or waits for, one GPU, and of which these types are unknown; 100 s after it came."""
    attained = more.pop("attained", {})
    models = {"j": more.pop("model")} if "model" in more else {}
    held = {"phase": Phase.RUNNING, "allocation": on(where, **{f"{where}_00": 1})} if where else {}
    state = snapshot(nodes, [job("j", submit_s=900.0, **held, **more), *others], models, attained={"j": attained})
    return with_facts(state, unmeasured_types={"j": unknown}, largest_run_gpus={"j": 1 if where else 0})


def test_a_new_job_is_measured_on_one_gpu_of_each_type_before_it_grows():
    """It comes, reports from A100, then from RTX, then from T4: one GPU each time, and two when all is known."""
    first = sia.decide(new(None, *ALL)).assignments["j"]
    assert first.configuration == Configuration(1, 1, first.placement.gpu_type)
    assert (first.reason.code, first.reason.text) == (
        ReasonCode.MEASURING,
        f"is to be measured on {first.placement.gpu_type}, 1 of 3 types",
    )
    silent_yet = sia.decide(new("rtx", *ALL)).assignments["j"]
    assert (silent_yet.configuration, silent_yet.reason.text) == (
        Configuration(1, 1, "rtx"),
        "being measured on rtx, 1 of 3 types",
    )
    second = sia.decide(new("rtx", "t4")).assignments["j"]
    assert (second.configuration, second.reason.text) == (
        Configuration(1, 1, "t4"),
        "is to be measured on t4, 3 of 3 types",
    )
    last = sia.decide(new("t4", model=table(a100={1: 9.0, 2: 16.0}, rtx={1: 2.0}, t4={1: 1.0}))).assignments["j"]
    assert last.configuration == Configuration(1, 2, "a100")
    assert last.reason.code is ReasonCode.CHOSEN


def test_a_type_that_the_model_says_nothing_of_is_open_to_a_job_that_is_measured():
    """Two GPUs that are known would be better at once; and without measuring it would never know the third type."""
    model = table(rtx={1: 2.0, 2: 4.0}, t4={1: 1.0, 2: 2.0})
    state = new("t4", "a100", model=model)
    assert sia.decide(state).chosen == {"j": Configuration(1, 1, "a100")}
    assert Sia(SiaSettings(measure_gpu_s=0)).decide(state).chosen["j"].gpu_type == "rtx"
    only = new(None, "a100", model=table(t4={1: 0.0}))
    assert sia.decide(only).chosen == {"j": Configuration(1, 1, "a100")}


@pytest.mark.parametrize(
    ("unlike", "why"),
    [
        ({"adaptivity": "rigid", "min_gpus": 1, "max_gpus": 1}, "its user wants it so"),
        ({"adaptivity": "fixed", "min_gpus": 1, "max_gpus": 1}, "it may not be moved"),
        ({"preemptible": False}, "it may not be moved"),
        ({"min_gpus": 2}, "it needs more than one"),
        ({"scale_unit": 2}, "it needs more than one"),
        ({"gpu_types": ("rtx",)}, "there is nothing to compare"),
        ({"attained": {"rtx": 50.0}}, "it ran for 30 s + 20 s and reported nothing"),
        ({"attained": {"t4": 540.0}}, "it is not new: three times 180 s"),
    ],
)
def test_who_is_not_measured(unlike, why):
    reasons = [given.reason for given in sia.decide(new(None, "a100", "rtx", **unlike)).assignments.values()]
    assert [reason.code for reason in reasons] == [ReasonCode.CHOSEN], why
    just_so = {"attained": {"rtx": 49.0}} if "rtx" in unlike.get("attained", {}) else {"attained": {"t4": 539.0}}
    measured = sia.decide(new(None, "a100", "rtx", **just_so)).assignments["j"]
    assert measured.reason.code is ReasonCode.MEASURING, "and a job like the others is"


def test_measuring_takes_no_gpus_from_other_jobs():
    """All A100 are another's, which trains better with each: the new job stays on its T4, and grows when it is new no more."""
    other = job("o", phase=Phase.RUNNING, allocation=on("a100", a100_00=4), max_gpus=4, gpu_types=("a100",))
    state = new("t4", "a100", nodes="a100:1x4,t4:1x4", others=(other,))
    assert sia.decide(state).chosen == {"o": Configuration(1, 4, "a100"), "j": Configuration(1, 1, "t4")}
    later = dataclasses.replace(with_facts(state, attained_gpu_s={"j": {"t4": 360.0}}), time_s=5000.0)
    assert sia.decide(later).chosen == {"o": Configuration(1, 4, "a100"), "j": Configuration(1, 2, "t4")}


def test_measuring_moves_and_shrinks_nobody_else():
    """An old job has all A100, of which the last four bring it next to nothing; or the RTX, and would be as well on the A100."""
    flat = table(a100={1: 1.0, 2: 1.9, 4: 3.4, 8: 3.5})
    old = job("o", phase=Phase.RUNNING, allocation=on("a100", a100_00=8), gpu_types=("a100",))
    state = new("t4", "a100", nodes="a100:1x8,t4:1x4", others=(old,))
    state = dataclasses.replace(with_facts(state, model={"o": flat}), time_s=36000.0)
    assert sia.decide(state).chosen == {"o": Configuration(1, 8, "a100"), "j": Configuration(1, 1, "t4")}
    old = job("o", phase=Phase.RUNNING, allocation=on("rtx", rtx_00=1), max_gpus=1)
    state = new("a100", "rtx", nodes="a100:1x1,rtx:1x1", others=(old,))
    same = table(a100={1: 1.0}, rtx={1: 1.0})
    state = dataclasses.replace(with_facts(state, model={"o": same}), time_s=86400.0)
    assert sia.decide(state).chosen == {"o": Configuration(1, 1, "rtx"), "j": Configuration(1, 1, "a100")}


def test_who_is_being_measured_stays_until_it_has_reported():
    """Job 1 is known on its A100 and would be measured on the one RTX, on which the other has just begun."""
    other = job("o", phase=Phase.RUNNING, allocation=on("rtx", rtx_00=1), submit_s=5.0)
    state = new("a100", "rtx", nodes="a100:1x1,rtx:1x1", others=(other,))
    state = with_facts(state, unmeasured_types={"j": state.facts["j"].unmeasured_types, "o": ("a100", "rtx")})
    assert sia.decide(state).chosen == {"o": Configuration(1, 1, "rtx"), "j": Configuration(1, 1, "a100")}


def test_a_limit_on_a_user_is_kept_also_by_the_next_best_choice():
    """4 T4 would be best, but no node has 4 free; 8 A100 are free, but ada may have 4 GPUs."""
    state = snapshot("t4:2x4,a100:1x8", [job("j", min_gpus=4)], {"j": table(t4={4: 10.0}, a100={8: 9.0})})
    busy = tuple(dataclasses.replace(n, gpus_others=1) if n.gpu_type == "t4" else n for n in state.nodes)
    state = dataclasses.replace(state, nodes=busy)
    assert sia.decide(state).chosen["j"] == Configuration(1, 8, "a100")
    assert "4 t4 would be better" in sia.decide(state).assignments["j"].reason.text
    limited = sia.decide(dataclasses.replace(state, limits=(GpuLimit("user", "ada", 4),)))
    assert limited.waiting["j"].code is ReasonCode.WAITING_FRAGMENTS


@pytest.mark.parametrize(
    "limit", [GpuLimit("user", "ada", 3), GpuLimit("account", "maths", 3), GpuLimit("qos", "low", 3)]
)
def test_users_accounts_and_qos_get_no_more_than_their_limit(limit):
    jobs = [job(str(i), submit_s=i, max_gpus=2, account="maths", qos="low") for i in range(4)]
    other = job("other", user="bob", account="physics", qos="high", submit_s=9, max_gpus=2)
    plan = sia.decide(dataclasses.replace(snapshot("t4:2x4", [*jobs, other]), limits=(limit,)))
    assert sum(c.gpus for name, c in plan.chosen.items() if name != "other") == 3
    assert plan.chosen["other"].gpus == 2


def test_a_limit_on_one_type_leaves_the_others_free():
    """Of 8 a100 and 8 t4 the user may have 2 a100: four jobs with a table that likes a100 hold 2 of those, and the t4."""
    jobs = [job(f"j{i}", max_gpus=4, submit_s=float(i)) for i in range(4)]
    models = {each.id: table(t4={1: 1.0, 2: 2.0, 4: 4.0}, a100={1: 3.0, 2: 6.0, 4: 12.0}) for each in jobs}
    state = snapshot("t4:1x8,a100:1x8", jobs, models)
    limit = GpuLimit("user", "ada", 2, gpu_type="a100")
    held = [a.placement for a in sia.decide(dataclasses.replace(state, limits=(limit,))).assignments.values()]
    assert sum(p.gpus for p in held if p.gpu_type == "a100") == 2
    assert sum(p.gpus for p in held if p.gpu_type == "t4") == 8


def test_whom_a_limit_covers():
    """By the account with those below it, within a QOS by user or account, and never jobs with a limit of their own."""
    ada = job("j", user="ada", account="algebra", qos="short")
    assert GpuLimit("account", "maths", 1, below=("algebra",)).covers(ada)
    assert not GpuLimit("account", "maths", 1).covers(ada)
    assert GpuLimit("qos", "short", 1, user="ada").covers(ada)
    assert not GpuLimit("qos", "short", 1, user="bob").covers(ada)
    assert not GpuLimit("qos", "short", 1, account="maths").covers(ada)
    assert not GpuLimit("account", "algebra", 1, spared_qos=("short",)).covers(ada)
    words = str(GpuLimit("qos", "short", 1, "a100", user="ada"))
    assert words == "the limit of 1 a100 GPUs for qos short and jobs of user ada"


def test_a_job_whose_reservation_has_not_begun_is_told_so():
    plan = sia.decide(
        snapshot(nodes(("n", "t4", 4, ("all",), "exam, soon")), [job("in", reservation="exam"), job("out")])
    )
    assert "no node is kept for its reservation exam now" in plan.waiting["in"].text
    assert "all nodes are reserved now" in plan.waiting["out"].text


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_newcomer_does_not_wait_while_an_old_job_has_more_than_it_needs(gpus):
    """From 4 GPUs to 2 costs 2^-0.5 - 4^-0.5 = 0.21, from 2 to 1 costs 0.29; a first GPU is worth 1, with 1.1 only 0.1."""
    models = {name: table(t4={1: 1.0, 2: 2.0, 4: 4.0}) for name in ("old", "new")}
    old = job("old", phase=Phase.RUNNING, allocation=on("t4", t4_00=gpus))
    state = snapshot(f"t4:1x{gpus}", [old, job("new", submit_s=90_000.0)], models, time_s=90_000.0)
    state = with_facts(state, largest_run_gpus={"new": 0})
    shared = {"old": Configuration(1, gpus // 2, "t4"), "new": Configuration(1, 1, "t4")}
    assert sia.decide(state).chosen == shared
    assert set(Sia(SiaSettings(allocation_lambda=1.1)).decide(state).chosen) == {"old"}


def test_a_job_beyond_its_limit_is_told_so():
    state = dataclasses.replace(snapshot("t4:2x4", [job("j", min_gpus=4)]), limits=(GpuLimit("user", "ada", 2),))
    assert "the limit of 2 GPUs for user ada does not allow that" in sia.decide(state).waiting["j"].text


def test_weights_come_before_age():
    jobs = [job("old", submit_s=1), job("dear", submit_s=5, weight=3.0)]
    plan = sia.decide(snapshot("t4:1x1", jobs))
    assert set(plan.chosen) == {"dear"}
    assert plan.solve is not None
    assert plan.solve.objective == pytest.approx(3.0 * 1.0 + 2.0, abs=1e-3), (
        "its cost and the other's, each by its weight"
    )


def test_a_young_job_is_not_stopped_for_one_that_gains_more():
    """t4 is worth 4 times its slowest way to run to the other one. The young job would lose all if it were stopped now."""
    models = {"young": table(t4={1: 1.0}), "other": table(k80={1: 1.0}, t4={1: 4.0})}
    young = job("young", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), submit_s=900.0, max_gpus=1, restarts=1)
    state = snapshot("t4:1x1,k80:1x1", [young, job("other", max_gpus=1)], models, restart_cost_s=100.0)
    full = tuple(dataclasses.replace(n, gpus_others=1) if n.gpu_type == "k80" else n for n in state.nodes)
    state = dataclasses.replace(state, nodes=full)
    assert set(sia.decide(state).chosen) == {"young"}
    assert set(Sia(SiaSettings(leaving_is_free=True)).decide(state).chosen) == {"other"}
    assert set(sia.decide(dataclasses.replace(state, time_s=1e6)).chosen) == {"other"}


def test_a_pipeline_gets_multiples_of_its_unit_and_is_worth_that():
    """Units of 3 GPUs on nodes of 8: 3 or 6, and no other number."""
    step = ThroughputParams(0.1, 0.01, 0.01, 0.001, 0.02, 0.002, 1.0)
    model = PipelineEstimator({"t4": PipelineGpu(step, 3)}, 4, 1, 4, 64, 1.0, 1000.0)
    assert sia.decide(snapshot("t4:1x8", [job("j")], {"j": model})).chosen["j"].gpus == 6
    alone = sia.decide(snapshot("t4:1x8", [job("j", max_gpus=3)], {"j": model}))
    assert alone.chosen["j"].gpus == 3
    assert alone.solve is not None
    assert alone.solve.objective == pytest.approx(3**-0.5, abs=1e-3), "its slowest way to run is worth 3 GPUs"


def test_a_rigid_job_is_worth_its_gpus():
    """Sia's rigid term: 4 GPUs on the slowest type are worth 4, so that a large rigid job is not starved by small ones."""
    plan = sia.decide(snapshot("t4:1x4", [job("r", adaptivity="rigid", min_gpus=4, max_gpus=4)]))
    assert plan.solve is not None
    assert plan.solve.objective == pytest.approx(4**-0.5, abs=1e-3)


def test_rounded_costs_make_ties():
    """48 and 52 GPUs at p = -0.5: 0.1443 and 0.1387, both 0.14 when rounded, so that the larger is not worth its GPUs."""
    model = {"j": table(t4={1: 1.0, 48: 48.0, 52: 52.0})}
    held = job(
        "j", phase=Phase.RUNNING, allocation=on("t4", **{f"t4_{i:02d}": 4 for i in range(12)}), max_gpus=52, min_gpus=1
    )
    state = snapshot("t4:13x4", [held], model, time_s=1e9)
    assert sia.decide(state).chosen["j"].gpus == 52
    assert Sia(SiaSettings(round_costs=True)).decide(state).chosen["j"].gpus == 48


def test_more_than_64_gpus_are_given_unless_as_the_artifact():
    model = {"j": table(t4={1: 1.0, 64: 50.0, 96: 70.0})}
    state = snapshot("t4:24x4", [job("j", max_gpus=96)], model)
    assert sia.decide(state).chosen["j"].gpus == 96
    assert Sia(SiaSettings(max_job_gpus=64)).decide(state).chosen["j"].gpus == 64
    assert make_policy("sia:artifact")[1].settings["sia:artifact"]["max_job_gpus"] == 64


def test_a_job_younger_than_a_restart_moves_only_as_the_artifact():
    """1.5 times faster elsewhere; at an age of 50 s with a restart cost of 60 s, r = 50 / 110."""
    each = job("j", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), submit_s=950.0, max_gpus=1)
    state = snapshot("t4:1x1,a100:1x1", [each], {"j": table(t4={1: 1.0}, a100={1: 1.5})}, restart_cost_s=60.0)
    assert sia.decide(state).chosen["j"].gpu_type == "t4"
    assert Sia(SiaSettings(restart_free_when_young=True)).decide(state).chosen["j"].gpu_type == "a100"


def test_a_first_round_prefers_the_faster_type_unless_blind():
    """Two jobs, one fast GPU: the one that gains most from it gets it; blind, the older one, whatever it gains."""
    models = {"old": table(t4={1: 1.0}, a100={1: 1.1}), "young": table(t4={1: 1.0}, a100={1: 5.0})}
    jobs = [job("old", submit_s=1, max_gpus=1), job("young", submit_s=2, max_gpus=1)]
    state = snapshot("t4:1x1,a100:1x1", jobs, models)
    assert sia.decide(state).chosen["young"].gpu_type == "a100"
    blind = Sia(SiaSettings(blind_start=True)).decide(state)
    one = snapshot("t4:1x4", [job("j")])
    assert sia.decide(one).chosen["j"].gpus == 4
    assert Sia(SiaSettings(blind_start=True)).decide(one).chosen["j"].gpus == 1
    assert blind.solve is not None
    assert blind.solve.objective == pytest.approx(2.0, abs=0.01)


def test_the_artifact_starts_jobs_on_the_first_type_of_its_order_while_there_is_room():
    """Three jobs that never ran, all types alike to them: two T4, then the A100, which comes before the RTX."""
    jobs = [job(name, submit_s=at, max_gpus=1) for at, name in enumerate("abc")]
    chosen = make_policy("sia:artifact")[0].decide(snapshot("rtx:1x4,a100:1x4,t4:1x2", jobs)).chosen
    assert sorted(configuration.gpu_type for configuration in chosen.values()) == ["a100", "t4", "t4"]
    with_order = Sia(SiaSettings(blind_start=True, start_order=("rtx",)))
    chosen = with_order.decide(snapshot("rtx:1x4,a100:1x4,t4:1x2", jobs)).chosen
    assert {configuration.gpu_type for configuration in chosen.values()} == {"rtx"}


def test_prices_say_which_gpus_are_sought():
    jobs = [job(str(i), max_gpus=8) for i in range(4)]
    models = {str(i): table(t4={1: 1.0}, a100={1: 3.0, 8: 9.0}) for i in range(4)}
    plan = sia.decide(snapshot("t4:2x4,a100:1x1", jobs, models))
    assert plan.prices["a100"] > plan.prices["t4"] == 0


def test_who_moves_for_another_is_told_for_whom():
    one = job("one", phase=Phase.RUNNING, allocation=on("t4", t4_00=1), max_gpus=1)
    two = job("two", phase=Phase.RUNNING, allocation=on("t4", t4_01=1), max_gpus=1)
    big = job("big", min_gpus=4, max_gpus=4, submit_s=1.0)
    plan = sia.decide(snapshot("t4:2x4", [one, two, big], restart_cost_s=10.0))
    assert len(plan.assignments) == 3
    assert [a.reason.text for a in plan.assignments.values() if "other nodes" in a.reason.text] == [
        "keeps 1 t4 on other nodes: makes room for job big"
    ]


def test_a_round_on_nothing_is_no_trouble():
    assert sia.decide(snapshot((), [])).assignments == {}
    assert sia.decide(snapshot((), [job("j")])).waiting["j"].code is ReasonCode.NEVER_FITS
    assert sia.decide(snapshot("t4:1x4", [])).assignments == {}
