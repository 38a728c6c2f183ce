// When two accesses to the same byte are ordered, and when they race (check mode).
//
// Every byte of shared memory has a cell with its last write and its last read: by which thread, in which epoch and at
// which clock. The epoch counts block barriers, the clock a lane's __syncwarp calls since the last barrier; when lanes
// meet in a __syncwarp, all of them move past the latest clock among them. So an earlier access is ordered before this
// thread's when
//   - a block barrier lies between (its epoch is not the present one), or
//   - it is by the same thread, or
//   - it is by a lane of the same warp at an earlier clock.
// Anything else that touches the same byte is a race if one of the two is a write and not both are atomic. This holds
// for every order in which the hardware could run the threads, not only for the order of this run.
//
// One cell remembers one reader exactly and otherwise only "several lanes of a warp" or "several warps". Two threads
// that write the same value are reported too; CUDA does not define the result of that either.
//
// Global memory is watched the same way on request (option global_races), with the block's number in the cell. Blocks
// are ordered by nothing, with one exception that "the last block combines" kernels need: after __threadfence and a
// later atomic in one block, its writes count as visible to blocks that have done an atomic themselves since. This is
// coarser than the memory model: the fence and the atomics are not matched by thread and address.
#pragma once

enum AccessKind { READ, WRITE, ATOMIC };

// Access.who: the thread's number in the block, and
static constexpr uint16_t THREAD_NUMBER = 0x3ff, SEVERAL_LANES = 0x400, SEVERAL_WARPS = 0x800, SEVERAL_BLOCKS = 0x1000,
                          BY_ATOMIC = 0x2000, COPY_PENDING = 0x4000;
// A reader that stands for the whole warp (ldmatrix): it is not ordered after any single lane's own writes.
struct Actor {
    uint16_t thread;
    uint16_t clock;
    uint16_t flags;  // 0 or SEVERAL_LANES
};

static inline Actor actor_of(const Thread& t) { return {(uint16_t)t.number, warps[t.warp].clock[t.lane], 0}; }

static inline bool ordered(Access past, Actor now) {
    if (past.epoch != epoch) return true;
    if (past.who & SEVERAL_WARPS) return false;
    const uint16_t thread = past.who & THREAD_NUMBER;
    if (thread / WARP == now.thread / WARP && past.clock < now.clock) return true;
    return thread == now.thread && !((past.who | now.flags) & SEVERAL_LANES);
}

// Replaces the remembered access by this one, or widens it if both may happen at the same time.
static inline void remember(Access& cell, Actor now, uint16_t flags) {
    uint16_t who = (uint16_t)(now.thread | now.flags | flags);
    uint16_t clock = now.clock;
    if (cell.epoch == epoch && !ordered(cell, now)) {
        bool same_warp = !(cell.who & SEVERAL_WARPS) && (cell.who & THREAD_NUMBER) / WARP == now.thread / WARP;
        who |= same_warp ? SEVERAL_LANES : SEVERAL_WARPS;
        clock = std::max(clock, cell.clock);
    }
    cell = {epoch, clock, who, code_offset()};
}

static const char* const kind_names[] = {"read", "write", "atomic"};

[[noreturn]] static void fail_race(const char* kind, int argument, const char* place, AccessKind mine, Access past,
                                   const char* theirs, const char* block) {
    char who[40];
    if (past.who & SEVERAL_BLOCKS) snprintf(who, sizeof who, "several threads");
    else if (past.who & SEVERAL_WARPS) snprintf(who, sizeof who, "threads of several warps");
    else if (past.who & SEVERAL_LANES)
        snprintf(who, sizeof who, "several lanes of warp %d", (past.who & THREAD_NUMBER) / WARP);
    else snprintf(who, sizeof who, "thread %d", past.who & THREAD_NUMBER);
    launch->fault.other_code_offset = past.code_offset;
    fail(kind, argument, "this %s of %s and a %s by %s%s are not ordered by a barrier", kind_names[mine], place, theirs,
         who, block);
}

