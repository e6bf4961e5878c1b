"""The settings file: TOML, one section a package, each checked by the package that owns it.

A package registers its section through the entry point group `penstock.settings`: section name -> pydantic model with
`extra="forbid"`. Unknown sections and keys are errors that list the valid ones. Section `[policy]` says which policy decides
(see `policy_choice`). Policies and stages have sections of their own, `[policy.NAME]`, checked by their registry.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from penstock_scheduler.model.policy_choice import PolicyChoice
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.people.errors import ConfigError

GROUP = "penstock.settings"

Section = TypeVar("Section", bound=BaseModel)


class DaemonSettings(BaseModel):
    """Section `[daemon]`: the daemon, its round loop and its store."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cluster: str = Field(
        default="slurm", description="The cluster to manage: a name of the entry points `penstock.clusters`."
    )
    cloud: str | None = Field(
        default=None,
        description="The cloud that jobs may burst to: a name of the entry points `penstock.clouds`, such as ec2.",
    )
    rounds: Literal["period", "events"] = Field(
        default="period",
        description="'period': a round every round_s. 'events': when a job or a node changes, and round_s after the last.",
    )
    round_s: PositiveFloat = Field(default=60.0, description="Seconds from one round to the next.")
    tick_s: PositiveFloat = Field(default=1.0, description="Seconds between two ticks.")
    state_dir: Path = Field(
        default=Path("/var/lib/penstock"),
        description="The daemon's own folder. It contains the store unless `store` is set.",
    )
    store: str | None = Field(
        default=None,
        description="URL of a database, such as postgresql+psycopg://penstock@db/penstock; not set: SQLite in state_dir.",
    )
    name: str | None = Field(
        default=None,
        max_length=100,
        description="Name of this penstockd among those that use the same database; not set: the host's name.",
    )
    lease_s: float = Field(
        default=10.0,
        ge=4,
        le=300,
        description="With a database server: how long the leader may write after its newest confirmation, and how long a "
        "standby waits after it before it takes over. The leader confirms ten times in that time.",
    )
    log_writes: bool = Field(
        default=False,
        description="Whether to log each write to the store, Slurm, the spool and the cloud with its fencing number.",
    )
    keep_days: PositiveFloat = Field(
        default=365.0,
        description="Days for which a job's history is kept after its end, and hourly samples. The ledger is kept for ever.",
    )
    keep_audit_days: PositiveFloat = Field(
        default=1825.0,
        description="Days for which the audit log is kept. Of what was refused, and of what one user did who is no operator, it "
        "has the newest 100,000 lines at most.",
    )
    sample_s: float = Field(
        default=60.0,
        ge=10,
        description="Seconds between two samples of jobs' speed and of the cluster, for `GET /v1/series` and pictures.",
    )
    estimate_cores: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Share of one core that a process of its own may take, at the lowest priority, to estimate when jobs start "
        "and end. 0: no estimates.",
    )
    restart_cost_s: PositiveFloat = Field(
        default=30.0, description="Seconds of training that a restart costs a job whose job spec has no restart_cost_s."
    )
    recall_models: bool = Field(
        default=True,
        description="Whether a job of unknown speed starts with what ended jobs of the same user, name and batch size reported.",
    )
    check_claims: bool = Field(
        default=True,
        description="Whether what job specs and reports claim of a job's speed and end is bounded, and checked by what the job "
        "measures.",
    )
    families: Path | None = Field(
        default=None, description="File with further model families, in the catalogue's format."
    )
    sensitivities: Path | None = Field(
        default=None, description="Folder of sensitivity profiles (speed by CPU and memory), for the stages of Synergy."
    )
    pairs: Path | None = Field(
        default=None,
        description="Table of the speeds of co-located jobs, by kind, as for `penstock simulate run --pairs`. It holds for a "
        "pair until that pair has been measured here.",
    )
    log_format: Literal["logfmt", "json"] = Field(
        default="logfmt", description="Format of log lines: logfmt for people and grep, json for programs."
    )

    gone: ClassVar[dict[str, str]] = {"keep_hourly_days": "hourly samples are kept for `keep_days`"}

    keep_rounds: ClassVar[int] = 50_000
    """Newest rounds to keep; older ones are deleted, and `penstock simulate whatif` cannot replay them. A month of 60 s
    rounds is 44,640 rounds. A round takes 2 to 10 kB with 20,000 jobs, if few of them change: half a gigabyte at most."""

    keep_samples_days: ClassVar[float] = 7.0
    """Days for which samples are kept as they were taken; later there is one for each hour. Pictures of a week show single
    samples, those of more do not."""


