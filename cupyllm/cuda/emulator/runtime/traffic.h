// Counting what a warp's accesses cost (check mode): 32-byte sectors of global memory, bank conflicts of shared memory.
//
// Lanes run one after the other, so the accesses of one warp instruction arrive spread out in time. They are put
// together again by the instruction's address and a count: the k-th execution of a load by one lane belongs with the
// k-th by every other lane. Where lanes meet (full-warp collective, block barrier, end of the block) the warp's log is
// counted and the counts start again, so loops of different length do not shift later iterations.
//
// Counted as on hardware since Volta: a global access of a warp moves every 32-byte sector that any of its lanes
// touches, once. A shared access is served in passes over 128 bytes (32 lanes of 4 bytes, 16 of 8, 8 of 16); in a pass
// each of the 32 banks delivers one 4-byte word, to all lanes that want it; every further word of the same bank is one
// more wavefront, a conflict. Sectors count from the start of the array, since GPU allocations are aligned to 256
// bytes; for a view that starts inside of an allocation that may be off. Caches and the grouping of several
// instructions by the compiler are not modelled.
#pragma once

struct WarpAccess {
    uint32_t lanes;
    uint64_t address[WARP];  // global memory: from the start of the array
};

// All executions of one load or store instruction, on one argument, since the warp's lanes last met.
struct AccessSite {
    void* pc;
    Argument* argument;  // null: shared memory
    uint32_t size;
    AccessKind kind;
    uint32_t executions[WARP];
    std::vector<WarpAccess> accesses;  // kept allocated; `used` of them count
    uint32_t used;
};

static constexpr uint32_t SITES = 512;  // per warp; a power of two
struct WarpLog {
    uint32_t site_count;
    uint16_t occupied[SITES];
    AccessSite sites[SITES];
};
static WarpLog logs[MAX_WARPS];

static void flush_traffic(uint32_t warp);

static AccessSite& find_site(uint32_t warp, void* pc, Argument* argument, uint32_t size, AccessKind kind) {
    WarpLog& log = logs[warp];
    if (log.site_count > SITES * 3 / 4) flush_traffic(warp);
    uint64_t hash = ((uint64_t)pc * 0x9E3779B97F4A7C15ull ^ (uint64_t)argument * 0xD1342543DE82EF95ull ^ size ^
                     (uint64_t)kind << 8) >>
                    40;
    for (;; hash++) {
        AccessSite& s = log.sites[hash % SITES];
        if (s.pc == pc && s.argument == argument && s.size == size && s.kind == kind) return s;
        if (s.pc) continue;
        s.pc = pc, s.argument = argument, s.size = size, s.kind = kind;
        log.occupied[log.site_count++] = (uint16_t)(hash % SITES);
        return s;
    }
}

static void log_access(const Thread& t, void* pc, Argument* argument, uint64_t address, uint32_t size,
                       AccessKind kind) {
    AccessSite& s = find_site(t.warp, pc, argument, size, kind);
    uint32_t execution = s.executions[t.lane]++;
    if (execution >= s.accesses.size()) s.accesses.emplace_back();
    WarpAccess& a = s.accesses[execution];
    if (execution >= s.used) s.used = execution + 1, a.lanes = 0;
    a.lanes |= 1u << t.lane;
    a.address[t.lane] = address;
}

static void count_global(Traffic& traffic, const WarpAccess& access, uint32_t size) {
    uint64_t sorted[WARP];
    int n = 0;
    for_lanes(access.lanes, [&](int lane) { sorted[n++] = access.address[lane]; });
    if (!std::is_sorted(sorted, sorted + n)) std::sort(sorted, sorted + n);
    uint64_t counted_to = 0, next_sector = 0;  // bytes and sectors before these have been counted
    for (int i = 0; i < n; i++) {
        uint64_t from = std::max(sorted[i], counted_to), to = sorted[i] + size;
        if (from >= to) continue;
        counted_to = to;
        traffic.bytes_used += to - from;
        uint64_t first = std::max(from / 32, next_sector), last = (to - 1) / 32;
        if (last >= first) traffic.sectors += last - first + 1;
        next_sector = last + 1;
    }
    traffic.warp_accesses++;
}

// The largest number of different words that one bank must deliver for these lanes.
static uint32_t wavefronts(const WarpAccess& access, uint32_t lanes, uint32_t size) {
    uint64_t words[128];
    int n = 0;
    for_lanes(lanes, [&](int lane) {
        for (uint64_t w = access.address[lane] / 4; w <= (access.address[lane] + size - 1) / 4 && n < 128; w++)
            words[n++] = w;
    });
    std::sort(words, words + n);
    n = (int)(std::unique(words, words + n) - words);
    uint32_t per_bank[32] = {}, most = 0;
    for (int i = 0; i < n; i++) most = std::max(most, ++per_bank[words[i] % 32]);
    return most;
}

static void count_shared(const WarpAccess& access, uint32_t size) {
    const uint32_t per_pass = size <= 4 ? 32 : size >= 128 ? 1 : 128 / size;
    for (uint32_t start = 0; start < WARP; start += per_pass) {
        uint32_t lanes = access.lanes & (per_pass == 32 ? ALL_LANES : ((1u << per_pass) - 1) << start);
        if (!lanes) continue;
        launch->bank_conflicts += wavefronts(access, lanes, size) - 1;
    }
    launch->shared_accesses++;
}

static void flush_traffic(uint32_t warp) {
    WarpLog& log = logs[warp];
    for (uint32_t i = 0; i < log.site_count; i++) {
        AccessSite& s = log.sites[log.occupied[i]];
        for (uint32_t k = 0; k < s.used; k++) {
            if (!s.argument) {
                count_shared(s.accesses[k], s.size);
                continue;
            }
            if (s.kind != WRITE) count_global(s.argument->read, s.accesses[k], s.size);
            if (s.kind != READ) count_global(s.argument->written, s.accesses[k], s.size);
        }
        memset(s.executions, 0, sizeof s.executions);
        s.used = 0;
        s.pc = nullptr;
    }
    log.site_count = 0;
}

static void discard_traffic() {
    for (WarpLog& log : logs) {
        for (uint32_t i = 0; i < log.site_count; i++) {
            AccessSite& s = log.sites[log.occupied[i]];
            memset(s.executions, 0, sizeof s.executions);
            s.used = 0;
            s.pc = nullptr;
        }
        log.site_count = 0;
    }
}
