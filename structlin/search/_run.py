"""`run`: every structure trained at every width, at the learning rates that follow from dense's."""

import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .._arguments import checked
from .._convert import convert
from .._families import Family, label
from .._linear import StructuredLinear
from .._progress import Bar
from .._trials import describe_setting, final_loss, name_of, read_rows, write_rows
from .._widen import cost
from ..optim import param_groups
from ..stability._common import PathLike, build_model, use_seed
from ._search import Search, Trial
from ._space import Measures, measure

Groups = list[dict[str, Any]]
Train = Callable[[nn.Module, Groups, int], float | Tensor]


@checked
def run(
    build: Callable[[int], nn.Module],
    train: Train,
    structures: Iterable[Family] | Mapping[str, Family],
    widths: Iterable[int],
    *,
    lr: float,
    base: int | None = None,
    seeds: Iterable[int] = (0,),
    optimizer: str = "adam",
    weight_decay: float = 0.0,
    example: Any = None,
    path: PathLike | None = None,
    setting: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Search:
    """Train every structure at every width with every seed, and compare them.

    A run sets torch's seed, builds the dense model, converts it, and trains it with parameter
    groups in which every core has the rate that follows from dense's. It has diverged if its loss
    is not finite or `train` raises FloatingPointError; the search goes on.

    Args:
        build: width -> dense model.
        train: (model, groups, seed) -> the final loss, above 0, less is better; `groups`
            are for a torch optimizer.
        structures: families such as `Einsum`, or their names -> them; `Dense()` leaves the model as
            it is but for its start.
        lr: of the dense model.
        base: the width where `lr` was tuned; muP takes it to the others. None: it holds for all.
        optimizer, weight_decay: whose groups, see `param_groups`.
        example: a batch, of which FLOPs are counted, see `cost`; None: the linear layers alone.
        path: a JSON file, written anew after each run, whole or not at all. Runs that it holds are
            read and not made again; those outside of this grid stay in it, also those that another
            search of the same setting writes at the same time.
        setting: plain data that tells this experiment from others, such as {"steps": 100}. The file
            keeps it, with the names of `build` and `train`, the shapes of `example`, the rates and
            `options`; a search in which one of them differs is refused.
        progress: whether to show a bar; None: on a terminal.
        options: of `convert`: `include`, `exclude`, `zero_init`, ...

    Raises:
        ValueError: no structure, width or seed; a width that is not positive; a structure that
            does not fit a model; two of one name; the file at `path` is no search, or one of
            another setting; `setting` has a name that is compared already. Nothing has been trained
            then. A loss that is not above 0.
        TypeError: a structure that is no family; `build` does not return a module, or `train` not a
            number.

    >>> from structlin import Dense
    >>> from structlin.search import Einsum
    >>> def build(width):
    ...     return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width))
    >>> def train(model, groups, seed):
    ...     optimizer, x = torch.optim.Adam(groups), torch.randn(64, 4)
    ...     for _ in range(20):
    ...         optimizer.zero_grad()
    ...         loss = (model(x) - 1).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...     return loss
    >>> btt = Einsum(alpha=0.5, gamma=0.5, epsilon=0.5, phi=0.5)
    >>> found = run(build, train, [Dense(), btt], [16, 64], lr=1e-2, include="2")
    >>> [(row.structure, row.width, row.flops) for row in found.rows][:2]
    [('Dense()', 16, 640), ('Einsum(alpha=0.5, gamma=0.5, epsilon=0.5, phi=0.5)', 16, 384)]
    """
    named = _name_structures(structures)
    widths, seeds = list(widths), list(seeds)
    if not named or not widths or not seeds:
        raise ValueError(
            f"structures={[*named]}, widths={widths}, seeds={seeds}: there must be at least one of "
            "each"
        )
    names = {"build": name_of(build), "train": name_of(train), "example": example}
    rates = {"lr": lr, "base": base, "optimizer": optimizer, "weight_decay": weight_decay}
    about = describe_setting({**names, **rates, **options}, setting)
    trials = _read(Path(path), about) if path is not None else {}
    for name, width in product(named, widths):
        kept = next((t for t in trials.values() if (t.structure, t.width) == (name, width)), None)
        if kept is not None and kept.family != _plain(named[name]):
            raise ValueError(
                f"path={str(path)!r} has another structure of the name {name!r}: {kept.family}"
            )

    earlier = WeakSet[nn.Module]()

    def make(width: int, family: Family | None) -> tuple[nn.Module, Groups]:
        """A new model, converted, and its groups."""
        model = build_model(build, width, earlier)
        if family is not None:
            model = convert(model, family, **options)
        wide = partial(build_model, build, base) if base is not None else None
        groups = param_groups(
            model,
            lr,
            optimizer=optimizer,
            weight_decay=weight_decay,
            base=_on_meta(wide) if wide is not None else None,
        )
        return model, groups

    for width, family in product(widths, named.values()):
        try:
            _on_meta(partial(make, width, family))
        except ValueError as error:
            raise ValueError(f"structure {label(family)}, width {width}: {error}") from error
    grid = list(dict.fromkeys(product(seeds, widths, named)))
    with Bar("search", len(grid), progress) as bar:
        for seed, width, name in grid:
            key = name, width, seed
            bar.show(f"{name}, width {width}, seed {seed}")
            if key not in trials:
                with use_seed(seed):
                    model, groups = make(width, named[name])
                    trials[key] = _train(train, model, groups, key, named[name], example)
                if path is not None:
                    _write(Path(path), about, trials)
            bar.advance()
    return Search(tuple(trials[name, width, seed] for seed, width, name in grid))


Key = tuple[str, int, int]  # structure, width, seed


def _train(
    train: Train, model: nn.Module, groups: Groups, key: Key, family: Family, example: Any
) -> Trial:
    counted, measures = cost(model, example), _measure_model(model)
    start, call = time.perf_counter(), f"train(model, groups, {key[2]})"
    loss = final_loss(partial(train, model, groups, key[2]), call)
    if loss is not None and loss <= 0:
        raise ValueError(f"{call} returned {loss}: losses are compared in logarithms, so above 0")
    return Trial(
        *key,
        loss=loss,
        params=counted.params,
        flops=counted.flops,
        seconds=time.perf_counter() - start,
        omega=measures.omega,
        psi=measures.psi,
        nu=measures.nu,
        family=_plain(family),
    )


def _plain(family: Family) -> dict[str, Any]:
    """Turn tuples into lists, as a file has them."""
    data: dict[str, Any] = json.loads(json.dumps(family.to_dict()))
    return data


def _measure_model(model: nn.Module) -> Measures:
    layers = [
        module.structure for module in model.modules() if isinstance(module, StructuredLinear)
    ]
    wide = [each for each in layers if min(each.in_features, each.out_features) > 1]
    found = [measure(structure) for structure in wide] or [Measures(0.0, 1.0, 1.0)]
    return Measures(
        *(fmean(getattr(each, name) for each in found) for name in ("omega", "psi", "nu"))
    )


def _name_structures(
    structures: Iterable[Family] | Mapping[str, Family],
) -> dict[str, Family]:
    if isinstance(structures, Mapping):
        pairs = list(structures.items())
    else:
        pairs = [(getattr(family, "label", ""), family) for family in structures]
    for _, family in pairs:
        if not isinstance(family, Family):
            raise TypeError(
                f"structures: {family!r} must be a family such as Einsum(...) or BTT(rank=1), "
                "which has a structure for every width"
            )
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"structures: {', '.join(twice)} is there twice")
    return dict(pairs)


def _on_meta(make: Callable[[], Any]) -> Any:
    """What `make` makes, on the meta device if that can be; the real models will warn."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()
    except (ValueError, TypeError):
        raise
    except Exception:  # whatever it is that the meta device cannot do
        return make()


def _read(path: Path, setting: Mapping[str, Any]) -> dict[Key, Trial]:
    return read_rows(path, setting, Trial, lambda t: (t.structure, t.width, t.seed), "search")


def _write(path: Path, setting: Mapping[str, Any], trials: Mapping[Key, Trial]) -> None:
    """Write `trials`, and those that another search has written to the file since it was read."""
    write_rows(path, setting, {**_read(path, setting), **trials}.values())