class Settings:
    """A checked settings file."""

    def __init__(
        self, sections: dict[str, BaseModel], policy: PolicyChoice, policies: dict[str, dict[str, Any]], source: str
    ) -> None:
        self._sections = sections
        self.policy = policy
        """Which policy decides, with the settings of its parts as written."""
        self.policies = policies
        """The sections `[policy.NAME]` as written, including those of policies that do not decide."""
        self.source = source

    def section(self, model: type[Section]) -> Section:
        """The section that `model` describes: from the file, or all defaults. Raises ConfigError if that lacks a value."""
        for found in self._sections.values():
            if isinstance(found, model):
                return found
        try:
            return model()
        except ValidationError as error:
            name = next((n for n, m in section_models().items() if m is model), model.__name__)
            raise ConfigError(
                f"{self.source}: section [{name}] is missing: {'; '.join(describe_errors(error, model))}"
            ) from None

    def as_dict(self) -> dict[str, Any]:
        """All settings by section, with defaults. The password in the store's URL is hidden."""
        shown = {name: section.model_dump(mode="json") for name, section in self._sections.items()}
        if (url := shown.get("daemon", {}).get("store")) is not None:
            shown["daemon"]["store"] = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)
        return shown | {"policy": self._policy_table()}

    def in_full(self) -> dict[str, dict[str, Any]]:
        """Every section with all its values, including sections that the file leaves out. Sections of policies are as written."""
        shown = {name: section.model_dump(mode="json") for name, section in self._sections.items()}
        for name, model in section_models().items():
            if name not in shown and not any(field.is_required() for field in model.model_fields.values()):
                shown[name] = model().model_dump(mode="json")
        return shown | {"policy": self._policy_table()}

    def _policy_table(self) -> dict[str, Any]:
        """Section [policy] as in the file."""
        return self.policy.model_dump(mode="json", exclude={"settings"}) | self.policies


def load_settings(path: Path) -> Settings:
    """Read and check a settings file. Raises ConfigError, which names the file, the section, the key and the remedy."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the settings file with --config") from None
    return parse_settings(text, str(path))


def parse_settings(text: str, source: str) -> Settings:
    """Check the text of a settings file; `source` is its name in messages. Raises ConfigError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}") from None
    models = section_models()
    table = tables.pop("policy", {})
    sections: dict[str, BaseModel] = {}
    for name, section in tables.items():
        if name not in models:
            close = difflib.get_close_matches(name, [*models, "policy"], n=1)
            hint = f"; did you mean [{close[0]}]?" if close else ""
            raise ConfigError(
                f"{source}: unknown section [{name}]; the sections are {', '.join(sorted([*models, 'policy.NAME']))}{hint}"
            )
        sections[name] = _validated(text, name, models[name], section, source)
    choice, policies = _policy(text, table, source)
    return Settings(sections, choice, policies, source)


_CHOICE_KEYS = [name for name in PolicyChoice.model_fields if name != "settings"]


def _policy(text: str, table: object, source: str) -> tuple[PolicyChoice, dict[str, dict[str, Any]]]:
    """Which policy decides, and the sections of all policies. Raises ConfigError."""
    if not isinstance(table, dict):
        raise ConfigError(f'{source}: policy is a section, such as [policy] with name = "sia"')
    policies = {name: value for name, value in table.items() if name not in _CHOICE_KEYS}
    for name, value in policies.items():
        if not isinstance(value, dict):
            keys = ", ".join(_CHOICE_KEYS)
            raise ConfigError(
                f"{source}: [policy] unknown key {name!r}; the keys are {keys}, and each policy has a section [policy.NAME]"
            )
        _check_policy(text, name, value, source)
    chosen = {name: value for name, value in table.items() if name in _CHOICE_KEYS}
    return _validated(text, "policy", PolicyChoice, chosen, source).over(policies), policies


def _check_policy(text: str, name: str, table: dict[str, Any], source: str) -> None:
    from penstock_scheduler.rounds.policies import settings_model  # not above: it takes a solver's time to import

    try:
        model = settings_model(name)
    except ConfigError as error:
        raise ConfigError(f"{source}: [policy.{name}] {error}") from None
    _validated(text, f"policy.{name}", model, table, source)


