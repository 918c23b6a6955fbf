/* What Python sees of the pools in _pool.c.
 *
 * xxh3-64 comes from the shared object that the `xxhash` package loaded: Python hands over the
 * addresses of its functions.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "_pool.h"

static pool_t *pool_of(PyObject *capsule) {
    return PyCapsule_GetPointer(capsule, "fx100.pool");
}

/* A capsule remembers its process. A forked child has copies of the structures, but none of the
 * threads: whoever held a lock in the parent will not give it back here. */
static PyObject *new_capsule(void *structure, const char *name, PyCapsule_Destructor drop) {
    PyObject *capsule = PyCapsule_New(structure, name, drop);
    if (capsule && PyCapsule_SetContext(capsule, (void *)(intptr_t)getpid()))
        Py_CLEAR(capsule);
    return capsule;
}

static int is_inherited(PyObject *capsule) {
    return PyCapsule_GetContext(capsule) != (void *)(intptr_t)getpid();
}

static void drop_capsule(PyObject *capsule) {
    if (is_inherited(capsule))
        return;
    pool_t *pool = pool_of(capsule);
    pool_stop(pool);
    pool_release(pool);
}

PyDoc_STRVAR(use_hasher_doc, "use_hasher(create, destroy, reset, update, digest)\n\n"
                             "Addresses of xxh3-64's streaming functions.");
