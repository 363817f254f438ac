"""Pass tokens through a policy that has shapes and no values, and note the memory that it takes.

A model is made from its config in fake tensors (torch's FakeTensorMode), without a download and
without a GPU. The learner's own forward and backward pass runs over it, and every tensor that is
made is noted for as long as it lives. Layers of one kind hold the same, so the first of each kind
is computed and the others hand on what they get. What a layer holds grows with tokens along a line,
through two lengths.

Attention counts as a kernel for a GPU holds it: query, key, value, output, and a number a head and
token; no scores. Layers that carry a state count in torch's form, in chunks: kernels
(flash-linear-attention, mamba-ssm) hold less.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from params.schema.reinforce import Lora
from tasks.learning import packing
from tasks.learning.packing import Forest
from tasks.learning.recurrent import going_along
from tasks.policy import layer_kinds
from tasks.policy.attention_terms import less_sinks, window_of
from tasks.policy.lean_transformers import transformers
from tasks.policy.logits import backbone_of
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree

DRY = "dry"  # the name in transformers of attention that computes nothing
# Measured contexts have a multiple of these tokens, or of a scan's chunk, which a config says.
STEP = 64
CHUNKS = ("chunk_size", "mamba_chunk_size", "block_size")
LENGTHS = 2  # so many contexts are measured
OF_ROWS = 3  # for what grows with the square of a context
# Keys of a config that say where it comes from, or how files hold the weights.
WITHOUT_EFFECT = (
    *("_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version"),
)
CACHED = (4, 8)  # tokens of the contexts whose cache is measured: shorter than any window


class Line(NamedTuple):
    """What is always there, and what each token adds; in contexts of so many tokens more."""

    constant: float = 0.0
    each: float = 0.0
    square: float = 0.0  # what a token adds for each token of its context

    def at(self, tokens: int, context: int = 0) -> float:
        """Return it for so many tokens, in contexts of ``context`` tokens."""
        return self.constant + tokens * (self.each + self.square * context)


@dataclass(frozen=True)
class LayerPass:
    """What one layer holds and computes."""

    saved: Line  # bytes that its forward pass leaves for the backward pass
    backward: Line  # bytes that its backward pass holds at once beside what all layers have saved
    gradients: float  # and those of gradients of weights that are being made
    output: float  # bytes a token of what it hands on
    products: float  # multiplications a token by weights, in a forward pass
    pairs: float  # multiplications of attention for each token that a token sees
    window: int | None  # the most tokens that one sees


@dataclass(frozen=True)
class Pass:
    """What a pass over tokens holds: of each layer, and outside of them."""

    layers: tuple[LayerPass, ...]
    outside: Line  # embeddings, rotations, the last norm


@dataclass(frozen=True)
class CachedLayer:
    """What a sampler keeps of a path in one layer, in numbers."""

    each: float  # of each token: keys and values
    state: float  # of the path, however long it is
    window: int | None  # the most tokens that are looked at again


@cache
def measure(config_text: str, precision: str, lora: Lora | None, on_trees: bool) -> Pass:
    """Return what a pass of a policy with this config holds. About a second.

    ``precision``: machine.precision; ``on_trees``: whether it learns as trees, else as rows.
    """
    config = config_of(config_text)
    with _quiet():
        tokens = _lengths(config, LENGTHS if on_trees else OF_ROWS)
        try:
            runs = [_run(config, count, precision, lora, on_trees, True) for count in tokens]
        except Exception:  # layers that need what an earlier one of their kind has made
            runs = [_run(config, count, precision, lora, on_trees, False) for count in tokens]
    return _lines(runs, tokens)


def config_of(config_text: str) -> Any:
    """Return the config of transformers that was written as this text."""
    settings = json.loads(config_text)
    return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)


def text_of(config: Any) -> str:
    """Return a config of transformers as text, equal for equal configs."""
    values = {key: value for key, value in config.to_dict().items() if key not in WITHOUT_EFFECT}
    return json.dumps(values, sort_keys=True, default=str)


def _lengths(config: Any, count: int) -> list[int]:
    """Return so many lengths of contexts; none is a size of a weight, which would look the same."""
    with FakeTensorMode():
        sizes = {size for weight in model_of(config).parameters() for size in weight.shape}
    text = config.get_text_config(decoder=True)
    chunks = [getattr(text, name, None) for name in CHUNKS]
    step = max([STEP, *(size for size in chunks if isinstance(size, int))])
    found = (tokens for tokens in range(2 * step, 2**20, step) if tokens not in sizes)
    return [next(found) for _ in range(count)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep libraries from speaking of kernels that are not installed here."""
    level, fake = transformers.logging.get_verbosity(), logging.getLogger("torch._subclasses")
    before = fake.level
    transformers.logging.set_verbosity_error()
    fake.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        fake.setLevel(before)


