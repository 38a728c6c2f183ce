// The calls that stand in for tensor-core and asynchronous-copy PTX. A kernel's helper with inline PTX has a branch
// `#ifdef CUDA_ON_CPU` that calls one of these; the arrays are the instruction's registers, in the instruction's order.
// Which element each register holds, and what the calls do, is written in runtime/matrices.h and runtime/async_copy.h.
//
// Not emulated: wgmma, TMA, mbarrier, other mma shapes and types.
#pragma once

EMU_INTERNAL void emu_mma(int k, int bf16, float* d, const uint32_t* a, const uint32_t* b, const float* c,
                          emu_site site);
EMU_INTERNAL void emu_ldmatrix(int matrices, int transposed, uint32_t* r, const void* row, emu_site site);
EMU_INTERNAL void emu_cp_async(void* shared, const void* global, int size, int source_size);
EMU_INTERNAL void emu_cp_async_commit();
EMU_INTERNAL void emu_cp_async_wait(int groups_left);

// mma.sync.aligned.m16n8k16.row.col.f32.{f16,bf16}.{f16,bf16}.f32 (sm_80 and later)
EMU_INLINE void emulated_mma_m16n8k16_f16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4],
                                          EMU_HERE) {
    emu_mma(16, 0, d, a, b, c, site);
}
EMU_INLINE void emulated_mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4],
                                           EMU_HERE) {
    emu_mma(16, 1, d, a, b, c, site);
}
// mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 (sm_75 and later)
EMU_INLINE void emulated_mma_m16n8k8_f16(float d[4], const uint32_t a[2], const uint32_t b[1], const float c[4],
                                         EMU_HERE) {
    emu_mma(8, 0, d, a, b, c, site);
}

// ldmatrix.sync.aligned.m8n8.{x2,x4}[.trans].shared.b16 (sm_75 and later)
EMU_INLINE void emulated_ldmatrix_x4(uint32_t r[4], const void* row, EMU_HERE) { emu_ldmatrix(4, 0, r, row, site); }
EMU_INLINE void emulated_ldmatrix_x2(uint32_t r[2], const void* row, EMU_HERE) { emu_ldmatrix(2, 0, r, row, site); }
EMU_INLINE void emulated_ldmatrix_x4_trans(uint32_t r[4], const void* row, EMU_HERE) {
    emu_ldmatrix(4, 1, r, row, site);
}
EMU_INLINE void emulated_ldmatrix_x2_trans(uint32_t r[2], const void* row, EMU_HERE) {
    emu_ldmatrix(2, 1, r, row, site);
}

// cp.async.cg.shared.global [shared], [global], 16 (, source bytes: the rest is filled with zeros) (sm_80 and later)
EMU_INLINE void emulated_cp_async_16(void* shared, const void* global) { emu_cp_async(shared, global, 16, 16); }
EMU_INLINE void emulated_cp_async_16_zfill(void* shared, const void* global, int src_bytes) {
    emu_cp_async(shared, global, 16, src_bytes);
}
// cp.async.commit_group, cp.async.wait_group N
EMU_INLINE void emulated_cp_async_commit() { emu_cp_async_commit(); }
EMU_INLINE void emulated_cp_async_wait(int groups_left) { emu_cp_async_wait(groups_left); }
