import threading

import pytest
import torch

from tasks.policy.parallel import MOST, lanes, side_by_side


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_pieces(threads):
    second = threading.Event()

    def work(piece):
        if piece == "first":
            assert second.wait(10), "the pieces are worked at side by side"
        else:
            second.set()
        return piece.upper()

    assert side_by_side(work, ["first", "second"]) == ["FIRST", "SECOND"]


def test_lanes_share_torchs_threads_and_give_them_back(threads):
    assert side_by_side(lambda _: torch.get_num_threads(), [1, 2]) == [2, 2]
    assert side_by_side(lambda _: torch.get_num_threads(), [1]) == [4]
    assert side_by_side(lambda _: torch.get_num_threads(), []) == []
    assert torch.get_num_threads() == 4


def test_lanes_have_their_share_whatever_another_thread_sets(threads):
    """As where sampling and learning go on side by side: else equal runs would not stay equal."""
    ended = threading.Event()

    def other():
        while not ended.is_set():
            torch.set_num_threads(3)
            torch.set_num_threads(1)

    beside = threading.Thread(target=other)
    beside.start()
    found = [side_by_side(lambda _: torch.get_num_threads(), [1, 2]) for _ in range(100)]
    ended.set()
    beside.join()
    assert found == [[2, 2]] * 100


def test_error_in_a_lane_restores_the_threads(threads):
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda piece: 1 // piece, [1, 0])
    assert torch.get_num_threads() == 4


def test_number_of_lanes(threads):
    assert [lanes("cpu", pieces) for pieces in (0, 1, 3, 9)] == [1, 1, 3, MOST]
    assert lanes("cuda", 9) == 1
    torch.set_num_threads(1)
    assert lanes("cpu", 9) == 1
