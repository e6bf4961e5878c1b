"""The program `penstock-agent`."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from penstock_profiles.node_channel import run_dir
from penstock_scheduler.model.spec_errors import describe_errors
from penstock_scheduler.people.errors import ConfigError, PenstockError
from penstock_scheduler.people.safe_text import LOG_LINE, guard, one_line
from penstock_slurm.agent.agent import Agent
from penstock_slurm.agent.channel import Channels
from penstock_slurm.agent.device_cgroup import DeviceCgroups
from penstock_slurm.agent.driver import Driver
from penstock_slurm.agent.freezer import GuardedFreezer
from penstock_slurm.agent.gpu_time import DriverTimes, GpuTimes
from penstock_slurm.agent.plugin import Plugin
from penstock_slurm.agent.processes import Processes, memory_of_host_mb
from penstock_slurm.agent.settings import AgentSettings
from penstock_slurm.gateway import CliGateway
from penstock_slurm.gateway.local_slurm import SlurmCommands
from penstock_slurm.settings import SlurmSettings

Section = TypeVar("Section", bound=BaseModel)

log = logging.getLogger("penstock_slurm.agent")


class _Logfmt(logging.Formatter):
    """Logfmt as the daemon writes it, but without structlog, which takes 7 of the agent's 50 MiB."""

    KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        at = f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        facts = {"timestamp": at, "level": record.levelname.lower(), "event": record.getMessage()}
        facts |= {key: value for key, value in vars(record).items() if key not in self.KNOWN}
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return one_line(" ".join(f"{key}={_quoted(str(value))}" for key, value in facts.items()), LOG_LINE)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if set(text) & set(' "=\n') else text


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit status: 0: stopped when asked; 1: cannot run; 2: wrong settings or usage."""
    parser = argparse.ArgumentParser(prog="penstock-agent", description="Lets jobs share the GPUs of this node.")
    parser.add_argument("--config", type=Path, default=Path("/etc/penstock/penstock.toml"), help="settings file (TOML)")
    parser.add_argument(
        "--node",
        default=os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0],
        help="Slurm's name",
    )
    parser.add_argument(
        "--thaw", action="store_true", help="thaw what an agent that was killed has frozen, and end; the unit does this"
    )
    options = parser.parse_args(argv)
    guard(rich=False)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Logfmt())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        if options.thaw:
            return _thaw(options.node, options.config)
        return _run(options.node, *_settings(options.config), stop)
    except ConfigError as error:
        print(f"penstock-agent: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except (PenstockError, OSError) as error:
        print(f"penstock-agent: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _thaw(node: str, config: Path) -> int:
    """Thaw what an agent that was killed has frozen itself, as one that stops would have done."""
    try:
        slurm, settings = _settings(config)
    except ConfigError as error:  # then no agent starts again, either
        log.warning("thaws by the default settings", extra={"text": str(error)})
        slurm, settings = SlurmSettings(partitions=("any",)), AgentSettings()
    with _alone(node, settings) as channels:
        _agent(node, slurm, settings, channels, None).close()
    return 0


def _run(node: str, slurm: SlurmSettings, settings: AgentSettings, stop: threading.Event) -> int:
    with _alone(node, settings) as channels:
        return _run_alone(node, slurm, settings, stop, channels)


@contextlib.contextmanager
def _alone(node: str, settings: AgentSettings) -> Iterator[Channels]:
    """The channels to the jobs, as the only agent of the node."""
    folder, state_folder = run_dir(settings.run_dir, node), run_dir(settings.state_dir, node)
    channels = Channels(folder)
    state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held(state_folder, folder):
        yield channels


def _run_alone(
    node: str, slurm: SlurmSettings, settings: AgentSettings, stop: threading.Event, channels: Channels
) -> int:
    driver = Driver(node)
    try:
        while not stop.is_set():
            _tick(_agent(node, slurm, settings, channels, driver), driver, stop)
    finally:
        driver.close()
    log.info("agent stops; jobs stay as they are in Slurm", extra={"node": node})
    return 0


def _agent(
    node: str, slurm: SlurmSettings, settings: AgentSettings, channels: Channels, driver: Driver | None
) -> Agent:
    """The agent. `driver`: None for one that only thaws."""
    # Asked between ticks, which must not wait long for a controller that is away.
    plugin = Plugin(SlurmCommands(slurm.conf, min(slurm.command_timeout_s, 5.0)), settings.run_dir)
    processes = Processes(node, conf=os.environ.get("SLURM_CONF"))
    nvml = driver.nvml if driver is not None else None
    gpu_times: GpuTimes | None = DriverTimes(nvml) if nvml is not None else None
    agent = Agent(
        node,
        slurm.spool_dir,
        settings,
        run_dir(settings.state_dir, node),
        CliGateway(conf=slurm.conf, timeout_s=slurm.command_timeout_s),
        channels,
        processes,
        memory_of_host_mb(),
        nvml.sample if nvml is not None else None,
        plugin.trouble,
        DeviceCgroups(node, plugin.constrains, settings.gpu_file),
        # If the site names the device files, Slurm's indexes may differ from NVML's.
        nvml.links() if nvml is not None and settings.gpu_file is None else (),
        gpu_times,
        nvml.driver if nvml is not None else None,
        freezer=GuardedFreezer() if driver is not None else None,
        no_nvml=lambda: driver.lack if driver is not None else "",
    )
    log.info("agent starts", extra={"node": node, "run_dir": str(channels.folder), "spool": str(slurm.spool_dir)})
    return agent


def _tick(agent: Agent, driver: Driver, stop: threading.Event) -> None:
    """Let the agent work until it is asked to stop, or must begin anew since NVML has come."""
    try:
        while not (stop.is_set() or driver.has_come()):
            try:
                agent.tick(time.time())
            except Exception:  # one failure must not leave jobs frozen forever
                log.exception("a tick failed")
            stop.wait(agent.pause_s)
    finally:
        agent.close()


def _settings(path: Path) -> tuple[SlurmSettings, AgentSettings]:
    """Read the sections that an agent needs. The daemon's reader imports all packages, and an agent must stay small."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the settings file with --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return _section(path, tables, "slurm", SlurmSettings), _section(path, tables, "agent", AgentSettings)


def _section(path: Path, tables: dict[str, Any], name: str, model: type[Section]) -> Section:
    try:
        return model.model_validate(tables.get(name, {}))
    except ValidationError as error:
        raise ConfigError(f"{path}: [{name}] {'; '.join(describe_errors(error, model))}") from None


NAME = "agent.lock"


@contextlib.contextmanager
def held(*folders: Path) -> Iterator[None]:
    """Hold the lock of each folder: that of the state and that of the jobs' files. The kernel releases it when the
    agent ends, however it ends.

    Raises:
        PenstockError: another agent holds one of them.
        OSError: a folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        for folder in folders:
            handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise PenstockError(
                    f"another penstock-agent (process {other}) works in {folder}, and two would act on the same jobs; "
                    "end that one first, or give this node its own state_dir and run_dir with %n"
                ) from None
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield


if __name__ == "__main__":
    sys.exit(main())
