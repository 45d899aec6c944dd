"""The gallery: every kept plot, what it shows in one sentence, and where a page explains it.

A hook of mkdocs. The page is made from `PLOTS` when the site is built, so a plot without an entry
is a test's failure and an entry without its heading is a warning, which stops the build.
"""

from typing import Any

from mkdocs.structure.files import File, Files

PLOTS = {  # a heading of the gallery: the plot below benchmarks/results, its sentence, the page
    "Training from scratch": {
        "train_mlp_lm": (
            "Four MLP language models learn, by seconds and by training FLOPs.",
            "examples.md#what-the-mlp-shows",
        ),
        "train_gpt": (
            "Four GPTs learn, by seconds and by training FLOPs.",
            "index.md#does-it-train-as-well",
        ),
        "gpt_seconds": (
            "GPTs and ViTs, dense and structured, learn, by seconds and by training FLOPs.",
            "gpts.md",
        ),
        "comparison": (
            "Layers of several packages in one GPT: loss by milliseconds of a step.",
            "choose.md#beside-other-packages",
        ),
    },
    "Learning rates and optimizers": {
        "transfer": (
            "Each panel is an optimizer and a structure over widths and depths.",
            "transfer.md#width-and-depth",
        ),
    },
    "Compressed models": {
        "smollm2": (
            "A compressed language model keeps its perplexity, its answers and its task, or not.",
            "compress.md#a-language-model-python-m-benchmarkscompressionsmollm2",
        ),
        "dinov2": (
            "A compressed vision transformer keeps its features and their classes, or not.",
            "compress.md#a-vision-transformer-python-m-benchmarkscompressiondinov2",
        ),
        "minilm": (
            "A compressed sentence encoder keeps its vectors, neighbours and topics, or not.",
            "compress.md#a-sentence-encoder-python-m-benchmarkscompressionminilm",
        ),
    },
}
LEFT_OUT: dict[str, str] = {}  # plots that are kept beside their numbers and stand in no gallery
INTRODUCTION = """# Gallery

These are the plots that the experiments keep. Click a plot to enlarge it. The link below a plot
leads to its explanation.
"""


def on_files(files: Files, *, config: Any) -> Files:
    """The files of the site and the gallery."""
    files.append(File.generated(config, "gallery.md", content=make_gallery()))
    return files


def make_gallery() -> str:
    """The page: a heading for each group, and its plots as the items of a list."""
    groups = [INTRODUCTION]
    for title, plots in PLOTS.items():
        items = [show_plot(name, *about) for name, about in plots.items()]
        groups.append(f'## {title}\n\n<div class="gallery" markdown>\n\n{"".join(items)}\n</div>\n')
    return "\n".join(groups)


def show_plot(name: str, sentence: str, page: str) -> str:
    picture = f"benchmarks/results/{name}.png"
    return f"- [![{sentence}]({picture})]({picture})\n  {sentence} [Explained]({page})\n"
