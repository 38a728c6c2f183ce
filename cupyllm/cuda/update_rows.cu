// Purpose
//   Put what changed among the decode rows into the one array that holds them: the page that a row enters, or all of a
//   row that joined.
// Computes
//   words[places[i]] = values[i]
//   Twin: ReferenceOps.update_rows
// Arrays
//   places   (N,)   int32   read      each at most once
//   values   (N,)   int32   read      numbers, or the bits of float32 or of half a uint64
//   words    (W,)   int32   written   the others stay as they are
// Constants
//   none
// Launch
//   grid (ceil(N / 256)), block 256, no shared memory
//   block owns 256 changes; warp owns 32; lane owns one
// Bytes
//   4 bytes a change for each array
//   Example: least_bytes(N=64) totals 768 bytes: 0.00016 us at the 4.8 TB/s of an H200
// Numerics
//   bits
// Preconditions
//   places below W
// Why this way
//   One upload and one launch, whatever has changed: a copy for every array would cost some microseconds each. Eight
//   bytes a change are few beside what a row keeps on the device.
// Source
//   the op itself; no paper

extern "C" __global__ void __launch_bounds__(256) update_rows(
    const int* __restrict__ places,  // (N,)
    const int* __restrict__ values,  // (N,)
    int* __restrict__ words,         // (W,)
    int N) {
    // 1 locate
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;

    // 2 load
    int place = places[i];
    int value = values[i];

    // 3 store
    words[place] = value;
}
