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
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib.metadata import distributions
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

import structlin

from ._model.saved import SavedLayer, read_saved
from ._tables import Table, hide_numbers, name_group, percent

PACKAGES = "einops", "safetensors", "transformers", "gguf"
CONTEXT, BATCH, CALIBRATION, HELDOUT = 256, 2, 16, 8  # tokens, windows, batches, batches
BEST_START, COMPRESSED = "BTT(rank=1)", "LowRank(rank=1)"  # structures, where none is given
# files of a model's folder that hold its weights, or those of another framework
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".gguf"}
WEIGHTS |= {".h5", ".tflite", ".msgpack", ".ot", ".onnx"}
Result = tuple[str, dict[str, Any]]  # what a command prints, and all of it as plain data


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    options = make_parser().parse_args(argv)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):  # others may print there
            warnings.showwarning = lambda message, *_: print(f"structlin: warning: {message}")
            text, found = options.run(options)
    except KeyboardInterrupt:
        return tell("interrupted; nothing was written", 130)
    except ValueError as error:
        return tell(f"error: {error}", 2)
    except (ArithmeticError, MemoryError, OSError, RuntimeError) as error:
        return tell(f"failed: {type(error).__name__}: {error}", 1)
    print(json.dumps(found) if options.json else text)
    return 0


def tell(what: str, code: int = 0) -> int:
    """Print one line on stderr, and return the exit code."""
    print("structlin:", " ".join(what.split()), file=sys.stderr)
    return code


# ---- the commands --------------------------------------------------------------------------------


def info(options: argparse.Namespace) -> Result:
    """Show a saved structured model; without one: versions, the engine and the machine."""
    if options.checkpoint is not None:
        return show_saved(options.checkpoint)
    found = {"structlin": structlin.__version__, "torch": torch.__version__}
    found |= {each.name: each.version for each in distributions() if each.name in PACKAGES}
    found |= {"Python": platform.python_version(), "platform": platform.platform()}
    with redirect_stdout(StringIO()) as said:
        structlin.show_config()
    found |= dict(line.split(": ", 1) for line in said.getvalue().splitlines())
    return "\n".join(f"{name:12}   {says}" for name, says in found.items()), found


def show_saved(path: Path) -> Result:
    """The structured layers of a saved model, from its files alone."""
    saved = read_saved(path)
    groups = defaultdict[tuple[str, str, str], list[SavedLayer]](list)
    alike = defaultdict[str, list[str]](list)
    for layer in saved.layers:
        pattern = hide_numbers(layer.name)
        alike[pattern].append(layer.name)
        groups[pattern, f"{layer.in_features} -> {layer.out_features}", layer.label].append(layer)
    table = Table("layer", "x", "in -> out", "structure", "params", "/dense")
    for (pattern, shape, label), layers in groups.items():
        name = name_group([layer.name for layer in layers], alike[pattern])
        params, dense = count(layers)
        table.row(name, f"{len(layers)}", shape, label, f"{params:,}", percent(params, dense))
    params, dense = count(saved.layers)
    sums = f"{params:,}", percent(params, dense)
    table.row("structured layers", f"{len(saved.layers)}", "", "", *sums)
    table.row("other numbers", "", "", "", f"{saved.other_numbers:,}")
    found = {"path": str(path), "params": params, **asdict(saved)}
    return f"{path}, written by {saved.kind}\n\n{table}", found


def count(layers: Sequence[SavedLayer]) -> tuple[int, int]:
    """The parameters of the layers' cores, and of the same layers dense."""
    dense = sum(layer.in_features * layer.out_features for layer in layers)
    return sum(layer.params for layer in layers), dense


def plan(options: argparse.Namespace) -> Result:
    """Show what convert would do, or compress with --keep, without the model's weights."""
    default = BEST_START if options.keep is None else COMPRESSED
    structure = parse_structure(options.structure or default)
    config, kind, _ = find_class(options.model)
    with naming(options.model), torch.device("meta"):
        model = kind.from_config(config)
    chosen = {"keep": options.keep, "include": options.include, "exclude": options.exclude}
    planned = structlin.plan_compression(model, structure, None, allocation="error", **chosen)
    dense = {each.layer.name: each.reason for each in planned.decisions if not each.structure}
    sizes = {each.layer.name: each.structure for each in planned.decisions}
    summary = structlin.summary(structlin.plan(model, overrides=sizes).apply())
    lines = [f"dense, {n} layers: {reason}" for reason, n in Counter(dense.values()).items()]
    text = "\n".join([str(summary), "", *lines])
    return text, {"params": summary.params, "dense": dense, **asdict(summary)}


