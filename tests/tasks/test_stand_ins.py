"""Tests of stand-ins for modules."""

import importlib
import importlib.util
import sys

import pytest

from tasks.stand_ins import Later, instead

UNUSED = "sndhdr"  # a module that nothing here imports


def test_module_is_absent_for_a_while():
    with instead({UNUSED: None}):
        assert importlib.util.find_spec(UNUSED) is None
        with pytest.raises(ImportError):
            importlib.import_module(UNUSED)
    assert UNUSED not in sys.modules
    assert importlib.util.find_spec(UNUSED)


def test_loaded_module_stays():
    with instead({"json": None}):
        assert importlib.import_module("json") is sys.modules["json"] is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_later_module_is_imported_when_it_is_used():
    with instead({UNUSED: Later(UNUSED)}):
        module = importlib.import_module(UNUSED)
        with pytest.raises(AttributeError, match=UNUSED):
            module.what  # noqa: B018
    assert UNUSED not in sys.modules
    assert module.what is importlib.import_module(UNUSED).what
    del sys.modules[UNUSED]
