"""After which layers of a step the KV computed so far leaves, while the later layers still run."""

from __future__ import annotations

from runtime.kv.swap import PIECE_BYTES


def leaves_after(layer: int, num_layers: int, layer_bytes: int) -> bool:
    """Whether KV that is final in the first `layer` layers (fewer than all), `layer_bytes` in each,
    should leave now: whenever a piece worth a copy of its own has come together, and before the
    last layer, so that next to nothing is left at the end. KV of less than a piece leaves at the
    end only.
    """
    each = max(1, PIECE_BYTES // layer_bytes)
    if each >= num_layers:
        return False
    return layer % each == 0 or layer == num_layers - 1
