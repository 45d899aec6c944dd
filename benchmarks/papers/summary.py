"""The first table of docs/results.md (claim, verdict, link), and the numbers behind each verdict.

`verdicts.json` keeps the papers' words and the numbers that decided; the page has the short claims
of `CLAIMS`, in the order in which `verdicts.py` judges them.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.report import table
from benchmarks.papers.verdicts import find_verdicts

CBS, MD = "results/compute_better_spent.md", "results/modular_duality.md"
MN, BM = "results/modular_norm.md", "results/beyond_mup.md"
SCALING, VISION = f"{CBS}#loss-against-flops", f"{CBS}#residual-mlps-and-vits"
OVER_SIZES, TUNED = f"{MN}#transfer-over-width-and-depth", f"{MN}#normed-and-plain-tuned"

VISION_CLAIMS = [
    ("BTT has the largest scaling exponent", VISION),
    ("BTT consistently outperforms all other structures", VISION),
    ("structures that do not share parameters scale better", VISION),
    ("Kronecker and TT are above dense at equal FLOPs", VISION),
    ("Monarch equals dense's error, without a better exponent", VISION),
]

# figure or section -> its claims in few words, each with the place that has its table
CLAIMS = {
    "CBS 2a": [
        ("our rule gives consistent feature learning for all structures", f"{CBS}#feature-changes"),
        ("the naive rule gives much smaller updates to the features", f"{CBS}#feature-changes"),
        ("the effect is largest for BTT and Kronecker", f"{CBS}#feature-changes"),
    ],
    "CBS 2b": [
        ("dense's best rate carries over", "optimizers.md#does-the-dense-rate-carry-over"),
    ],
    "CBS 1c": [
        ("structured models quickly saturate without the rule", f"{CBS}#nothing-tuned"),
        ("Monarch is an exception", f"{CBS}#nothing-tuned"),
        ("without the rule the benefit does not emerge", f"{CBS}#nothing-tuned"),
    ],
    "CBS 3": [
        (
            "the rule helps even after tuning, beside dense attention",
            f"{CBS}#beside-dense-attention",
        ),
    ],
    "CBS 4": [
        ("BTT is below dense at equal FLOPs, with the larger exponent", SCALING),
        ("BTT has the best scaling of the figure's structures", SCALING),
        ("Kronecker and TT are above dense at equal FLOPs", SCALING),
        ("dense scales better than Kronecker and TT", SCALING),
    ],
    "CBS 5": [("lower BTT rank, more Monarch blocks: better at equal FLOPs", SCALING)],
    "CBS 6": [
        ("BTT of higher rank is better per unit width", SCALING),
        ("Monarch with fewer blocks is better per unit width", SCALING),
    ],
    "CBS 11": [("with three cores too, lower ranks are better", SCALING)],
    "CBS 12": [("more than two cores bring little or nothing", SCALING)],
    "CBS 4a-b, residual MLPs": VISION_CLAIMS,
    "CBS 4c-d, ViTs": VISION_CLAIMS,
    "CBS 7": [
        ("normalisation stops the growth of activations", f"{CBS}#weight-normalisation"),
        ("normalisation improves validation loss", f"{CBS}#weight-normalisation"),
        ("lower rates or more decay cost performance", f"{CBS}#weight-normalisation"),
    ],
    "CBS 8": [
        ("BTT reaches a dense ViT's loss with fewer FLOPs", VISION),
    ],
    "CBS 9": [
        ("with the head's FLOPs BTT is more efficient than dense", f"{CBS}#gpts-and-the-head"),
        ("without the head's FLOPs both perform similarly", f"{CBS}#gpts-and-the-head"),
        ("the gain comes primarily from the head", f"{CBS}#gpts-and-the-head"),
    ],
    "CBS D": [("from which rank on a structure is every matrix", f"{CBS}#exactness-bounds")],
    "CBS H": [("(our hypothesis) dense's SGD rate is the structure's", f"{CBS}#sgd")],
    "MD 1": [
        ("Adam's best rate drifts to the left with width", f"{MD}#best-rate-against-width"),
        ("muP mostly corrects this drift", f"{MD}#best-rate-against-width"),
        ("duality has a fairly stable best rate", f"{MD}#best-rate-against-width"),
        ("duality reaches much lower loss", f"{MD}#best-rate-against-width"),
    ],
    "MD 2": [
        ("dualized training erases the watermark, plain does not", f"{MD}#watermark"),
        ("dualized training is more accurate", f"{MD}#watermark"),
    ],
    "MD 5.3": [("quintics need fewer steps than the cubic", f"{MD}#coefficients")],
    "MD 6.4": [("alignment with activations is simple for dualized updates", f"{MD}#alignment")],
    "MD 6.5": [("dualized weights move visibly at large width", f"{MD}#alignment")],
    "MN 1": [("normed rates transfer across width and depth: GPT", OVER_SIZES)],
    "MN 4": [
        ("normed rates transfer across width and depth: ResMLP", OVER_SIZES),
        ("normed rates transfer across width and depth: ResNet", OVER_SIZES),
    ],
    "MN D.5": [
        ("normed Adam transfers better across width than Adam", OVER_SIZES),
        ("normed Adam matches or outperforms Adam (one size, tuned)", TUNED),
        ("normed SGD outperforms SGD (one size, tuned)", TUNED),
    ],
    "MN D.5, 9-12": [
        ("normed Adam matches or outperforms Adam at every size", OVER_SIZES),
        ("normed SGD outperforms SGD at every size", OVER_SIZES),
    ],
    "MN 5, D.4": [("this GPT transfers its rate better than nanoGPT", f"{MN}#nanogpt")],
    "MN 4, D.4": [("the changes to nanoGPT recover its performance", f"{MN}#nanogpt")],
    "MN 3": [
        ("one mass of the blocks is good at every size", f"{MN}#mass"),
        ("mass and rate transfer from a smaller GPT", f"{MN}#mass"),
    ],
    "MN 7": [("one region of masses suits all three texts", f"{MN}#mass")],
    "MN 6": [("tared masses keep the rate over depth, free ones do not", f"{MN}#mass")],
    "MN 8, D.7": [("the rate transfers from short to long contexts", f"{MN}#context")],
    "MN A.4": [("normalising costs around 23 %", f"{MN}#overhead")],
    "BM": [
        ("the initial variance gives a dependency of order 1", f"{BM}#fresh-layers"),
        ("forward, dependency and update stay of order 1", f"{BM}#during-training"),
        ("In Norm: (x / RMS(x)) W = x W / RMS(x)", f"{BM}#in-norm"),
        ("an FFN without a norm in its middle stays stable", f"{BM}#in-norm"),
    ],
}


def evidence() -> list[dict[str, str]]:
    """What verdicts.json has: every claim in the paper's words, and the numbers that decided."""
    keys = ("where", "claim", "verdict", "found")
    return [dict(zip(keys, row, strict=True)) for row in find_verdicts()]


