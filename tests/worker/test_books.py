"""What becomes of blocks between two passes: those that are lost while a transfer pins them."""

from tests.worker.scheduler_states import a_scheduler, arriving, key

from sangam_core.wire import KVArrived, LossReason, Lost
from sangam_worker.books import Books
from sangam_worker.reporting import Notice, Ran
from sangam_worker.tracking import Moved, TrackedBlock

DRAINING = LossReason(code="draining", message="it drains")
CANCELLED = LossReason(code="cancelled", message="the reader went away")
FAILED = LossReason(code="transfer_failed", message="the other side is gone")


def fetching() -> Books:
    """With a block ``a`` whose KV is on its way."""
    books = Books(a_scheduler(), clock=lambda: 0.0)
    tracked = TrackedBlock(arriving(), 0.0, expires_at=9.0, is_transferred=True)
    assert books.reserve(tracked)
    return books


def ends(books: Books, result: Moved | LossReason) -> list[Ran | Notice]:
    """What has happened once the transfer has ended."""
    books.transfer_ended(key("a"), result, 1.0)
    return books.take_happened()


def test_a_block_whose_kv_has_come_says_so() -> None:
    moved = KVArrived(transfer_seconds=0.5, num_bytes=8)
    assert ends(fetching(), Moved(0.5, 8)) == [(key("a"), moved)]


def test_a_block_lost_while_a_transfer_pins_it_is_told_the_first_reason() -> None:
    books = fetching()
    books.lose(key("a"), DRAINING)
    books.lose(key("a"), CANCELLED)
    assert books.take_happened() == []
    assert books.status().num_blocks == 1
    assert ends(books, Moved(0.5, 8)) == [(key("a"), Lost(reason=DRAINING))]
    assert books.status().num_blocks == 0


def test_a_block_lost_before_its_transfer_failed_is_told_why_it_was_lost() -> None:
    """That the transfer failed is what came of it."""
    books = fetching()
    books.lose(key("a"), DRAINING)
    assert ends(books, FAILED) == [(key("a"), Lost(reason=DRAINING))]
