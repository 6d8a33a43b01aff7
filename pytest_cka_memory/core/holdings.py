"""Storages that are live after a region: where they were allocated, and what references them."""

from dataclasses import dataclass

from pytest_cka_memory.units import counted, format_exact


@dataclass(frozen=True)
class Link:
    """An object on a path of references, and the reference that leads to it."""

    reference: str
    """How the object before it references this one, such as ``.cache``; empty for the first."""
    object: str
    """What it is: where the path begins, or a class with the shape of a tensor."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Holding:
    """Storages that were allocated in one place and are referenced in one way."""

    bytes: int
    """Sum over all of them."""
    count: int
    """Number of storages; 0 for memory that no tensor owns."""
    dtype: str | None = None
    """Of the largest storage's first tensor, or of a tensor that uses it; None if unknown."""
    shape: tuple[int, ...] | None = None
    """Of the same tensor as ``dtype``; None if unknown."""
    operator: str | None = None
    """The operator that allocated the largest, such as ``aten.sum``; None if unknown."""
    created_at: tuple[str, ...] = ()
    """Frames of the code that allocated them, innermost first: ``net.py:11 in Block.forward``."""
    # Which of several holders is held_by, and printed first, is decided by `search` in
    # holders/search.py; the others are in the order in which holders/proof.py finds them.
    held_by: str | None = None
    """An expression that leads to the largest; None if no Python object references it."""
    also_held_by: tuple[str, ...] = ()
    """What else references the largest, as expressions; all of them must go to free it."""
    freed_bytes: int | None = None
    """How many of the bytes are freed with the one reference of ``held_by``, or the like, by the
    count of all references; None if that was not counted."""
    paths: tuple[tuple[Link, ...], ...] = ()
    """The references that lead to the largest, one path for each holder that was found; empty
    unless ``--cka-memory-explain=graph`` asked for them."""
    hint: str | None = None
    """What usually helps when such an object holds memory."""
    batches: int | None = None
    """Number of batches in which such storages were allocated; None outside a batch loop."""
    first_batches: int | None = None
    """Number of batches that had ended when growth was found, if the loop freed them at its end."""
    bytes_per_batch: float | None = None
    """How many of the bytes per batch were allocated in the batches whose growth is judged; None
    outside a batch loop."""
    early_bytes: int | None = None
    """Bytes that the same line had in use after the second batch, if it rebuilds them in each one
    and they grow; None otherwise."""
    code: str | None = None
    """The expression that allocated the largest: ``(weight * batch).sum()``; None if unknown."""
    before_region: bool = False
    """Whether all of them were allocated before the region began; known for the peak only."""
    module: str | None = None
    """Paths of the modules that allocated most of them: ``encoder.layers.2.linear1``, if known."""
    inside: str | None = None
    """What allocated it if no tensor owned it, such as ``workspace``; known for the peak only."""
    kind: str | None = None
    """What it was for, one of :data:`.sentences.KINDS`; known for the peak only."""
    keeps_bytes: int | None = None
    """How much free memory lies beside them that the allocator cannot release while they are in
    use; known for a reserve that is explained."""
    pinned: bool = False
    """Whether it is pinned memory of the host; False if no tensor was found that uses it."""

    def __repr__(self) -> str:
        count = f"{counted(self.count, 'tensor')}, " if self.count else ""
        made = f", made at {self.made_at}" if self.created_at else ""
        held = f", held by {self.held_by}" if self.held_by else ""
        advice = f"; what to do: {self.hint}" if self.hint else ""
        return f"<Holding: {count}{format_exact(self.bytes)}{made}{held}{advice}>"

    @property
    def made_at(self) -> str:
        """The innermost frame and the expression there; empty if they are unknown."""
        code = f": `{self.code}`" if self.code else ""
        return f"{self.created_at[0]}{code}" if self.created_at else ""
