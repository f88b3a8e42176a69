"""CSV and JSONL tables."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitlab.data.sources import Source, open_spec

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def table(folder: Path, text: str | bytes, name: str = "set.csv") -> dict[str, Source]:
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    return open_spec(str(folder / name))


def rows(source: Source) -> list[tuple[str, str]]:
    return [(source.id(i), source.classes[label]) for i, label in enumerate(source.labels)]


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    Image.new("RGB", (3, 2), "red").save(tmp_path / "p" / "1.png")
    parts = table(tmp_path, "path,label\np/1.png,dog\np/2.png,cat\n")
    assert list(parts) == ["all"]
    assert rows(parts["all"]) == [("p/1.png", "dog"), ("p/2.png", "cat")]
    assert parts["all"].classes == ("cat", "dog")
    assert parts["all"].groups is None
    assert parts["all"].load(0).tolist() == [[[255, 0, 0]] * 3] * 2


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffpath,label\na.png,cat\n",  # as spreadsheets save it
        "path,label\r\na.png,cat\r\n",
        " path , label \na.png, cat \n",
        'label,path,more\n"cat","a.png",1\n',
        "path,label,split,group\na.png,cat,,\n",
        "path,label\n\na.png,cat",
    ],
)
def test_csv_as_people_write_it(tmp_path: Path, text: str) -> None:
    assert rows(table(tmp_path, text)["all"]) == [("a.png", "cat")]


def test_splits_and_groups(tmp_path: Path) -> None:
    text = "path,label,split,group\n1,b,Train,x\n2,a,,x\n3,a,validation,y\n4,b,test,\n"
    parts = table(tmp_path, text)
    assert {split: rows(part) for split, part in parts.items()} == {
        "train": [("1", "b"), ("2", "a")], "val": [("3", "a")], "test": [("4", "b")],
    }  # fmt: skip
    assert parts["train"].groups is not None
    assert len(set(parts["train"].groups)) == 1
    assert parts["val"].labels.tolist() == [0]  # train's numbering


def test_rows_without_a_split_are_training_where_others_have_one(tmp_path: Path) -> None:
    lines = [{"path": "1", "label": "a"}, {"path": "2", "label": "a", "split": "val"}]
    parts = table(tmp_path, "\n".join(map(json.dumps, lines)), "set.jsonl")
    assert {split: rows(part) for split, part in parts.items()} == {
        "train": [("1", "a")], "val": [("2", "a")],
    }  # fmt: skip


def test_jsonl(tmp_path: Path) -> None:
    text = '{"path": "1", "label": "a\u2028b"}\n\n{"path": "2", "label": 7, "more": [1]}\n'
    assert rows(table(tmp_path, text, "SET.JSONL")["all"]) == [("1", "a\u2028b"), ("2", "7")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the header must be path,label"),
        ("path\na\n", "the header must be path,label[,split][,group], found path"),
        ("path,label,label\na,b,c\n", "the header must be"),
        ("path,label\n", "no rows"),
        ("path,label\na\n", "line 2 needs a path and a label"),
        ("path,label\n,b\n", "line 2 needs a path and a label"),
        ("path,label\na, \n", "line 2 needs a path and a label"),
        ("path,label\na,b,c\n", "line 2 has more columns"),
        ("path,label\na,b|\n", "line 2 has an empty label (b|)"),
        ("path,label,split\na,b,holdout\n", "line 2: split 'holdout' is not train, val or test"),
        ('path,label\n"a,b\n', "line 2: unexpected end of data"),
        ("path,label,split\na,b,train\nc,d,val\n", "val has classes that train has not: d"),
        (b"path,label\n\xff,b\n", "not UTF-8 text"),
        ("path,label\n" + "a" * 200_000 + ",b\n", "field larger than field limit"),
    ],
)
def test_csv_refuses(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError) as error:
        table(tmp_path, text)
    assert words in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'set.csv'}: ")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "line 1 is not an object"),
        ('{"path": "a"', "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"path": "a", "label": NaN}', "line 1: label must be text or a whole number, not nan"),
        ('{"path": "a", "label": ["b"]}', "line 1: label must be text"),
        ('{"path": ["a"], "label": "b"}', "line 1: path must be text"),
        ('{"path": "\\ud800", "label": "b"}', "line 1: the path is not UTF-8"),
        ('{"path": "a", "label": "\\ud800"}', "class names must be UTF-8 text: \\ud800"),
        ('{"path": "a", "label": ' + "9" * 5000 + "}", "line 1 is not JSON"),
    ],
)
def test_jsonl_refuses(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        table(tmp_path, text, "set.jsonl")
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


cells = st.one_of(
    st.sampled_from(["path", "label", "split", "group", "train", "val", "", '"', "|", "\r", "\0"]),
    st.text(max_size=4),
)
lines = st.lists(st.lists(cells, max_size=5).map(",".join), max_size=6)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(cells, inner, max_size=4),
    max_leaves=6,
)


def one_line_or_opened(folder: Path, data: bytes, name: str) -> None:
    message = None
    try:
        parts = table(folder, data, name)
    except (ValueError, FileNotFoundError) as e:
        message = str(e)
    if message is None:
        for part in parts.values():
            assert len(rows(part)) == len(part) > 0
    else:
        assert len(message.splitlines()) == 1
        assert message.startswith(f"{folder / name}: ")


@same_folder
@given(st.tuples(st.sampled_from(["", "path,label\n", "label,path,split\n"]), lines))
def test_any_csv_opens_or_says_why_in_one_line(tmp_path: Path, text: tuple[str, list[str]]) -> None:
    data = (text[0] + "\n".join(text[1])).encode("utf-8", "surrogatepass")
    one_line_or_opened(tmp_path, data, "set.csv")


@same_folder
@given(st.lists(jsons.map(json.dumps) | st.text(max_size=5), max_size=4))
def test_any_jsonl_opens_or_says_why_in_one_line(tmp_path: Path, text: list[str]) -> None:
    one_line_or_opened(tmp_path, "\n".join(text).encode("utf-8", "surrogatepass"), "set.jsonl")


@same_folder
@given(st.binary(max_size=60))
def test_any_bytes_open_or_say_why_in_one_line(tmp_path: Path, data: bytes) -> None:
    for name in ("set.csv", "set.jsonl"):
        one_line_or_opened(tmp_path, data, name)


def test_a_group_has_one_number_in_all_splits_and_pictures_without_are_by_themselves(
    tmp_path: Path,
) -> None:
    text = "path,label,split,group\n1,a,train,z\n2,a,train,\n3,a,train,\n4,a,val,z\n5,a,test,\n"
    parts = table(tmp_path, text)
    one, two, three = parts["train"].groups.tolist()
    assert parts["val"].groups.tolist() == [one]
    assert one >= 0 > two != three < 0
    assert parts["test"].groups is None
