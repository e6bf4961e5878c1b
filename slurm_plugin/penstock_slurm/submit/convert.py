"""Writes the header of a script for Penstock, as job_submit.lua has read it.

sbatch and job_submit.lua read the options; here they are only found again in the text. Lines of GPUs, tasks, CPUs and
memory stay, because the shares of a GPU follow from them together. The flags say how many GPUs the job can have.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from penstock_slurm.submit import command_line
from penstock_slurm.submit.command_line import Options
from penstock_slurm.submit.flags import flags

_READ_AS = re.compile(r"^sbatch: penstock: .*\. In flags, this is (.*); give others", re.MULTILINE)
_REFUSED = re.compile(r"^sbatch: error: (penstock: --([a-z-]+).*?(?:[,;] (?:or )?write (--\S+))?)$", re.MULTILINE)
_SAME_FIELD = {"gpus-per-node": "gres"}
"""Options that job_submit.lua cannot tell from another one, and calls by its name."""


def read_as(said: str, options: Options) -> dict[str, str]:
    """The flags, name -> value, that mean what job_submit.lua has read, from sbatch's messages; none if the job is refused."""
    found = _READ_AS.search(said)
    return command_line.adaptive_flags([[word] for word in found[1].split()], options) if found is not None else {}


def comment_out(script: str, said: str, options: Options) -> str:
    """The script with each line that has a refused option as a comment: below the reason, above the line to write instead."""
    refused = {name: (why, instead) for why, name, instead in _REFUSED.findall(said) if name != "adaptive"}
    lines = script.split("\n")
    for number, words in reversed(command_line.header(script)):
        kept, reasons, at = list[str](), dict[str, str](), 0
        for option in command_line.parse([shlex.split(word)[0] for word in words], options).options:
            for name in command_line.values([option], options):
                if (key := _SAME_FIELD.get(name, name)) in refused:
                    reasons.update([refused[key]])
                    break
            else:
                kept += words[at : at + len(option)]
            at += len(option)
        kept += [*words[at:], *filter(None, reasons.values())]
        if reasons:
            new = [f"# {why}" for why in reasons] + [f"#{lines[number]}"]
            lines[number : number + 1] = [*new, *([f"#SBATCH {' '.join(kept)}"] if kept else [])]
    return "\n".join(lines)


def with_flags(script: str, wanted: Mapping[str, str], options: Options) -> str:
    """The script with those flags in a line after its header that it does not have."""
    header = command_line.header(script)
    pairs = command_line.parse(command_line.sbatch_lines(script), options).options
    own = command_line.adaptive_flags(pairs, options)
    words = [_word(name, value) for name, value in wanted.items() if own.get(name) != value]
    if not words:
        return script
    lines = script.split("\n")
    after = max((number for number, _ in header), default=0) + 1
    return "\n".join([*lines[:after], f"#SBATCH {shlex.join(words)}", *lines[after:]])


def _word(name: str, value: str) -> str:
    return f"--{name}" if value == flags()[name].bare_value else f"--{name}={value}"
