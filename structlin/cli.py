"""`structlin plan | compress | info`: structured layers from a shell.

A command prints its table, or with `--json` one object, on stdout. All else goes to stderr. The
exit code is 0; 2 for an argument or input that is refused, in one line; 1 for a failure later.
transformers reads the models, and nothing is downloaded.
"""

import argparse
import ast
import copy
import json
import math
import os
import platform
import shutil
import signal
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, fields
from importlib.metadata import distributions
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

import structlin

from ._layer.experts import StructuredExperts
from ._model.linears import Replacement, replace_layers
from ._model.saved import SavedLayer, read_saved
from ._model.stacks import ExpertsLayer
from ._structure.families import FAMILIES, label
from ._tables import Table, hide_numbers, name_group, percent

PACKAGES = ("einops", "safetensors", "transformers", "gguf")
CONTEXT = 256  # tokens of a window
BATCH = 2  # windows
CALIBRATION = 16  # batches
HELDOUT = 8  # batches
BEST_START = "BTT(rank=1)"  # the structure of a fresh model, where none is given
COMPRESSED = "LowRank(rank=1)"  # that of a trained model
# files of a model's folder that hold its weights, or those of another framework
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".gguf"}
WEIGHTS |= {".h5", ".tflite", ".msgpack", ".ot", ".onnx"}


class Result(NamedTuple):
    """What a command found out."""

    text: str  #: for a person
    data: dict[str, Any]  #: all of it, for --json


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    options = make_parser().parse_args(argv)
    try:
        # what others print goes to stderr
        with warnings.catch_warnings(), redirect_stdout(sys.stderr), interrupted_by_sigterm():
            warnings.showwarning = lambda message, *_: print(f"structlin: warning: {message}")
            result: Result = options.run(options)
    except KeyboardInterrupt:
        return tell("interrupted; nothing was written", 130)
    except ValueError as error:
        return tell(f"error: {error}", 2)
    except (ArithmeticError, MemoryError, OSError, RuntimeError) as error:
        return tell(f"failed: {type(error).__name__}: {error}", 1)
    print(json.dumps(result.data) if options.json else result.text)
    return 0


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Within it the signal that schedulers send is like Ctrl-C, so that nothing half written
    stays."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tell(message: str, code: int = 0) -> int:
    """Print one line on stderr, and return the exit code."""
    print("structlin:", " ".join(message.split()), file=sys.stderr)
    return code


# ---- the commands --------------------------------------------------------------------------------


def info(options: argparse.Namespace) -> Result:
    """Show a saved structured model; without one: versions, the engine and the machine."""
    if options.checkpoint is not None:
        return show_saved(options.checkpoint)
    facts = {"structlin": structlin.__version__, "torch": torch.__version__}
    for package in distributions():
        if package.name in PACKAGES:
            facts[package.name] = package.version
    facts["Python"] = platform.python_version()
    facts["platform"] = platform.platform()
    with redirect_stdout(StringIO()) as config:
        structlin.show_config()
    facts |= dict(line.split(": ", 1) for line in config.getvalue().splitlines())
    return Result("\n".join(f"{name:12}   {value}" for name, value in facts.items()), facts)


def show_saved(path: Path) -> Result:
    """The structured layers of a saved model, from its files alone."""
    saved = read_saved(path)
    groups = defaultdict[tuple[str, str, str], list[SavedLayer]](list)
    names_of_pattern = defaultdict[str, list[str]](list)
    for layer in saved.layers:
        pattern = hide_numbers(layer.name)
        names_of_pattern[pattern].append(layer.name)
        groups[pattern, f"{layer.in_features} -> {layer.out_features}", layer.label].append(layer)
    table = Table("layer", "x", "in -> out", "structure", "params", "/dense")
    for (pattern, shape, structure), layers in groups.items():
        name = name_group([layer.name for layer in layers], names_of_pattern[pattern])
        table.row(name, f"{len(layers)}", shape, structure, *count_cells(layers))
    count = f"{len(saved.layers)}"
    table.row("structured layers", count, "", "", *count_cells(saved.layers))
    table.row("other numbers", "", "", "", f"{saved.other_numbers:,}")
    params = sum(layer.params for layer in saved.layers)
    text = f"{path}, written by {saved.kind}\n\n{table}"
    return Result(text, {"path": str(path), "params": params, **asdict(saved)})


