"""What `python -m cupyllm gpu-check` does on a machine with a GPU, in this order:

    environment.py   what is there, and what is missing
    correctness.py   every kernel against its twin, and whole small models against the reference ops
    sanitizer.py     the same examples under NVIDIA's compute-sanitizer, where it is installed
    limits.py        the memory bandwidth and the rate of matrix products that this GPU reaches
    kernels.py       how close each kernel comes to them, and to cuBLAS
    decode.py        tokens per second of the engine, and how close a step comes to them

`plan.py` says how much of each, `run.py` runs it, `report.py` shows it. `gpu.py` holds all calls of CuPy; every other
module takes a `Gpu` and works as well on the emulator with a made-up clock, which is how the tests run them.
"""
