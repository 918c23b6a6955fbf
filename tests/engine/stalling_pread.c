/* A preloaded pread that blocks while the file named by STALL_FILE exists: what a device that
 * hangs looks like to threads in C, which no fake member can reach. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*pread_t)(int, void *, size_t, off_t);

static ssize_t stalled(const char *name, int fd, void *buffer, size_t count, off_t offset) {
    const char *file = getenv("STALL_FILE");
    while (file && access(file, F_OK) == 0)
        usleep(2000);
    return ((pread_t)dlsym(RTLD_NEXT, name))(fd, buffer, count, offset);
}

ssize_t pread(int fd, void *buffer, size_t count, off_t offset) {
    return stalled("pread", fd, buffer, count, offset);
}

ssize_t pread64(int fd, void *buffer, size_t count, off_t offset) {
    return stalled("pread64", fd, buffer, count, offset);
}