def count_cells(layers: Sequence[SavedLayer]) -> list[str]:
    """The parameters of the layers' cores, and their part of those of the same layers dense."""
    params = sum(layer.params for layer in layers)
    dense_params = sum(layer.in_features * layer.out_features for layer in layers)
    return [f"{params:,}", percent(params, dense_params)]


def plan(options: argparse.Namespace) -> Result:
    """Show what convert would do, or compress with --keep, without the model's weights."""
    default = BEST_START if options.keep is None else COMPRESSED
    structure = parse_structure(options.structure or default)
    source = find_source(options.model)
    with naming(options.model), torch.device("meta"):
        model = source.model_class.from_config(source.config)
    planned = structlin.plan_compression(
        model,
        structure,
        None,
        allocation="error",
        keep=options.keep,
        include=options.include,
        exclude=options.exclude,
    )
    structures = {}  # of the linear layers
    stacks = []  # of experts
    reasons = {}
    for decision in planned.decisions:
        layer = decision.layer
        if decision.structure is None:
            reasons[layer.name] = decision.reason
        if not isinstance(layer, ExpertsLayer):
            structures[layer.name] = decision.structure
        elif decision.structure is not None and decision.resolved is not None:
            stack = StructuredExperts(layer.lay, decision.resolved, device="meta")
            stack.label = label(decision.structure)
            stacks.append(Replacement(layer.names, stack))
    if any(structures.values()):
        structlin.plan(model, overrides=structures).apply()
    summary = structlin.summary(replace_layers(model, stacks))
    lines = [str(summary), ""]
    for reason, n in Counter(reasons.values()).items():
        lines.append(f"dense, {n} layers: {reason}")
    data = {"params": summary.params, "dense": reasons, **asdict(summary)}
    return Result("\n".join(lines), data)


def compress(options: argparse.Namespace) -> Result:
    """Compress a trained model of text, heal it, measure it and save it."""
    structure = parse_structure(options.structure or COMPRESSED)
    if options.heal < 0:
        raise ValueError(f"--heal {options.heal} must be 0 or more")
    with writing(options.out) as folder:
        dense, tokenizer = read_model(options.model)
        batches = cut(tokenizer, options.data, dense.config)
        figures = {"dense": measure(dense, dense, batches.heldout)}
        tell("compressing")
        model: Any = copy.deepcopy(dense)
        structlin.compress(
            model,
            structure,
            batches.train[:CALIBRATION],
            keep=options.keep,
            include=options.include,
            exclude=options.exclude,
            memory=options.memory,
        )
        figure = measure(model, dense, batches.heldout)
        figures["compressed"] = figure
        if options.heal:
            tell(f"healing, {options.heal} steps")
            structlin.distill(model, dense, batches.train, steps=options.heal)
            figure = measure(model, dense, batches.heldout)
            figures["healed"] = figure
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        copy_beside(options.model, folder)
        loaded = type(model).from_pretrained(folder, local_files_only=True)
        if measure(loaded, dense, batches.heldout) != figure:
            raise RuntimeError("the model that was loaded differs from the one that was saved")
    name = "perplexity" if model.can_generate() else "cosine"
    shown = ", ".join(f"{value:.3f} {stage}" for stage, value in figures.items())
    summary = structlin.summary(model)
    text = f"{summary}\n\nheld-out {name}: {shown}\nsaved in {options.out}"
    data = {"out": str(options.out), "params": summary.params, name: figures, **asdict(summary)}
    return Result(text, data)


