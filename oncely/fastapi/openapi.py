"""What the OpenAPI document says of a guarded route: its header, and the answers 400, 409 and 422."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from oncely.fastapi.header import HEADER, key_parameter
from oncely.fastapi.problem import problem_response

__all__ = ["document", "tree"]


def document(route: APIRoute, *, required: bool) -> None:
    """Add the header and the responses to what the route says of itself, without taking anything away.

    Doing it again changes nothing: before FastAPI 0.137, include_router builds each route again.
    """
    dependants = list(tree(route.dependant))
    validated = route.body_field is not None or any(
        dependant.path_params or dependant.query_params or dependant.header_params or dependant.cookie_params
        for dependant in dependants
    )
    route.responses = _with_problems(route.responses, validated=validated)
    headers = {field.alias for dependant in dependants for field in dependant.header_params}
    if HEADER.lower() not in {name.replace("_", "-").lower() for name in headers}:
        route.openapi_extra = _with_key(route.openapi_extra or {}, required=required)


def tree(dependant: Dependant) -> Iterator[Dependant]:
    """The endpoint and all that it depends on."""
    yield dependant
    for dependency in dependant.dependencies:
        yield from tree(dependency)


def _with_problems(
    given: Mapping[int | str, dict[str, Any]], *, validated: bool
) -> dict[int | str, dict[str, Any]]:
    responses = dict(given)
    names = {str(status): status for status in given}
    for status, description in _DESCRIPTIONS.items():
        both = status == _UNPROCESSABLE and validated
        ours = problem_response(status, description, schema=_validation_schema() if both else None)
        name = names.get(str(status), status)
        theirs = responses.get(name, {})
        merged = {**ours, **theirs, "content": {**ours["content"], **theirs.get("content", {})}}
        if "model" in theirs and "application/json" not in theirs.get("content", {}):
            merged["content"].pop("application/json", None)  # FastAPI puts the model there
        if "headers" in ours:
            merged["headers"] = {**ours["headers"], **theirs.get("headers", {})}
        responses[name] = merged
    return responses


def _with_key(extra: dict[str, Any], *, required: bool) -> dict[str, Any]:
    parameters = extra.get("parameters", [])
    if any(parameter.get("name", "").lower() == HEADER.lower() for parameter in parameters):
        return extra
    return {**extra, "parameters": [*parameters, key_parameter(required=required)]}


def _validation_schema() -> dict[str, Any]:
    """As FastAPI writes it, which does so only for routes that have no 422 of their own."""
    place = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    error = {
        "title": "ValidationError",
        "type": "object",
        "properties": {
            "loc": {"title": "Location", "type": "array", "items": place},
            "msg": {"title": "Message", "type": "string"},
            "type": {"title": "Error Type", "type": "string"},
        },
        "required": ["loc", "msg", "type"],
    }
    return {
        "title": "HTTPValidationError",
        "type": "object",
        "properties": {"detail": {"title": "Detail", "type": "array", "items": error}},
    }


_UNPROCESSABLE = 422
_DESCRIPTIONS = {
    400: f"The {HEADER} header is missing or malformed",
    409: "The first request with this key is not finished, or met another one: send it again",
    422: f"The request is invalid, or its {HEADER} was used for another request",
}
