"""Try what would lower a peak: run a step under changes, and say what to write.

:mod:`.search` runs a step as it is, then under each change of :mod:`.changes`, alone and in
combinations. :mod:`.observation` says which changes apply, :mod:`.trials` measures, and
:mod:`.edits` makes the patch. Nothing here asks a device: what runs the
step returns its figures.
"""
