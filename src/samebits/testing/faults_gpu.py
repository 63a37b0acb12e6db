"""Faults in the Triton and Gluon kernels that the conformance cases must notice, each believable; files of samebits/."""

from __future__ import annotations

from samebits.testing.faults import Fault

_LINEAR, _LOGPROB, _SAMPLE = (f"ops/{op}/kernels.py" for op in ("linear", "logprob", "sample"))
_NORM, _ROTARY, _SWIGLU, _EMBEDDING = (f"ops/{op}/triton.py" for op in ("rms_norm", "rotary", "swiglu", "embedding"))
_CHAIN = "ops/rms_norm/gluon_chain.py"
_SOFTMAX, _ROWS, _FORWARD, _BACKWARD = (
    f"ops/attention/triton_{part}.py" for part in ("softmax", "rows", "forward", "backward")
)
_GLUON, _DECODE = "ops/attention/gluon_forward.py", "ops/attention/gluon_split.py"

FAULTS: tuple[Fault, ...] = (
    # linear
    Fault(
        "K runs backwards, a tile at a time", "linear", _LINEAR,
        (("for step in range(steps):\n            acc = _products(a_desc, b_desc, acc, row, column, step * BLOCK_K", "for step in range(steps):\n            acc = _products(a_desc, b_desc, acc, row, column, (steps - 1 - step) * BLOCK_K"),),
        arithmetic="sm90",
    ),
    Fault(
        "segments add from the left", "linear", _LINEAR,
        (("left = _pair_sum(source, inside, elements, FIRST, COUNT // 2)", "left = _pair_sum(source, inside, elements, FIRST, COUNT - 1)"), ("FIRST + COUNT // 2, COUNT // 2)", "FIRST + COUNT - 1, 1)")),
        arithmetic="sm90",
    ),
    Fault(
        "main_grad is not continued", "linear", _LINEAR,
        (("acc = tl.load(start + rows[:, None] * stride_c + columns[None, :], mask=inside, other=0.0)", "acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)"),),
        arithmetic="sm90",
    ),
    Fault("bias is left out for few rows", "linear", _LINEAR, (("total += tl.load(bias + columns, mask=columns < N, other=0.0)", "total += tl.load(bias + columns, mask=columns < 0, other=0.0)"),), arithmetic="sm90"),
    Fault("multiply and add round apart", "linear", _LINEAR, (("acc = tl.fma(\n            tl.broadcast_to(x[:, None], (BLOCK_M, BLOCK_N)), tl.broadcast_to(y[None, :], (BLOCK_M, BLOCK_N)), acc\n        )", "acc = acc + x[:, None] * y[None, :]"),)),
    # norms, rotary, SwiGLU, embedding: no dot products, so one set of bits
    Fault("64 lanes for 128", "rms_norm", _NORM, (("_LANES = tl.constexpr(LANES)", "_LANES = tl.constexpr(LANES // 2)"),)),
    Fault("epsilon is added to the root", "rms_norm", _NORM, (("tl.sqrt_rn(mean + eps)", "(tl.sqrt_rn(mean) + eps)"),)),
    Fault("the weight gradient rounds its products", "rms_norm", _NORM, (("longer = tl.fma(upstream[step].to(tl.float32), values[step], acc)", "longer = acc + upstream[step].to(tl.float32) * values[step]"),)),
    Fault("the copied weight gradient rounds its products", "rms_norm", _CHAIN, (("longer = gl.fma(d, n, acc)", "longer = acc + d * n"),)),
    Fault("the mean is a product with a reciprocal", "rms_norm", _NORM, (("mean = tl.div_rn(fold_halves_of(acc, ROWS, _LANES), W * 1.0)", "mean = fold_halves_of(acc, ROWS, _LANES) * tl.div_rn(1.0, W * 1.0)"),)),
    Fault("one multiply-add is contracted", "rotary", _ROTARY, (("x1 * c - x2 * s", "tl.fma(x1, c, -(x2 * s))"),)),
    Fault("positions are off by one", "rotary", _ROTARY, (("tl.load(cos + position * HALF + d", "tl.load(cos + tl.maximum(position - 1, 0) * HALF + d"),)),
    Fault("products are reassociated", "swiglu", _SWIGLU, (("(gate * sigmoid_of(gate)) * up", "gate * (sigmoid_of(gate) * up)"),)),
    Fault("an id that another rank owns is clamped", "embedding", _EMBEDDING, (("weight + local * H + at, mask=owned & (at < H)", "weight + tl.minimum(tl.maximum(local, 0), rows - 1) * H + at, mask=(rows > 0) & (at < H)"),)),
    Fault("the tokens of an id run backwards", "embedding", _EMBEDDING, (("ordered, order = torch.sort(ids, stable=True)", "ordered, order = torch.sort(ids.flip(0), stable=True)\n    order = ids.shape[0] - 1 - order"),)),
    # attention
    Fault("a row sum adds neighbours", "attention", _SOFTMAX, (("tl.reduce(tl.reshape(x, (ROWS, 2, FROM // 2)), 1, add_pair)", "tl.reduce(tl.reshape(x, (ROWS, FROM // 2, 2)), 2, add_pair)"),), arithmetic="sm90"),
    Fault("a merge is not contracted", "attention", _SOFTMAX, (("tl.fma(lsum, a, lsum_later * b)", "lsum * a + lsum_later * b"),), arithmetic="sm90"),
    Fault("the causal mask is off by one", "attention", _FORWARD, (("valid = keys[None, :] <= position[:, None]", "valid = keys[None, :] < position[:, None]"),), arithmetic="sm90"),
    Fault("a stale page is read", "attention", _ROWS, (("page = tl.load(table + keys // SIZE, mask=keys < length, other=0)", "page = tl.load(table + (keys - (keys > SIZE).to(tl.int32) * SIZE) // SIZE, mask=keys < length, other=0)"),), arithmetic="sm90"),
    Fault("the causal mask of the specialised warps is off by one", "attention", _GLUON, (("gl.SliceLayout(0, mma))[None, :] <= position[:, None]", "gl.SliceLayout(0, mma))[None, :] < position[:, None]"),), arithmetic="sm90"),
    Fault("chunks are merged without rescaling", "attention", _GLUON, (("b = rescaling_of(m, m_next)", "b = rescaling_of(m, m)"),), arithmetic="sm90"),
    Fault("decode reads the second page twice", "attention", _DECODE, (("r2 = (gl.load(table + k2 // SIZE)", "r2 = (gl.load(table + k1 // SIZE)"),), arithmetic="sm90"),
    Fault("decode starts a chunk with the maximum of the one before", "attention", _DECODE, (("            m = gl.full((ROWS,), float(\"-inf\"), gl.float32, rows)\n            lanes = empty", "            lanes = empty"),), arithmetic="sm90"),
    Fault("dS is not masked", "attention", _BACKWARD, (("ds = tl.where(valid, p * (tl.dot(dot, vt.T) - delta_row[:, None]), 0.0)", "ds = p * (tl.dot(dot, vt.T) - delta_row[:, None])"),), arithmetic="sm90"),
    # log-probability and the primitives below it
    Fault("a polynomial coefficient is one bit off", "logprob", "arithmetic/triton.py", (("tl.constexpr(c) for c in EXP2_COEFFICIENTS", "tl.constexpr(c * (1 + 2**-23)) for c in EXP2_COEFFICIENTS"),), arithmetic="sm90"),
    Fault("temperature is applied twice", "logprob", _LOGPROB, (("z = tl.div_rn(logit, tl.broadcast_to(temperature, logit.shape))", "z = tl.div_rn(tl.div_rn(logit, tl.broadcast_to(temperature, logit.shape)), tl.broadcast_to(temperature, logit.shape))"),), arithmetic="sm90"),
    Fault("the low part of log2(e) is lost", "logprob", _LOGPROB, (("    r = tl.fma(z, tl.full(z.shape, LOG2_E_LOW, tl.float32), r)\n", ""),), arithmetic="sm90"),
    Fault("states merge without aligning", "logprob", _LOGPROB, (("    s0, s1, s2, s3 = lowered(s0, s1, s2, s3, top - tops)\n", ""),), arithmetic="sm90"),
    Fault("columns past the end are counted", "logprob", _LOGPROB, (("window = tl.where(held, i >> 4, EMPTY_TOP)", "window = i >> 4"),), arithmetic="sm90"),
    Fault("the target is missed at the edge of a chunk", "logprob", _LOGPROB, (("(split == 0) & (target >= 0)", "(split == 0) & (target > 0)"),), arithmetic="sm90"),
    # sampling
    Fault("nine rounds for ten", "sample", _SAMPLE, (("tl.static_range(10)", "tl.static_range(9)"),)),
    Fault("ties go to the highest id", "sample", _SAMPLE, (("tl.min(tl.where(raw == peak, at, 2147483647))", "tl.max(tl.where(raw == peak, at, -1))"),)),
)  # fmt: skip
