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
        "time_to_loss": (
            "Dense and structured models of growing width learn, by FLOPs and by seconds.",
            "results/time_to_loss.md",
        ),
        "starts": (
            "Each point is one model's loss over dense's, by structure and way to start.",
            "convert.md#a-transformer-from-scratch",
        ),
        "comparison": (
            "Layers of several packages in one GPT: loss by milliseconds of a step.",
            "choose.md#beside-other-packages",
        ),
        "moe": (
            "A mixture of BTT experts trains beside dense and single BTT GPTs.",
            "mixtures.md#what-we-measured",
        ),
        "search": (
            "Each line is one einsum, trained on three tasks, by FLOPs and by seconds.",
            "search.md#what-we-found",
        ),
        "self_guided": (
            "BTT and low-rank models train with and without a dense branch that fades away.",
            "optimizers.md#does-a-dense-branch-that-fades-away-help",
        ),
    },
    "Speed": {
        "layer": (
            "Structured and dense layers run on an AMD EPYC, beside the machine's roofline.",
            "speed.md#one-layer-many-tokens",
        ),
        "layer_xeon": (
            "The same layers run on an Intel Xeon with an older engine.",
            "speed.md#one-layer-many-tokens",
        ),
    },
    "Learning rates and optimizers": {
        "lr_transfer": (
            "Each curve is a width and a rule of the rate; gray marks dense's best rate.",
            "optimizers.md#does-the-dense-rate-carry-over",
        ),
        "transfer": (
            "Each panel is an optimizer and a structure over widths and depths.",
            "transfer.md#width-and-depth",
        ),
        "muon_vs_adamw": (
            "GPTs and ViTs learn with Muon and with AdamW, dense and as BTT.",
            "optimizers.md#does-muon-train-better",
        ),
        "muon_options": (
            "Each point is one seed's loss with one addition to Muon's step.",
            "optimizers.md#options-we-tried-and-left-out",
        ),
        "polar": (
            "Muon trains with each method of the polar factor, for equal steps and equal seconds.",
            "optimizers.md#how-exact-must-the-polar-factor-be",
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
    "Compute Better Spent": {
        "papers/cbs_features": (
            "Training moves the last features, by width, structure and rule.",
            "results/compute_better_spent.md#feature-changes",
        ),
        "papers/cbs_untuned": (
            "Models of growing width train at one rate that nobody tuned for them.",
            "results/compute_better_spent.md#nothing-tuned",
        ),
        "papers/cbs_ffn": (
            "A ViT with BTT in its FFNs trains at each rate, by rule.",
            "results/compute_better_spent.md#beside-dense-attention",
        ),
        "papers/cbs_scaling": (
            "Loss falls with FLOPs, for each structure by its own exponent.",
            "results/compute_better_spent.md#loss-against-flops",
        ),
        "papers/cbs_mlp": (
            "Residual MLPs of growing width learn digits.",
            "results/compute_better_spent.md#residual-mlps-and-vits",
        ),
        "papers/cbs_vit": (
            "ViTs of growing width learn digits.",
            "results/compute_better_spent.md#residual-mlps-and-vits",
        ),
        "papers/cbs_tuning": (
            "Structured MLPs train at each rate, with both rules and at two widths.",
            "results/compute_better_spent.md#both-rules-tuned-throughout",
        ),
        "papers/cbs_norm": (
            "The residual stream of a GPT changes, with and without weight normalisation.",
            "results/compute_better_spent.md#weight-normalisation",
        ),
        "papers/cbs_gpt": (
            "GPTs of words learn; their head costs FLOPs too, or is left out.",
            "results/compute_better_spent.md#gpts-and-the-head",
        ),
        "papers/cbs_projection": (
            "Random matrices are projected at every rank, until the projection is exact.",
            "results/compute_better_spent.md#exactness-bounds",
        ),
        "papers/cbs_sgd": (
            "Structured MLPs train with SGD at each rate.",
            "results/compute_better_spent.md#sgd",
        ),
    },
    "Modular Duality": {
        "papers/md_width": (
            "Adam and dualized steps train MLPs at each rate, over widths.",
            "results/modular_duality.md#best-rate-against-width",
        ),
        "papers/md_watermark": (
            "A letter is cut into a hidden matrix, which then trains by plain or dualized steps.",
            "results/modular_duality.md#watermark",
        ),
        "papers/md_coefficients": (
            "Each method maps singular values in its own way, and trains an MLP.",
            "results/modular_duality.md#coefficients",
        ),
        "papers/md_alignment": (
            "Steps align with the features, and weights move, by width.",
            "results/modular_duality.md#alignment",
        ),
    },
    "The Modular Norm": {
        "papers/mn_transfer": (
            "Each panel is a model and an optimizer, with and without the norm, at growing size.",
            "results/modular_norm.md#transfer-over-width-and-depth",
        ),
        "papers/mn_nanogpt": (
            "Adam trains two kinds of GPT at each rate, over widths and depths.",
            "results/modular_norm.md#nanogpt",
        ),
        "papers/mn_normed": (
            "Normed and plain optimizers train one MLP at each rate.",
            "results/modular_norm.md#normed-and-plain-tuned",
        ),
        "papers/mn_context": (
            "Normed Adam trains a GPT at three lengths of context.",
            "results/modular_norm.md#context",
        ),
        "papers/mn_mass": (
            "The mass of the blocks decides how an MLP learns, tared or free.",
            "results/modular_norm.md#mass",
        ),
        "papers/mn_mass_gpt": (
            "GPTs learn text and code with each mass of their blocks.",
            "results/modular_norm.md#mass",
        ),
        "papers/mn_overhead": (
            "The modular norm adds time to a training step.",
            "results/modular_norm.md#overhead",
        ),
    },
    "Beyond MuP 2": {
        "papers/bm_metrics": (
            "Three numbers of a hidden layer change during training, by structure and optimizer.",
            "results/beyond_mup.md#during-training",
        ),
        "papers/bm_norms": (
            "Each point is a run: the middle of an FFN, and its outputs over their bound.",
            "results/beyond_mup.md#in-norm",
        ),
    },
}
LEFT_OUT = {  # plots that are kept beside their numbers and stand in no gallery
    "layer_default_allocator": "a check of the allocator; the plot of the EPYC shows the layers",
}
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
