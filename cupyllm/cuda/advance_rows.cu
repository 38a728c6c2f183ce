// Purpose
//   Begin a decode step by itself: every row takes the token that was sampled for it in the step before, one position
//   further on, and its embedding. The host sends nothing. Tokens are counted, too, where a row may have a penalty.
// Computes
//   for every row r in use: n = context_lens[r];  token_ids[r] = sampled[r];  positions[r] = n;
//   slots[r] = page_tables[r, n / page_size] * page_size + n % page_size;  context_lens[r] = n + 1;
//   counts[r, sampled[r]] += 2
//   A row whose context_lens is 0 is not in use and stays as it is.
//   for every row x[r, :] = table[token_ids[r], :] as float32; a token outside the table gives a row of NaN
//   Twin: ReferenceOps.advance_rows
// Arrays
//   sampled        (R,)             int32          read
//   page_tables    (R, max_pages)   int32          read
//   table          (V, C)           fp16 or bf16   read      V rows
//   token_ids      (R,)             int32          written   and read for rows that are not in use
//   positions      (R,)             int32          written
//   slots          (R,)             int32          written
//   context_lens   (R,)             int32          written   and read first: tokens in the cache before the step
//   counts         (R, W)           uint32         written   and read first, at the token; null where none are kept
//   x              (R, C)           float32        written
// Constants
//   ELEMENT_BF16   0 or 1: the table's type
// Launch
//   grid (R), block 256, no shared memory
//   block owns a row; its first thread moves the row on; lane owns every 256th run of eight neighbouring columns.
//       thread      0         1         2
//       columns   0 .. 7    8 .. 15   16 .. 23      16 bytes a lane in, 32 bytes out
// Bytes
//   4 bytes a row for each array of rows, 8 for context_lens and for counts; table 2 * R * C, x 4 * R * C
//   Example: least_bytes(R=64, C=3584) totals 1,378,048 bytes: 0.29 us at the 4.8 TB/s of an H200
// Numerics
//   integers; every fp16 and bf16 value is a float32
// Preconditions
//   arrays contiguous, C a multiple of 8; the page of position n stands in the page table, for every row in use
// Why this way
//   What a step changes follows from what the device knows, so a captured step needs no copy from the host. The page is
//   looked up instead of counted on from the slot before: a page that a row enters need only be put into its table. The
//   embedding comes along because it waits for nothing but the token, and a launch of its own would cost more than it.
//   One block a row, because whoever reads the context length must have done so before it is changed.
// Source
//   the op itself; no paper

extern "C" __global__ void __launch_bounds__(256) advance_rows(
    const int* __restrict__ sampled,      // (R,)
    const int* __restrict__ page_tables,  // (R, max_pages)
    const element_t* __restrict__ table,  // (V, C)
    int* __restrict__ token_ids,          // (R,)
    int* __restrict__ positions,          // (R,)
    int* __restrict__ slots,              // (R,)
    int* __restrict__ context_lens,       // (R,)
    u32* __restrict__ counts,             // (R, W)
    float* __restrict__ x,                // (R, C)
    int max_pages, int page_size, int W, int V, int C) {
    // 1 locate
    long long r = blockIdx.x;
    int position = context_lens[r];
    long long token = position == 0 ? token_ids[r] : sampled[r];
    __syncthreads();

    // 2 move the row on
    if (threadIdx.x == 0 && position > 0) {
        int page = page_tables[r * max_pages + position / page_size];
        token_ids[r] = int(token);
        positions[r] = position;
        slots[r] = page * page_size + position % page_size;
        context_lens[r] = position + 1;
        if (counts && token >= 0 && token < W) counts[r * W + token] += 2;
    }

    // 3 look the embedding up
    bool exists = token >= 0 && token < V;
    float nan = __int_as_float(0x7fc00000);
    for (int c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        EightFloats values = {make_float4(nan, nan, nan, nan), make_float4(nan, nan, nan, nan)};
        if (exists) values = unpack_8(load_8_elements(table + token * C + c));  // table[token, c : c + 8]
        float4* x4 = reinterpret_cast<float4*>(x + r * C + c);                  // x[r, c : c + 8]
        x4[0] = values.first;
        x4[1] = values.second;
    }
}
