"""Values of a test for constants: numbers of the classes of settings that are the same at every site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

from pydantic import BaseModel

from penstock_scheduler.rounds.policies import REGISTRY, STAGES
from penstock_scheduler.rounds.settings import section_models

Model = TypeVar("Model", bound=BaseModel)


def with_constants(model: type[Model], values: Mapping[str, Any]) -> Model:
    """A section with these settings and constants."""
    constants = {name: value for name, value in values.items() if name in model.__class_vars__}
    settings = {name: value for name, value in values.items() if name not in constants}
    return model.model_validate(settings).model_copy(update=constants)


def _model(section: str) -> type[BaseModel]:
    """The model of a section, or of a policy's: `policy.NAME`."""
    name = section.removeprefix("policy.")
    return section_models()[section] if name == section else {**REGISTRY, **STAGES}[name][1]


def set_constants(values: Mapping[str, Mapping[str, Any]]) -> None:
    """Set constants of sections (section -> name -> value) in this process, for a daemon that reads its settings from a file."""
    for section, constants in values.items():
        model = _model(section)
        for name, value in constants.items():
            assert name in model.__class_vars__, (section, name)
            setattr(model, name, value)


@contextmanager
def constants(values: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """The same within a context."""
    with ExitStack() as changes:
        for section, names in values.items():
            for name, value in names.items():
                assert name in _model(section).__class_vars__, (section, name)
                changes.enter_context(mock.patch.object(_model(section), name, value))
        yield


def apart(section: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings and the constants among the values of a section."""
    known = section_models()[section].__class_vars__ if section in section_models() else set()
    return (
        {name: value for name, value in values.items() if name not in known},
        {name: value for name, value in values.items() if name in known},
    )
