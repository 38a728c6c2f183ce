"""How log lines look: text for people, or one JSON object a line for machines. No line holds text of a prompt."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

_FIELDS = "cupyllm_fields"


def log_fields(log: logging.Logger, head: dict[str, Any], fields: dict[str, Any]) -> None:
    """A line of level info. As text: the values of `head`, then `key=value` for each field, "-" for None; as JSON all
    of them are keys.
    """
    if log.isEnabledFor(logging.INFO):
        shown = [f"{key}={'-' if value is None else value}" for key, value in fields.items()]
        message = " ".join([*map(str, head.values()), *shown])
        log.info("%s", message, extra={_FIELDS: {"message": "request ended", **head, **fields}})


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "message": ...}`, then the fields of `log_fields`, then `error` with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str, form: str) -> None:
    """One line per event on stderr; `form` is "text" or "json"."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
