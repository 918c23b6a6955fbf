/* A preloaded pread that blocks while the file named by STALL_FILE exists (below the offset
 * STALL_BELOW, if that is set), and takes 5 ms while that named by SLOW_FILE does: what a device that
 * hangs, or is slow, looks like to threads in C, which no fake member can reach. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*pread_t)(int, void *, size_t, off_t);

static atomic_int at_work, most;

/* The most calls that were at work at once since this was asked last. */
int most_at_once(void) { return atomic_exchange(&most, 0); }

static ssize_t stalled(const char *name, int fd, void *buffer, size_t count, off_t offset) {
    const char *stall = getenv("STALL_FILE"), *slow = getenv("SLOW_FILE");
    const char *below = getenv("STALL_BELOW");
    if (below && offset >= atoll(below))
        stall = NULL;
    int now = atomic_fetch_add(&at_work, 1) + 1;
    int before = atomic_load(&most);
    while (now > before && !atomic_compare_exchange_weak(&most, &before, now))
        ;
    while (stall && access(stall, F_OK) == 0)
        usleep(2000);
    if (slow && access(slow, F_OK) == 0)
        usleep(5000);
    ssize_t moved = ((pread_t)dlsym(RTLD_NEXT, name))(fd, buffer, count, offset);
    atomic_fetch_sub(&at_work, 1);
    return moved;
}

ssize_t pread(int fd, void *buffer, size_t count, off_t offset) {
    return stalled("pread", fd, buffer, count, offset);
}

ssize_t pread64(int fd, void *buffer, size_t count, off_t offset) {
    return stalled("pread64", fd, buffer, count, offset);
}
