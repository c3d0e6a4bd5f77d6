"""NumPy archives: arrays equal NumPy's, sizes before memory, and a sentence with file and array for every defect."""

import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyformer.base.errors import UserError
from manyformer.data.images.image_files import open_image_files
from manyformer.data.storage.array_archives import array_members, read_array, read_arrays

ARRAYS: dict[str, Any] = {
    "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "big_endian": np.arange(-3, 9, dtype=">i4").reshape(3, 4),
    "doubles": np.linspace(0, 1, 7, dtype=">f8"),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "scalar": np.array(16_000),
    "empty": np.zeros((0, 5), dtype=np.float32),
    "truths": np.array([True, False]),
    "texts": np.array(["cat", "", "Käfer 日本 😀"]),
    "foreign_texts": np.array(["ab", "c"], dtype=">U2"),
    "half": np.arange(3, dtype=np.float16),
}


def header(descr: str, shape: str, *, version: int = 1, order: str = "False") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(100).encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text


def archive(path: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members:
            file.writestr(name, content)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_those_that_numpy_reads(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", **ARRAYS)
    arrays = read_arrays(tmp_path / "a.npz", ARRAYS)
    with np.load(tmp_path / "a.npz") as expected:
        assert set(arrays) == set(expected.files)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
            assert array.shape == expected[name].shape, name
            assert array.dtype == expected[name].dtype.newbyteorder("="), name
            assert array.flags.c_contiguous, name


def test_headers_of_each_version_are_read(tmp_path: Path) -> None:
    values = np.arange(6, dtype="<u2").tobytes()
    members = [(f"v{version}.npy", header("'<u2'", "(2, 3)", version=version) + values) for version in (1, 2, 3)]
    # as Python 2 wrote whole numbers
    members.append(("old.npy", header("'<u2'", "(2L, 3L)") + values))
    arrays = read_arrays(archive(tmp_path / "a.npz", *members), ["v1", "v2", "v3", "old"])
    assert len(arrays) == 4
    assert all(array.tolist() == [[0, 1, 2], [3, 4, 5]] for array in arrays.values())


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("x_train", header("'|u1'", "(9,)") + bytes(9))], "its member x_train is not saved as an array"),
        ([("x.npy", header("'|u1'", "(9,)") + bytes(8))], "array x is incomplete: its header gives 9 bytes, but .* 8"),
        ([("x.npy", header("'|u1'", "(9,)") + bytes(10))], "array x is damaged: its header gives 9 bytes, but .* 10"),
        ([("x.npy", header("'|u1'", "(-3, -3)") + bytes(9))], "header of the array x .*negative dimensions"),
        ([("x.npy", header("'|u1'", "(True, 9)") + bytes(9))], r"header of the array x .*gives the shape \(True, 9\)"),
        ([("x.npy", header("'|u1'", "9") + bytes(9))], "header of the array x .*gives the shape 9"),
        ([("x.npy", header("'|u1'", "(9,", order="0") + bytes(9))], "header of the array x cannot be read"),
        ([("x.npy", header("'|u1'", "(((9,),") + bytes(9))], "header of the array x cannot be read"),
        ([("x.npy", header("'|u1'", "(" * 2000) + bytes(9))], "header of the array x cannot be read"),
        ([("x.npy", header("'|u1'", "(9,)", version=4) + bytes(9))], "and not as an array of format 1 to 3"),
        ([("x.npy", header("'|u1'", "(9,)")[:20])], "header of the array x cannot be read .it is incomplete"),
        ([("x.npy", header("'|u1'", f"({10**6}, {10**6})"))], "array x has 1,000,000,000,000 bytes, and at most"),
        ([("x.npy", header("'|O'", "(9,)") + bytes(50))], "array x cannot be read .Object arrays are pickles"),
        ([("x.npy", header("[('a', '|O')]", "(9,)") + bytes(50))], "array x cannot be read .Object arrays are pickles"),
        ([("x.npy", header("[('a', '<i4'), ('b', '<i4')]", "(1,)") + bytes(8))], "array x is of type .*save numbers"),
        ([("x.npy", header("'|S3'", "(3,)") + b"catdogcow")], r"array x is of type \|S3; save numbers.* or texts"),
        ([("x.npy", header("'<U0'", f"({10**12},)"))], "array x is of type <U0"),
        ([("x.npy", header("'<M8[s]'", "(1,)") + bytes(8))], "array x is of type datetime64"),
        ([("x.npy", header("'|b1'", "(2,)") + b"\0\2")], "a truth value is neither 0 nor 1"),
        ([("x.npy", header("'<U1'", "(1,)") + b"\0\0\x11\0")], "a character that Unicode does not have"),
        ([("x.npy", header("'<U1'", "(1,)") + b"\0\xd8\0\0")], "a character that Unicode does not have"),
    ],
)
def test_a_defect_is_told_with_the_file_and_the_array(
    tmp_path: Path, members: list[tuple[str, bytes]], problem: str
) -> None:
    path = archive(tmp_path / "a.npz", *members)
    with pytest.raises(UserError, match=rf"a\.npz: .*{problem}") as raised:
        read_arrays(path, ["x"])
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_array_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", *[("x.npy", header("'|u1'", "(1,)") + bytes([value])) for value in (1, 2)])
    with pytest.raises(UserError, match=r"a\.npz: there are two arrays x in it"):
        array_members(path)


def test_the_memory_of_a_lie_is_not_taken(tmp_path: Path) -> None:
    """What a header gives is compared with what the archive has; an array that is not read takes no memory either."""
    content = header("'|u1'", "(50000000,)") + bytes(50_000_000)
    path = archive(tmp_path / "a.npz", ("large.npy", content), ("x.npy", header("'|u1'", "(2,)") + b"ab"))
    del content
    tracemalloc.start()
    try:
        assert read_arrays(path, ["x"])["x"].tolist() == [97, 98]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


def test_a_flipped_bit_of_any_byte_gives_the_arrays_or_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    expected = np.arange(12, dtype=np.int32).reshape(3, 4)
    np.savez(path, x=expected)
    original = path.read_bytes()
    sentences = []
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 1 << position * 5 % 8
        path.write_bytes(damaged)
        try:
            arrays = read_arrays(path, ["x"])
        except UserError as error:
            sentences.append(str(error))
        else:
            # the name of the array or a note of the archive may have changed
            assert not arrays or np.array_equal(arrays["x"], expected)
    assert len(sentences) > 200
    assert all("a.npz: " in sentence for sentence in sentences)


def test_arrays_that_are_not_read_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", labels=np.arange(3), lable_names=np.array(["a", "b", "c"]))
    lines: list[str] = []
    read_arrays(tmp_path / "a.npz", ["labels", "label_names"], lines.append)
    assert lines == [f"{tmp_path / 'a.npz'}: not read: lable_names (arrays have the names labels, label_names)"]


def test_an_array_of_images_has_the_bytes_of_its_member(tmp_path: Path) -> None:
    """A member without the suffix is no array of that name: it was read unbounded as one."""
    path = archive(tmp_path / "a.npz", ("x_train", header("'|u1'", "(100, 2000, 2000)") + bytes(400_000)))
    with pytest.raises(UserError, match=r"a\.npz: its member x_train is not saved as an array"):
        list(open_image_files(str(path)))


def test_a_replaced_archive_is_noticed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    member = array_members(tmp_path / "a.npz")["x"]
    np.savez(tmp_path / "a.npz", x=np.arange(4))
    with pytest.raises(UserError, match="the array x has changed while the archive was read"):
        read_array(tmp_path / "a.npz", member)
