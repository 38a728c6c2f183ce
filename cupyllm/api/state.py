"""What the routes share: the loaded model, the engine thread, and the name clients call the model by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request

from cupyllm.api.metrics import Metrics
from cupyllm.api.worker import EngineWorker
from cupyllm.config import ServerConfig
from cupyllm.errors import RequestError
from cupyllm.startup import LoadedModel


@dataclass(frozen=True)
class ServerState:
    """One server: made once by app.py, read by every route."""

    config: ServerConfig
    loaded: LoadedModel
    worker: EngineWorker
    metrics: Metrics
    created: int  # seconds since 1970
    needs_key: bool

    @property
    def model_name(self) -> str:
        return served_name(self.config)

    def check_model_name(self, name: str | None) -> None:
        """Raise RequestError (model_not_found) for any name but the served one; no name means that one."""
        if name is not None and name != self.model_name:
            raise RequestError(
                f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}", code="model_not_found"
            )


def served_name(config: ServerConfig) -> str:
    """What clients call the model."""
    return config.served_model_name or Path(config.model).name


def server_state(request: Request) -> ServerState:
    """The server that a request came to."""
    return state_of(request.app)


def state_of(app: Any) -> ServerState:
    """The server of an application that app.py made."""
    return cast(ServerState, app.state.server)
