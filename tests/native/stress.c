/* Stress of the pools, to be run under sanitizers: stress SEED ROUNDS
 *
 * Drivers, each in a thread, open pools over a device in memory, queue single operations and
 * batches, some of which must be refused, and then cancel, watch, stop, leave behind and fork at
 * random, while a reaper takes what has ended. The device comes back short, with nothing, with
 * errors, and hangs. At the end each operation has come back exactly once, whatever was read is
 * right, and no allocation is left.
 */
#include "../../src/fx100_lmcache/engine/_pool.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <time.h>

enum {
    DRIVERS = 3,
    POOLS = 3,
    SINGLES = 40,
    BATCHES = 4,
    BATCH_READS = 12,
    ITEMS = SINGLES + BATCHES * BATCH_READS,
    BLOCK = 512,
    MOST_BLOCKS = 16,
    DEVICE_BYTES = 1 << 20,
    PATIENCE_MS = 30000,
};

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                        \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            _exit(3);                                                                              \
        }                                                                                          \
    } while (0)

static const hasher_t HASHER = {faults_hash_create, faults_hash_destroy, faults_hash_reset,
                                faults_hash_update, faults_hash_digest};

static void pause_ms(long ms) {
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* Random numbers. */

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u; /* splitmix64 */
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint32_t below(uint64_t *state, uint32_t limit) {
    return (uint32_t)(mixed(*state += 0x9e3779b97f4a7c15u) % limit);
}

/* The device: what it holds follows from the place. Each driver has its own, by descriptor. */

static atomic_uint_fast64_t calls;
static atomic_int hangs[DRIVERS + 1]; /* calls at offsets of an odd number of 64 KiB hang */

static atomic_int hanging;

static void fill(int fd, char *memory, size_t length, off_t offset) {
    for (size_t at = 0; at < length; at += BLOCK) {
        size_t count = length - at < BLOCK ? length - at : BLOCK;
        memset(memory + at, (int)((offset + (off_t)at) / BLOCK * 31 + fd) & 0xff, count);
    }
}

static int is_odd(off_t offset) { return offset >> 16 & 1; }

/* How much of a call is done, or -1 with errno. */
static ssize_t fate(int fd, size_t length, off_t offset) {
    atomic_fetch_add(&hanging, 1);
    while (atomic_load(&hangs[fd]) && is_odd(offset))
        pause_ms(1);
    atomic_fetch_sub(&hanging, 1);
    uint64_t state = atomic_fetch_add(&calls, 1);
    switch (below(&state, 96)) {
    case 0:
        return 0;
    case 1:
        return errno = EIO, -1;
    case 2:
        return errno = EAGAIN, -1;
    case 3 ... 6:
        return errno = EINTR, -1;
    case 7 ... 20:
        return below(&state, (uint32_t)length);
    default:
        return (ssize_t)length;
    }
}

ssize_t device_pread(int fd, void *memory, size_t length, off_t offset) {
    CHECK(offset >= 0 && offset + (off_t)length <= DEVICE_BYTES, "read at %ld", (long)offset);
    ssize_t moved = fate(fd, length, offset);
    if (moved > 0)
        fill(fd, memory, (size_t)moved, offset);
    return moved;
}

ssize_t device_pwrite(int fd, const void *memory, size_t length, off_t offset) {
    CHECK(offset >= 0 && offset + (off_t)length <= DEVICE_BYTES, "write at %ld", (long)offset);
    char expected[MOST_BLOCKS * BLOCK];
    fill(fd, expected, length, offset);
    CHECK(!memcmp(memory, expected, length), "other bytes are written at %ld", (long)offset);
    return fate(fd, length, offset);
}

/* Operations, as whoever submits them knows them. */

typedef struct {
    char *memory;
    pool_t *pool;
    op_t *op; /* until it is queued */
    size_t length, padded;
    int64_t offset;
    int write;
    int refusal; /* what must come back; 0: none */
    atomic_int told;
    int error; /* once told */
    uint64_t checksum;
    int cancelled;
    int good; /* says its batch */
} item_t;

typedef struct {
    int number;
    uint64_t random;
    pool_t *pools[POOLS];
    int stopped[POOLS];
    item_t *items;
    size_t used;
    batch_t *batches[BATCHES];
    item_t *reads[BATCHES]; /* the first one of each */
} driver_t;

static int event_fd;
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static pool_t *registry[DRIVERS * POOLS + 2];
static atomic_int ending;

static void enrol(pool_t *from, pool_t *to) {
    pthread_mutex_lock(&registry_lock);
    size_t at = 0;
    while (registry[at] != from)
        at++;
    registry[at] = to;
    pthread_mutex_unlock(&registry_lock);
}

static void take(pool_t *pool, uint64_t *state) {
    op_t *op = pool_take_done(pool);
    while (op && below(state, 8)) {
        item_t *item = (item_t *)(uintptr_t)op->ticket;
        item->error = op->error;
        item->checksum = op->checksum;
        CHECK(atomic_fetch_add(&item->told, 1) == 0, "told twice");
        op_t *told = op;
        op = op->next;
        told->next = NULL;
        ops_free(told);
    }
    pool_return_done(pool, op); /* as when memory lacks */
}

static void *reap(void *argument) {
    uint64_t state = (uint64_t)(uintptr_t)argument;
    while (!atomic_load(&ending)) {
        eventfd_t count;
        if (poll(&(struct pollfd){event_fd, POLLIN, 0}, 1, 5) == 1)
            eventfd_read(event_fd, &count);
        pthread_mutex_lock(&registry_lock);
        for (size_t i = 0; i < sizeof registry / sizeof *registry; i++)
            if (registry[i])
                take(registry[i], &state);
        pthread_mutex_unlock(&registry_lock);
    }
    return NULL;
}

static op_t *op_of(driver_t *driver, item_t *item) {
    op_t *op = calloc(1, sizeof *op);
    CHECK(op, "no memory");
    *op = (op_t){.ticket = (uint64_t)(uintptr_t)item,
                 .fd = driver->number,
                 .write = item->write,
                 .address = item->memory,
                 .room = item->padded,
                 .length = item->length,
                 .padded = item->padded,
                 .offset = item->offset,
                 .max_io = BLOCK << below(&driver->random, 4),
                 .align = BLOCK};
    return op;
}

/* Make an operation one that must be refused; returns how. */
static int spoil(driver_t *driver, op_t *op) {
    switch (below(&driver->random, 14)) {
    case 0:
        return op->room = op->padded - 1, REFUSED_MEMORY;
    case 1:
        return op->room = UINT64_MAX, REFUSED_MEMORY;
    case 2:
        return op->length = UINT64_MAX, REFUSED_MEMORY;
    case 3:
        return op->length = 0, REFUSED_MEMORY;
    case 4:
        return op->address = NULL, REFUSED_MEMORY;
    case 5:
        return op->offset = -BLOCK, REFUSED_MEMBER;
    case 6:
        return op->offset = DEVICE_BYTES, REFUSED_MEMBER;
    case 7:
        return op->offset = INT64_MAX - (BLOCK - 1), REFUSED_MEMBER;
    case 8:
        return op->offset += 1, REFUSED_ALIGNMENT;
    case 9:
        return op->address += 8, REFUSED_ALIGNMENT;
    case 10:
        return op->align = 0, REFUSED_ALIGNMENT;
    case 11:
        return op->max_io = 0, REFUSED_ALIGNMENT;
    case 12:
        return op->padded = 0, REFUSED_ALIGNMENT;
    default:
        return op->fd = -1, EBADF;
    }
}

static item_t *new_item(driver_t *driver) {
    uint64_t *random = &driver->random;
    item_t *item = &driver->items[driver->used++];
    size_t blocks = 1 + below(random, MOST_BLOCKS);
    item->padded = blocks * BLOCK;
    item->length = item->padded - below(random, BLOCK);
    item->offset = (int64_t)below(random, (uint32_t)(DEVICE_BYTES / BLOCK - blocks + 1)) * BLOCK;
    item->memory = aligned_alloc(BLOCK, item->padded);
    CHECK(item->memory, "no memory");
    memset(item->memory, 0xa5, item->padded);
    item->pool = driver->pools[below(random, POOLS)];
    item->op = op_of(driver, item);
    if (below(random, 12) == 0)
        item->refusal = spoil(driver, item->op);
    return item;
}

static void submit_single(driver_t *driver) {
    item_t *item = new_item(driver);
    if (below(&driver->random, 3) == 0) {
        item->write = item->op->write = 1;
        fill(driver->number, item->memory, item->padded, item->offset);
    }
    pool_enqueue(item->pool, item->op);
    pool_wake(item->pool);
}

static uint64_t right_checksum(driver_t *driver, const item_t *item) {
    char right[MOST_BLOCKS * BLOCK];
    uint64_t state;
    fill(driver->number, right, item->length, item->offset);
    faults_hash_reset(&state);
    faults_hash_update(&state, right, item->length);
    return faults_hash_digest(&state);
}

static batch_t *submit_batch(driver_t *driver) {
    batch_t *batch = batch_new(BATCH_READS);
    CHECK(batch, "no memory");
    item_t *first = &driver->items[driver->used];
    for (size_t i = 0; i < BATCH_READS; i++) {
        item_t *item = new_item(driver);
        item->op->expected = right_checksum(driver, item);
        batch_join(batch, item->op, i);
    }
    for (size_t p = 0; p < POOLS; p++) {
        op_t *chain = NULL, **end = &chain;
        for (size_t i = 0; i < BATCH_READS; i++)
            if (first[i].pool == driver->pools[p]) {
                *end = first[i].op;
                end = &first[i].op->next;
            }
        pool_enqueue(driver->pools[p], chain);
    }
    for (size_t p = 0; p < POOLS; p++)
        pool_wake(driver->pools[p]);
    return batch;
}

/* In the child each call must return, whatever the threads of the parent held. */
static void fork_once(driver_t *driver) {
    pthread_mutex_lock(&driver->batches[0]->lock); /* as a thread might */
    pid_t child = fork();
    CHECK(child >= 0, "no process");
    if (child == 0) {
        char good[BATCH_READS];
        for (size_t p = 0; p < POOLS; p++) {
            pool_wake(driver->pools[p]);
            CHECK(pool_cancel(driver->pools[p], 0), "a child has threads");
            CHECK(!pool_take_done(driver->pools[p]), "a child is told");
            pool_stop(driver->pools[p]);
            pool_release(driver->pools[p]);
        }
        for (size_t b = 0; b < BATCHES; b++) {
            batch_watch(driver->batches[b], good);
            batch_leave(driver->batches[b]);
        }
        _exit(0);
    }
    pthread_mutex_unlock(&driver->batches[0]->lock);
    int status = 1;
    for (int ms = 0; waitpid(child, &status, WNOHANG) == 0; ms++) {
        CHECK(ms < PATIENCE_MS, "a child hangs");
        pause_ms(1);
    }
    CHECK(status == 0, "a child ended with %d", status);
}

static void cancel_some(driver_t *driver, uint32_t one_in) {
    for (size_t i = 0; i < driver->used; i++) {
        item_t *item = &driver->items[i];
        if (!item->cancelled && below(&driver->random, one_in) == 0)
            item->cancelled = pool_cancel(item->pool, (uint64_t)(uintptr_t)item);
    }
}

static pool_t *open_one(driver_t *driver) {
    int threads = 1 + (int)below(&driver->random, 5);
    uint64_t budget = BLOCK << below(&driver->random, 6);
    if (below(&driver->random, 4) == 0) {
        faults_fail_at(1 + (long)below(&driver->random, 12));
        pool_t *pool = pool_open(threads, budget, event_fd, DEVICE_BYTES, &HASHER);
        CHECK((pool == NULL) == faults_struck(), "what failed was not told");
        faults_fail_at(0);
        if (pool)
            return pool;
    }
    pool_t *pool = pool_open(threads, budget, event_fd, DEVICE_BYTES, &HASHER);
    CHECK(pool, "no pool");
    return pool;
}

/* Whether an operation has come back, by whichever way. */
static int is_over(const item_t *item) {
    return item->cancelled || item->good || atomic_load(&item->told);
}

static void learn_from_batches(driver_t *driver) {
    for (size_t b = 0; b < BATCHES; b++) {
        char good[BATCH_READS];
        item_t *first = driver->reads[b];
        batch_watch(driver->batches[b], good);
        for (size_t i = 0; i < BATCH_READS; i++)
            first[i].good = good[i];
    }
}

static void wait_for_all(driver_t *driver) {
    for (int ms = 0;; ms++) {
        size_t over = 0;
        while (over < driver->used && is_over(&driver->items[over]))
            over++;
        if (over == driver->used)
            return;
        CHECK(ms < PATIENCE_MS, "operation %zu never came back", over);
        if (ms == 5)
            learn_from_batches(driver);
        pause_ms(1);
    }
}

static void check_item(driver_t *driver, const item_t *item) {
    if (!atomic_load(&item->told)) {
        CHECK(!item->refusal, "a refused operation was not told");
        return;
    }
    if (item->refusal) {
        CHECK(item->error == item->refusal, "%d is not %d", item->error, item->refusal);
        for (size_t i = 0; i < item->padded && !item->write; i++)
            CHECK((unsigned char)item->memory[i] == 0xa5, "a refused operation was made");
    } else if (item->error == 0) {
        CHECK(item->checksum == right_checksum(driver, item), "a wrong checksum");
    } else {
        CHECK(item->error == EIO || item->error == EAGAIN || item->error == ENODEV ||
                  item->error == ECANCELED,
              "error %d", item->error);
    }
}

static void check_all(driver_t *driver) {
    char right[MOST_BLOCKS * BLOCK];
    for (size_t i = 0; i < driver->used; i++) {
        item_t *item = &driver->items[i];
        check_item(driver, item);
        CHECK(!item->cancelled || !item->good, "cancelled and good");
        if (item->good || (atomic_load(&item->told) && item->error == 0)) {
            fill(driver->number, right, item->padded, item->offset);
            CHECK(!memcmp(item->memory, right, item->padded), "wrong bytes");
        }
        (free)(item->memory);
    }
}

static void one_round(driver_t *driver) {
    uint64_t *random = &driver->random;
    memset(driver->items, 0, ITEMS * sizeof *driver->items);
    driver->used = 0;
    for (size_t p = 0; p < POOLS; p++) {
        driver->stopped[p] = 0;
        enrol(NULL, driver->pools[p] = open_one(driver));
    }
    atomic_store(&hangs[driver->number], below(random, 2) == 0);
    for (size_t i = 0; i < SINGLES / 2; i++)
        submit_single(driver);
    for (size_t b = 0; b < BATCHES; b++) {
        driver->reads[b] = &driver->items[driver->used];
        driver->batches[b] = submit_batch(driver);
    }
    if (below(random, 8) == 0)
        fork_once(driver);
    if (below(random, 2) == 0)
        cancel_some(driver, 1 + below(random, 3));
    for (size_t i = 0; i < SINGLES / 2; i++)
        submit_single(driver);
    for (size_t p = 0; p < POOLS; p++)
        if ((driver->stopped[p] = below(random, 4) == 0))
            pool_stop(driver->pools[p]);
    if (below(random, 2) == 0)
        learn_from_batches(driver);
    atomic_store(&hangs[driver->number], 0);
    for (size_t i = 0; i < driver->used; i++) { /* what no thread has taken, none will */
        item_t *item = &driver->items[i];
        for (size_t p = 0; p < POOLS; p++)
            if (item->pool == driver->pools[p] && driver->stopped[p] && !is_over(item))
                item->cancelled = pool_cancel(item->pool, (uint64_t)(uintptr_t)item);
    }
    wait_for_all(driver);
    for (size_t p = 0; p < POOLS; p++) {
        enrol(driver->pools[p], NULL);
        pool_release(driver->pools[p]);
    }
    for (size_t b = 0; b < BATCHES; b++)
        batch_leave(driver->batches[b]);
    check_all(driver);
}

static long rounds;

static void *drive(void *argument) {
    driver_t *driver = argument;
    for (long i = 0; i < rounds; i++)
        one_round(driver);
    return NULL;
}

static void wait_for_live(long most) {
    for (int ms = 0; faults_live() > most; ms++) {
        CHECK(ms < PATIENCE_MS, "%ld allocations are left", faults_live());
        pause_ms(1);
    }
    CHECK(faults_live() == most, "%ld allocations, not %ld", faults_live(), most);
}

/* Calls that hang hold all threads and all of the budget of a pool: it is left behind, with a
 * queue, and another one does the work on the same descriptor. */
static void leave_behind(uint64_t seed) {
    long before = faults_live();
    driver_t driver = {.number = DRIVERS, .random = seed};
    item_t hung[6] = {0};
    pool_t *old = pool_open(2, 2 * BLOCK, event_fd, DEVICE_BYTES, &HASHER);
    pool_t *fresh = pool_open(2, 2 * BLOCK, event_fd, DEVICE_BYTES, &HASHER);
    CHECK(old && fresh, "no pools");
    enrol(NULL, fresh);
    atomic_store(&hangs[DRIVERS], 1);
    for (size_t i = 0; i < 6; i++) {
        hung[i] = (item_t){.length = BLOCK, .padded = BLOCK, .offset = 1 << 16};
        hung[i].memory = aligned_alloc(BLOCK, BLOCK);
        pool_enqueue(old, op_of(&driver, &hung[i]));
        pool_wake(old);
    }
    while (atomic_load(&hanging) < 2)
        pause_ms(1);
    for (int i = 0; i < 20; i++) {
        item_t item = {.length = BLOCK, .padded = BLOCK, .memory = aligned_alloc(BLOCK, BLOCK)};
        pool_enqueue(fresh, op_of(&driver, &item));
        pool_wake(fresh);
        for (int ms = 0; !atomic_load(&item.told); ms++) {
            CHECK(ms < PATIENCE_MS, "the fresh pool waits for the old one");
            pause_ms(1);
        }
        (free)(item.memory);
    }
    pool_release(old); /* which nobody hears of any more */
    enrol(fresh, NULL);
    pool_release(fresh);
    CHECK(faults_live() > before, "the old pool went before its calls");
    atomic_store(&hangs[DRIVERS], 0);
    wait_for_live(before);
    for (size_t i = 0; i < 6; i++)
        (free)(hung[i].memory);
}

int main(int count, char **arguments) {
    CHECK(count == 3, "usage: stress SEED ROUNDS");
    uint64_t seed = strtoull(arguments[1], NULL, 10);
    rounds = strtol(arguments[2], NULL, 10);
    event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    static item_t items[DRIVERS][ITEMS];
    driver_t drivers[DRIVERS];
    pthread_t threads[DRIVERS], reaper;
    (pthread_create)(&reaper, NULL, reap, (void *)(uintptr_t)seed);
    for (int i = 0; i < DRIVERS; i++) {
        drivers[i] =
            (driver_t){.number = i, .random = mixed(seed + (uint64_t)i), .items = items[i]};
        (pthread_create)(&threads[i], NULL, drive, &drivers[i]);
    }
    for (int i = 0; i < DRIVERS; i++)
        pthread_join(threads[i], NULL);
    wait_for_live(0);
    for (long i = 0; i < 1 + rounds / 20; i++)
        leave_behind(seed + (uint64_t)i);
    atomic_store(&ending, 1);
    pthread_join(reaper, NULL);
    printf("%ld rounds of %d drivers, %lu calls of the device\n", rounds, DRIVERS,
           (unsigned long)atomic_load(&calls));
    return 0;
}
