"""docs/admin/bursting.md, "Set up cloud nodes", as an admin follows it: its settings and commands, with moto in place of AWS."""

from __future__ import annotations

import getpass
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock_cloud.settings import CloudSettings
from penstock_scheduler.cli import make_app
from tests.cloud.faults import Ec2
from tests.end_to_end.pages import ROOT, run

PAGE = (ROOT / "docs/admin/bursting.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Set up cloud nodes\n")[2].partition("\n### ")[0]
EXAMPLE = re.search(r"^```toml\n(\[daemon\].*?)^```", SECTION, re.DOTALL | re.MULTILINE)


def example(settings: CloudSettings, folder: Path) -> str:
    """The page's settings file; its ids become those of moto's account, and its folders ones of this test."""
    assert EXAMPLE is not None
    text = EXAMPLE[1]
    for page, here in zip(
        ("subnet-0a1b", "subnet-2c3d", "sg-4e5f", "ami-6071"),
        (*settings.subnets, *settings.security_groups, settings.image),
        strict=True,
    ):
        assert text.count(f'"{page}"') == 1
        text = text.replace(page, here)
    text = text.replace("[daemon]\n", f'[daemon]\nstate_dir = "{folder}/state"\n')
    return text.replace("[cloud]\n", f'[cloud]\nshare = "{folder}/share"\n')


SLURM_CONF = re.search(r"^```\n(NodeName=cloud-.*?)^```", SECTION, re.DOTALL | re.MULTILINE)


def pretend_scontrol(folder: Path) -> Path:
    """Make a `scontrol show config` that shows the page's lines of slurm.conf. Returns its folder."""
    assert SLURM_CONF is not None
    pairs = (line.partition("=") for line in SLURM_CONF[1].splitlines())
    shown = "\n".join(f"{key:<23} = {value}" for key, _, value in pairs)
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{shown}\nEND\n")
    program.chmod(0o755)
    return program.parent


def commands() -> list[str]:
    """The commands of the page in its order, each once."""
    return list(dict.fromkeys(re.findall(r"`((?:penstock cloud|install) [^`]+)`", SECTION.replace("\n   ", " "))))


@pytest.mark.parametrize("live", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_steps_of_the_page_set_up_a_site(
    live: bool,
    cloud_settings: Callable[..., CloudSettings],
    ec2: Ec2,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(pretend_scontrol(tmp_path)), prepend=os.pathsep)
    config = tmp_path / "penstock.toml"
    text = example(cloud_settings(), tmp_path)
    ec2.on_demand |= {"g5.12xlarge": 5.672, "g6.12xlarge": 4.602}
    ec2.spot |= {(each, zone): 2.0 for each in ec2.on_demand for zone in ("us-east-1a", "us-east-1b")}
    (site,) = re.findall(r'^site = "(.*?)".*\n', text, re.MULTILINE)
    config.write_text(re.sub(r"^site = .*\n", "", text, flags=re.MULTILINE))
    missing = CliRunner().invoke(make_app(), ["cloud", "doctor", f"--config={config}"])
    made = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", str(missing.exception))
    assert [str(uuid.UUID(each)) for each in made] == made
    assert len(made) == 1, missing
    config.write_text(text.replace(site, made[0]))
    steps = commands()
    assert [each.split()[-1] for each in steps if "penstock cloud" in each] == [
        "policy",
        "refresh",
        "types",
        "doctor",
        "--live",
    ]
    said = {}
    for step in steps if live else steps[:-1]:
        if step.startswith("install "):
            here = step.replace("/var/spool/penstock/cloud", f"{tmp_path}/share").replace("slurm", getpass.getuser())
            assert run(here, tmp_path, {}).returncode == 0
            continue
        done = CliRunner().invoke(
            make_app(), [*step.split()[1:], f"--config={config}", *["--yes"] * ("--live" in step)]
        )
        said[step] = done.output
        assert done.exit_code == 0, f"`{step}`: {done.output}"
    assert "ec2:CreateFleet" in said["penstock cloud policy"]
    assert "g5.12xlarge" in said["penstock cloud types"]
