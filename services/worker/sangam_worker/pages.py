"""The worker's page allocator: the authority on which KV pages are free.

Pure bookkeeping over page numbers; the tensors are ``kv_pool``'s. Called by the scheduler only.
"""

from collections.abc import Sequence


class PageAllocator:
    """Hands out page numbers ``0 .. total_pages - 1``, lowest-recently-freed last (a stack)."""

    def __init__(self, total_pages: int) -> None:
        if total_pages < 1:
            raise ValueError(f"total_pages must be >= 1, not {total_pages}")
        self.total_pages = total_pages
        self._free = list(range(total_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, num_pages: int) -> tuple[int, ...] | None:
        """Take pages, or ``None`` (nothing taken) when too few are free."""
        num_left = len(self._free) - num_pages
        if num_left < 0:
            return None
        pages = tuple(reversed(self._free[num_left:]))
        del self._free[num_left:]
        self._held.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Giving back one that nobody holds is a bug: ``ValueError``, and
        nothing has changed."""
        given_back = set(pages)
        if len(given_back) < len(pages) or not given_back <= self._held:
            raise ValueError(f"not every page of {tuple(pages)} is held: some are free already")
        self._held -= given_back
        self._free += pages
