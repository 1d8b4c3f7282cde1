"""Logs: one line an event on standard error, with the service's name; JSON on request."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure(service: str) -> None:
    """Set up logging for this process; NIGHTJAR_LOG_LEVEL and NIGHTJAR_LOG_FORMAT=json apply."""
    level = logging.getLevelNamesMapping().get(os.environ.get("NIGHTJAR_LOG_LEVEL", "INFO").upper())
    as_json = os.environ.get("NIGHTJAR_LOG_FORMAT", "text") == "json"
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level or logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def get(**fields: object) -> structlog.typing.FilteringBoundLogger:
    """Logger with these fields on every line."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(**fields)
    return logger
