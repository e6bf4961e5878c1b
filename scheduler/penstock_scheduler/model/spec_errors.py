"""Says in sentences what pydantic found wrong with a job spec, or with another table of settings."""

from __future__ import annotations

from typing import get_args

from pydantic import BaseModel, ValidationError


def describe_errors(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence for each error that pydantic found: the field, its value and, for an unknown key, the valid keys."""
    sentences = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            sentences.append(_unknown(_table(model, item["loc"][:-1]), str(item["loc"][-1]), where))
        elif item["type"] == "value_error":
            sentences.append(f"{where}: {item['ctx']['error']}" if where else str(item["ctx"]["error"]))
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            sentences.append(f"{where}={item['input']!r}: {message}" if where else f"{item['input']!r}: {message}")
    return sentences


def _unknown(table: type[BaseModel], key: str, where: str) -> str:
    """The sentence about a key that `table` does not have. A key that earlier versions had is a constant of its class now, or
    is in its `gone`: key -> what happens instead."""
    if key in table.__class_vars__ and key != "gone":
        return f"{where!r} is not a setting any more: the value is always {getattr(table, key)!r}. Delete this line"
    if (instead := getattr(table, "gone", {}).get(key)) is not None:
        return f"{where!r} is not a setting any more: {instead}. Delete this line"
    return f"unknown key {where!r}; the keys are {', '.join(sorted(table.model_fields))}"


def _table(model: type[BaseModel], where: tuple[int | str, ...]) -> type[BaseModel]:
    """The innermost model on the path `where` into `model`."""
    for name in where:
        field = model.model_fields.get(str(name))
        inner = _model_in(field.annotation) if field is not None else None
        model = model if inner is None else inner
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)
