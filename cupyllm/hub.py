"""From what a user calls a model to the folder that holds it: the bundled demo, a local folder or the Hugging Face hub.

Only this module talks to the hub, and only when a name asks for it; what is in the folder is model_config.py's and
checkpoint.py's subject.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cupyllm.errors import ConfigError

DEMO_MODEL = "demo"

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt"]  # no pickles, no code


def resolve_model(model: str) -> Path:
    """The folder of `model`: "demo", an existing folder, or a hub name such as "Qwen/Qwen2.5-0.5B-Instruct".

    A hub name is taken from the local hub cache and downloaded where it is not there or not complete. A folder "demo"
    in the working directory is reached as "./demo". Raises ConfigError saying what was looked for and what to do.
    """
    if model == DEMO_MODEL:
        return _demo_folder()
    folder = Path(os.path.expanduser(model))  # unlike Path.expanduser it does not raise for a user unknown
    if model and folder.is_dir():
        return folder
    if not _HUB_NAME.fullmatch(model):
        raise ConfigError(
            f"model {model!r} is not a folder, not {DEMO_MODEL!r} and not a hub name like 'Qwen/Qwen2.5-0.5B-Instruct'"
        )
    return _hub_folder(model)


def _demo_folder() -> Path:
    folder = Path(__file__).parent / "demo"
    if not folder.is_dir():
        raise ConfigError(f"model {DEMO_MODEL!r}: the bundled model is missing at {folder}; install cupyllm again")
    return folder


def _hub_folder(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"model {model!r} is not a folder; to fetch it from the hub: pip install 'cupyllm[hub]'"
        ) from None
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:  # across its versions the library raises those of two HTTP libraries besides its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model {model!r} is not a folder, and the hub does not give it: {reason} "
            "(check the name and the network, or download the model and give its folder)"
        ) from error
