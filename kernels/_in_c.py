"""What the host does between a call of ours and the launch, in C: compiled at first use where there is a compiler.

A launch takes the host a few microseconds, of which Python's part is the larger. Here is that of calls that come
again: `Front` knows arguments again and calls what was prepared for such, `Launcher` reads addresses and calls
Triton's launcher, `addresses` and `same` go over an optimizer's tensors. Triton's own loader compiles and caches,
with the compiler that its launchers need. Each has its like in Python, which is taken where this cannot be had.

Of tensors nothing is read but by PyTorch's own functions, which raise where there is nothing to read; but for
`addresses`, whose callers know their tensors. Nothing of a call is kept beyond it: arguments of a launch lie on
the stack of the thread that calls, so that threads do not meet. All of it holds the interpreter's lock.
"""

from __future__ import annotations

import functools
from typing import Any

NAME = "kernelmark_in_c"
SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Of every object here: its references, in one row, so that what frees and visits them is written once. */
enum { MOST_HELD = 16 };
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *held[MOST_HELD];
} Object;

static int visit(PyObject *self, visitproc visit, void *arg) {
    for (int i = 0; i < MOST_HELD; i++) Py_VISIT(((Object *)self)->held[i]);
    return 0;
}

static int clear(PyObject *self) {
    for (int i = 0; i < MOST_HELD; i++) Py_CLEAR(((Object *)self)->held[i]);
    return 0;
}

static void dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* An object that holds these arguments, of which there have to be so many. */
static PyObject *made(PyTypeObject *type, PyObject *args, PyObject *named, Py_ssize_t count, vectorcallfunc call) {
    if (PyTuple_GET_SIZE(args) != count || (named != NULL && PyDict_GET_SIZE(named))) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments by place", type->tp_name, count);
        return NULL;
    }
    Object *self = (Object *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->call = call;
    for (Py_ssize_t i = 0; i < count; i++) self->held[i] = Py_NewRef(PyTuple_GET_ITEM(args, i));
    return (PyObject *)self;
}

/* Whether held[i] is a tuple, for all i of these. */
static int tuples(PyObject *self, const char *which) {
    for (; *which; which++) {
        if (!PyTuple_CheckExact(((Object *)self)->held[*which - 'a'])) {
            PyErr_SetString(PyExc_TypeError, "a tuple is expected");
            return 0;
        }
    }
    return 1;
}

static PyObject *called(PyObject *function, PyObject *x) { return PyObject_Vectorcall(function, &x, 1, NULL); }
static PyObject *called_so(PyObject *function) { return PyObject_Vectorcall(function, NULL, 0, NULL); }

/* Whether a function of nothing gives this very object; -1 where it raises. */
static int gives(PyObject *function, PyObject *what) {
    PyObject *found = called_so(function);
    Py_XDECREF(found);
    return found == NULL ? -1 : found == what;
}

/* ---- References in a row that grows, each of them owned. ---- */

typedef struct {
    Py_ssize_t count, room;
    PyObject **at, *few[64];
} Row;

static void begin(Row *row) {
    row->count = 0;
    row->room = 64;
    row->at = row->few;
}

static void end(Row *row) {
    for (Py_ssize_t i = 0; i < row->count; i++) Py_DECREF(row->at[i]);
    if (row->at != row->few) PyMem_Free(row->at);
}

/* Takes a reference over, or NULL for one that could not be had: 0 then. */
static int push(Row *row, PyObject *x) {
    if (x == NULL) return 0;
    if (row->count == row->room) {
        PyObject **more = PyMem_Malloc(2 * row->room * sizeof *more);
        if (more == NULL) {
            Py_DECREF(x);
            PyErr_NoMemory();
            return 0;
        }
        memcpy(more, row->at, row->count * sizeof *more);
        if (row->at != row->few) PyMem_Free(row->at);
        row->at = more;
        row->room *= 2;
    }
    row->at[row->count++] = x;
    return 1;
}

static int push_all(Row *row, PyObject *tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        if (!push(row, Py_NewRef(PyTuple_GET_ITEM(tuple, i)))) return 0;
    }
    return 1;
}

/* ---- Launcher(function, together, grid, middle, tail, places, index, maps, placed, make,
        address, device, stream, runtime): see `_launch.Launcher`. ---- */

enum { FUNCTION, TOGETHER, GRID, MIDDLE, TAIL, PLACES, INDEX, MAPS, PLACED, MAKE, ADDRESS, DEVICE, STREAM };
enum { RUNTIME = STREAM + 1 };

static PyObject *name_base, *name_says, *name_calls, *name_enter, *name_leave, *name_shape, *name_nested;

/* Whether one of the hooks of launches has somebody who listens; -1 where that raises. */
static int observed(PyObject *runtime) {
    PyObject *names[2] = {name_enter, name_leave};
    for (int i = 0; i < 2; i++) {
        PyObject *hook = PyObject_GetAttr(runtime, names[i]);
        if (hook == NULL) return -1;
        int heard = hook != Py_None;
        if (heard) {
            PyObject *calls = PyObject_GetAttr(hook, name_calls);
            if (calls != NULL) {
                heard = PyObject_IsTrue(calls);
                Py_DECREF(calls);
            } else if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
                PyErr_Clear(); /* a hook in place of a chain of them */
            } else {
                heard = -1;
            }
        }
        Py_DECREF(hook);
        if (heard) return heard;
    }
    return 0;
}

/* What a tensor map is handed over as, from an earlier launch or made by Python. */
static PyObject *map_of(Object *self, PyObject *x, Py_ssize_t place) {
    PyObject *found = NULL;
    if ((PyObject *)Py_TYPE(x) == self->held[PLACED]) {
        PyObject *base = PyObject_GetAttr(x, name_base), *says = PyObject_GetAttr(x, name_says);
        PyObject *address = base == NULL ? NULL : called(self->held[ADDRESS], base);
        PyObject *key = address == NULL || says == NULL ? NULL : PyTuple_Pack(2, address, says);
        if (key != NULL) found = Py_XNewRef(PyDict_GetItemWithError(self->held[MAPS], key));
        Py_XDECREF(base);
        Py_XDECREF(says);
        Py_XDECREF(address);
        Py_XDECREF(key);
        if (found == NULL && PyErr_Occurred()) return NULL;
    }
    if (found == NULL) {
        PyObject *number = PyLong_FromSsize_t(place);
        if (number == NULL) return NULL;
        PyObject *both[2] = {number, x};
        found = PyObject_Vectorcall(self->held[MAKE], both, 2, NULL);
        Py_DECREF(number);
    }
    if (found != NULL && !PyTuple_CheckExact(found)) {
        PyErr_SetString(PyExc_TypeError, "a tensor map is handed over as a tuple");
        Py_CLEAR(found);
    }
    return found;
}

/* A tuple of tensors and None as one of addresses and zeros. */
static PyObject *group_of(Object *self, PyObject *x) {
    if (!PyTuple_CheckExact(x)) {
        PyErr_SetString(PyExc_TypeError, "a tuple of tensors is expected");
        return NULL;
    }
    PyObject *group = PyTuple_New(PyTuple_GET_SIZE(x));
    for (Py_ssize_t i = 0; group != NULL && i < PyTuple_GET_SIZE(x); i++) {
        PyObject *one = PyTuple_GET_ITEM(x, i);
        PyObject *found = one == Py_None ? PyLong_FromLong(0) : called(self->held[ADDRESS], one);
        if (found == NULL) {
            Py_CLEAR(group);
        } else {
            PyTuple_SET_ITEM(group, i, found);
        }
    }
    return group;
}

/* An argument in its place, as the launcher takes it. */
static int hand_over(Object *self, Row *row, PyObject *x, Py_ssize_t place) {
    PyObject *places = self->held[PLACES];
    char kind = place < PyBytes_GET_SIZE(places) ? PyBytes_AS_STRING(places)[place] : 'x';
    if (kind == 'a' && x != Py_None) return push(row, called(self->held[ADDRESS], x));
    if (kind == 'g') return push(row, group_of(self, x));
    if (kind == 'm') {
        PyObject *found = map_of(self, x, place);
        int all = found != NULL && push_all(row, found);
        Py_XDECREF(found);
        return all;
    }
    return push(row, Py_NewRef(x));
}

/* launcher(arguments): whether it launched; not where a profiler listens, nor where another device is the current
   one. */
static PyObject *launch(PyObject *object, PyObject *const *args, size_t given, PyObject *named) {
    Object *self = (Object *)object;
    if (PyVectorcall_NARGS(given) != 1 || !PyTuple_CheckExact(args[0]) || named != NULL) {
        PyErr_SetString(PyExc_TypeError, "a launcher takes a tuple");
        return NULL;
    }
    int heard = observed(self->held[RUNTIME]);
    if (heard < 0) return NULL;
    if (heard) Py_RETURN_FALSE;
    PyObject *device = called_so(self->held[DEVICE]);
    if (device == NULL) return NULL;
    int here = self->held[INDEX] == Py_Ellipsis ? 1 : PyObject_RichCompareBool(device, self->held[INDEX], Py_EQ);
    PyObject *stream = here > 0 ? called(self->held[STREAM], device) : NULL;
    Py_DECREF(device);
    if (here == 0) Py_RETURN_FALSE;
    Row row;
    begin(&row);
    int fine = stream != NULL && push_all(&row, self->held[GRID]);
    /* The stream goes to the row or is given up. */
    if (fine) {
        fine = push(&row, stream);
    } else {
        Py_XDECREF(stream);
    }
    fine = fine && push_all(&row, self->held[MIDDLE]);
    Py_ssize_t first = row.count;
    for (Py_ssize_t i = 0; fine && i < PyTuple_GET_SIZE(args[0]); i++) {
        fine = hand_over(self, &row, PyTuple_GET_ITEM(args[0], i), i);
    }
    fine = fine && push_all(&row, self->held[TAIL]);
    if (fine && self->held[TOGETHER] == Py_True) {
        PyObject *all = PyList_New(row.count - first);
        if (all != NULL) {
            for (Py_ssize_t i = first; i < row.count; i++) PyList_SET_ITEM(all, i - first, row.at[i]);
            row.count = first;
        }
        fine = push(&row, all);
    }
    PyObject *done = fine ? PyObject_Vectorcall(self->held[FUNCTION], row.at, row.count, NULL) : NULL;
    end(&row);
    if (done == NULL) return NULL;
    Py_DECREF(done);
    Py_RETURN_TRUE;
}

static PyObject *new_launcher(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *self = made(type, args, named, RUNTIME + 1, launch);
    if (self == NULL) return NULL;
    if (!PyBytes_CheckExact(((Object *)self)->held[PLACES]) || !PyDict_CheckExact(((Object *)self)->held[MAPS])) {
        PyErr_SetString(PyExc_TypeError, "bytes and a dictionary are expected");
        Py_CLEAR(self);
    } else if (!tuples(self, "cde")) {
        Py_CLEAR(self);
    }
    return self;
}

/* ---- Kind(found, run, index, differentiable, arguments, types, check, tensor, parameter, address): arguments
        that are alike, as `_launch._Kind`. ---- */

enum { FOUND, RUN, OF_INDEX, DIFFERENTIABLE, VALUES, TYPES, CHECK, TENSOR, PARAMETER, OF_ADDRESS };
enum { MOST_TENSORS = 32 };

static int is_tensor(Object *kind, PyObject *type) {
    return type == kind->held[TENSOR] || type == kind->held[PARAMETER];
}

/* Whether arguments are of a kind; -1 where a comparison of numbers raises. */
static int is_of(Object *kind, PyObject *const *args, Py_ssize_t given) {
    PyObject *types = kind->held[TYPES], *values = kind->held[VALUES], *tensors[MOST_TENSORS];
    Py_ssize_t count = 0;
    if (PyTuple_GET_SIZE(types) != given) return 0;
    /* Types first: of other types numbers could be equal, and to a tensor equality is elementwise. */
    for (Py_ssize_t i = 0; i < given; i++) {
        if ((PyObject *)Py_TYPE(args[i]) != PyTuple_GET_ITEM(types, i)) return 0;
    }
    for (Py_ssize_t i = 0; i < given; i++) {
        if (is_tensor(kind, PyTuple_GET_ITEM(types, i))) {
            if (count == MOST_TENSORS) return 0;
            tensors[count++] = args[i];
        } else {
            int equal = PyObject_RichCompareBool(PyTuple_GET_ITEM(values, i), args[i], Py_EQ);
            if (equal <= 0) return equal;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        /* Guards end the process at what has no strides: nested tensors, and those that have no address. Python
           says what is wrong with them. */
        PyObject *nested = PyObject_GetAttr(tensors[i], name_nested);
        Py_XDECREF(nested);
        PyObject *address = nested == Py_False ? called(kind->held[OF_ADDRESS], tensors[i]) : NULL;
        unsigned long long place = address == NULL ? 1 : PyLong_AsUnsignedLongLongMask(address);
        Py_XDECREF(address);
        PyErr_Clear();
        if (place & 15) return 0;
    }
    PyObject *same = PyObject_Vectorcall(kind->held[CHECK], tensors, count, NULL);
    if (same == NULL) PyErr_Clear();
    Py_XDECREF(same);
    return same == Py_True;
}

static PyObject *matches(PyObject *self, PyObject *arguments) {
    if (!PyTuple_CheckExact(arguments)) {
        PyErr_SetString(PyExc_TypeError, "a tuple is expected");
        return NULL;
    }
    int same = is_of((Object *)self, &PyTuple_GET_ITEM(arguments, 0), PyTuple_GET_SIZE(arguments));
    return same < 0 ? NULL : PyBool_FromLong(same);
}

static PyObject *get_held(PyObject *self, void *place) {
    return Py_NewRef(((Object *)self)->held[(intptr_t)place]);
}

static PyObject *new_kind(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *self = made(type, args, named, OF_ADDRESS + 1, NULL);
    if (self == NULL) return NULL;
    PyObject **held = ((Object *)self)->held;
    if (!tuples(self, "ef")) {
        Py_CLEAR(self);
    } else if (PyTuple_GET_SIZE(held[VALUES]) != PyTuple_GET_SIZE(held[TYPES])) {
        PyErr_SetString(PyExc_ValueError, "as many types as values are expected");
        Py_CLEAR(self);
    }
    return self;
}

/* ---- Front(kinds, slow, eager, levels, modes, transforming, gradients, device, tensor, parameter): see
        `_launch.prepared.front`. ---- */

enum { KINDS, SLOW, EAGER, LEVELS, MODES, TRANSFORMING, GRADIENTS, OF_DEVICE, OF_TENSOR, OF_PARAMETER };
static PyObject *name_level, *name_mode;
static PyTypeObject KindType;

/* Whether a call is one of eager mode: no derivative in forward mode, no mode that sees operators, no transform;
   -1 where that raises. */
static int is_eager(Object *self) {
    PyObject *level = PyDict_GetItemWithError(self->held[LEVELS], name_level);
    if (level == NULL) return PyErr_Occurred() ? -1 : 0;
    long which = PyLong_AsLong(level);
    if (which == -1 && PyErr_Occurred()) return -1;
    if (which >= 0) return 0;
    PyObject *mode = PyDict_GetItemWithError(self->held[MODES], name_mode);
    if (mode == NULL && PyErr_Occurred()) return -1;
    return mode == Py_False ? gives(self->held[TRANSFORMING], Py_False) : 0;
}

/* The kind that arguments are of, a reference of one's own. NULL where there is none, and where it raises. */
static Object *known(Object *self, PyObject *const *args, Py_ssize_t given) {
    PyObject *type = (PyObject *)Py_TYPE(args[0]);
    if (type != self->held[OF_TENSOR] && type != self->held[OF_PARAMETER]) return NULL;
    PyObject *shape = PyObject_GetAttr(args[0], name_shape);
    if (shape == NULL) {
        PyErr_Clear(); /* a nested tensor's */
        return NULL;
    }
    PyObject *kinds = Py_XNewRef(PyDict_GetItemWithError(self->held[KINDS], shape));
    Py_DECREF(shape);
    if (kinds == NULL) return NULL;
    Object *found = NULL;
    /* The list may change meanwhile: comparisons and tensors call Python. */
    for (Py_ssize_t i = 0; PyList_CheckExact(kinds) && i < PyList_GET_SIZE(kinds); i++) {
        PyObject *kind = Py_NewRef(PyList_GET_ITEM(kinds, i));
        int same = Py_IS_TYPE(kind, &KindType) ? is_of((Object *)kind, args, given) : 0;
        if (same > 0) {
            found = (Object *)kind;
            if (i && i < PyList_GET_SIZE(kinds) && PyList_GET_ITEM(kinds, i) == kind) {
                /* What came last is likely to come next. */
                PyObject *first = PyList_GET_ITEM(kinds, 0);
                PyList_SET_ITEM(kinds, 0, kind);
                PyList_SET_ITEM(kinds, i, first);
            }
            break;
        }
        Py_DECREF(kind);
        if (same < 0) break;
    }
    Py_DECREF(kinds);
    return found;
}

static PyObject *enter(PyObject *object, PyObject *const *args, size_t given, PyObject *named) {
    Object *self = (Object *)object;
    Py_ssize_t count = PyVectorcall_NARGS(given);
    int eager = count && named == NULL ? is_eager(self) : 0;
    Object *kind = eager > 0 ? known(self, args, count) : NULL;
    if (eager < 0 || (kind == NULL && PyErr_Occurred())) return NULL;
    if (kind == NULL) return PyObject_Vectorcall(self->held[SLOW], args, count, named);
    PyObject *result = NULL;
    int follows = kind->held[DIFFERENTIABLE] == Py_True ? gives(self->held[GRADIENTS], Py_True) : 0;
    if (follows > 0 && self->held[EAGER] != Py_None) {
        Row row;
        begin(&row);
        int fine = push(&row, Py_NewRef(kind->held[FOUND]));
        for (Py_ssize_t i = 0; fine && i < count; i++) fine = push(&row, Py_NewRef(args[i]));
        if (fine) result = PyObject_Vectorcall(self->held[EAGER], row.at, row.count, NULL);
        end(&row);
    } else if (follows >= 0) {
        int here = 1;
        if (kind->held[OF_INDEX] != Py_None) {
            PyObject *device = called_so(self->held[OF_DEVICE]);
            here = device == NULL ? -1 : PyObject_RichCompareBool(device, kind->held[OF_INDEX], Py_EQ);
            Py_XDECREF(device);
        }
        if (here >= 0) {
            result = PyObject_Vectorcall(here ? kind->held[RUN] : self->held[SLOW], args, count, NULL);
        }
    }
    Py_DECREF(kind);
    return result;
}

static PyObject *new_front(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *self = made(type, args, named, OF_PARAMETER + 1, enter);
    if (self == NULL) return NULL;
    PyObject **held = ((Object *)self)->held;
    if (!PyDict_CheckExact(held[KINDS]) || !PyDict_CheckExact(held[LEVELS]) || !PyDict_CheckExact(held[MODES])) {
        PyErr_SetString(PyExc_TypeError, "dictionaries are expected");
        Py_CLEAR(self);
    }
    return self;
}

/* ---- An optimizer's lists. ---- */

/* addresses(tensors, function, type, type): int64 words; None where an element is of neither type */
static PyObject *addresses(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    if (given != 4 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a list, a function and two types");
        return NULL;
    }
    void *(*address)(PyObject *) = (void *(*)(PyObject *))PyLong_AsVoidPtr(args[1]);
    if (address == NULL) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no function at 0");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(args[0]);
    PyObject *words = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (words == NULL) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *x = PyList_GET_ITEM(args[0], i);
        if ((PyObject *)Py_TYPE(x) != args[2] && (PyObject *)Py_TYPE(x) != args[3]) {
            Py_DECREF(words);
            Py_RETURN_NONE;
        }
        int64_t word = (int64_t)(intptr_t)address(x);
        memcpy(PyBytes_AS_STRING(words) + i * (Py_ssize_t)sizeof word, &word, sizeof word);
    }
    return words;
}

/* same(references, objects): whether each weak reference is to the object at its place */
static PyObject *same(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    if (given != 2 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected two lists");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(args[1]);
    if (PyList_GET_SIZE(args[0]) != count) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *reference = PyList_GET_ITEM(args[0], i), *x;
        if (!PyWeakref_Check(reference)) {
            PyErr_SetString(PyExc_TypeError, "weak references are expected");
            return NULL;
        }
#if PY_VERSION_HEX >= 0x030D0000
        if (PyWeakref_GetRef(reference, &x) < 0) return NULL;
        Py_XDECREF(x);
#else
        x = PyWeakref_GET_OBJECT(reference);
#endif
        if (x != PyList_GET_ITEM(args[1], i)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"addresses", (PyCFunction)(void (*)(void))addresses, METH_FASTCALL, NULL},
    {"same", (PyCFunction)(void (*)(void))same, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef kind_methods[] = {{"matches", matches, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyGetSetDef kind_members[] = {
    {"found", get_held, NULL, NULL, (void *)FOUND},
    {"differentiable", get_held, NULL, NULL, (void *)DIFFERENTIABLE},
    {NULL, NULL, NULL, NULL, NULL},
};

#define TYPE(NAME, NEW, FLAGS, ...)                                                  \
    {                                                                                \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kernelmark_in_c." NAME,            \
        .tp_basicsize = sizeof(Object),                                              \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | FLAGS,                 \
        .tp_new = NEW, .tp_dealloc = dealloc, .tp_traverse = visit, .tp_clear = clear, \
        __VA_ARGS__                                                                  \
    }
#define CALLED .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Object, call)

static PyTypeObject LauncherType = TYPE("Launcher", new_launcher, Py_TPFLAGS_HAVE_VECTORCALL, CALLED);
static PyTypeObject FrontType = TYPE("Front", new_front, Py_TPFLAGS_HAVE_VECTORCALL, CALLED);
static PyTypeObject KindType = TYPE("Kind", new_kind, 0, .tp_methods = kind_methods, .tp_getset = kind_members);

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernelmark_in_c", NULL, -1, methods};

PyMODINIT_FUNC PyInit_kernelmark_in_c(void) {
    struct { PyObject **at; const char *is; } names[] = {
        {&name_base, "base"}, {&name_says, "says"}, {&name_calls, "calls"}, {&name_shape, "shape"},
        {&name_nested, "is_nested"}, {&name_enter, "launch_enter_hook"}, {&name_leave, "launch_exit_hook"},
        {&name_level, "_current_level"}, {&name_mode, "_is_in_torch_dispatch_mode"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        *names[i].at = PyUnicode_InternFromString(names[i].is);
        if (*names[i].at == NULL) return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    PyTypeObject *types[] = {&LauncherType, &FrontType, &KindType};
    for (int i = 0; i < 3; i++) {
        if (PyModule_AddType(module, types[i]) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    }
    return module;
}
"""


@functools.cache
def compiled() -> Any:
    """The module in C, or None where it cannot be had."""
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(SOURCE, NAME)
    except Exception:  # of a compiler, a linker, a loader, a folder that cannot be written
        return None
