// Purpose
//   The MLP's gate: SiLU of the first half of a row times the second half. The model's own layers get it fused into
//   the gate/up product (gemv, skinny_gemm, tile_gemm); this is the op alone, and the simplest kernel to read first.
// Computes
//   hidden[t, i] = silu(gate_up[t, i]) * gate_up[t, I + i], with silu(z) = z / (1 + exp(-z))
//   Twin: ReferenceOps.silu_mul
// Arrays
//   gate_up   (T, 2 * I)   float32   read      gate columns, then up columns
//   hidden    (T, I)       float32   written
// Constants
//   none
// Launch
//   grid (T, ceil(I / 256)), block 256, no shared memory
//   block owns 256 columns of one row; warp owns 32 of them; lane owns one.
//       lane       0       1       2       3
//       gate    [t, 0]  [t, 1]  [t, 2]  [t, 3]      neighbours read neighbours: one warp, 128 bytes in a row
//       up      [t, I]  [t,I+1] [t,I+2] [t,I+3]
// Bytes
//   gate_up 8 * T * I, hidden 4 * T * I
//   Example: least_bytes(T=64, I=18944) totals 14,548,992 bytes: 3.0 us at the 4.8 TB/s of an H200
// Numerics
//   float32 throughout; __expf is within a few units in the last place. exp(-z) of a very negative gate is infinite
//   and the quotient the right zero.
// Preconditions
//   arrays contiguous, T and I at least 1
// Why this way
//   One thread, one pair: nothing is shared and nothing repeats, so there is nothing to stage.
// Source
//   Shazeer, "GLU variants improve Transformer", 2020

extern "C" __global__ void __launch_bounds__(256) silu_mul(
    const float* __restrict__ gate_up,  // (T, 2 * I)
    float* __restrict__ hidden,         // (T, I)
    int I) {
    // 1 locate
    long long t = blockIdx.x;
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= I) return;

    // 2 load
    float gate = gate_up[t * 2 * I + i];    // gate_up[t, i]
    float up = gate_up[t * 2 * I + I + i];  // gate_up[t, I + i]

    // 3 store
    hidden[t * I + i] = silu(gate) * up;  // hidden[t, i]
}
