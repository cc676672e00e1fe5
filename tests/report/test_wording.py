"""The verdict in words."""

from __future__ import annotations

from lab.cases import compared, made, timed

from hvd_compress.lab.judging import judge
from hvd_compress.lab.measures import Spread
from hvd_compress.lab.results import BASELINE
from hvd_compress.report.wording import words


def test_words_where_methods_pay() -> None:
    base = [timed(s) for s in (8.0, 10.0, 12.0)]
    told = words(
        compared(
            {
                "none": [timed(6.0), timed(5.0), timed(4.0)],
                BASELINE: base,
                "topk:ratio=0.01": [timed(s) for s in (2.0, 2.0, 2.0)],
                "int8": [timed(7.0), timed(11.0), timed(9.0)],
                "onebit": [timed(20.0)] * 3,
                "dgc": [timed(None)] * 3,
            }
        )
    )
    assert told == [
        "topk:ratio=0.01 pays here: accuracy 0.9 in 2.00 s, 5.0 times as soon as fp16 (4.0 to 6.0 over 3 seeds).",
        "fp16 takes 10.0 s (8.00 to 12.0).",
        "none (no compression) (2.0 times as soon; 1.33 to 3.0) pays, too.",
        "int8 may pay: accuracy 0.9 in 9.00 s (7.00 to 11.0), 1.14 times as soon as fp16 (0.91 to 1.33 over 3 seeds).",
        "Not worth it here: onebit (0.50 times as soon; 0.40 to 0.60).",
        "dgc did not reach the target.",
    ]


def test_words_where_none_pays() -> None:
    told = words(compared({BASELINE: [timed(8)], "topk": [timed(9, 0.93)], "int8": [None]}))
    assert told == [
        "No method pays here: none reaches accuracy 0.9 sooner than fp16 with every seed.",
        "fp16 takes 8.00 s.",
        "Not worth it here: topk (0.89 times as soon).",
        "topk ends with worse accuracy than fp16 with the one seed: 0.9300, fp16 0.9500.",
        "int8 failed.",
        "With one seed, nothing tells how much of this is chance.",
    ]


def test_words_where_fp16_did_not_get_there() -> None:
    told = words(compared({BASELINE: [timed(None)] * 2, "topk": [timed(4), timed(None)], "int8": [timed(None)] * 2}))
    assert told == [
        "fp16 did not reach accuracy 0.9 in 50.0 s of training, so that there is no ratio to it.",
        "topk did, in 4.00 s, with 1 of 2 seeds.",
        "int8 did not reach the target.",
    ]
    assert words(compared({BASELINE: [None] * 2, "topk": [timed(4)] * 2}))[0].startswith("fp16 failed, so that")
    lost = timed(None, diverged=True)
    assert words(compared({BASELINE: [lost] * 2, "topk": [timed(4)] * 2}))[0].startswith("fp16 diverged, so that")


def test_words_where_nobody_got_there() -> None:
    told = words(compared({BASELINE: [timed(None)] * 2, "topk": [timed(None)] * 2}))
    assert told == ["No method reached accuracy 0.9, so that none can be judged by it."]
    assert words(compared({BASELINE: [None], "topk": [None]})) == ["No training came to an end; the failures tell why."]


def test_words_where_the_target_is_too_easy() -> None:
    easy = made([(0, 0.0, 0.95), (40, 9.0, 0.97)])
    comparison = compared({BASELINE: [easy] * 2, "topk": [easy] * 2})
    assert judge(comparison)[0].ratio == Spread(1, 1, 1)
    assert words(comparison)[-1].startswith("Models have accuracy 0.9 before their first step")
