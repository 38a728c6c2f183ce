// Running a launch: blocks are taken from a counter shared by the OS threads; each is set up, run to its end, and its
// threads' stacks are used again for the next one.
//
// Blocks start in order of their number but several OS threads run different ones at once, so a kernel whose result
// depends on the order of blocks gives varying results. A block that waits for another block hangs.
#pragma once

static void leave_thread(Thread& t) {
    t.state = EXITED;
    alive--;
    Warp& w = warps[t.warp];
    w.gone |= 1u << t.lane;
    for (uint32_t rest = w.waiting; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        if (!(w.mask[lane] >> t.lane & 1)) continue;
        called_from(threads[t.warp * WARP + lane].pc);
        fail("warp mask", -1, "lane %u has left the kernel while lane %d waits for it here", t.lane, lane);
    }
    if (!barrier.arrived) return;
    if (CHECKING) {
        called_from(barrier.first->pc);
        fail_left_before_barrier(barrier.first->site);
    }
    if (barrier.arrived == alive) release_barrier(&t);
}

static void thread_main() {
    launch->kernel(launch->values);
    leave_thread(current());
    if (alive == 0) leave_kernel();
    run_next();
    __builtin_trap();  // nobody makes an exited thread ready
}

static void set_up_threads() {
    uint3 index = {0, 0, 0};
    for (uint32_t i = 0; i < thread_count; i++) {
        Thread& t = threads[i];
        t.index = index;
        t.number = i;
        t.lane = i % WARP;
        t.warp = i / WARP;
        prepare_stack(t);
        if (++index.x == emu_block_dim.x) {
            index.x = 0;
            if (++index.y == emu_block_dim.y) index.y = 0, index.z++;
        }
    }
    ready_count = 0;
    for (uint32_t i = thread_count; i-- > 0;) make_ready(&threads[i]);
    for (uint32_t i = 0; i * WARP < thread_count; i++) {
        warps[i].waiting = 0;
        warps[i].gone = thread_count - i * WARP >= WARP ? 0 : ALL_LANES << thread_count % WARP;
        memset(warps[i].clock, 0, sizeof warps[i].clock);
    }
    alive = thread_count;
    barrier.arrived = 0;
}

static void run_block(uint32_t number) {
    const uint32_t* grid = launch->grid;
    block_number = number;
    emu_block_index = {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
    // Shared memory starts as NaN, so that results which depend on it look wrong.
    memset(__start_emu_shared, 0xff, static_shared_size());
    memset(dynamic_shared, 0xff, launch->dynamic_size);
    first_epoch = ++epoch;
    set_up_threads();
    reset_copies();
    begin_block_checks();
    Thread* first = ready[--ready_count];
    emu_current = first;
    kernel_pc = nullptr;
    running = true;
    emu_swap(&host.stack_pointer, first->stack_pointer);
    running = false;
    if constexpr (CHECKING)
        for (uint32_t w = 0; w * WARP < thread_count; w++) flush_traffic(w);
}

static void begin_launch(Launch* l) {
    launch = l;
    emu_grid_dim = {l->grid[0], l->grid[1], l->grid[2]};
    emu_block_dim = {l->block[0], l->block[1], l->block[2]};
    thread_count = l->block[0] * l->block[1] * l->block[2];
    Worker& w = *l->worker;
    // In fast mode dynamic shared memory ends at the unmapped page, so that over-use faults.
    uint64_t rounded = (l->dynamic_size + 15) / 16 * 16;
    dynamic_shared = CHECKING ? w.dynamic_shared : w.dynamic_shared + w.dynamic_capacity - rounded;
    if (w.epoch > UINT32_MAX / 2) {
        w.epoch = 0;
        memset(w.cells, 0, w.cell_count * sizeof(SharedCell));
    }
    epoch = (uint32_t)w.epoch;
    begin_launch_checks();
}

// Runs blocks until there are none left or one faults. Returns 1 after a fault, else 0.
EMU_PUBLIC int emu_launch(Launch* l) {
    begin_launch(l);
    install_signal_handlers();
    running_thread = pthread_self();
    stack_t signal_stack = {}, previous;
    signal_stack.ss_sp = l->worker->signal_stack;
    signal_stack.ss_size = l->worker->signal_stack_size;
    sigaltstack(&signal_stack, &previous);
    while (!l->fault.kind[0]) {
        int64_t number = __atomic_fetch_add(l->next_block, 1, __ATOMIC_RELAXED);
        if (number >= l->block_count) break;
        run_block((uint32_t)number);
    }
    if (l->fault.kind[0])
        __atomic_store_n(l->next_block, INT64_MAX / 2, __ATOMIC_RELAXED);  // stops the other OS threads
    sigaltstack(&previous, nullptr);
    l->worker->epoch = epoch;
    return l->fault.kind[0] != 0;
}

struct Part {
    int (*run)(Launch*);  // emu_launch of one copy of the library
    Launch* launch;
};

static void* run_part(void* part) {
    ((Part*)part)->run(((Part*)part)->launch);
    return nullptr;
}

// Runs every part of a launch on an OS thread of its own, the first on the calling one, and waits for all of them.
EMU_PUBLIC void emu_run(Part* parts, int64_t count) {
    pthread_t others[256];
    for (int64_t i = 1; i < count; i++)
        if (pthread_create(&others[i], nullptr, run_part, &parts[i]))
            count = i;  // fewer threads then do all the blocks
    run_part(&parts[0]);
    for (int64_t i = 1; i < count; i++) pthread_join(others[i], nullptr);
}

void* emu_dynamic_shared() { return dynamic_shared; }

// Sizes for layout.py to compare with its own.
EMU_PUBLIC void emu_sizes(uint64_t* out) {
    const uint64_t sizes[] = {sizeof(Traffic), sizeof(Argument),      sizeof(Fault),      sizeof(Worker),
                              sizeof(Launch),  sizeof(emu_parameter), sizeof(SharedCell), sizeof(GlobalCell)};
    memcpy(out, sizes, sizeof sizes);
}
EMU_PUBLIC uint64_t emu_static_shared() { return static_shared_size(); }
