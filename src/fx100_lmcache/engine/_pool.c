#define _GNU_SOURCE /* RUSAGE_THREAD */
#include "_pool.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

typedef struct {
    pool_t *pool;
    void *state; /* of the hasher */
    pthread_t thread;
} worker_t;

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t ready;
    op_t *head, **tail;      /* queued */
    op_t *done, **done_tail; /* ended, oldest first */
    atomic_int closing;      /* set under the lock */
    int threads;
    int idle;        /* threads that wait and have not been called */
    int calls;       /* threads called that have not woken up yet */
    int quick;       /* how much of late was moved without waiting for a device; see count_wait */
    uint64_t budget; /* bytes that the kernel may have at a time; one call is always made */
    uint64_t in_flight; /* and has */
    uint64_t member_bytes;
    int event_fd;
    pid_t owner;         /* the process that made it */
    atomic_size_t users; /* threads and the Python object; the last one frees the pool */
    hasher_t hasher;
    worker_t workers[];
};

enum {
    FEW_THREADS = 2,
    QUICK = 8,
    MOST_QUICK = 32,
    SLEPT = 2,
    QUICK_IO_BYTES = 512 * 1024,
    MOST_ALIGN_BYTES = 64 * 1024,
    MOST_INTERRUPTIONS = 100, /* of one call, before it counts as failed */
};

int pool_is_inherited(const pool_t *pool) { return pool->owner != getpid(); }

/* Batches. */

batch_t *batch_new(size_t count) {
    if (count < 1 || count > BATCH_MAX_READS) {
        errno = EINVAL;
        return NULL;
    }
    batch_t *batch = calloc(1, sizeof *batch + count);
    if (!batch)
        return NULL;
    pthread_mutex_init(&batch->lock, NULL);
    batch->count = batch->left = count;
    batch->owner = getpid();
    atomic_init(&batch->users, 1);
    return batch;
}

void batch_join(batch_t *batch, op_t *op, size_t index) {
    atomic_fetch_add(&batch->users, 1);
    op->batch = batch;
    op->index = index;
}

static void drop_batch_user(batch_t *batch) {
    if (atomic_fetch_sub(&batch->users, 1) > 1)
        return;
    pthread_mutex_destroy(&batch->lock);
    free(batch);
}

void batch_leave(batch_t *batch) {
    if (batch->owner == getpid())
        drop_batch_user(batch);
}

void batch_watch(batch_t *batch, char *good) {
    int alone = batch->owner != getpid(); /* and the lock may be held for ever */
    if (!alone)
        pthread_mutex_lock(&batch->lock);
    batch->watched = 1;
    memcpy(good, batch->good, batch->count);
    if (!alone)
        pthread_mutex_unlock(&batch->lock);
}

void ops_free(op_t *first) {
    while (first) {
        op_t *next = first->next;
        if (first->batch)
            drop_batch_user(first->batch);
        free(first);
        first = next;
    }
}

/* Count an operation as ended; returns whether Python must hear of it. */
static int end_op(op_t *op) {
    batch_t *batch = op->batch;
    if (!batch)
        return 1;
    int good = !op->error && op->checksum == op->expected;
    pthread_mutex_lock(&batch->lock);
    batch->good[op->index] = (unsigned char)good;
    batch->left--;
    int told = !good || batch->watched || !batch->left;
    pthread_mutex_unlock(&batch->lock);
    return told;
}

/* One operation. */

/* Whether the sizes of an operation are whole blocks, and go together. */
static int is_aligned(const op_t *op) {
    uint64_t align = op->align;
    if (align < 1 || align > MOST_ALIGN_BYTES || (align & (align - 1)))
        return 0;
    uint64_t parts = (uint64_t)(uintptr_t)op->address | op->padded | op->max_io;
    if ((parts | (uint64_t)op->offset) & (align - 1))
        return 0;
    int has_calls = op->max_io >= 1 && op->max_io <= INT64_MAX;
    return has_calls && op->length <= op->padded && op->padded - op->length < align;
}