def compress(options: argparse.Namespace) -> Result:
    """Compress a trained model of text, heal it, measure it and save it."""
    structure = parse_structure(options.structure or COMPRESSED)
    if options.heal < 0:
        raise ValueError(f"--heal {options.heal} must be 0 or more")
    with writing(options.out) as folder:
        dense, tokenizer = read_model(options.model)
        batches, heldout = cut(tokenizer, options.data, dense.config)
        figures = {"dense": measure(dense, dense, heldout)}
        tell("compressing")
        model: Any = copy.deepcopy(dense)
        chosen = {"keep": options.keep, "include": options.include, "exclude": options.exclude}
        structlin.compress(model, structure, batches[:CALIBRATION], **chosen)
        figures["compressed"] = measure(model, dense, heldout)
        if options.heal:
            tell(f"healing, {options.heal} steps")
            structlin.distill(model, dense, batches, steps=options.heal)
            figures["healed"] = measure(model, dense, heldout)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        copy_beside(options.model, folder)
        loaded = type(model).from_pretrained(folder, local_files_only=True)
        if measure(loaded, dense, heldout) != [*figures.values()][-1]:
            raise RuntimeError("the model that was loaded differs from the one that was saved")
    name = "perplexity" if model.can_generate() else "cosine"
    says = ", ".join(f"{value:.3f} {when}" for when, value in figures.items())
    summary = structlin.summary(model)
    found = {"out": str(options.out), "params": summary.params, name: figures, **asdict(summary)}
    return f"{summary}\n\nheld-out {name}: {says}\nsaved in {options.out}", found


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


def find_class(path: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The config and the class of a model of transformers, and the arguments that load it.

    Raises:
        ValueError: there is none, or one that structlin saved.
    """
    options: dict[str, Any] = {"pretrained_model_name_or_path": path, "local_files_only": True}
    if path.is_file() and path.suffix.lower() == ".gguf":
        options |= {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    elif not path.is_dir():
        raise ValueError(f"{path} is neither a folder of transformers nor a GGUF file")
    with naming(path):
        import transformers

        from structlin import hf  # noqa: F401  # from_pretrained then knows structured layers

        config = transformers.AutoConfig.from_pretrained(**options)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "structlin":
        raise ValueError(f"{path} is structured already; give the dense model that it came from")
    causal = path.is_file() or str((config.architectures or [""])[0]).endswith(
        ("CausalLM", "LMHeadModel")
    )
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return config, kind, options


def read_model(path: Path) -> tuple[Any, Any]:
    """The model of a folder of transformers or a GGUF file, in float32, and its tokenizer.

    Raises:
        ValueError: they cannot be read, lack tensors, or are not of one another.
    """
    _, kind, options = find_class(path)
    with naming(path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(**options)
        options |= {"dtype": torch.float32, "output_loading_info": True}
        model, loading = kind.from_pretrained(**options)
    missing = sorted(loading["missing_keys"])
    if missing and model.can_generate():  # others may lack a head that nobody reads
        raise ValueError(f"{path} lacks {len(missing)} tensors of the model, such as {missing[0]}")
    rows, last = len(model.get_input_embeddings().weight), max(tokenizer.get_vocab().values())
    if last >= rows:
        raise ValueError(f"{path}: the model embeds {rows:,} tokens, and its tokenizer has {last}")
    return model, tokenizer


@torch.no_grad()
def measure(model: Any, dense: Any, batches: Sequence[Tensor]) -> float:
    """Perplexity of a causal language model; otherwise the mean cosine of hidden states to dense
    ones."""
    found, causal = [], model.eval().can_generate()
    for ids in batches:
        y = model(ids)[0]  # (batch, context, vocabulary or width)
        if causal:
            found.append(F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())
        else:
            found.append(F.cosine_similarity(y, dense(ids)[0], dim=-1).mean().item())
    mean = sum(found) / len(found)
    return math.exp(mean) if causal else mean


# ---- files ---------------------------------------------------------------------------------------


def cut(tokenizer: Any, text: str, config: Any) -> tuple[Sequence[Tensor], ...]:
    """Batches of a text's windows, `(BATCH, context)` each: shuffled, and those of its last tenth.

    Raises:
        ValueError: the text is too short.
    """
    context = min(CONTEXT, getattr(config, "max_position_embeddings", CONTEXT))
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    windows = ids[: len(ids) // context * context].view(-1, context)
    count = len(windows) // 10
    if not count:
        raise ValueError(f"--data has {len(ids):,} tokens; at least {10 * context:,} are needed")
    order = torch.randperm(len(windows) - count, generator=torch.Generator().manual_seed(0))
    train, heldout = (torch.split(part, BATCH) for part in (windows[order], windows[-count:]))
    return train, heldout[:HELDOUT]


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
    """A folder beside it, which takes its place once all is written; a failure leaves nothing."""
    folder = folder.absolute()
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"--out {folder}: there is something already; take a new folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: {error.strerror}") from None
    try:
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
        command.add_argument("--keep", type=float, required=run is compress, help=text)
        if run is compress:
            command.add_argument("--data", type=read_text, required=True, help="a text file, UTF-8")
            command.add_argument("--out", type=Path, required=True, help="a new folder")
            text = "steps of distillation (default: %(default)s)"
            command.add_argument("--heal", type=int, default=30, help=text)
    return parser


def parse_structure(text: str) -> structlin.Family:
    """The family that a text such as its repr names; nothing is evaluated.

    Raises:
        ValueError: it names no family, or not all that it needs.

    >>> parse_structure("BTT(rank=2)"), parse_structure("monarch")
    (BTT(rank=2, cores=2), Monarch(blocks=4))
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) and not node.args else ast.Call(node, [], [])
        options = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        name = ast.unparse(call.func)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"structure {text!r} is not written like BTT(rank=1)") from None
    try:
        return structlin.family(name, **options)
    except TypeError as error:
        raise ValueError(str(error)) from None


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no text: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
