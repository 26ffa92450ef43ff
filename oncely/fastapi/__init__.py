"""Idempotent routes for FastAPI: the Idempotency-Key header, and the transaction its answer commits in."""

from oncely.extras import needs

needs("fastapi", "fastapi")

from oncely.fastapi.fingerprint import request_fingerprint
from oncely.fastapi.header import IdempotencyKeyHeader, InvalidKeyHeader
from oncely.fastapi.kept import outcome_response
from oncely.fastapi.problem import TransactionConflict, add_problem_handlers
from oncely.fastapi.route import idempotent_route
from oncely.fastapi.session import IdempotentSession

__all__ = [
    "IdempotencyKeyHeader",
    "IdempotentSession",
    "InvalidKeyHeader",
    "TransactionConflict",
    "add_problem_handlers",
    "idempotent_route",
    "outcome_response",
    "request_fingerprint",
]
