"""Parses a command line of sbatch as far as Penstock needs: Penstock's own options, and where the script begins.

sbatch reads options up to the first argument that is not one (the script) or up to `--`. To find the script, one must know which
options take the next argument as their value. `sbatch --help` lists them, for the installed version and plugins.

Writes the header of a script for Penstock, as job_submit.lua has read it.

sbatch and job_submit.lua read the options; here they are only found again in the text. Lines of GPUs, tasks, CPUs and
memory stay, because the shares of a GPU follow from them together. The flags say how many GPUs the job can have.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_scheduler.model.flags import Flag
from penstock_slurm.submit import command_line
from penstock_slurm.submit.flags import BadFlag, flags

_OPTION = re.compile(r"^\s+(?:-(\w), )?--([a-z][a-z0-9-]*)(\[?=)?", re.MULTILINE)

UNDOCUMENTED = frozenset({"container", "export", "network", "wrap"})
"""Options that take a value although the help of 22.05.8 does not show it."""

OWN = {"preset": True, "dry-run": False, "explain-request": False, "convert": False}
"""Penstock's own options -> whether they take a value."""

END_OF_SBATCH_LINES = re.compile(r"\s*[^#\s]")
"""sbatch reads #SBATCH lines up to the first line that is neither empty nor a comment."""


_WORD = re.compile(r"""(?:\\.|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s#'"\\])+|#.*""")
"""A word of an #SBATCH line as it stands there, with its quotes; or the comment at the end."""


@dataclass(frozen=True, slots=True)
class Options:
    """sbatch's options, from its help."""

    valued: frozenset[str]
    """Long and short names of the options whose value may be the next argument."""
    names: frozenset[str]
    long: dict[str, str]
    """Short name -> long name."""

    @property
    def adaptive(self) -> bool:
        """Whether the plugin with the adaptive flags is installed."""
        return "adaptive" in self.names


def parse_help(text: str) -> Options:
    """From `sbatch --help`."""
    valued, names, long = set(UNDOCUMENTED), set(UNDOCUMENTED), {}
    for short, name, value in _OPTION.findall(text):
        names.add(name)
        if short:
            long[short] = name
        if value == "=" or name in UNDOCUMENTED:
            valued |= {name, short} - {""}
    return Options(frozenset(valued), frozenset(names), long)


@dataclass(slots=True)
class CommandLine:
    """A parsed command line."""

    own: dict[str, list[str]] = field(default_factory=dict)
    """Penstock's own options -> their values, in order."""
    options: list[list[str]] = field(default_factory=list)
    """sbatch's options and the adaptive flags, each with its value if that is an argument of its own. A preset is
    ["--preset", NAME] at its place."""
    rest: list[str] = field(default_factory=list)
    """The script and its arguments, with a `--` before them if it was typed."""

    @property
    def script(self) -> str | None:
        """The script's path; None with --wrap or a script from standard input."""
        words = self.rest[1:] if self.rest[:1] == ["--"] else self.rest
        return words[0] if words else None


def parse(words: Sequence[str], options: Options) -> CommandLine:
    """Parse a command line. Raises BadFlag if one of Penstock's own options lacks its value."""
    line, left = CommandLine(), list(words)
    while left:
        word = left.pop(0)
        if word == "--" or word == "-" or (not word.startswith("-") and word != ":"):
            line.rest = [word, *left]
            break
        name, equals, value = word.removeprefix("--").partition("=") if word.startswith("--") else ("", "", "")
        if name in OWN:
            if OWN[name] and not equals:
                if not left:
                    raise BadFlag(f"--{name} needs a value, such as --{name}=big")
                value = left.pop(0)
            line.own.setdefault(name, []).append(value)
            if name == "preset":
                line.options.append(["--preset", value])
            continue
        takes = not equals and _takes_next(word, name, options)
        line.options.append([word, left.pop(0)] if takes and left else [word])
    return line


def _takes_next(word: str, name: str, options: Options) -> bool:
    if name:
        full = _full(name, options)
        # sbatch's help shows --adaptive=[MODE] like an option whose value is required.
        return flags()[full].has_arg == 1 if full in flags() else full in options.valued
    letters = word[1:]
    for index, letter in enumerate(letters):
        if letter in options.valued:
            return index == len(letters) - 1
    return False


def _full(name: str, options: Options) -> str:
    """The full name of an option, which getopt lets one abbreviate."""
    known = options.names | set(flags())
    if name in known:
        return name
    fitting = [each for each in known if each.startswith(name)]
    return fitting[0] if len(fitting) == 1 else name


def values(words: Iterable[Sequence[str]], options: Options) -> dict[str, str]:
    """Long name -> value of each option. The last value counts; "" for an option without one."""
    found: dict[str, str] = {}
    for option, *value in words:
        if option.startswith("--"):
            name, equals, text = option[2:].partition("=")
            found[_full(name, options)] = text if equals else (value[0] if value else "")
        elif len(option) > 1:
            for index, letter in enumerate(option[1:], start=2):
                if letter in options.valued:
                    found[options.long.get(letter, letter)] = option[index:] or (value[0] if value else "")
                    break
                found[options.long.get(letter, letter)] = ""
    return found


def adaptive_flags(words: Iterable[Sequence[str]], options: Options) -> dict[str, str]:
    """Adaptive flag -> its value, or its bare value if it is given without one."""
    found = {}
    for name, text in values(words, options).items():
        flag = flags().get(name)
        if flag is not None:
            found[name] = text or flag.bare_value or ""
    return found


def is_flag(words: Sequence[str], options: Options) -> Flag | None:
    """The adaptive flag that an option names; None if it is another option."""
    return flags().get(_full(words[0][2:].partition("=")[0], options)) if words[0].startswith("--") else None


def header(script: str) -> list[tuple[int, list[str]]]:
    """The #SBATCH lines that sbatch reads: the index of each line, and its words as they stand there."""
    found = []
    for index, line in enumerate(script.split("\n")[1:], start=1):
        if END_OF_SBATCH_LINES.match(line):
            break
        if line.startswith("#SBATCH"):
            words = _WORD.findall(line.removeprefix("#SBATCH"))
            found.append((index, [word for word in words if not word.startswith("#")]))
    return found


def sbatch_lines(script: str) -> list[str]:
    """The arguments in a script's #SBATCH lines."""
    return [word for _, words in header(script) for word in shlex.split(" ".join(words))]


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