def summary() -> str:
    """Every claim that was tried: in few words, the verdict, and where its table is."""
    short: dict[str, Iterator[tuple[str, str]]] = {key: iter(rows) for key, rows in CLAIMS.items()}
    lines = []
    for where, _, verdict, _ in find_verdicts():
        claim, link = next(short[where])
        figure = where.split(",")[0] if "ViTs" in where or "MLPs" in where else where
        kind = ": ViTs" if "ViTs" in where else ": MLPs" if "MLPs" in where else ""
        lines.append([f"{figure}{kind}: {claim}", verdict, f"[table]({link})"])
    if left := [key for key, rows in short.items() if next(rows, None)]:
        raise ValueError(f"CLAIMS has more claims than verdicts.py judges, of {left}")
    head, _, *body = table(["the paper's claim", "here", ""], lines).splitlines()
    return "\n".join([head, "|---|---|---|", *body])


def count_verdicts() -> dict[str, str]:
    """How many of the claims hold, hold in part, are undecided, do not hold."""
    kinds = Counter[str]()
    for _, _, verdict, _ in find_verdicts():
        kinds[
            "part" if "in part" in verdict and "no" not in verdict else verdict.split(",")[0]
        ] += 1
    found: dict[str, Any] = {
        "all": kinds.total(),
        "yes": kinds["yes"],
        "part": kinds["part"],
        "undecided": kinds["undecided"],
        "no": kinds["**no**"],
    }
    return {key: str(value) for key, value in found.items()}
