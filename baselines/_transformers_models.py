"""Models of Hugging Face Transformers with the weights of ours: configurations by their numbers, names of
parameters, and what is stored the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar


def configuration(chosen: Any, longest: int) -> Any:
    """The Transformers configuration of a model for sequences of up to `longest` tokens.

    Raises `NotImplementedError` for a family that has no class here.
    """
    family, c = chosen.model.name, chosen.configuration
    if family not in CONFIGURATIONS:
        raise NotImplementedError(f"this baseline builds {', '.join(CONFIGURATIONS)}, not {family}")
    return CONFIGURATIONS[family](c, longest)


def _llama(c: Any, longest: int) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    if c.norms != "before" or c.multipliers is not None or c.experts or c.qk_norm == "width":
        raise NotImplementedError("this baseline builds Llama and Qwen3; this model is of another class")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.base}
    if c.stretch != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": float(c.stretch),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    kind = Qwen3Config if c.qk_norm == "head" else LlamaConfig
    return kind(
        vocab_size=c.vocabulary,
        hidden_size=c.width,
        intermediate_size=c.hidden,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head,
        max_position_embeddings=longest,
        rms_norm_eps=c.eps,
        rope_parameters=rope,
        tie_word_embeddings=c.tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def _gpt2(c: Any, longest: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=c.vocabulary,
        n_positions=c.positions,
        n_embd=c.width,
        n_layer=c.layers,
        n_head=c.heads,
        layer_norm_epsilon=c.eps,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def _bert(c: Any, longest: int) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.width,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        intermediate_size=4 * c.width,
        max_position_embeddings=c.positions,
        type_vocab_size=c.types,
        layer_norm_eps=c.eps,
    )


def _mamba2(c: Any, longest: int) -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(
        vocab_size=c.vocabulary,
        hidden_size=c.width,
        num_hidden_layers=c.layers,
        num_heads=c.heads,
        head_dim=c.head,
        state_size=c.state,
        n_groups=c.groups,
        conv_kernel=c.window,
        expand=2,
        layer_norm_epsilon=c.eps,
        tie_word_embeddings=True,
        residual_in_fp32=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


CONFIGURATIONS: dict[str, Callable[[Any, int], Any]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "bert": _bert,
    "mamba2": _mamba2,
}

LAYERS = {
    "llama": "model.layers.{i}.",
    "gpt2": "transformer.h.{i}.",
    "bert": "bert.encoder.layer.{i}.",
    "mamba2": "backbone.layers.{i}.",
}
NAMES = {
    "llama": {
        "embedding": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
        "attention_norm": "input_layernorm.weight",
        "query": "self_attn.q_proj.weight",
        "key": "self_attn.k_proj.weight",
        "value": "self_attn.v_proj.weight",
        "output": "self_attn.o_proj.weight",
        "query_norm": "self_attn.q_norm.weight",
        "key_norm": "self_attn.k_norm.weight",
        "feed_norm": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    },
    "gpt2": {
        "embedding": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "norm": "transformer.ln_f.weight",
        "norm_bias": "transformer.ln_f.bias",
        "attention_norm": "ln_1.weight",
        "attention_norm_bias": "ln_1.bias",
        "projection": "attn.c_attn.weight",
        "projection_bias": "attn.c_attn.bias",
        "output": "attn.c_proj.weight",
        "output_bias": "attn.c_proj.bias",
        "feed_norm": "ln_2.weight",
        "feed_norm_bias": "ln_2.bias",
        "up": "mlp.c_fc.weight",
        "up_bias": "mlp.c_fc.bias",
        "down": "mlp.c_proj.weight",
        "down_bias": "mlp.c_proj.bias",
    },
    "bert": {
        "embedding": "bert.embeddings.word_embeddings.weight",
        "positions": "bert.embeddings.position_embeddings.weight",
        "types": "bert.embeddings.token_type_embeddings.weight",
        "norm": "bert.embeddings.LayerNorm.weight",
        "norm_bias": "bert.embeddings.LayerNorm.bias",
        "projection": "attention.self.{part}.weight",
        "projection_bias": "attention.self.{part}.bias",
        "output": "attention.output.dense.weight",
        "output_bias": "attention.output.dense.bias",
        "attention_norm": "attention.output.LayerNorm.weight",
        "attention_norm_bias": "attention.output.LayerNorm.bias",
        "up": "intermediate.dense.weight",
        "up_bias": "intermediate.dense.bias",
        "down": "output.dense.weight",
        "down_bias": "output.dense.bias",
        "feed_norm": "output.LayerNorm.weight",
        "feed_norm_bias": "output.LayerNorm.bias",
        "transform": "cls.predictions.transform.dense.weight",
        "transform_bias": "cls.predictions.transform.dense.bias",
        "transform_norm": "cls.predictions.transform.LayerNorm.weight",
        "transform_norm_bias": "cls.predictions.transform.LayerNorm.bias",
    },
    "mamba2": {
        "embedding": "backbone.embeddings.weight",
        "norm": "backbone.norm_f.weight",
        "layers.norm": "norm.weight",
        "input": "mixer.in_proj.weight",
        "convolution": "mixer.conv1d.weight",
        "convolution_bias": "mixer.conv1d.bias",
        "decay": "mixer.A_log",
        "skip": "mixer.D",
        "step_bias": "mixer.dt_bias",
        "gated_norm": "mixer.norm.weight",
        "output": "mixer.out_proj.weight",
    },
}
"""Our names of parameters, without a layer's number, to theirs."""


