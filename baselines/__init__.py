"""The others' implementations, one file a library.

A file here imports its library only inside functions and defines

* `IMPLEMENTATIONS`: operator name → implementation name → factory. A factory receives the case (anything
  with `axes`, `options`, `dtype` and `pass_`) and returns the callable that is timed; the callable takes
  the operator's inputs by keyword. What the library cannot do raises `NotImplementedError(reason)` in the
  factory or at the first call, and becomes an `unsupported` row with that reason.
  The pass is "forward", "backward", "forward_backward", or "program" for a part of a model in training: forward
  and backward once each, after which nobody reads the inputs again. A part of a model that takes no gradients
  (`forward`, `generate`, `serve`) has the pass "forward".
  What a library forces on its user beside its own work (a copy of what it overwrites, another order in memory)
  is inside that call; the callable's attribute `conversion`, where it has one, does that part alone, on the
  same keyword arguments, so that it can be timed beside the call (`_terms.py`).
* `REQUIRES`: the distributions it needs; the version of the first stands in the rows.
* `ENVIRONMENT` (default `"core"`): the virtual environment it lives in, where it cannot share one.
* `NO_ENVIRONMENT`: why no command of ours makes that environment, and what to do instead.
* `ONCE`: its implementations that a process can have once only: each case of them gets a process of its own.
* `APART`: operators of which its implementations take another process than those of others: what one leaves
  there would make the other wrong.
* `DEVICES` (default: all): where it runs at all, for the file or by implementation name.
"""
