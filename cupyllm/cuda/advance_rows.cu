// Purpose
//   Begin a decode step by itself: every row takes the token that was sampled for it in the step before, one position
//   further on. The host sends nothing.
// Computes
//   for every row r in use: n = context_lens[r];  token_ids[r] = sampled[r];  positions[r] = n;
//   slots[r] = page_tables[r, n / page_size] * page_size + n % page_size;  context_lens[r] = n + 1
//   A row whose context_lens is 0 is not in use and stays as it is.
//   Twin: ReferenceOps.advance_rows
// Arrays
//   sampled        (R,)             int32   read
//   page_tables    (R, max_pages)   int32   read
//   token_ids      (R,)             int32   written
//   positions      (R,)             int32   written
//   slots          (R,)             int32   written
//   context_lens   (R,)             int32   written   and read first: tokens in the cache before the step, then with it
// Constants
//   none
// Launch
//   grid (ceil(R / 256)), block 256, no shared memory
//   block owns 256 rows; warp owns 32; lane owns one
// Bytes
//   4 bytes a row for each array, 8 for context_lens
//   Example: least_bytes(R=64) totals 1,792 bytes: 0.00037 us at the 4.8 TB/s of an H200
// Numerics
//   integers
// Preconditions
//   the page of position n stands in the page table, for every row in use
// Why this way
//   What a step changes follows from what the device knows, so a captured step needs no copy from the host. The page is
//   looked up instead of counted on from the slot before: a page that a row enters need only be put into its table.
// Source
//   the op itself; no paper

extern "C" __global__ void __launch_bounds__(256) advance_rows(
    const int* __restrict__ sampled,      // (R,)
    const int* __restrict__ page_tables,  // (R, max_pages)
    int* __restrict__ token_ids,          // (R,)
    int* __restrict__ positions,          // (R,)
    int* __restrict__ slots,              // (R,)
    int* __restrict__ context_lens,       // (R,)
    int R, int max_pages, int page_size) {
    // 1 locate
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= R) return;

    // 2 load
    int position = context_lens[r];
    if (position == 0) return;
    int page = page_tables[(long long)r * max_pages + position / page_size];

    // 3 store
    token_ids[r] = sampled[r];
    positions[r] = position;
    slots[r] = page * page_size + position % page_size;
    context_lens[r] = position + 1;
}
