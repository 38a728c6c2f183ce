// Looking at every load and store of a kernel (check mode).
//
// g++ -fsanitize=thread turns each load and store into a call of __tsan_readN or __tsan_writeN, and
// -fsanitize=undefined turns doubtful operations into calls of __ubsan_handle_.... Those functions normally come from
// libtsan and libubsan; here they are our own, and neither library is linked. So the kernel text needs no change, and
// the runtime sees exactly what the kernel touches: it finds the argument or the shared variable, checks bounds and
// alignment, looks for races and counts.
//
// Not seen: an out-of-bounds offset that lands inside another argument's array, or in another field of a shared array
// reached through a plain pointer. Arrays that stand apart (guarded_empty) make the first unlikely.
#pragma once

static Argument* last_argument;  // most accesses hit the same one as the access before

static inline bool contains(const Argument& a, uint64_t address, uint32_t size) {
    return address >= a.begin && address + size <= a.end;
}

// The argument whose array holds the bytes; for a write, one that may be written if there is such a one (the same array
// can be passed twice).
static Argument* find_argument(uint64_t address, uint32_t size, AccessKind kind) {
    if (last_argument && contains(*last_argument, address, size) && (kind == READ || !last_argument->read_only))
        return last_argument;
    Argument* found = nullptr;
    for (int64_t i = 0; i < launch->argument_count; i++) {
        Argument& a = launch->arguments[i];
        if (!contains(a, address, size)) continue;
        if (!found) found = &a;
        if (kind == READ || !a.read_only) return last_argument = &a;
    }
    return found;
}

[[noreturn]] static void fail_out_of_bounds(uint64_t address, uint32_t size, AccessKind kind) {
    int64_t offset = 0;
    const Argument* a = nearest_argument(address, &offset);
    if (!a)
        fail("out of bounds", -1, "%s of %u bytes at address 0x%llx, which belongs to no argument", kind_names[kind],
             size, (unsigned long long)address);
    fail("out of bounds", a->index, "%s of %u bytes at byte %lld of an array of %llu bytes", kind_names[kind], size,
         (long long)offset, (unsigned long long)(a->end - a->begin));
}

[[noreturn]] static void fail_misaligned(uint64_t address, uint32_t size, const char* what) {
    int64_t offset = 0;
    const Argument* a = nearest_argument(address, &offset);
    if (a && contains(*a, address, 1))
        fail("misaligned", a->index, "%s of %u bytes at byte %lld of the array", what, size, (long long)offset);
    fail("misaligned", -1, "%s of %u bytes at address 0x%llx", what, size, (unsigned long long)address);
}

static void check_shared(uint64_t cell, uint32_t size, AccessKind kind, Actor actor) {
    for (uint32_t i = 0; i < size; i++) check_shared_byte(cell + i, kind, actor);
}

// The cell of a shared address, or -1 if the address is not in shared memory. Fails past the end of what the launch
// has.
static int64_t shared_cell(uint64_t address, uint32_t size, AccessKind kind) {
    const Worker& w = *launch->worker;
    uint64_t offset = address - (uint64_t)dynamic_shared;
    if (offset < (uint64_t)w.dynamic_shared + w.dynamic_capacity - (uint64_t)dynamic_shared) {
        if (offset + size > launch->dynamic_size)
            fail("shared memory over-use", -1, "%s of %u bytes at byte %llu of %llu bytes of dynamic shared memory",
                 kind_names[kind], size, (unsigned long long)offset, (unsigned long long)launch->dynamic_size);
        return (int64_t)offset;
    }
    offset = address - (uint64_t)__start_emu_shared;
    if (offset >= static_shared_size() + sizeof redzone) return -1;
    if (offset + size > static_shared_size())
        fail("out of bounds", -1, "%s of %u bytes past the end of the __shared__ variables", kind_names[kind], size);
    return (int64_t)(w.dynamic_capacity + offset);
}

static void check_global(uint64_t address, uint32_t size, AccessKind kind, void* pc, const Thread& t) {
    Argument* a = find_argument(address, size, kind);
    if (!a) fail_out_of_bounds(address, size, kind);
    uint64_t offset = address - a->begin;
    if (kind != READ) {
        if (a->read_only)
            fail("write to const", a->index, "write of %u bytes at byte %llu", size, (unsigned long long)offset);
        a->written.bytes += size;
    }
    if (kind != WRITE) a->read.bytes += size;
    if (a->cells) check_global_races(*a, offset, size, kind);
    log_access(t, pc, a, offset, size, kind);
}

// Local variables, and the library's own variables and constants (threadIdx is one).
static inline bool is_private(uint64_t address) {
    const Worker& w = *launch->worker;
    if (address - (uint64_t)w.stacks < MAX_THREADS * w.stack_stride) return true;
    if (address - (uint64_t)__ehdr_start >= (uint64_t)(_end - __ehdr_start)) return false;
    return address - (uint64_t)__start_emu_shared >= static_shared_size() + sizeof redzone;
}

static inline void check_access(void* p, uint32_t size, AccessKind kind, bool aligned, void* pc) {
    const uint64_t address = (uint64_t)p;
    if (is_private(address) || !running || !size) return;
    called_from(pc);
    if (aligned && address % size) fail_misaligned(address, size, kind_names[kind]);
    const Thread& t = current();
    int64_t cell = shared_cell(address, size, kind);
    if (cell < 0) return check_global(address, size, kind, pc, t);
    check_shared((uint64_t)cell, size, kind, actor_of(t));
    log_access(t, pc, nullptr, address, size, kind);
}

