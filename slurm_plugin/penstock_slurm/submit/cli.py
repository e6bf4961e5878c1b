"""`penstock submit`: sbatch, with presets of options, a dry run, and the adaptive flags also where their plugin is missing."""

from __future__ import annotations

import getpass
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from penstock_scheduler.errors import ConfigError, PenstockError
from penstock_scheduler.model import JobSpec
from penstock_scheduler.model.spec import SPEC_KEY
from penstock_scheduler.settings import load_settings
from penstock_slurm.settings import SlurmSettings
from penstock_slurm.submit import command_line, presets
from penstock_slurm.submit.command_line import CommandLine, Options
from penstock_slurm.submit.flags import BadFlag, flags, spec_of, time_s

CONFIG = Path("/etc/penstock/penstock.toml")

USAGE = """Usage: penstock submit [--preset NAME] [--dry-run] [sbatch's options] script [arguments]

Submit a job as sbatch does, which is what it calls: it prints what sbatch prints and returns what sbatch returns.

  --preset NAME    options kept under a name, by you ({user}) or by the site; may stand several times,
                   and what comes later on the line wins
  --dry-run        say what would become of the job now, and why, and submit nothing
  --config FILE    the site's settings file ({config})

Adaptive flags (docs: flags):
{flags}

All other options are sbatch's: sbatch --help."""


class _Words(TyperGroup):
    """A command that takes every word as it is."""

    @property
    def manual(self) -> str:
        """Its manual page's text: it has no options of the ordinary kind."""
        return _usage({"HOME": "~"})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        logging.getLogger().addHandler(logging.NullHandler())  # what the daemon would log is not for who submits
        ctx.args = list(args)
        return args

    def invoke(self, ctx: Any) -> None:
        try:
            status = submit(ctx.args, os.environ)
        except PenstockError as error:
            typer.echo(f"penstock: {error}", err=True)
            status = 1
        ctx.exit(status)


app = typer.Typer(cls=_Words, help="Submit a job as sbatch does, with presets and a dry run.")


@app.callback(invoke_without_command=True)
def _submit() -> None:
    pass


