"""How sure a verdict is, and how much may change; each number has its reason.

`limits.py` says what a row may lose, this table by how much a run may differ from a stored run,
from its own network or from fp16 before that counts. The library is given these as arguments.
"""

from collections.abc import Mapping
from typing import Self

from gptneo_trt.targets import Target
from gptneo_trt.verdicts import AT_LEAST, AT_MOST

EITHER = "either way"


class Tolerance(float):
    """A number and the reason why it is that; loosening one needs another reason.

    Attributes:
        reason: why.
        direction: AT_MOST where a larger number is looser, AT_LEAST where a smaller one is, EITHER
            where one verdict gets looser and another stricter: every change needs a reason.
    """

    reason: str
    direction: str

    def __new__(cls, value: float, reason: str, direction: str = AT_MOST) -> Self:
        """Return the number, in the unit that its name ends with."""
        number = super().__new__(cls, value)
        number.reason, number.direction = reason, direction
        return number

    def __getnewargs__(self) -> tuple[float, str, str]:
        """Return what a copy is made from."""
        return float(self), self.reason, self.direction


CONFIDENCE = Tolerance(
    0.95,
    "one-sided, of each bound: one difference in 20 without a true change may lie beyond it, and "
    "then still has to be larger than its tolerance",
    AT_LEAST,
)
POWER = Tolerance(
    0.90,
    "one change in ten of the size that is called detectable may be missed; clinical trials ask "
    "for 0.8 to 0.9 (ICH E9), and a gate that runs at every merge sees a lasting change again",
    AT_LEAST,
)
EXCESS_CONFIDENCE = Tolerance(
    0.975,
    "of each bound: 95 % between them, since an engine may lose more or less than its recipe",
    EITHER,
)

# Regression against the stored run: (text set, metric) -> by how much its mean may be worse, of KL
# as a fraction of the stored mean, of the others in their unit. FP8 rounding is chaotic: another
# CPU, thread count or build moves single tokens, and the mean a little. Measured of FP8 rows, AVX2
# on AMD against AVX-512 on Intel: the mean KL by up to 3.3 %.
REGRESSIONS: Mapping[tuple[str, str], Tolerance] = {
    ("prose", "kl_mean_nats"): Tolerance(
        0.12,
        "three other orders of summation: 12 texts resolved 7.5 % in prefill and 10.1 % in decode, "
        "of the row with the most noise",
    ),
    ("sampled", "kl_mean_nats"): Tolerance(
        0.08,
        "other orders of summation gave standard errors of up to 2.2 %: 24 windows resolve 6.7 %, "
        "where the prose's 12 resolved 7.5 % in prefill and 9.9 % in decode",
    ),
    ("prose", "nll_mean_nats"): Tolerance(
        0.01, "one per cent of perplexity; another processor moved NLL by up to 0.0037 nats"
    ),
    ("prose", "top1_disagreement_frac"): Tolerance(
        0.025,
        "five tokens in two hundred: three other orders of summation resolved 0.0199 in decode; "
        "another processor moved top-1 by up to 0.0091",
    ),
}
NLL_OF_OWN_LOSS = Tolerance(
    0.16,
    "of a row's stored KL, where that is more: what rounding moves grows with what it costs; of "
    "NVFP4, which loses 0.10 nats, another order of summation gave texts that resolve 0.0158",
)
TOP1_OF_OWN_DISAGREEMENT = Tolerance(
    0.2,
    "of the stored disagreement, where that is more: a row with many near ties turns more of them; "
    "of NVFP4, 0.2 of whose tokens differ, another order of summation resolved 0.0312",
)
REGRESSION_NATS = Tolerance(
    1e-6, "of KL never less: a third of fp16's own loss to float32, which is rounding alone"
)

# Against figures that were published without values a token: a fraction of each, and the errors.
PUBLISHED_FRAC: Mapping[str, Tolerance] = {
    "kl_mean_nats": Tolerance(
        0.10, "the study's own three machines differ by 9 % in fp16's KL and 3 % in fp8's"
    ),
    "perplexity": Tolerance(0.02, "the study's own three machines differ by 1 % in perplexity"),
}
PUBLISHED_ERRORS = Tolerance(
    2.0,
    "standard errors of the mean: the published text has an error too, of about the same size, and "
    "the difference of two such means exceeds 2 of one of them in 16 % of runs before the fraction",
)
PLAN_SIZE_FRAC = Tolerance(
    0.01, "builds of one version are identical; 1 % lets a rebuild of TensorRT pass"
)
ACTIVATION_AMAX_FRAC = Tolerance(
    0.05,
    "of each calibrated range: other kernels (AVX2, none, without oneDNN) gave the same ranges to "
    "the last bit, a float32 model in place of the bf16 one moved them by up to 0.75 %; E4M3's "
    "own steps are 6 to 12 % of a value",
)

