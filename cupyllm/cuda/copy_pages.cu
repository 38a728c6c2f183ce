// Purpose
//   Copy whole pages within one layer's KV cache: before a sequence that was forked writes to a page that it shares,
//   it gets a copy of its own.
// Computes
//   keys[copies[i]] = keys[sources[i]], values[copies[i]] = values[sources[i]] for every i
//   Twin: ReferenceOps.copy_pages
// Arrays
//   sources   (N,)                      int32          read
//   copies    (N,)                      int32          read
//   keys      (P, page_size, KH, D)     fp16 or bf16   read and written
//   values    (P, page_size, KH, D)     fp16 or bf16   read and written
// Constants
//   none
// Launch
//   grid (N, 2), block 128, no shared memory
//   block owns one page of keys (blockIdx.y 0) or of values (1); warp owns every fourth run of 512 bytes of it; lane
//   owns 16 bytes of each run.
// Bytes
//   sources 4 * N, copies 4 * N, and for keys and for values each a page of 2 * page_size * KH * D bytes in and out
//   Example: least_bytes(N=8, page_size=16, KH=4, D=128) totals 524,352 bytes: 0.109 us at the 4.8 TB/s of an H200
// Numerics
//   exact: bits are copied
// Preconditions
//   arrays contiguous, D a multiple of 8; page numbers lie in the cache, and no page is both a source and a copy
// Why this way
//   A copy costs one page, once for each fork that goes on; its speed decides nothing. The page's type does not
//   matter, so one kernel serves both.
// Source
//   Kwon et al., "Efficient memory management for large language model serving with PagedAttention", 2023, section 4.4

extern "C" __global__ void __launch_bounds__(128) copy_pages(
    const int* __restrict__ sources,  // (N,)
    const int* __restrict__ copies,   // (N,)
    uint4* keys,                      // (P, page_size, KH, D)
    uint4* values,                    // (P, page_size, KH, D)
    int page_chunks) {
    // 1 locate
    uint4* cache = blockIdx.y == 0 ? keys : values;
    const uint4* source = cache + (long long)sources[blockIdx.x] * page_chunks;  // cache[source page, :, :, :]
    uint4* copy = cache + (long long)copies[blockIdx.x] * page_chunks;           // cache[copied page, :, :, :]

    for (int chunk = threadIdx.x; chunk < page_chunks; chunk += blockDim.x) {
        // 2 load
        uint4 elements = source[chunk];

        // 3 store
        copy[chunk] = elements;
    }
}
