"""Private caches: the worst case of a hand-over between work-groups on different XCDs.

Each work-group gets a write-back cache of its own, over all writable buffers. Only atomics, loads and stores with sc1
(device scope), `buffer_wbl2 sc1` (release) and `buffer_inv sc1` (acquire) reach through it; a line once read stays as
it was read. Follows LLVM's AMDGPU memory model for gfx942 at agent scope, which gives atomics no sc1. Dirty bytes are
written back when the kernel ends.
"""

import numpy as np

from .state import Memory, Region

LINE = 128


class CachedRegion(Region):
    """A work-group's copy of a buffer, byte by byte valid and dirty."""

    def __init__(self, backing: Region):
        super().__init__(np.zeros_like(backing.bytes), backing.name, True)
        self.backing = backing
        self.valid = np.zeros(self.size, bool)
        self.dirty = np.zeros(self.size, bool)

    def _fill(self, places: np.ndarray) -> None:
        """Fetches the lines that a read of the bytes `places` misses."""
        for line in np.unique(places[~self.valid[places]] // LINE):
            span = slice(line * LINE, (line + 1) * LINE)
            missing = ~self.valid[span]
            self.bytes[span][missing] = self.backing.bytes[span][missing]
            self.valid[span] = True

    def load(self, offsets, width):
        self.check(offsets, width)
        self._fill(offsets[:, None] + np.arange(width))
        return super().load(offsets, width)

    def store(self, offsets, data, width):
        super().store(offsets, data, width)
        places = offsets[:, None] + np.arange(width)
        self.valid[places] = self.dirty[places] = True

    def write_back(self) -> None:
        self.backing.bytes[self.dirty] = self.bytes[self.dirty]
        self.dirty[:] = False

    def invalidate(self) -> None:
        self.valid[:] = self.dirty


class CachedMemory(Memory):
    """Global memory as one work-group sees it."""

    def __init__(self, memory: Memory):
        self.regions = [
            CachedRegion(region) if region is not None and region.writable else region for region in memory.regions
        ]

    def _cached(self):
        return (region for region in self.regions if isinstance(region, CachedRegion))

    def write_back(self) -> None:
        for region in self._cached():
            region.write_back()

    def invalidate(self) -> None:
        for region in self._cached():
            region.invalidate()

    def device_scope(self) -> Memory:
        return DeviceScope(self)


class DeviceRegion(Region):
    """The shared buffer, reached past one cache: own dirty bytes go out first, cached ones are dropped."""

    def __init__(self, cached: CachedRegion):
        super().__init__(cached.backing.bytes, cached.name, True)
        self.cached = cached

    def _drop(self, offsets, width) -> None:
        self.check(offsets, width)
        cached, places = self.cached, offsets[:, None] + np.arange(width)
        dirty = places[cached.dirty[places]]
        self.bytes[dirty] = cached.bytes[dirty]
        cached.valid[places] = cached.dirty[places] = False

    def load(self, offsets, width):
        self._drop(offsets, width)
        return super().load(offsets, width)

    def store(self, offsets, data, width):
        self._drop(offsets, width)
        super().store(offsets, data, width)


class DeviceScope(Memory):
    """Global memory as a device-scope access of one work-group sees it."""

    def __init__(self, view: CachedMemory):
        self.regions = [DeviceRegion(region) if isinstance(region, CachedRegion) else region for region in view.regions]
