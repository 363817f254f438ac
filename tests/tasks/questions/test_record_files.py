import gzip
import json
import os
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.questions import record_files
from tasks.questions.faults import Fault, RecordError
from tasks.questions.fields import as_text, text, value
from tasks.questions.record_files import records, rows

RECORDS = [
    {"question": "1 + 1?", "answer": "2"},
    {"question": "Größer, oder?", "answer": "ja\nnein"},
]


def as_json_lines(rows):
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


def as_csv(rows):
    quoted = ['"' + '","'.join(row.values()) + '"' for row in rows]
    return "\n".join([",".join(rows[0]), *quoted]).encode()


def as_table(rows, separator):
    quoted = [f'"{row["question"]}"{separator}"{row["answer"]}"' for row in rows]
    return "\n".join([f"question{separator}answer", *quoted]).encode()


WRITERS = {
    "r.jsonl": as_json_lines,
    "r.ndjson": as_json_lines,
    "r.json": lambda rows: json.dumps(rows, ensure_ascii=False, indent=1).encode(),
    "r.csv": as_csv,
    "semicolons.csv": lambda rows: as_table(rows, ";"),
    "r.tsv": lambda rows: as_table(rows, "\t"),
    "r.JSONL": as_json_lines,
    "r.Csv": as_csv,
}


def write(folder, name, content):
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def read(file, under=None):
    return [record for _, record in records(file, under)]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("name", WRITERS)
def test_each_text_format_gives_the_same_records(tmp_path, name, mark):
    content = mark + WRITERS[name](RECORDS)
    assert read(write(tmp_path, name, content)) == RECORDS
    assert read(write(tmp_path, f"{name}.gz", gzip.compress(content))) == RECORDS


def test_parquet_gives_values_over_many_batches(tmp_path):
    rows = [
        {"number": i, "share": i / 2, "chat": [{"role": "user", "content": str(i)}], "none": None}
        for i in range(3000)
    ]
    # batches of 1,024 rows would lie across the row groups
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet", row_group_size=700)
    found = list(records(tmp_path / "r.parquet"))
    assert [record for _, record in found] == rows
    assert found[2999][0] == f"{tmp_path / 'r.parquet'}, row 3000"
    assert type(found[1][1]["number"]) is int


def test_a_list_may_lie_under_a_field(tmp_path):
    file = write(tmp_path, "r.json", json.dumps({"data": {"rows": RECORDS}}))
    assert read(file, "data.rows") == RECORDS


