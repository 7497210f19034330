"""The name of a decode instance's segment, when the instance ends while it is being made."""

from __future__ import annotations

import pytest
from handoff_lab import BLOCK_BYTES, BLOCK_SIZE, config, segments

from runtime.engine.segment import Segment
from runtime.errors import ConfigError
from runtime.kv import buffer
from runtime.kv.layout import KvLayout, PoolMap

POOLS = PoolMap(KvLayout(2, 2, 4, BLOCK_SIZE, "float32"), 8)


def made() -> Segment:
    return Segment(config("d", "decode", cpu_buffer_bytes=4 * BLOCK_BYTES), "incarnation")


def test_its_name_goes_while_its_memory_is_being_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = made()
    prefix = segment._config.shm_prefix
    real = buffer.create_pinned_shm

    def slow(name: str, nbytes: int) -> buffer.PinnedShm:
        made = real(name, nbytes)
        assert segments(prefix) == [name]
        segment.close(quiet=False)  # as the process does that ends meanwhile
        assert segments(prefix) == []
        return made

    monkeypatch.setattr(buffer, "create_pinned_shm", slow)
    segment.make(POOLS)
    assert segments(prefix) == []


def test_none_is_made_for_an_instance_that_ends() -> None:
    segment = made()
    segment.close(quiet=False)
    with pytest.raises(ConfigError, match="d was told to stop while it started"):
        segment.make(POOLS)
    assert segments(segment._config.shm_prefix) == []
