"""How full an engine is: the figures that /ready, /metrics, the log and the benchmarks read."""

from __future__ import annotations

from dataclasses import dataclass

from cupyllm.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """Counts at one moment, and since the start."""

    num_running: int
    num_waiting: int
    num_live_pages: int
    num_cached_pages: int
    num_free_pages: int
    num_preemptions: int
    num_prefix_queries: int  # prompt tokens that were looked up in the prefix cache
    num_prefix_hits: int  # and found there
    num_graph_replays: int  # decode steps that were replayed with one call

    @classmethod
    def of(cls, scheduler: Scheduler, *, num_waiting: int, num_graph_replays: int) -> EngineStats:
        """What the scheduler has counted, and what it does not know of."""
        allocator = scheduler.allocator
        return cls(
            scheduler.num_running,
            num_waiting,
            allocator.num_live,
            allocator.num_cached,
            allocator.num_free,
            scheduler.num_preemptions,
            scheduler.num_prefix_queries,
            scheduler.num_prefix_hits,
            num_graph_replays,
        )