def test_a_file_that_is_a_list_needs_no_field_for_it(tmp_path):
    assert read(write(tmp_path, "r.json", json.dumps(RECORDS)), "data") == RECORDS


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("r.jsonl", '\n{"a": 1}\r\n \n{"a": 2}', ["line 2", "line 4"]),
        ("r.json", '[{"a": 1}, {"a": 2}]', ["record 1", "record 2"]),
        ("r.csv", 'a,b\n\n"1\n1",x\r\n2,y\n', ["line 3", "line 5"]),
    ],
)
def test_a_place_names_file_and_line_or_record(tmp_path, name, content, places):
    file = write(tmp_path, name, content)
    assert [place for place, _ in records(file)] == [f"{file}, {place}" for place in places]


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0c"])
@pytest.mark.parametrize("name", ["r.jsonl", "r.csv"])
def test_only_a_line_feed_ends_a_line(tmp_path, name, separator):
    rows = [{"q": f"one{separator}two", "a": "1"}]
    assert read(write(tmp_path, name, WRITERS[name](rows))) == rows


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
FAULTS = [
    ("no.jsonl", None, "no.jsonl does not exist: put the file there"),
    (
        "r.txt",
        "x",
        "r.txt has the suffix '.txt': known are .jsonl, .ndjson, .json, .parquet, .csv, .tsv",
    ),
    ("r.parquet.gz", "x", "r.parquet.gz has the suffix '.gz': known are"),
    ("r.jsonl.gz", "plain", "r.jsonl.gz is not a whole gzip file (Not a gzipped file"),
    ("r.jsonl.gz", gzip.compress(b'{"a": 1}')[:-4], "r.jsonl.gz is not a whole gzip file ("),
    ("r.parquet", LFS, "r.parquet is a pointer of Git LFS and not the data: fetch the data with"),
    ("r.jsonl", LFS, "r.jsonl is a pointer of Git LFS and not the data"),
    ("r.jsonl", "", "r.jsonl is empty: it needs at least one record"),
    ("r.jsonl", "\n \n", "r.jsonl is empty: it needs at least one record"),
    ("r.json", " ", "r.json is empty"),
    ("r.json", "[]", "r.json is empty"),
    ("r.csv", "a,b\n", "r.csv is empty"),
    ("r.csv", "", "r.csv is empty"),
    ("r.jsonl", "{\"a\": 1}\n{'a'", "r.jsonl, line 2 is not JSON (Expecting"),
    ("r.jsonl", "[" * 100_000, "r.jsonl, line 1 is not JSON (maximum recursion"),
    ("r.jsonl", '{"a": ' + "1" * 5000 + "}", "r.jsonl, line 1 is not JSON (Exceeds the limit"),
    ("r.jsonl", '{"q": 1, "a": 2, "q": 3}', "r.jsonl, line 1 has a key twice ('q'): keep one of"),
    ("r.json", '[{"q": 1, "q": 1}]', "r.json, record 1 has a key twice ('q'): keep one of them"),
    ("r.jsonl", "[1, 2]", "r.jsonl, line 1 is no object but [1, 2]"),
    ("r.json", '[{"a": 1}, 2]', "r.json, record 2 is no object but 2"),
    ("r.json", '[{"a": 1}', "r.json is not JSON (Expecting ',' delimiter"),
    ("r.json", '{"data": []}', "r.json holds no list of objects but {'data': []}: name the field"),
    ("r.jsonl", b'{"a": "x"}\n{"a": "\xfc"}', "r.jsonl, line 2 is not UTF-8 (invalid start byte)"),
    (
        "r.csv",
        b"a\nx\n\xff\n",
        "r.csv, line 3: the field 'a' is not UTF-8 (byte 0xff): save it as UTF-8",
    ),
    ("r.json", '[{"a": "x"}]'.encode("utf-16"), "r.json is UTF-16: save it as UTF-8"),
    ("r.json", b'[{"a": "\xff"}]', "r.json, line 1 is not UTF-8"),
    ("r.json", '{"a": 1}\n{"a": 2}', "r.json is not JSON (Extra data"),
    ("r.csv", "q;r\u00e9ponse\nx;y".encode("cp1252"), "r.csv: the header is not UTF-8: save the"),
    (
        "r.csv",
        "a,b\n1,2\n3\n",
        "r.csv, line 3 has another number of fields than the header (1, and the header 2: ['a'",
    ),
    ("r.csv", "a,b\n1,2,3\n", "r.csv, line 2 has another number of fields than the header (3, and"),
    ("r.csv", "a,b,a\n1,2,3\n", "r.csv has more than one column 'a': rename all but one"),
    ("r.csv", 'a,b\n1,"2\n', "r.csv, line 2 is not CSV (unexpected end of data)"),
    ("r.csv", "a,b\r1,2\r", "r.csv, line 1 is not CSV (new-line character seen"),
    (
        "r.parquet",
        "no such file " * 9,
        "r.parquet cannot be read as Parquet after row 0 (Parquet magic bytes",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "said"), FAULTS, ids=[said[:50] for *_, said in FAULTS]
)
def test_a_fault_is_one_line_with_file_place_and_remedy(tmp_path, name, content, said):
    file = tmp_path / name if content is None else write(tmp_path, name, content)
    with pytest.raises(ValueError) as caught:
        read(file)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / said))
    assert "\n" not in message and len(message) < len(str(tmp_path)) + 300


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("r.jsonl", b'{"a": 1}\n{"a\n{"a": "\xfc"}\n[]\n{"a": 5}', [1, 5]),
        ("r.csv", b"a;b\n1;2\n3\n\xff;4\n5;6\n", [2, 5]),
        ("r.json", '[{"a": 1}, 2, {"a": 3}]', [1, 3]),
    ],
)
def test_faulty_records_do_not_end_a_file(tmp_path, name, content, places):
    found = list(rows(write(tmp_path, name, content)))
    sound = [place for place, record in found if not isinstance(record, Fault)]
    assert [int(place.rpartition(" ")[2]) for place in sound] == places
    assert all(record.place == place for place, record in found if isinstance(record, Fault))


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ("\x0crac{1}{2} ", "\x0crac{1}{2}"),  # \frac: not the space it looks like
        ("\text{cm}", "\text{cm}"),
        ("\rho", "\rho"),
        ("\t a\r\nb\x0c", "a\nb"),
        ("\x0c\n a", "a"),
        ("\u3000\u4e0a\u6d77\u3000", "\u4e0a\u6d77"),
    ],
)
def test_space_around_a_text_goes_but_no_lost_backslash(raw, kept):
    assert text({"a": raw}, "a", "here") == kept


