"""1F1B."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.pipeline.schedule import one_f_one_b


@given(st.integers(1, 6), st.integers(1, 9))
def test_all_stages_get_to_the_end(stages: int, microbatches: int) -> None:
    """Each does what it can as soon as its message has come; nobody waits for ever, and few activations are kept."""
    left = [list(one_f_one_b(stage, stages, microbatches)) for stage in range(stages)]
    for actions in left:
        assert sorted(actions) == sorted((kind, i) for kind in ("forward", "backward") for i in range(microbatches))
    done: list[set[tuple[str, int]]] = [set() for _ in range(stages)]
    while any(left):
        moved = False
        for stage, actions in enumerate(left):
            if not actions:
                continue
            kind, number = actions[0]
            if kind == "forward":
                ready = stage == 0 or ("forward", number) in done[stage - 1]
            else:
                ready = ("forward", number) in done[stage]
                ready &= stage == stages - 1 or ("backward", number) in done[stage + 1]
            if ready:
                done[stage].add(actions.pop(0))
                moved = True
            begun, ended = (sum(kind == which for kind, _ in done[stage]) for which in ("forward", "backward"))
            assert begun - ended <= stages - stage
        assert moved, f"all wait: {left}"


def test_messages_of_a_direction_are_in_order() -> None:
    for stage in range(4):
        for kind in ("forward", "backward"):
            assert [i for k, i in one_f_one_b(stage, 4, 7) if k == kind] == list(range(7))


def test_the_last_stage_goes_back_at_once() -> None:
    assert list(one_f_one_b(1, 2, 2)) == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert list(one_f_one_b(0, 2, 2)) == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