# What an engine loses is its recipe's loss, as the interpreter has it, and its own excess.
EXCESS_OF_RECIPE_LOSS = Tolerance(
    0.10, "a trial on another checkpoint saw engines within 7 % of the recipe's loss"
)
EXCESS_NATS = Tolerance(
    1e-5,
    "never less: fp16's own engine is 7e-6 nats from its network (measured), and a row of a few "
    "quantized products is fp16 but for these (measured: 5.5e-6 of a recipe that loses 4.5e-5)",
)
# Rows that round nothing to FP8 are held against the interpreter token by token.
DIRECT_KL_NATS = Tolerance(
    5e-5, "such rows differ by the order of summation alone (measured 7e-6 nats)"
)
DIRECT_TOP1_FRAC = Tolerance(
    0.995, "the order of summation turns only near ties: at most one token in 200", AT_LEAST
)

# Decode against prefill. They compute the same function, but one ulp before a Quantize flips FP8
# roundings downstream.
AGREEMENT_OF_OWN_LOSS = Tolerance(
    0.5, "phases may differ by half of what the row itself loses, never by more"
)
AGREEMENT_NATS = Tolerance(1e-5, "of rows that round nothing to FP8; fp16 measured 3e-6")
ENGINE_AGREEMENT_OF_OWN_LOSS = Tolerance(
    1.0,
    "engines of the two phases use other kernels: their FP8 roundings differ as two engines' do, "
    "which at worst adds up to twice the loss (measured: up to 0.61 of it)",
)
ENGINE_AGREEMENT_NATS = Tolerance(
    2e-5, "engines of the two phases use other kernels: fp16 measured 7e-6 nats"
)

SPEEDUP_FRAC = Tolerance(
    0.05,
    "over four runs on two hosts with the same GPU, time ratios of the bundled checkpoint's rows, "
    "whose kernels take microseconds, differed by up to 2.5 %; twice that",
)
NOISE_FRAC = Tolerance(
    0.005,
    "how far an A/A ratio may be from 1 although its interval excludes it: with many rounds the "
    "interval gets narrower than anything that matters, and the study gives ratios to 0.01",
)

SPEEDUP_CONFIDENCE = Tolerance(
    0.975,
    "of each bound: 95 % between them, since A/A is held against both ends of its interval",
    EITHER,
)
# What may happen to a GPU while a ratio is timed. Rounds are interleaved, fp16, row, row, fp16, so
# slow drift cancels: these are changes that no interleaving cancels.
CLOCK_DRIFT_FRAC = Tolerance(
    0.03,
    "of the largest clock: a kernel bound by arithmetic follows the clock and one bound by memory "
    "does not, so their ratio moves by as much, and must stay well within SPEEDUP_FRAC",
)
TEMPERATURE_DRIFT_C = Tolerance(
    15,
    "rounds of one measurement take seconds and little power, so so much is other work's heat; "
    "leakage rises by some per cent in 10 C, and with it the power left to the clock",
)


def regression_tolerance(
    text_set: str, metric: str, stored_mean: float, stored_kl_nats: float = 0.0
) -> float:
    """Return by how much the mean of a metric may exceed the stored one, in the metric's unit.

    Args:
        text_set, metric: of REGRESSIONS.
        stored_mean: of the metric.
        stored_kl_nats: the row's stored mean KL to float32 on the same text.
    """
    tolerance = REGRESSIONS[text_set, metric]
    if metric == "kl_mean_nats":
        return max(tolerance * stored_mean, float(REGRESSION_NATS))
    if metric == "nll_mean_nats":
        return max(float(tolerance), NLL_OF_OWN_LOSS * stored_kl_nats)
    if metric == "top1_disagreement_frac":
        return max(float(tolerance), TOP1_OF_OWN_DISAGREEMENT * stored_mean)
    return float(tolerance)


def agreement_nats(own_loss_nats: float, target: Target) -> float:
    """Return the largest KL(prefill || decode) of a row that loses this much to float32."""
    if target.needs_gpu:
        return max(float(ENGINE_AGREEMENT_NATS), ENGINE_AGREEMENT_OF_OWN_LOSS * own_loss_nats)
    return max(float(AGREEMENT_NATS), AGREEMENT_OF_OWN_LOSS * own_loss_nats)


def unresolved(metric: str, minimum_detectable: float, tolerance: float) -> str:
    """Return why a sample cannot resolve a tolerance, or "" where it can.

    An unchanged run passes when its upper bound, the mean and t_CONFIDENCE standard errors, is
    within the tolerance. It is so with a probability of POWER or more where the tolerance is at
    least (t_CONFIDENCE + t_POWER) standard errors, the minimum detectable effect of
    ``paired_difference``. Below that, runs without any change are inconclusive too often.

    Args:
        metric: what is compared, for the message.
        minimum_detectable: see ``PairedDifference``, in the metric's unit.
        tolerance: in the metric's unit.
    """
    if minimum_detectable <= tolerance:
        return ""
    return (
        f"{metric}: the sample cannot resolve the tolerance: obtained minimum detectable effect "
        f"{minimum_detectable:.3g} at power {POWER:g}, expected at most {tolerance:.3g}; score "
        "more texts, or loosen the tolerance with a reason"
    )
