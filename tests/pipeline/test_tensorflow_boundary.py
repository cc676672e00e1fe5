"""The boundary in one process, in Keras: the laws, and that its bits are those of the boundary in PyTorch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
import torch

from hvd_compress.errors import BoundaryError, SpecError
from hvd_compress.ops.numpy_compiled import NumpyCompiledOps
from hvd_compress.pipeline import AQSGD
from hvd_compress.pipeline.operators import SampleTopK, operator
from hvd_compress.pipeline.streams import Call, Stream
from hvd_compress.pipeline.tensorflow import CompressedBoundary
from hvd_compress.pipeline.torch import CompressedBoundary as TorchBoundary
from hvd_compress.pipeline.wire import HEADER

pytestmark = pytest.mark.tensorflow

SHAPE = (6, 4, 5)

Arr = npt.NDArray[Any]


def array(seed: int, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Arr:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def through(layer: Any, x: Any, gradient: Any, graph: bool = True, **facts: Any) -> tuple[Arr, Arr]:
    """What comes out, and the gradient that comes back."""

    def pass_both(x: Any, gradient: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, **{"training": True, **facts})
        return y, tape.gradient(y, x, gradient)

    x, gradient = tf.convert_to_tensor(x), tf.convert_to_tensor(gradient)
    y, back = (tf.function(pass_both) if graph else pass_both)(x, gradient)
    return y.numpy(), back.numpy()


def through_torch(boundary: TorchBoundary, x: Arr, gradient: Arr, ids: Arr | None = None) -> tuple[Arr, Arr]:
    given = torch.from_numpy(x.copy()).requires_grad_()
    y = boundary(given, ids)
    y.backward(torch.from_numpy(gradient.copy()))
    assert given.grad is not None
    return y.detach().numpy(), given.grad.numpy()


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def small(boundary: Any, **compiled: Any) -> Any:
    """A model that is the same each time, around a boundary or without."""
    tf.keras.utils.set_random_seed(1)
    middle = [] if boundary is None else [boundary]
    layers = [tf.keras.layers.Dense(8, "tanh"), *middle, tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input((3,)), *layers])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", **compiled)
    return model


@pytest.mark.parametrize("graph", [False, True])
def test_without_compression_it_is_the_identity(graph: bool) -> None:
    same(through(CompressedBoundary(), array(0), array(1), graph), (array(0), array(1)))


def test_without_compression_a_model_trains_as_if_there_were_no_boundary() -> None:
    """With a last minibatch that is smaller."""
    x, y = array(0, (22, 3)), array(1, (22, 1))
    weights = []
    for boundary in (None, CompressedBoundary()):
        model = small(boundary)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    same(*weights)
    assert model.layers[1].stats().backward.messages == 6


OPERATORS = ["topk:ratio=0.3", "qsgd:bits=8", "minmax:bits=4", "fp16", "bf16", "randomk:ratio=0.2", "natural", "onebit"]


@pytest.mark.parametrize(
    ("spec", "memory"), [*((spec, "none") for spec in OPERATORS), (OPERATORS[0], "ef"), (OPERATORS[1], "ef21")]
)
def test_bits_and_bytes_are_those_of_pytorch(spec: str, memory: str) -> None:
    """Over steps, so that memories and steps of random numbers are compared, too."""
    try:
        theirs = TorchBoundary(spec, spec, memory, name="cut")
    except SpecError:
        with pytest.raises(SpecError):
            CompressedBoundary(spec, spec, memory)
        return
    ours = CompressedBoundary(spec, spec, memory, name="cut")
    for step in range(3):
        x, gradient = array(step), array(10 + step)
        same(through(ours, x, gradient), through_torch(theirs, x, gradient))
    for found, expected in zip(ours.stats(), theirs.stats(), strict=True):
        assert found[:4] == expected[:4]
        assert found.encode_seconds > 0


@pytest.mark.parametrize("memory", ["none", "ef"])
def test_powersgd_is_that_of_pytorch(memory: str) -> None:
    """But for the rounding of the QR decomposition, which is that of each framework."""
    ours = CompressedBoundary("powersgd:rank=2", "powersgd:rank=2", memory, name="cut")
    theirs = TorchBoundary("powersgd:rank=2", "powersgd:rank=2", memory, name="cut")
    for step in range(3):
        x, gradient = array(step), array(10 + step)
        found, expected = through(ours, x, gradient), through_torch(theirs, x, gradient)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("back", ["none", "topk:ratio=0.3", "powersgd:rank=2"])
def test_gradients_are_compressed_and_pass_straight_through(back: str) -> None:
    """Of the activation and its operator the gradient knows nothing: what comes back is D(C_b(dL/dy))."""
    stream = Stream("cut.backward", operator(back), "none", inference=True)
    expected = stream.encode(NumpyCompiledOps(), array(1).flatten(), Call(SHAPE, "float32")).decoded.reshape(SHAPE)
    for seed, forth in enumerate(("none", "topk:ratio=0.1", "minmax:bits=2")):
        same([through(CompressedBoundary(forth, back, name="cut"), array(seed), array(1))[1]], [expected])


@pytest.mark.parametrize("graph", [False, True])
def test_a_shared_mask_is_that_of_the_same_call(graph: bool) -> None:
    """Also where the gradients of two calls come after both, in the other order."""
    boundary = CompressedBoundary("topk:ratio=0.3", "shared")

    def twice(a: Any, b: Any, gradient: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([a, b])
            first, second = boundary(a, training=True), boundary(b, training=True)
        return [(y, tape.gradient(y, x, gradient)) for x, y in ((b, second), (a, first))]

    found = (tf.function(twice) if graph else twice)(*map(tf.constant, (array(0), array(1), array(2))))
    for y, gradient in found:
        same([gradient.numpy()], [np.where(y.numpy() != 0, array(2), np.float32(0))])
    assert boundary.stats().backward.bytes_sent == 2 * (HEADER + 4 * 6 * 6)


def test_what_arrived_and_what_is_left_are_what_there_was() -> None:
    """Error feedback: what is left of a step goes into the next one, in both directions."""
    spec = "topk:ratio=0.3"
    boundary, plain = CompressedBoundary(spec, spec, memory="ef"), CompressedBoundary(spec, spec)
    left, arrived, given = (np.zeros((2, *SHAPE), np.float32) for _ in range(3))
    for step in range(6):
        pair = np.stack([array(step), array(20 + step)])
        found = np.stack(through(boundary, *pair))
        same(found, through(plain, *(pair + left)))
        left, arrived, given = pair + left - found, arrived + found, given + pair
    assert np.abs(left).max() > 0.5
    np.testing.assert_allclose(arrived + left, given, atol=1e-5)


@pytest.mark.parametrize("memory", ["none", "ef"])
def test_memories_are_left_alone_outside_of_training(memory: str) -> None:
    boundary, fresh, other = (CompressedBoundary("topk:ratio=0.1", memory=memory) for _ in range(3))
    for trained in (boundary, other):
        through(trained, array(0), array(1))
    for training in (False, None):
        same([boundary(array(2), training=training).numpy()], [fresh(array(2), training=False).numpy()])
    same(through(boundary, array(3), array(1)), through(other, array(3), array(1)))


@pytest.mark.parametrize("inference", [True, False])
def test_inference(inference: bool) -> None:
    """As Keras says whether it trains: in `predict`, `evaluate` and `fit`."""
    model = small(CompressedBoundary("topk:ratio=0.2", inference=inference))
    x, dense = array(0, (5, 3)), model.layers[0]
    hidden = dense(x)
    compressed = CompressedBoundary("topk:ratio=0.2")(hidden)
    found, boundary = model.predict(x, verbose=0), model.layers[1]
    np.testing.assert_allclose(found, model.layers[2](compressed if inference else hidden), rtol=1e-5)
    model.evaluate(x, array(1, (5, 1)), verbose=0)
    assert boundary.stats().forward.bytes_sent == 0  # what training sends is counted
    model.fit(x, array(1, (5, 1)), batch_size=5, verbose=0)
    assert boundary.stats().forward.bytes_sent == HEADER + 5 * 2 * 6


def test_the_last_minibatch_of_an_epoch() -> None:
    """Without a memory it may be smaller; with one the error of the step says what to do."""
    x, y = array(0, (6, 3)), array(1, (6, 1))
    model = small(CompressedBoundary("topk:ratio=0.5", "shared"))
    model.fit(x, y, batch_size=4, verbose=0)
    assert [t.messages for t in model.layers[1].stats()] == [2, 2]
    model = small(CompressedBoundary("topk:ratio=0.5", memory="ef"))
    expected = r"began with float32 \(4, 8\), and now there is float32 \(2, 8\); leave out the last minibatch"
    with pytest.raises(tf.errors.UnknownError, match=expected):
        model.fit(x, y, batch_size=4, verbose=0)
    model = small(CompressedBoundary("topk:ratio=0.5", memory="ef"), run_eagerly=True)
    with pytest.raises(BoundaryError, match=expected):
        model.fit(x, y, batch_size=4, verbose=0)


@pytest.mark.parametrize("listed", [True, False])
def test_aqsgd_in_fit(listed: bool) -> None:
    """With ids as a second input of the model; each visit of a sample brings what is known nearer to it."""
    x, ids = tf.keras.Input((5,)), tf.keras.Input((), dtype="int64")
    boundary = CompressedBoundary("minmax:bits=2", memory="aqsgd:samples=10,values=fp32")
    model = tf.keras.Model([x, ids], boundary([x, ids]) if listed else boundary(x, ids=ids))
    model.compile("sgd", "mse")
    samples, order = array(0, (10, 5)), np.arange(10)[::-1].copy()
    losses = []
    for data in (array(1, (10, 5)), *[samples] * 4):
        history = model.fit([data, order], data, batch_size=4, shuffle=False, verbose=0).history
        losses.append(history["loss"][0])
    assert losses[0] == 0  # on the first visit samples go as they are
    assert losses[1] > 0 and all(b < a / 2 for a, b in pairwise(losses[1:]))
    assert boundary.stats().forward.messages == 15


def test_aqsgd_is_that_of_pytorch() -> None:
    ours, theirs = (
        make("minmax:bits=2", memory="aqsgd:samples=8", name="cut") for make in (CompressedBoundary, TorchBoundary)
    )
    for step in range(4):
        ids = np.random.default_rng(step).permutation(8)[:6]
        x, gradient = array(step), array(10)
        same(through(ours, x, gradient, ids=tf.constant(ids)), through_torch(theirs, x, gradient, ids))
    assert ours.stats().forward[:4] == theirs.stats().forward[:4]


def test_aqsgd_must_know_the_samples() -> None:
    boundary = CompressedBoundary("minmax:bits=2", memory="aqsgd:samples=6")
    with pytest.raises(BoundaryError, match=r"give their ids \(ids=\.\.\.\) in training"):
        boundary(array(0), training=True)
    with pytest.raises(BoundaryError, match="unknown sample id 6"):
        boundary(array(0), ids=tf.range(1, 7), training=True)
    boundary(array(0), training=False)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_precisions(dtype: Any) -> None:
    boundary = CompressedBoundary("topk:ratio=0.3", "minmax:bits=8")
    x, gradient = (tf.cast(array(seed), dtype) for seed in (0, 1))
    y, back = through(boundary, x, gradient)
    assert y.dtype == back.dtype == dtype.as_numpy_dtype
    same([y[y != 0]], [x.numpy()[y != 0]])
    theirs = TorchBoundary("topk:ratio=0.3", "minmax:bits=8")
    kind = getattr(torch, dtype.name)
    given = torch.from_numpy(x.numpy().astype("float64")).to(kind).requires_grad_()
    theirs(given).backward(torch.from_numpy(gradient.numpy().astype("float64")).to(kind))
    assert given.grad is not None
    same([back.astype("float64")], [given.grad.double().numpy()])
    assert [a[:4] for a in boundary.stats()] == [b[:4] for b in theirs.stats()]


def test_mixed_precision() -> None:
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = small(CompressedBoundary("topk:ratio=0.3", "qsgd:bits=8"))
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert model.layers[1].output.dtype == "float16"
    model.fit(array(0, (6, 3)), array(1, (6, 1)), batch_size=4, verbose=0)
    assert model.layers[1].stats().backward.plain_bytes == 6 * 8 * 2


def test_what_is_given_stays_as_it_is() -> None:
    for spec in ("none", "topk", "qsgd", "minmax", "fp16", "powersgd"):
        x, gradient = tf.constant(array(0)), tf.constant(array(1))
        boundary = CompressedBoundary(spec, spec, memory="ef")
        for graph in (False, True):
            through(boundary, x, gradient, graph)
        same([x.numpy(), gradient.numpy()], [array(0), array(1)])


def test_what_is_not_finite_travels_as_it_is() -> None:
    x = array(0)
    x[1, 2, 3] = np.inf
    boundary = CompressedBoundary("topk:ratio=0.3", "topk:ratio=0.3", memory="ef")
    same([through(boundary, x, array(1))[0]], [x])
    fresh = CompressedBoundary("topk:ratio=0.3", "topk:ratio=0.3", memory="ef")
    same([through(boundary, array(2), array(1))[0]], [through(fresh, array(2), array(1))[0]])


def test_masks_of_keras_pass() -> None:
    x = array(0)
    x[:, 2:] = 0
    masked = CompressedBoundary("fp16")(tf.keras.layers.Masking()(x))
    assert masked._keras_mask.numpy().tolist() == [[True, True, False, False]] * 6


def test_sparse_gradients_are_compressed() -> None:
    """Where a model gathers from what arrived, TensorFlow gives slices."""
    x = tf.constant(array(0))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.gather(CompressedBoundary("none", "fp16")(x, training=True), [1, 1])
    expected = np.zeros(SHAPE, np.float32)
    expected[1] = 2
    same([tape.gradient(y, x).numpy()], [expected])


@pytest.mark.parametrize("x", [tf.range(3), tf.constant(1.0), tf.zeros((0, 3)), tf.zeros((2, 2), tf.complex64)])
def test_what_a_boundary_cannot_carry(x: Any) -> None:
    expected = r"dense tensors of float32, .* whose first axis is that of samples"
    with pytest.raises(BoundaryError, match=expected):
        CompressedBoundary("topk")(x)
    with pytest.raises((BoundaryError, tf.errors.UnknownError), match=expected):
        tf.function(CompressedBoundary("topk"), input_signature=[tf.TensorSpec(None, x.dtype)])(x)


@pytest.mark.parametrize("memory", ["ef", ("none", "ef21"), "aqsgd:samples=6,values=fp16"])
def test_models_are_saved_without_what_is_remembered(tmp_path: Path, memory: Any) -> None:
    boundary = CompressedBoundary("topk:ratio=0.25,values=fp16", "powersgd:rank=2", memory, inference=False, name="cut")
    model = small(boundary)
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded = tf.keras.models.load_model(path, custom_objects={"CompressedBoundary": CompressedBoundary})
    assert loaded.layers[1].settings == boundary.settings and loaded.layers[1].name == "cut"
    same([model.predict(array(0, (4, 3)), verbose=0)], [loaded.predict(array(0, (4, 3)), verbose=0)])


@pytest.mark.parametrize(
    "spec", [*OPERATORS, "powersgd:rank=3", "none", "terngrad", "sidco", "threshold:threshold=0.5"]
)
def test_a_layer_is_made_again_from_its_configuration(spec: str) -> None:
    boundary = CompressedBoundary(spec, spec, inference=False)
    assert CompressedBoundary.from_config(boundary.get_config()).settings == boundary.settings


def test_configurations_of_objects_are_specs() -> None:
    config = CompressedBoundary(SampleTopK(ratio=0.5), memory=AQSGD(samples=3, limit=0.5)).get_config()
    assert config["forward"] == "topk:ratio=0.5" and config["memory"] == ["aqsgd:samples=3,limit=0.5", "none"]


def recomputing(layer: Any, graph: bool, recompute: bool = True) -> list[Arr]:
    """The gradients of a model whose middle is computed again in the backward pass."""
    tf.keras.utils.set_random_seed(1)
    first, before, behind = (tf.keras.layers.Dense(5, "tanh") for _ in range(3))

    def middle(x: Any) -> Any:
        return behind(layer(before(x), training=True))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.recompute_grad(middle) if recompute else middle)(first(x)) ** 2)
        return tape.gradient(loss, [*first.weights, *before.weights, *behind.weights])

    for part in (first, before, behind):
        part.build((4, 5))
    return [g.numpy() for g in (tf.function(step) if graph else step)(tf.constant(array(0, (4, 5))))]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("spec", "memory"), [("qsgd", "none"), ("topk", "ef")])
def test_activations_that_would_be_others_the_second_time_are_refused(spec: str, memory: str, graph: bool) -> None:
    layer = CompressedBoundary(spec, memory=(memory, "none"), name="cut")
    with pytest.raises(
        (BoundaryError, tf.errors.UnknownError),
        match=r"(?s)cut.forward \(.* leave the boundary out of what is computed again",
    ):
        recomputing(layer, graph)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("settings", [("topk:ratio=0.3", "shared"), ("minmax:bits=4", "topk")])
def test_activations_that_are_the_same_may_be_computed_again(settings: tuple[str, str], graph: bool) -> None:
    once, again = (CompressedBoundary(*settings, name="cut") for _ in range(2))
    same(recomputing(again, graph), recomputing(once, graph, recompute=False))
    assert [traffic[:4] for traffic in again.stats()] == [traffic[:4] for traffic in once.stats()]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="take a sparse operator forward"):
        CompressedBoundary("minmax", "shared")