def test_invalid_utf8_in_parquet_is_named_by_row_and_column(tmp_path):
    raw = pa.array([b"one", b"tw\xff", b"three"] * 1000, pa.binary())
    texts = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:])
    pq.write_table(pa.table({"n": range(3000), "q": texts}), tmp_path / "r.parquet")
    found = list(rows(tmp_path / "r.parquet"))
    assert len(found) == 3000
    assert found[2998 - 1][1] == {"n": 2997, "q": "one"}
    faults = {}
    for number, (place, record) in enumerate(found, start=1):
        try:
            text(record, "q", place)
        except RecordError as error:
            faults[number] = str(error)
    assert list(faults) == list(range(2, 3001, 3))
    assert faults[2999] == (
        f"{tmp_path / 'r.parquet'}, row 2999: the field 'q' is not UTF-8 (invalid start byte): "
        "save it as UTF-8"
    )


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(4)])
def test_bytes_of_parquet_are_texts(tmp_path, kind):
    columns = {
        "a": pa.array(["zwö".encode(), b"tw\xff!"], kind),
        "list": pa.array([[b"x", b"y"], [b"\xff"]], pa.list_(pa.binary())),
        "inner": pa.array([{"b": b"z"}] * 2, pa.struct([("b", pa.binary())])),
        "repeated": pa.array([b"k", b"k"], pa.binary()).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "r.parquet")
    first, second = read(tmp_path / "r.parquet")
    fields = ("a", "list.1", "inner.b", "repeated")
    assert [text(first, field, "here") for field in fields] == ["zwö", "y", "z", "k"]
    for field in ("a", "list.0"):
        with pytest.raises(RecordError, match=f"here: the field '{field}' is not UTF-8"):
            text(second, field, "here")


def test_values_of_parquet_that_python_cannot_hold_hurt_only_their_field(tmp_path):
    days = pa.array([4_000_000, 1], pa.date32())
    table = pa.table({"day": days, "a": pa.array([0.1, 18.0], pa.float32())})
    pq.write_table(table, tmp_path / "r.parquet")
    first, second = read(tmp_path / "r.parquet")
    assert (text(first, "a", "here"), text(second, "a", "here")) == ("0.1", "18")
    with pytest.raises(RecordError, match="here: the field 'day' cannot be read"):
        value(first, "day", "here")


def test_csv_as_spreadsheets_write_it(tmp_path):
    long = "x" * 200_000
    file = write(tmp_path, "r.csv", f'q,a,,\r\n"line 1\r\nline 2",{long},,\r\nb"c,d,,\r\ne,f,,\r\n')
    places = [place.rpartition(", ")[2] for place, _ in rows(file)]
    assert places == ["line 2", "line 4", "line 5"]
    found = [record for _, record in rows(file)]
    assert found[0] == {"q": "line 1\r\nline 2", "a": long}
    assert text(found[0], "q", "here") == "line 1\nline 2"
    assert found[2] == {"q": "e", "a": "f"}
    table = write(tmp_path, "r.tsv", "q\ta\tnote (a, b, c or d)\n1\t2\t3\n")
    assert read(table) == [{"q": "1", "a": "2", "note (a, b, c or d)": "3"}]


