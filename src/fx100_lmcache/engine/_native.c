/* Moves pieces between members and memory and hashes them, without the interpreter's lock.
 *
 * A pool is a queue and some threads. Each thread takes an operation, reads (or writes) it in
 * calls of at most max_io bytes, hashes what it moved while that is still in the CPU's cache, and
 * puts the outcome on a list. An eventfd tells Python that the list is not empty. Policy
 * (deadlines, retries, health) stays in Python.
 *
 * xxh3-64 comes from the shared object that the `xxhash` package loaded: Python hands over the
 * addresses of its functions.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

typedef struct {
    void *(*create)(void);
    int (*destroy)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
} hasher_t;

static hasher_t hasher;

typedef struct op {
    struct op *next;
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
    int idle; /* threads that wait for work */
    int event_fd;
    int users; /* threads and the Python object; the last one frees the pool */
} pool_t;

static void release(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    int left = --pool->users;
    pthread_mutex_unlock(&pool->lock);
    if (left)
        return;
    for (op_t *lists[2] = {pool->head, pool->done}, **list = lists; list < lists + 2; list++)
        while (*list) {
            op_t *next = (*list)->next;
            free(*list);
            *list = next;
        }
    pthread_cond_destroy(&pool->ready);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Move all of op in calls of at most max_io bytes; returns 0 or an errno. */
static int move(op_t *op, void *state) {
    size_t done = 0;
    size_t hashed = 0;
    hasher.reset(state);
    while (done < op->padded) {
        size_t asked = op->padded - done < op->max_io ? op->padded - done : op->max_io;
        if (op->write && hashed < done + asked && hashed < op->length) {
            size_t end = done + asked < op->length ? done + asked : op->length;
            hasher.update(state, op->address + hashed, end - hashed);
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
                return ENODATA; /* nothing moved: the device is gone */
        }
        done += moved;
        if (!op->write && hashed < op->length) {
            size_t end = done < op->length ? done : op->length;
            hasher.update(state, op->address + hashed, end - hashed);
            hashed = end;
        }
    }
    op->checksum = hasher.digest(state);
    return 0;
}

static void *worker(void *argument) {
    pool_t *pool = argument;
    void *state = hasher.create();
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->head && !pool->closing) {
            pool->idle++;
            pthread_cond_wait(&pool->ready, &pool->lock);
            pool->idle--;
        }
        if (pool->closing)
            break;
        op_t *op = pool->head;
        pool->head = op->next;
        if (!pool->head)
            pool->tail = &pool->head;
        pthread_mutex_unlock(&pool->lock);

        op->error = state ? move(op, state) : ENOMEM;

        pthread_mutex_lock(&pool->lock);
        int was_empty = pool->done == NULL;
        op->next = pool->done;
        pool->done = op;
        /* the event is written under the lock: after close, Python may reuse the descriptor */
        if (was_empty && !pool->closing)
            eventfd_write(pool->event_fd, 1);
    }
    pthread_mutex_unlock(&pool->lock);
    if (state)
        hasher.destroy(state);
    release(pool);
    return NULL;
}

static pool_t *pool_of(PyObject *capsule) {
    return PyCapsule_GetPointer(capsule, "fx100.pool");
}

static void stop(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->ready);
    pthread_mutex_unlock(&pool->lock);
}

static void drop_capsule(PyObject *capsule) {
    pool_t *pool = pool_of(capsule);
    stop(pool);
    release(pool);
}

PyDoc_STRVAR(use_hasher_doc, "use_hasher(create, destroy, reset, update, digest)\n\n"
                             "Addresses of xxh3-64's streaming functions.");
static PyObject *use_hasher(PyObject *self, PyObject *args) {
    unsigned long long create, destroy, reset, update, digest;
    if (!PyArg_ParseTuple(args, "KKKKK", &create, &destroy, &reset, &update, &digest))
        return NULL;
    hasher.create = (void *(*)(void))(uintptr_t)create;
    hasher.destroy = (int (*)(void *))(uintptr_t)destroy;
    hasher.reset = (int (*)(void *))(uintptr_t)reset;
    hasher.update = (int (*)(void *, const void *, size_t))(uintptr_t)update;
    hasher.digest = (uint64_t(*)(const void *))(uintptr_t)digest;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(open_pool_doc, "open_pool(threads, event_fd) -> pool");
static PyObject *open_pool(PyObject *self, PyObject *args) {
    int threads, event_fd;
    if (!PyArg_ParseTuple(args, "ii", &threads, &event_fd))
        return NULL;
    if (!hasher.create) {
        PyErr_SetString(PyExc_RuntimeError, "use_hasher has not been called");
        return NULL;
    }
    pool_t *pool = calloc(1, sizeof *pool);
    if (!pool)
        return PyErr_NoMemory();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->ready, NULL);
    pool->tail = &pool->head;
    pool->event_fd = event_fd;
    pool->users = 1;
    PyObject *capsule = PyCapsule_New(pool, "fx100.pool", drop_capsule);
    if (!capsule) {
        release(pool);
        return NULL;
    }
    /* signals belong to Python's main thread */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = 0;
    for (int i = 0; i < threads && !failure; i++) {
        pthread_t thread;
        pthread_mutex_lock(&pool->lock);
        pool->users++;
        pthread_mutex_unlock(&pool->lock);
        failure = pthread_create(&thread, NULL, worker, pool);
        if (failure)
            release(pool);
        else
            pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure) {
        errno = failure;
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(capsule);
        return NULL;
    }
    return capsule;
}

