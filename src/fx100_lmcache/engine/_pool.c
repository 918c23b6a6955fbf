#define _GNU_SOURCE /* RUSAGE_THREAD */
#include "_pool.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

hasher_t pool_hasher;

batch_t *batch_new(size_t count) {
    batch_t *batch = calloc(1, sizeof *batch + count);
    if (!batch)
        return NULL;
    pthread_mutex_init(&batch->lock, NULL);
    batch->count = batch->left = count;
    batch->users = 1;
    return batch;
}

void batch_leave(batch_t *batch) {
    pthread_mutex_lock(&batch->lock);
    int left = --batch->users;
    pthread_mutex_unlock(&batch->lock);
    if (left)
        return;
    pthread_mutex_destroy(&batch->lock);
    free(batch);
}

void batch_watch(batch_t *batch, char *good) {
    pthread_mutex_lock(&batch->lock);
    batch->watched = 1;
    memcpy(good, batch->good, batch->count);
    pthread_mutex_unlock(&batch->lock);
}

static void free_op(op_t *op) {
    if (op && op->batch)
        batch_leave(op->batch);
    free(op);
}

void ops_free(op_t *first) {
    while (first) {
        op_t *next = first->next;
        free_op(first);
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
    batch->good[op->index] = good;
    batch->left--;
    int told = !good || batch->watched || !batch->left;
    pthread_mutex_unlock(&batch->lock);
    return told;
}

void pool_release(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    int left = --pool->users;
    pthread_mutex_unlock(&pool->lock);
    if (left)
        return;
    ops_free(pool->head);
    ops_free(pool->done);
    pthread_cond_destroy(&pool->ready);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Move all of op in calls of at most max_io bytes; returns 0 or an errno. */
static int move(op_t *op, size_t max_io, void *state) {
    size_t done = 0;
    size_t hashed = 0;
    pool_hasher.reset(state);
    while (done < op->padded) {
        size_t asked = op->padded - done < max_io ? op->padded - done : max_io;
        if (op->write && hashed < done + asked && hashed < op->length) {
            size_t end = done + asked < op->length ? done + asked : op->length;
            pool_hasher.update(state, op->address + hashed, end - hashed);
            hashed = end;
        }
        ssize_t moved = op->write
                            ? pwrite(op->fd, op->address + done, asked, op->offset + done)
                            : pread(op->fd, op->address + done, asked, op->offset + done);
        if (moved < 0) {
            if (errno == EINTR)
                continue;
            return errno;
        }
        if ((size_t)moved != asked) {
            moved -= moved % op->align; /* resume on an aligned boundary */
            if (moved == 0)
                return ENODEV; /* nothing moved: the device is gone (ENODATA is bad media) */
        }
        done += moved;
        if (!op->write && hashed < op->length) {
            size_t end = done < op->length ? done : op->length;
            pool_hasher.update(state, op->address + hashed, end - hashed);
            hashed = end;
        }
    }
    op->checksum = pool_hasher.digest(state);
    return 0;
}

enum { FEW_THREADS = 2, QUICK = 8, MOST_QUICK = 32, SLEPT = 2, QUICK_IO_BYTES = 512 * 1024 };

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

static int is_quick(pool_t *pool) { return pool->quick >= QUICK; }

/* How many more threads would be of use; negative when there are too many. */
static int wanted(pool_t *pool) {
    int at_work = pool->threads - pool->idle;
    return (is_quick(pool) ? FEW_THREADS : pool->threads) - at_work;
}

/* The largest call: a device wants them large, memory small enough to be hashed out of the CPU's
 * cache. */
static size_t largest_call(pool_t *pool, op_t *op) {
    return is_quick(pool) && op->max_io > QUICK_IO_BYTES ? QUICK_IO_BYTES : op->max_io;
}

/* Bytes of op that the kernel will have at a time. */
static size_t share_of(pool_t *pool, op_t *op) {
    size_t largest = largest_call(pool, op);
    return op->padded < largest ? op->padded : largest;
}

static int fits(pool_t *pool, size_t in_flight, op_t *op) {
    return !in_flight || in_flight + share_of(pool, op) <= pool->budget;
}

/* Wake as many threads as are of use, when `coming` others are about to take an operation each. */
static void signal_threads(pool_t *pool, int coming) {
    int more = wanted(pool) < pool->idle ? wanted(pool) : pool->idle;
    size_t in_flight = pool->in_flight;
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
static int nothing_to_do(pool_t *pool) {
    return !pool->head || wanted(pool) < 0 || !fits(pool, pool->in_flight, pool->head);
}

static void *worker(void *argument) {
    pool_t *pool = argument;
    void *state = pool_hasher.create();
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (nothing_to_do(pool) && !pool->closing) {
            pool->idle++;
            while (!pool->calls && !pool->closing)
                pthread_cond_wait(&pool->ready, &pool->lock);
            pool->calls--;
        }
        if (pool->closing)
            break;
        op_t *op = pool->head;
        pool->head = op->next;
        if (!pool->head)
            pool->tail = &pool->head;
        size_t max_io = largest_call(pool, op), share = share_of(pool, op);
        pool->in_flight += share;
        pthread_mutex_unlock(&pool->lock);

        long before = sleeps();
        op->error = state ? move(op, max_io, state) : ENOMEM;
        int slept = sleeps() != before;
        int told = end_op(op);
        if (!told)
            free_op(op);

        pthread_mutex_lock(&pool->lock);
        pool->in_flight -= share;
        count_wait(pool, slept);
        if (slept)
            signal_threads(pool, pool->calls + 1);
        if (!told)
            continue;
        int was_empty = pool->done == NULL;
        op->next = pool->done;
        pool->done = op;
        /* the event is written under the lock: after close, Python may reuse the descriptor */
        if (was_empty && !pool->closing)
            eventfd_write(pool->event_fd, 1);
    }
    pool->threads--;
    pthread_mutex_unlock(&pool->lock);
    if (state)
        pool_hasher.destroy(state);
    pool_release(pool);
    return NULL;
}

void pool_stop(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->ready);
    pthread_mutex_unlock(&pool->lock);
}

pool_t *pool_open(int threads, size_t budget, int event_fd) {
    pool_t *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->ready, NULL);
    pool->tail = &pool->head;
    pool->event_fd = event_fd;
    pool->budget = budget;
    pool->users = 1;
    /* signals belong to Python's main thread */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = 0;
    for (int i = 0; i < threads && !failure; i++) {
        pthread_t thread;
        pthread_mutex_lock(&pool->lock);
        pool->users++;
        pool->threads++;
        pthread_mutex_unlock(&pool->lock);
        failure = pthread_create(&thread, NULL, worker, pool);
        if (failure)
            pool_release(pool);
        else
            pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failure)
        return pool;
    pool_stop(pool);
    pool_release(pool);
    errno = failure;
    return NULL;
}

