"""Short, awkward texts that two equal tokenizers must encode equally. They cover the places where
normalizers, splitters and merges usually differ.
"""

from __future__ import annotations

__all__ = ["PROBES"]

PROBES = (
    "",
    " ",
    "a",
    "The cat sat on the mat, didn't it? They're sure we'll see.",
    "  two leading spaces, two trailing  ",
    "one\ntwo\n\nthree\r\nfour\ttab\t\ttabs\n    indented\n\n\n",
    "no\u00a0break, thin\u2009space, zero\u200bwidth, \ufeffmark",
    "1 12 123 1234 12345 3.14159 -2e-10 0x1F 1,000,000 2026-11-21 50%",
    "def area(r: float) -> float:\n    return 3.14 * r ** 2  # circle\n",
    "for (int i = 0; i < n; ++i) { a[i] |= b->c & ~0xFFu; }",
    '{"key": [1, null, true], "text": "a\\"b\\\\c\\u00e9"}',
    "SELECT name, COUNT(*) FROM users WHERE id != 7 GROUP BY name;",
    "<div class='x'>&amp; <!-- note --></div> <s> </s> [INST] <|endoftext|>",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    (
        "cafe\u0301 caf\u00e9 na\u00efve \u00c5ngstr\u00f6m \u212b \ufb01sh \u00df \u1e9e"
        " \u0130stanbul"
    ),
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440. \u0397 \u03b3\u03ac\u03c4\u03b1.",
    "\u05e9\u05dc\u05d5\u05dd. \u0645\u0631\u062d\u0628\u0627",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f\u4e16\u754c",
    "\uc548\ub155 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0ba4\u0bae\u0bbf\u0bb4\u0bcd \u12a0\u121b\u122d\u129b",
    "\U0001f600 \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    (
        "\u2200x\u2208\u211d: x\u00b2 \u2265 0, \u222b e^{-x} dx \u2260 \u221e, \u00bd \u2460"
        " \uff21\uff22"
    ),
    "\u201cquotes\u201d \u2018single\u2019 \u2014 dash \u2013 dash \u2026 ... !!! ??? ;;;",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/a/b?q=1&r=%20#frag user.name+tag@example.org",
    "control \x00 \x07 \x1b[0m \x7f end",
)