PyDoc_STRVAR(submit_doc,
             "submit(pool, operations)\n\n"
             "Each operation: (ticket, fd, write, address, length, padded, offset, max_io, align).\n"
             "The memory must stay until the ticket came back from drain, or from cancel.");
static PyObject *submit(PyObject *self, PyObject *args) {
    PyObject *capsule, *operations;
    if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyList_Type, &operations))
        return NULL;
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
    op_t *first = NULL, **last = &first;
    int count = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(operations); i++) {
        unsigned long long ticket, address, length, padded, max_io, align;
        long long offset;
        int fd, write;
        if (!PyArg_ParseTuple(PyList_GetItem(operations, i), "KipKKKLKK", &ticket, &fd, &write,
                              &address, &length, &padded, &offset, &max_io, &align))
            goto fail;
        op_t *op = calloc(1, sizeof *op);
        if (!op) {
            PyErr_NoMemory();
            goto fail;
        }
        *op = (op_t){.ticket = ticket,
                     .fd = fd,
                     .write = write,
                     .address = (char *)(uintptr_t)address,
                     .length = length,
                     .padded = padded,
                     .offset = offset,
                     .max_io = max_io,
                     .align = align};
        *last = op;
        last = &op->next;
        count++;
    }
    if (first) {
        pthread_mutex_lock(&pool->lock);
        *pool->tail = first;
        pool->tail = last;
        /* no more threads than there is work for: the others would only meet at the lock */
        for (int i = 0; i < count && i < pool->idle; i++)
            pthread_cond_signal(&pool->ready);
        pthread_mutex_unlock(&pool->lock);
    }
    Py_RETURN_NONE;
fail:
    while (first) {
        op_t *next = first->next;
        free(first);
        first = next;
    }
    return NULL;
}

PyDoc_STRVAR(cancel_doc, "cancel(pool, ticket) -> bool\n\nTrue if it was still queued.");
static PyObject *cancel(PyObject *self, PyObject *args) {
    PyObject *capsule;
    unsigned long long ticket;
    if (!PyArg_ParseTuple(args, "OK", &capsule, &ticket))
        return NULL;
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
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
    free(found);
    return PyBool_FromLong(found != NULL);
}

PyDoc_STRVAR(drain_doc, "drain(pool) -> list of (ticket, errno, checksum)");
static PyObject *drain(PyObject *self, PyObject *capsule) {
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
    pthread_mutex_lock(&pool->lock);
    op_t *op = pool->done;
    pool->done = NULL;
    pthread_mutex_unlock(&pool->lock);
    PyObject *list = PyList_New(0);
    while (op) {
        op_t *next = op->next;
        PyObject *item =
            list ? Py_BuildValue("KiK", (unsigned long long)op->ticket, op->error,
                                 (unsigned long long)op->checksum)
                 : NULL;
        if (!item || PyList_Append(list, item))
            Py_CLEAR(list);
        Py_XDECREF(item);
        free(op);
        op = next;
    }
    return list;
}

PyDoc_STRVAR(close_pool_doc, "close_pool(pool)\n\n"
                             "Stop the threads. One that the kernel holds ends when it returns.");
static PyObject *close_pool(PyObject *self, PyObject *capsule) {
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
    stop(pool);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"use_hasher", use_hasher, METH_VARARGS, use_hasher_doc},
    {"open_pool", open_pool, METH_VARARGS, open_pool_doc},
    {"submit", submit, METH_VARARGS, submit_doc},
    {"cancel", cancel, METH_VARARGS, cancel_doc},
    {"drain", drain, METH_O, drain_doc},
    {"close_pool", close_pool, METH_O, close_pool_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Moves and hashes pieces without the GIL.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
