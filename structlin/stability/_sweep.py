"""`lr_sweep`: where the best learning rate is at each width."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn

from .._arguments import checked
from .._report import Table
from .._trials import check_row, describe_setting, final_loss, name_of, read_rows, write_rows
from ._common import (
    PathLike,
    build_model,
    format_number,
    new_figure,
    save_figure,
    use_seed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Run:
    """One training of a sweep."""

    width: int
    lr: float
    seed: int
    loss: float | None  #: None: it diverged

    def __post_init__(self) -> None:
        check_row(self, positive=("width", "lr"))


@dataclass(frozen=True)
class Sweep:
    """What `lr_sweep` found. Print it."""

    rows: tuple[Run, ...]

    @property
    def losses(self) -> dict[int, dict[float, float]]:
        """width -> lr -> the mean loss over the seeds; inf if one of them diverged."""
        found: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in sorted(self.rows, key=lambda row: (row.width, row.lr)):
            found[row.width][row.lr].append(math.inf if row.loss is None else row.loss)
        return {
            width: {lr: sum(all_) / len(all_) for lr, all_ in by_lr.items()}
            for width, by_lr in found.items()
        }

    @property
    def best(self) -> dict[int, float | None]:
        """width -> the lr with the least loss; None if all diverged."""
        least = {width: min(by_lr, key=by_lr.__getitem__) for width, by_lr in self.losses.items()}
        return {
            width: lr if math.isfinite(self.losses[width][lr]) else None
            for width, lr in least.items()
        }

    @property
    def shifts(self) -> dict[int, float | None]:
        """width -> by how many factors of 2 its best lr lies above that of the smallest width."""
        best = self.best
        base = best[min(best)]
        return {width: math.log2(lr / base) if lr and base else None for width, lr in best.items()}

    @property
    def transfer_distance(self) -> float | None:
        """The largest shift, up or down, in factors of 2; None if all runs of a width diverged."""
        shifts = list(self.shifts.values())
        return None if None in shifts else max(abs(shift) for shift in shifts if shift is not None)

    def table(self) -> Table:
        """Mean losses by width and lr, the best, its shift, whether it ends the grid."""
        lrs = sorted({row.lr for row in self.rows})
        table = Table("width", *(f"lr {lr:.3g}" for lr in lrs), "best lr", "factors of 2", "")
        for width, by_lr in self.losses.items():
            best, shift = self.best[width], self.shifts[width]
            cells = [
                format_number(by_lr[lr]) if math.isfinite(by_lr[lr]) else "diverged" for lr in lrs
            ]
            found = (
                ("none", "")
                if best is None
                else (f"{best:.3g}", "" if shift is None else f"{shift:+.2f}")
            )
            table.row(
                str(width), *cells, *found, "end of the grid" if best in (lrs[0], lrs[-1]) else ""
            )
        return table

    def plot(self, path: PathLike | None = None) -> "Figure":
        """Loss against rate, a line per width, with its best; as a file too, if `path` is given."""
        figure = new_figure(6, 4)
        axis = figure.subplots()
        for width, by_lr in self.losses.items():
            finite = {lr: loss for lr, loss in by_lr.items() if math.isfinite(loss)}
            (line,) = axis.plot(list(finite), list(finite.values()), ".-", label=f"width {width}")
            best = self.best[width]
            if best is not None:
                axis.plot([best], [by_lr[best]], "o", color=line.get_color())
        axis.set_xscale("log", base=2)
        axis.set(xlabel="learning rate", ylabel="loss")
        axis.legend(fontsize="small")
        return save_figure(figure, path)

    def __str__(self) -> str:
        distance = self.transfer_distance
        text = (
            "all runs of a width diverged" if distance is None else f"{distance:.2f} factors of 2"
        )
        return f"{self.table()}\nthe best lr moves by: {text}"


@checked
def lr_sweep(
    build: Callable[[int], nn.Module],
    widths: Iterable[int],
    lrs: Iterable[float],
    train: Callable[[nn.Module, float, int], float | Tensor],
    *,
    seeds: Iterable[int] = (0,),
    path: PathLike | None = None,
    setting: Mapping[str, Any] | None = None,
) -> Sweep:
    """Train every width at every rate with every seed: where is the best rate, and does it move?

    A run sets torch's seed, builds and trains, and depends on nothing else. It has diverged if its
    loss is not finite, or if `train` raises FloatingPointError, as `optim.Muon` does on gradients
    that are not finite.

    Args:
        build: width -> model.
        train: (model, lr, width) -> the final loss, less is better.
        path: a JSON file, written anew after each run, whole or not at all. Runs that it holds are
            read and not made again; those outside of this grid stay in it, also those that another
            sweep of the same setting writes at the same time.
        setting: plain data that tells this experiment from others, such as {"steps": 100}. The file
            keeps it, with the names of `build` and `train`, and a sweep of another setting is
            refused.

    Raises:
        ValueError: no width, rate or seed; a width or rate that is not positive and finite; the
            file at `path` is no sweep, or one of another setting; `setting` has a name that is
            compared already. Nothing has been trained then.
        TypeError: `build` does not return a module, or `train` not a number.

    >>> import torch
    >>> def train(model, lr, width):
    ...     optimizer = torch.optim.SGD(model.parameters(), lr)
    ...     for _ in range(20):
    ...         optimizer.zero_grad()
    ...         loss = (model(torch.ones(1, width)) - 1).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...     return loss
    >>> rates = [2.0**-n for n in range(4, 11)]
    >>> sweep = lr_sweep(lambda width: nn.Linear(width, 1), [16, 64], rates, train)
    >>> sweep.shifts  # plain SGD: 1 / width
    {16: 0.0, 64: -2.0}
    """
    widths, lrs, seeds = list(widths), list(lrs), list(seeds)
    if not widths or not lrs or not seeds:
        raise ValueError(
            f"widths={widths}, lrs={lrs}, seeds={seeds}: there must be at least one of each"
        )
    about = describe_setting({"build": name_of(build), "train": name_of(train)}, setting)
    runs = _read(Path(path), about) if path is not None else {}
    grid = list(dict.fromkeys(product(widths, lrs, seeds)))
    from rich.console import Console
    from rich.progress import track

    earlier = WeakSet[nn.Module]()
    for key in track(
        [key for key in grid if key not in runs], "lr_sweep", console=Console(stderr=True)
    ):
        width, lr, seed = key
        with use_seed(seed):
            model = build_model(build, width, earlier)
            call = f"train(model, {lr}, {width})"
            runs[key] = Run(width, lr, seed, final_loss(partial(train, model, lr, width), call))
        if path is not None:
            _write(Path(path), about, runs)
    return Sweep(tuple(runs[key] for key in grid))


Key = tuple[int, float, int]


def _read(path: Path, setting: Mapping[str, Any]) -> dict[Key, Run]:
    return read_rows(path, setting, Run, lambda run: (run.width, run.lr, run.seed), "sweep")


def _write(path: Path, setting: Mapping[str, Any], runs: Mapping[Key, Run]) -> None:
    """Write `runs`, and those that another sweep has written to the file since it was read."""
    sweep = Sweep(tuple({**_read(path, setting), **runs}.values()))
    write_rows(path, setting, sweep.rows, best=sweep.best, shifts=sweep.shifts)