# ---- models --------------------------------------------------------------------------------------


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of reading names what was read; transformers, tokenizers and gguf have their own."""
    try:
        yield
    except ImportError as error:
        extra = "gguf" if path.suffix.lower() == ".gguf" else "transformers"
        raise ValueError(f'{path}: {error}: pip install "structlin[{extra}]"') from None
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


class Source(NamedTuple):
    """A model of transformers that is not read yet."""

    config: Any
    model_class: Any
    options: dict[str, Any]  #: the arguments of `from_pretrained`


def find_source(path: Path) -> Source:
    """The model of transformers in a folder or GGUF file.

    Raises:
        ValueError: there is none, or one that structlin saved.
    """
    options: dict[str, Any] = {"pretrained_model_name_or_path": path, "local_files_only": True}
    if path.is_file() and path.suffix.lower() == ".gguf":
        options |= {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    elif not path.is_dir():
        raise ValueError(f"{path} is neither a folder of transformers nor a GGUF file")
    elif not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json, as a folder of transformers has")
    with naming(path):
        import transformers

        from structlin import hf  # noqa: F401  # from_pretrained then knows structured layers

        config = transformers.AutoConfig.from_pretrained(**options)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "structlin":
        raise ValueError(f"{path} is structured already; give the dense model that it came from")
    architecture = str((config.architectures or [""])[0])
    is_causal = path.is_file() or architecture.endswith(("CausalLM", "LMHeadModel"))
    model_class = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    return Source(config, model_class, options)


class ReadModel(NamedTuple):
    """A model of transformers, with its tokenizer."""

    model: Any
    tokenizer: Any


def read_model(path: Path) -> ReadModel:
    """The model of a folder of transformers or a GGUF file, in float32, and its tokenizer.

    Raises:
        ValueError: they cannot be read, lack tensors, or are not of one another.
    """
    source = find_source(path)
    with naming(path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(**source.options)
        model, loading_info = source.model_class.from_pretrained(
            **source.options, dtype=torch.float32, output_loading_info=True
        )
    missing = sorted(loading_info["missing_keys"])
    if missing and model.can_generate():  # others may lack a head that nobody reads
        raise ValueError(f"{path} lacks {len(missing)} tensors of the model, such as {missing[0]}")
    embedded = len(model.get_input_embeddings().weight)
    largest_id = max(tokenizer.get_vocab().values())
    if largest_id >= embedded:
        raise ValueError(
            f"{path}: the model embeds {embedded:,} tokens, and its tokenizer has {largest_id}"
        )
    return ReadModel(model, tokenizer)


@torch.no_grad()
def measure(model: Any, dense: Any, batches: Sequence[Tensor]) -> float:
    """Perplexity of a causal language model; otherwise the mean cosine of hidden states to dense
    ones."""
    is_causal = model.eval().can_generate()
    values = []
    for ids in batches:
        y = model(ids)[0]  # (batch, context, vocabulary or width)
        if is_causal:
            value = F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        else:
            value = F.cosine_similarity(y, dense(ids)[0], dim=-1).mean()
        values.append(value.item())
    mean = sum(values) / len(values)
    return math.exp(mean) if is_causal else mean


# ---- files ---------------------------------------------------------------------------------------


class Batches(NamedTuple):
    """Windows of a text, `(BATCH, context)` each."""

    train: Sequence[Tensor]  #: shuffled
    heldout: Sequence[Tensor]  #: of the text's last tenth


def cut(tokenizer: Any, text: str, config: Any) -> Batches:
    """Cut a text into batches of windows.

    Raises:
        ValueError: the text is too short.
    """
    context = min(CONTEXT, getattr(config, "max_position_embeddings", CONTEXT))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    windows = ids[: len(ids) // context * context].view(-1, context)
    tenth = len(windows) // 10
    if not tenth:
        raise ValueError(f"--data has {len(ids):,} tokens; at least {10 * context:,} are needed")
    order = torch.randperm(len(windows) - tenth, generator=torch.Generator().manual_seed(0))
    train = torch.split(windows[order], BATCH)
    heldout = torch.split(windows[-tenth:], BATCH)
    return Batches(train, heldout[:HELDOUT])


def copy_beside(source: Path, folder: Path) -> None:
    """Copy what the folder of a model has beside its weights, as a sentence encoder's pooling.

    These are the files of the folder itself and the folders that its modules.json names. What is in
    `folder` already stays.
    """
    if not source.is_dir():
        return
    files = [path for path in source.iterdir() if path.is_file() and not holds_weights(path)]
    for name in list_modules(source):
        files += [path for path in (source / name).rglob("*") if path.is_file()]
    for path in files:
        target = folder / path.relative_to(source)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def holds_weights(path: Path) -> bool:
    return path.suffix.lower() in WEIGHTS or path.name.endswith(".index.json")


def list_modules(source: Path) -> list[str]:
    """The folders below `source` that its modules.json names, a file of sentence-transformers."""
    try:
        modules = json.loads((source / "modules.json").read_text(encoding="utf-8"))
        names = [str(module["path"]) for module in modules]
    except FileNotFoundError:
        return []
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{source / 'modules.json'} cannot be read: {error!r}") from None
    root = source.resolve()
    for name in names:
        if not (source / name).resolve().is_relative_to(root):
            raise ValueError(f"{source / 'modules.json'} names {name!r}, outside its folder")
    return [name for name in names if (source / name).resolve() != root]


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A folder beside it, which takes its place once all is written; a failure leaves nothing, not
    even the folders above it that were made."""
    folder = folder.absolute()
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"--out {folder}: there is something already; take a new folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"--out {folder}: {error.strerror}") from None
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # not empty, as after a success
            for parent in missing:
                parent.rmdir()


