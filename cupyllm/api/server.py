"""The server as a command: `python server.py` and `python -m cupyllm serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cupyllm.api.app import make_app
from cupyllm.api.command_line import help_text, read_arguments
from cupyllm.api.logs import configure_logging
from cupyllm.api.serve import bind_socket, serve
from cupyllm.errors import CupyllmError
from cupyllm.startup import LoadedModel, load_engine


def main(arguments: Sequence[str]) -> int:
    """Run the server until it is told to stop; returns the exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(help_text(), end="")
        return 0
    try:
        config = read_arguments(arguments)
        configure_logging(config.log_level, config.log_format)
        with bind_socket(config.host, config.port) as listener:
            loaded = load_engine(config, show_progress=sys.stderr.isatty())
            app = make_app(loaded, config)
            url = f"http://{config.host}:{listener.getsockname()[1]}"
            banner = banner_text(loaded, url, app.state.server.model_name)
            serve(app, listener, config, on_listening=lambda: print(banner, flush=True))
    except CupyllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while the model was loading
        return 130
    return 0


def banner_text(loaded: LoadedModel, url: str, model_name: str) -> str:
    """What was loaded, where it listens, and a first request to try."""
    body = f'{{"model": "{model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return "\n".join(
        [
            *(f"{what:8} {value}" for what, value in loaded.facts),
            f"{'url':8} {url}",
            f"try      curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        ]
    )