# ---------------------------------------------------------------- a model without values


def model_of(config: Any) -> Any:
    """Return a model of a config; call it in a FakeTensorMode, or on the meta device."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    return model


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model in their order, outermost ones alone."""
    from torch.nn import ModuleList

    lists = [each for each in backbone_of(model).modules() if isinstance(each, ModuleList)]
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    whole = [each for each in lists if len(each) == count] or lists
    return list(whole[0]) if whole else []


def kinds_of(model: Any) -> list[int]:
    """Return for each layer the index of the first one that holds and computes the same."""
    config = model.config.get_text_config(decoder=True)
    said = [getattr(config, name, None) for name in layer_kinds.NAMED]
    layers = layers_of(model)
    lists = [each for each in said if isinstance(each, list | tuple) and len(each) == len(layers)]
    first: dict[Any, int] = {}
    kinds, learning = [], False  # before the first layer that learns, nothing is kept
    for index, layer in enumerate(layers):
        shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
        learning |= any(weight.requires_grad for weight in layer.parameters())
        kind = (type(layer), shapes, learning, tuple(str(each[index]) for each in lists))
        kinds.append(first.setdefault(kind, index))
    return kinds


def _adapt(model: Any, lora: Lora) -> None:
    """Freeze a model, and let its linear layers add what adapters of them do."""
    for weight in model.parameters():
        weight.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in lora.modules:
            layer.down = torch.nn.Parameter(torch.empty(lora.rank, layer.in_features))
            layer.up = torch.nn.Parameter(torch.empty(layer.out_features, lora.rank))
            layer.register_forward_hook(_adapted)


