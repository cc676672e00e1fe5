"""`Compression`: the same names everywhere, and a hint where one is misspelt or not called."""

from __future__ import annotations

import pytest

from hvd_compress import parse
from hvd_compress.errors import SpecError
from hvd_compress.face import Catalogue
from hvd_compress.merging import Merge
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.base import Method

COMPRESSION: Catalogue[tuple[Method, Merge]] = Catalogue(lambda method, merge: (method, merge))


def test_names() -> None:
    assert COMPRESSION.none == (parse("none"), "auto")
    assert COMPRESSION.fp16 is COMPRESSION.fp16
    assert COMPRESSION.topk(ratio=0.1, feedback=False, merge=3) == (parse("topk:ratio=0.1,feedback=off"), 3)
    assert COMPRESSION.parse("int8", merge="layer") == (parse("int8"), "layer")
    assert COMPRESSION.parse(parse("int8")) == (parse("int8"), "auto")
    assert set(REGISTRY) <= set(dir(COMPRESSION))


def test_documentation_is_that_of_the_method() -> None:
    assert "Exact top-k" in (COMPRESSION.topk.__doc__ or "")


def test_misspelt() -> None:
    with pytest.raises(AttributeError, match="did you mean 'powersgd'"):
        COMPRESSION.powrsgd  # noqa: B018
    with pytest.raises(SpecError, match="did you mean 'ratio'"):
        COMPRESSION.topk(ratoi=0.1)
    with pytest.raises(SpecError, match=r"Compression.topk was given 0.1 without a name: write topk\(name=0.1\)"):
        COMPRESSION.topk(0.1)
    with pytest.raises(SpecError, match="merge='no' is not allowed"):
        COMPRESSION.topk(merge="no")


def test_a_factory_that_was_not_called_says_so() -> None:
    for use in (COMPRESSION.topk.compress, COMPRESSION.topk.decompress):
        with pytest.raises(SpecError, match=r"pass compression=Compression.topk\(\)"):
            use(None)
