"""`subscribePattern`: what is found is what Java 17 finds, and all else is refused by name."""

import pytest

from kafkalog.datasource.topic_pattern import topic_pattern
from kafkalog.errors import InvalidInputError

NAMES = [
    *("orders", "Orders", "eu.orders.v1", "us-orders-V3", "payments_us", "a-b.c_d"),
    *("9a", "A", "aab", "abab", "-", "topic-1"),
]
FOUND = [
    ("topic-.*", "topic-1"),
    ("(?<env>eu|us)[.-]orders.*", "eu.orders.v1 us-orders-V3"),
    ("(?i)ORDERS", "orders Orders eu.orders.v1 us-orders-V3"),
    ("o(?i)RDERS", "orders eu.orders.v1 us-orders-V3"),
    ("(?i:o)rders", "orders Orders eu.orders.v1 us-orders-V3"),
    ("a(?i)B|c", "a-b.c_d aab abab topic-1"),
    (r"\p{Alpha}+", "all but -"),
    (r"^\p{Alpha}+$", "orders Orders A aab abab"),
    (r"^\p{Lower}+$", "orders aab abab"),
    (r"(?i)^\p{Lower}+$", "orders Orders A aab abab"),
    (r"(?i)^\p{Lu}+$", "orders Orders A aab abab"),
    (r"^\p{Lu}+$", "A"),
    (r"^\P{Lu}+$", "all but Orders us-orders-V3 A"),
    (r"(?i)^\P{Lu}+$", "-"),
    ("^[a-z&&[^aeiou]]", "payments_us topic-1"),
    ("^[a-z&&[^aeiou]]+$", ""),
    ("^[^a-z&&o]", "all but orders"),
    ("[a-d[m-p]]+", "all but A -"),
    ("^[^a-d[m-p]]", "all but orders payments_us a-b.c_d aab abab"),
    (r"\Qa-b.c\E", "a-b.c_d"),
    (r"\Q.\E", "eu.orders.v1 a-b.c_d"),
    ("^.*+$", "all but"),
    ("a++b", "aab abab"),
    (r"(a)\1", "aab"),
    (r"(?<x>a)\k<x>", "aab"),
    (r"(?i)(a)\1", "aab"),
    (r"(?i)(a)\1b", "aab"),
    ("^(?>a|aa)b", "abab"),
    (r"\.v\d\z", "eu.orders.v1"),
    (r"\.v\d\Z", "eu.orders.v1"),
    (r"\Aeu", "eu.orders.v1"),
    (r"\Geu", "eu.orders.v1"),
    (r"\h|\s", ""),
    (r"\x2d\x{31}", "topic-1"),
    (r"\u002d", "us-orders-V3 a-b.c_d - topic-1"),
    (r"\055", "us-orders-V3 a-b.c_d - topic-1"),
    (r"\0137", "payments_us a-b.c_d"),
    ("(?x) o r d # hi", "orders eu.orders.v1 us-orders-V3"),
    ("(?x)[o r]d", "orders Orders eu.orders.v1 us-orders-V3"),
    ("[]a]", "payments_us a-b.c_d 9a aab abab"),
    ("[^]a]", "all but"),
    ("[a-]", "all but orders Orders eu.orders.v1 A"),
    ("[-a]b", "a-b.c_d aab abab"),
    (r"[\w-]x", ""),
    (r"[\w&&[^_]]+_", "payments_us a-b.c_d"),
    (r"\bus\b", "us-orders-V3"),
    (r"(?<=eu\.)orders", "eu.orders.v1"),
    (r"(?<!eu\.)orders", "orders us-orders-V3"),
    ("(?=eu)eu", "eu.orders.v1"),
    (r"\p{IsAlphabetic}+\.\p{javaLowerCase}", "eu.orders.v1 a-b.c_d"),
    (r"\p{L}\p{Nd}", "eu.orders.v1 us-orders-V3"),
    (r"\pL\d", "eu.orders.v1 us-orders-V3"),
    (r"\p{Punct}{2}", ""),
    (r"\p{IsPunctuation}{2}", ""),
    (r"\p{InBasicLatin}", "all but"),
    (r"\p{IsLatin}{6}", "orders Orders eu.orders.v1 us-orders-V3 payments_us"),
    (r"\p{script=Latin}", "all but -"),
    (r"\p{gc=Lu}", "Orders us-orders-V3 A"),
    ("a{2,}", "aab"),
    ("a{2}+", "aab"),
    ("a|", "all but"),
    ("|a", "all but"),
    ("", "all but"),
    ("(?-i)a", "payments_us a-b.c_d 9a aab abab"),
    ("(?i-s)A", "payments_us a-b.c_d 9a A aab abab"),
    ("(?u)a", "payments_us a-b.c_d 9a aab abab"),
    (r"(?U)\w", "all but -"),
    ("(?d)a$", "9a"),
    ("(?m)^a$", ""),
    ("[&&a]", "payments_us a-b.c_d 9a aab abab"),
    ("[a&&b&&c]", ""),
    ("[a-c&&b-d&&[b]]", "a-b.c_d aab abab"),
    ("[a&b]", "payments_us a-b.c_d 9a aab abab"),
    (r"\-", "us-orders-V3 a-b.c_d - topic-1"),
    (r"[\-]", "us-orders-V3 a-b.c_d - topic-1"),
    (r"[\]]", ""),
    ("[.]", "eu.orders.v1 a-b.c_d"),
    (r"[a\]b]+", "payments_us a-b.c_d 9a aab abab"),
    ("[[a]b]", "payments_us a-b.c_d 9a aab abab"),
    ("[^[a]b]", "all but aab abab"),
    ("[a-z&&[^bc]&&[^d]]{5}", "payments_us"),
    ("[a-c[d-f]&&[e-g]]", "orders Orders eu.orders.v1 us-orders-V3 payments_us"),
    ("(?i)[a-c]{3}", "aab abab"),
    ("(?i)[^a]{2}", "all but 9a A aab abab -"),
    ("^(?i)[^a]", "all but a-b.c_d A aab abab"),
    (r"[\d\-.]+$", "eu.orders.v1 us-orders-V3 - topic-1"),
    ("[+--]", "us-orders-V3 a-b.c_d - topic-1"),
    ("[!-/]", "eu.orders.v1 us-orders-V3 a-b.c_d - topic-1"),
    (r"\cA", ""),
    (r"\t", ""),
    (r"\R", ""),
    (r"\X{5}", "all but 9a A aab abab -"),
    (r"^\X$", "A -"),
    (r"\1(a)", ""),
    (r"(a)(b)\2", ""),
    (r"(a)\10", ""),
    (r"[\d-a]", "all but orders Orders A"),
    (r"(?i)\x41", "payments_us a-b.c_d 9a A aab abab"),
    (r"(?i)[\x41]", "payments_us a-b.c_d 9a A aab abab"),
    (r"(?i)[\x41-\x43]", "all but orders Orders eu.orders.v1 us-orders-V3 -"),
    (r"\p{IsWhite_Space}", ""),
    (r"\p{Cntrl}", ""),
    (r"[\p{L}&&[^\p{Lu}]]+$", "all but eu.orders.v1 us-orders-V3 A - topic-1"),
    (r"^[\p{L}--x]", "all but"),
    (r"\p{Alpha}d", "orders Orders eu.orders.v1 us-orders-V3"),
    ("d{1,3}", "orders Orders eu.orders.v1 us-orders-V3 a-b.c_d"),
    ("o", "orders eu.orders.v1 us-orders-V3 topic-1"),
    ("y", "payments_us"),
    ("0|d", "orders Orders eu.orders.v1 us-orders-V3 a-b.c_d"),
    (r"\p{Alpha}ab", "aab abab"),
    (r"(\p{Alpha})", "all but -"),
    ("(?<=v)", "eu.orders.v1"),
    (r"[_-](?i)[[[.\w]o\.]a-f]", "us-orders-V3 payments_us a-b.c_d topic-1"),
    (r"\p{Alpha}|x^", "all but -"),
    (r"sx?+\.", "eu.orders.v1"),
    (r"\p{Alpha}", "all but -"),
    (r"(?i)\.[a-fa-fa-f]?+", "eu.orders.v1 a-b.c_d"),
    ("1", "eu.orders.v1 topic-1"),
    ("eu", "eu.orders.v1"),
    ("9", "9a"),
    (r"\.[0-9.\p{Lower}]{1,3}", "eu.orders.v1 a-b.c_d"),
    ("b", "a-b.c_d aab abab"),
    (r"o|x?\p{Upper}", "orders Orders eu.orders.v1 us-orders-V3 A topic-1"),
    (r"eu\P{Lu}", "eu.orders.v1"),
    (r"\d?+s[^[A-Z][b.]]", "us-orders-V3 payments_us"),
    ("(?:.r)x*", "orders Orders eu.orders.v1 us-orders-V3"),
    ("[[a-fa-f]]", "all but A -"),
    ("r", "orders Orders eu.orders.v1 us-orders-V3"),
    (r"\P{Lu}o(?!o[_[\-0-9\.]]++\by)", "eu.orders.v1 us-orders-V3 topic-1"),
    ("eu", "eu.orders.v1"),
    (r"(?i:\.^us\Qa.\E)*?^?+\P{Lu}", "all but A"),
    (r"-+[\w]", "us-orders-V3 a-b.c_d topic-1"),
    ("[a]", "payments_us a-b.c_d 9a aab abab"),
    ("o", "orders eu.orders.v1 us-orders-V3 topic-1"),
    ("[^_o-z].$", "us-orders-V3 9a aab abab topic-1"),
    ("[o[o-z]]", "orders Orders eu.orders.v1 us-orders-V3 payments_us topic-1"),
    (r"[\w]", "all but -"),
    (r"[\x61o-z\d]", "all but A -"),
    (r"(?i)\W", "eu.orders.v1 us-orders-V3 a-b.c_d - topic-1"),
    ("us", "us-orders-V3 payments_us"),
    ("eu{1,3}", "eu.orders.v1"),
    (r"\p{Alpha}", "all but -"),
    ("eux*", "eu.orders.v1"),
    ("9*b", "a-b.c_d aab abab"),
    (r"[^\d[[\-]]o]?+\P{Lu}++", "all but A"),
    (r"[^0-9b]\W", "eu.orders.v1 us-orders-V3 a-b.c_d topic-1"),
    ("[A-Z]", "Orders us-orders-V3 A"),
    (r"u?+\d[\p{Lower}]", "9a"),
    (r"\w+", "all but -"),
    ("b", "a-b.c_d aab abab"),
]
"""Pattern, and the names in which Java finds it."""
TAKEN = {
    *(
        "topic-.*",
        "(?i)ORDERS",
        "(?i:o)rders",
        "^.*+$",
        "a++b",
        r"(a)\1",
        r"(?i)(a)\1b",
        "^(?>a|aa)b",
    ),
    *(r"\.v\d\Z", r"\Aeu", r"\u002d", "[]a]", "[^]a]", "[a-]", "[-a]b", r"[\w-]x", r"\bus\b"),
    *(r"(?<=eu\.)orders", r"(?<!eu\.)orders", "(?=eu)eu", "a{2,}", "a{2}+", "a|", "|a", ""),
    *("(?m)^a$", "[a&b]", r"\-", r"[\-]", r"[\]]", "[.]", r"[a\]b]+", "(?i)[a-c]{3}", "[!-/]"),
    *(r"[\d\-.]+$", r"\t", r"(a)(b)\2", r"(?i)\x41", r"(?i)[\x41-\x43]", "d{1,3}", "0|d"),
    *("^(?>a|aa)b", "(?<=v)", "(?:.r)x*", r"[\w]", r"(?i)\W", "[^_o-z].$", "[A-Z]", r"\w+"),
}
"""Patterns of those above that are the same in Python."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("pattern", "names"), FOUND)
def test_a_pattern_is_found_where_java_finds_it_or_is_refused(pattern: str, names: str) -> None:
    named = names.removeprefix("all but").split()
    expected = [name for name in NAMES if (name in named) != names.startswith("all but")]
    try:
        found = topic_pattern(pattern).search
    except InvalidInputError:
        assert pattern not in TAKEN
    else:
        assert [name for name in NAMES if found(name)] == expected


def test_the_patterns_that_are_taken_are_among_those_of_java() -> None:
    assert {pattern for pattern, _ in FOUND} >= TAKEN


@pytest.mark.parametrize(
    ("pattern", "construct"),
    [
        (r"\p{Alpha}+", r"'\\\\p'"),
        (r"\Qa.b\E", r"'\\\\Q'"),
        (r"eu\h", r"'\\\\h'"),
        (r"\055", r"'\\\\0'"),
        (r"[\b]", r"'\\\\b'"),
        (r"\N{DIGIT ONE}", r"'\\\\N'"),
        ("(?<env>eu|us)", r"'\(\?<e'"),
        ("(?P<x>a)", r"'\(\?P<'"),
        ("(?#c)a", r"'\(\?#c'"),
        ("(?x)a b", r"'\(\?x\)'"),
        ("(?u)a", r"'\(\?u\)'"),
        ("[a-z&&[^aeiou]]", "'&&'"),
        ("[a[b]]", r"'\[b'"),
        ("[+--]", "'--'"),
        ("a{,2}", "'{,'"),
        ("a{", "'{'"),
    ],
)
def test_what_the_two_languages_read_differently_is_refused_by_name(
    pattern: str, construct: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"subscribePattern .*: {construct} does not mean"):
        topic_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a**", "not a regular expression of Python: multiple repeat"),
        ("*a", "nothing to repeat"),
        ("[", "unterminated character set"),
        ("(", "missing \\)"),
        (")", "unbalanced parenthesis"),
        (r"[a-\d]", "bad character range"),
        ("a(?i)b", "global flags not at the start"),
        ("a\\", "bad escape"),
        (r"(a)\10", "invalid group reference"),
        (r"(?<=e{1,2}u\.)o", "look-behind requires fixed-width pattern"),
        ("(" * 5000 + ")" * 5000, "too deep or too large"),
        ("a{99999999999}", "too deep or too large"),
    ],
)
def test_what_python_cannot_do_is_refused_with_the_reason(pattern: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        topic_pattern(pattern)
