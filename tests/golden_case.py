"""The real checkpoint and its recorded answers, for the tests marked `checkpoint`.

CUPYLLM_TEST_CHECKPOINT is a folder with Qwen2.5-Coder-0.5B-Instruct, CUPYLLM_TEST_GOLDEN a file with the answers that
transformers gives for it in float32. Without both the tests are skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

CHECKPOINT = os.environ.get("CUPYLLM_TEST_CHECKPOINT", "")
_GOLDEN = os.environ.get("CUPYLLM_TEST_GOLDEN")
CASES: list[dict[str, Any]] = json.loads(Path(_GOLDEN).read_text(encoding="utf-8"))["cases"] if _GOLDEN else []
NEEDS_CHECKPOINT = [
    pytest.mark.checkpoint,
    pytest.mark.skipif(
        not (CHECKPOINT and CASES),
        reason="set CUPYLLM_TEST_CHECKPOINT to a folder with Qwen2.5-Coder-0.5B-Instruct and CUPYLLM_TEST_GOLDEN to "
        "its recorded answers",
    ),
]
