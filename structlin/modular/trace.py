"""`trace`: the modular norm of an ordinary model, from its exported graph. Going beyond the papers.

The graph is read as an expression of the algebra. Its layers are atoms. An operation with several
inputs is a bond after the tuple of them; each of these is an expression of what they all depend on,
their nearest common dominator. So `x + f(x)` is `(Identity, f)`, then addition: sensitivities add.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from math import inf, nan, prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from .._arguments import require_module
from .._linear import StructuredLinear
from ..moe import Mixture
from .atoms import Conv2D, Embed, Linear
from .bonds import BONDS, FunctionalAttention
from .masses import masses as masses_of
from .module import (
    Add,
    Atom,
    Attributes,
    Bond,
    Composite,
    Identity,
    Module,
    Term,
    Tuple,
    Width,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import InputSpec

# ---- operations ----------------------------------------------------------------------------------

Bound = tuple[float, float]  # sensitivity and gamma, the bound of the second derivative
Declared = Mapping[Any, float | Bound]

#: Linear and of sensitivity 1: they move features, choose some, average them, or join inputs, whose
#: norms add. The n equal parts of a fused projection have sensitivity n together, as n projections
#: have; one alone could have sqrt(n).
_LINEAR = {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "permute", "transpose", "t",
    "unsqueeze", "squeeze", "expand", "clone", "alias", "detach", "contiguous", "to", "_to_copy",
    "dropout", "im2col", "roll", "flip", "select", "slice", "split", "chunk", "unbind", "getitem",
    "index", "index_select", "pad", "constant_pad_nd", "mean", "avg_pool2d", "where", "masked_fill",
    "neg", "rsub", "cat", "stack",
}  # fmt: skip


def _of_bond(node: fx.Node, args: tuple[Any, ...]) -> Bound:
    """Attributes of the algebra's bond."""
    bond = BONDS[_name(node.target)]()
    return bond.sensitivity, bond.sharpness.gamma


def _product(node: fx.Node, args: tuple[Any, ...]) -> Bound | None:
    """Attributes of a product with a constant; a tensor counts by the largest entry that it has
    now. Of two activations it has no bound."""
    factors = [value for value in args[:2] if not isinstance(value, _Vertex)]
    return (_largest(factors[0]), 0.0) if factors and factors[0] is not _INDICES else None


def _quotient(node: fx.Node, args: tuple[Any, ...]) -> Bound | None:
    divisor = args[1]
    return (
        None
        if isinstance(divisor, _Vertex) or divisor is _INDICES
        else (_largest(1 / torch.as_tensor(divisor)), 0.0)
    )


def _parts(node: fx.Node, args: tuple[Any, ...]) -> Bound:
    """n parts of shares w: together they have sensitivity sqrt(sum of 1 / w), which is n for equal
    ones."""
    sizes = args[1]
    return sqrt(sum(sum(sizes) / size for size in sizes)) / len(sizes), 0.0


def _largest_of_window(node: fx.Node, args: tuple[Any, ...]) -> Bound:
    """Each of the channels may take another element: of k elements, whose RMS over the channels is
    at most 1 each, the largest ones have sqrt(k). Windows that overlap change nothing."""
    sizes, dims = args[1], int(_name(node.target)[-2])
    return sqrt(prod(sizes * dims if len(sizes) == 1 else sizes)), 0.0


def _sum(node: fx.Node, args: tuple[Any, ...]) -> Bound | None:
    return (1.0, 0.0) if node.kwargs.get("alpha", 1) == 1 else None


def _normalisation(node: fx.Node, args: tuple[Any, ...]) -> Bound:
    """The bond, then its gain; a bias shifts."""
    sensitivity, gamma = _of_bond(node, args)
    gain = _largest(args[2]) if len(args) > 2 and args[2] is not None else 1.0
    return gain * sensitivity, gain * gamma


