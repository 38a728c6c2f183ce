// __syncthreads and its counting forms.
//
// The last living thread to arrive releases the others. Threads at two different __syncthreads at once are a fault in
// both modes. A thread that has left the kernel before a later __syncthreads is a fault in check mode; a GPU counts it
// as arrived, but CUDA does not promise that, and it usually is a missing condition.
#pragma once

static struct {
    uint32_t arrived;
    emu_barrier_kind kind;
    int accumulated, result;
    Thread* first;
} barrier;

// A thread waits at the barrier, or is about to, and others have left.
static void fail_left_before_barrier(emu_site site) {
    uint32_t left = thread_count - alive;
    fail("divergent barrier", -1,
         "__syncthreads (%s:%u) is reached by only a part of the block: %u of %u threads have left the kernel",
         file_name(site), site.line(), left, thread_count);
}

static void release_barrier(Thread* self) {
    barrier.arrived = 0;
    barrier.result = barrier.accumulated;
    epoch++;
    launch->barriers++;
    if constexpr (CHECKING) {
        for (uint32_t w = 0; w * WARP < thread_count; w++) {
            memset(warps[w].clock, 0, sizeof warps[w].clock);
            flush_traffic(w);
        }
    }
    for (uint32_t i = thread_count; i-- > 0;)
        if (&threads[i] != self && threads[i].state == AT_BARRIER) make_ready(&threads[i]);
}

int emu_barrier(emu_barrier_kind kind, int predicate, emu_site site) {
    EMU_CALLED_FROM_KERNEL;
    Thread& self = current();
    if (barrier.arrived && (kind != barrier.kind || !same_site(site, barrier.first->site)))
        fail("divergent barrier", -1,
             "this thread is at __syncthreads (%s:%u) while thread %u is at another one (%s:%u)", file_name(site),
             site.line(), barrier.first->number, file_name(barrier.first->site), barrier.first->site.line());
    if (CHECKING && alive != thread_count) fail_left_before_barrier(site);
    self.site = site;
    if (!barrier.arrived) {
        barrier.first = &self;
        barrier.kind = kind;
        barrier.accumulated = kind == EMU_BARRIER_AND;
    }
    if (kind == EMU_BARRIER_COUNT) barrier.accumulated += predicate;
    else if (kind == EMU_BARRIER_AND) barrier.accumulated &= predicate;
    else barrier.accumulated |= predicate;
    if (++barrier.arrived == alive) {
        release_barrier(&self);
    } else {
        self.state = AT_BARRIER;
        self.pc = kernel_pc;
        run_next();
    }
    return barrier.result;
}
