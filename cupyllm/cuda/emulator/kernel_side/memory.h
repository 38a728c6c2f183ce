// Memory as a kernel sees it: dynamic shared memory, cached loads and stores, fences, atomics.
//
// Plain loads and stores need nothing here: check mode watches them through compiler hooks (runtime/memory_checks.h).
// Cache hints are accepted and have no effect. Atomics are real ones, because blocks run on several OS threads.
#pragma once

EMU_INTERNAL void* emu_dynamic_shared();  // `extern __shared__ T x[];` becomes `T* x = (T*)emu_dynamic_shared();`

#define EMU_LOAD(NAME)              \
    template <class T>              \
    EMU_INLINE T NAME(const T* p) { \
        return *p;                  \
    }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
#undef EMU_LOAD

#define EMU_STORE(NAME)                   \
    template <class T>                    \
    EMU_INLINE void NAME(T* p, T value) { \
        *p = value;                       \
    }
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)
#undef EMU_STORE

EMU_INTERNAL void emu_fence();
EMU_INLINE void __threadfence() { emu_fence(); }
EMU_INLINE void __threadfence_system() { emu_fence(); }
EMU_INLINE void __threadfence_block() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

EMU_INTERNAL __attribute__((noreturn)) void emu_trap();
EMU_INLINE void __trap() { emu_trap(); }

EMU_INTERNAL void emu_before_atomic(void* p, int size);  // checks the address; does nothing in fast mode

// Not watched by the hooks, which know no atomics: emu_before_atomic has already told the runtime.
template <class T, class Update>
__attribute__((noinline, no_sanitize("thread"))) T emu_exchange(T* p, Update update) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    Bits* cell = (Bits*)p;
    Bits old = __atomic_load_n(cell, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(cell, &old, emu_bits<Bits>((T)update(emu_bits<T>(old))), true, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {}
    return emu_bits<T>(old);
}
// The atomic intrinsics: read the old value, store what `update` makes of it, return the old value.
template <class T, class Update>
EMU_INLINE T emu_atomic(T* p, Update update) {
    emu_before_atomic(p, sizeof(T));
    return emu_exchange(p, update);
}

#define EMU_ATOMIC(NAME, T, EXPRESSION)                               \
    EMU_INLINE T NAME(T* p, T value) {                                \
        return emu_atomic(p, [=](T old) -> T { return EXPRESSION; }); \
    }
#define EMU_ATOMIC_INTEGER(T)                                                            \
    EMU_ATOMIC(atomicMin, T, old < value ? old : value)                                  \
    EMU_ATOMIC(atomicMax, T, old > value ? old : value)                                  \
    EMU_ATOMIC(atomicAnd, T, old & value)                                                 \
    EMU_ATOMIC(atomicOr, T, old | value)                                                 \
    EMU_ATOMIC(atomicXor, T, old ^ value)                                                \
    EMU_ATOMIC(atomicExch, T, value)                                                     \
    EMU_INLINE T atomicCAS(T* p, T expected, T value) {                                  \
        return emu_atomic(p, [=](T old) -> T { return old == expected ? value : old; }); \
    }
EMU_ATOMIC_INTEGER(int)
EMU_ATOMIC_INTEGER(unsigned)
EMU_ATOMIC_INTEGER(unsigned long long)
EMU_ATOMIC(atomicMin, long long, old < value ? old : value)
EMU_ATOMIC(atomicMax, long long, old > value ? old : value)
EMU_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)value))
EMU_ATOMIC(atomicAdd, unsigned, old + value)
EMU_ATOMIC(atomicAdd, unsigned long long, old + value)
EMU_ATOMIC(atomicAdd, float, old + value)
EMU_ATOMIC(atomicAdd, double, old + value)
EMU_ATOMIC(atomicSub, int, (int)((unsigned)old - (unsigned)value))
EMU_ATOMIC(atomicSub, unsigned, old - value)
EMU_ATOMIC(atomicExch, float, value)
EMU_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMU_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
#undef EMU_ATOMIC_INTEGER
#undef EMU_ATOMIC
