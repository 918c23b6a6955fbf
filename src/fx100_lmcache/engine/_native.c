/* What Python sees of the pools in _pool.c.
 *
 * xxh3-64 comes from the shared object that the `xxhash` package loaded: Python hands over the
 * addresses of its functions.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "_pool.h"

static hasher_t hasher; /* written and read with the GIL */

static pool_t *pool_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, "fx100.pool"); }

/* The pool to queue something in; NULL with an exception if it is another process's. */
static pool_t *own_pool_of(PyObject *capsule) {
    pool_t *pool = pool_of(capsule);
    if (pool && pool_is_inherited(pool)) {
        errno = ECHILD;
        PyErr_SetFromErrno(PyExc_OSError);
        return NULL;
    }
    return pool;
}

static void drop_pool(PyObject *capsule) { pool_release(pool_of(capsule)); }

PyDoc_STRVAR(use_hasher_doc, "use_hasher(create, destroy, reset, update, digest)\n\n"
                             "Addresses of xxh3-64's streaming functions, for pools opened later.");
static PyObject *use_hasher(PyObject *Py_UNUSED(self), PyObject *args) {
    unsigned long long create, destroy, reset, update, digest;
    if (!PyArg_ParseTuple(args, "KKKKK", &create, &destroy, &reset, &update, &digest))
        return NULL;
    if (!create || !destroy || !reset || !update || !digest) {
        PyErr_SetString(PyExc_ValueError, "an address is 0");
        return NULL;
    }
    hasher.create = (void *(*)(void))(uintptr_t)create;
    hasher.destroy = (int (*)(void *))(uintptr_t)destroy;
    hasher.reset = (int (*)(void *))(uintptr_t)reset;
    hasher.update = (int (*)(void *, const void *, size_t))(uintptr_t)update;
    hasher.digest = (uint64_t(*)(const void *))(uintptr_t)digest;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(open_pool_doc,
             "open_pool(threads, budget_bytes, event_fd, member_bytes) -> pool\n\n"
             "No operation gets beyond member_bytes. Raises OSError with nothing left behind.");
static PyObject *open_pool(PyObject *Py_UNUSED(self), PyObject *args) {
    int threads, event_fd;
    long long budget, member_bytes;
    if (!PyArg_ParseTuple(args, "iLiL", &threads, &budget, &event_fd, &member_bytes))
        return NULL;
    if (!hasher.create) {
        PyErr_SetString(PyExc_RuntimeError, "use_hasher has not been called");
        return NULL;
    }
    pool_t *pool = pool_open(threads, (uint64_t)budget, event_fd, (uint64_t)member_bytes, &hasher);
    if (!pool)
        return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *capsule = PyCapsule_New(pool, "fx100.pool", drop_pool);
    if (!capsule)
        pool_release(pool);
    return capsule;
}

/* Make an operation of what Python says; NULL with an exception if it cannot be read. */
static op_t *op_from(PyObject *operation) {
    unsigned long long ticket;
    long long address, room, length, padded, offset, max_io, align;
    int fd, write;
    if (!PyArg_ParseTuple(operation, "KipLLLLLLL", &ticket, &fd, &write, &address, &room, &length,
                          &padded, &offset, &max_io, &align))
        return NULL;
    op_t *op = calloc(1, sizeof *op);
    if (!op) {
        PyErr_NoMemory();
        return NULL;
    }
    /* a negative number becomes one that is too large */
    *op = (op_t){.ticket = ticket,
                 .fd = fd,
                 .write = write,
                 .address = (char *)(uintptr_t)address,
                 .room = (uint64_t)room,
                 .length = (uint64_t)length,
                 .padded = (uint64_t)padded,
                 .offset = offset,
                 .max_io = (uint64_t)max_io,
                 .align = (uint64_t)align};
    return op;
}

PyDoc_STRVAR(
    submit_doc,
    "submit(pool, operations)\n\n"
    "Each operation: (ticket, fd, write, address, room, length, padded, offset, max_io,\n"
    "align); room: bytes at the address that may be used. One that must not be made comes\n"
    "back from drain. The memory must stay until the ticket came back from there, or from\n"
    "cancel. Queues all of them or, if it raises, none.");
static PyObject *submit(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule, *operations;
    if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyList_Type, &operations))
        return NULL;
    pool_t *pool = own_pool_of(capsule);
    if (!pool)
        return NULL;
    op_t *first = NULL, **last = &first;
    for (Py_ssize_t i = 0; i < PyList_Size(operations); i++) {
        PyObject *operation = PyList_GetItem(operations, i);
        Py_INCREF(operation); /* to read it may run code that changes the list */
        op_t *op = op_from(operation);
        Py_DECREF(operation);
        if (!op) {
            ops_free(first);
            return NULL;
        }
        *last = op;
        last = &op->next;
    }
    pool_enqueue(pool, first);
    pool_wake(pool);
    Py_RETURN_NONE;
}

