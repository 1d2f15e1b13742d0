"""The others' implementations, one file a library.

A file here imports its library only inside functions and defines

* `IMPLEMENTATIONS`: operator name → implementation name → factory. A factory receives the case (anything
  with `axes`, `options`, `dtype` and `pass_`) and returns the callable that is timed; the callable takes
  the operator's inputs by keyword. What the library cannot do raises `NotImplementedError(reason)` in the
  factory or at the first call, and becomes an `unsupported` row with that reason.
* `REQUIRES`: the distributions it needs; the version of the first stands in the rows.
* `ENVIRONMENT` (default `"core"`): the virtual environment it lives in, where it cannot share one.
* `DEVICES` (default CUDA and CPU): where it runs at all, for the file or by implementation name.
"""
