"""A simulator of serving: the engine's own scheduler and page allocator, a model that computes nothing, and a clock
that a cost model moves on.

    cost_model.py    how long a step takes, from bytes, operations and a GPU's rates
    known_models.py  the sizes of the Qwen models that can be named
    workload.py      which requests come, and when
    simulation.py    the loop: receive, plan, move the clock, commit
    page_map.py      what every page of the cache holds during a step
    report.py        what came out, as figures and as a table
    trace.py         step by step, for Perfetto and for programs

It is for learners, who can see what a limit does without a GPU, and for planners. docs/simulator.md has examples.
"""
