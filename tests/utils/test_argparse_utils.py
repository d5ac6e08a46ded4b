"""Flags are taken as vLLM's users write them, and the rest is left alone."""

from __future__ import annotations

import argparse
import json

import pytest

from jaxllm.utils.argparse_utils import FlexibleArgumentParser, human_readable_int


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-1", -1),
        ("1k", 1000),
        ("1K", 1024),
        ("10.5k", 10_500),
        ("25.6k", 25_600),
        ("4.1k", 4100),
        ("10.212345k", 10_212),
        ("2m", 2_000_000),
        ("2G", 2**31),
        (" 7 ", 7),
        ("9" * 400 + "k", int("9" * 400) * 1000),
    ],
)
def test_human_readable_int(text: str, number: int):
    assert human_readable_int(text) == number


@pytest.mark.parametrize(
    "text", ["", "k", "1kk", "1.23M", "1,000", "0x10", "1e3", "nan", "1.5", "\u0661", ".5k", "x" * 5000, "9" * 5000]
)
def test_human_readable_int_refuses(text: str):
    with pytest.raises(ValueError, match=r"number|fraction|digits"):
        human_readable_int(text)


def parse(*words: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--max-len", type=human_readable_int)
    parser.add_argument("--own_name")
    parser.add_argument("--json-arg", "-ja", type=json.loads)
    parser.add_argument("--text")
    return parser.parse_args(words)


def test_underscores_and_dashes_are_the_same():
    assert parse("--max_len", "1k").max_len == parse("--max_len=1k").max_len == 1000
    assert parse("--own-name", "a_b").own_name == parse("--own_name=a_b").own_name == "a_b"


def test_fields_of_a_json_argument():
    words = ("--json_arg.a_b", "1", "--json-arg.c.d=80g", "-ja.c.e", "x.y", "--json-arg.f+", "p,q", "--json-arg.f+=r")
    first = {"a_b": 1, "c": {"d": 80 * 10**9}, "f": ["p", "q", "r"]}
    assert parse(*words[:3], *words[5:]).json_arg == first
    assert parse(*words[3:5]).json_arg == {"c": {"e": "x.y"}}
    assert parse("--json-arg.a", "1", "--json-arg.a", '{"b": null}', "--json-arg.a.c", "2").json_arg == {
        "a": {"b": None, "c": 2}
    }


def test_other_words_are_left_alone():
    args = parse("--text", "-- a_b. c", "x_y.z", "--", "--max_len", "--json-arg.a")
    assert (args.text, args.rest) == ("-- a_b. c", ["x_y.z", "--max_len", "--json-arg.a"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json-arg.a",), "expected one argument"),
        (("--json-arg", "{}", "--json-arg.a", "1"), "not both"),
        (("--no-such.a", "1"), "unrecognized arguments: --no-such.a"),
        (("--max-len.a", "1"), "invalid human_readable_int value"),
    ],
)
def test_misuse_is_named(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(*words)
    assert message in capsys.readouterr().err


def test_subcommands_take_them_too():
    parser = FlexibleArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers()
    command = commands.add_parser("do", allow_abbrev=False)
    command.add_argument("--json-arg", type=json.loads)
    command.add_argument("--max-len", type=int)
    args = parser.parse_args(["do", "--json_arg.a", "b", "--max_len=3"])
    assert (args.json_arg, args.max_len) == ({"a": "b"}, 3)
