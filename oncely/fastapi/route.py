"""The route class: an endpoint stays as it is, and a request with a key does its work once.

Around the endpoint stands a wrapper that claims the key; FastAPI has solved the dependencies and
checked the body before it. Around FastAPI's handler of the route stands one that stores the rendered
answer and commits. Around both stands the request's Exchange.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable
from datetime import timedelta
from typing import Annotated, Any, ClassVar

from fastapi import Depends, Request
from fastapi.datastructures import DefaultPlaceholder
from fastapi.dependencies.utils import get_typed_return_annotation, get_typed_signature
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oncely.arguments import check_kind
from oncely.errors import Refused
from oncely.fastapi.exchange import Exchange, exchange_of
from oncely.fastapi.fingerprint import request_fingerprint
from oncely.fastapi.kept import kept_headers, refused_response, sends_itself
from oncely.fastapi.openapi import document
from oncely.fastapi.policy import Fingerprint, Policy, ScopeOf
from oncely.fastapi.session import open_session
from oncely.idempotency import IdempotencyKeys
from oncely.transaction import Sessionmaker

__all__ = ["idempotent_route"]


def idempotent_route(
    keys: IdempotencyKeys,
    sessionmaker: Sessionmaker,
    *,
    scope: ScopeOf,
    required: bool = True,
    methods: Iterable[str] = ("POST", "PATCH"),
    wait: timedelta | None = timedelta(0),
    ttl: timedelta | None = timedelta(hours=24),
    refusals: Iterable[int] = (),
    headers: Iterable[str] = ("Location", "ETag", "Link"),
    fingerprint: Fingerprint = request_fingerprint,
    max_body: int = 1024 * 1024,
) -> type[APIRoute]:
    """A route class for an APIRouter, whose routes do the work of an Idempotency-Key once.

        router = APIRouter(route_class=idempotent_route(keys, sessions, scope=user_id))

    `scope` says whose key it is: a function of the request, plain or async, called after the
    dependencies. Without a key a request is refused, or, with `required=False`, treated as usual.
    `wait` and `ttl` are those of `IdempotencyKeys.run`.

    `refusals` are the statuses whose HTTPException, raised by the endpoint, is an answer: its work is
    undone, and every retry gets it. `Refused` always is. Any other exception leaves the key free.
    `headers` are kept with an answer, beside Content-Type. `fingerprint` is a function of the request
    that takes the place of `request_fingerprint`; method and path always count. An answer's body may have
    `max_body` bytes.

    Raises TypeError and ValueError for settings that could not work, and, when a route is built,
    TypeError for an endpoint that streams, or is no coroutine function and takes IdempotentSession.
    """
    check_kind(refusals, Iterable, "refusals")
    policy = Policy(
        keys=keys,
        sessionmaker=sessionmaker,
        scope=scope,
        required=required,
        methods=frozenset(method.upper() for method in _names(methods, "methods")),
        wait=wait,
        ttl=ttl,
        refusals=frozenset(int(status) for status in refusals),
        headers=kept_headers(_names(headers, "headers")),
        fingerprint=fingerprint,
        max_body=max_body,
    )
    return type("IdempotentRoute", (_IdempotentRoute,), {"policy": policy, "__module__": __name__})


def _names(given: Iterable[str], what: str) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError(f"{what} must be names, not a str")
    check_kind(given, Iterable, what)
    names = tuple(given)
    for name in names:
        check_kind(name, str, f"each of {what}")
    return names


class _IdempotentRoute(APIRoute):
    policy: ClassVar[Policy]

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        methods = {method.upper() for method in options.get("methods") or ["GET"]}
        guarded = methods & self.policy.methods
        if guarded:
            _refuse_stream(path, endpoint, options.get("response_class"))
            endpoint = _guard(endpoint)
        super().__init__(path, endpoint, **options)
        if any(dependency.call is open_session for dependency in self.dependant.dependencies):
            _refuse_thread(path, endpoint)
        if guarded:
            document(self, required=self.policy.required and guarded == methods)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        render = super().get_route_handler()

        async def store(request: Request) -> Response:
            exchange = await exchange_of(request)
            exchange.request = request
            try:
                response = await render(request)
                await exchange.finish(response)
            except Exception as error:
                await exchange.fail(error)
                raise
            return response

        return store

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Exchange(self.policy, scope, receive, send) as exchange:
            try:
                try:
                    await super().handle(scope, exchange.receive, exchange.send)
                except Refused as refused:
                    await refused_response(refused)(scope, exchange.receive, exchange.send)
            except Exception as error:
                problem = await exchange.problem(error)
                if problem is None:
                    raise
                await problem.response()(scope, receive, send)


def _guard(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The endpoint with the claim before it. FastAPI sees the signature of the endpoint."""
    if hasattr(endpoint, _MARK):
        return endpoint  # before FastAPI 0.137, include_router builds a route again from its endpoint
    runs_in_thread = not _is_coroutine_function(endpoint)

    @functools.wraps(endpoint)
    async def guarded(*, oncely_exchange: Exchange, **values: Any) -> Any:
        async def call() -> Any:
            if runs_in_thread:
                return await run_in_threadpool(functools.partial(endpoint, **values))
            return await endpoint(**values)

        return await oncely_exchange.run(call)

    setattr(guarded, _MARK, True)
    setattr(guarded, "__signature__", _signature(endpoint))  # noqa: B010  functions have no such attribute for mypy
    return guarded


def _signature(endpoint: Callable[..., Any]) -> inspect.Signature:
    """The endpoint's signature, with annotations that are text resolved where it was written."""
    parameters = list(get_typed_signature(endpoint).parameters.values())
    ours = inspect.Parameter(
        "oncely_exchange",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[Exchange, Depends(exchange_of)],
    )
    keywords = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    others = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    returns = inspect.signature(endpoint).return_annotation
    if returns is not inspect.Signature.empty:
        returns = get_typed_return_annotation(endpoint)
        returns = None if returns is type(None) else returns
    return inspect.Signature([*others, ours, *keywords], return_annotation=returns)


def _refuse_stream(path: str, endpoint: Callable[..., Any], response_class: object) -> None:
    function = _function(endpoint)
    if isinstance(response_class, DefaultPlaceholder):
        response_class = response_class.value
    streams = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    for kind in (response_class, get_typed_return_annotation(endpoint)):
        streams = streams or (isinstance(kind, type) and issubclass(kind, Response) and sends_itself(kind))
    if streams:
        raise TypeError(
            f"{path}: an answer that sends itself, as a stream or a file does, cannot be stored and "
            "replayed; put this route on a router without idempotent_route"
        )


def _refuse_thread(path: str, endpoint: Callable[..., Any]) -> None:
    if not _is_coroutine_function(endpoint):
        raise TypeError(
            f"{path}: the endpoint runs in a thread, where IdempotentSession cannot be used; "
            "declare it with async def"
        )


def _is_coroutine_function(endpoint: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(_function(endpoint))


def _function(endpoint: Callable[..., Any]) -> Any:
    """The function that an endpoint runs: without partials and decorators, or the method of an object."""
    function: Any = endpoint
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return function.__call__


_MARK = "__oncely_guarded__"
