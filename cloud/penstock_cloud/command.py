"""A provider that is the admin's own program: any cloud, behind one command that speaks JSON.

The command is started for each question, with a verb as its argument and the question on standard input. It prints the answer
and exits with 0. To refuse, it prints `{"kind": KIND, "message": TEXT}` and exits with another status; the kinds are those of
`burst.manager.provider.Kind`, in words. docs/admin/bursting.md has the contract.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from penstock_scheduler.burst.manager.provider import (
    DescribedInstance,
    Kind,
    LaunchFailed,
    Listed,
    Machine,
    Market,
    Order,
)
from penstock_scheduler.people.errors import ConfigError
from penstock_scheduler.safety import children

ASK_S = 60.0
"""How long the offers of a command are used before it is asked again, s."""


class CommandSettings(BaseModel):
    """Section `[cloud.commands.NAME]`: a place of another cloud, behind the admin's own command."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    command: tuple[str, ...] = Field(
        min_length=1, description="The command and its first arguments, with its full path."
    )
    timeout_s: PositiveFloat = Field(default=30.0, description="Time after which a question counts as unanswered.")


class _Machine(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    instance_type: str = Field(min_length=1)
    market: Market = "on-demand"
    gpu_type: str = Field(min_length=1)
    gpus: PositiveInt
    vcpus: PositiveInt
    memory_mib: PositiveInt
    usd_per_h: PositiveFloat
    extras_usd_per_h: NonNegativeFloat = 0.0


class _Offers(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    as_of: datetime
    machines: list[_Machine]


class _Launched(BaseModel):
    model_config = ConfigDict(extra="forbid")

    instances: dict[str, str]


class _Instance(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    id: str = Field(min_length=1)
    state: str
    instance_type: str
    zone: str = ""
    launched_s: float
    ended_s: float | None = None
    gone: bool
    tags: dict[str, str]


class _Instances(BaseModel):
    model_config = ConfigDict(extra="forbid")

    instances: list[_Instance]
    unknown: list[str] = []


class _Refusal(BaseModel):
    kind: Kind
    message: str = ""


class CommandClient:
    """Starts the command. Raises ConfigError if the command is not safe to start."""

    def __init__(self, name: str, settings: CommandSettings) -> None:
        self._name, self._settings = name, settings
        file = Path(settings.command[0])
        where = f"[cloud.commands.{name}] command={str(file)!r}"
        if not file.is_absolute() or not os.access(file, os.X_OK):
            raise ConfigError(f"{where}: name an executable file by its full path")
        if file.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"{where}: others can write it, and penstockd would run it; chmod go-w {file}")

    def ask(self, verb: str, asked: Mapping[str, Any]) -> str:
        """The answer to a question, as JSON. Raises LaunchFailed."""
        try:
            done = children.run(
                [*self._settings.command, verb],
                env=os.environ,
                input=json.dumps(asked).encode(),
                timeout_s=self._settings.timeout_s,
                cwd=str(Path.cwd()),
            )
        except children.CannotStart as error:
            raise LaunchFailed(Kind.CONFIG, "", f"{self._name}: {error}") from None
        except children.ChildError as error:  # what it was asked for may have been done
            words = f"{self._name} has not answered {verb!r}: its command {error.text}"
            raise LaunchFailed(Kind.LOST, "", words) from None
        if done.returncode == 0:
            return done.out
        try:
            refusal = _Refusal.model_validate_json(done.out)
        except ValidationError:
            told = (done.err or done.out).strip()[-500:]
            words = f"{self._name}: {verb!r} failed with exit status {done.returncode}: {told}"
            raise LaunchFailed(Kind.CONFIG, "", words) from None
        raise LaunchFailed(refusal.kind, "", f"{self._name}: {refusal.message}")


class Command:
    """See the module, and `Provider` for the methods.

    Args:
        name: the place's name.
        site: the site's identity.
        client: `CommandClient`, or one that releases a lock during its calls.
        price_days: age in days beyond which prices are not used.
    """

    def __init__(self, name: str, site: str, client: Any, price_days: float) -> None:
        self.name = name
        self._site, self._client, self._price_days = site, client, price_days
        self._offers = _Offers(as_of=datetime.fromtimestamp(0, UTC), machines=[])
        self._asked_s = -1e18

    def offers(self, now_s: float) -> Sequence[Machine]:
        """See `Provider`. The command is asked once a minute."""
        if not 0 <= now_s - self._asked_s < ASK_S:
            self._offers = self._ask(_Offers, "offers")
            self._asked_s = now_s
        return () if self.prices(now_s) else [Machine(**each.model_dump()) for each in self._offers.machines]

    def prices(self, now_s: float) -> str:
        """See `Provider`. Empty if the command is to be asked again."""
        if not 0 <= now_s - self._asked_s < ASK_S:
            return ""
        age_days = (now_s - self._offers.as_of.timestamp()) / 86400
        if age_days <= self._price_days:
            return ""
        return (
            f"the prices of {self.name} are as of {self._offers.as_of:%Y-%m-%d}, and [cloud] price_days="
            f"{self._price_days:g}; let its command answer 'offers' with newer ones"
        )

    def refresh(self, now_s: float) -> None:
        """See `Provider`: `offers` asks for prices."""

    def news(self) -> str:
        """See `Provider`: the command has its own images."""
        return ""

    def accept(self) -> str:
        """See `Provider`."""
        return ""

    def check(self) -> str:
        """See `Provider`."""
        try:
            self.offers(datetime.now(UTC).timestamp())
            self.list()
        except LaunchFailed as error:
            return str(error)
        return self.prices(datetime.now(UTC).timestamp())

    def spot_prices(self, instance_type: str, zone: str, begin_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        """See `Provider`."""
        return ()

    def launch_gang(self, order: Order) -> Mapping[str, str]:
        """See `Provider`."""
        launched: dict[str, str] = self._ask(
            _Launched,
            "launch",
            run=order.run,
            token=order.token,
            instance_type=order.instance_type,
            market=order.market,
            nodes=order.nodes,
            tags={**order.tags, "site": self._site},
            usd_per_h=order.usd_per_h,
            until_s=order.until_s,
            guest=None if order.guest is None else base64.b64encode(order.guest).decode(),
        ).instances
        if set(launched) != set(order.nodes) or len(set(launched.values())) != len(order.nodes):
            words = f"{self.name}: 'launch' did not answer with one instance for each of {', '.join(order.nodes)}"
            raise LaunchFailed(Kind.CONFIG, "", words)
        return launched

    def list(self, run: str | None = None) -> Listed:
        """See `Provider`. What the command lists of other sites or runs is left out."""
        found = self._described(self._ask(_Instances, "list", run=run, ids=None))
        return [
            each
            for each in found
            if each.tags.get("site") == self._site and (run is None or each.tags.get("run") == run)
        ]

    def known(self, ids: Collection[str]) -> Listed:
        """See `Provider`."""
        if not ids:
            return []
        found = self._described(self._ask(_Instances, "list", run=None, ids=sorted(ids)))
        return [each for each in found if each.id in ids]

    def forgotten(self, id_: str) -> bool:
        """See `Provider`."""
        return id_ in self._ask(_Instances, "list", run=None, ids=[id_]).unknown

    def terminate(self, ids: Sequence[str]) -> None:
        """See `Provider`."""
        if ids:
            self._ask(None, "terminate", ids=ids)

    def tidy(self, run: str) -> None:
        """See `Provider`."""
        self._ask(None, "tidy", run=run)

    def _described(self, found: _Instances) -> Listed:
        described = [DescribedInstance(**each.model_dump(), region=self.name) for each in found.instances]
        return sorted(described, key=lambda each: (each.launched_s, each.id))

    def _ask(self, answer: Any, verb: str, **asked: Any) -> Any:
        told = self._client.ask(verb, {"site": self._site, **asked})
        if answer is None:
            return None
        try:
            return answer.model_validate_json(told)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise LaunchFailed(
                Kind.CONFIG, "", f"{self.name}: the answer to {verb!r} cannot be read: {where}: {first['msg']}"
            ) from None
