"""The operations the engine is made of: one operation, one name, several bodies.

`reference` defines them; a faster body takes an import's place here once it agrees with it.
"""

from kernels.reference import decode_attention, window_mass

__all__ = ["decode_attention", "window_mass"]
