"""What the tests of learning share."""

import pytest

from tasks.learning import packing


@pytest.fixture(autouse=True, scope="module")
def short_pieces():
    """Let attention cut the contexts of tests, which are short, as it cuts long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "PIECE", 3)
        yield
