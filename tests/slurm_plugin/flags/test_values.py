"""flags.c, penstock.lua, submit/flags.py and values.py accept the same values, and read them alike."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_scheduler.model import JobSpec, parse_spec, validate_spec
from penstock_scheduler.people.errors import BadJobSpec
from penstock_slurm.install.units import source
from penstock_slurm.submit.flags import BadFlag, flags, read, spec_of
from tests.slurm_plugin.flags import values

LUAS = [found for name in ("lua5.1", "lua5.2", "lua5.3", "lua5.4", "lua") if (found := shutil.which(name))]
SITE_WORDS = ("there are no GPUs of type", "is not in the catalogue", "twice")
"""Parts of refusals that are not about a value's form."""


@pytest.fixture(scope="module")
def check_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The checks of flags.c as a program, built with warnings as errors."""
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("make or a C compiler is not installed (Debian: make gcc)")
    folder = tmp_path_factory.mktemp("spank") / "spank"
    shutil.copytree(source("spank"), folder, ignore=shutil.ignore_patterns("*.so", "check_flags"))
    subprocess.run(["make", "-C", str(folder), "WERROR=-Werror", "check"], check=True, capture_output=True)
    return [str(folder / "check_flags")]


@pytest.fixture(params=LUAS or [None], ids=lambda path: Path(path).name if path else "no lua")
def lua(request: pytest.FixtureRequest) -> list[str]:
    """An interpreter with the harness; penstock.lua is loaded as slurmctld would."""
    if request.param is None:
        pytest.skip("no Lua is installed (Debian: lua5.1)")
    return [request.param, str(Path(__file__).with_name("spec.lua")), str(source("lua") / "penstock.lua")]


def ask_c(program: list[str], cases: list[tuple[str, str]]) -> list[str]:
    text = "".join(f"{flag}={value}\0" for flag, value in cases)
    return subprocess.run(program, input=text.encode(), capture_output=True, check=True).stdout.decode().split()


def ask_lua(program: list[str], cases: list[dict[str, str]]) -> list[str]:
    text = "".join("".join(f"{flag}={value}\x1f" for flag, value in case.items()) + "\x1e" for case in cases)
    done = subprocess.run(program, input=text.encode(), capture_output=True, check=True)
    answers = done.stdout.decode(errors="replace").splitlines()
    assert len(answers) == len(cases)
    return answers


def test_the_flags_are_the_same_everywhere(check_flags: list[str], lua: list[str]) -> None:
    listing = subprocess.run([*check_flags, "--list"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=3) for line in listing.splitlines()]
    in_lua = subprocess.run([*lua, "--list"], capture_output=True, text=True, check=True).stdout.split()
    assert [row[0] for row in rows] == in_lua
    assert in_lua == list(flags())
    assert set(in_lua) == set(values.FORMS)
    for name, variable, _, example in rows:
        assert variable == "PENSTOCK_" + name.upper().replace("-", "_")
        assert values.good(name, example)


def check_values(check_flags: list[str], lua: list[str], count: int, seed: int) -> None:
    rng = random.Random(seed)
    cases = [(flag, values.fuzzed(flag, rng)) for flag in values.FORMS for _ in range(count // len(values.FORMS) + 1)]
    specs = [{"adaptive": "adaptive", "max-gpus": "999999999"} | {flag: value} for flag, value in cases]
    verdicts = ask_c(check_flags, cases)
    answers = ask_lua(lua, specs)
    accepted = 0
    for (flag, value), verdict, answer in zip(cases, verdicts, answers, strict=True):
        case = f"--{flag}={value!r}: {verdict}, {answer} (seed {seed})"
        assert verdict == ("good" if values.good(flag, value) else "bad"), case
        formed = answer.startswith("yes ") or any(words in answer for words in SITE_WORDS)
        if flag in ("adaptive", "min-gpus", "max-gpus"):
            assert answer.startswith("no ") or verdict == "good", case
            continue
        assert formed == (verdict == "good"), case
        if answer.startswith("yes "):
            accepted += 1
            spec = parse_spec(answer[4:])
            assert spec == JobSpec.model_validate({"max_gpus": 999_999_999} | values.fields(flag, value)), case
        else:
            assert answer.startswith("no "), case
    assert accepted > count / 20


def test_values_a_few_thousand(check_flags: list[str], lua: list[str]) -> None:
    check_values(check_flags, lua, 4000, random.randrange(10**9))


def test_penstock_submit_reads_values_alike() -> None:
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    defaults = {field: JobSpec.model_fields[field].default for field in values.SWITCHES.values()}
    accepted = 0
    for flag in values.FORMS:
        for _ in range(300):
            value = values.fuzzed(flag, rng) if rng.random() < 0.7 else values.example(flag, rng)
            case = f"--{flag}={value!r} (seed {seed})"
            try:
                fields = read(flags()[flag], value)
            except BadFlag:
                units = [item.split("=")[0] for item in value.split(",")]
                assert not values.good(flag, value) or (flag == "scale-unit" and len(set(units)) < len(units)), case
                continue
            accepted += 1
            assert values.good(flag, value), case
            assert defaults | fields == defaults | values.fields(flag, value), case
    assert accepted > 1000


def test_penstock_submit_makes_the_spec_that_lua_makes() -> None:
    assert spec_of({"adaptive": "rigid", "max-gpus": "4"}) == JobSpec(adaptivity="rigid", min_gpus=4, max_gpus=4)
    assert spec_of({"adaptive": "rigid", "min-gpus": "4"}) == JobSpec(adaptivity="rigid", min_gpus=4, max_gpus=4)
    assert spec_of({"adaptive": "adaptive", "max-gpus": "8", "non-preemptible": "yes"}) == JobSpec(
        max_gpus=8, preemptible=False
    )
    for bad, words in (
        ({"max-gpus": "8"}, "--max-gpus needs --adaptive"),
        ({"adaptive": "adaptive"}, "--adaptive needs the most GPUs"),
        ({"adaptive": "rigid"}, "--adaptive needs the most GPUs"),
        ({"adaptive": "adaptive", "max-gpus": "x"}, "--max-gpus=x: give a whole number from 1 to 999999999, such as"),
    ):
        with pytest.raises(BadFlag, match=words):
            spec_of(bad)


@pytest.mark.long
def test_values_by_the_hundred_thousand(check_flags: list[str], lua: list[str]) -> None:
    for _ in range(10):
        check_values(check_flags, lua, 10_000, random.randrange(10**9))


def test_whole_specs(lua: list[str]) -> None:
    """Any set of good flags: accepted with exactly those fields, or refused where JobSpec refuses too or the site does."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    cases = []
    for _ in range(1500):
        chosen = [flag for flag in values.FORMS if flag in ("adaptive", "max-gpus") or rng.random() < 0.3]
        case = {flag: values.example(flag, rng) for flag in chosen}
        for bound in ("min-gpus", "max-gpus"):
            if bound in case:
                case[bound] = str(rng.choice([1, 2, 5, 8, 16]))
        cases.append(case)
    accepted = 0
    for case, answer in zip(cases, ask_lua(lua, cases), strict=True):
        about = f"{case}: {answer} (seed {seed})"
        fields = {"min_gpus": 1}
        for flag, value in case.items():
            fields |= values.fields(flag, value)
        if case["adaptive"] == "rigid" and "min-gpus" not in case:
            fields["min_gpus"] = fields["max_gpus"]
        try:
            expected = validate_spec(fields)
        except BadJobSpec:
            assert answer.startswith("no "), about
            continue
        assert answer.startswith("yes "), about
        accepted += 1
        assert parse_spec(answer[4:]) == expected, about
    assert accepted > 300


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max-gpus": "8"}, "--max-gpus needs --adaptive"),
        ({"adaptive": "adaptive"}, "--adaptive needs the most GPUs that the job can use, such as --max-gpus=8"),
        ({"adaptive": "rigid"}, "--adaptive=rigid needs a GPU count, such as --max-gpus=4"),
        ({"adaptive": "rigid", "min-gpus": "2", "max-gpus": "4"}, "or --adaptive=strong-scaling"),
        (
            {"adaptive": "adaptive", "min-gpus": "4", "max-gpus": "2"},
            "--min-gpus=4 is more than --max-gpus=2: lower it",
        ),
        (
            {"adaptive": "adaptive", "max-gpus": "8", "gpu-types": "h100"},
            "no GPUs of type h100 here; the types are a100, rtx",
        ),
        (
            {"adaptive": "adaptive", "max-gpus": "8", "scale-unit": "h100=2"},
            "--scale-unit: there are no GPUs of type h100",
        ),
        (
            {"adaptive": "adaptive", "max-gpus": "8", "scale-unit": "t4=2,t4=4"},
            "--scale-unit=t4=2,t4=4: names t4 twice",
        ),
        ({"adaptive": "adaptive", "max-gpus": "7", "min-gpus": "5", "scale-unit": "4"}, "from 5 to 7 is a multiple of"),
        (
            {"adaptive": "adaptive", "max-gpus": "8", "model-family": "gpt"},
            "the catalogue; the families are bert-squad, ncf",
        ),
        (
            {"adaptive": "adaptive", "max-gpus": "8", "batch-size": "9", "max-batch-size": "8"},
            "is less than --batch-size=9",
        ),
        ({"adaptive": "adaptive", "max-gpus": "8", "burst": "never", "burst-budget": "5"}, "or give --burst=allowed"),
        ({"adaptive": "adaptive", "max-gpus": "8", "NEW_FLAG": "5"}, "penstock.lua is older than the plugin"),
        ({"adaptive": "adaptive", "max-gpus": '8","x":"1'}, '--max-gpus=8","x":"1: give a whole number'),
        ({"adaptive": "adaptive", "max-gpus": "8", "trial-group": "a\nb\x1b[2J"}, "--trial-group=a?b?[2J: give a name"),
    ],
)
def test_a_contradiction_is_refused_with_its_remedy(lua: list[str], given: dict[str, str], words: str) -> None:
    (answer,) = ask_lua(lua, [given])
    assert answer.startswith("no ")
    assert words in answer


def test_a_job_for_the_cloud_alone_is_refused_where_there_is_none(lua: list[str]) -> None:
    given = {"adaptive": "adaptive", "max-gpus": "8", "burst": "only"}
    (answer,) = ask_lua([*lua, "--no-cloud"], [given])
    assert answer.startswith("no --burst=only: this site has no cloud")
    (answer,) = ask_lua([*lua, "--no-cloud"], [given | {"burst": "allowed"}])
    assert answer.startswith("yes ")