def _validated(text: str, section: str, model: type[Section], table: object, source: str) -> Section:
    """A section of the file, checked. Raises ConfigError, with the lines of what is wrong."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        told = zip(error.errors(include_url=False), describe_errors(error, model), strict=True)
        wrong = [_located(text, section, item["loc"], item["input"], sentence) for item, sentence in told]
        raise ConfigError(f"{source}: [{section}] " + "; ".join(wrong)) from None


_UNITS = {"s": "seconds", "mb": "MiB", "days": "days", "hours": "hours"}
"""Last part of a key's name -> the unit that its number is in."""


def _located(text: str, section: str, where: tuple[int | str, ...], value: object, sentence: str) -> str:
    """`sentence` with the line number, and with the unit if a number was written as text."""
    unit = _UNITS.get(str(where[-1]).rsplit("_", 1)[-1]) if where else None
    if unit is not None and isinstance(value, str):
        sentence += f"; write it as a number, in {unit}"
    line = _line(text, [*section.split("."), *map(str, where)])
    return sentence if line is None else f"{sentence} (line {line})"


def _line(text: str, path: list[str]) -> int | None:
    """Number of the line nearest to the key of this path (section, key, keys in its tables); None: not found."""
    found, depth, inside = None, 1, None
    for number, line in enumerate(text.splitlines(), 1):
        if (header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)) is not None:
            table = [part.strip(" \"'") for part in header[1].split(".")]
            inside = len(table) if table == path[: len(table)] else None
            if inside is not None and inside > depth:
                found, depth = number, inside
        elif (
            inside is not None
            and depth <= inside < len(path)
            and re.match(rf"\s*[\"']?{re.escape(path[inside])}[\"']?\s*[=.]", line)
        ):
            found, depth = number, inside + 1
    return found


def reference() -> str:
    """Every section and key of the settings file with type, default and meaning, as Markdown."""
    lines = [
        "# Settings",
        "",
        "Written by `penstock config reference`. A key whose name ends in `_s` is in seconds.",
        "",
    ]
    for name, model in sorted((section_models() | {"policy": PolicyChoice} | _policy_models()).items()):
        lines += [*_section_lines(name, model), ""]
    return "\n".join(lines)


def _section_lines(name: str, model: type[BaseModel]) -> list[str]:
    """One section as Markdown."""
    text = " ".join((model.__doc__ or "").split())
    lines = [f"## `[{name}]`", "", text, ""]
    if not model.model_fields:
        return [*lines, "It has no keys."]
    schema = model.model_json_schema()
    lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in model.model_fields.items():
        if model is PolicyChoice and key == "settings":  # in the file, these are the sections [policy.NAME]
            continue
        kind = _kind(schema["properties"][key], schema.get("$defs", {}))
        default = "**must be given**" if field.is_required() else _default(field.get_default(call_default_factory=True))
        lines.append(f"| `{key}` | {kind} | {default} | {(field.description or '').replace('|', '/')} |")
    return lines


def _default(value: object) -> str:
    """A default value, as TOML writes it where TOML can."""
    if value is None:
        return "absent"
    if isinstance(value, BaseModel):
        return "its own defaults"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | Path):
        return f"`{str(value)!r}`"
    if isinstance(value, tuple | list):
        return f"`{list(value)!r}`"
    return f"`{value!r}`"


def _policy_models() -> dict[str, type[BaseModel]]:
    """The sections of all policies and stages."""
    from penstock_scheduler.rounds.policies import REGISTRY, STAGES  # not above: it takes a solver's time to import

    registered = {**REGISTRY, **STAGES}
    return {f"policy.{name}": model for name, (_, model) in registered.items()}


_KINDS = {
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "object": "table",
}


def _kind(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    """The type of a value and its bounds as text, from its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(_kind(each, defs) for each in schema["anyOf"] if each.get("type") != "null")
    if "$ref" in schema:
        return _kind(defs[schema["$ref"].rsplit("/", 1)[-1]], defs)
    if "enum" in schema:
        return " or ".join(f"`{value!r}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'], defs)}" if "items" in schema else "list"
    if schema.get("format") == "path":
        return "path"
    text = _KINDS.get(schema.get("type", ""), "any")
    if isinstance(schema.get("additionalProperties"), dict):
        text = f"table of {_kind(schema['additionalProperties'], defs)}"
    bounds = (("exclusiveMinimum", "above"), ("minimum", "from"), ("exclusiveMaximum", "below"), ("maximum", "to"))
    return " ".join([text, *(f"{word} {schema[name]:g}" for name, word in bounds if name in schema)])


def section_models() -> dict[str, type[BaseModel]]:
    """The model of each section of the settings file, but those of policies."""
    return {entry.name: entry.load() for entry in entry_points(group=GROUP)}
