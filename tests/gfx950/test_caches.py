"""Private caches: what one work-group sees of another's writes."""

import numpy as np

from .caches import LINE, CachedMemory
from .snippet import execute
from .state import Memory

ONE = np.uint32(7)


def two_views(size=512):
    memory, words = Memory(), np.zeros(size // 4, np.uint32)
    address = memory.add(words)
    return words, address, CachedMemory(memory), CachedMemory(memory)


def load(view, address):
    return int(view.load(np.array([address]), 4)[0, 0])


def store(view, address, value):
    view.store(np.array([address]), np.array([[value]], np.uint32), 4)


def test_writes_stay_private_until_written_back():
    words, address, a, b = two_views()
    store(a, address, 5)
    assert (load(a, address), load(b, address), words[0]) == (5, 0, 0)
    a.write_back()
    assert words[0] == 5 and load(b, address) == 0  # b keeps the line it read
    b.invalidate()
    assert load(b, address) == 5


def test_a_line_is_read_whole_and_own_writes_survive_invalidation():
    words, address, a, _ = two_views()
    load(a, address)
    words[:] = 9
    assert load(a, address + LINE - 4) == 0 and load(a, address + LINE) == 9
    store(a, address, 1)
    a.invalidate()
    assert load(a, address) == 1 and load(a, address + 4) == 9
    a.write_back()
    assert words[0] == 1 and words[1] == 9


def test_device_scope_goes_past_the_cache():
    words, address, a, _ = two_views()
    load(a, address)
    words[0] = 3
    assert load(a, address) == 0 and load(a.device_scope(), address) == 3 and load(a, address) == 3
    store(a, address, 4)
    store(a, address + 4, 5)
    assert load(a.device_scope(), address) == 4 and words[0] == 4
    assert words[1] == 0  # only what the access touches goes out


def run(code, view, address):
    s = {8: address & 0xFFFFFFFF, 9: address >> 32}
    return execute(code, v={0: np.uint32(0), 1: ONE}, s=s, memory=view, exec_mask=1).wave


def test_instructions_and_their_scope_bits():
    for code, shared in (
        ("global_store_dword v0, v1, s[8:9]", False),
        ("global_store_dword v0, v1, s[8:9] sc0", False),
        ("global_store_dword v0, v1, s[8:9] sc1", True),
        ("global_store_dword v0, v1, s[8:9]\ns_waitcnt vmcnt(0)\nbuffer_wbl2 sc1", True),
        ("global_store_dword v0, v1, s[8:9]\ns_waitcnt vmcnt(0)\nbuffer_wbl2", False),
        ("global_atomic_add v0, v1, s[8:9]", True),
    ):
        words, address, a, _ = two_views()
        run(code, a, address)
        assert words[0] == (7 if shared else 0), code
    for code, fresh in (
        ("global_load_dword v2, v0, s[8:9]", False),
        ("global_load_dword v2, v0, s[8:9] sc1", True),
        ("buffer_inv sc1\nglobal_load_dword v2, v0, s[8:9]", True),
        ("buffer_inv\nglobal_load_dword v2, v0, s[8:9]", False),
    ):
        words, address, a, _ = two_views()
        load(a, address)
        words[0] = 7
        assert run(code, a, address).u[2][0] == (7 if fresh else 0), code