def _attention(node: fx.Node, args: tuple[Any, ...]) -> Bound | None:
    """The bond is for a scale of 1 / d; at c / d the logits, and so queries and keys, count c times
    as much."""
    if any(isinstance(value, _Vertex) for value in args[3:]):
        return None  # a mask with a gradient
    bond, queries = BONDS["scaled_dot_product_attention"](causal=False), node.args[0]
    assert isinstance(queries, fx.Node)
    width, scale = queries.meta["val"].shape[-1], node.kwargs.get("scale")
    c = max(1.0, sqrt(width) if scale is None else abs(scale) * width)  # type: ignore[arg-type]
    return c * bond.sensitivity, c**2 * bond.sharpness.gamma


#: Operation -> its bound, None if it has none for these arguments. What depends on no input is an
#: argument by value.
RULES: dict[str, Callable[[fx.Node, tuple[Any, ...]], Bound | None]] = {
    **{name: lambda node, args: (1.0, 0.0) for name in _LINEAR},
    **dict.fromkeys(BONDS, _of_bond),
    "split_with_sizes": _parts,
    **{f"max_pool{dims}d": _largest_of_window for dims in (1, 2, 3)},
    "add": _sum,
    "sub": _sum,
    "mul": _product,
    "div": _quotient,
    "layer_norm": _normalisation,
    "rms_norm": _normalisation,
    "scaled_dot_product_attention": _attention,
}


class Operation(Bond):
    """What the graph does between its layers, by its bounds alone."""

    def __init__(self, name: str, sensitivity: float = 1.0, gamma: float = 0.0) -> None:
        super().__init__()
        self.name, self.own_sensitivity, self.gamma = name, sensitivity, gamma

    def width(self, width: Width) -> Width:
        return None

    def extra_repr(self) -> str:
        return f"{self.name}, sensitivity={self.own_sensitivity:.6g}"


# ---- layers --------------------------------------------------------------------------------------


class _Layer(Linear):
    """An nn.Linear or StructuredLinear of the model. A bias shifts, and has no part in the norm."""

    def terms(self) -> list[Term]:
        layer = self.linear
        if not isinstance(layer, StructuredLinear):
            return [Term("linear.weight", self._mass, 1.0, self)]
        _, cut = self._padding()
        share = self._mass / len(layer.cores)
        return [Term(f"linear.cores.{n}", share, cut, self) for n in range(len(layer.cores))]


class _Convolution(Conv2D):
    def terms(self) -> list[Term]:
        return [Term("conv.weight", self._mass, 1.0, self)]


_LAYERS: dict[type[nn.Module], tuple[type[Atom], str]] = {
    nn.Linear: (_Layer, "linear"),
    StructuredLinear: (_Layer, "linear"),
    nn.Embedding: (Embed, "embedding"),
    nn.Conv2d: (_Convolution, "conv"),
}
_BY_OPERATION = (Add, FunctionalAttention)  # bonds of several inputs, which the graph shows better


def _atom(name: str, layer: nn.Module, mass: float) -> Atom:
    """An atom that holds the model's own layer.

    Raises:
        ValueError: the layer has weights that the algebra has no norm for.
    """
    if isinstance(layer, Atom):
        twin = type(layer).__new__(type(layer))
        twin.__dict__ = dict(layer.__dict__)  # the layers are the same, its mass is its own
        return twin
    why = ""
    if isinstance(layer, Mixture):
        why = "a router"
    elif isinstance(layer, StructuredLinear):
        why = "gains (weight_norm=True)" if layer.gains is not None else ""
    elif layer._parameters.get("weight") is None:
        why = "a weight that is no parameter of its own"
    elif isinstance(layer, nn.Conv2d) and layer.groups != 1:
        why = f"groups={layer.groups}"
    if why:
        raise ValueError(
            f"trace: {name!r} is a {type(layer).__name__} with {why}, "
            "for which the algebra has no norm"
        )
    kind, attribute = next(entry for own, entry in _LAYERS.items() if isinstance(layer, own))
    atom = kind.__new__(kind)
    Atom.__init__(atom, mass)
    setattr(atom, attribute, layer)
    return atom


