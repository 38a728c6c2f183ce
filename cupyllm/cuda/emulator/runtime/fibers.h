// CUDA threads as fibers: each has its own stack, and a hand-written context swap moves from one to the next.
//
// A thread runs until it waits in a barrier or a warp collective; then the next ready thread runs. The ready list is a
// stack, so one warp runs on to its next block barrier with its data in the cache. There is no time slice: a thread
// that spins on a value another thread will write never lets it run, and the launch hangs.
//
// The aarch64 swap, and the rest of the runtime on that machine, has been run under qemu-user only, without Python.
#pragma once

// Saves the callee-saved registers on the current stack, stores the stack pointer in *save, and continues on the stack
// `load`. ucontext would cost two system calls per swap, this costs a few nanoseconds.
#if defined(__x86_64__)
asm(R"(
.text
.type emu_swap, @function
emu_swap:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.type emu_swap, %function
emu_swap:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "the emulator has a context swap for x86-64 and aarch64 only"
#endif

static Thread* ready[MAX_THREADS];
static uint32_t ready_count;

static inline void make_ready(Thread* t) {
    t->state = READY;
    ready[ready_count++] = t;
}

// "threads 0..31 wait at __syncthreads (gemv.cu:12)", one group per run of equal neighbours.
static int describe_thread(const Thread& t, char* text, size_t size) {
    static const char* const names[] = {
        // in the order of emu_warp_op
        "__shfl_sync", "__shfl_xor_sync", "__shfl_down_sync", "__shfl_up_sync",
        "__syncwarp", "__ballot_sync", "__any_sync", "__all_sync", "__match_any_sync", "__match_all_sync",
        "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync", "__reduce_max_sync",
        "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync", "mma", "ldmatrix",
    };
    if (t.state == EXITED) return snprintf(text, size, "have left the kernel");
    if (t.state == AT_BARRIER)
        return snprintf(text, size, "wait at __syncthreads (%s:%u)", file_name(t.site), t.site.line());
    return snprintf(text, size, "wait at %s (%s:%u) with mask 0x%08x", names[t.op], file_name(t.site), t.site.line(),
                    t.mask);
}

[[noreturn]] static void fail_deadlock() {
    char all[1200] = "", previous[200] = "", now[200];
    size_t used = 0;
    uint32_t start = 0;
    for (uint32_t i = 0; i <= thread_count; i++) {
        now[0] = 0;
        if (i < thread_count) describe_thread(threads[i], now, sizeof now);
        if (i && strcmp(now, previous)) {
            if (used < sizeof all - 300)
                used += snprintf(all + used, sizeof all - used, "%sthreads %u..%u %s", used ? "; " : "", start, i - 1,
                                 previous);
            start = i;
        }
        memcpy(previous, now, sizeof now);
    }
    fail("deadlock", -1, "no thread can go on: %s", all);
}

// Lets another thread run; returns when somebody has made the current one ready again.
static inline void run_next() {
    if (!ready_count) fail_deadlock();
    Thread* self = &current();
    Thread* next = ready[--ready_count];
    emu_current = next;
    if (next != self) emu_swap(&self->stack_pointer, next->stack_pointer);
}

static void thread_main();  // launch.h

// A new thread's stack looks as if emu_swap had been called by thread_main's caller.
static void prepare_stack(Thread& t) {
    const Worker& w = *launch->worker;
    // Stack tops at different offsets, or all threads' variables would fight for the same few cache lines.
    char* top = w.stacks + (uint64_t)(t.number + 1) * w.stack_stride - 64 - (t.number & 63) * 448;
    void** frame = (void**)top;
#if defined(__x86_64__)
    *--frame = nullptr;  // thread_main's return address, which also makes its stack alignment right
    *--frame = (void*)thread_main;
    for (int i = 0; i < 6; i++) *--frame = nullptr;
#else
    frame -= 20;
    memset(frame, 0, 160);
    frame[11] = (void*)thread_main;  // x30
#endif
    t.stack_pointer = frame;
}
