"""How lines of a script's header are rewritten, from what sbatch says of them."""

from __future__ import annotations

import pytest

from penstock_slurm.submit.command_line import comment_out, header, read_as, sbatch_lines, with_flags
from tests.slurm_plugin.submit.test_command_line import OPTIONS

REQUEUE = "penstock: --no-requeue cannot be used: Penstock requeues: leave it out, or write --non-preemptible"
HOLD = "penstock: --hold cannot be used with --adaptive"
SAID = f"sbatch: error: {REQUEUE}\nsbatch: error: {HOLD}\nallocation failure: Unspecified error\n"


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("#SBATCH --hold", [f"# {HOLD}", "##SBATCH --hold"]),
        ("#SBATCH -H", [f"# {HOLD}", "##SBATCH -H"]),
        ("#SBATCH--hold # later", [f"# {HOLD}", "##SBATCH--hold # later"]),
        ("#SBATCH\t--no-requeue", [f"# {REQUEUE}", "##SBATCH\t--no-requeue", "#SBATCH --non-preemptible"]),
        (
            '#SBATCH -J \'a  b\' --no-requeue  --comment="x # \\" y" --hold -t5 # more',
            [
                *(f"# {REQUEUE}", f"# {HOLD}"),
                '##SBATCH -J \'a  b\' --no-requeue  --comment="x # \\" y" --hold -t5 # more',
                '#SBATCH -J \'a  b\' --comment="x # \\" y" -t5 --non-preemptible',
            ],
        ),
        ("#SBATCH -J --hold", ["#SBATCH -J --hold"]),
        ("#SBATCH --comment=--hold", ["#SBATCH --comment=--hold"]),
        ("#SBATCH -t 5 #--hold", ["#SBATCH -t 5 #--hold"]),
        ("##SBATCH --hold", ["##SBATCH --hold"]),
        (" #SBATCH --hold", [" #SBATCH --hold"]),
        ("# SBATCH --hold", ["# SBATCH --hold"]),
        ("true\n#SBATCH --hold", ["true", "#SBATCH --hold"]),
    ],
)
def test_a_refused_line_is_a_comment_with_the_reason_and_the_line_to_write_instead(line: str, lines: list[str]) -> None:
    before, after = "#!/bin/sh\n# --hold\n\n", "\n\nexec train --hold \\\n  x"
    assert comment_out(before + line + after, SAID, OPTIONS) == before + "\n".join(lines) + after


def test_other_messages_change_nothing() -> None:
    script = "#!/bin/sh\n#SBATCH --hold --gpus-per-node=2 --adaptive\n"
    for said in (
        "",
        "sbatch: penstock: --hold is fine",
        "sbatch: error: --hold: unknown",
        "sbatch: error: penstock: no",
    ):
        assert comment_out(script, said, OPTIONS) == script
    assert comment_out(script, "sbatch: error: penstock: --adaptive needs the most GPUs", OPTIONS) == script


def test_gpus_on_a_node_are_refused_as_gres() -> None:
    said = "sbatch: error: penstock: --gres=gpu:a:1,gpu:b:1: give one number"
    changed = comment_out("#!/bin/sh\n#SBATCH --gpus-per-node=a:1,b:1\n", said, OPTIONS)
    assert changed.split("\n")[2] == "##SBATCH --gpus-per-node=a:1,b:1"


@pytest.mark.parametrize(
    ("script", "converted"),
    [
        (
            "#!/bin/sh\n#SBATCH -t 5\n# x\ntrue\n",
            "#!/bin/sh\n#SBATCH -t 5\n#SBATCH --adaptive --max-gpus=8\n# x\ntrue\n",
        ),
        ("#!/bin/sh\ntrue\n#SBATCH -t 5\n", "#!/bin/sh\n#SBATCH --adaptive --max-gpus=8\ntrue\n#SBATCH -t 5\n"),
        ("#!/bin/sh", "#!/bin/sh\n#SBATCH --adaptive --max-gpus=8"),
        ("#!/bin/sh\n#SBATCH --max-gpus 8\n", "#!/bin/sh\n#SBATCH --max-gpus 8\n#SBATCH --adaptive\n"),
        (
            "#!/bin/sh\n#SBATCH --max-gpus=4\n\f\n",
            "#!/bin/sh\n#SBATCH --max-gpus=4\n#SBATCH --adaptive --max-gpus=8\n\f\n",
        ),
        ("#!/bin/sh\n#SBATCH --adaptive --max-gpus=8\n", "#!/bin/sh\n#SBATCH --adaptive --max-gpus=8\n"),
    ],
)
def test_the_flags_that_are_missing_follow_the_header(script: str, converted: str) -> None:
    wanted = {"adaptive": "adaptive", "max-gpus": "8"}
    assert with_flags(script, wanted, OPTIONS) == converted
    assert with_flags(converted, wanted, OPTIONS) == converted


def test_flags_are_those_that_job_submit_lua_names() -> None:
    said = "sbatch: penstock: the job can have 1 GPU. In flags, this is --min-gpus=1 --gpu-types=^t4; give others to change it\n"
    assert read_as(said, OPTIONS) == {"min-gpus": "1", "gpu-types": "^t4"}
    assert read_as(said.replace("sbatch: ", "sbatch: comment: "), OPTIONS) == {}


def test_words_stand_as_they_are() -> None:
    script = "#!/bin/sh\n#SBATCH -J 'a b'\\ c --comment=\"x'#'y\"#z\n#SBATCH\n \t# no\n#SBATCH --hold\nx\n#SBATCH -k\n"
    assert header(script) == [(1, ["-J", "'a b'\\ c", "--comment=\"x'#'y\""]), (2, []), (4, ["--hold"])]
    assert sbatch_lines(script) == ["-J", "a b c", "--comment=x'#'y", "--hold"]