TRANSPOSED = {"gpt2": ("projection", "output", "up", "down")}
"""Our names of the matrices that are stored (in, out)."""


def place(family: str, name: str) -> tuple[str, bool]:
    """Their name of a parameter of ours, and whether it is stored transposed."""
    names = NAMES[family]
    head, _, last = name.rpartition(".")
    prefix = LAYERS[family].format(i=head.removeprefix("layers.")) if head else ""
    theirs = prefix + names.get(f"layers.{last}" if head else last, names[last])
    return theirs, bool(head) and last in TRANSPOSED.get(family, ())


def renamed(family: str, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Weights by our names to theirs, turned where theirs are stored so."""
    for name, values in weights:
        theirs, turned = place(family, name)
        values = values.t() if turned else values
        if family == "mamba2" and name.endswith(".convolution"):
            values = values[:, None]
        if "{part}" in theirs:
            for part, piece in zip(("query", "key", "value"), values.chunk(3), strict=True):
                yield theirs.format(part=part), piece
        else:
            yield theirs, values


def build(chosen: Any, longest: int, weights: Iterable[tuple[str, Any]]) -> Any:
    """The model of Transformers' own class with these weights, in their dtype and on their device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    drawn = list(weights)
    family = chosen.model.name
    kind: Any = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    given = configuration(chosen, longest)
    attention = {} if family == "mamba2" else {"attn_implementation": "sdpa"}
    with torch.device(drawn[0][1].device):
        model = kind.from_config(given, dtype=drawn[0][1].dtype, **attention).eval()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in renamed(family, drawn):
            own.pop(name).copy_(values)
        for name in [x for x in own if x.endswith("predictions.bias") or x.endswith("decoder.bias")]:
            own.pop(name).zero_()  # our BERT has none
    if own:
        raise ValueError(f"no values for {', '.join(own)}")
    return model


def _as_it_is(x: Any) -> Any:
    return x


def _turned(x: Any) -> Any:
    return x.t()


class Training:
    """A model of its own class for `train`, attention by `sdpa`, with the loss that it computes itself."""

    def __init__(self, patch: Callable[[str, Any], Any] = lambda family, model: model) -> None:
        self._patch = patch

    def build(self, chosen: Any, S: int, weights: Iterable[tuple[str, Any]]) -> None:
        """The model with these weights; `patch` gives what is called for it."""
        self._family = chosen.model.name
        if self._family not in ("llama", "gpt2"):
            raise NotImplementedError(f"this baseline trains llama and gpt2, not {self._family}")
        drawn = list(weights)
        self._names = [name for name, _ in drawn]
        self._model = build(chosen, S, drawn).train()
        self._call = self._patch(self._family, self._model)

    def parameters(self) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
        """By our names, each with what makes of it a view in our order."""
        own = dict(self._model.named_parameters())
        found: dict[str, tuple[Any, Callable[[Any], Any]]] = {}
        for name in self._names:
            theirs, turned = place(self._family, name)
            found[name] = own[theirs], _turned if turned else _as_it_is
        return found

    def loss(self, tokens: Any, targets: Any) -> Any:
        """Of targets that are one place on already."""
        return self._call(tokens, labels=targets, shift_labels=targets, use_cache=False).loss


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save(chosen: Any, longest: int, weights: Iterable[tuple[str, Any]], folder: Any) -> None:
    """A model's folder for servers: configuration, weights, and a tokenizer whose words are t0, t1, …: the token's
    own numbers, so that tokens can be read from text.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import WordPiece as Spaced
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    build(chosen, longest, weights).save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(chosen.configuration.vocabulary)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.decoder = Spaced(prefix="\x00", cleanup=False)  # joins with spaces
    kind: Any = PreTrainedTokenizerFast  # it is not annotated
    tokenizer = kind(tokenizer_object=words, model_max_length=longest, unk_token="t0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def stored(folder: Any) -> str:
    """The dtype of the weights in a model's folder, as its configuration names it."""
    configuration = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return str(configuration.get("dtype") or configuration["torch_dtype"])  # its name before Transformers 5


class Folder:
    """A server that is given a model's folder: what `serve` starts, `argv` by library."""

    checked = True
    words = True
    path = "/v1/chat/completions"
    extra: ClassVar[dict[str, Any]] = {}
    variables: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}

    def prepare(self, chosen: Any, longest: int, weights: Iterable[tuple[str, Any]], folder: Any) -> None:
        """Writes the folder."""
        save(chosen, longest, weights, folder)

    def command(self, folder: Any, port: int, longest: int, device: str) -> list[str]:
        """What starts the server on a port of the loopback."""
        raise NotImplementedError
