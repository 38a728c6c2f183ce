"""The ops as kernels compiled by numba, for `device: "cpu"`. Read in this order:

isa.py        which instruction sets there are, and which this machine has
vectors.py    the few vector instructions the tiles are built of, as LLVM IR
dot_tile.py   a few rows of weights by a few rows of activations: the heart of every product
mix_tile.py   the weighted sum of value rows: the other half of attention
numerics.py   exp, rounding and widening of single numbers
pack.py       activations as the tiles read them; int8.py, the same for weights of one byte
products.py   a block of weights by one token, a few, or many: in which order its tiles are computed
linear.py     linear, gate/up with SiLU * up, logits
attention.py  attention over pages, of prompts and decode rows alike
rope.py       RoPE and the write to the cache
layer.py      a whole decoder layer as one kernel, of the same parts
sampling.py   the next token: adjust.py, then groups.py, cutoff.py and draw.py; and top_logprobs.py
ops.py        `CpuOps`: one method an op, as in ReferenceOps

Every output of a product is summed in one order, whatever the number of rows, and every query attends over the same
blocks of keys, whether it came in a prompt or alone: a token's logits do not depend, not in one bit, on its batch.
"""