static PyObject *use_hasher(PyObject *self, PyObject *args) {
    unsigned long long create, destroy, reset, update, digest;
    if (!PyArg_ParseTuple(args, "KKKKK", &create, &destroy, &reset, &update, &digest))
        return NULL;
    pool_hasher.create = (void *(*)(void))(uintptr_t)create;
    pool_hasher.destroy = (int (*)(void *))(uintptr_t)destroy;
    pool_hasher.reset = (int (*)(void *))(uintptr_t)reset;
    pool_hasher.update = (int (*)(void *, const void *, size_t))(uintptr_t)update;
    pool_hasher.digest = (uint64_t(*)(const void *))(uintptr_t)digest;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(open_pool_doc, "open_pool(threads, budget_bytes, event_fd) -> pool");
static PyObject *open_pool(PyObject *self, PyObject *args) {
    int threads, event_fd;
    unsigned long long budget;
    if (!PyArg_ParseTuple(args, "iKi", &threads, &budget, &event_fd))
        return NULL;
    if (!pool_hasher.create) {
        PyErr_SetString(PyExc_RuntimeError, "use_hasher has not been called");
        return NULL;
    }
    pool_t *pool = pool_open(threads, budget, event_fd);
    if (!pool)
        return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *capsule = new_capsule(pool, "fx100.pool", drop_capsule);
    if (!capsule) {
        pool_stop(pool);
        pool_release(pool);
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
    }
    pool_enqueue(pool, first, last);
    pool_wake(pool);
    Py_RETURN_NONE;
fail:
    ops_free(first);
    return NULL;
}

static batch_t *batch_of(PyObject *capsule) {
    return PyCapsule_GetPointer(capsule, "fx100.batch");
}

static void drop_batch(PyObject *capsule) {
    if (!is_inherited(capsule))
        batch_leave(batch_of(capsule));
}

static PyObject *batch_capsule(size_t count) {
    batch_t *batch = batch_new(count);
    if (!batch)
        return PyErr_NoMemory();
    PyObject *capsule = new_capsule(batch, "fx100.batch", drop_batch);
    if (!capsule)
        batch_leave(batch);
    return capsule;
}

enum { LANE, FD, ADDRESS, LENGTH, PADDED, OFFSET, MAX_IO, ALIGN, EXPECTED, COLUMNS };

typedef struct {
    op_t *first, **last;
} queue_t;

/* Make an operation of each row and sort them by pool; returns 0 when memory is short. */
static int fill_queues(queue_t *queues, Py_ssize_t lanes, batch_t *batch, uint64_t ticket,
                       const uint64_t *rows) {
    for (size_t i = 0; i < batch->count; i++, rows += COLUMNS) {
        op_t *op = rows[LANE] < (uint64_t)lanes ? calloc(1, sizeof *op) : NULL;
        if (!op)
            return 0;
        *op = (op_t){.batch = batch,
                     .index = i,
                     .expected = rows[EXPECTED],
                     .ticket = ticket + i,
                     .fd = rows[FD],
                     .address = (char *)(uintptr_t)rows[ADDRESS],
                     .length = rows[LENGTH],
                     .padded = rows[PADDED],
                     .offset = rows[OFFSET],
                     .max_io = rows[MAX_IO],
                     .align = rows[ALIGN]};
        batch->users++; /* nobody else knows the batch yet */
        queue_t *queue = &queues[rows[LANE]];
        *queue->last = op;
        queue->last = &op->next;
    }
    return 1;
}

PyDoc_STRVAR(submit_batch_doc,
             "submit_batch(pools, first_ticket, rows) -> batch\n\n"
             "Queue reads; wake starts on them. rows: for each operation the uint64 values (number\n"
             "of the pool, fd, address, length, padded, offset, max_io, align, expected checksum).\n"
             "Tickets count up from the first. The memory must stay until all have come back.");
static PyObject *submit_batch(PyObject *self, PyObject *args) {
    PyObject *pools, *table;
    unsigned long long ticket;
    if (!PyArg_ParseTuple(args, "O!KO", &PyList_Type, &pools, &ticket, &table))
        return NULL;
    Py_ssize_t lanes = PyList_Size(pools);
    Py_buffer rows;
    if (PyObject_GetBuffer(table, &rows, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    queue_t *queues = calloc(lanes ? lanes : 1, sizeof *queues);
    PyObject *capsule = queues ? batch_capsule(rows.len / (COLUMNS * 8)) : PyErr_NoMemory();
    int ready = capsule != NULL;
    for (Py_ssize_t i = 0; ready && i < lanes; i++) {
        queues[i].last = &queues[i].first;
        ready = pool_of(PyList_GetItem(pools, i)) != NULL;
    }
    if (ready && !fill_queues(queues, lanes, batch_of(capsule), ticket, rows.buf)) {
        PyErr_NoMemory();
        ready = 0;
    }
    for (Py_ssize_t i = 0; queues && i < lanes; i++) {
        if (ready)
            pool_enqueue(pool_of(PyList_GetItem(pools, i)), queues[i].first, queues[i].last);
        else
            ops_free(queues[i].first);
    }
    free(queues);
    PyBuffer_Release(&rows);
    if (!ready)
        Py_CLEAR(capsule);
    return capsule;
}

PyDoc_STRVAR(wake_doc, "wake(pool)\n\nStart on what submit_batch has queued. Apart from it, so that "
                       "the threads\ndo not take the CPU from whoever has more to queue.");
static PyObject *wake(PyObject *self, PyObject *capsule) {
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
    pool_wake(pool);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(watch_batch_doc,
             "watch_batch(batch) -> bytes\n\n"
             "From now on each of its operations comes back from drain. Which have ended well\n"
             "before: one byte for each, 0 or 1.");
static PyObject *watch_batch(PyObject *self, PyObject *capsule) {
    batch_t *batch = batch_of(capsule);
    if (!batch)
        return NULL;
    PyObject *good = PyBytes_FromStringAndSize(NULL, batch->count);
    if (!good)
        return NULL;
    batch_watch(batch, PyBytes_AsString(good));
    return good;
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
    op_t *found = pool_cancel(pool, ticket);
    int taken = found != NULL;
    ops_free(found);
    return PyBool_FromLong(taken);
}

PyDoc_STRVAR(drain_doc, "drain(pool) -> list of (ticket, errno, checksum) of what has ended and is\n"
                        "to be heard of. What finds no memory comes with a later call.");
static PyObject *drain(PyObject *self, PyObject *capsule) {
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
    op_t *op = pool_take_done(pool);
    PyObject *list = PyList_New(0);
    while (op && list) {
        PyObject *item = Py_BuildValue("KiK", (unsigned long long)op->ticket, op->error,
                                       (unsigned long long)op->checksum);
        int told = item && PyList_Append(list, item) == 0;
        Py_XDECREF(item);
        if (!told)
            break;
        op_t *next = op->next;
        op->next = NULL;
        ops_free(op);
        op = next;
    }
    if (!op)
        return list;
    pool_return_done(pool, op);
    if (list && PyList_Size(list) == 0)
        Py_CLEAR(list);
    if (list)
        PyErr_Clear();
    return list;
}

PyDoc_STRVAR(close_pool_doc, "close_pool(pool)\n\n"
                             "Stop the threads. One that the kernel holds ends when it returns.");
static PyObject *close_pool(PyObject *self, PyObject *capsule) {
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
    pool_stop(pool);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"use_hasher", use_hasher, METH_VARARGS, use_hasher_doc},
    {"open_pool", open_pool, METH_VARARGS, open_pool_doc},
    {"submit", submit, METH_VARARGS, submit_doc},
    {"submit_batch", submit_batch, METH_VARARGS, submit_batch_doc},
    {"wake", wake, METH_O, wake_doc},
    {"watch_batch", watch_batch, METH_O, watch_batch_doc},
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
