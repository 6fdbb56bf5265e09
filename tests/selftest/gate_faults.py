"""Faults in what the gate runs on and judges with, as rows: plans, the runtime, texts, metrics,
stored runs and references."""

from dataclasses import replace

import numpy as np

from gptneo_trt.variants import VARIANTS
from tests.selftest.fault import Fault
from tests.selftest.gate_seeds import (
    clamped,
    compared_as,
    cut_elsewhere,
    cut_tokens,
    edited,
    last_index_wins,
    last_token_left_out,
    nan_token,
    nothing_is_checked,
    other_text,
    other_tokenizer,
    plan_of,
    prefill_of,
    prose_is,
    quantized_reference,
    reference_of,
    reversed_kl,
    rounded_c_fc,
    run_of,
    run_of_another_gpu,
    scored_against,
    stored_run,
    targets_moved,
    times_kl,
    tokens_of,
    training_reference,
    worker_is,
)
from tests.selftest.model_faults import NAN_WEIGHT, OVER_FLOOR, WEIGHTS, WORSE
from tests.selftest.seeds import WTE, network_from, together

NAN = next(fault.seed for fault in WEIGHTS if fault.name == NAN_WEIGHT)
REFUSED = "BaselineError: .*"
OF_SOMETHING_ELSE = "BaselineError: baseline of fp16 is of something else: .*"
STORED_KL = "regression/kl_mean_nats"
OTHER_GPU = "baseline-of-another-gpu"  # shared with a whole run
LAST_ID = 4095  # of the bundled vocabulary

PLANS = (
    Fault(
        "plan-of-another-row", "plan",
        "the plan of fp16 has the name of the fp8 row's",
        plan_of(lambda request: replace(request, variant=VARIANTS["fp16"])),
        "regression/plan_mib", r"obtained \S+, expected \S+ \+- ", "fp8",
        phases=("decode",), through="plans",
    ),
    Fault(
        "builder-aborts", "plan",
        "the process that builds a plan dies of SIGABRT",
        worker_is("import os; os.write(2, b'last words\\n'); os.abort()"),
        "build", r"(?s)CrashError: .*the builder died of SIGABRT.*last words", through="plans",
    ),
    Fault(
        "builder-hangs", "plan",
        "the process that builds a plan never ends",
        worker_is("import time; time.sleep(600)", timeout_s=1.0),
        "build", r"CrashError: .*the builder hung and was killed after 1\.\d s", through="plans",
    ),
    Fault(
        "builder-writes-no-plan", "plan",
        "the process that builds a plan ends well and leaves none",
        worker_is("pass"),
        "build", "CrashError: .*the worker ended well but .* is not whole", through="plans",
    ),
)  # fmt: skip

RUNTIME = (
    Fault(
        "logits-truncated", "runtime",
        "the last token of the vocabulary has no logit",
        network_from({"vocab_size": LAST_ID}, {WTE: lambda weights: weights[WTE][:LAST_ID]}),
        "kl_mean_nats", rf"MetricError: .*obtained logits of shape \(\d+, {LAST_ID}\), expected",
    ),
    Fault(
        "logits-of-another-text", "runtime",
        "texts come back in another order",
        prefill_of(change=lambda array: array[::-1]),
        "top1_frac", r"obtained \S+, expected at least 0\.97(;|$)",
    ),
    Fault(
        "nan-becomes-zero", "runtime",
        "one weight is NaN, and what is NaN then comes back as zero",
        together(NAN, prefill_of(change=np.nan_to_num)),
        "kl_mean_nats", OVER_FLOOR,
    ),
)  # fmt: skip

TEXTS = (
    Fault(
        "text-shifted", "text",
        "the network reads the text one token late",
        prefill_of(change_ids=lambda ids: np.roll(ids, 1, axis=1)),
        "next_token/kl_mean_nats", OVER_FLOOR,
    ),
    Fault(
        "last-token-left-out", "text",
        "the token after a question is looked for one token early",
        last_token_left_out,
        "next_token/kl_mean_nats", OVER_FLOOR,
    ),
    Fault(
        "text-of-another-file", "text",
        "the prose is another text than the stored run's",
        prose_is(other_text),
        STORED_KL, OF_SOMETHING_ELSE + "texts/prose/sha256: stored ", through="stored",
    ),
    Fault(
        "text-cut-elsewhere", "text",
        "the windows of the same prose begin a token later",
        prose_is(cut_elsewhere),
        STORED_KL, OF_SOMETHING_ELSE + "texts/prose/token_ids_sha256: stored ", through="stored",
    ),
    Fault(
        "text-of-another-tokenizer", "text",
        "the prose was cut into tokens by another tokenizer.json",
        prose_is(other_tokenizer),
        STORED_KL, OF_SOMETHING_ELSE + "texts/prose/tokenizer_sha256: stored ", through="stored",
    ),
)  # fmt: skip

