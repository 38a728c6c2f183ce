// Warp collectives: shuffles, votes, matches, reductions, __syncwarp, and the matrix instructions that need all lanes.
//
// Each lane leaves its operands in the Warp and waits. The last lane of the mask to arrive checks that all of them came
// to the same call with the same mask, computes every lane's result, and makes the others ready. Naming a lane that
// never comes is a fault: at once if it has left the kernel, otherwise as a deadlock.
//
// Only __syncwarp orders memory. A GPU usually hides a shuffle used in its place; check mode reports the race.
#pragma once

static void compute_mma(Warp& w, uint32_t warp, int k, bool bf16);  // matrices.h
static void compute_ldmatrix(Warp& w, uint32_t warp, int matrices, bool transposed);

[[noreturn]] static void fail_mismatch(uint32_t warp, uint32_t mask) {
    const Thread& self = current();
    char mine[200], theirs[200];
    for_lanes(mask, [&](int lane) {
        const Thread& other = threads[warp * WARP + lane];
        if (warps[warp].key[lane] == warps[warp].key[self.lane] && other.mask == mask) return;
        Thread waiting = self;
        waiting.state = AT_COLLECTIVE;
        describe_thread(waiting, mine, sizeof mine);
        describe_thread(other, theirs, sizeof theirs);
        fail("warp mask", -1, "lanes of one mask are in different calls: lane %u: %s; lane %d: %s", self.lane, mine,
             lane, theirs);
    });
    __builtin_unreachable();
}

static void fail_if_gone(const Warp& w, uint32_t warp, uint32_t mask) {
    uint32_t missing = mask & w.gone;
    if (!missing) return;
    int lane = __builtin_ctz(missing);
    bool exists = warp * WARP + lane < thread_count;
    fail("warp mask", -1, "mask 0x%08x names lane %d, which %s", mask, lane,
         exists ? "has left the kernel" : "does not exist in this block");
}

static inline int shuffle_source(emu_warp_op op, int lane, int argument, int width) {
    const int first = lane & ~(width - 1), last = lane | (width - 1);
    int source;
    switch (op) {
        case EMU_SHUFFLE_XOR: source = lane ^ argument; return source > last ? lane : source;
        case EMU_SHUFFLE_DOWN: source = lane + argument; return source > last ? lane : source;
        case EMU_SHUFFLE_UP: source = lane - argument; return source < first ? lane : source;
        default: return first | (argument & (width - 1));
    }
}

static void compute_shuffle(Warp& w, emu_warp_op op, uint32_t mask, int width) {
    if (width < 1 || width > WARP || (width & (width - 1)))
        fail("warp mask", -1, "shuffle width %d is not a power of two up to 32", width);
    if (mask == ALL_LANES) {
        for (int lane = 0; lane < WARP; lane++)
            w.result[lane] = w.value[shuffle_source(op, lane, w.argument[lane], width) & (WARP - 1)];
        return;
    }
    for_lanes(mask, [&](int lane) {
        int source = shuffle_source(op, lane, w.argument[lane], width) & (WARP - 1);
        if (!(mask >> source & 1))
            fail("warp mask", -1, "lane %d reads lane %d, which is not in mask 0x%08x", lane, source, mask);
        w.result[lane] = w.value[source];
    });
}

static void compute_match(Warp& w, emu_warp_op op, uint32_t mask) {
    for_lanes(mask, [&](int lane) {
        uint32_t equal = 0;
        for_lanes(mask, [&](int other) { equal |= (uint32_t)(w.value[other] == w.value[lane]) << other; });
        w.result[lane] = op == EMU_MATCH_ANY || equal == mask ? equal : 0;
    });
}

