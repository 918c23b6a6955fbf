/* One planted fault each that a sanitizer must find: a run without a report means something only
 * if these are reported. They use the pools in ways that _pool.h forbids. */
#include "../../src/fx100_lmcache/engine/_pool.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BLOCK = 4096 };

static const hasher_t HASHER = {faults_hash_create, faults_hash_destroy, faults_hash_reset,
                                faults_hash_update, faults_hash_digest};

static char content[2 * BLOCK]; /* of the device */
static atomic_int served;       /* relaxed: who sees it knows of nothing else */

ssize_t device_pread(int fd, void *memory, size_t length, off_t offset) {
    (void)fd;
    memcpy(memory, content + offset, length);
    atomic_store_explicit(&served, 1, memory_order_relaxed);
    return (ssize_t)length;
}

ssize_t device_pwrite(int fd, const void *memory, size_t length, off_t offset) {
    (void)fd;
    memcpy(content + offset, memory, length);
    return (ssize_t)length;
}

static op_t *read_into(char *memory, size_t room) {
    op_t *op = calloc(1, sizeof *op);
    *op = (op_t){.address = memory,
                 .room = room,
                 .length = room,
                 .padded = room,
                 .max_io = BLOCK,
                 .align = 512};
    return op;
}

static pool_t *opened(void) { return pool_open(1, BLOCK, eventfd(0, 0), sizeof content, &HASHER); }

/* Start on what is queued and wait for the end of it. */
static void complete(pool_t *pool) {
    pool_wake(pool);
    while (!pool_take_done(pool))
        usleep(1000);
}

static char *memory(size_t bytes) { return aligned_alloc(BLOCK, bytes); }

/* A pool reads into memory that is smaller than the room it is told of. */
static void overflow(void) {
    pool_t *pool = opened();
    pool_enqueue(pool, read_into(memory(BLOCK), 2 * BLOCK));
    complete(pool);
}

/* Memory is given back while an operation is queued. */
static void use_after_free(void) {
    char *buffer = memory(BLOCK);
    pool_t *pool = opened();
    pool_enqueue(pool, read_into(buffer, BLOCK));
    (free)(buffer);
    complete(pool);
}

/* Memory is used again before its operation has come back. */
static void race(void) {
    char *buffer = memory(BLOCK);
    pool_t *pool = opened();
    pool_enqueue(pool, read_into(buffer, BLOCK));
    pool_wake(pool);
    while (!atomic_load_explicit(&served, memory_order_relaxed))
        usleep(1000); /* then it is there, but nobody said so */
    memset(buffer, 1, BLOCK);
}

/* An operation does not lie where its type may. */
static void misaligned(void) {
    char *place = memory(BLOCK);
    op_t *op = read_into(memory(BLOCK), BLOCK);
    memcpy(place + 1, op, sizeof *op);
    pool_enqueue(opened(), (op_t *)(void *)(place + 1));
}

static int overflowing_update(void *state, const void *bytes, size_t length) {
    (void)bytes;
    *(int *)state = 0x7fffffff;
    return *(int *)state += (int)length;
}

/* A hash counts beyond what its type holds. */
static void signed_overflow(void) {
    hasher_t broken = HASHER;
    broken.update = overflowing_update;
    pool_t *pool = pool_open(1, BLOCK, eventfd(0, 0), sizeof content, &broken);
    pool_enqueue(pool, read_into(memory(BLOCK), BLOCK));
    complete(pool);
}

/* A batch whose Python object is forgotten. No sanitizer: what the tests count. */
static int leak(void) {
    batch_new(3);
    if (faults_live())
        fprintf(stderr, "%ld allocations left\n", faults_live());
    return faults_live() != 0;
}

/* Returns 0 if nothing was found. */
int plant(const char *fault) {
    static const struct {
        const char *name;
        void (*commit)(void);
    } FAULTS[] = {{"overflow", overflow},
                  {"use_after_free", use_after_free},
                  {"race", race},
                  {"misaligned", misaligned},
                  {"signed_overflow", signed_overflow}};
    for (size_t i = 0; i < sizeof FAULTS / sizeof *FAULTS; i++)
        if (!strcmp(fault, FAULTS[i].name))
            FAULTS[i].commit();
    return strcmp(fault, "leak") ? 0 : leak();
}

int main(int count, char **arguments) { return count == 2 ? plant(arguments[1]) : 2; }