// "byte 12 of dynamic shared memory": cells are numbered through, first the dynamic part and then the __shared__
// variables.
struct SharedPlace {
    char text[60];
    explicit SharedPlace(uint64_t cell) {
        const uint64_t capacity = launch->worker->dynamic_capacity;
        bool dynamic = cell < capacity;
        snprintf(text, sizeof text, "byte %llu of %s", (unsigned long long)(dynamic ? cell : cell - capacity),
                 dynamic ? "dynamic shared memory" : "the __shared__ variables");
    }
};

static void check_shared_byte(uint64_t number, AccessKind kind, Actor now) {
    SharedCell& cell = launch->worker->cells[number];
    const bool written = cell.write.epoch >= first_epoch, read = cell.read.epoch >= first_epoch;
    if (!written && kind != WRITE)
        fail("uninitialised shared read", -1, "%s has not been written, or a barrier is missing after the write",
             SharedPlace(number).text);
    if (written && (cell.write.who & COPY_PENDING)) {
        launch->fault.other_code_offset = cell.write.code_offset;
        fail("asynchronous copy", -1, "%s of %s, where a cp.async by thread %d has not been waited for",
             kind_names[kind], SharedPlace(number).text, cell.write.who & THREAD_NUMBER);
    }
    if (written && !(kind == ATOMIC && (cell.write.who & BY_ATOMIC)) && !ordered(cell.write, now))
        fail_race("shared-memory race", -1, SharedPlace(number).text, kind, cell.write, "write", "");
    if (kind == READ) return remember(cell.read, now, 0);
    if (read && !ordered(cell.read, now))
        fail_race("shared-memory race", -1, SharedPlace(number).text, kind, cell.read, "read", "");
    remember(cell.write, now, kind == ATOMIC ? BY_ATOMIC : 0);
}

// What global races need beyond the cells: what this block and the earlier ones have published.
static struct {
    bool fenced;    // a __threadfence was executed in this block
    bool acquired;  // an atomic was executed in this block
} publication;

static bool ordered_globally(Access past, uint32_t past_block, Actor now) {
    if (!past.epoch) return true;
    if (past.who & SEVERAL_BLOCKS) return false;
    if (past.epoch >= first_epoch) return ordered(past, now);
    return publication.acquired && launch->released[past_block];
}

static void remember_globally(Access& cell, uint32_t& block, Actor now, uint16_t flags) {
    bool several = cell.epoch && cell.epoch < first_epoch && !ordered_globally(cell, block, now);
    remember(cell, now, flags | (several || (cell.who & SEVERAL_BLOCKS) ? SEVERAL_BLOCKS : 0));
    block = block_number;
}

[[noreturn]] static void fail_global_race(const Argument& a, uint64_t cell, AccessKind kind, Access past,
                                          uint32_t past_block, const char* theirs) {
    char block[40] = "";
    if (past.who & SEVERAL_BLOCKS) snprintf(block, sizeof block, " of several blocks");
    else if (past_block != block_number) snprintf(block, sizeof block, " of block number %u", past_block);
    char place[40];
    snprintf(place, sizeof place, "byte %llu", (unsigned long long)(cell * a.granule));
    fail_race("global race", a.index, place, kind, past, theirs, block);
}

static void check_global_races(const Argument& a, uint64_t offset, uint32_t size, AccessKind kind) {
    const Actor now = actor_of(current());
    for (uint64_t i = offset / a.granule; i <= (offset + size - 1) / a.granule; i++) {
        GlobalCell& cell = a.cells[i];
        if (!(kind == ATOMIC && (cell.write.who & BY_ATOMIC)) && !ordered_globally(cell.write, cell.write_block, now))
            fail_global_race(a, i, kind, cell.write, cell.write_block, "write");
        if (kind == READ) {
            remember_globally(cell.read, cell.read_block, now, 0);
            continue;
        }
        if (!ordered_globally(cell.read, cell.read_block, now))
            fail_global_race(a, i, kind, cell.read, cell.read_block, "read");
        remember_globally(cell.write, cell.write_block, now, kind == ATOMIC ? BY_ATOMIC : 0);
    }
}
