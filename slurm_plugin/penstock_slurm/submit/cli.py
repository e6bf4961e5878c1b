"""`penstock submit`: sbatch with presets, a dry run, and the adaptive flags even on hosts without the plugin."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from penstock_scheduler.api.messages import NodesOrder, PlanOrder
from penstock_scheduler.cli.ask import ask
from penstock_scheduler.model import JobSpec, NodeChoice
from penstock_scheduler.model.spec import SPEC_KEY
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.people.safe_text import exact
from penstock_slurm.jobs.notes import NODE_OPTIONS, node_choice_of
from penstock_slurm.submit import command_line, presets
from penstock_slurm.submit.command_line import CommandLine, Options
from penstock_slurm.submit.flags import BadFlag, flags, spec_of, time_s

SITE = Path("/etc/penstock/presets.toml")
"""The site's presets. It is not penstockd's settings file, which may hold secrets and need not be on login nodes."""
SITE_VARIABLE = "PENSTOCK_PRESETS"
"""Environment variable: another file of the site's presets."""

EXPLAIN = "SLURM_PENSTOCK_EXPLAIN"
"""Environment variable: job_submit.lua says how it reads a request of flags alone, too."""

START = re.compile(r"sbatch: Job \d+ to start at ")
"""How sbatch --test-only begins its guess, which is about a plain job of the smallest shape."""

USAGE = """Usage: penstock submit [--preset NAME] [--dry-run | --explain-request | --convert] [sbatch's options] script
                       [arguments]

Submit a job. This command calls sbatch, prints what sbatch prints and returns its exit status.

  --preset NAME    Use the options of a preset, one of yours ({user}) or of the site ({site}).
                   Repeatable. What comes later on the line wins.
  --dry-run        Say whether and where the job would start now, and why. Submit nothing.
  --explain-request
                   Say how --adaptive reads the script's header and the options, or why not. Submit nothing.
  --convert        Print the script with its header as it would be written for Penstock. Submit nothing.

Adaptive flags:
{flags}

All other options are sbatch's; see sbatch --help."""


class _Words(TyperGroup):
    """A command that leaves the parsing of its arguments to `submit`."""

    @property
    def manual(self) -> str:
        """The text of its manual page, since typer knows none of its options."""
        return _usage({"HOME": "~"})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        logging.getLogger().addHandler(logging.NullHandler())  # the log of the daemon's code is not for users
        ctx.args = list(args)
        return args

    def invoke(self, ctx: Any) -> None:
        try:
            status = submit(ctx.args, os.environ)
        except PenstockError as error:
            typer.echo(f"penstock: {error}", err=True)
            status = error.exit_status
        ctx.exit(status)


app = typer.Typer(cls=_Words, help="Submit a job as sbatch does, with presets and a dry run.")


@app.callback(invoke_without_command=True)
def _submit() -> None:
    pass


