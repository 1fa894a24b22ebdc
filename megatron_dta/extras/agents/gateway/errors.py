"""The error that a client receives: an HTTP status and one line that says what is wrong and what to do."""

from __future__ import annotations

from megatron_dta.core.common.errors import one_line

_LONGEST = 400


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: the HTTP status.
        message: one line; it names the field, if there is one.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, one_line(message)[:_LONGEST]


def refuse(message: str) -> RequestError:
    return RequestError(400, message)


def exhausted(reason: str) -> RequestError:
    """Not 429, after which clients try again."""
    return RequestError(403, f"the session {reason}; end it")
