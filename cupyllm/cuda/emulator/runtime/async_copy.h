// cp.async: copies from global to shared memory that become visible only when the issuing thread waits for their group.
//
// The 16 bytes are taken from global memory when the copy is issued and stored to shared memory by the matching wait,
// so a kernel that forgets to commit or to wait reads old data in both modes. In check mode any access to a destination
// in between is a fault, and the wait counts as the issuing thread's write: other threads need a barrier after it.
#pragma once

static constexpr int MAX_COPIES = 128;  // in flight per thread

struct PendingCopy {
    char* destination;
    uint32_t group;
    char data[16];
};
static struct CopyQueue {
    uint32_t committed;  // groups so far
    int count;
    PendingCopy copies[MAX_COPIES];
} copy_queues[MAX_THREADS];
static bool copies_used;  // by this block: saves clearing the queues of blocks that copy nothing

static void reset_copies() {
    if (!copies_used) return;
    copies_used = false;
    for (CopyQueue& q : copy_queues) q.committed = 0, q.count = 0;
}

void emu_cp_async(void* shared, const void* global, int size, int source_size) {
    EMU_CALLED_FROM_KERNEL;
    if ((uint64_t)shared % size || (uint64_t)global % size)
        fail("misaligned", -1, "cp.async of %d bytes needs addresses that are multiples of %d", size, size);
    if (source_size < 0 || source_size > size)
        fail("out of bounds", -1, "cp.async of %d bytes with %d source bytes", size, source_size);
    CopyQueue& q = copy_queues[current().number];
    if (q.count == MAX_COPIES) fail("emulator limit", -1, "more than %d cp.async in flight in one thread", MAX_COPIES);
    check_copy_issue(shared, global, size, source_size);
    copies_used = true;
    PendingCopy& copy = q.copies[q.count++];
    copy.destination = (char*)shared;
    copy.group = q.committed;
    memset(copy.data, 0, size);
    memcpy(copy.data, global, source_size);
}

void emu_cp_async_commit() { copy_queues[current().number].committed++; }

void emu_cp_async_wait(int groups_left) {
    EMU_CALLED_FROM_KERNEL;
    CopyQueue& q = copy_queues[current().number];
    int kept = 0;
    for (int i = 0; i < q.count; i++) {
        PendingCopy& copy = q.copies[i];
        if ((int64_t)copy.group < (int64_t)q.committed - groups_left) {
            memcpy(copy.destination, copy.data, 16);
            check_copy_arrival(copy.destination, 16);
        } else {
            q.copies[kept++] = copy;
        }
    }
    q.count = kept;
}
