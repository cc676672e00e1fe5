"""The verdict in words."""

from __future__ import annotations

from compare.cases import compared, made, timed

from hvd_compress.tools.compare.judging import judge
from hvd_compress.tools.compare.measures import Spread
from hvd_compress.tools.compare.report.wording import words

BASELINE = "fp16"


def test_words_where_methods_pay() -> None:
    base = [timed(s) for s in (8.0, 10.0, 12.0)]
    told = words(
        compared(
            {
                "none": [timed(16.0), timed(15.0), timed(14.0)],
                BASELINE: base,
                "topk:ratio=0.01": [timed(s) for s in (2.0, 2.0, 2.0)],
                "int8": [timed(7.0), timed(11.0), timed(9.0)],
                "onebit": [timed(20.0)] * 3,
                "dgc": [timed(None)] * 3,
            }
        )
    )
    assert told == [
        "topk:ratio=0.01 pays here: accuracy 0.9 in 2.00 s, a speedup of 5.0x over fp16 (4.0 to 6.0 over 3 seeds).",
        "The baseline, the better of none and fp16, is fp16: it takes 10.0 s (8.00 to 12.0).",
        "int8 may pay: accuracy 0.9 in 9.00 s (7.00 to 11.0), a speedup of 1.14x over fp16 (0.91 to 1.33 over 3"
        " seeds).",
        "Not worth it here, with the speedup: none (no compression) (0.67x; 0.50 to 0.86) and onebit (0.50x;"
        " 0.40 to 0.60).",
        "dgc did not reach the target.",
    ]


def test_words_where_no_compression_is_the_baseline() -> None:
    trainings = {
        "none": [timed(6.0)] * 2,
        BASELINE: [timed(10.0)] * 2,
        "int8": [timed(3.0)] * 2,
        "qsgd": [timed(8)] * 2,
    }
    assert words(compared(trainings)) == [
        "int8 pays here: accuracy 0.9 in 3.00 s, a speedup of 2.0x over none (no compression).",
        "The baseline, the better of none and fp16, is none (no compression): it takes 6.00 s.",
        "Not worth it here, with the speedup: qsgd (0.75x) and fp16 (0.60x).",
    ]


def test_words_where_none_pays() -> None:
    told = words(compared({BASELINE: [timed(8)], "topk": [timed(9, 0.93)], "int8": [None]}))
    assert told == [
        "No method pays here: not one reaches accuracy 0.9 sooner than fp16 with every seed.",
        "The baseline, the better of none and fp16, is fp16: it takes 8.00 s.",
        "Not worth it here, with the speedup: topk (0.89x).",
        "topk ends with worse accuracy than fp16 with the one seed: 0.9300, fp16 0.9500.",
        "int8 failed.",
        "With one seed, the effect of chance is unknown.",
    ]


def test_words_where_fp16_did_not_get_there() -> None:
    told = words(compared({BASELINE: [timed(None)] * 2, "topk": [timed(4), timed(None)], "int8": [timed(None)] * 2}))
    assert told == [
        "fp16 did not reach accuracy 0.9 in 50.0 s of training, so there is no baseline.",
        "topk did, in 4.00 s, with 1 of 2 seeds.",
        "int8 did not reach the target.",
    ]
    assert words(compared({BASELINE: [None] * 2, "topk": [timed(4)] * 2}))[0].startswith("fp16 failed, so there")
    both = words(compared({"none": [timed(None)], BASELINE: [None], "topk": [timed(4)]}))
    assert both[:3] == [
        "none (no compression) did not reach accuracy 0.9 in 50.0 s of training and fp16 failed, so there is no"
        " baseline.",
        "topk did, in 4.00 s.",
        "fp16 failed.",
    ]
    lost = timed(None, diverged=True)
    assert words(compared({BASELINE: [lost] * 2, "topk": [timed(4)] * 2}))[0].startswith("fp16 diverged, so there")


def test_words_where_nobody_got_there() -> None:
    told = words(compared({BASELINE: [timed(None)] * 2, "topk": [timed(None)] * 2}))
    assert told == ["No method reached accuracy 0.9, so there is no verdict."]
    assert words(compared({BASELINE: [None], "topk": [None]})) == ["No training ended; see the failures."]


def test_words_where_the_target_is_too_easy() -> None:
    easy = made([(0, 0.0, 0.95), (40, 9.0, 0.97)])
    comparison = compared({BASELINE: [easy] * 2, "topk": [easy] * 2})
    assert judge(comparison)[0].ratio == Spread(1, 1, 1)
    assert words(comparison)[-1].startswith("Models have accuracy 0.9 before their first step")
