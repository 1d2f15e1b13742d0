"""Whole models as graphs of ONNX: Transformers' own classes with our weights, by PyTorch's exporter."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _transformers_models

Runs = Callable[[Any, dict[str, Any], list[Any]], None]


def exported(chosen: Any, B: int, S: int, weights: Any, folder: Path) -> Path:
    """The file of a model that gives logits of B sequences of S tokens, its weights in a file beside it."""
    import onnxscript  # noqa: F401  # the exporter's: what is missing is said before a model is built
    import torch

    model = _transformers_models.build(chosen, S, weights)
    device = next(model.parameters()).device
    cached = {} if chosen.model.name == "bert" else {"use_cache": False}

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any) -> Any:
            return self.model(input_ids=tokens, **cached).logits

    tokens = torch.zeros((B, S), dtype=torch.int64, device=device)
    path = folder / "model.onnx"
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr), torch.no_grad():
        warnings.simplefilter("ignore")  # of what the exporter itself will leave out some day
        program = torch.onnx.export(Logits().eval(), (tokens,), dynamo=True, verbose=False)
        assert program is not None
        program.save(path, external_data=True)
    return path


class Passes:
    """A model's graph in a runtime. `open` makes a session of a file, `run` has it write its answers."""

    def __init__(self, open: Callable[[str], Any], run: Runs) -> None:
        self._open, self._run = open, run

    def load(self, chosen: Any, B: int, S: int, dtype: str, weights: Any) -> None:
        """Exports the model and opens it. Raises `NotImplementedError` for what either of the two lacks."""
        import torch

        drawn = list(weights)
        self._like = drawn[0][1].new_empty(0)
        self._shape = (B, S, chosen.configuration.vocabulary)
        with tempfile.TemporaryDirectory() as folder:
            try:
                path = exported(chosen, B, S, drawn, Path(folder))
            except torch.onnx.OnnxExporterError as error:
                said = str(error).strip().splitlines()[0][:200]
                raise NotImplementedError(f"PyTorch's exporter has no graph of this model: {said}") from None
            del drawn
            self._session = self._open(str(path))

    def __call__(self, tokens: Any) -> Any:
        """Logits (B, S, V)."""
        (fed,) = self._session.get_inputs()
        answer = self._like.new_empty(self._shape)
        self._run(self._session, {fed.name: tokens}, [answer])
        return answer
