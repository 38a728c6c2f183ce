// Purpose
//   Look rows up in a table: the embeddings of the step's tokens at the start of a forward pass and, with
//   TABLE_FLOAT32, the rows of the residual stream whose logits are wanted at its end.
// Computes
//   x[t, :] = table[row_ids[t], :] as float32; a row id outside the table gives a row of NaN
//   Twin: ReferenceOps.embedding
// Arrays
//   row_ids   (T,)     int32                read
//   table     (V, C)   fp16, bf16 or fp32   read      V rows
//   x         (T, C)   float32              written
// Constants
//   ELEMENT_BF16    0 or 1: the table's type, when it is not float32
//   TABLE_FLOAT32   0 or 1
// Launch
//   grid (T, ceil(C / 1024)), block 128, no shared memory
//   block owns up to 1024 columns of one row; warp owns 256 of them; lane owns eight neighbours.
//       lane        0         1         2
//       columns   0 .. 7    8 .. 15   16 .. 23      16 bytes a lane in, 32 bytes out
// Bytes
//   row_ids 4 * T, table 2 * T * C (4 * T * C with TABLE_FLOAT32), x 4 * T * C
//   Example: least_bytes(T=64, C=3584) totals 1,376,512 bytes: 0.29 us at the 4.8 TB/s of an H200
// Numerics
//   exact: every fp16 and bf16 value is a float32
// Preconditions
//   arrays contiguous, C a multiple of 8. Row ids may be anything: a sequence whose sampling failed carries -1, and
//   its NaN row makes the next sampling fail too instead of reading outside the table.
// Why this way
//   The table is never read as a whole: T of its V rows cost T * C elements.
// Source
//   the op itself; no paper

static_assert(TABLE_FLOAT32 == 0 || TABLE_FLOAT32 == 1, "TABLE_FLOAT32 is 0 or 1");

#if TABLE_FLOAT32
typedef float table_t;
#else
typedef element_t table_t;
#endif

__device__ __forceinline__ EightFloats load_8_floats(const float* p) {
    const float4* p4 = reinterpret_cast<const float4*>(p);
    return {__ldg(p4), __ldg(p4 + 1)};
}

__device__ __forceinline__ EightFloats load_8_floats(const element_t* p) {
    return unpack_8(load_8_elements(p));
}

extern "C" __global__ void __launch_bounds__(128) embedding(
    const int* __restrict__ row_ids,    // (T,)
    const table_t* __restrict__ table,  // (V, C)
    float* __restrict__ x,              // (T, C)
    int V, int C) {
    // 1 locate
    long long t = blockIdx.x;
    int c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (c >= C) return;

    // 2 load
    long long row = row_ids[t];
    float nan = __int_as_float(0x7fc00000);
    EightFloats values = {make_float4(nan, nan, nan, nan), make_float4(nan, nan, nan, nan)};
    if (row >= 0 && row < V) values = load_8_floats(table + row * C + c);  // table[row, c : c + 8]

    // 3 store
    float4* x4 = reinterpret_cast<float4*>(x + t * C + c);  // x[t, c : c + 8]
    x4[0] = values.first;
    x4[1] = values.second;
}