#if EMU_CHECK
#define EMU_HOOK(NAME, SIZE, KIND, ALIGNED) \
    EMU_INTERNAL void NAME(void* p) { check_access(p, SIZE, KIND, ALIGNED, __builtin_return_address(0)); }
#define EMU_HOOKS(N)                                   \
    EMU_HOOK(__tsan_read##N, N, READ, true)            \
    EMU_HOOK(__tsan_write##N, N, WRITE, true)          \
    EMU_HOOK(__tsan_volatile_read##N, N, READ, true)   \
    EMU_HOOK(__tsan_volatile_write##N, N, WRITE, true) \
    EMU_HOOK(__tsan_unaligned_read##N, N, READ, false) \
    EMU_HOOK(__tsan_unaligned_write##N, N, WRITE, false)
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
EMU_INTERNAL void __tsan_read_range(void* p, size_t n) {
    check_access(p, (uint32_t)n, READ, false, __builtin_return_address(0));
}
EMU_INTERNAL void __tsan_write_range(void* p, size_t n) {
    check_access(p, (uint32_t)n, WRITE, false, __builtin_return_address(0));
}
EMU_INTERNAL void __tsan_func_entry(void*) {}
EMU_INTERNAL void __tsan_func_exit() {}
EMU_INTERNAL void __tsan_init() {}

// The handlers' data names the source location, but the return address does too, with the chain of inlined functions.
#define EMU_UBSAN(NAME, ARGUMENTS, KIND, TEXT)          \
    EMU_INTERNAL void __ubsan_handle_##NAME ARGUMENTS { \
        EMU_CALLED_FROM_KERNEL;                         \
        fail(KIND, -1, TEXT);                           \
    }
EMU_UBSAN(out_of_bounds, (void*, void*), "out of bounds", "array index past the array's declared size")
EMU_UBSAN(divrem_overflow, (void*, void*, void*), "integer division by zero",
          "the divisor is zero or the quotient does not fit")
EMU_UBSAN(shift_out_of_bounds, (void*, void*, void*), "arithmetic",
          "shift by a negative count or by the type's width or more")
EMU_UBSAN(add_overflow, (void*, void*, void*), "arithmetic", "signed overflow in +")
EMU_UBSAN(sub_overflow, (void*, void*, void*), "arithmetic", "signed overflow in -")
EMU_UBSAN(mul_overflow, (void*, void*, void*), "arithmetic", "signed overflow in *")
EMU_UBSAN(negate_overflow, (void*, void*), "arithmetic", "signed overflow in negation")
EMU_UBSAN(float_cast_overflow, (void*, void*), "arithmetic", "float does not fit the integer type it is converted to")
EMU_INTERNAL void __ubsan_handle_type_mismatch_v1(void* data, void* p) {
    EMU_CALLED_FROM_KERNEL;
    const uint8_t log_alignment = ((const uint8_t*)data)[24];  // after the location (16 bytes) and the type (8)
    fail_misaligned((uint64_t)p, 1u << log_alignment, "vector access");
}
#endif

// What the other parts of the runtime report about accesses they make for the kernel; nothing is checked in fast mode.

void emu_before_atomic(void* p, int size) {
    if constexpr (!CHECKING) return;
    publication.acquired = true;
    if (publication.fenced && launch->released) launch->released[block_number] = 1;
    check_access(p, (uint32_t)size, ATOMIC, true, __builtin_return_address(0));
}

void emu_fence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    publication.fenced = true;
}

static void check_shared_row(const char* row, uint32_t thread) {
    if ((uint64_t)row % 16)
        fail("misaligned", -1, "ldmatrix row address of lane %u is not a multiple of 16", thread % WARP);
    if constexpr (!CHECKING) return;
    int64_t cell = shared_cell((uint64_t)row, 16, READ);
    if (cell < 0) fail("out of bounds", -1, "ldmatrix row address of lane %u is not in shared memory", thread % WARP);
    Actor warp = actor_of(threads[thread]);
    warp.flags = SEVERAL_LANES;  // the row goes to other lanes than the one that gave its address
    check_shared((uint64_t)cell, 16, READ, warp);
    log_access(threads[thread], kernel_pc, nullptr, (uint64_t)row, 16, READ);
}

static void check_copy_issue(void* shared, const void* global, int size, int source_size) {
    if constexpr (!CHECKING) return;
    if (source_size) check_access((void*)global, (uint32_t)source_size, READ, false, kernel_pc);
    int64_t cell = shared_cell((uint64_t)shared, (uint32_t)size, WRITE);
    if (cell < 0) fail("out of bounds", -1, "cp.async destination is not in shared memory");
    check_shared((uint64_t)cell, (uint32_t)size, WRITE, actor_of(current()));
    for (int i = 0; i < size; i++) launch->worker->cells[cell + i].write.who |= COPY_PENDING;
    log_access(current(), kernel_pc, nullptr, (uint64_t)shared, (uint32_t)size, WRITE);
}

static void check_copy_arrival(void* shared, int size) {
    if constexpr (!CHECKING) return;
    int64_t cell = shared_cell((uint64_t)shared, (uint32_t)size, WRITE);
    Actor self = actor_of(current());
    for (int i = 0; i < size; i++)
        launch->worker->cells[cell + i].write = {epoch, self.clock, self.thread, code_offset()};
}

static void begin_block_checks() { publication = {}; }

static void begin_launch_checks() {
    last_argument = nullptr;
    if constexpr (CHECKING) discard_traffic();
}