static batch_t *batch_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, "fx100.batch"); }

static void drop_batch(PyObject *capsule) { batch_leave(batch_of(capsule)); }

static PyObject *batch_capsule(size_t count) {
    batch_t *batch = batch_new(count);
    if (!batch)
        return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(batch, "fx100.batch", drop_batch);
    if (!capsule)
        batch_leave(batch);
    return capsule;
}

enum { LANE, FD, ADDRESS, ROOM, LENGTH, PADDED, OFFSET, MAX_IO, ALIGN, EXPECTED, COLUMNS };

/* What a batch has for one pool. */
typedef struct {
    PyObject *capsule; /* keeps the pool */
    op_t *first, **last;
} queue_t;

static void free_queues(queue_t *queues, size_t count) {
    for (size_t i = 0; i < count; i++) {
        ops_free(queues[i].first);
        Py_DECREF(queues[i].capsule);
    }
    free(queues);
}

/* An empty queue for each pool of the list; NULL with an exception. */
static queue_t *make_queues(PyObject *pools, size_t count) {
    queue_t *queues = calloc(count ? count : 1, sizeof *queues);
    if (!queues) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *capsule = PyList_GetItem(pools, (Py_ssize_t)i);
        if (!own_pool_of(capsule)) {
            free_queues(queues, i);
            return NULL;
        }
        Py_INCREF(capsule);
        queues[i] = (queue_t){.capsule = capsule, .last = &queues[i].first};
    }
    return queues;
}

/* Make an operation of each row and sort them by pool; returns 0 with an exception. */
static int fill_queues(queue_t *queues, size_t lanes, batch_t *batch, uint64_t ticket,
                       const uint64_t *rows) {
    for (size_t i = 0; i < batch->count; i++, rows += COLUMNS) {
        if (rows[LANE] >= lanes) {
            PyErr_SetString(PyExc_ValueError, "a row names a pool that is not in the list");
            return 0;
        }
        op_t *op = calloc(1, sizeof *op);
        if (!op) {
            PyErr_NoMemory();
            return 0;
        }
        *op = (op_t){.expected = rows[EXPECTED],
                     .ticket = ticket + i,
                     .fd = rows[FD] <= INT_MAX ? (int)rows[FD] : -1,
                     .address = (char *)(uintptr_t)rows[ADDRESS],
                     .room = rows[ROOM],
                     .length = rows[LENGTH],
                     .padded = rows[PADDED],
                     .offset = (int64_t)rows[OFFSET],
                     .max_io = rows[MAX_IO],
                     .align = rows[ALIGN]};
        batch_join(batch, op, i);
        queue_t *queue = &queues[rows[LANE]];
        *queue->last = op;
        queue->last = &op->next;
    }
    return 1;
}

/* Rows of a table of uint64 with COLUMNS columns; 0 with an exception for anything else. */
static size_t rows_in(const Py_buffer *table, uint64_t ticket) {
    const char *format = table->format ? table->format : "B";
    int numbers = table->itemsize == 8 && (!strcmp(format, "L") || !strcmp(format, "Q")) &&
                  (uintptr_t)table->buf % sizeof(uint64_t) == 0;
    if (!numbers || table->ndim != 2 || table->shape[1] != COLUMNS) {
        PyErr_Format(PyExc_ValueError, "rows must be uint64 values in %d columns", COLUMNS);
        return 0;
    }
    size_t count = (size_t)table->shape[0];
    if (count < 1 || count > BATCH_MAX_READS || ticket > UINT64_MAX - count) {
        PyErr_SetString(PyExc_ValueError, "a batch has too few or too many rows");
        return 0;
    }
    return count;
}

