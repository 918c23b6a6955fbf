/* Threads that move pieces between members and memory, and hash them. No Python in here.
 *
 * A pool is a queue and some threads. Each thread takes an operation, reads (or writes) it in
 * calls of at most max_io bytes, hashes what it moved while that is still in the CPU's cache, and
 * puts the outcome on a list. An eventfd tells Python that the list is not empty. Policy
 * (deadlines, retries, health) stays in Python.
 *
 * Threads are for waiting. Where the device is as fast as memory nothing waits, and many threads
 * only take the CPU from each other: a pool that sees its calls return without having slept keeps
 * two threads at work, in smaller calls, until calls sleep again. Where calls do wait, requests
 * overtake each other the more of them there are: a pool may have a budget of bytes that the
 * kernel has at a time; threads past it wait. Figures: docs/performance.md, "Native pools".
 *
 * Reads may be submitted as a batch over several pools. While all goes well Python hears of the
 * last one only; of one that fails, or does not hash to what it must, it hears at once. After
 * batch_watch it hears of each.
 *
 * Bounds. No system call is made for an operation that leaves its memory (address, room) or the
 * member (bytes, given to pool_open), or is not aligned: it ends at once, with a refusal_t as its
 * error, which is a fault of the caller and never of the member. So does one without a descriptor,
 * with EBADF: its member has been closed.
 *
 * Lifetimes. An operation belongs to one place at a time; whoever takes it from there owns it:
 *
 *    pool_enqueue --> queue ----> a thread -----> done list ----> pool_take_done --> ops_free
 *                       |    (in the kernel)          ^                 |
 *                       |          |                  +-----------------+  pool_return_done
 *                       |          +--> freed, if its batch went well and nobody watches
 *                       +--> pool_cancel --> ops_free
 *
 *    pool  <-- Python object (until pool_release)     the last one frees the pool, with what is
 *          <-- each thread (until it ends)            left in its queue and its done list
 *    batch <-- Python object (until batch_leave)      the last one frees the batch
 *          <-- each of its operations (until freed)
 *
 * The memory and the descriptor of an operation are the caller's. They must stay until it has come
 * back from pool_take_done or pool_cancel, or its batch has told so: also after pool_stop and
 * pool_release, which do not wait for a call that hangs. So a pool whose calls hang can be left
 * behind, and another one be opened for the same descriptor: they share nothing.
 *
 * After pool_stop no call begins. What a call was under way for ends with it (ECANCELED if there
 * was more to move); what is queued stays there for pool_cancel.
 *
 * A forked child has no threads, and locks that nobody will give back. There a pool or a batch of
 * the parent is inert (pool_is_inherited): nothing is queued, every operation counts as cancelled,
 * and nothing is freed.
 */
#ifndef FX100_POOL_H
#define FX100_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { POOL_MAX_THREADS = 1024, BATCH_MAX_READS = 1 << 24 };

/* Why no call was made; negative, since an errno is not. */
typedef enum {
    REFUSED_MEMORY = -1,    /* it would leave the memory it was given */
    REFUSED_MEMBER = -2,    /* it would leave the member */
    REFUSED_ALIGNMENT = -3, /* address, offset or a size is not made of whole blocks */
} refusal_t;

/* xxh3-64's streaming functions. */
typedef struct {
    void *(*create)(void);
    int (*destroy)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
} hasher_t;

typedef struct {
    pthread_mutex_t lock;
    size_t count, left;   /* reads in all; those that have not ended */
    int watched;          /* Python wants to hear of each */
    atomic_size_t users;  /* reads and the Python object; the last one frees the batch */
    pid_t owner;          /* the process that made it */
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
    uint64_t room;   /* bytes at address that are the operation's */
    uint64_t length; /* bytes that count */
    uint64_t padded; /* bytes that are moved: length, rounded up to align */
    int64_t offset;
    uint64_t max_io;
    uint64_t align; /* a power of two */
    int error;      /* 0 when it went well, an errno, or a refusal_t */
    uint64_t checksum;
} op_t;

typedef struct pool pool_t;

/* threads: 1 to POOL_MAX_THREADS. Returns NULL, with errno set and nothing left behind. */
pool_t *pool_open(int threads, uint64_t budget, int event_fd, uint64_t member_bytes,
                  const hasher_t *hasher);

/* Whether the pool is a copy that fork made. */
int pool_is_inherited(const pool_t *pool);

/* Stop the threads; one that the kernel holds ends when its call returns. */
void pool_stop(pool_t *pool);

/* The Python object is gone: stop, and let the pool go with its last thread. */
void pool_release(pool_t *pool);

/* Queue a chain of operations, or refuse them; pool_wake starts on them. Not for an inherited
 * pool. */
void pool_enqueue(pool_t *pool, op_t *first);
void pool_wake(pool_t *pool);

/* Take an operation back; false if it is not in the queue any more. */
int pool_cancel(pool_t *pool, uint64_t ticket);

/* Take the chain of all that has ended and is to be heard of, oldest first: what came after a
 * failure says whether the member works again. */
op_t *pool_take_done(pool_t *pool);

/* Give the rest of such a chain back, for the next call. No event is sent for it. */
void pool_return_done(pool_t *pool, op_t *first);

/* Free a chain. */
void ops_free(op_t *first);

/* count: 1 to BATCH_MAX_READS. Returns NULL with errno set. */
batch_t *batch_new(size_t count);

/* Make an operation the next user of a batch that no pool knows yet. */
void batch_join(batch_t *batch, op_t *op, size_t index);

/* The Python object is gone. */
void batch_leave(batch_t *batch);

/* Hear of each operation from now on; copies out which have ended well before. */
void batch_watch(batch_t *batch, char *good);

#endif