def write_parquet(folder, texts, **options):
    """Write a column of texts and one that nobody needs; options are pyarrow's."""
    table = pa.table({"q": texts, "pages": ["x" * 500] * len(texts)})
    pq.write_table(table, folder / "r.parquet", store_schema=False, **options)
    return folder / "r.parquet"


def repeated(text, times):
    """A column that has its text once in the file and states the size of that one."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([text]))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("length", "times", "said"),
    [
        (1000, 100, "100,[0-9]{3} bytes"),
        (2000, 2, "a value of 2,000 bytes in rows 1 to 2"),
    ],
)
def test_parquet_that_unpacks_to_too_much_is_refused(
    tmp_path, monkeypatch, length, times, said, nested
):
    monkeypatch.setattr(record_files, "LARGEST", 50_000)
    monkeypatch.setattr(record_files, "LARGEST_LINE", 1500)
    column = repeated("x" * length, times)
    if nested:
        offsets = pa.array(range(times + 1), pa.int32())
        column = pa.ListArray.from_arrays(
            offsets, pa.StructArray.from_arrays([column], names=["content"])
        )
    file = write_parquet(tmp_path, column)
    with pytest.raises(ValueError, match=rf"r\.parquet is too large to read \(({said})") as caught:
        list(rows(file, fields=["q.0.content" if nested else "q"]))
    assert "split it into several files" in str(caught.value)


def test_only_the_needed_columns_of_parquet_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "LARGEST", 50_000)
    file = write_parquet(tmp_path, [f"What is {n}?" for n in range(200)], use_dictionary=False)
    with pytest.raises(ValueError, match="too large to read"):
        list(rows(file))
    found = [record for _, record in rows(file, fields=["q"])]
    assert (len(found), found[199]) == (200, {"q": "What is 199?", "pages": None})


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.csv.gz", "r.json.gz", "r.jsonl"])
def test_a_text_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(record_files, "LARGEST", 20_000)
    content = WRITERS[name.removesuffix(".gz")](RECORDS * 1000)
    file = write(tmp_path, name, gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(ValueError, match=rf"{name} is too large to read \([0-9]+,[0-9]+ bytes"):
        list(rows(file))


@pytest.mark.parametrize("name", ["mine.jsonl.gz", "mine.json"])
def test_a_file_of_too_many_small_records_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(record_files, "MOST_RECORDS", 99)
    monkeypatch.setattr(record_files, "MOST_BRACKETS", 99)
    text = "{}\n" * 100 if name.endswith(".gz") else f"[{','.join(['{}'] * 100)}]"
    written = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(written) if name.endswith(".gz") else written)
    with pytest.raises(
        ValueError, match=r"mine\.json.* is too large to read \((more than 99 rec|101 ob)"
    ):
        list(record_files.rows(tmp_path / name))


def test_a_line_that_is_too_long_hurts_only_its_record(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "LARGEST_LINE", 100)
    content = '{"q": 1}\n{"q": "' + "x" * 250 + '"}\n{"q": 3}\n'
    (_, first), (place, fault), (last, third) = rows(write(tmp_path, "r.jsonl", content))
    assert (first, third) == ({"q": 1}, {"q": 3})
    assert last.endswith("line 3")
    assert str(fault) == f"{place} is too long (more than 100 bytes): shorten it, or drop it"


def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match=r"r\.jsonl is no regular file: put a file there, or"):
        list(rows(tmp_path / "r.jsonl"))
    (tmp_path / "b").mkdir()
    write(tmp_path, "b/a.jsonl", "{}")
    (tmp_path / "b/link.jsonl").symlink_to("a.jsonl")
    os.mkfifo(tmp_path / "b/c")
    with pytest.raises(ValueError) as caught:
        record_files.check_folder(tmp_path)
    assert [line.partition(" is no")[0] for line in str(caught.value).splitlines()] == [
        str(tmp_path / "b/c"),
        str(tmp_path / "r.jsonl"),
    ]


def test_links_and_special_files_of_a_folder_are_refused_at_once(tmp_path):
    """Among them /proc/version, a regular file without a size; /proc/kmsg would never end."""
    folder, elsewhere = tmp_path / "sources", tmp_path / "elsewhere"
    cached = elsewhere / "files/md5/0c/c175b9c0f1b6a831c399e269772661"
    for each in (folder / "intake/inner", cached.parent, elsewhere / "set"):
        each.mkdir(parents=True)
    for file in (folder / "intake/a.jsonl", cached, elsewhere / "b.jsonl"):
        file.write_text("{}")
    links = {
        "inside.jsonl": "a.jsonl",
        "cached.jsonl": cached,
        "folder": "inner",
        "out.jsonl": elsewhere / "b.jsonl",
        "set": elsewhere / "set",
        "kernel.jsonl": "/proc/kmsg",
        "device.jsonl": "/dev/zero",
        "nowhere.jsonl": "missing",
        "loop.jsonl": "loop.jsonl",
        "above": "..",
    }
    for name, target in links.items():
        (folder / "intake" / name).symlink_to(target)
    os.mkfifo(folder / "intake/pipe.jsonl")
    (folder / "socket").parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    with pytest.raises(ValueError) as caught:
        record_files.check_folder(folder)
    lines = [line.removeprefix(f"{folder}/") for line in str(caught.value).splitlines()]
    out = f"is a link that leads out of {folder}/, to"
    assert lines == [
        "intake/above is a link to a folder that it lies in: remove it",
        "intake/device.jsonl is no regular file: put a file there, or remove it",
        "intake/kernel.jsonl is no regular file: put a file there, or remove it",
        "intake/loop.jsonl is a link that leads nowhere: remove it",
        "intake/nowhere.jsonl is a link that leads nowhere: remove it",
        f"intake/out.jsonl {out} {elsewhere}/b.jsonl: {REMEDY}",
        "intake/pipe.jsonl is no regular file: put a file there, or remove it",
        f"intake/set {out} {elsewhere}/set: {REMEDY}",
        "socket is no regular file: put a file there, or remove it",
    ]
    with pytest.raises(ValueError, match="no regular file"):
        record_files.check_folder(folder, links=False)


REMEDY = (
    "copy what is there, mount its folder here (mount --bind), or have DVC fetch it "
    "(dvc import-url)"
)


@pytest.mark.parametrize("target", ["/proc/version", "/proc/kmsg", "/dev/zero", "/dev/tty"])
def test_what_the_kernel_makes_is_refused_without_reading_on(tmp_path, target):
    (tmp_path / "r.jsonl").symlink_to(target)
    with pytest.raises(ValueError, match=r"r\.jsonl is no regular file|r\.jsonl cannot be read"):
        list(rows(tmp_path / "r.jsonl"))


def test_file_that_changes_while_it_is_read_is_refused(tmp_path):
    file = write(tmp_path, "r.jsonl", '{"q": 1}\n{"q": 2}\n')
    records = rows(file)
    next(records)
    with file.open("a") as later:
        later.write('{"q": 3}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl has changed while it was read: run again"):
        list(records)


def test_a_damaged_parquet_file_is_refused(tmp_path):
    table = pa.table({"a": ["x" * 50] * 5000})
    pq.write_table(table, tmp_path / "r.parquet", use_dictionary=False, compression="none")
    whole = (tmp_path / "r.parquet").read_bytes()
    middle = len(whole) // 2
    write(tmp_path, "r.parquet", whole[:100] + b"\xff" * middle + whole[100 + middle :])
    with pytest.raises(ValueError, match=r"r\.parquet cannot be read as Parquet after row"):
        read(tmp_path / "r.parquet")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "r.parquet")
    with pytest.raises(ValueError, match="more than one column 'a'"):
        read(tmp_path / "r.parquet")


# ---------------------------------------------------------------- fields

NESTED = {"prompt": [{"role": "user", "content": "Hi"}], "a.b": 1, "a": {"b": 2, "c.d": 3, "e": 4}}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("prompt.0.content", "Hi"),
        ("prompt.-1.role", "user"),
        ("a.b", 1),  # the key that is the whole path goes first
        ("a.c.d", 3),
        ("a.e", 4),
        ("a", {"b": 2, "c.d": 3, "e": 4}),
    ],
)
def test_a_path_leads_through_objects_and_lists(path, found):
    assert value(NESTED, path, "here") == found


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("answer", "it has ['a', 'a.b', 'prompt']"),
        ("a.x", "it has ['b', 'c.d', 'e']"),
        ("prompt.1.content", "it has a list of 1 there"),
        ("prompt.role", "it has a list of 1 there"),
        ("a.e.f", "it has 4 there, which has no fields"),
        ("prompt.0.content.0", "it has 'Hi' there, which has no fields"),
    ],
)
def test_a_path_to_nothing_is_named_with_what_there_is(path, said):
    with pytest.raises(ValueError) as caught:
        value(NESTED, path, "r.jsonl, line 3")
    assert str(caught.value) == (
        f"r.jsonl, line 3 lacks the field '{path}' ({said}): name the right field"
    )


@pytest.mark.parametrize(
    ("found", "written"),
    [
        (" x y\n", "x y"),
        (18, "18"),
        (18.0, "18"),
        (0.5, "0.5"),
        (-0.0, "0"),
        (-2.50, "-2.5"),
        (1200.0, "1200"),
        (1e23, "100000000000000000000000"),
        (1e-7, "0.0000001"),
        (10**30, "1" + "0" * 30),
    ],
)
def test_texts_and_numbers_are_written_plainly(found, written):
    assert text({"a": found}, "a", "here") == written


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_keeps_its_value(number):
    written = as_text(number, "x", "here")
    assert float(written) == number
    assert "e" not in written and not written.endswith(".0")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("", "is empty: fill it in, or drop the record"),
        (" \n", "is empty"),
        (None, "is empty"),
        (float("nan"), "is NaN, which is no number"),
        (float("-inf"), "is -Infinity, which is no number"),
        (True, "is no text or number but True"),
        (["2"], "is no text or number but ['2']"),
        ({"value": 2}, "is no text or number but {'value': 2}"),
    ],
)
def test_what_is_no_text_or_number_is_refused(found, said):
    # its Python spelling, such as "['2']" or "None", would be an answer that nothing matches
    with pytest.raises(ValueError) as caught:
        text({"a": found}, "a", "r.jsonl, line 3")
    assert str(caught.value).startswith(f"r.jsonl, line 3: the field 'a' {said}")


NUMBERS = ["12345678901234567.8", "0.12345678901234567891", "9007199254740993.0", "2.50", "1e-3"]


def test_numbers_keep_the_digits_that_a_file_has(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"answer": {number}}}\n' for number in NUMBERS))
    found = [as_text(record["answer"], "answer", place) for place, record in rows(file)]
    assert found == [NUMBERS[0], NUMBERS[1], "9007199254740993", "2.5", "0.001"]


def test_numbers_of_too_many_digits_are_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"answer": 1e999999999}\n{"answer": 1e-99999999}\n')
    for place, record in rows(file):
        with pytest.raises(RecordError, match="too many digits"):
            as_text(record["answer"], "answer", place)


@pytest.mark.parametrize("short", [pa.float16(), pa.float32()])
@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (lambda value: value, lambda short: short),
        (lambda value: [value], pa.list_),
        (lambda value: {"a": value}, lambda short: pa.struct([("a", short)])),
        (lambda value: [{"a": value}], lambda short: pa.list_(pa.struct([("a", short)]))),
    ],
    ids=["alone", "in a list", "in a struct", "in both"],
)
def test_short_floats_of_parquet_have_few_digits(tmp_path, short, wrap, kind):
    values = [wrap(np.float16(2.3)), wrap(np.float16(18)), wrap(None)]
    pq.write_table(pa.table({"a": pa.array(values, kind(short))}), tmp_path / "a.parquet")
    found = [record["a"] for _, record in rows(tmp_path / "a.parquet")]
    expected = "2.3" if short == pa.float16() else "2.3007812"

    def inside(row):
        while isinstance(row, list | dict):
            row = row[0] if isinstance(row, list) else row["a"]
        return row

    assert as_text(inside(found[0]), "a", "here") == expected
    assert as_text(inside(found[1]), "a", "here") == "18"
    assert inside(found[2]) is None