void pool_enqueue(pool_t *pool, op_t *first, op_t **last) {
    if (!first)
        return;
    pthread_mutex_lock(&pool->lock);
    *pool->tail = first;
    pool->tail = last;
    pthread_mutex_unlock(&pool->lock);
}

void pool_wake(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    signal_threads(pool, pool->calls);
    pthread_mutex_unlock(&pool->lock);
}

op_t *pool_cancel(pool_t *pool, uint64_t ticket) {
    op_t *found = NULL;
    pthread_mutex_lock(&pool->lock);
    for (op_t **at = &pool->head; *at; at = &(*at)->next)
        if ((*at)->ticket == ticket) {
            found = *at;
            *at = found->next;
            if (!*at)
                pool->tail = at;
            break;
        }
    pthread_mutex_unlock(&pool->lock);
    if (found)
        found->next = NULL;
    return found;
}

static op_t *reversed(op_t *first) {
    op_t *last = NULL;
    while (first) {
        op_t *next = first->next;
        first->next = last;
        last = first;
        first = next;
    }
    return last;
}

op_t *pool_take_done(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    op_t *newest = pool->done;
    pool->done = NULL;
    pthread_mutex_unlock(&pool->lock);
    return reversed(newest);
}

void pool_return_done(pool_t *pool, op_t *oldest) {
    op_t *newest = reversed(oldest);
    pthread_mutex_lock(&pool->lock);
    op_t **end = &pool->done; /* behind what has ended since */
    while (*end)
        end = &(*end)->next;
    *end = newest;
    pthread_mutex_unlock(&pool->lock);
}