// Votes and reductions: one result for all lanes.
static uint64_t compute_reduction(const Warp& w, emu_warp_op op, uint32_t mask) {
    uint32_t r = op == EMU_ALL || op == EMU_AND || op == EMU_UMIN ? ~0u
                 : op == EMU_MIN                                  ? INT_MAX
                 : op == EMU_MAX                                  ? INT_MIN
                                                                  : 0;
    for_lanes(mask, [&](int lane) {
        uint32_t v = (uint32_t)w.value[lane];
        switch (op) {
            case EMU_BALLOT: r |= v << lane; break;
            case EMU_ADD: r += v; break;
            case EMU_MIN: r = (uint32_t)std::min((int)r, (int)v); break;
            case EMU_MAX: r = (uint32_t)std::max((int)r, (int)v); break;
            case EMU_UMIN: r = std::min(r, v); break;
            case EMU_UMAX: r = std::max(r, v); break;
            case EMU_ALL:
            case EMU_AND: r &= v; break;
            case EMU_XOR: r ^= v; break;
            default: r |= v; break;  // EMU_ANY, EMU_OR
        }
    });
    return r;
}

static void advance_clocks(Warp& w, uint32_t mask) {
    uint16_t latest = 0;
    for_lanes(mask, [&](int lane) { latest = std::max(latest, w.clock[lane]); });
    if (latest == UINT16_MAX) fail("emulator limit", -1, "more than 65535 __syncwarp between two __syncthreads");
    for_lanes(mask, [&](int lane) { w.clock[lane] = (uint16_t)(latest + 1); });
}

static void compute(Warp& w, uint32_t warp, emu_warp_op op, uint32_t mask, int argument, int width) {
    uint64_t common = 0;
    switch (op) {
        case EMU_SHUFFLE:
        case EMU_SHUFFLE_XOR:
        case EMU_SHUFFLE_DOWN:
        case EMU_SHUFFLE_UP: return compute_shuffle(w, op, mask, width);
        case EMU_MATCH_ANY:
        case EMU_MATCH_ALL: return compute_match(w, op, mask);
        case EMU_MMA: return compute_mma(w, warp, argument, width != 0);
        case EMU_LDMATRIX: return compute_ldmatrix(w, warp, argument, width != 0);
        case EMU_SYNCWARP: return advance_clocks(w, mask);
        default: common = compute_reduction(w, op, mask);
    }
    for_lanes(mask, [&](int lane) { w.result[lane] = common; });
}

static void release_lanes(uint32_t warp, uint32_t mask, uint32_t self) {
    Thread* first = &threads[warp * WARP];
    if (mask == ALL_LANES) {  // without a branch per lane: this is the emulator's hottest loop
        Thread** top = ready + ready_count;
        for (int lane = WARP - 1; lane >= 0; lane--) {
            first[lane].state = READY;
            *top = first + lane;
            top += lane != (int)self;
        }
        ready_count += WARP - 1;
        return;
    }
    for (int lane = WARP - 1; lane >= 0; lane--)
        if ((mask >> lane & 1) && lane != (int)self) make_ready(first + lane);
}

static uint64_t warp_collective(emu_warp_op op, uint32_t mask, uint64_t value, int argument, int width, emu_site site) {
    Thread& self = current();
    Warp& w = warps[self.warp];
    const uint32_t me = self.lane;
    const int key = (int)(site.line() << 12 | (uint32_t)(width & 63) << 6 | op);
    self.op = op;
    self.mask = mask;
    self.site = site;
    if (!(mask >> me & 1)) fail("warp mask", -1, "the calling lane %u is not in its own mask 0x%08x", me, mask);
    w.key[me] = key;
    w.mask[me] = mask;
    w.value[me] = value;
    w.argument[me] = argument;
    w.waiting |= 1u << me;
    if ((w.waiting & mask) != mask) {
        fail_if_gone(w, self.warp, mask);
        self.state = AT_COLLECTIVE;
        self.pc = kernel_pc;
        run_next();
        return w.result[me];
    }
    uint32_t different = 0;
    for_lanes(mask, [&](int lane) { different |= (uint32_t)(w.key[lane] ^ key) | (w.mask[lane] ^ mask); });
    if (different) fail_mismatch(self.warp, mask);
    compute(w, self.warp, op, mask, argument, width);
    w.waiting &= ~mask;
    if constexpr (CHECKING) {
        if (mask == ALL_LANES) flush_traffic(self.warp);
    }
    release_lanes(self.warp, mask, me);
    return w.result[me];
}

uint64_t emu_warp(emu_warp_op op, uint32_t mask, uint64_t value, int argument, int width, emu_site site) {
    EMU_CALLED_FROM_KERNEL;
    return warp_collective(op, mask, value, argument, width, site);
}