def submit(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what the command line says. Returns sbatch's exit status. Raises PenstockError."""
    if not words or words[0] in ("--help", "-h", "--usage"):
        typer.echo(_usage(environ))
        return 0
    sbatch = shutil.which("sbatch", path=environ.get("PATH"))
    if sbatch is None:
        raise PenstockError(
            "sbatch is not on PATH; install Slurm's commands (Debian: slurm-client) or add their folder"
        )
    told = subprocess.run([sbatch, "--help"], env=dict(environ), capture_output=True, text=True, check=False)
    options = command_line.parse_help(told.stdout)
    line = command_line.parse(words, options)
    config = Path(line.own["config"][-1]) if "config" in line.own else CONFIG
    expanded = _expand(line, options, config, environ)
    if "dry-run" in line.own:
        return _explain(line, expanded, options, config, sbatch, environ)
    given = command_line.adaptive_flags(expanded, options)
    asks = bool(given) or bool(environ.get(flags()["adaptive"].variable))
    if asks and not options.adaptive:
        expanded = _without_plugin(line, expanded, options, _with_environment(given, environ))
    return _sbatch([*(word for words in expanded for word in words), *line.rest], sbatch, environ)


def _sbatch(words: list[str], program: str, environ: Mapping[str, str]) -> int:
    """Run the real one, by the name that it prints in its messages."""
    sys.stdout.flush()
    return subprocess.run(["sbatch", *words], executable=program, env=dict(environ), check=False).returncode


def _usage(environ: Mapping[str, str]) -> str:
    lines = []
    for flag in flags().values():
        name = f"--{flag.name}" + {0: "", 1: f"={flag.arginfo}", 2: f"[={flag.arginfo.strip('[]')}]"}[flag.has_arg]
        lines.append(f"  {name:<26} {flag.help}")
    return USAGE.format(user=presets.user_file(environ), config=CONFIG, flags="\n".join(lines))


def _expand(line: CommandLine, options: Options, config: Path, environ: Mapping[str, str]) -> list[list[str]]:
    """sbatch's options with every preset in its place."""
    if "preset" not in line.own:
        return line.options
    mine = presets.user_file(environ)
    own, site, unread = presets.load(mine), {}, ""
    try:
        site = dict(load_settings(config).section(SlurmSettings).presets)
    except ConfigError as error:
        unread = f" (those of the site are not read: {error})"
    expanded: list[list[str]] = []
    for words in line.options:
        if words[0] != "--preset":
            expanded.append(words)
            continue
        name = words[1]
        if name not in own and name not in site:
            known = ", ".join(sorted({*own, *site})) or "none"
            raise ConfigError(f"there is no preset {name}; there are {known}: write [{name}] into {mine}{unread}")
        where = str(mine) if name in own else str(config)
        expanded += [[word] for word in presets.arguments(name, own.get(name) or site[name], options, where)]
    return expanded


def _with_environment(given: dict[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The flags, and what PENSTOCK_* variables say of those that are not given, for a job that is adaptive anyway."""
    defaults = {flag.name: text for flag in flags().values() if (text := environ.get(flag.variable))}
    return defaults | given if "adaptive" in defaults | given else given


def _without_plugin(
    line: CommandLine, expanded: list[list[str]], options: Options, given: dict[str, str]
) -> list[list[str]]:
    """sbatch's options where it does not know the flags: the job spec goes into the comment, as docs/user/jobs.md says."""
    spec = spec_of(given)
    kept = [words for words in expanded if command_line.is_flag(words, options) is None]
    named = command_line.values(kept, options)
    if "comment" in named:
        raise BadFlag(
            "--comment: without the plugin of the adaptive flags the comment holds the job spec; leave it out"
        )
    for name in ("gres", "gpus", "gpus-per-node", "gpus-per-task", "nodes", "ntasks"):
        if name in named:
            raise BadFlag(f"--{name} and --adaptive contradict each other; use --min-gpus, --max-gpus and --gpu-types")
    if command_line.adaptive_flags(_pairs(_script_words(line), options), options):
        raise BadFlag(
            f"{line.script} has adaptive flags in #SBATCH lines, and this sbatch does not know them: take them out and give "
            "them to penstock submit, in a preset for example"
        )
    comment = json.dumps({SPEC_KEY: _fields(spec)}, separators=(",", ":"))
    ours = ["--hold", "--requeue", "--open-mode=append", f"--gres=gpu:{spec.min_gpus}", f"--comment={comment}"]
    return [*kept, *([word] for word in ours)]


def _fields(spec: JobSpec) -> dict[str, object]:
    fields: dict[str, object] = spec.model_dump(mode="json", exclude_unset=True)
    return fields


def _script_words(line: CommandLine) -> list[str]:
    if line.script is None:
        return []
    try:
        return command_line.sbatch_lines(Path(line.script).read_text(errors="replace"))
    except (OSError, ValueError):
        return []  # sbatch says what is wrong with it


def _pairs(words: Sequence[str], options: Options) -> list[list[str]]:
    return command_line.parse(words, options).options


def _explain(
    line: CommandLine,
    expanded: list[list[str]],
    options: Options,
    config: Path,
    sbatch: str,
    environ: Mapping[str, str],
) -> int:
    """The dry run. A plain job is Slurm's to explain: sbatch --test-only."""
    both = [*_pairs(_script_words(line), options), *expanded]
    given = _with_environment(command_line.adaptive_flags(both, options), environ)
    if not given:
        return _sbatch(["--test-only", *(word for words in expanded for word in words), *line.rest], sbatch, environ)
    named = command_line.values(both, options)
    from penstock_slurm.submit import dry_run  # the policies and the store take seconds to load

    asked = dry_run.Asked(
        name=named.get("job-name") or (Path(line.script).name if line.script else "wrap"),
        user=getpass.getuser(),
        account=named.get("account", ""),
        qos=named.get("qos", ""),
        partitions=tuple(filter(None, named.get("partition", "").split(","))),
        reservation=named.get("reservation", ""),
        time_limit_s=time_s(named.get("time", "")),
    )
    for text in dry_run.explain(load_settings(config), spec_of(given), asked):
        typer.echo(text)
    return 0