METRICS = (
    Fault(
        "comparison-clamps-nan", "metrics",
        "one weight is NaN, and the comparison takes NaN for zero",
        together(NAN, compared_as(clamped)),
        "non_finite", r"logits\[0, 0, 0\] = nan$",
    ),
    Fault(
        "nan-not-looked-for", "metrics",
        "one weight is NaN, and the check for NaN finds nothing",
        together(NAN, nothing_is_checked),
        "kl_mean_nats", "MetricError: .*non-finite measurement: obtained nan",
    ),
    Fault(
        "kl-in-bits", "metrics",
        "the divergence is taken with logarithms to base 2",
        compared_as(times_kl(1 / np.log(2))),
        STORED_KL, WORSE, "fp8",
    ),
    Fault(
        "perplexity-of-the-token-read", "metrics",
        "a position is scored by its own token, not by the next one",
        targets_moved,
        "regression/nll_mean_nats", WORSE, through="new losses",
    ),
)  # fmt: skip

BASELINES = (
    Fault(
        OTHER_GPU, "baseline",
        "the stored run is an H200's",
        run_of_another_gpu,
        STORED_KL, OF_SOMETHING_ELSE + 'gpu: stored "NVIDIA H200", current "cpu"', through="stored",
    ),
    Fault(
        "baseline-of-another-version", "baseline",
        "the stored run is of another TensorRT",
        stored_run(edited(lambda content: content["key"].update(version="1.5.0.1"))),
        STORED_KL, OF_SOMETHING_ELSE + r'version: stored "1\.5\.0\.1", current ', through="stored",
    ),
    Fault(
        "baseline-of-another-checkpoint", "baseline",
        "the stored run is of other weights",
        stored_run(edited(lambda content: content["key"].update(checkpoint_sha256="0" * 64))),
        STORED_KL, OF_SOMETHING_ELSE + 'checkpoint_sha256: stored "0000', through="stored",
    ),
    Fault(
        "baseline-of-another-row", "baseline",
        "the whole stored run of fp8-all has the name of fp16's",
        stored_run(run_of("fp8-all")),
        "regression/plan_mib", r"obtained \S+, expected \S+ \+- ",
        phases=("decode",), through="plans",
    ),
    Fault(
        "baseline-missing", "baseline",
        "nothing is stored",
        stored_run(lambda path: path.unlink()),
        STORED_KL, REFUSED + "write one with --update-baselines", through="stored",
    ),
    Fault(
        "baseline-with-a-nan", "baseline",
        "one stored value is NaN",
        stored_run(
            edited(lambda content: content["values"].update({"decode/plan_mib": float("nan")}))
        ),
        STORED_KL, REFUSED + "obtained NaN, expected a finite number", through="stored",
    ),
    Fault(
        "baseline-with-a-nan-token", "baseline",
        "one stored value a token is NaN",
        stored_run(nan_token),
        STORED_KL, REFUSED + "with 1 non-finite values, expected finite", through="stored",
    ),
    Fault(
        "baseline-with-other-tokens", "baseline",
        "the values a token are those of another row",
        stored_run(tokens_of("fp8")),
        STORED_KL, REFUSED + "of another JSON", through="stored",
    ),
    Fault(
        "baseline-cut", "baseline",
        "half of the values a token are lost",
        stored_run(cut_tokens),
        STORED_KL, REFUSED + "of another JSON", through="stored",
    ),
)  # fmt: skip

REFERENCES = (
    Fault(
        "reference-quantized", "reference",
        "the model that ModelOpt quantized is the reference",
        quantized_reference,
        "kl_mean_nats", "RunError: the reference is quantized: obtained ",
        through="new references",
    ),
    Fault(
        "reference-in-training-mode", "reference",
        "the reference drops activations out",
        training_reference,
        "kl_mean_nats", "RunError: the reference is in training mode", through="new references",
    ),
    Fault(
        "reference-of-rounded-weights", "reference",
        "the reference's c_fc weights went through FP8",
        reference_of(rounded_c_fc),
        "kl_mean_nats", OVER_FLOOR, through="new references",
    ),
    Fault(
        "reference-of-another-text", "reference",
        "the cached logits of the reference are those of texts in another order",
        scored_against(lambda prose: prose[::-1]),
        "kl_mean_nats", OVER_FLOOR, through="new losses",
    ),
)  # fmt: skip

# What no cell shows today. A row that is caught after all belongs in one of the tables above.
UNSEEN = (
    Fault(
        "kl-the-other-way-round", "metrics",
        "KL(obtained || reference), which is 0.5 % larger for losses as small as FP8's",
        compared_as(reversed_kl),
        STORED_KL, WORSE, "fp8",
    ),
    Fault(
        "last-index-wins-a-tie", "metrics",
        "the last of tied maxima is the most likely token: one position in 3,000 changes",
        compared_as(last_index_wins),
        "regression/top1_disagreement_frac", WORSE,
    ),
    Fault(
        "kl-a-vocabulary-entry", "metrics",
        "KL is averaged over the vocabulary, not summed: reported as better than the baseline",
        compared_as(times_kl(1 / (LAST_ID + 1))),
        STORED_KL, WORSE,
    ),
)  # fmt: skip

GATE_FAULTS = (*PLANS, *RUNTIME, *TEXTS, *METRICS, *BASELINES, *REFERENCES)