def submit(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command line and return sbatch's exit status. Raises PenstockError."""
    if not words or words[0] in ("--help", "-h", "--usage"):
        typer.echo(_usage(environ))
        return 0
    sbatch = shutil.which("sbatch", path=environ.get("PATH"))
    if sbatch is None:
        raise PenstockError(
            "sbatch is not on PATH; install Slurm's commands (Debian: slurm-client) or add their folder to PATH"
        )
    shown = subprocess.run([sbatch, "--help"], env=dict(environ), capture_output=True, text=True, check=False)
    options = command_line.parse_help(shown.stdout)
    line = command_line.parse(words, options)
    expanded = _expand(line, options, environ)
    if "convert" in line.own:
        return _convert(line, expanded, options, sbatch, environ)
    if "explain-request" in line.own:
        return _explain_request(line, expanded, options, sbatch, environ)
    if "dry-run" in line.own:
        return _explain(line, expanded, options, sbatch, environ)
    given = command_line.adaptive_flags(expanded, options)
    asks = bool(given) or bool(environ.get(flags()["adaptive"].variable))
    if asks and not options.adaptive:
        expanded = _without_plugin(line, expanded, options, _with_environment(given, environ))
    return _sbatch([*(word for words in expanded for word in words), *line.rest], sbatch, environ)


def _sbatch(words: list[str], program: str, environ: Mapping[str, str]) -> int:
    """Run sbatch under the name `sbatch`, which its messages begin with."""
    sys.stdout.flush()
    return subprocess.run(["sbatch", *words], executable=program, env=dict(environ), check=False).returncode


def _explain_request(
    line: CommandLine, expanded: list[list[str]], options: Options, sbatch: str, environ: Mapping[str, str]
) -> int:
    status, said = _read(_script_words(line), expanded, line.rest, options, sbatch, environ)
    _tell(said, err=status != 0)
    return status


def _convert(
    line: CommandLine, expanded: list[list[str]], options: Options, sbatch: str, environ: Mapping[str, str]
) -> int:
    """Print the script with flags that mean what job_submit.lua reads. Refused options become comments; the rest is read anew."""
    text, refused = _script_text(line, expanded, options), list[str]()
    while True:
        words = command_line.sbatch_lines(text)
        code, said = _read(words, expanded, [], options, sbatch, environ, text.encode(errors="surrogateescape"))
        less = command_line.comment_out(text, said, options)
        if less == text or said in refused:
            break
        text = less
        refused.append(said)
    _tell("".join([*refused, *([said] if code else [])]), err=True)
    if code and not refused:
        return code
    given = command_line.adaptive_flags([*_pairs(words, options), *expanded], options)
    wanted = {"adaptive": _with_environment(given, environ).get("adaptive", "adaptive")}
    wanted |= command_line.read_as(said, options) | command_line.adaptive_flags(expanded, options)
    exact(command_line.with_flags(text, wanted, options).encode(errors="surrogateescape"))
    return code or int(bool(refused))


def _read(
    words: list[str],
    expanded: list[list[str]],
    rest: list[str],
    options: Options,
    sbatch: str,
    environ: Mapping[str, str],
    script: bytes | None = None,
) -> tuple[int, str]:
    """How job_submit.lua itself reads a request: slurmctld calls it for `sbatch --test-only` too.

    Args:
        words: the options in the script.
        expanded: the options on the command line.
        rest: the script and its arguments; or empty, and `script` is the script itself.

    Returns:
        sbatch's exit status and messages.
    """
    if not options.adaptive:
        raise PenstockError("a header is read by Penstock's sbatch plugin, which this host lacks: use one that has it")
    in_script = command_line.parse(words, options)
    if in_script.rest[:1] in (["hetjob"], ["packjob"]):
        raise BadFlag(f"#SBATCH {in_script.rest[0]}: a heterogeneous job cannot be adaptive: submit one job")
    given = command_line.adaptive_flags([*in_script.options, *expanded], options)
    asked = "adaptive" in _with_environment(given, environ)
    argv = ["sbatch", "--test-only", *([] if asked else ["--adaptive"]), *itertools.chain(*expanded), *rest]
    env = dict(environ) | {EXPLAIN: "1"}
    done = subprocess.run(argv, executable=sbatch, env=env, input=script, stderr=subprocess.PIPE, check=False)
    return done.returncode, done.stderr.decode(errors="replace")


def _tell(said: str, *, err: bool) -> None:
    """Print sbatch's messages but its guess of the start."""
    for text in said.splitlines():
        if not START.match(text):
            typer.echo(text.removeprefix("sbatch: "), err=err)


def _script_text(line: CommandLine, expanded: list[list[str]], options: Options) -> str:
    """The script, whatever bytes it has. Raises PenstockError."""
    if "wrap" in command_line.values(expanded, options):
        raise BadFlag("--convert needs a script with #SBATCH lines; --wrap has none")
    try:
        data = sys.stdin.buffer.read() if line.script is None else Path(line.script).read_bytes()
    except (OSError, ValueError) as error:
        raise PenstockError(f"the script cannot be read: {error}; give its path") from None
    return data.decode(errors="surrogateescape")


def _usage(environ: Mapping[str, str]) -> str:
    lines = []
    for flag in flags().values():
        name = f"--{flag.name}" + {0: "", 1: f"={flag.arginfo}", 2: f"[={flag.arginfo.strip('[]')}]"}[flag.has_arg]
        lines.append(f"  {name:<26} {flag.help}")
    return USAGE.format(user=presets.user_file(environ), site=_site_file(environ), flags="\n".join(lines))


def _site_file(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(SITE_VARIABLE) or SITE)


def _expand(line: CommandLine, options: Options, environ: Mapping[str, str]) -> list[list[str]]:
    """sbatch's options, with each preset replaced by its options."""
    if "preset" not in line.own:
        return line.options
    mine, theirs = presets.user_file(environ), _site_file(environ)
    own, site, unread = presets.load(mine), dict[str, presets.Preset](), ""
    try:
        site = presets.load(theirs)
    except ConfigError as error:
        unread = f" (the site's presets cannot be read: {error})"
    expanded: list[list[str]] = []
    for words in line.options:
        if words[0] != "--preset":
            expanded.append(words)
            continue
        name = words[1]
        if name not in own and name not in site:
            known = ", ".join(sorted({*own, *site})) or "none"
            raise ConfigError(
                f"there is no preset {name}; the presets are {known}; write [{name}] into {mine} to add it{unread}"
            )
        where = str(mine if name in own else theirs)
        expanded += [[word] for word in presets.arguments(name, own.get(name) or site[name], options, where)]
    return expanded


def _with_environment(given: dict[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The flags, with the defaults of PENSTOCK_* variables. The defaults count only for an adaptive job."""
    defaults = {flag.name: text for flag in flags().values() if (text := environ.get(flag.variable))}
    return defaults | given if "adaptive" in defaults | given else given


def _without_plugin(
    line: CommandLine, expanded: list[list[str]], options: Options, given: dict[str, str]
) -> list[list[str]]:
    """sbatch's options for a host without the plugin: the job spec goes into the comment, as docs/user/jobs.md describes."""
    spec = spec_of(given)
    kept = [words for words in expanded if command_line.is_flag(words, options) is None]
    named = command_line.values(kept, options)
    if "comment" in named:
        raise BadFlag(
            "--comment: on a host without Penstock's sbatch plugin, the comment holds the job spec; leave --comment out"
        )
    for name in ("gres", "gpus", "gpus-per-node", "gpus-per-task", "nodes", "ntasks"):
        if name in named:
            raise BadFlag(f"--{name} cannot be used with --adaptive; use --min-gpus, --max-gpus and --gpu-types")
    for name in (*NODE_OPTIONS, *(["ntasks-per-node"] if named.get("ntasks-per-node", "1") != "1" else [])):
        if name in named:
            raise BadFlag(
                f"--{name} needs Penstock's sbatch plugin, which this host lacks: submit from one that has it"
            )
    if command_line.adaptive_flags(_pairs(_script_words(line), options), options):
        raise BadFlag(
            f"{line.script} has adaptive flags in #SBATCH lines, but this sbatch does not know them: remove them and give "
            "them to penstock submit, for example in a preset"
        )
    comment = json.dumps({SPEC_KEY: _fields(spec)}, separators=(",", ":"))
    ours = ["--hold", "--requeue", "--open-mode=append", f"--gres=gpu:{spec.min_gpus}", f"--comment={comment}"]
    return [*kept, *([word] for word in ours)]


def _fields(spec: JobSpec) -> dict[str, object]:
    fields: dict[str, object] = spec.model_dump(mode="json", exclude_unset=True)
    return fields


def _nodes(named: Mapping[str, str]) -> NodeChoice | None:
    """The nodes that sbatch's options allow. Raises BadFlag."""
    try:
        return node_choice_of(*(named.get(name, "") for name in NODE_OPTIONS))
    except ValueError as error:
        raise BadFlag(f"--nodelist or --exclude: {error}; give names of nodes, such as --exclude=node[01-04]") from None


def _script_words(line: CommandLine) -> list[str]:
    if line.script is None:
        return []
    try:
        return command_line.sbatch_lines(Path(line.script).read_text(errors="replace"))
    except (OSError, ValueError):
        return []  # sbatch reports the error


def _pairs(words: Sequence[str], options: Options) -> list[list[str]]:
    return command_line.parse(words, options).options


def _explain(
    line: CommandLine, expanded: list[list[str]], options: Options, sbatch: str, environ: Mapping[str, str]
) -> int:
    """The dry run. For a plain job: `sbatch --test-only`."""
    both = [*_pairs(_script_words(line), options), *expanded]
    given = _with_environment(command_line.adaptive_flags(both, options), environ)
    if not given:
        return _sbatch(["--test-only", *(word for words in expanded for word in words), *line.rest], sbatch, environ)
    named = command_line.values(both, options)
    chosen = _nodes(named)
    try:
        order = PlanOrder(
            name=named.get("job-name") or (Path(line.script).name if line.script else "wrap"),
            spec=spec_of(given),
            partition=named.get("partition") or None,
            account=named.get("account") or None,
            qos=named.get("qos") or None,
            reservation=named.get("reservation") or None,
            time_limit_s=time_s(named.get("time", "")),
            nodes=NodesOrder()
            if chosen is None
            else NodesOrder(
                only=tuple(sorted(chosen.only)),
                exclude=tuple(sorted(chosen.exclude)),
                features=tuple(tuple(sorted(each)) for each in chosen.features),
            ),
        )
    except ValidationError as error:
        raise ConfigError("; ".join(describe_errors(error, PlanOrder))) from None
    for text in ask(lambda penstock: penstock.forecast(order)).lines:
        typer.echo(text)
    return 0
