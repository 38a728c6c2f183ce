"""Two kernels that are not the model's: one keeps a stream busy, one reads an array as fast as memory gives it."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.loader import Geometry, KernelLoader, with_header
from cupyllm.device import Array
from cupyllm.errors import DeviceError

READ_THREADS = 256
READ_BLOCKS = 16  # for each multiprocessor

_SOURCES = {
    # globaltimer counts nanoseconds, whatever the clock of the multiprocessors does.
    "wait_nanoseconds": """\
__device__ __forceinline__ unsigned long long nanoseconds_now() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void wait_nanoseconds(unsigned long long nanoseconds) {
    unsigned long long start = nanoseconds_now();
    while (nanoseconds_now() - start < nanoseconds) {
    }
}
""",
    # `found` is written so that the compiler keeps the loads; four of them are under way in every thread.
    "read_all": """\
__device__ __forceinline__ unsigned int mix(uint4 chunk) { return chunk.x ^ chunk.y ^ chunk.z ^ chunk.w; }

extern "C" __global__ void __launch_bounds__(256) read_all(
    const uint4* __restrict__ data,    // (chunks,) of 16 bytes
    unsigned int* __restrict__ found,  // (threads,)
    long long chunks) {
    long long threads = (long long)gridDim.x * blockDim.x;
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int mixed = 0;
    long long i = first;
    for (; i + 3 * threads < chunks; i += 4 * threads) {
        uint4 a = __ldg(data + i), b = __ldg(data + i + threads);
        uint4 c = __ldg(data + i + 2 * threads), d = __ldg(data + i + 3 * threads);
        mixed ^= mix(a) ^ mix(b) ^ mix(c) ^ mix(d);
    }
    for (; i < chunks; i += threads) mixed ^= mix(__ldg(data + i));
    found[first] = mixed;
}
""",
}


def probe_source(name: str) -> str:
    """The whole text of a probe, for KernelLoader."""
    return with_header(f"gpu_check/{name}.cu", _SOURCES[name])


def read_all(loader: KernelLoader, data: Array) -> Array:
    """Read an array once; returns what each thread found, (threads,) uint32: the xor of its 32-bit words.

    `loader` has `probe_source` as its source. Raises DeviceError for an array that is no whole number of 16 bytes.
    """
    if data.nbytes % 16:
        raise DeviceError(f"read_all: the array has {data.nbytes} bytes; supported are multiples of 16")
    blocks = READ_BLOCKS * loader.facts.num_multiprocessors
    found = loader.empty((blocks * READ_THREADS,), np.uint32)
    loader.launch("read_all", Geometry((blocks,), (READ_THREADS,)), (data, found, np.int64(data.nbytes // 16)))
    return found
