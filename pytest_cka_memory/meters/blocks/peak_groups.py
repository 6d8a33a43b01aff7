"""What was live at a region's peak, each block or group described only when it is asked for."""

from pytest_cka_memory.core.allocations import INSIDE, AllocationGroup, Freed
from pytest_cka_memory.meters.blocks.stacks import context_of, site_of
from pytest_cka_memory.meters.blocks.written_blocks import WrittenBlocks
from pytest_cka_memory.meters.lazy_sequence import LazySequence


class PeakGroups(LazySequence[int, AllocationGroup]):
    """Blocks that were allocated in the region, then all that is older as one group.

    Args:
        blocks: those that are live, and a group for each way in which others of one stack were
            freed.
        older: the last group; None if there is none.
    """

    def __init__(self, blocks: WrittenBlocks, older: AllocationGroup | None) -> None:
        super().__init__(range(len(blocks) + (older is not None)))
        self._blocks, self._older_group = blocks, older
        # At once, because stacks are forgotten when the last region ends.
        self._origins = {stack: (site_of(stack), context_of(stack)) for stack in set(blocks.stacks)}

    def described(self, known: int) -> AllocationGroup:
        if self._older_group is not None and known == len(self._blocks):
            return self._older_group
        block = self._blocks[known]
        site, context = self._origins[block.stack]
        freed = Freed(block.freed)
        return AllocationGroup(
            bytes=block.bytes,
            count=block.count,
            recorded=site,
            inside=INSIDE.get(freed),
            context=context,
            freed=freed,
            address=block.address,
        )
