"""What the routes share: the loaded model, the engine thread, and the name clients call the model by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from starlette.requests import Request

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
    created: int  # seconds since 1970
    needs_key: bool

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or Path(self.config.model).name

    def check_model_name(self, name: str | None) -> None:
        """Raise RequestError (model_not_found) for any name but the served one; no name means that one."""
        if name is not None and name != self.model_name:
            raise RequestError(f"the model {name[:200]!r} does not exist", code="model_not_found")


def server_state(request: Request) -> ServerState:
    """The server that a request came to."""
    return cast(ServerState, request.app.state.server)
