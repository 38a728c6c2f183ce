"""What a machine would allow for the requests that were measured: the roofline of a load.

The simulator serves the same requests on a machine that takes for each step what the bytes and the operations take at
the given rates, and nothing besides, with room for every request. What it reaches in output tokens/s is the roofline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cupyllm.config import EngineConfig
from cupyllm.load.client import Outcome
from cupyllm.model_config import ModelConfig
from cupyllm.simulator.cost_model import CostModel, Machine
from cupyllm.simulator.run import simulate
from cupyllm.simulator.workload import Request, Workload

STEP_TOKENS = 8192


def roofline_tokens_per_s(
    outcomes: Sequence[Outcome],
    concurrency: int,
    model: ModelConfig,
    *,
    bandwidth: float,
    flops: float = math.inf,
) -> float | None:
    """Output tokens/s that the rates allow for the answered requests, `concurrency` at a time.

    `bandwidth` is bytes/s, `flops` operations/s. Prompts count in full, as if no prefix cache had known them. None
    where the server did not count its tokens.
    """
    answered = [outcome for outcome in outcomes if outcome.error is None]
    requests = [
        Request(0.0, outcome.prompt_tokens, outcome.num_tokens)
        for outcome in answered
        if outcome.prompt_tokens is not None
    ]
    if not requests or len(requests) < len(answered):
        return None
    cost = CostModel(model, Machine("the roofline", bandwidth, flops, overhead_s=0.0))
    tokens = sum(request.prompt_tokens + request.output_tokens + 16 for request in requests)
    config = EngineConfig(
        kv_cache_gib=max(0.01, 1.1 * tokens * cost.kv_bytes_per_token / 2**30),
        max_decode_batch_size=len(requests),
        max_prefill_batch_size=len(requests),
        max_step_tokens=max(STEP_TOKENS, len(requests)),
        max_waiting=len(requests),
        prefix_cache=False,
    )
    summary = simulate(config, cost, Workload(tuple(requests), concurrency)).summary
    return summary.output_tokens_per_s or None
