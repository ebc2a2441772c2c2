"""Every error that a client can see: its status, its type and code, and the envelope it comes in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tokenflow.errors import (
    ContextTooLong,
    EndpointFailed,
    InvalidRequest,
    NonFiniteLogits,
    Overloaded,
    RequestCancelled,
    RequestError,
    RequestTimeout,
    RouteFailed,
    RouterClosed,
    TokenflowError,
    WorkerDied,
)

INTERNAL = "internal_error"
RETRY_AFTER_S = 1
_LONGEST_MESSAGE = 1_000
_LONGEST_PARAM = 100
_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.@+-]+/)+([\w.@+-]+)")
_RETRY = {"retry-after": str(RETRY_AFTER_S)}
_NO_RETRY = {"x-should-retry": "false"}


@dataclass(eq=False)
class ApiError(Exception):
    """An error as a client sees it.

    :param status: of the HTTP response.
    :param type: the class of errors in OpenAI's words.
    :param code: which one it is.
    :param param: the field of the request that is wrong, if it is one.
    :param headers: to be sent with the error.
    """

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> bytes:
        """The error as JSON."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The request is wrong."""
    return ApiError(400, "invalid_request_error", code, _readable(message), param and param[:_LONGEST_PARAM])


def unsupported(param: str) -> ApiError:
    """The request sets something known that this server does not do."""
    return invalid(f"{param} is not supported by this server; leave it out", param, "unsupported_parameter")


def too_large(limit: int) -> ApiError:
    """The request's body is too large."""
    message = f"the request is larger than {limit} bytes"
    return ApiError(413, "invalid_request_error", "request_too_large", message)


def too_many(limit: int) -> ApiError:
    """The request's body has too many values."""
    message = f"the request has more than {limit} values; send fewer prompts or tokens at once"
    return ApiError(413, "invalid_request_error", "request_too_large", message)


def too_slow(seconds: float) -> ApiError:
    """The request's body does not come."""
    message = f"the request's body did not come within {seconds:g} s"
    return ApiError(408, "invalid_request_error", "request_timeout", message, None, _NO_RETRY)


def no_http(status: int, message: str) -> ApiError:
    """What was sent is not HTTP as this server takes it."""
    return ApiError(status, "invalid_request_error", "bad_http", message)


def no_model(name: str, names: tuple[str, ...]) -> ApiError:
    """Nobody here is called that."""
    message = _readable(f"the model {name!r} does not exist; models: {', '.join(names)}")
    return ApiError(404, "invalid_request_error", "model_not_found", message, "model")


def no_route(status: int, method: str, path: str, headers: Mapping[str, str]) -> ApiError:
    """There is no such endpoint (404), or it wants another method (405), which ``headers`` name."""
    what = "there is no" if status == 404 else "not allowed:"
    message = _bounded(f"{what} {method} {path}")
    return ApiError(status, "invalid_request_error", "not_found", message, None, headers)


def wrong_key() -> ApiError:
    """No API key, or none of ours."""
    message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, "authentication_error", "invalid_api_key", message, None, headers)


def not_ready(message: str) -> ApiError:
    """The server does not take requests: not yet, or not any more."""
    return ApiError(503, "unavailable_error", "not_ready", message, None, _RETRY)


def model_down(error: TokenflowError) -> ApiError:
    """A model's worker is gone for good."""
    return ApiError(503, "unavailable_error", "model_down", _first_line(error), None, _RETRY)


def worker_died(error: TokenflowError) -> ApiError:
    """A model's worker went while it was needed."""
    return ApiError(503, "unavailable_error", "worker_died", _first_line(error), None, _RETRY)


def internal() -> ApiError:
    """Something that should not have happened; the log says what."""
    message = "internal error; the server's log has the details"
    return ApiError(500, "server_error", INTERNAL, message, None, _NO_RETRY)


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            code = "context_length_exceeded" if isinstance(error, ContextTooLong) else "invalid_value"
            if code == "context_length_exceeded":  # clients know it by these words
                return invalid(f"this model's maximum context length is exceeded: {error}", error.param, code)
            return invalid(str(error), error.param, code)
        case RequestCancelled() | RouterClosed():
            return not_ready(_first_line(error))
        case Overloaded():
            return ApiError(503, "overloaded_error", "queue_full", _first_line(error), None, _RETRY)
        case RequestTimeout():
            return ApiError(504, "server_error", "request_timeout", _first_line(error), None, _NO_RETRY)
        case EndpointFailed():
            return ApiError(502, "server_error", "endpoint_failed", _first_line(error))
        case RouteFailed():
            return ApiError(500, "server_error", "recipe_error", _first_line(error), None, _NO_RETRY)
        case NonFiniteLogits() | RequestError():
            return ApiError(500, "server_error", "model_error", _first_line(error), None, _NO_RETRY)
        case WorkerDied():
            return worker_died(error)
        case TokenflowError():
            return ApiError(500, "server_error", "engine_error", _first_line(error))
    return internal()


def _first_line(error: Exception) -> str:
    """A message without a worker's last words, which belong into the log."""
    return _readable(str(error).partition("\n")[0].removesuffix("; its last words:"))


def _readable(message: str) -> str:
    """A message of bounded length that names no folders of this machine."""
    return _bounded(_PATH.sub(r"\1", message))


def _bounded(message: str) -> str:
    message = message.encode(errors="replace").decode()
    return message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "..."
