"""python -m tests.gfx950: the emulator's speed on one core, on a flash decode of 1024 tokens in two splits."""

import time

from .flash_decode import compiled, decode

compiled()
for label in ("first run, with decoding and translation", "second run"):
    start = time.process_time()
    run = decode(batch=1, s_kv=1024, splits=2).run
    seconds = time.process_time() - start
    rate = run.instructions / seconds
    print(f"{label}: {run.instructions} wave-instructions in {seconds:.2f} s of CPU time, {rate:,.0f} a second")
