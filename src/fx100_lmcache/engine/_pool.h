/* Threads that move pieces between members and memory, and hash them. No Python in here.
 *
 * A pool is a queue and some threads. Each thread takes an operation, reads (or writes) it in
 * calls of at most max_io bytes, hashes what it moved while that is still in the CPU's cache, and
 * puts the outcome on a list. An eventfd tells Python that the list is not empty. Policy
 * (deadlines, retries, health) stays in Python.
 *
 * Threads are for waiting. Where the device is as fast as memory (a tmpfs, the page cache) nothing
 * waits, and many threads only take the CPU from each other: on two cores 64 of them loaded
 * sessions at 6.4 GB/s, 8 at 10.0. So a pool that sees its calls return without having slept keeps
 * two threads at work, until calls sleep again, and moves 512 KiB at a time (8 MB objects: 0.93 of
 * the bandwidth of LMCache's unchecked reads, against 0.88 with 1 MiB).
 *
 * Where calls do wait, depth costs as well: requests overtake each other, and the first session of
 * eight comes as late as the last (64 MiB in flight on one disk: median 206 ms, 16 MiB: 152). So a pool may have a budget of bytes that the kernel has at a time; threads past it wait.
 *
 * Reads may be submitted as a batch over several pools. While all goes well Python hears of the
 * last one only; of one that fails, or does not hash to what it must, it hears at once. After
 * batch_watch it hears of each.
 */
#ifndef FX100_POOL_H
#define FX100_POOL_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* xxh3-64's streaming functions. */
typedef struct {
    void *(*create)(void);
    int (*destroy)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
} hasher_t;

extern hasher_t pool_hasher;

typedef struct {
    pthread_mutex_t lock;
    size_t count, left; /* reads in all; those that have not ended */
    int watched;        /* Python wants to hear of each */
    int users;          /* reads and the Python object; the last one frees the batch */
    unsigned char good[]; /* one for each read: it ended well */
} batch_t;

typedef struct op {
    struct op *next;
    batch_t *batch; /* or NULL */
    size_t index;   /* in the batch */
    uint64_t expected;
    uint64_t ticket;
    int fd;
    int write;
    char *address;
    size_t length; /* bytes that count */
    size_t padded; /* bytes that are moved: length, rounded up to align */
    int64_t offset;
    size_t max_io;
    size_t align;
    int error; /* errno, 0 when it went well */
    uint64_t checksum;
} op_t;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t ready;
    op_t *head, **tail; /* queued */
    op_t *done;         /* finished, newest first */
    int closing;
    int threads;
    int idle;  /* threads that wait and have not been called */
    int calls; /* threads called that have not woken up yet */
    int quick; /* how much of late was moved without waiting for a device; see count_wait */
    size_t budget;    /* bytes that the kernel may have at a time; one call is always made */
    size_t in_flight; /* and has */
    int event_fd;
    int users; /* threads and the Python object; the last one frees the pool */
} pool_t;

/* Returns NULL with errno set. */
pool_t *pool_open(int threads, size_t budget, int event_fd);

/* Stop the threads; one that the kernel holds ends when it returns. */
void pool_stop(pool_t *pool);

/* The Python object is gone: the pool goes with its last thread. */
void pool_release(pool_t *pool);

/* Queue a chain of operations, ending at *last; pool_wake starts on them. */
void pool_enqueue(pool_t *pool, op_t *first, op_t **last);
void pool_wake(pool_t *pool);

/* Take an operation back; NULL if it is not in the queue any more. */
op_t *pool_cancel(pool_t *pool, uint64_t ticket);

/* Take the chain of all that has ended and is to be heard of, oldest first: what came after a
 * failure says whether the member works again. */
op_t *pool_take_done(pool_t *pool);

/* Give what could not be told back, in the order it was taken: the next take has it again. */
void pool_return_done(pool_t *pool, op_t *oldest);

/* Free a chain. */
void ops_free(op_t *first);

batch_t *batch_new(size_t count);
void batch_leave(batch_t *batch);

/* Hear of each operation from now on; copies out which have ended well before. */
void batch_watch(batch_t *batch, char *good);

#endif