# ---- the graph -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Vertex:
    """What depends on the model's input or on a layer: a module of the algebra applied to other
    such."""

    module: Module
    inputs: list["_Vertex"] = field(default_factory=list)
    name: str = ""  #: of the model's layer
    constant: bool = False  #: depends on layers, but not on the model's input
    dominator: "_Vertex | None" = None  #: the nearest that all ways from the source lead through
    depth: int = 0

    def settle(self, source: "_Vertex") -> None:
        """When the inputs are known and settled."""
        self.constant = all(each.constant for each in self.inputs)
        leading = [each for each in self.inputs if each.constant == self.constant] or [source]
        self.dominator = reduce(_common, leading)
        self.depth = self.dominator.depth + 1


def _common(a: _Vertex, b: _Vertex) -> _Vertex:
    """The nearest dominator of both."""
    while a is not b:
        a, b = (a, b) if a.depth >= b.depth else (b, a)
        assert a.dominator is not None
        a = a.dominator
    return a


_INDICES = object()  #: integers or booleans that depend on the input: tokens, masks


class _Reader:
    """Interprets a graph: what depends on neither the input nor a layer by its value, all else as a
    `_Vertex`."""

    def __init__(
        self,
        model: nn.Module,
        program: "ExportedProgram",
        masses: Mapping[str, float] | None,
        declared: Declared,
    ) -> None:
        self.model, self.program, self.masses = model, program, masses
        self.declared = {
            key if isinstance(key, type) else _name(key): bound
            if isinstance(bound, tuple)
            else (bound, nan)
            for key, bound in declared.items()
        }
        self.tensors = {**program.state_dict, **program.constants}
        self.source = _Vertex(Identity())
        self.vertices: list[_Vertex] = []
        self.parts: dict[str, _Vertex] = {}  # by call, of modules that are read as one
        self.unknown: dict[str, list[str]] = defaultdict(list)
        self.values: dict[fx.Node, Any] = {}

    @torch.no_grad()
    def read(self) -> Module:
        nodes, inputs = list(self.program.graph.nodes), self.program.graph_signature.input_specs
        for node, spec in zip(nodes, inputs, strict=False):
            self.values[node] = self.placeholder(node, spec)
        for node in nodes[len(inputs) : -1]:
            self.values[node] = self.call(node)
        if self.unknown:
            found = "; ".join(
                f"{name} (in {', '.join(places[:3])})" for name, places in self.unknown.items()
            )
            raise ValueError(
                f"trace: no sensitivity is known for {found}. Declare by how much it amplifies the "
                "sum of the norms of its inputs, for an operation or a class of modules: "
                "sensitivities={torch.ops.aten.mul: 1.0, Mine: 1.0}"
            )
        results = zip(nodes[-1].args[0], self.program.graph_signature.output_specs, strict=True)
        outputs = [self.values[node] for node, spec in results if spec.kind.name == "USER_OUTPUT"]
        outputs = [value for value in outputs if isinstance(value, _Vertex)]
        if not outputs:
            raise ValueError("trace: the output depends neither on the input nor on a layer")
        output = outputs[0] if len(outputs) == 1 else self.vertex(Operation("outputs"), outputs)
        users = [
            node
            for node, spec in zip(nodes, inputs, strict=False)
            if spec.kind.name == "USER_INPUT"
        ]
        for vertex in self.vertices:
            if not vertex.inputs and not any(map(_floating, users)):  # positions of tokens
                vertex.inputs = [self.source]
            vertex.settle(self.source)
        return _Writer(self.source).expression(output, self.source)

    def placeholder(self, node: fx.Node, spec: "InputSpec") -> Any:
        if spec.kind.name == "USER_INPUT":
            if not isinstance(node.meta["val"], Tensor):
                return node.meta["val"]
            return self.source if _floating(node) else _INDICES
        name = spec.target or ""
        owner = name.rpartition(".")[0]
        embedding = isinstance(self.model.get_submodule(owner), nn.Embedding)
        # its vectors, read without it
        if embedding and not all(self.one(user)[0] for user in node.users):
            return self.part(f"{owner}.weight", owner, [])
        return self.tensors[name]

    def call(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.get)
        leaves = tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, _Vertex)]
        if not inputs and any(leaf is _INDICES for leaf in leaves):
            inputs = [self.source]
        call, layer = self.one(node)
        if call and (inputs or isinstance(self.model.get_submodule(layer), (*_LAYERS, Atom))):
            return self.part(call, layer, inputs)
        if node.op == "get_attr":
            return getattr(self.program.graph_module, str(node.target))
        if not inputs:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if not _floating(node):
            return _INDICES
        name, place = _name(node.target), _calls(node)[-1][1] or type(self.model).__name__
        if name not in RULES and any(
            isinstance(leaf, nn.Parameter) and leaf.ndim > 1 for leaf in leaves
        ):
            known = ", ".join(kind.__name__ for kind in _LAYERS)
            raise ValueError(
                f"trace: {place} multiplies by weights of its own in {name}; only {known} are atoms"
            )
        bound = self.declared.get(name) or (RULES[name](node, args) if name in RULES else None)
        if bound is None:
            self.unknown[name].append(place)
        elif not 0 < bound[0] < inf:
            raise ValueError(
                f"trace: {name} in {place} has sensitivity {bound[0]}, by which the norm divides: "
                "it must be positive and finite (a gain that starts at zero has none)"
            )
        return self.vertex(
            Operation(name, *(bound or ())), inputs[:1] if _subtracts_mean(node) else inputs
        )

    def one(self, node: fx.Node) -> tuple[str, str]:
        """The outermost call around a node of a module that is read as one, and the name of the
        module."""
        return next(
            (call for call in _calls(node) if self.is_one(self.model.get_submodule(call[1]))),
            ("", ""),
        )

    def is_one(self, module: nn.Module) -> bool:
        known = isinstance(module, (*_LAYERS, Atom, Bond)) and not isinstance(module, _BY_OPERATION)
        return known or self.kind(module) is not None

    def kind(self, module: nn.Module) -> type | None:
        """Its class that is declared."""
        return next(
            (key for key in self.declared if isinstance(key, type) and isinstance(module, key)),
            None,
        )

    def part(self, call: str, name: str, inputs: list[_Vertex]) -> _Vertex:
        """The vertex of a call of a module that is read as one, with these inputs too."""
        if call not in self.parts:
            module = self.model.get_submodule(name)
            kind = self.kind(module)
            if kind is not None:
                if any(isinstance(inside, (*_LAYERS, Atom)) for inside in module.modules()):
                    raise ValueError(
                        f"trace: sensitivities has {kind.__name__}, but {name!r} has layers, "
                        "which need a mass"
                    )
                self.parts[call] = self.vertex(Operation(kind.__name__, *self.declared[kind]), [])
            elif isinstance(module, Bond):
                self.parts[call] = self.vertex(module, [])
            else:
                self.parts[call] = self.vertex(_atom(name, module, self.mass(name, module)), [])
                self.parts[call].name = name or type(module).__name__
        vertex = self.parts[call]
        vertex.inputs += [
            each
            for each in dict.fromkeys(inputs)
            if each is not vertex and each not in vertex.inputs
        ]
        return vertex

    def mass(self, name: str, layer: nn.Module) -> float:
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            return 0.0
        return 1.0 if self.masses is None else self.masses[name]

    def vertex(self, module: Module, inputs: list[_Vertex]) -> _Vertex:
        self.vertices.append(_Vertex(module, list(inputs)))
        return self.vertices[-1]


