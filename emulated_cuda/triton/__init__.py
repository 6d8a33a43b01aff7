"""Computes kernels of Triton, and so of ``torch.compile``, from Triton's own intermediate code.

Triton compiles each kernel as for a card. The first stage of that is text in TTIR, with types
and constants resolved, which is read (:mod:`.parser`) and run with torch on the CPU for many
programs of a launch at once (:mod:`.programs`). The table in :mod:`.ttir` says what computes each
operation; the modules with the operations add its rows.
"""
