"""Read-modify-write on memory and LDS."""

import numpy as np


def _unsigned(compute):
    return lambda old, data, bits: compute(old, data) & (1 << bits) - 1


def _signed(compute):
    def run(old, data, bits):
        half = 1 << bits - 1
        return compute((old ^ half) - half, (data ^ half) - half) & (1 << bits) - 1

    return run


def _f32(compute):
    def run(old, data, bits):
        a, b = np.array([old, data], np.uint32).view(np.float32)
        return int(np.float32(compute(a, b)).view(np.uint32))

    return run


# (old, data, bits) -> new, all as unsigned integers.
ATOMICS = {
    "swap": _unsigned(lambda old, data: data),
    "add": _unsigned(lambda old, data: old + data),
    "sub": _unsigned(lambda old, data: old - data),
    "and": _unsigned(lambda old, data: old & data),
    "or": _unsigned(lambda old, data: old | data),
    "xor": _unsigned(lambda old, data: old ^ data),
    "umin": _unsigned(min),
    "umax": _unsigned(max),
    "smin": _signed(min),
    "smax": _signed(max),
    "inc": _unsigned(lambda old, data: 0 if old >= data else old + 1),
    "dec": _unsigned(lambda old, data: data if old == 0 or old > data else old - 1),
    "add_f32": _f32(lambda a, b: a + b),
    "min_f32": _f32(np.fmin),
    "max_f32": _f32(np.fmax),
}


def apply_atomic(target, addresses: np.ndarray, data: np.ndarray, key: str, width: int) -> np.ndarray:
    """Lane after lane; returns the old values, uint32 [n, width // 4]. `target` is a Region or Memory.

    `cmpswap` takes [new, expected] in `data`. Raises OutOfBounds.
    """
    old = np.empty((addresses.size, width // 4), np.uint32)
    for lane in range(addresses.size):
        address = addresses[lane : lane + 1]
        before = target.load(address, width)
        old[lane] = before[0]
        value, operands = _integer(before), data[lane]
        if key == "cmpswap":
            new, expected = operands[: width // 4], operands[width // 4 :]
            result = _integer(new) if value == _integer(expected) else value
        else:
            result = ATOMICS[key](value, _integer(operands), 8 * width)
        target.store(address, np.frombuffer(result.to_bytes(width, "little"), np.uint32)[None, :], width)
    return old


def _integer(dwords: np.ndarray) -> int:
    return int.from_bytes(np.ascontiguousarray(dwords).tobytes(), "little")
