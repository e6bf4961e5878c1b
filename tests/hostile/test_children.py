"""Every program that Penstock's daemons start goes through `penstock_scheduler.safety.children`: bounded, and named by its path.

The list of exceptions is short, and each has its reason. A new use of `subprocess` fails here until it has one, too.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from penstock_slurm.agent import cuda_checkpoints

ROOT = Path(__file__).parents[2]
PACKAGES = ("profiles", "scheduler", "slurm_plugin", "cloud", "executor", "loopback", "airflow_provider")

STARTS = {
    "subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "os": {"system", "popen", "posix_spawn", "posix_spawnp", "fork", "forkpty", "startfile"},
    "pty": {"spawn", "fork"},
    "multiprocessing": {"Process", "Pool", "get_context"},
}
STARTS["os"] |= {
    f"{call}{how}" for call in ("exec", "spawn") for how in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")
}

OF_USERS = "runs with the rights of the user who starts it, and starts what that user asks for"
IN_JOBS = "runs inside a user's job, where there is no penstock_scheduler"
OWN = "starts a module of Penstock's own by sys.executable, one at a time, and reads its answer while it runs"
TRIES = "starts a Slurm of the caller's own, for tests and demonstrations"

EXCEPTIONS = {
    "scheduler/penstock_scheduler/safety/children.py": "is the one way",
    "scheduler/penstock_scheduler/daemon/service/estimator.py": OWN,
    "scheduler/penstock_scheduler/daemon/service/whatif.py": OWN,
    "scheduler/penstock_scheduler/daemon/service/user_files.py": "talks to a helper of each user, for several requests",
    "scheduler/penstock_scheduler/cli/profile.py": OF_USERS,
    "scheduler/penstock_scheduler/cli/try_script.py": OF_USERS,
    "slurm_plugin/penstock_slurm/submit/cli.py": OF_USERS,
    "slurm_plugin/penstock_slurm/install/units.py": "runs make for the admin who installs, as long as a compiler takes",
    "slurm_plugin/penstock_slurm/agent/cuda_checkpoints.py": "watches helpers beside other work, with a limit of its own",
    "slurm_plugin/penstock_slurm/agent/freezer.py": "starts its guard by sys.executable, which outlives the agent",
    "airflow_provider/airflow_provider_penstock/operators/simulate.py": OF_USERS,
    "executor/penstock_executor/": IN_JOBS,
    "loopback/penstock_loopback/": TRIES,
}


def starts(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of what starts another program, also under another name."""
    tree = ast.parse(text)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {(each.asname or each.name): each.name for each in node.names if each.name in STARTS}
        elif isinstance(node, ast.ImportFrom) and node.module in STARTS:
            yield from ((node.lineno, each.name) for each in node.names if each.name in STARTS[node.module])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and node.attr in STARTS[module]:
                yield node.lineno, f"{module}.{node.attr}"


def sources() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if "/tests/" not in name:
                found[name] = path.read_text()
    return found


def test_what_starts_a_program_is_found() -> None:
    assert [*starts("import subprocess as s\ns.run(['x'])")] == [(2, "subprocess.run")]
    assert [*starts("from asyncio import create_subprocess_exec as go")] == [(1, "create_subprocess_exec")]
    assert [*starts("import os\nos.execvp('x', [])")] == [(2, "os.execvp")]
    assert not [*starts("import subprocess\nsubprocess.CompletedProcess([], 0)\nimport os\nos.getpid()")]


def test_programs_are_started_in_one_place() -> None:
    elsewhere = {
        f"{name}:{line}": what
        for name, text in sources().items()
        if not name.startswith(tuple(EXCEPTIONS))
        for line, what in starts(text)
    }
    assert not elsewhere, "start it by penstock_scheduler.safety.children"


def test_no_exception_is_left_over() -> None:
    using = {name for name, text in sources().items() if [*starts(text)]}
    for exception in EXCEPTIONS:
        assert any(name.startswith(exception) for name in using), exception


def test_the_agent_does_not_wait_for_what_a_helper_has_left_behind() -> None:
    """A helper runs as the job's user, who can make it give its pipe to another process."""
    script = "echo said >&2; sleep 1000 >/dev/null & echo $!"
    helper = subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert helper.stdout is not None
    assert helper.stderr is not None
    left = int(helper.stdout.readline())
    try:
        assert helper.wait(60) == 0
        assert cuda_checkpoints._said(helper.stderr) == "said"
        assert cuda_checkpoints._said(helper.stderr) == ""
    finally:
        os.kill(left, signal.SIGKILL)
        helper.stdout.close()
        helper.stderr.close()
