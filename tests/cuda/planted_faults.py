"""Faults to plant in the project's kernels: what to replace in the source, and how the fault must be noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Kinds of KernelFault (see cupyllm/cuda/emulator/README.md), and one that the comparison with the twin finds.
OUTSIDE = "out of bounds"
MISALIGNED = "misaligned"
CONST = "write to const"
SHARED_END = "shared memory over-use"
UNWRITTEN = "uninitialised shared read"
RACE = "shared-memory race"
GLOBAL_RACE = "global race"
MASK = "warp mask"
COPY = "asynchronous copy"
WRONG = "wrong result"

# Arguments of the kernels' examples: ragged sizes, so that tails exist.
CASES: dict[str, dict[str, Any]] = {
    "adjust_logits": {"N": 5003},
    "embedding": {"C": 1032, "row_ids": (6, -1, 3, 7)},
    "gemv": {"N": 45, "K": 1032},
    "paged_attention_decode": {"context_lens": (600, 17)},
    "paged_attention_prefill": {"query_lens": (20, 7), "context_lens": (130, 50)},
    "rms_norm": {"C": 1028, "scale": 1e-3},
    "rope_and_kv_write": {"H": 3, "KH": 1, "unused_rows": 1},
    "round_rows": {"K": 264},
    "silu_mul": {"I": 300},
    "skinny_gemm": {"N": 40, "K": 264},
    "tile_gemm": {"T": 70, "N": 40, "K": 72},
}


@dataclass(frozen=True)
class Fault:
    """`old`, which the kernel's text (common.cuh included) has exactly once, becomes `new`; `caught` is what tells.

    `case` are arguments of the kernel's example beside those in CASES.
    """

    name: str
    old: str
    new: str
    caught: str
    case: dict[str, Any]


def fault(name: str, old: str, new: str, caught: str, **case: Any) -> Fault:
    return Fault(name, old, new, caught, case)


# fmt: off
FAULTS: dict[str, list[Fault]] = {
    "silu_mul": [
        fault("no tail check", "    if (i >= I) return;\n", "", OUTSIDE, T=1),
        fault("tail check off by one", "i >= I", "i > I", OUTSIDE, T=1),
        fault("rows without a tail check overlap", "    if (i >= I) return;\n", "", GLOBAL_RACE),
        fault("up from the gate's half", "gate_up[t * 2 * I + I + i]", "gate_up[t * 2 * I + i]", WRONG),
        fault("write to an input", "hidden[t * I + i] =", "const_cast<float*>(gate_up)[t * I + i] =", CONST),
    ],
    "rms_norm": [
        fault("sum without a barrier", "__syncthreads();\n    float sum = 0.0f;", "float sum = 0.0f;", UNWRITTEN),
        fault("half a shuffle mask", "x += __shfl_xor_sync(FULL_MASK", "x += __shfl_xor_sync(0xffffu", MASK),
        fault("shuffle one step short",
              "LANES / 2; distance > 0; distance /= 2) x +=", "LANES / 2; distance > 1; distance /= 2) x +=", WRONG),
        fault("epsilon left out", "scratch), C) + eps)", "scratch), C))", WRONG),
        fault("row one float late", "(x + row)", "(x + row + 1)", MISALIGNED),
        fault("one chunk too many",
              "c < C / 4; c += blockDim.x) {\n        float4 v = x4[c];\n",
              "c <= C / 4; c += blockDim.x) {\n        float4 v = x4[c];\n", OUTSIDE),
        fault("a weight left out", "v.x * inverse_rms * w.x", "v.x * inverse_rms", WRONG),
        fault("rows with the stride of a block", "blockIdx.x * C", "blockIdx.x * blockDim.x", GLOBAL_RACE),
    ],
    "embedding": [
        fault("ids not checked", "if (row >= 0 && row < V) values", "values", OUTSIDE),
        fault("id check off by one", "row < V", "row <= V", OUTSIDE),
        fault("no tail check", "    if (c >= C) return;\n", "", OUTSIDE),
        fault("halves exchanged",
              "x4[0] = values.first;\n    x4[1] = values.second;",
              "x4[0] = values.second;\n    x4[1] = values.first;", WRONG),
        fault("rows with the stride of the vocabulary", "row * C + c);", "row * V + c);", MISALIGNED),
    ],
    "copy_pages": [
        fault("copy and source exchanged", "cache + (long long)sources", "cache + (long long)copies", WRONG),
        fault("one chunk too many", "chunk < page_chunks", "chunk <= page_chunks", GLOBAL_RACE),
        fault("only keys are copied", "blockIdx.y == 0 ? keys : values", "keys", GLOBAL_RACE),
    ],
    "fill_tokens": [
        fault("no end of the batch", "    if (t >= T) return;\n", "", OUTSIDE),
        fault("known tokens taken for unknown ones", "row >= 0 ?", "row >= -1 ?", OUTSIDE),
        fault("the first sampled token left out", "row >= 0 ?", "row > 0 ?", WRONG),
    ],
    "advance_rows": [
        fault("rows that are not in use move on", "threadIdx.x == 0 && position > 0", "threadIdx.x == 0", WRONG),
        fault("every thread moves its row on", "threadIdx.x == 0 && position > 0", "position > 0", GLOBAL_RACE),
        fault("a length that changes while it is read", "    __syncthreads();\n\n    // 2", "    // 2", GLOBAL_RACE),
        fault("the page before", "position / page_size]", "(position - 1) / page_size]", WRONG),
        fault("page tables of another width", "[r * max_pages +", "[r * (max_pages - 1) +", WRONG),
        fault("a context that does not grow", "context_lens[r] = position + 1", "context_lens[r] = position", WRONG),
        fault("the slot of the page's start", " + position % page_size;", ";", WRONG),
        fault("one row's token for all", ": sampled[r];", ": sampled[0];", WRONG),
        fault("a sampled token for rows that are not in use", "position == 0 ? token_ids[r] : ", "", WRONG),
        fault("a failed row reads before the table", "token >= 0 && token < V", "token < V", OUTSIDE),
        fault("columns past the row's end", "c < C;", "c < C + 8;", GLOBAL_RACE),
        fault("ids past the counts", "token >= 0 && token < W)", "token >= 0)", WRONG),
        fault("a failed row counted", "counts && token >= 0 &&", "counts &&", WRONG),
        fault("every time counted once", "+= 2;", "= 2;", WRONG),
        fault("all counted in the first row", "counts[r * W + token]", "counts[token]", WRONG),
    ],
    "count_tokens": [
        fault("no barrier between clearing and counting", "    __syncthreads();\n\n    // 3", "    // 3", GLOBAL_RACE),
        fault("ids of another block", "id < begin_id || ", "", WRONG),
        fault("ids without a token", "min(end_id, N)", "end_id", WRONG),
        fault("a count without an atomic", "atomicAdd(row + id, 2u)", "row[id] += 2u", GLOBAL_RACE),
        fault("every row cleared", "clears && id < end_id", "id < end_id", WRONG),
        fault("no row cleared", "clears && id < end_id", "id < 0", WRONG),
        fault("the first job for all", "jobs + blockIdx.y * 5", "jobs", GLOBAL_RACE),
        fault("the prompt as output", "if (i < output)", "if (i < first)", WRONG),
        fault("one token too few", "i < end; i", "i < end - 1; i", WRONG),
        fault("one token too many", "i < end; i", "i <= end; i", OUTSIDE),
        fault("clears past the row", "min(begin_id + BLOCK_IDS, width)", "begin_id + BLOCK_IDS", OUTSIDE),
    ],
    "update_rows": [
        fault("no end of the changes", "    if (i >= N) return;\n", "", OUTSIDE),
        fault("end of the changes off by one", "i >= N", "i > N", OUTSIDE),
        fault("changes in a row", "int place = places[i]", "int place = i", WRONG),
        fault("places for values", "int value = values[i]", "int value = places[i]", WRONG),
    ],
    "rope_and_kv_write": [
        fault("lanes leave before a shuffle", "    // 2 load\n", "    if (!exists) return;\n", MASK),
        fault("heads that do not exist are read", "if (exists) {", "{", OUTSIDE),
        fault("rows without a slot are written", "    if (slot < 0) return;\n", "", OUTSIDE),
        fault("values at the wrong head", "head - H - KH) * D", "head - H) * D", WRONG, KH=2),
        fault("slots without the heads' stride", "(slot * KH + head - H) * D", "(slot + head - H) * D", WRONG, KH=2),
        fault("turned the other way", "product(second, -1.0f)", "second", WRONG),
        fault("row number for position", "(long long)positions[t] * D", "t * D", WRONG),
        fault("keys normed as queries", "is_q ? q_norm : k_norm", "q_norm", WRONG),
        fault("norm over half a head", "warp_sum<HEAD_LANES>", "warp_sum<HEAD_LANES / 2>", WRONG),
        fault("infinity in an fp16 cache", "saturate(x.x)", "x.x", WRONG, dtype="float16", scale=100000.0, norm=False),
    ],
    "gemv": [
        fault("no barrier before the last sums", "    __syncthreads();\n\n    // 4", "    // 4", UNWRITTEN),
        fault("tail check off by one", "n >= N) return", "n > N) return", OUTSIDE),
        fault("rows past the end are read",
              "min(warp_n + r / ROWS_PER_OUTPUT, N - 1)", "warp_n + r / ROWS_PER_OUTPUT", OUTSIDE),
        fault("chunks past the end are read", "if (chunk + step < chunks) load_chunk", "load_chunk", OUTSIDE),
        fault("a warp's sum is not stored",
              "if (lane == 0) partial[warp][r]", "if (lane == 0 && warp) partial[warp][r]", UNWRITTEN),
        fault("every lane stores the sum", "if (lane == 0) partial[warp][r]", "partial[warp][r]", RACE),
        fault("scale of the norm left out", "    sum *= scale;\n", "", WRONG),
        fault("a part of the row left out", "part < first_warp + K_WARPS", "part < first_warp + K_WARPS - 1", WRONG),
        fault("squares of the last part only", "squares += partial", "squares = partial", WRONG),
        fault("bias of the block's first rows", "to_float(bias[n])", "to_float(bias[n - block_n])", WRONG),
        fault("weights one element late",
              "weight + rows[r] + chunk * 8", "weight + rows[r] + chunk * 8 + 1", MISALIGNED),
        fault("gate and up exchanged",
              "silu(sum) * (up * scale)", "silu(up * scale) * sum", WRONG, around="norm gate_up"),
    ],
    "skinny_gemm": [
        fault("fragment registers exchanged",
              "{upper.x, lower.x, upper.y, lower.y}", "{upper.x, upper.y, lower.x, lower.y}", WRONG),
        fault("the first x read before it is staged", "bool rescale = __syncthreads_or", "bool rescale = ", UNWRITTEN),
        fault("a K tile staged without a barrier",
              " rescale = __syncthreads_or(\n", " rescale = (\n", UNWRITTEN, K=1032, T=20),
        fault("rows past T are read", "t < T && k < K);", "k < K);", OUTSIDE),
        fault("weights past K are read", "weights[r] = k < K ? load", "weights[r] = true ? load", OUTSIDE),
        fault("sums exchanged without a barrier",
              "__syncthreads();\n        for (int i = threadIdx.x; i < R", "for (int i = threadIdx.x; i < R",
              UNWRITTEN),
        fault("a round begun while the last is read",
              "        __syncthreads();\n    }\n\n    // 6", "    }\n\n    // 6", RACE, T=20),
        fault("a ticket without an atomic",
              "atomicInc(tickets + blockIdx.x, gridDim.y - 1)", "tickets[blockIdx.x]++", GLOBAL_RACE),
        fault("no fence before the ticket",
              "__threadfence();\n    __syncthreads();\n    if (thr", "__syncthreads();\n    if (thr", GLOBAL_RACE),
        fault("every block finishes the rows", "    if (!is_last) return;\n", "", GLOBAL_RACE),
        fault("squares of the last split only", "squares += __ldcg", "squares = __ldcg", WRONG),
        fault("residual of row 0", "residual[(long long)token * N + n]", "residual[n]", WRONG, around="residual"),
        fault("outputs past N are stored", "        if (n >= N) continue;\n", "", OUTSIDE),
        fault("up from the row above", "part + row + 16", "part + row + 15", WRONG, around="norm gate_up"),
        fault("sums not rescaled when the scale changes",
              "if (!ELEMENT_BF16 && rescale)", "if (false)", WRONG, dtype="float16", T=20, K=1032, growth=1e15),
        fault("scale not taken back", "1.0f / staging.scale", "1.0f", WRONG, dtype="float16"),
    ],
    "round_rows": [
        fault("one chunk too many", "c < K / 8", "c <= K / 8", OUTSIDE),
        fault("the largest of its own warp", "largest = fmaxf(largest, largest_of_warps[warp])", "(void)warp", WRONG),
        fault("every lane stores the largest", "if (threadIdx.x % WARP_SIZE == 0) largest_of", "largest_of", RACE),
        fault("every thread stores the scale", "if (threadIdx.x == 0) inverse", "inverse", GLOBAL_RACE),
        fault("not scaled", "    factor *= scale;\n", "", WRONG),
        fault("scaled beyond fp16", "127 + 14 + 127", "127 + 17 + 127", WRONG),
        fault("a weight of the norm twice", "second, norm4[2 * c + 1]", "second, norm4[2 * c]", WRONG),
    ],
    "tile_gemm": [
        fault("copies not waited for", "copy_async_wait<STAGES - 2>", "copy_async_wait<STAGES - 1>", COPY),
        fault("others' copies not waited for", "__syncthreads();  // this tile", "// this tile", RACE),
        fault("rows past T are read", "index < T && k < K", "k < K", OUTSIDE),
        fault("weights past K are read", "index < N && k < K", "index < N", OUTSIDE),
        fault("a stage more than there are", "ahead % STAGES * STAGE_ELEMENTS", "ahead * STAGE_ELEMENTS", SHARED_END),
        fault("chunks stored elsewhere", "place(item / CHUNKS, chunk)", "item / CHUNKS * K_TILE + chunk * 8", WRONG),
        fault("x one element late", "index * K + k : 0", "index * K + k + 1 : 0", MISALIGNED),
        fault("halves of k exchanged", "(row, k / 8 + lane / 8 % 2)", "(row, k / 8 + 1 - lane / 8 % 2)", WRONG),
        fault("rows of the fragment exchanged", "m * 16 + i % 4 / 2 * 8", "m * 16 + (1 - i % 4 / 2) * 8", WRONG),
        fault("outputs past N are stored", "t >= T || n >= N", "t >= T", OUTSIDE),
        fault("scale not taken back",
              "* inverse_scales[t];\n        if (GATE_UP)", ";\n        if (GATE_UP)", WRONG, dtype="float16"),
    ],
    "adjust_logits": [
        fault("no barrier before the penalties", "    __syncthreads();\n\n    // 3", "    // 3", GLOBAL_RACE),
        fault("no barrier before the offsets", "    __syncthreads();\n\n    // 4", "    // 4", GLOBAL_RACE),
        fault("the next row's penalties", "i < penalty_starts[r + 1]", "i < penalty_starts[r] + 30", GLOBAL_RACE),
        fault("the next row's offsets", "i < offset_starts[r + 1]", "i < offset_starts[r] + 30", GLOBAL_RACE),
        fault("offsets of another block's ids", "id >= begin && id < end", "id < end", GLOBAL_RACE),
        fault("negative logits made likelier", "x > 0.0f ?", "true ?", WRONG),
        fault("offsets on the model's logits", "__fadd_rn(out[id]", "__fadd_rn(row[id]", WRONG),
        fault("the mask of the row's own number", "max(mask_row, 0) * words", "r * words", OUTSIDE),
        fault("every row under a mask", "mask_row < 0 ? 15u :", "", WRONG),
        fault("the next word of the mask", "mask + id / 32", "mask + id / 32 + 1", OUTSIDE),
        fault("the first mask for all", "max(mask_row, 0) * words", "0 * words", WRONG),
        fault("words of 64 bits", "mask + id / 32", "mask + id / 64", WRONG),
        fault("bits from the top", ">> (id % 32)", ">> (28 - id % 32)", WRONG),
        fault("the bit of a neighbour", "masked(x.y, allowed & 2)", "masked(x.y, allowed & 1)", WRONG),
        fault("NaN hidden by the mask", "!allowed && x < -NEGATIVE_INFINITY", "!allowed", WRONG),
        fault("infinity hidden by the mask", "x < -NEGATIVE_INFINITY", "x <= -NEGATIVE_INFINITY", WRONG),
    ],
    "argmax": [
        fault("NaN forgotten", "has_nan |= x[j]", "has_nan = x[j]", WRONG),
        fault("ids past the vocabulary", "load_4_floats(row, first, N)", "load_4_floats(row, first, V)", WRONG),
        fault("the last of equals", "x[j] > largest", "x[j] >= largest", WRONG),
    ],
    "group_maxima": [
        fault("groups past the end are stored", "    if (g >= groups) return;\n", "", OUTSIDE, R=1),
        fault("half a vote mask", "__any_sync(FULL_MASK", "__any_sync(0xffffu", MASK),
        fault("counts past the last row", "HAS_PENALTIES && id < N", "HAS_PENALTIES", GLOBAL_RACE, penalties=True),
        fault("another row's counts", "(long long)r * (CEIL_DIV(N, 4) * 4)", "0", WRONG, penalties=True),
        fault("the prompt's mark counted", "if (count > 1)", "if (count > 0)", WRONG, penalties=True),
        fault("half the occurrences", "double(count / 2)", "double(count / 4)", WRONG, penalties=True),
        fault("negative logits made likelier", "x > 0.0f ?", "true ?", WRONG, penalties=True),
        fault("penalties only in registers", "    *place = x;\n", "", WRONG, penalties=True),
        fault("a penalised neighbour", "penalty, row + id + 1)", "penalty, row + id)", WRONG, penalties=True),
        fault("only one of the penalties looked at",
              "penalty.presence != 0.0 || penalty.frequency != 0.0", "false", WRONG, penalties=True),
    ],
    "draw": [
        fault("distances past the last group",
              "begin + lane < row.groups ? row.distances[begin + lane] : POSITIVE_INFINITY_BITS + 1",
              "row.distances[begin + lane]", SHARED_END),
        fault("one token too many", ">= target;", "> target;", WRONG),
        fault("the cutoff ignored", "rank_of(found[j], id + j) <= last && score", "score", WRONG),
        fault("a farther token than noise can bring in", "MOST_NOISE - best_score", "1.0f - best_score", WRONG),
        fault("a key word for all rows", "key_1 = u32(seed >> 32)", "key_1 = u32(seed)", WRONG),
    ],
    "top_logprobs": [
        fault("no barrier between tokens",
              "            }\n        }\n        __syncthreads();\n", "            }\n        }\n", RACE),
        fault("a token twice", "place < bound", "place <= bound", WRONG),
    ],
    "paged_attention_decode": [
        fault("a ticket without an atomic",
              "atomicInc(tickets + s * KH + kh, used_splits - 1)", "tickets[s * KH + kh]++", GLOBAL_RACE),
        fault("no fence before the ticket",
              "__threadfence();\n        __syncthreads();\n        if (t", "__syncthreads();\n        if (t",
              GLOBAL_RACE),
        fault("every block adds the parts up", "        if (!is_last) return;\n", "", GLOBAL_RACE),
        fault("is_last without a barrier", "__syncthreads();\n        if (!is_last)", "if (!is_last)", UNWRITTEN),
        fault("parts without a barrier", "    __syncthreads();\n\n    // 5", "    // 5", UNWRITTEN),
        fault("another sequence's pages", "(long long)s * max_pages + key / page_size", "key / page_size", WRONG),
        fault("pages without the heads' stride",
              "page * page_size + key % page_size) * KH + kh", "page * page_size + key % page_size) + kh", WRONG),
        fault("the first KV head for all", "* KH + kh) * D;", "* KH) * D;", WRONG),
        fault("window one token too wide", "context_len - window, 0", "context_len - window - 1, 0", WRONG, window=100),
        fault("a key past the context", "key < context_len;", "key <= context_len;", WRONG),
        fault("results not brought to a new largest score",
              "o[i][c] *= shrink[c / 2 * WIDE_GROUP]", "(void)shrink", WRONG),
        fault("weights not brought to a new largest score", "    sum *= shrink;\n", "", WRONG),
        fault("splits added as they are", "exp2f(part[N] - largest)", "1.0f", WRONG),
        fault("fragment halves exchanged",
              "b[c] = __byte_perm(v[j + 2 * c]", "b[1 - c] = __byte_perm(v[j + 2 * c]", WRONG),
        fault("chunks of 8 bytes",
              "32 * (i / 2) + 8 * member, seen(key + k_key)",
              "32 * (i / 2) + 4 * member, seen(key + k_key)", MISALIGNED),
    ],
    "paged_attention_prefill": [
        fault("copies not waited for", "copy_async_wait<1>", "copy_async_wait<2>", COPY),
        fault("others' copies not waited for",
              "copy_async_wait<1>();\n        __syncthreads();", "copy_async_wait<1>();", RACE),
        fault("a stage filled while it is read", "__syncthreads();  // the stage", "// the stage", RACE),
        fault("keys past the chunk are read", "key >= first_key && key < end_key", "key >= first_key", OUTSIDE),
        fault("one key of the future", "key <= position[set] &&", "key <= position[set] + 1 &&", WRONG),
        fault("window one token too wide",
              "key > position[set] - window)", "key >= position[set] - window)", WRONG, window=10),
        fault("heads of the first KV head", "* H + kh * G + known % G", "* H + known % G", GLOBAL_RACE),
        fault("results not brought to a new largest score", "o[i][c] *= shrink[c / 2]", "(void)shrink", WRONG),
        fault("fragments in another order",
              "lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2", "lane % 16, 2 * i + lane / 16", WRONG),
        fault("values not transposed", "load_matrix_x4_transposed(b, &", "load_matrix_x4(b, &", WRONG),
        fault("chunks of 8 bytes", "+ chunk * 8;", "+ chunk * 4;", MISALIGNED),
        fault("rows past the end are stored", "group > last_row) continue;", "group > last_row) {}", GLOBAL_RACE),
    ],
}
# fmt: on
