"""The families: hyperparameters -> a `Structure` for a width. The only file that names them and
their formulas.

`W` is `(out_features, in_features)`, `y = W x`. Source, where none is named: Qiu et al. 2024,
"Compute Better Spent" (arXiv:2406.06248). Widths are factorised as evenly as possible (its appendix
E.2). Where `factorise` pads one, the structure is larger than the layer, and the layer slices.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import isfunction
from math import gcd, prod
from numbers import Integral
from typing import Annotated, Any

from .arguments import Range, checked, require_bounded, require_choice, warn
from .axes import ACTIVATIONS, MOST_AXES, NO_SUM, refuse_sum
from .structure import Structure
from .widths import divisors, factorise, name_nearest

MAX_PADDING = 0.15  # share of a width that is padded without a warning
# that `compress` may choose: every small one, then in steps that are small for their size
RANKS = (*range(1, 17), *range(24, 513, 8), *range(576, 8193, 64))

# by name, in lower case; a subclass is in it once it is defined
FAMILIES: dict[str, type["Family"]] = {}


@dataclass(frozen=True)
class Family(ABC):
    """Hyperparameters that give a `Structure` for every width. Subclass it, or declare a
    `Structure`: both work everywhere. A subclass is known by its name, case ignored, from then on:
    to `family`, in files and on command lines.

    >>> @dataclass(frozen=True)
    ... class Halves(Family):
    ...     def structure(self, in_features: int, out_features: int) -> Structure:
    ...         i, o = in_features // 2, out_features // 2
    ...         return Structure("h i -> h o", "h o i", h=2, i=i, o=o)
    >>> Halves().structure(8, 6).params, family("halves")
    (24, Halves())
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        namesake = FAMILIES.get(cls.__name__.lower())
        if namesake is not None and namesake.__module__ == __name__ != cls.__module__:
            raise ValueError(
                f"class {cls.__name__}: structlin has the family {namesake.__name__}, and case is "
                "ignored; take another name"
            )
        FAMILIES[cls.__name__.lower()] = cls
        if isfunction(vars(cls).get("structure")):
            cls.structure = checked(cls.structure)  # type: ignore[method-assign]

    @abstractmethod
    def structure(self, in_features: int, out_features: int) -> Structure:
        """The structure of a layer `in_features -> out_features`.

        Its own `in_features` and `out_features` may be larger: padding.

        Raises:
            ValueError: the hyperparameters do not fit these widths; the message names what would.
        """

    def sizes(self, in_features: int, out_features: int) -> "Sequence[Family]":
        """The same family in every size that `compress` may choose, from the least parameters to
        the most; empty if there is nothing to choose.

        Sizes that do not fit these widths, or cost as much as a dense matrix, are passed over. A
        family with a rank may give `[replace(self, rank=rank) for rank in range(1, 257)]`.

        >>> BlockDiagonal(blocks=1).sizes(3, 6), Kronecker().sizes(3, 6)
        ([BlockDiagonal(blocks=3), BlockDiagonal(blocks=2), BlockDiagonal(blocks=1)], ())
        """
        return ()

    @staticmethod
    @checked
    def divide(in_features: int, out_features: int, blocks: int) -> tuple[int, int]:
        """Return both widths over the number of blocks.

        Raises:
            ValueError: one is not divisible; the message names the nearest numbers that divide
                both.

        >>> Family.divide(12, 20, 4)
        (3, 5)
        """
        for side, width in (("in_features", in_features), ("out_features", out_features)):
            if width % blocks:
                fits = name_nearest(blocks, divisors(gcd(in_features, out_features)))
                raise ValueError(f"blocks={blocks} does not divide {side}={width}; {fits}")
        return in_features // blocks, out_features // blocks

    def activate(self, between: str = ACTIVATIONS[0]) -> "Family":
        """Return this family with an activation between the cores, see `Structure`.

        There is then no matrix: `compress`, `project` and `densify` refuse it. A layer starts with
        unit RMS before and after each activation. Source: CoLA (arXiv:2502.10940), for low-rank.

        >>> LowRank(rank=4).activate().structure(64, 128)
        Structure('i -> o', 'r i', 'o r', between='silu', i=64, o=128, r=4)
        """
        return Nonlinear(of=self, between=between)

    def __add__(self, other: object) -> "Family":
        if isinstance(other, Family | Structure):
            refuse_sum(self, other)
        return NotImplemented

    def __radd__(self, other: object) -> "Family":
        if isinstance(other, Structure):
            refuse_sum(other, self)
        return NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (for JSON); `family(**data)` is its inverse."""
        values = {f.name: _make_plain(getattr(self, f.name)) for f in fields(self)}
        return {"name": type(self).__name__, **values}

    @property
    def label(self) -> str:
        """Short text for tables; the usual number of cores is left out.

        >>> BTT(rank=4).label, BTT(rank=2, cores=3).label, Kronecker().label
        ('BTT(rank=4)', 'BTT(rank=2, cores=3)', 'Kronecker()')
        """
        options = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name != "cores" or value != option.default:
                options.append(f"{option.name}={value}")
        return f"{type(self).__name__}({', '.join(options)})"


def _make_plain(value: Any) -> Any:
    """An option of a family as JSON knows it: NumPy's integers are Python's."""
    if isinstance(value, Family):
        return value.to_dict()
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return value


@dataclass(frozen=True)
class Dense(Family):
    """A dense matrix, as a structure of one core.

    >>> Dense().structure(64, 128)
    Structure('i -> o', 'o i', i=64, o=128)
    """

    def structure(self, in_features: int, out_features: int) -> Structure:
        return Structure("i -> o", "o i", i=in_features, o=out_features)


@checked
@dataclass(frozen=True)
class LowRank(Family):
    """`W = U V` through a bottleneck of `rank`.

    >>> LowRank(rank=4).structure(64, 128)
    Structure('i -> o', 'r i', 'o r', i=64, o=128, r=4)
    """

    rank: int

    def structure(self, in_features: int, out_features: int) -> Structure:
        require_bounded(
            "rank", self.rank, min(in_features, out_features), "min(in_features, out_features)"
        )
        return Structure(
            "i -> o",
            "r i",  # V
            "o r",  # U
            i=in_features, o=out_features, r=self.rank,
        )  # fmt: skip

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        return [replace(self, rank=rank) for rank in RANKS]


@checked
@dataclass(frozen=True)
class BlockDiagonal(Family):
    """`blocks` independent dense matrices. It mixes nothing between blocks.

    >>> BlockDiagonal(blocks=4).structure(64, 128)
    Structure('b i -> b o', 'b o i', b=4, i=16, o=32)
    """

    blocks: int

    def structure(self, in_features: int, out_features: int) -> Structure:
        i, o = self.divide(in_features, out_features, self.blocks)
        return Structure("b i -> b o", "b o i", b=self.blocks, i=i, o=o)

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        most = min(in_features, out_features)  # blocks, which have the least parameters
        return [replace(self, blocks=blocks) for blocks in range(most, 0, -1)]


@dataclass(frozen=True)
class Kronecker(Family):
    """`W = L (x) R`, with L `(a, g)` and R `(b, d)`.

    >>> Kronecker().structure(64, 144)
    Structure('g d -> a b', 'b d', 'a g', a=12, b=12, d=8, g=8)
    """

    def structure(self, in_features: int, out_features: int) -> Structure:
        g, d = factorise(in_features, 2)
        a, b = factorise(out_features, 2)
        return Structure(
            "g d -> a b",
            "b d",  # R
            "a g",  # L
            g=g, d=d, a=a, b=b,
        )  # fmt: skip


@checked
@dataclass(frozen=True)
class TT(Family):
    """Tensor-Train matrix: `W[i1..ic, j1..jc] = G1[i1, j1] ... Gc[ic, jc]`, a product of rank x
    rank matrices.

    Core t is `r(t-1) i_t j_t r_t`; core c is applied first. Rank 1 with two cores is Kronecker.
    `rank` may be a tuple, one for each of the `cores - 1` bonds r_1 .. r_(c-1). Source: Novikov et
    al. 2015 (arXiv:1509.06569).

    >>> TT(rank=2).structure(64, 64)
    Structure('j1 j2 -> i1 i2', 'r1 i2 j2', 'i1 j1 r1', i1=8, i2=8, j1=8, j2=8, r1=2)
    """

    rank: int | tuple[int, ...]
    cores: Annotated[int, Range(1, MOST_AXES)] = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        _check_bonds(self.rank, self.cores)

    def structure(self, in_features: int, out_features: int) -> Structure:
        c = self.cores
        j = factorise(in_features, c)
        i = factorise(out_features, c)
        # At bond t, W's entries are a matrix: its rows are (i_1 j_1 .. i_t j_t), its columns the
        # other axes. No rank above its smaller side says more.
        bounds = []
        for t in range(1, c):
            rows = prod(i[:t]) * prod(j[:t])
            columns = prod(i[t:]) * prod(j[t:])
            bounds.append(min(rows, columns))
        sizes = _tt_sizes(self.rank, bounds, i, j)
        cores = [_tt_core(t, c) for t in range(c, 0, -1)]
        inputs = " ".join(f"j{t}" for t in range(1, c + 1))
        outputs = " ".join(f"i{t}" for t in range(1, c + 1))
        return Structure(f"{inputs} -> {outputs}", *cores, **sizes)

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        return [replace(self, rank=rank) for rank in RANKS]


@checked
@dataclass(frozen=True)
class Monarch(Family):
    """Two block-diagonal matrices of `blocks` blocks with a fixed transposition between; full rank
    for a square layer.

    The middle is `min(in_features, out_features)` wide, q = middle / blocks for each block of the
    first core (k q p); it is read again as (r l), l = blocks, by the second (l s r), and written in
    the order (s l). That regrouping needs blocks to divide q or q to divide blocks. Source: Dao et
    al. 2022 (arXiv:2204.00595) and its code.

    >>> [core.shape for core in Monarch(blocks=4).structure(64, 128).cores]
    [(4, 16, 16), (4, 32, 16)]
    """

    blocks: int = 4

    def structure(self, in_features: int, out_features: int) -> Structure:
        b = self.blocks
        p, s = self.divide(in_features, out_features, b)
        q = min(p, s)
        if q % b == 0:
            return Structure(
                "k p -> s l",
                "k q l p",  # q of the paper is (q l)
                "l s k q",  # r of the paper is (k q)
                k=b, p=p, s=s, l=b, q=q // b,
            )  # fmt: skip
        if b % q == 0:
            return Structure(
                "r k p -> s k q",
                "r k q p",  # k of the paper is (r k)
                "k q s r",  # l of the paper is (k q)
                r=q, k=b // q, p=p, q=q, s=s,
            )  # fmt: skip
        middle = min(in_features, out_features)
        common_divisors = divisors(gcd(in_features, out_features))
        fits = [n for n in common_divisors if _regroups(n, middle // n)]
        raise ValueError(
            f"blocks={b} does not regroup a middle of {middle} = {b} x {q}: "
            f"{b} must divide {q} or be a multiple of it; {name_nearest(b, fits)}"
        )

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        most = min(in_features, out_features)  # blocks, which have the least parameters
        return [replace(self, blocks=blocks) for blocks in range(most, 0, -1)]


@checked
@dataclass(frozen=True)
class BTT(Family):
    """Block Tensor-Train. With two cores W is a b x g grid of contiguous a x d blocks, each of rank
    `rank`.

    Core t is TT's with the axes `i_(t+1..c)` and `j_(1..t-1)` as batch (CBS, equation 6), so
    nothing is shared between blocks; outputs stay in the order `i_c .. i_1` in which the cores
    produce them, as in the paper's code; its equation 2 has `i_1 i_2`. Where the factors of a width
    differ, the largest input factor is summed first; the paper's code sums the smallest first, so
    that its cores have other sizes there. Two cores of rank 1 with equal factors are Monarch with
    sqrt(d) blocks. `rank` may be a tuple, one for each of the bonds r_1 .. r_(c-1).

    >>> BTT(rank=2).structure(1024, 1024)  # doctest: +NORMALIZE_WHITESPACE
    Structure('j1 j2 -> i2 i1', 'j1 r1 i2 j2', 'i2 i1 j1 r1', i1=32, i2=32, j1=32, j2=32, r1=2)
    """

    rank: int | tuple[int, ...] = 1
    cores: Annotated[int, Range(2, MOST_AXES)] = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        _check_bonds(self.rank, self.cores)

    def structure(self, in_features: int, out_features: int) -> Structure:
        c = self.cores
        j = factorise(in_features, c)
        i = factorise(out_features, c)[::-1]
        # A block of bond t is a matrix (i_1 .. i_t) x (j_(t+1) .. j_c), one for each of the other
        # axes. No rank above its smaller side says more.
        bounds = [min(prod(i[:t]), prod(j[t:])) for t in range(1, c)]
        sizes = _tt_sizes(self.rank, bounds, i, j)
        cores = []
        for t in range(c, 0, -1):
            axes = [f"i{u}" for u in range(c, t, -1)]
            axes += [f"j{u}" for u in range(1, t)]
            axes.append(_tt_core(t, c))
            cores.append(" ".join(axes))
        inputs = " ".join(f"j{t}" for t in range(1, c + 1))
        outputs = " ".join(f"i{t}" for t in range(c, 0, -1))
        return Structure(f"{inputs} -> {outputs}", *cores, **sizes)

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        return [replace(self, rank=rank) for rank in RANKS]


@checked
@dataclass(frozen=True)
class BLAST(Family):
    """A grid of `blocks` x `blocks` that share their factors: block (i, j) is `U_i diag(s_ij) V_j`.

    A rank of min(in_features, out_features) can hold every matrix. Source: Lee et al. 2024
    (arXiv:2410.21262).

    >>> BLAST(blocks=4, rank=8).structure(64, 128)
    Structure('j q -> i p', 'j r q', 'r i j', 'i p r', i=4, j=4, p=32, q=16, r=8)
    """

    blocks: int
    rank: int = field(kw_only=True)

    def structure(self, in_features: int, out_features: int) -> Structure:
        q, p = self.divide(in_features, out_features, self.blocks)
        bound = min(in_features, out_features)
        require_bounded("rank", self.rank, bound, "min(in_features, out_features)")
        return Structure(
            "j q -> i p",
            "j r q",  # V, one per input block
            "r i j",  # s, one mixing matrix per rank
            "i p r",  # U, one per output block
            i=self.blocks, j=self.blocks, p=p, q=q, r=self.rank,
        )  # fmt: skip

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        return [replace(self, rank=rank) for rank in RANKS]


@checked
@dataclass(frozen=True)
class Split(Family):
    """`split` matrices of one family, stacked: a fused qkv as three, so that q, k and v share
    nothing.

    It is one structure: an axis more in every core, produced by the first one.

    >>> Split(split=3, of=LowRank(rank=4)).structure(64, 192)
    Structure('i -> part o', 'part r i', 'part o r', i=64, o=64, part=3, r=4)
    """

    split: int
    of: Family = field(kw_only=True)

    def structure(self, in_features: int, out_features: int) -> Structure:
        if out_features % self.split:
            raise ValueError(f"split={self.split} does not divide out_features={out_features}")
        outputs_of_one = out_features // self.split
        matrix = self.of.structure(in_features, outputs_of_one)
        if matrix.out_features != outputs_of_one:
            raise ValueError(
                f"{self.of.label} pads {outputs_of_one} outputs to {matrix.out_features}: no stack"
            )
        signature = f"{' '.join(matrix.inputs)} -> part {' '.join(matrix.outputs)}"
        cores = [f"part {core}" for core in matrix.subscripts]
        sizes = {**matrix.sizes, "part": self.split}
        return Structure(signature, *cores, between=matrix.between, **sizes)

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        sizes_of_one = self.of.sizes(in_features, out_features // self.split)
        return [replace(self, of=family) for family in sizes_of_one]

    @property
    def label(self) -> str:
        return f"{self.split} x {self.of.label}"


@checked
@dataclass(frozen=True, kw_only=True)
class Nonlinear(Family):
    """What `Family.activate` gives.

    >>> BTT(rank=1).activate().label, family(**BTT(rank=1).activate().to_dict())
    ('BTT(rank=1), silu', BTT(rank=1, cores=2).activate('silu'))
    """

    of: Family
    between: str = ACTIVATIONS[0]

    def __post_init__(self) -> None:
        require_choice("between", self.between, ACTIVATIONS)

    def structure(self, in_features: int, out_features: int) -> Structure:
        return self.of.structure(in_features, out_features).activate(self.between)

    def sizes(self, in_features: int, out_features: int) -> list[Family]:
        return [replace(self, of=family) for family in self.of.sizes(in_features, out_features)]

    def __repr__(self) -> str:
        return f"{self.of!r}.activate({self.between!r})"

    @property
    def label(self) -> str:
        return f"{self.of.label}, {self.between}"


def family(name: str, **options: Any) -> Family:
    """A family by its name, case ignored.

    Raises:
        ValueError: no family of that name, an option that it does not have, or one that it needs.
        TypeError: the name is no text, or an option is of another type.

    >>> family("btt", rank=2)
    BTT(rank=2, cores=2)
    """
    if not isinstance(name, str) or name.lower() not in FAMILIES:
        kind = ValueError if isinstance(name, str) else TypeError
        hint = f"; {NO_SUM}" if isinstance(name, str) and "+" in name else ""
        known = ", ".join(cls.__name__ for cls in FAMILIES.values())
        raise kind(f"structure={name!r} is no family; there are {known}{hint}")
    cls = FAMILIES[name.lower()]
    for option in fields(cls):
        if option.default is MISSING and option.name not in options:
            raise ValueError(f"{cls.__name__} needs {option.name}=")
    names = [option.name for option in fields(cls)]
    for key, value in options.items():
        if key not in names:
            raise ValueError(
                f"{cls.__name__} has no option {key!r} (got {key}={value!r}); it has {names}"
            )
    for key, value in options.items():
        if isinstance(value, Mapping) and "name" in value:
            options[key] = family(**value)
    return cls(**options)


def structure_of(structure: Family | Structure, in_features: int, out_features: int) -> Structure:
    """The structure of a layer `in_features -> out_features`, from a family or a `Structure` that
    is large enough.

    Raises:
        ValueError: the family does not fit; the `Structure` is smaller than the layer.
        TypeError: a family gives no `Structure`, or has options and is no dataclass.
    """
    declared = structure
    if isinstance(structure, Family):
        _require_fields(structure)
        declared = structure.structure(in_features, out_features)
    if not isinstance(declared, Structure):
        raise TypeError(f"{label(structure)} gives a {type(declared).__name__}, not a Structure")
    for side, width, size in (
        ("in_features", in_features, declared.in_features),
        ("out_features", out_features, declared.out_features),
    ):
        if size < width:
            raise ValueError(f"{side}={width} is larger than the structure's {size}: {declared!r}")
    return declared


def _require_fields(structure: Family) -> None:
    """Tables, files and `==` know the fields of a family: an attribute that `__init__` sets alone
    would make two different families look the same."""
    name = type(structure).__name__
    known = {option.name: getattr(structure, option.name) for option in fields(structure)}
    for option in known.values():
        if isinstance(option, Family):
            _require_fields(option)
    if "__dataclass_params__" in vars(type(structure)):
        return
    for attribute in vars(structure):
        if attribute not in known:
            raise TypeError(
                f"{name} has the attribute {attribute!r}, which is no field of a dataclass: write "
                f"@dataclass(frozen=True) above class {name}, and `{attribute}: "
                f"{type(getattr(structure, attribute)).__name__}` in it in place of __init__"
            )


def warn_of_padding(
    structure: Family | Structure, padded: Structure, in_features: int, out_features: int
) -> None:
    if text := explain_padding(structure, padded, in_features, out_features):
        warn(f"{label(structure)}: {text}")


def explain_padding(
    structure: Family | Structure, padded: Structure, in_features: int, out_features: int
) -> str:
    """What `padded`, the structure of a layer, pads by more than `MAX_PADDING`, and what would pad
    less; empty if it pads nothing so much.

    >>> explain_padding(BTT(), BTT().structure(13, 64), 13, 64)
    'in_features=13 is padded to 15, by 15.4%; 12 and 14 fit'
    """
    widths = {"in_features": in_features, "out_features": out_features}
    texts = []
    for side, width in widths.items():
        size = getattr(padded, side)
        if size <= width * (1 + MAX_PADDING):
            continue
        text = f"{side}={width} is padded to {size}, by {100 * (size / width - 1):.1f}%"
        fits = []
        if isinstance(structure, Family):
            fits = _find_fitting(structure, widths, side, size)
        if fits:
            verb = "fits" if len(fits) == 1 else "fit"
            text += f"; {' and '.join(map(str, fits))} {verb}"
        texts.append(text)
    if texts and isinstance(structure, Structure):
        texts.append(
            f"take a family such as {DEFAULT.label}, which factors each width, or a Structure of "
            f"{in_features} -> {out_features}"
        )
    return "; ".join(texts)


def _find_fitting(family: Family, widths: Mapping[str, int], side: str, size: int) -> list[int]:
    """The nearest widths of one side, below its own and above, that `family` does not pad."""

    def fits(width: int) -> bool:
        try:
            trial = {**widths, side: width}
            structure = family.structure(trial["in_features"], trial["out_features"])
        except ValueError:
            return False
        features: int = getattr(structure, side)
        return features == width

    width = widths[side]
    below = range(width - 1, width // 2, -1)
    above = range(width + 1, size + 1)
    fitting = []
    for candidates in (below, above):
        nearest = next(filter(fits, candidates), None)
        if nearest is not None:
            fitting.append(nearest)
    return fitting


def label(structure: Family | Structure) -> str:
    """Short text for tables."""
    if isinstance(structure, Family):
        return structure.label
    between = "" if structure.between is None else f", {structure.between}"
    return f"{structure.signature}; {'; '.join(structure.subscripts)}{between}"


# ---- ranks ---------------------------------------------------------------------------------------


def _regroups(blocks: int, q: int) -> bool:
    return q % blocks == 0 or blocks % q == 0


def _check_bonds(rank: int | tuple[int, ...], cores: int) -> None:
    if isinstance(rank, tuple) and len(rank) != cores - 1:
        raise ValueError(
            f"rank={rank!r} has {len(rank)} entries; cores={cores} have {cores - 1} bonds"
        )


def _tt_core(t: int, c: int) -> str:
    """Axes of core t of c: the bonds r_0 and r_c are 1 and left out."""
    axes = [f"i{t}", f"j{t}"]
    if t > 1:
        axes.insert(0, f"r{t - 1}")
    if t < c:
        axes.append(f"r{t}")
    return " ".join(axes)


def _tt_sizes(
    rank: int | tuple[int, ...], bounds: list[int], i: tuple[int, ...], j: tuple[int, ...]
) -> dict[str, int]:
    """Sizes of all axes; `bounds` are those of the bonds r_1 .. r_(c-1)."""
    if isinstance(rank, int):
        ranks = (rank,) * len(bounds)
        if bounds:
            require_bounded("rank", rank, min(bounds), "min over the bonds")
    else:
        ranks = rank
    for t, (value, bound) in enumerate(zip(ranks, bounds, strict=True), start=1):
        require_bounded(f"rank[{t - 1}]", value, bound, f"of bond {t}")
    sizes = {}
    for letter, factors in (("i", i), ("j", j), ("r", ranks)):
        for t, size in enumerate(factors, start=1):
            sizes[f"{letter}{t}"] = size
    return sizes


DEFAULT: Family = BTT()