class _Writer:
    """Vertices -> an expression of the algebra, in which each weight appears once."""

    def __init__(self, source: _Vertex) -> None:
        self.source = source
        self.written: dict[Tensor, _Vertex] = {}  # by weight
        self.done: set[_Vertex] = set()

    def expression(self, vertex: _Vertex, start: _Vertex) -> Module:
        """`vertex` as a function of `start`, one of its dominators."""
        unread = vertex.constant and not start.constant
        parts: list[Module] = []
        while vertex is not (self.source if unread else start):
            self.once(vertex)
            assert vertex.dominator is not None
            parts.append(vertex.module)
            if len(vertex.inputs) > 1:
                parts.append(
                    Tuple(*(self.expression(each, vertex.dominator) for each in vertex.inputs))
                )
            vertex = vertex.dominator
        if unread:
            parts.append(Operation("constant", 0.0))
        return Composite(*reversed(parts)) if len(parts) > 1 else parts[0] if parts else Identity()

    def once(self, vertex: _Vertex) -> None:
        for weight in vertex.module.parameters() if vertex.name else ():
            other = self.written.setdefault(weight, vertex)
            if vertex in self.done:
                why = "the ways from it to the output cross, which no expression has"
            elif other is not vertex:
                why = (
                    "it is called twice"
                    if other.name == vertex.name
                    else f"it shares a weight with {other.name!r}"
                )
            else:
                continue
            raise ValueError(f"trace: the mass of {vertex.name!r} would count twice: {why}")
        self.done.add(vertex)


