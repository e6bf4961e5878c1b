"""The examples in the documentation work."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_loopback.fixtures import skip_without_slurm
from penstock_scheduler.model import JobSpec, parse_spec
from penstock_scheduler.rounds.policies import REGISTRY, make_policy
from penstock_scheduler.rounds.settings import DaemonSettings, parse_settings, reference
from penstock_scheduler.simulator.workloads import read_workload
from penstock_scheduler.simulator.workloads.own import COLUMNS
from penstock_scheduler.simulator.workloads.public import SACCT_COLUMNS as SACCT
from penstock_slurm.settings import SlurmSettings
from tests.scheduler.builders import job, snapshot
from tests.scheduler.policies.documented import NAME, documented
from tests.slurm_plugin.flags import values

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_settings_file_of_the_admins_page_is_valid_and_shows_the_defaults():
    text = blocks("docs/admin/install.md", "toml")[0]
    settings = parse_settings(text, "docs/admin/install.md")
    assert settings.section(DaemonSettings) == DaemonSettings()
    assert settings.section(SlurmSettings) == SlurmSettings(partitions=("gpu",))
    shown = make_policy(settings.policy)[1]
    assert shown == make_policy("sia")[1]
    for model in (DaemonSettings, SlurmSettings):
        for key in model.model_fields:
            assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), f"{key} is not on the page"


def test_the_page_on_policies_names_all_of_them_and_shows_the_defaults():
    text = "\n".join(blocks("docs/admin/policies.md", "toml"))
    settings = parse_settings(text, "docs/admin/policies.md")
    page = (ROOT / "docs/admin/policies.md").read_text(encoding="utf-8")
    for name in REGISTRY:
        assert f"| `{name}` |" in page
        if shown := settings.policies.get(name):
            full = make_policy(name)[1].settings[name]
            assert shown == {key: full[key] for key in shown}
            assert all(key in page for key in full)


def test_the_specs_on_the_pages_are_valid():
    for page in ("docs/user/jobs.md",):
        found = re.findall(r"--comment='([^']+)'", (ROOT / page).read_text(encoding="utf-8"))
        assert found
        for comment in found:
            assert parse_spec(comment) is not None
            assert json.loads(comment)


@pytest.mark.parametrize("page", ["docs/admin/install.md", "docs/admin/sbatch-plugin.md"])
def test_the_pages_on_installing_say_who_runs_each_block(page: str):
    """`deploy/follow-install-page` runs the blocks on a fresh machine, as root or as a user by their first lines."""
    found = re.findall(
        r"^```\n(# as (?:root|a user)\b.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert {text.split()[2].strip(",") for text in found} == {"root", "a"}
    for text in found:
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0, text
    users = next(text for text in found if text.startswith("# as a user"))
    assert "penstock list\n" in users
    assert "PENSTOCK_" not in users, "no variable is needed"


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("page", "waits", "shown"),
    [
        ("docs/admin/install.md", {}, r"^1 +wrap +\S+ +running .*8 a100"),
        pytest.param(
            "docs/admin/sharing.md",
            {"sleep 40": "until squeue -ah -t SUSPENDED | grep -q wrap; do sleep 2; done"},
            r"^3 +wrap .* 67% of the time, in time ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_trying_it_as_on_the_page_runs_jobs(tmp_path, page: str, waits: dict[str, str], shown: str):
    """The commands of the page, except the first, and each wait that is too short on a busy machine."""
    skip_without_slurm(accounting=False)
    first, commands = blocks(page, "bash")[0].split("\n", 1)
    assert first == "source .venv/bin/activate"
    for wait, until in waits.items():
        assert f"\n{wait}\n" in commands
        commands = commands.replace(wait, until)
    tidy = "trap 'kill $(jobs -p) || true; penstock loopback down --dir try/slurm' EXIT\n"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", tidy + commands],
        cwd=tmp_path,
        env=dict(os.environ, PATH=path),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "settings: ok" in done.stdout
    assert re.search(shown, done.stdout, re.MULTILINE), done.stdout


def test_the_page_of_flags_has_every_flag_and_its_field():
    page = (ROOT / "docs/user/flags.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--([a-z-]+)[^|]*\|.*\| (`[a-z_`, ]+`) \|$", page, re.MULTILINE)
    assert {flag for flag, _ in rows} == set(values.FORMS)
    fields = {field for _, cell in rows for field in re.findall(r"[a-z_]+", cell)}
    assert fields == {*JobSpec.flags(), "excluded_gpu_types"}
    jobs = (ROOT / "docs/user/jobs.md").read_text(encoding="utf-8")
    assert [name for name in JobSpec.model_fields if f"`{name}`" not in jobs] == []


def test_the_policy_of_contributing_works():
    with documented():
        policy = make_policy(NAME)[0]
    plan = policy.decide(snapshot("t4:1x2", [job("a", submit_s=1), job("b", submit_s=2), job("c", submit_s=3)]))
    assert {name: str(given) for name, given in plan.chosen.items()} == {"a": "1 t4", "b": "1 t4"}
    assert set(plan.waiting) == {"c"}


def test_the_workloads_on_their_page_are_read(tmp_path):
    page = (ROOT / "docs/admin/workloads.md").read_text(encoding="utf-8")
    (tmp_path / "x.csv").write_text(
        next(text for text in re.findall(r"```\n(.*?)```", page, re.DOTALL) if text.startswith("id,"))
    )
    (tmp_path / "x.json").write_text(*blocks("docs/admin/workloads.md", "json"))
    for name in ("x.csv", "x.json"):
        prep, tune = read_workload(tmp_path / name).jobs
        assert (prep.duration_s, tune.model, tune.spec.max_gpus) == (1800, "bert-squad", 16)


def test_every_column_of_a_workload_is_on_its_page():
    page = (ROOT / "docs/admin/workloads.md").read_text(encoding="utf-8")
    for name in COLUMNS:
        assert f"`{name}`" in page
    assert ",".join(SACCT) in page


def test_the_rooms_on_the_page_about_a_jobs_life_exist():
    page = (ROOT / "docs/developer/life-of-a-job.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([a-z_/]+(?:\.py|\.c|\.lua|/[a-z_]*))`", page) if "script/" not in name}
    roots = [ROOT, ROOT / "scheduler/penstock_scheduler", ROOT / "slurm_plugin", ROOT / "profiles", ROOT / "executor"]
    roots += [ROOT / "slurm_plugin/lua", ROOT / "executor/penstock_executor", ROOT / "profiles/penstock_profiles"]
    assert len(named) > 20
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []


def test_lines_of_the_pages_are_short():
    """Prose has at most 120 characters a line. Markdown cannot wrap the rows of a table; code is as long as it must be."""
    listing = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listing:
        pytest.skip("not a git checkout")
    found = []
    for page in listing.split():
        code = False
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
            fence = line.lstrip().startswith("```") or line.count("$$") == 1
            code ^= fence
            if len(line) > 120 and not (code or fence or line.startswith("|") or "](" in line or "$$" in line):
                found.append(f"{page}:{number}: {len(line)} characters")
    assert found == []


def test_each_decision_has_a_number_of_its_own():
    pages = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        assert page.read_text().startswith(f"# {int(page.name[:4])}. "), page.name


HARD_TO_READ = {
    "a clause as subject": r"(?:^|(?<=[.;:|-] ))(?:What|Whatever|Who)\b(?! if\b)(?![^.;|]*\?)",
    "None: ...": r"\b(?:[Nn]one|[Ee]mpty): ",
    "nobody": r"\b[Nn]obody\b",
    "nothing as subject": r"\b[Nn]othing (?:is|was|can|may|must|will|would|[a-z]+s)\b",
    "of which": r"\bof (?:which|whom|whose)\b(?! (?:type|user|job|node)\b)",
    "also": r"(?:^|(?<=[.;:|-] ))Also\b|, also\b",
    "so": r"\b(?:says?|said|took) so\b|\band so\b(?! (?:on|is|are|does|do)\b)|(?<!do )(?<!does )\bso[.;:]|\bso long\b",
    "before": r"(?:^|(?<=[.;:|-] ))Before,|\bas before\b|, before[,.;]|\bbefore[.;)]",
    "there": r"\b(?:is|are|was|were|be|stays?) there[.,;:)]",
}
"""The patterns of docs/developer/style.md."""


def hard_to_read(text: str) -> dict[str, list[str]]:
    """Each pattern of `HARD_TO_READ`, and where the text has it. Code does not count."""
    text = re.sub(r"`[^`\n]*`", "`x`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    text = re.sub(r"(?<=[^\n]) *\n *(?![\n|#*-]|\d+\. )", " ", text)
    return {
        name: [
            text[max(0, found.start() - 40) : found.end() + 40] for found in re.finditer(pattern, text, re.MULTILINE)
        ]
        for name, pattern in HARD_TO_READ.items()
    }


REWRITTEN = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "airflow_provider/CHANGELOG.md",
    "docs/user",
    "docs/admin",
    "docs/developer",
    "docs/glossary.md",
)


def test_the_pages_for_users_and_admins_read_well():
    pages = [page for name in REWRITTEN for page in (sorted((ROOT / name).rglob("*.md")) or [ROOT / name])]
    assert len(pages) > 40
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    texts["docs/admin/settings.md"] = reference()
    del texts["docs/developer/style.md"]  # it shows the patterns
    found = [
        f"{page}: {name}: {place!r}"
        for page, text in texts.items()
        for name, places in hard_to_read(text).items()
        for place in places
    ]
    assert found == [], "docs/developer/style.md shows what to write instead"


AT_MOST = {
    "a clause as subject": 487,
    "None: ...": 714,
    "nobody": 49,
    "nothing as subject": 160,
    "of which": 35,
    "also": 58,
    "so": 44,
    "before": 44,
    "there": 19,
}
"""How often the messages and docstrings of the product have each pattern. These numbers may only fall."""


def texts(tree: ast.AST) -> Iterator[str]:
    """The docstrings of public names in a module, and its messages: other strings with a space."""
    docstrings = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            public = not getattr(node, "name", "").startswith("_")
            if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                docstrings[id(node.body[0].value)] = public
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and docstrings.get(id(node), True)
        ):
            yield node.value


def test_messages_and_docstrings_get_no_harder_to_read():
    counts = dict.fromkeys(HARD_TO_READ, 0)
    for package in (*ROOT.glob("*/penstock_*"), ROOT / "airflow_provider/airflow_provider_penstock"):
        for path in package.rglob("*.py"):
            for name, places in hard_to_read("\n\n".join(texts(ast.parse(path.read_text(encoding="utf-8"))))).items():
                counts[name] += len(places)
    more = {name: f"{count}, at most {AT_MOST[name]}" for name, count in counts.items() if count > AT_MOST[name]}
    assert more == {}, "docs/developer/style.md shows what to write instead"
