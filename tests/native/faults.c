#include "faults.h"

#include <errno.h>
#include <stdatomic.h>

static _Thread_local long left; /* requests up to the one that fails; 0: none fails */
static _Thread_local int struck;
static atomic_long live;

void faults_fail_at(long n) {
    left = n;
    struck = 0;
}

int faults_struck(void) { return struck; }

long faults_live(void) { return atomic_load(&live); }

int faults_strike(void) {
    if (!left || --left)
        return 0;
    struck = 1;
    errno = ENOMEM;
    return 1;
}

void *faults_calloc(size_t count, size_t size) {
    void *memory = faults_strike() ? NULL : (calloc)(count, size);
    if (memory)
        atomic_fetch_add(&live, 1);
    return memory;
}

void faults_free(void *memory) {
    if (memory)
        atomic_fetch_sub(&live, 1);
    (free)(memory);
}

int faults_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *),
                          void *argument) {
    return faults_strike() ? EAGAIN : (pthread_create)(thread, how, run, argument);
}

void *faults_hash_create(void) { return faults_calloc(1, sizeof(uint64_t)); }

int faults_hash_destroy(void *state) {
    faults_free(state);
    return 0;
}

int faults_hash_reset(void *state) {
    *(uint64_t *)state = 14695981039346656037u; /* FNV-1a */
    return 0;
}

int faults_hash_update(void *state, const void *bytes, size_t length) {
    uint64_t hash = *(uint64_t *)state;
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    *(uint64_t *)state = hash;
    return 0;
}

uint64_t faults_hash_digest(const void *state) { return *(const uint64_t *)state; }