/* Why no call is made for an operation; 0 if one may. Nothing in here can overflow. */
static int refusal(const pool_t *pool, const op_t *op) {
    if (op->fd < 0)
        return EBADF;
    if (op->length < 1 || op->length > op->room || op->room > INT64_MAX)
        return REFUSED_MEMORY;
    if (!is_aligned(op))
        return REFUSED_ALIGNMENT;
    if (!op->address || op->padded > op->room || op->padded > UINTPTR_MAX - (uintptr_t)op->address)
        return REFUSED_MEMORY;
    if (op->offset < 0 || op->padded > pool->member_bytes ||
        (uint64_t)op->offset > pool->member_bytes - op->padded)
        return REFUSED_MEMBER;
    return 0;
}

/* Make one call; returns how much it moved, in whole blocks, or a negative errno. */
static int64_t call(const pool_t *pool, const op_t *op, uint64_t done, uint64_t asked) {
    off_t at = (off_t)(op->offset + (int64_t)done);
    for (int interruptions = 0;; interruptions++) {
        if (atomic_load_explicit(&pool->closing, memory_order_relaxed))
            return -ECANCELED;
        ssize_t moved = op->write ? pwrite(op->fd, op->address + done, asked, at)
                                  : pread(op->fd, op->address + done, asked, at);
        if (moved < 0 && errno == EINTR && interruptions < MOST_INTERRUPTIONS)
            continue;
        if (moved < 0)
            return -errno;
        if ((uint64_t)moved == asked)
            return moved;
        moved -= moved % (ssize_t)op->align; /* resume on an aligned boundary */
        return moved ? moved : -ENODEV;      /* the device is gone (ENODATA is bad media) */
    }
}

/* Move all of op in calls of at most max_io bytes; returns 0 or an errno. */
static int move(const pool_t *pool, op_t *op, uint64_t max_io, void *state) {
    uint64_t done = 0, hashed = 0;
    pool->hasher.reset(state);
    while (done < op->padded) {
        uint64_t left = op->padded - done, asked = left < max_io ? left : max_io;
        uint64_t end = done + asked < op->length ? done + asked : op->length;
        if (op->write && hashed < end) {
            pool->hasher.update(state, op->address + hashed, end - hashed);
            hashed = end;
        }
        int64_t moved = call(pool, op, done, asked);
        if (moved < 0)
            return (int)-moved;
        done += (uint64_t)moved;
        end = done < op->length ? done : op->length;
        if (!op->write && hashed < end) {
            pool->hasher.update(state, op->address + hashed, end - hashed);
            hashed = end;
        }
    }
    op->checksum = pool->hasher.digest(state);
    return 0;
}

/* The threads of a pool. */

static long sleeps(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_nvcsw;
}

/* Note whether an operation has slept; rare sleeps (a lock, a page fault) do not count. */
static void count_wait(pool_t *pool, int slept) {
    if (!slept && pool->quick < MOST_QUICK)
        pool->quick++;
    else if (slept)
        pool->quick = pool->quick > SLEPT ? pool->quick - SLEPT : 0;
}

static int is_quick(const pool_t *pool) { return pool->quick >= QUICK; }

/* How many more threads would be of use; negative when there are too many. */
static int wanted(const pool_t *pool) {
    int at_work = pool->threads - pool->idle;
    return (is_quick(pool) ? FEW_THREADS : pool->threads) - at_work;
}

/* The largest call: a device wants them large, memory small enough to be hashed out of the CPU's
 * cache. */
static uint64_t largest_call(const pool_t *pool, const op_t *op) {
    return is_quick(pool) && op->max_io > QUICK_IO_BYTES ? QUICK_IO_BYTES : op->max_io;
}

/* Bytes of op that the kernel will have at a time. */
static uint64_t share_of(const pool_t *pool, const op_t *op) {
    uint64_t largest = largest_call(pool, op);
    return op->padded < largest ? op->padded : largest;
}