/* The batch's Python object, with everything queued; NULL with an exception and nothing. */
static PyObject *queue_batch(PyObject *pools, uint64_t ticket, const Py_buffer *table) {
    size_t count = rows_in(table, ticket), lanes = (size_t)PyList_Size(pools);
    queue_t *queues = count ? make_queues(pools, lanes) : NULL;
    if (!queues)
        return NULL;
    PyObject *capsule = batch_capsule(count);
    if (capsule && !fill_queues(queues, lanes, batch_of(capsule), ticket, table->buf))
        Py_CLEAR(capsule);
    for (size_t i = 0; capsule && i < lanes; i++) {
        pool_enqueue(pool_of(queues[i].capsule), queues[i].first);
        queues[i].first = NULL;
    }
    free_queues(queues, lanes);
    return capsule;
}

PyDoc_STRVAR(
    submit_batch_doc,
    "submit_batch(pools, first_ticket, rows) -> batch\n\n"
    "Queue reads; wake starts on them. rows: for each operation the uint64 values (number\n"
    "of the pool, fd, address, room, length, padded, offset, max_io, align, expected\n"
    "checksum). Tickets count up from the first. One that must not be made comes back\n"
    "from drain. The memory must stay until all have come back. Queues all of them or,\n"
    "if it raises, none.");
static PyObject *submit_batch(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *pools, *rows;
    unsigned long long ticket;
    if (!PyArg_ParseTuple(args, "O!KO", &PyList_Type, &pools, &ticket, &rows))
        return NULL;
    Py_buffer table;
    if (PyObject_GetBuffer(rows, &table, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return NULL;
    PyObject *capsule = queue_batch(pools, ticket, &table);
    PyBuffer_Release(&table);
    return capsule;
}

PyDoc_STRVAR(wake_doc,
             "wake(pool)\n\nStart on what submit_batch has queued. Apart from it, so that\n"
             "the threads do not take the CPU from whoever has more to queue.");
static PyObject *wake(PyObject *Py_UNUSED(self), PyObject *capsule) {
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
static PyObject *watch_batch(PyObject *Py_UNUSED(self), PyObject *capsule) {
    batch_t *batch = batch_of(capsule);
    if (!batch)
        return NULL;
    PyObject *good = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)batch->count);
    if (!good)
        return NULL;
    batch_watch(batch, PyBytes_AsString(good));
    return good;
}

PyDoc_STRVAR(cancel_doc, "cancel(pool, ticket) -> bool\n\nTrue if it was still queued.");
static PyObject *cancel(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule;
    unsigned long long ticket;
    if (!PyArg_ParseTuple(args, "OK", &capsule, &ticket))
        return NULL;
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
    return PyBool_FromLong(pool_cancel(pool, ticket));
}

/* Append what became of an operation; returns 0 with an exception, and the list as it was. */
static int report(const op_t *op, PyObject *list) {
    PyObject *item = Py_BuildValue("KiK", (unsigned long long)op->ticket, op->error,
                                   (unsigned long long)op->checksum);
    int appended = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return appended;
}

PyDoc_STRVAR(
    drain_doc,
    "drain(pool, list)\n\n"
    "Append (ticket, error, checksum) of what has ended and is to be heard of: 0, an errno\n"
    "or, for what must not be made, a negative number. After a MemoryError the rest is\n"
    "there for the next call, but no event is sent for it.");
static PyObject *drain(PyObject *Py_UNUSED(self), PyObject *args) {
    PyObject *capsule, *list;
    if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyList_Type, &list))
        return NULL;
    pool_t *pool = pool_of(capsule);
    if (!pool)
        return NULL;
    op_t *op = pool_take_done(pool);
    while (op && report(op, list)) {
        op_t *told = op;
        op = op->next;
        told->next = NULL;
        ops_free(told);
    }
    if (op) {
        pool_return_done(pool, op);
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(close_pool_doc,
             "close_pool(pool)\n\n"
             "Stop the threads. One that the kernel holds ends when its call returns.");
static PyObject *close_pool(PyObject *Py_UNUSED(self), PyObject *capsule) {
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
    {"drain", drain, METH_VARARGS, drain_doc},
    {"close_pool", close_pool, METH_O, close_pool_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Moves and hashes pieces without the GIL.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
