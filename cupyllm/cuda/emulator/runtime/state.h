// What a launch is made of: the structures that Python fills in (layout.py mirrors them) and the state of the one block
// that runs at a time.
//
// Everything is plain static data. Each OS thread loads its own copy of the library, so nothing here is shared between
// OS threads except what Launch points to: the block counter and the kernel's arguments.
#pragma once

static constexpr bool CHECKING = EMU_CHECK;
static constexpr int MAX_THREADS = 1024, WARP = 32, MAX_WARPS = MAX_THREADS / WARP;
static constexpr uint32_t ALL_LANES = 0xffffffffu;

// Memory traffic of one argument in one direction. Bytes are summed over all threads; the other three are counted in
// check mode per warp access: how many there were, the 32-byte sectors they touched, the distinct bytes they used.
struct Traffic {
    uint64_t bytes, warp_accesses, sectors, bytes_used;
};

// When, by whom and where in the code a byte was last accessed; see races.h.
struct Access {
    uint32_t epoch;
    uint16_t clock, who;
    uint32_t code_offset;
};
struct SharedCell {
    Access write, read;
};
struct GlobalCell {
    Access write, read;
    uint32_t write_block, read_block;
};

struct Argument {
    uint64_t begin, end;  // the array's bytes
    int32_t index, read_only;
    uint32_t granule, reserved;  // bytes per GlobalCell
    GlobalCell* cells;           // null: global races are not watched
    Traffic read, written;
};

struct Fault {
    char kind[40];
    int32_t argument;  // -1: none
    uint32_t block[3], thread[3];
    uint64_t block_number;
    uint64_t code_offset;         // of the instruction in the library, 0 if unknown
    uint64_t other_code_offset;   // races: of the other access
    uint64_t caller_code_offset;  // signals: of the last call of the runtime, in case the signal came from inside it
    char text[1400];
};

// Memory that belongs to an OS thread and outlives a launch.
struct Worker {
    char* stacks;  // MAX_THREADS stacks, each ending stack_stride bytes after the previous one
    uint64_t stack_stride;
    char* dynamic_shared;  // followed by an unmapped page
    uint64_t dynamic_capacity;
    char* signal_stack;
    uint64_t signal_stack_size;
    SharedCell* cells;  // one per byte: dynamic shared memory, then static
    uint64_t cell_count;
    uint64_t epoch;  // grows with every barrier and block of every launch
};

struct Launch {
    void (*kernel)(void**);
    void** values;
    uint32_t grid[3], block[3];
    uint64_t dynamic_size;
    int64_t* next_block;
    int64_t block_count;
    Worker* worker;
    Argument* arguments;
    int64_t argument_count;
    uint8_t* released;  // per block, for global races: its writes were published (races.h)
    uint64_t barriers, shared_accesses, bank_conflicts;
    Fault fault;
};

enum ThreadState : uint8_t { READY, AT_BARRIER, AT_COLLECTIVE, EXITED };

// One CUDA thread: a fiber with its own stack.
struct Thread : emu_thread {
    void* stack_pointer;  // of the saved registers, while it does not run
    uint32_t number, lane, warp;
    ThreadState state;
    emu_warp_op op;  // what it waits for, for messages
    uint32_t mask;
    emu_site site;
    void* pc;  // where it waits
};

struct Warp {
    uint32_t waiting;      // lanes that wait in a collective
    uint32_t gone;         // lanes that have left the kernel or never existed
    uint16_t clock[WARP];  // per lane: advanced by __syncwarp, see races.h
    alignas(64) uint64_t value[WARP];
    alignas(64) uint64_t result[WARP];
    alignas(64) int argument[WARP];
    alignas(64) uint32_t mask[WARP];
    alignas(64) int key[WARP];  // operation, width and line: equal for lanes that take part in the same collective
};

static Launch* launch;
static Thread threads[MAX_THREADS];
static Thread host;  // the OS thread itself: sets a block up and takes over when the block is done
static Warp warps[MAX_WARPS];
static uint32_t thread_count, alive;
static uint32_t block_number;
static uint32_t epoch, first_epoch;  // now, and at the start of the block
static char* dynamic_shared;
static void* kernel_pc;  // the last place where the kernel called the runtime, for messages

emu_thread* emu_current = &host;
dim3 emu_block_dim, emu_grid_dim;
uint3 emu_block_index;

static inline Thread& current() { return *static_cast<Thread*>(emu_current); }
static inline void called_from(void* pc) { kernel_pc = pc; }
#define EMU_CALLED_FROM_KERNEL called_from(__builtin_return_address(0))

template <class Body>
static inline void for_lanes(uint32_t mask, Body body) {
    if (mask == ALL_LANES) {
        for (int lane = 0; lane < WARP; lane++) body(lane);
    } else {
        for (uint32_t rest = mask; rest; rest &= rest - 1) body(__builtin_ctz(rest));
    }
}

// Static __shared__ variables: the section is the kernel's variables followed by this redzone (link order).
__attribute__((section("emu_shared"), aligned(16))) static char redzone[256];
extern "C" __attribute__((visibility("hidden"))) char __start_emu_shared[], __ehdr_start[], _end[];
static inline uint64_t static_shared_size() { return (uint64_t)(redzone - __start_emu_shared); }