static int fits(const pool_t *pool, uint64_t in_flight, const op_t *op) {
    return !in_flight || in_flight + share_of(pool, op) <= pool->budget;
}

/* Wake as many threads as are of use, when `coming` others are about to take an operation each. */
static void signal_threads(pool_t *pool, int coming) {
    int more = wanted(pool) < pool->idle ? wanted(pool) : pool->idle;
    uint64_t in_flight = pool->in_flight;
    /* no more threads than there is work for: the others would only meet at the lock */
    for (op_t *op = pool->head; op && more > 0 && fits(pool, in_flight, op); op = op->next) {
        in_flight += share_of(pool, op);
        if (coming) {
            coming--;
            continue;
        }
        more--;
        pool->idle--;
        pool->calls++;
        pthread_cond_signal(&pool->ready);
    }
}

/* Whether a thread had better wait. */
static int nothing_to_do(const pool_t *pool) {
    return !pool->head || wanted(pool) < 0 || !fits(pool, pool->in_flight, pool->head);
}

/* Take an operation out of the queue, or wait for one; NULL when the pool is closing. */
static op_t *next_op(pool_t *pool) {
    while (!pool->closing && nothing_to_do(pool)) {
        pool->idle++;
        while (!pool->calls && !pool->closing)
            pthread_cond_wait(&pool->ready, &pool->lock);
        if (pool->calls)
            pool->calls--;
    }
    if (pool->closing)
        return NULL;
    op_t *op = pool->head;
    pool->head = op->next;
    if (!pool->head)
        pool->tail = &pool->head;
    op->next = NULL;
    return op;
}

/* Put a chain, ending at *end, on the list of what Python is to hear of. */
static void tell(pool_t *pool, op_t *first, op_t **end) {
    int was_empty = pool->done == NULL;
    *pool->done_tail = first;
    pool->done_tail = end;
    /* the event is written under the lock: after close, Python may reuse the descriptor */
    if (was_empty && !pool->closing)
        eventfd_write(pool->event_fd, 1);
}

static void drop_user(pool_t *pool) {
    if (atomic_fetch_sub(&pool->users, 1) > 1)
        return;
    ops_free(pool->head);
    ops_free(pool->done);
    pthread_cond_destroy(&pool->ready);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

static void *work(void *argument) {
    worker_t *worker = argument;
    pool_t *pool = worker->pool;
    pthread_mutex_lock(&pool->lock);
    for (op_t *op; (op = next_op(pool));) {
        uint64_t max_io = largest_call(pool, op), share = share_of(pool, op);
        pool->in_flight += share;
        pthread_mutex_unlock(&pool->lock);

        long before = sleeps();
        op->error = move(pool, op, max_io, worker->state);
        int slept = sleeps() != before;
        int told = end_op(op);
        if (!told)
            ops_free(op);

        pthread_mutex_lock(&pool->lock);
        pool->in_flight -= share;
        count_wait(pool, slept);
        if (slept)
            signal_threads(pool, pool->calls + 1);
        if (told)
            tell(pool, op, &op->next);
    }
    pool->threads--;
    pthread_mutex_unlock(&pool->lock);
    pool->hasher.destroy(worker->state);
    drop_user(pool);
    return NULL;
}

/* Opening and closing. */

/* Signals belong to Python's main thread; a fault of a thread's own must not be lost. */
static void block_signals(sigset_t *before) {
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    sigset_t others;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(&others, own[i]);
    pthread_sigmask(SIG_SETMASK, &others, before);
}

/* Returns 0 or an errno, with nothing left of the thread. */
static int start_worker(pool_t *pool, worker_t *worker) {
    worker->pool = pool;
    worker->state = pool->hasher.create();
    if (!worker->state)
        return ENOMEM;
    atomic_fetch_add(&pool->users, 1);
    pthread_mutex_lock(&pool->lock);
    pool->threads++;
    pthread_mutex_unlock(&pool->lock);
    int failure = pthread_create(&worker->thread, NULL, work, worker);
    if (!failure)
        return 0;
    pool->hasher.destroy(worker->state);
    atomic_fetch_sub(&pool->users, 1);
    return failure;
}

pool_t *pool_open(int threads, uint64_t budget, int event_fd, uint64_t member_bytes,
                  const hasher_t *hasher) {
    if (threads < 1 || threads > POOL_MAX_THREADS || budget > INT64_MAX || event_fd < 0 ||
        member_bytes > INT64_MAX) {
        errno = EINVAL;
        return NULL;
    }
    pool_t *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof(worker_t));
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->ready, NULL);
    pool->tail = &pool->head;
    pool->done_tail = &pool->done;
    pool->event_fd = event_fd;
    pool->budget = budget;
    pool->member_bytes = member_bytes;
    pool->hasher = *hasher;
    pool->owner = getpid();
    atomic_init(&pool->users, 1);
    sigset_t before;
    block_signals(&before);
    int started = 0, failure = 0;
    while (started < threads && !(failure = start_worker(pool, &pool->workers[started])))
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure)
        pool_stop(pool);
    for (int i = 0; i < started; i++)
        if (failure)
            pthread_join(pool->workers[i].thread, NULL); /* it has nothing to do */
        else
            pthread_detach(pool->workers[i].thread); /* it may hang */
    if (!failure)
        return pool;
    drop_user(pool);
    errno = failure;
    return NULL;
}

