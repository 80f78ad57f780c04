"""The one exception tree. Each service maps it to HTTP in one place.

Running out of pages is a return value, not an exception; ``assert`` is for our own bugs.
"""


class SangamError(Exception):
    """Base of every error that Sangam raises on purpose. Its text is fit for a user."""


class ConfigurationError(SangamError):
    """A setting or a checkpoint is unusable; the process stops with this line."""


class IllegalTransition(SangamError):
    """A lifecycle event in a phase where it cannot happen: a bug of the caller."""


class InvalidRequest(SangamError):
    """The client asked for something that cannot be had (400).

    Attributes:
        param: the field of the body, as the client wrote it.
        code: a short machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(SangamError):
    """The waiting line is full (429)."""

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(SangamError):
    """No worker, or no Redis, within the set time (503)."""

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(SangamError):
    """The request's deadline passed (504)."""


class EngineError(SangamError):
    """The model gave no usable numbers: broken weights, or a faulty device."""


class BlockLost(SangamError):
    """A block's worker died, drained, or its transfer failed; the block starts again elsewhere."""


class TransferError(SangamError):
    """A KV transfer failed or expired; only its pair is affected."""
