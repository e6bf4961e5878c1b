"""python-mip and its larger library are optional: what works without them, and what says so before a round does."""

import subprocess
import sys

import highspy
import pytest

from penstock_scheduler.model import SolveStatus
from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.rounds.policies import REGISTRY, make_policy
from penstock_scheduler.rounds.solver import SolveFailed, solve
from penstock_scheduler.rounds.solver.shares import Choice, ValuedShare, choose_shares
from tests.scheduler.solver.test_solve import crowd

SHARES = [Choice((ValuedShare(4, 4, 1.0), ValuedShare(8, 8, 1.5)))]


@pytest.fixture
def no_cbc(monkeypatch):
    """An environment with python-mip and HiGHS, as in the Debian packages."""
    monkeypatch.setitem(sys.modules, "cbcbox", None)


@pytest.fixture
def no_mip(monkeypatch, no_cbc):
    """What the extra `slurm` installs."""
    monkeypatch.setitem(sys.modules, "mip", None)


def test_without_python_mip_the_default_solver_gives_the_same_answer(monkeypatch):
    with_mip = solve(crowd())
    monkeypatch.setitem(sys.modules, "mip", None)
    assert (solve(crowd()).choice_J == with_mip.choice_J).all()


def test_without_cbc_auto_asks_highs_through_python_mip(no_cbc, monkeypatch):
    monkeypatch.setattr(highspy.Highs, "run", lambda self: None)  # python-mip calls the library itself
    solution = solve(crowd(), "auto")
    assert solution.report.solver == "milp-highs"
    assert solution.report.gap <= 1e-4


def test_without_python_mip_trouble_fails_the_round_and_says_what_could_help(no_mip, monkeypatch):
    monkeypatch.setattr(highspy.Highs, "run", lambda self: None)
    with pytest.raises(SolveFailed, match=r"HiGHS.*pip install mip highsbox.*the last allocation stays") as error:
        solve(crowd(), "auto")
    assert error.value.status is SolveStatus.NUMERICAL


def test_a_policy_that_needs_python_mip_is_refused_with_the_settings(no_mip):
    remedy = r"python-mip is not installed; pip install mip highsbox"
    make_policy("sia")
    with pytest.raises(ConfigError, match=remedy):
        make_policy("sia", {"solver": "milp"})
    with pytest.raises(ConfigError, match=remedy):
        make_policy(PolicyChoice(name="sia", stages=("synergy-opt",)))
    make_policy(PolicyChoice(name="sia", stages=("synergy-tune",)))
    with pytest.raises(ConfigError, match=remedy):
        solve(crowd(), "milp")


def test_milp_runs_the_library_that_is_there(monkeypatch):
    assert solve(crowd(), "milp").report.solver == "milp-highs"
    monkeypatch.setitem(sys.modules, "highsbox", None)
    assert solve(crowd(), "milp").report.solver == "milp-cbc"


def test_without_cbc_python_mip_is_enough(no_cbc):
    make_policy("sia", {"solver": "milp"})
    make_policy(PolicyChoice(name="sia", stages=("synergy-opt",)))
    assert solve(crowd(), "milp").report.solver == "milp-highs"


def test_shares_are_chosen_by_the_library_that_is_there(no_cbc):
    assert choose_shares(SHARES, 8, 8).report.solver == "shares-highs"


def test_penstockd_and_its_policies_load_without_python_mip():
    code = (
        "import sys; sys.modules['mip'] = sys.modules['cbcbox'] = None\n"
        "import penstock_scheduler.daemon.penstockd, penstock_scheduler.cli\n"
        "from penstock_scheduler.rounds.policies import REGISTRY, make_policy\n"
        "print(*(make_policy(name)[0].name for name in REGISTRY))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == list(REGISTRY), done.stderr


def test_penstockd_loads_its_modules_and_policies_without_the_slow_packages():
    """Tables need pandas, and programs of solvers python-mip: whoever makes them loads them."""
    code = (
        "import importlib, pkgutil, sys\n"
        "import penstock_scheduler.daemon as daemon\n"
        "from penstock_scheduler.rounds.policies import REGISTRY, make_policy\n"
        "for each in pkgutil.walk_packages(daemon.__path__, 'penstock_scheduler.daemon.'):\n"
        "    if not each.name.endswith('__main__'): importlib.import_module(each.name)\n"
        "for name in REGISTRY: make_policy(name)\n"
        "print({'pandas', 'scipy', 'matplotlib', 'mip'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr
