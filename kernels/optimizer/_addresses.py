"""Addresses of many tensors in one call, for an optimizer's step, which asks hundreds where they lie.

Python's loop over them costs the host 50 ns a tensor. In C it is a tenth: by the function that the code of
PyTorch's Inductor reads addresses by, in a loop that Triton compiles and caches, with the compiler that its own
launchers need. Where one of these is not there, Python's loop finds the same.
"""

from __future__ import annotations

import functools
import operator as py
import struct
import subprocess
import sys
import weakref
from typing import Any

import torch

from .. import _launch

SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

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
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernelmark_addresses", NULL, -1, methods};

PyMODINIT_FUNC PyInit_kernelmark_addresses(void) { return PyModule_Create(&definition); }
"""

_read: Any = getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", None)


def functions(device: torch.device) -> Any:
    """Those in C for tensors of a device, or None."""
    return compiled() if device.type in _launch._DEVICES else None


@functools.cache
def compiled() -> Any:
    """The functions in C, or None where they cannot be had."""
    if not isinstance(_read, int):
        return None
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(SOURCE, "kernelmark_addresses")
    except (ImportError, OSError, RuntimeError, TypeError, subprocess.SubprocessError):
        return None


def addresses(tensors: list[torch.Tensor]) -> bytes:
    """int64 words, one a tensor. Of any objects: those that lie nowhere raise AttributeError, TypeError or
    RuntimeError.
    """
    return struct.pack(f"{len(tensors)}q", *map(torch.Tensor.data_ptr, tensors))


_LOWEST = slice(0 if sys.byteorder == "little" else 7, None, 8)
_EVEN = bytes(range(0, 256, 16))


def aligned(places: bytes) -> bool:
    """Whether all of such words are multiples of 16: by each one's lowest byte."""
    return not places[_LOWEST].translate(None, _EVEN)


def known_addresses(tensors: list[torch.Tensor], device: torch.device) -> bytes:
    """`addresses` of strided tensors that are known to have memory; in C others could not raise anything."""
    in_c, found = functions(device), None
    if in_c is not None:
        found = in_c.addresses(tensors, _read, torch.Tensor, torch.nn.Parameter)
    return addresses(tensors) if found is None else found


def same(references: list[weakref.ref[torch.Tensor]], tensors: list[torch.Tensor], device: torch.device) -> bool:
    """Whether these are the very objects that were referred to."""
    in_c = functions(device)
    if in_c is not None:
        found: bool = in_c.same(references, tensors)
        return found
    return len(references) == len(tensors) and all(map(py.is_, map(py.call, references), tensors))
