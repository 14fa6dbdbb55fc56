"""The `amd-mixed-mla` problem as data: tensor types, model dimensions and the official cases.

MLA decode of DeepSeek-R1 in the absorbed form. Keys are all `QK_HEAD_DIM` dims of a cache row, values its first
`V_HEAD_DIM` dims; all `NUM_HEADS` query heads share the single KV head.
"""

from typing import TYPE_CHECKING, TypeAlias, TypedDict

if TYPE_CHECKING:
    import torch  # seconds that a command line without a worker need not wait

# (q, kv_data, qo_indptr, kv_indptr, config); shapes and dtypes are in `reference.generate_input`.
input_t: TypeAlias = "tuple[torch.Tensor, dict, torch.Tensor, torch.Tensor, dict]"
# bfloat16 (total_q, NUM_HEADS, V_HEAD_DIM)
output_t: TypeAlias = "torch.Tensor"

NUM_HEADS = 16
NUM_KV_HEADS = 1
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_HEAD_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
V_HEAD_DIM = KV_LORA_RANK
SM_SCALE = QK_HEAD_DIM**-0.5


class TestSpec(TypedDict):
    """One case: `batchsize` sequences of `kvseqlen` cached tokens, `qseqlen` queries each, drawn from `seed`."""

    batchsize: int
    qseqlen: int
    kvseqlen: int
    seed: int


def _case(batchsize: int, kvseqlen: int, seed: int) -> TestSpec:
    return {"batchsize": batchsize, "qseqlen": 1, "kvseqlen": kvseqlen, "seed": seed}


TESTS: list[TestSpec] = [
    _case(4, 1024, 4220),
    _case(32, 1024, 5412),
    _case(64, 8192, 1360),
    _case(256, 8192, 9826),
]

BENCHMARKS: list[TestSpec] = [
    _case(4, 1024, 4217),
    _case(4, 8192, 4220),
    _case(32, 1024, 5412),
    _case(32, 8192, 5415),
    _case(64, 1024, 1357),
    _case(64, 8192, 1360),
    _case(256, 1024, 9823),
    _case(256, 8192, 9826),
]
