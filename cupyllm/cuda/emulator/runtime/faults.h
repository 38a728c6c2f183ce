// How a fault ends a launch: the first one is written to Launch.fault and control returns to the host, leaving the
// block's threads where they are. Signals (a guard page was touched, a division by zero trapped) end the same way, so
// the process stays usable.
//
// A fault is a property of the program, so nothing here tries to continue.
#pragma once

extern "C" void emu_swap(void** save, void* load);  // fibers.h

static volatile bool running;     // a kernel thread is running
static pthread_t running_thread;  // on this OS thread

[[noreturn]] static void leave_kernel() {
    void* abandoned;
    emu_current = &host;
    emu_swap(&abandoned, host.stack_pointer);
    __builtin_unreachable();
}

// Of the instruction that called the runtime: one byte before the return address. 0 if it lies in another library.
static inline uint32_t code_offset() {
    return kernel_pc > __ehdr_start && kernel_pc < _end ? (uint32_t)((char*)kernel_pc - __ehdr_start) - 1 : 0;
}

__attribute__((noreturn, format(printf, 3, 4)))
static void fail(const char* kind, int argument, const char* format, ...) {
    running = false;
    Fault& f = launch->fault;
    const Thread& t = current();
    snprintf(f.kind, sizeof f.kind, "%s", kind);
    f.argument = argument;
    f.block_number = block_number;
    f.block[0] = emu_block_index.x, f.block[1] = emu_block_index.y, f.block[2] = emu_block_index.z;
    f.thread[0] = t.index.x, f.thread[1] = t.index.y, f.thread[2] = t.index.z;
    f.code_offset = code_offset();
    va_list values;
    va_start(values, format);
    vsnprintf(f.text, sizeof f.text, format, values);
    va_end(values);
    leave_kernel();
}

void emu_trap() {
    EMU_CALLED_FROM_KERNEL;
    fail("trap", -1, "__trap() was called");
}

static const char* file_name(emu_site site) {
    const char* slash = strrchr(site.file_name(), '/');
    return slash ? slash + 1 : site.file_name();
}
static bool same_site(emu_site a, emu_site b) { return a.line() == b.line() && !strcmp(a.file_name(), b.file_name()); }

// The argument whose array lies nearest to an address, and the address's offset in it; null if none lies within 1 GiB.
static const Argument* nearest_argument(uint64_t address, int64_t* offset) {
    const Argument* best = nullptr;
    uint64_t best_distance = 1 << 30;
    for (int64_t i = 0; i < launch->argument_count; i++) {
        const Argument& a = launch->arguments[i];
        uint64_t distance = address < a.begin ? a.begin - address : address < a.end ? 0 : address - a.end;
        if (distance >= best_distance) continue;
        best_distance = distance;
        best = &a;
    }
    if (best) *offset = (int64_t)(address - best->begin);
    return best;
}

static void fail_memory_signal(uint64_t address) {
    const Worker& w = *launch->worker;
    uint64_t stacks = (uint64_t)w.stacks, shared_end = (uint64_t)w.dynamic_shared + w.dynamic_capacity;
    if (address - stacks < MAX_THREADS * w.stack_stride)
        fail("stack overflow", -1, "local variables need too much stack");
    if (address - shared_end < 4096)
        fail("shared memory over-use", -1, "access past the %llu bytes of dynamic shared memory of this launch",
             (unsigned long long)launch->dynamic_size);
    int64_t offset = 0;
    const Argument* a = nearest_argument(address, &offset);
    if (!a) fail("out of bounds", -1, "access to address 0x%llx, which belongs to no argument", (unsigned long long)address);
    if (offset >= 0 && address < a->end)
        fail("misaligned", a->index, "access at byte %lld is not aligned", (long long)offset);
    fail("out of bounds", a->index, "access to address 0x%llx: byte %lld of an array of %llu bytes",
         (unsigned long long)address, (long long)offset, (unsigned long long)(a->end - a->begin));
}

static struct sigaction previous_action[NSIG];

static void* interrupted_pc(void* context) {
    mcontext_t& registers = ((ucontext_t*)context)->uc_mcontext;
#if defined(__x86_64__)
    return (char*)registers.gregs[REG_RIP] + 1;  // + 1: fail() expects a return address
#else
    return (char*)registers.pc + 1;
#endif
}

// Other libraries' faults go to whoever handled them before.
static void on_signal(int number, siginfo_t* info, void* context) {
    if (!running || !pthread_equal(running_thread, pthread_self())) {
        struct sigaction& previous = previous_action[number];
        if (previous.sa_flags & SA_SIGINFO) previous.sa_sigaction(number, info, context);
        else if (previous.sa_handler == SIG_DFL) sigaction(number, &previous, nullptr);  // the fault repeats and kills
        else if (previous.sa_handler != SIG_IGN) previous.sa_handler(number);
        return;
    }
    launch->fault.caller_code_offset = code_offset();
    called_from(interrupted_pc(context));
    if (number == SIGFPE) fail("integer division by zero", -1, "the divisor is zero or the quotient does not fit");
    if (number == SIGILL) fail("trap", -1, "the kernel reached code that must not be reached");
    fail_memory_signal((uint64_t)info->si_addr);
}

static void install_signal_handlers() {
    static bool installed;
    if (installed) return;
    installed = true;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // NODEFER: the handler does not return
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &action, &previous_action[number]);
}
