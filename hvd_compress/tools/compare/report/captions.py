"""The pictures of a report and what is to be known of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from hvd_compress.tools.compare.report import charts, plots
from hvd_compress.tools.compare.results import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A figure of the report."""

    name: str  # The name of its file, without the suffix
    title: str
    alt: str  # Its content, for those who do not see it
    caption: str  # How to read it
    draw: Callable[[Comparison], Figure]  # Draws it


_LINES = (
    "Lines are medians over the seeds, while all of them train; bands are the range. A dot marks where a line first"
    " reaches the target, a cross where a training diverged."
)

PICTURES = (
    Picture(
        "metric-time",
        "Metric against training time",
        "A line for each method: the metric against the seconds of training.",
        f"{_LINES} The clock stands still during evaluations. The axis leaves out early training, which would hide"
        " differences at the end.",
        plots.metric_by_time,
    ),
    Picture(
        "metric-steps",
        "Metric against steps",
        "A line for each method: the metric against the number of steps.",
        f"This shows how compression affects convergence, whatever its speed. {_LINES}",
        plots.metric_by_steps,
    ),
    Picture(
        "time-to-target",
        "Time to the target",
        "A bar for each method: its speedup to the target, with the range over the seeds.",
        "Bars are medians of the baseline's time over the method's, seed by seed; whiskers are the"
        " range. Where the baseline did not reach the target, they are seconds.",
        charts.time_to_target,
    ),
    Picture(
        "step",
        "Time of a step",
        "A bar for each method: the milliseconds of a step, in computing, encoding, waiting and decoding.",
        "Compute is what is left of a step after the rest. Hatched: waiting was not measured, and is what a step"
        " takes beyond computing alone; so it has all in it that was not measured, as fp16's casts to 16 bits.",
        charts.step_split,
    ),
    Picture(
        "bytes",
        "Bytes in each step",
        "Two bars for each method: the bytes handed to Horovod in a step, and those at the network device.",
        "The library counts what the rank with most hands to Horovod. The device counts all that the busiest host"
        " sends or receives, whichever is more: collectives pass data on, and protocols add their own.",
        charts.bytes_per_step,
    ),
)

MEASURED = (
    "Each training is a Horovod job of its own. With the same seed, all methods begin with the same weights and see"
    " the same minibatches.",
    "The clock runs while the model is trained and stands still while it is evaluated. Starting processes is not in"
    " it.",
    "The target is reached where the metric first is as good, taken as linear between two evaluations.",
    "The baseline is the better of what Horovod has by itself, none and fp16: the one that reaches the target with more"
    " seeds, or else sooner in the median. The ratio is its time over the method's with the same seed.",
    "A method pays if it reaches the target with every seed, and sooner than the baseline with every seed with which"
    " that gets there. It may pay if it is sooner in the median; a training that failed or did not get there counts as"
    " never.",
    "The final metric is that at the end of a method's run. Runs that the budget ended have fewer steps.",
    "Encode, wait and decode are means over the ranks. Where waiting was not measured, as for none, for fp16 and in"
    " TensorFlow, it is what a step takes beyond computing alone, which all ranks did at once before the training.",
    "vNMSE, the squared error of the compressed sums by the square of the exact ones, was measured in steps of their"
    " own, which cost an uncompressed exchange and are in no time here.",
    "Peak memory is that of the process with most, from the first step on, with all that the framework holds.",
)
"""Notes on how it was measured."""