def _adapted(layer: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
    """Add an adapter's product to a layer's, as peft does."""
    linear = torch.nn.functional.linear
    return output + linear(linear(given[0].to(layer.down.dtype), layer.down), layer.up) * 1.0


# ---------------------------------------------------------------- what kernels hold


class _Attention(torch.autograd.Function):
    """Attention that computes nothing and holds what a kernel holds."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output, sums

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _dry_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Stand for attention in a layer, and note what it multiplies."""
    if noted := _noted[-1:]:
        window = window_of(module, sliding_window)
        noted[0].attention(query.shape[1] * (key.shape[-1] + value.shape[-1]), window)
    query, key = query.to(value.dtype), key.to(value.dtype)
    output, sums = _Attention.apply(query, key, value)
    if s_aux is not None:
        output = less_sinks(output, sums, s_aux)
    return output.transpose(1, 2), None


class _Grouped(torch.autograd.Function):
    """Products of groups of rows with a matrix each, of which nothing is computed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(each) if asked else None for each, asked in needed)


class _Kernels(TorchFunctionMode):
    """Puts _Grouped in the place of a product that fake tensors take in bfloat16 alone."""

    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self.noted = noted

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), settings: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            rows, weights = arguments[:2]
            self.noted.products += rows.numel() * weights.shape[-1]
            return _Grouped.apply(rows, weights)
        return function(*arguments, **(settings or {}))


# ---------------------------------------------------------------- noting a pass


@dataclass
class LayerNotes:
    """What one layer did in a pass; bytes and multiplications."""

    saved: float = 0.0
    reached: float = 0.0  # of all that was saved up to the end of this layer
    backward: float = 0.0
    gradients: float = 0.0
    output: float = 0.0
    products: float = 0.0
    pairs: float = 0.0
    window: int | None = None


@dataclass
class PassNotes:
    """What a pass over so many tokens did."""

    kinds: list[int]
    layers: dict[int, LayerNotes] = field(default_factory=dict)
    outside: float = 0.0


class Noted(TorchDispatchMode):
    """The bytes of all tensors that are made while it lasts, and multiplications."""

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[int, bool]] = {}
        self.now = self.gradients = 0.0
        weights = list(model.parameters()) if model else []
        there = [
            *weights,
            *(weight.grad for weight in weights),
            *(model.buffers() if model else ()),
        ]
        self.there = {each.untyped_storage()._cdata for each in there if each is not None}
        self.shapes = {tuple(sorted(weight.shape)) for weight in weights if weight.requires_grad}
        self.backward_of: LayerNotes | None = None  # whose backward pass runs
        self.products = self.pairs = 0.0
        self.window: int | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), settings: Any = None
    ) -> Any:
        made = function(*arguments, **(settings or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._watch(tensor)
        if (place := PRODUCTS.get(function.overloadpacket)) is not None:
            self.products += made.numel() * arguments[place].shape[-1]
        return made

    def _watch(self, tensor: Tensor) -> None:
        storage: Any = tensor.untyped_storage()
        if storage._cdata in self.sizes or storage._cdata in self.there:
            return
        notes = self.backward_of
        of_weight = notes is not None and tuple(sorted(tensor.shape)) in self.shapes
        self.sizes[storage._cdata] = storage.nbytes(), of_weight
        self._add(storage.nbytes(), of_weight)
        if notes:
            notes.backward = max(notes.backward, self.now - notes.reached)
            notes.gradients = max(notes.gradients, self.gradients)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _add(self, size: float, of_weight: bool) -> None:
        if of_weight:
            self.gradients += size
        else:
            self.now += size

    def _forget(self, key: int) -> None:
        size, of_weight = self.sizes.pop(key)
        self._add(-size, of_weight)

    def attention(self, pairs: float, window: int | None) -> None:
        self.pairs += pairs
        self.window = window


# matrix products -> the argument whose last dimension is summed over
PRODUCTS: dict[Any, int] = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}
_noted: list[Noted] = []  # the one of the pass that runs now


def _run(
    config: Any, tokens: int, precision: str, lora: Lora | None, on_trees: bool, once: bool
) -> PassNotes:
    """Pass a context of so many tokens forward and backward, and return what was noted.

    ``once``: compute the first layer of each kind alone.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    forest = _forest(tokens) if on_trees else None
    with mode:
        model = model_of(config)
        if lora:
            _adapt(model, lora)
        for weight in model.parameters():
            weight.grad = torch.empty_like(weight) if weight.requires_grad else None
        model.set_attn_implementation(DRY)
    kinds = kinds_of(model)
    noted, run = Noted(model), PassNotes(kinds)
    low = precision == "bfloat16"
    _noted.append(noted)
    try:
        with ExitStack() as stack:
            stack.enter_context(going_along(model) if on_trees else nullcontext())
            stack.enter_context(_watching(model, noted, run, once))
            stack.enter_context(noted)
            stack.enter_context(mode)
            stack.enter_context(_Kernels(noted))
            with torch.autocast("cpu", torch.bfloat16, enabled=low, cache_enabled=False):
                states = _states(model, forest, tokens)
            run.outside = noted.now - sum(layer.saved for layer in run.layers.values())
            torch.autograd.backward(states, torch.empty_like(states))
    finally:
        _noted.pop()
    return run


def _states(model: Any, forest: Forest | None, tokens: int) -> Tensor:
    """Return the hidden states of a context, as the learner computes them."""
    backbone = backbone_of(model)
    if forest is None:
        ids = torch.zeros(1, tokens, dtype=torch.long)
        output = backbone(input_ids=ids, use_cache=False)
    else:
        output = backbone(
            input_ids=forest.tokens, position_ids=forest.positions, use_cache=False, forest=forest
        )
    states: Tensor = output.last_hidden_state
    return states


def _forest(tokens: int) -> Forest:
    """Return a forest of one context."""
    ids, none = np.zeros(tokens - 1, np.int32), np.zeros(0, np.float32)
    numbers = np.zeros(tokens - 1, np.float32)
    nodes = [
        Node(-1, PROMPT, "", "", ids[:1], none, none),
        Node(0, TURN, "", "", ids, numbers, numbers),
    ]
    credited = packing.uncredited(Tree(Question("", "", "", ()), nodes, [1]))
    return packing.forest(packing.lay_out([(credited, [0])]), "cpu")


@contextmanager
def _watching(model: Any, noted: Noted, run: PassNotes, once: bool) -> Iterator[None]:
    """Note what each layer does while this lasts; layers of a kind that was seen do nothing."""
    hooks = []
    outputs: dict[int, Any] = {}
    for index, layer in enumerate(layers_of(model)):
        if once and run.kinds[index] != index:
            layer.forward = partial(_hand_on, outputs, run.kinds[index])
            continue
        watch = _Watch(index, noted, run, outputs)
        hooks.append(layer.register_forward_pre_hook(watch.begin, with_kwargs=True))
        hooks.append(layer.register_forward_hook(watch.end))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hand_on(outputs: Mapping[int, Any], kind: int, *given: Any, **rest: Any) -> Any:
    """Return what a layer is given, in the form in which the first of its kind returns it."""
    states = _given_states(given, rest)
    states = states.view_as(states)
    others = outputs[kind]
    return states if others is None else (states, *others)


def _given_states(given: Sequence[Any], rest: Mapping[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a layer."""
    states: Tensor = given[0] if given else rest["hidden_states"]
    return states


@dataclass
class _Watch:
    """Notes what one layer does."""

    index: int
    noted: Noted
    run: PassNotes
    outputs: dict[int, Any]
    before: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def begin(self, _: Any, given: Sequence[Any], rest: Mapping[str, Any]) -> None:
        """Note what there was before the layer, and let its backward pass end at its input."""
        notes = self.run.layers[self.index] = LayerNotes()
        states = _given_states(given, rest)
        if states.requires_grad:
            states.register_hook(partial(self._close, notes))
        self.noted.window = None
        self.before = (self.noted.now, self.noted.products, self.noted.pairs)

    def end(self, _: Any, __: Any, output: Any) -> None:
        """Note what the layer did, and begin to watch its backward pass when that begins."""
        several = isinstance(output, tuple)
        states = output[0] if several else output
        self.outputs[self.index] = output[1:] if several else None
        notes, noted = self.run.layers[self.index], self.noted
        now, products, pairs = self.before
        notes.saved, notes.reached = noted.now - now, noted.now
        notes.output = states.numel() * states.element_size()
        notes.products, notes.pairs = noted.products - products, noted.pairs - pairs
        notes.window = noted.window
        if states.requires_grad:
            states.register_hook(partial(self._open, notes))

    def _open(self, notes: LayerNotes, _: Any) -> None:
        self.noted.backward_of = notes

    def _close(self, notes: LayerNotes, _: Any) -> None:
        if self.noted.backward_of is notes:
            self.noted.backward_of = None


# ---------------------------------------------------------------- what grows with tokens


def _lines(runs: Sequence[PassNotes], tokens: Sequence[int]) -> Pass:
    """Return what passes over ``tokens`` each say of any number of tokens."""
    layers = {
        index: LayerPass(
            saved=_line([run.layers[index].saved for run in runs], tokens),
            backward=_line([run.layers[index].backward for run in runs], tokens),
            gradients=notes.gradients,
            output=notes.output / tokens[-1],
            products=notes.products / tokens[-1],
            pairs=notes.pairs,
            window=notes.window,
        )
        for index, notes in runs[-1].layers.items()
    }
    kinds = runs[-1].kinds
    return Pass(
        tuple(layers[index if index in layers else kinds[index]] for index in range(len(kinds))),
        _line([run.outside for run in runs], tokens),
    )


def _line(sizes: Sequence[float], tokens: Sequence[int]) -> Line:
    """Return the line through two sizes, or the parabola through three."""
    if len(sizes) == 2:
        each = (sizes[1] - sizes[0]) / (tokens[1] - tokens[0])
        return Line(max(0.0, sizes[0] - each * tokens[0]), each)
    square, each, constant = np.polyfit(np.array(tokens, float), np.array(sizes, float), 2)
    if abs(square) * tokens[-1] < 1e-3 * abs(each):
        square, (each, constant) = 0.0, np.polyfit(tokens, np.array(sizes, float), 1)
    return Line(max(0.0, float(constant)), float(each), float(square))


# ---------------------------------------------------------------- the sampler's cache


@cache
def cached(config_text: str) -> tuple[CachedLayer, ...]:
    """Return what transformers' own cache keeps of a path in each layer; () without a cache."""
    with _quiet():
        sizes = [_cache_sizes(config_of(config_text), tokens) for tokens in CACHED]
    less, more = sizes
    few, many = CACHED
    return tuple(
        CachedLayer(
            each=(size - before) / (many - few),
            state=max(0.0, size - many * (size - before) / (many - few)),
            window=window,
        )
        for (before, _), (size, window) in zip(less, more, strict=True)
    )


def _cache_sizes(config: Any, tokens: int) -> list[tuple[int, int | None]]:
    """Return how many numbers the cache of each layer has after so many tokens, and its window."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        model = model_of(config)
        model.set_attn_implementation(DRY)
        with _Kernels(Noted()), mode:
            ids = torch.zeros(1, tokens, dtype=torch.long)
            kept = backbone_of(model)(input_ids=ids, use_cache=True)
        layers = getattr(getattr(kept, "past_key_values", None), "layers", None) or []
        return [
            (
                sum(each.numel() for each in _tensors(vars(layer)) if each.ndim > 1),
                getattr(layer, "sliding_window", None),
            )
            for layer in layers
        ]


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


transformers.AttentionInterface.register(DRY, _dry_attention)
