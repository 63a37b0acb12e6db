"""The safetensors reader: what the library writes comes back by bits, and a hostile file is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from samebits.evidence.encode import encode_step
from samebits.evidence.sidecar import StepSample, read_step
from samebits.evidence.tensors import read_tensors

DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint32, np.float32, np.float64]


@settings(max_examples=40)
@given(data=st.data())
def test_what_the_library_writes_comes_back(tmp_path_factory, data: st.DataObject) -> None:
    tensors = {}
    for name in data.draw(st.sets(st.text("abc", min_size=1, max_size=3), max_size=4)):
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        raw = data.draw(st.binary(min_size=np.dtype(dtype).itemsize * int(np.prod(shape)), max_size=300))
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        tensors[name] = np.frombuffer(raw[:size], dtype=dtype).reshape(shape)
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    path.write_bytes(save(tensors))
    found = read_tensors(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert bytes(found[name].data) == tensor.tobytes()
        if tensor.dtype.kind != "f":
            assert list(found[name].values()) == tensor.ravel().tolist()


def file(path: Path, header: object, buffer: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + buffer)
    return path


def entry(dtype: str = "I32", shape: object = (1,), offsets: object = (0, 4), **more: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


BAD = {
    "huge header": ({}, b"", 1 << 62, "header of 4611686018427387904 bytes"),
    "header past the end": ({}, b"", 3, "header of 3 bytes"),
    "no JSON": (b"{", b"", None, "not valid JSON"),
    "a list": ([], b"", None, "not a JSON object"),
    "twice the same name": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b"",
        None,
        "duplicate key 'a'",
    ),
    "unknown dtype": ({"a": entry("F8")}, b"1234", None, "has dtype 'F8'"),
    "extra field": ({"a": entry(x=1)}, b"1234", None, "must have dtype, shape and data_offsets"),
    "size of another shape": ({"a": entry(shape=[2])}, b"1234", None, "needs another size"),
    "negative shape": ({"a": entry(shape=[-1])}, b"1234", None, "has shape [-1]"),
    "bool as a size": ({"a": entry(shape=[True])}, b"1234", None, "has shape [True]"),
    "backwards": ({"a": entry(shape=[0], offsets=[4, 0])}, b"1234", None, "needs another size"),
    "overlap": ({"a": entry(), "b": entry(offsets=[2, 6])}, b"123456", None, "gap or overlap"),
    "same span twice": ({"a": entry(), "b": entry()}, b"1234", None, "gap or overlap"),
    "gap": ({"a": entry(), "b": entry(offsets=[5, 9])}, b"123456789", None, "gap or overlap"),
    "past the end": ({"a": entry(shape=[2], offsets=[0, 8])}, b"1234", None, "cover 8 bytes"),
    "bytes left over": ({"a": entry()}, b"12345", None, "cover 4 bytes, the file holds 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    header, buffer, length, message = BAD[name]
    with pytest.raises(ValueError, match=r"x\.safetensors: ") as error:
        read_tensors(file(tmp_path / "x.safetensors", header, buffer, length))
    assert message in str(error.value)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_header(tmp_path: Path, size: int) -> None:
    (tmp_path / "x").write_bytes(b"0" * size)
    with pytest.raises(ValueError, match="too short"):
        read_tensors(tmp_path / "x")


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)


@settings(max_examples=40)
@given(rows=st.lists(st.tuples(IDS, st.lists(st.tuples(IDS, *[st.integers(0, 2**32 - 1)] * 2))), max_size=5))
def test_a_step_comes_back_by_bits(tmp_path_factory, rows) -> None:
    samples = [
        StepSample(
            key=f"3/{at}/{at % 2}",
            prompt_ids=prompt,
            token_ids=[ids[0] for ids, _, _ in tokens] or [1],
            rollout_bits=[left for _, left, _ in tokens] or [0x7FC00001],
            trainer_bits=[right for _, _, right in tokens] or [0xFFFFFFFF],
            versions=[2] * (len(tokens) or 1),
            reward=at / 3,
            advantage=-at / 7,
        )
        for at, (prompt, tokens) in enumerate(rows)
    ]
    if not samples:
        return
    path = tmp_path_factory.mktemp("s") / "step.safetensors"
    path.write_bytes(encode_step(samples))
    for wrote, found in zip(samples, read_step(path), strict=True):
        assert (wrote.key, wrote.reward, wrote.advantage) == (found.key, found.reward, found.advantage)
        for name in ("prompt_ids", "token_ids", "rollout_bits", "trainer_bits", "versions"):
            assert list(getattr(wrote, name)) == list(getattr(found, name))