# ---- arguments -----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """One whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="structlin", description="Structured linear layers, from the shell.")
    parser.add_argument("--version", action="version", version=f"structlin {structlin.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run in (plan, compress, info):
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if run is info:
            text = "a folder or file of structlin.save, save_pretrained or structlin compress"
            command.add_argument("checkpoint", type=Path, nargs="?", help=text)
            continue
        command.add_argument("model", type=Path, help="a folder of transformers or a GGUF file")
        usual = COMPRESSED if run is compress else f"{BEST_START}, and with --keep {COMPRESSED}"
        text = f"as in Python; --keep chooses its size (default: {usual})"
        command.add_argument("--structure", help=text)
        text = "layers, as of convert"
        command.add_argument("--include", nargs="+", metavar="PATTERN", help=text)
        command.add_argument("--exclude", nargs="+", metavar="PATTERN", help=text, default=())
        text = "fraction of the converted layers' parameters"
        command.add_argument("--keep", type=read_fraction, required=run is compress, help=text)
        if run is compress:
            command.add_argument("--data", type=read_text, required=True, help="a text file, UTF-8")
            command.add_argument("--out", type=Path, required=True, help="a new folder")
            text = "gigabytes of activations in memory; the others lie in a temporary file"
            command.add_argument("--memory", type=float, metavar="GB", help=text)
            text = "steps of distillation (default: %(default)s)"
            command.add_argument("--heal", type=int, default=30, help=text)
    return parser


def parse_structure(text: str) -> structlin.Family:
    """The family that a text such as its repr names; nothing is evaluated.

    Raises:
        ValueError: it names no family, or not all that it needs.

    >>> parse_structure("BTT(2)"), parse_structure("monarch")
    (BTT(rank=2, cores=2), Monarch(blocks=4))
    >>> parse_structure("Split(3, of=LowRank(rank=8))")
    Split(split=3, of=LowRank(rank=8))
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        return read_family(call)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"structure {text!r} is not written like BTT(rank=1)") from None
    except TypeError as error:
        raise ValueError(str(error)) from None


def read_family(call: ast.Call) -> structlin.Family:
    """The family that is called.

    Raises:
        SyntaxError: it is written otherwise.
        ValueError, TypeError: what `structlin.family` raises; too many arguments without a name.
    """
    name = ast.unparse(call.func)
    kind = FAMILIES.get(name.lower())
    # as a dataclass takes them: those without a name first, in the order of its fields
    places = [] if kind is None else [f.name for f in fields(kind) if f.init and not f.kw_only]
    if kind is not None and len(call.args) > len(places):
        raise ValueError(f"{ast.unparse(call)}: only {places} may stand there without a name")
    options = {place: read_value(node) for place, node in zip(places, call.args, strict=False)}
    for keyword in call.keywords:
        if keyword.arg in options:
            raise ValueError(f"{ast.unparse(call)} has {keyword.arg}= twice")
        options[str(keyword.arg)] = read_value(keyword.value)
    return structlin.family(name, **options)


def read_value(node: ast.expr) -> Any:
    """An option of a family: another family, or a number, text or tuple.

    Raises:
        SyntaxError: it is none of these.
    """
    if isinstance(node, ast.Call) and ast.unparse(node.func).lower() in FAMILIES:
        return read_family(node)
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        raise SyntaxError(ast.unparse(node)) from None


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{path} is no text: {error}") from None


def read_fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1; 0.5 keeps half")
    return value


if __name__ == "__main__":
    sys.exit(main())
