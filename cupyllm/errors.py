"""Every exception that cupyllm raises on purpose.

    CupyllmError
    ├── ConfigError        a config file, key or value cannot be used
    ├── CheckpointError    a model folder is incomplete, damaged or not supported
    ├── DeviceError        a device, driver, compiler or kernel is not there or not supported
    ├── RequestError       what one request asks for cannot be served; the fault is the caller's
    │   ├── ContextLengthError   prompt and output can never fit
    │   └── DeadEndError         no token may follow what the model has written
    ├── QueueFullError     the waiting queue is full; trying again later can succeed
    └── EngineError        the engine failed or is stopping; the fault is ours

Messages are one line: what is wrong, with the value, and what to do about it. `assert` marks our own bugs, never the
world's. The HTTP layer maps these classes to statuses (api/errors.py); nothing else knows about HTTP.
"""

from __future__ import annotations


class CupyllmError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(CupyllmError):
    """A config file, key or value cannot be used; the message names the key."""


class CheckpointError(CupyllmError):
    """A model folder is incomplete, damaged or not supported; the message names the file and the tensor or key."""


class DeviceError(CupyllmError):
    """A device, driver, compiler or kernel is missing or does not support what was asked."""


class RequestError(CupyllmError):
    """One request asks for something that cannot be served.

    `param` is the request field at fault (None: the whole request) and `code` OpenAI's machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt and output together can never fit the model's context or the KV cache."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class DeadEndError(RequestError):
    """No token may follow what the model has written: what the request lets an answer begin with has no end."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="dead_end")


class QueueFullError(CupyllmError):
    """The waiting queue is full; the same request can succeed later."""

    def __init__(self, num_waiting: int, max_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} sequences are waiting and at most {max_waiting} may (max_waiting); try again later"
        )


class EngineError(CupyllmError):
    """The engine failed or is stopping; the request itself was fine."""
