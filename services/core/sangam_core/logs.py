"""Structured logs of a service: one record a line on standard error.

Called once by a service's ``__main__``; everything else does ``structlog.get_logger()``. Records of
the standard library (uvicorn, aiohttp) go the same way. The one file of the core that may know
structlog: policies do not log.
"""

import logging
import sys

import structlog
from structlog.typing import Processor


def configure_logging(level: str, log_format: str, **bound: str) -> None:
    """Set up structlog and the standard library's root logger.

    Args:
        level: least severe level written, in lower case.
        log_format: ``json`` for machines, or ``console`` for people.
        bound: fields that every record carries, e.g. ``worker_id``.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _binder(bound),
    ]
    rendering: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if log_format == "json"
        else [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # rich's tracebacks would show local variables: tokens, passwords, prompts.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # starts, stops, requests: by us
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _binder(bound: dict[str, str]) -> Processor:
    def bind(
        logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        for name, value in bound.items():
            event.setdefault(name, value)
        return event

    return bind
