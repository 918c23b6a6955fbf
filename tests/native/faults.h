/* Included in front of every source of a test build (gcc -include): what the pools and the
 * extension ask of the C library and of Python can be made to fail, and is counted.
 *
 * FAULTS_PYTHON: Python's allocations too. FAULTS_DEVICE: pread and pwrite go to the device of the
 * stress program (stress.c). */
#ifndef FX100_FAULTS_H
#define FX100_FAULTS_H

#ifdef FAULTS_PYTHON
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#endif

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

/* Let the n-th request from now on fail that this thread makes (1: the next); 0: none. */
void faults_fail_at(long n);

/* Whether that request has come since. */
int faults_struck(void);

/* Allocations that are not freed; each thread of a pool has one. */
long faults_live(void);

/* A hash for tests, with its states among the allocations that can fail. */
void *faults_hash_create(void);
int faults_hash_destroy(void *state);
int faults_hash_reset(void *state);
int faults_hash_update(void *state, const void *bytes, size_t length);
uint64_t faults_hash_digest(const void *state);

int faults_strike(void);
void *faults_calloc(size_t count, size_t size);
void faults_free(void *memory);
int faults_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *),
                          void *argument);

/* Functions of the name itself are called as (free)(memory). */
#define calloc(count, size) faults_calloc(count, size)
#define free(memory) faults_free(memory)
#define pthread_create(thread, how, run, argument) faults_pthread_create(thread, how, run, argument)

#ifdef FAULTS_DEVICE
ssize_t device_pread(int fd, void *memory, size_t length, off_t offset);
ssize_t device_pwrite(int fd, const void *memory, size_t length, off_t offset);
#define pread device_pread
#define pwrite device_pwrite
#endif

#ifdef FAULTS_PYTHON
#define PyCapsule_New(...) (faults_strike() ? PyErr_NoMemory() : PyCapsule_New(__VA_ARGS__))
#define Py_BuildValue(...) (faults_strike() ? PyErr_NoMemory() : Py_BuildValue(__VA_ARGS__))
#define PyList_Append(...) (faults_strike() ? (PyErr_NoMemory(), -1) : PyList_Append(__VA_ARGS__))
#define PyBytes_FromStringAndSize(...)                                                             \
    (faults_strike() ? PyErr_NoMemory() : PyBytes_FromStringAndSize(__VA_ARGS__))
#endif

#endif