void pool_stop(pool_t *pool) {
    if (pool_is_inherited(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->ready);
    pthread_mutex_unlock(&pool->lock);
}

void pool_release(pool_t *pool) {
    if (pool_is_inherited(pool))
        return;
    pool_stop(pool);
    drop_user(pool);
}

/* The queue. */

void pool_enqueue(pool_t *pool, op_t *first) {
    op_t *queued = NULL, **queued_end = &queued, *refused = NULL, **refused_end = &refused;
    for (op_t *op = first; op; op = op->next) {
        op->error = refusal(pool, op);
        op_t ***end = op->error ? &refused_end : &queued_end;
        **end = op;
        *end = &op->next;
        if (op->error)
            end_op(op); /* tells of failures at once */
    }
    *queued_end = *refused_end = NULL;
    pthread_mutex_lock(&pool->lock);
    if (queued) {
        *pool->tail = queued;
        pool->tail = queued_end;
    }
    if (refused)
        tell(pool, refused, refused_end);
    pthread_mutex_unlock(&pool->lock);
}

void pool_wake(pool_t *pool) {
    if (pool_is_inherited(pool))
        return;
    pthread_mutex_lock(&pool->lock);
    if (!pool->closing)
        signal_threads(pool, pool->calls);
    pthread_mutex_unlock(&pool->lock);
}

int pool_cancel(pool_t *pool, uint64_t ticket) {
    if (pool_is_inherited(pool))
        return 1;
    op_t *found = NULL;
    pthread_mutex_lock(&pool->lock);
    op_t **at = &pool->head;
    while (*at && (*at)->ticket != ticket)
        at = &(*at)->next;
    if (*at) {
        found = *at;
        *at = found->next;
        if (!*at)
            pool->tail = at;
        found->next = NULL;
    }
    pthread_mutex_unlock(&pool->lock);
    ops_free(found);
    return found != NULL;
}

op_t *pool_take_done(pool_t *pool) {
    if (pool_is_inherited(pool))
        return NULL;
    pthread_mutex_lock(&pool->lock);
    op_t *oldest = pool->done;
    pool->done = NULL;
    pool->done_tail = &pool->done;
    pthread_mutex_unlock(&pool->lock);
    return oldest;
}

void pool_return_done(pool_t *pool, op_t *first) {
    if (!first)
        return;
    op_t **end = &first->next;
    while (*end)
        end = &(*end)->next;
    pthread_mutex_lock(&pool->lock);
    *end = pool->done;
    if (!pool->done)
        pool->done_tail = end;
    pool->done = first;
    pthread_mutex_unlock(&pool->lock);
}