def _name(operation: Any) -> str:
    """Without namespace and overload: "mul" of torch.ops.aten.mul.Tensor, of torch.ops.aten.mul and
    of "mul"."""
    if isinstance(operation, torch._ops.OpOverload):
        operation = operation._schema.name
    if isinstance(operation, torch._ops.OpOverloadPacket):
        operation = operation._qualified_op_name
    name = (
        operation if isinstance(operation, str) else getattr(operation, "__name__", str(operation))
    )
    return name.rpartition("::")[2]


def _calls(node: fx.Node) -> list[tuple[str, str]]:
    """The calls of modules that a node is in, outermost first: an identifier, another for each
    call, and its name."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return [(call, name.partition("@")[0]) for call, (name, _) in stack.items()]


def _floating(node: fx.Node) -> bool:
    made = tree_leaves(node.meta.get("val"))
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in made)


def _subtracts_mean(node: fx.Node) -> bool:
    """x - mean(x), as MeanSubtract has it: of sensitivity 1, where a difference has 2."""
    if _name(node.target) != "sub" or not isinstance(node.args[1], fx.Node):
        return False
    return _name(node.args[1].target) == "mean" and node.args[1].args[0] is node.args[0]


def _largest(factor: Any) -> float:
    return torch.as_tensor(factor).abs().max().item()


# ---- for users -----------------------------------------------------------------------------------


class Traced(Module):
    """An ordinary model with the modular norm of its graph. Calling it calls the model, whose
    layers are its atoms.

    Weights have the names that they have in the model, so that it is not for use inside of other
    expressions. `expression` says how they are put together; its bonds are known by their bounds
    alone, it is not for calling.
    """

    expression: Module

    def __init__(self, model: nn.Module, expression: Module) -> None:
        super().__init__()
        self._orig_mod = model  # the name of torch.compile, by which optimizers know a wrapper
        self.__dict__["expression"] = expression  # no submodule: its layers are the model's

    @property
    def attributes(self) -> Attributes:
        return self.expression.attributes

    def terms(self) -> list[Term]:
        names = {weight: name for name, weight in self._orig_mod.named_parameters()}
        terms = self.expression.terms()
        weights = [self.expression.get_parameter(term.name) for term in terms]
        gone = sum(weight not in names for weight in weights)
        if gone:
            raise ValueError(
                f"trace: {gone} of {len(weights)} weights are no longer the model's, as after "
                "convert or load; trace it again"
            )
        return [replace(t, name=names[w]) for t, w in zip(terms, weights, strict=True)]

    def get_parameter(self, target: str) -> nn.Parameter:
        return self._orig_mod.get_parameter(target)

    def width(self, width: Width) -> Width:
        return self.expression.width(None)

    def tare(self, mass: float = 1.0) -> "Traced":
        self.expression.tare(mass)
        return self

    def reset_parameters(self) -> None:
        """Draw the weights of all layers anew, each of norm 1."""
        self.expression.reset_parameters()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def trace(
    model: nn.Module,
    example: Any,
    *,
    masses: Mapping[str, float] | None = None,
    sensitivities: Declared | None = None,
) -> Traced:
    """The modular norm of an ordinary model, from the graph that torch.export makes of it in eval
    mode.

    What is taken for what:

    - nn.Linear, `StructuredLinear`, nn.Embedding, nn.Conv2d: atoms, which hold the model's own
      layers. Atoms and bonds of the algebra inside of the model are themselves.
    - views, choices of elements, means, average pooling, dropout: sensitivity 1. The n equal parts
      of a fused projection have sensitivity n together, as n projections have.
    - max pooling: sqrt(k) for windows of k elements, since channels may choose different ones.
    - sums, differences, concatenation: the norms of the inputs add. x - mean(x) has sensitivity 1.
    - biases and whatever else is added that depends on no input: shifts, of no effect.
    - products with constants: their absolute value. Gains (of norms, of layer scale) count as the
      largest that they are now, and have no mass: `Muon` trains gains and biases apart.
    - relu, gelu, abs, layer and RMS norm, attention: as the bonds of the algebra. Its attention is
      scaled by 1 / d; scaled by c / d, as by 1 / sqrt(d), it has sensitivity c.
    - positions, an embedding of what is not the input: a function of the input where that is
      tokens, as MN has it; a constant, of sensitivity 0, elsewhere.

    Args:
        example: input; a mapping is passed as keywords, a tuple or list as positions, anything else
            as one argument.
        masses: role or glob over layer names -> mass, see `modular.masses`; None: 1 for each layer.
            A frozen layer has mass 0.
        sensitivities: operation (torch.ops.aten.softmax, or its name), or class of modules -> by
            how much it amplifies the sum of the norms of its inputs; or that and gamma, see
            `Sharpness`, which is NaN without. It goes before what is known.

    Raises:
        ValueError: operations without a known sensitivity, all of them named; a weight that would
            count twice (shared, called twice, or in branches that cross); a model that torch.export
            can not export.
        TypeError: `model` is not a module.

    >>> from structlin.modular import masses
    >>> from structlin.optim import Muon
    >>> class Block(nn.Module):
    ...     def __init__(self, width, depth):
    ...         super().__init__()
    ...         self.norm, self.fc, self.depth = nn.LayerNorm(width), nn.Linear(width, width), depth
    ...     def forward(self, x):
    ...         return (1 - 1 / self.depth) * x + 1 / self.depth * self.fc(self.norm(x)).abs()
    >>> model = nn.Sequential(nn.Linear(8, 64), Block(64, 2), Block(64, 2), nn.Linear(64, 10))
    >>> net = trace(model, torch.randn(4, 8))
    >>> net.mass, net.sensitivity, masses(net)["1.fc"]  # 1/4 of the mass, at half the sensitivity
    (4.0, 1.0, 0.5)
    >>> optimizer = Muon(model, lr=0.1, masses=masses(net))
    """
    require_module("model", model)
    shares = None
    if masses is not None:
        total = sum(masses.values())
        shares = {name: total * share for name, share in masses_of(model, masses).items()}
    program = _exported(model, example)
    return Traced(model, _Reader(model, program, shares, sensitivities or {}).read())


def _exported(model: nn.Module, example: Any) -> "ExportedProgram":
    kwargs = dict(example) if isinstance(example, Mapping) else {}
    args = () if kwargs else tuple(example) if isinstance(example, tuple | list) else (example,)
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about torch
            program = torch.export.export(model, args, kwargs, strict=False)
            functional: ExportedProgram = program.run_decompositions({})  # nothing in place
            return functional
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"trace: torch.export can not export {type(model).__name__}: {first}"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
