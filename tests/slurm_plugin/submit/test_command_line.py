"""How a command line of sbatch is parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_slurm.submit.command_line import adaptive_flags, parse, parse_help, sbatch_lines, values
from penstock_slurm.submit.flags import BadFlag

# Lines as sbatch 22.05.8 prints them.
HELP = """\
Usage: sbatch [OPTIONS(0)...] [ : [OPTIONS(N)...]] script(0) [args(0)...]

Parallel run options:
  -a, --array=indexes         job array index values
  -c, --cpus-per-task=ncpus   number of cpus required per task
      --comment=name          arbitrary comment
      --container             Path to OCI container bundle
      --export[=names]        specify environment variables to export
  -H, --hold                  submit job in held state
  -J, --job-name=jobname      name of job
  -k, --no-kill               do not kill job on node failure
      --nice[=value]          decrease scheduling priority by value
  -N, --nodes=N               number of nodes on which to run (N = min[-max])
  -o, --output=out            file for batch script's standard output
  -p, --partition=partition   partition requested
      --parsable              outputs only the jobid and cluster name (if present),
      --signal=[[R][B]:]num[@time] send signal when time limit within time seconds
  -Q, --quiet                 quiet mode (suppress informational messages)
  -t, --time=minutes          time limit
  -v, --verbose               verbose mode (multiple -v's increase verbosity)
  -W, --wait                  wait for completion of submitted job
      --wrap[=command string] wrap command string in a sh script and submit
"""


PLUGIN = """
Options provided by plugins:
      --adaptive=[MODE]       let Penstock choose the GPUs
      --max-gpus=N            most GPUs that the job can use
"""


OPTIONS = parse_help(HELP)


@pytest.mark.parametrize("help_of_plugin", ["", PLUGIN], ids=["bare", "plugin"])
@pytest.mark.parametrize(
    ("words", "script"),
    [
        ("train.sh --preset x --dry-run", "train.sh"),
        ("-N 2 train.sh", "train.sh"),
        ("-N2 train.sh", "train.sh"),
        ("-QN 2 train.sh", "train.sh"),
        ("-Qv train.sh", "train.sh"),
        ("-k train.sh", "train.sh"),
        ("--nodes 2 --time=5 train.sh a b", "train.sh"),
        ("--nod 2 train.sh", "train.sh"),
        ("--nice train.sh", "train.sh"),
        ("--export NONE train.sh", "train.sh"),
        ("--wrap train.sh", None),
        ("--hold --wait train.sh", "train.sh"),
        ("--adaptive --max-gpus 8 train.sh", "train.sh"),
        ("--adaptive --max-g 8 train.sh", "train.sh"),
        ("--adaptive train.sh", "train.sh"),
        ("-- -odd.sh", "-odd.sh"),
        ("--unknown train.sh", "train.sh"),
        ("- x", "-"),
        ("--hold", None),
        ("-p a --hold : -p b train.sh", "train.sh"),
    ],
)
def test_finds_the_script(words: str, script: str | None, help_of_plugin: str) -> None:
    line = parse(words.split(), parse_help(HELP + help_of_plugin))
    assert line.script == script
    assert [*(word for pair in line.options for word in pair), *line.rest] == words.split()
    assert line.own == {}


def test_own_words_are_taken_and_all_others_left() -> None:
    typed = "-N 2 --preset big --time 5 --dry-run --preset=small t.sh --preset x"
    line = parse(typed.split(" "), OPTIONS)
    assert line.own == {"preset": ["big", "small"], "dry-run": [""]}
    assert line.options == [["-N", "2"], ["--preset", "big"], ["--time", "5"], ["--preset", "small"]]
    assert line.rest == ["t.sh", "--preset", "x"]
    with pytest.raises(BadFlag, match="--preset needs a value"):
        parse(["--preset"], OPTIONS)


@given(
    st.lists(
        st.sampled_from(["-N", "2", "-QN2", "--", "-", ":", "a.sh", "--time", "--time=1", "--nice", "-vv", "", "é"])
    )
)
def test_no_word_is_lost_or_changed(words: list[str]) -> None:
    line = parse(words, OPTIONS)
    assert [*(word for pair in line.options for word in pair), *line.rest] == words


def test_the_last_value_of_an_option_counts() -> None:
    words = [["-p", "a"], ["--partition=b"], ["-t5"], ["-QJ", "name"], ["--hold"]]
    found = values(words, OPTIONS)
    assert found == {"partition": "b", "time": "5", "quiet": "", "job-name": "name", "hold": ""}
    assert adaptive_flags([["--adaptive"], ["--max-gpus", "4"], ["--max-gpus=8"], ["--non-preemptible"]], OPTIONS) == {
        "adaptive": "adaptive",
        "max-gpus": "8",
        "non-preemptible": "yes",
    }


def test_reads_the_lines_that_sbatch_reads() -> None:
    script = "#!/bin/sh\n# about\n#SBATCH --time=5 # a comment\n\n#SBATCH -J 'my job'\ntrue\n#SBATCH --hold\n"
    assert sbatch_lines(script) == ["--time=5", "-J", "my job"]
