"""lm-evaluation-harness over /v1/completions: a small task of its kind "multiple choice", scored by echoed logprobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.api.live_server import MODEL_NAME, LiveServer
from tests.clients.conftest import installed, run_client

QUESTIONS = [
    {"question": "the weather", "choices": [" is fine", " in Paris", "?"], "label": 0},
    {"question": "What is", "choices": [" the", " weather", " 12"], "label": 1},
    {"question": "Paris", "choices": [" today", " the", "!"], "label": 2},
    {"question": "a", "choices": [" b", " c"], "label": 0},
]
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def score(server: LiveServer, question: str, choice: str) -> float:
    """The log-probability of a choice after a question."""
    count = len(server.loaded.tokenizer.encode(question))
    body = {"prompt": question + choice, "max_tokens": 0, "echo": True, "logprobs": 1}
    logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["token_logprobs"]
    return sum(logprobs[count:])


def test_52_27_lm_evaluation_harness_scores_as_the_server_does(
    server: LiveServer, model_folder: Path, tmp_path: Path
) -> None:
    python = installed("CUPYLLM_TEST_CLIENTS")
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    (tmp_path / "tiny_choice.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    arguments: dict[str, Any] = {"model": MODEL_NAME, "base_url": f"{server.url}/v1/completions", "max_retries": 1}
    arguments |= {"tokenizer_backend": "huggingface", "tokenizer": model_folder}
    printed = run_client(
        *(python, "-m", "lm_eval", "--model", "local-completions", "--tasks", "tiny_choice"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *(
            "--batch_size",
            "2",
            "--include_path",
            str(tmp_path),
            "--output_path",
            str(tmp_path / "out"),
            "--log_samples",
        ),
        HF_HOME=str(tmp_path / "hf"),
        OPENAI_API_KEY="none",
    )
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text(encoding="utf-8").splitlines()), key=lambda row: row["doc_id"])
    assert len(rows) == len(QUESTIONS), printed
    for row, asked in zip(rows, QUESTIONS, strict=True):
        expected = [score(server, asked["question"], choice) for choice in asked["choices"]]
        given = [float(response[0][0]) for response in row["resps"]]
        assert all(abs(a - b) < 1e-3 for a, b in zip(given, expected, strict=True)), (given, expected)
        assert row["acc"] == float(expected.index(max(expected)) == asked["label"])
