"""Text is released piece by piece, is never taken back, and adds up to the decoding of all ids."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.support.runtimes import CODEC, RUNAWAY_TEXT, runaway_codec
from toolkit.errors import CheckpointError, RequestError
from toolkit.speculative.text import MAX_BROKEN_CHARACTERS, TextCodec

WORDS = ["▁the", "▁cat", "s", "▁", "é", "▁sat", "ing", "▁mat"]


def metaspace_codec() -> TextCodec:
    """Llama 2's format: words have a leading ▁, bytes are <0xNN> if the vocabulary has no piece,
    and the first space is stripped.
    """
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *WORDS]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return TextCodec(tokenizer)


METASPACE = metaspace_codec()
WORD_IDS = {word: 257 + i for i, word in enumerate(WORDS)}
SPECIAL = 257 + len(WORDS)


def chunks_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *[cut % (len(ids) + 1) for cut in cuts]})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def stream(
    codec: TextCodec,
    chunks: list[list[int]],
    prompt: list[int] | None = None,
    stop: tuple[str, ...] = (),
) -> list[str]:
    texts, out = codec.stream(prompt or [], stop), []
    for chunk in chunks:
        _, text = texts.push(chunk)
        out.append(text)
        if texts.stopped_by is not None:
            break
    return [*out, texts.finish()]


@settings(deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_chunks_add_up_to_the_text(text: str, cuts: list[int]) -> None:
    ids = CODEC.encode(text)
    assert "".join(stream(CODEC, chunks_of(ids, cuts))) == text


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 255), max_size=60), cuts=st.lists(st.integers(0, 200), max_size=12)
)
def test_any_bytes_add_up_to_their_decoding(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(CODEC, chunks_of(ids, cuts))) == CODEC.decode(ids)


PIECES = st.sampled_from(
    [
        *[[token] for token in WORD_IDS.values()],
        [SPECIAL],
        [1 + 0x41],
        [1 + 0xE2, 1 + 0x82, 1 + 0xAC],
    ]
)


@settings(deadline=None)
@given(pieces=st.lists(PIECES, max_size=40), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_word_pieces_and_byte_fallback_add_up_to_the_continuation_of_the_prompt(
    pieces: list[list[int]], cuts: list[int]
) -> None:
    ids = [token for piece in pieces for token in piece]
    prompt = [SPECIAL, WORD_IDS["▁the"]]
    whole = METASPACE.decode([*prompt, *ids])
    assert "the" + "".join(stream(METASPACE, chunks_of(ids, cuts), prompt)) == whole


def test_a_word_keeps_its_leading_space_after_a_prompt() -> None:
    assert stream(METASPACE, [[WORD_IDS["▁cat"]], [WORD_IDS["s"]]], [WORD_IDS["▁the"]]) == [
        " cat",
        "s",
        "",
    ]


def test_broken_bytes_between_words_do_not_hurt_the_words() -> None:
    ids = [WORD_IDS["▁the"], 1 + 0xE2, 1 + 0x82, WORD_IDS["▁cat"]]
    assert stream(METASPACE, [[token] for token in ids]) == [
        "the",
        "",
        "",
        "\N{REPLACEMENT CHARACTER}" * 2 + " cat",
        "",
    ]


@pytest.mark.parametrize("before", range(8))
def test_bytes_after_a_prompt_of_bytes_are_not_broken(before: int) -> None:
    """The context is a few tokens, so it may begin inside one of the prompt's characters."""
    emoji = [1 + byte for byte in "\N{GRINNING FACE}".encode()]
    prompt = [SPECIAL, WORD_IDS["▁the"], *emoji, *[WORD_IDS["s"]] * before, *emoji, *emoji]
    for cuts in ([], [1, 2, 3], [2]):
        assert (
            "".join(stream(METASPACE, chunks_of([*emoji, WORD_IDS["▁cat"]], cuts), prompt))
            == "\N{GRINNING FACE} cat"
        )


@pytest.mark.parametrize("codec", [CODEC, METASPACE])
@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("size", [4, 40])
def test_chunks_that_always_end_inside_a_character_are_not_broken(
    codec: TextCodec, stop: tuple[str, ...], size: int
) -> None:
    text = "\N{GRINNING FACE}" * 50
    ids = codec.encode(text)[-200:]
    chunks = [ids[:1], *[ids[start : start + size] for start in range(1, 200, size)]]
    assert "".join(stream(codec, chunks, stop=stop)) == text


def test_a_character_after_many_broken_bytes_is_held_back() -> None:
    broken = CODEC.encode("\N{EURO SIGN}")[1:2]
    word, emoji = CODEC.encode("ab"), CODEC.encode("\N{GRINNING FACE}")
    ids = [*broken * 3, *word] * 15 + [*broken * 3, *emoji]
    for cut in range(60, len(ids)):
        assert "".join(
            stream(CODEC, [ids[:30], ids[30:60], ids[60:cut], ids[cut:]])
        ) == CODEC.decode(ids)


def test_special_tokens_are_not_printed() -> None:
    ids = [WORD_IDS["▁the"], SPECIAL, WORD_IDS["▁cat"]]
    assert "".join(stream(METASPACE, [[token] for token in ids])) == "the cat"


def test_an_unfinished_character_is_held_back_and_replaced_at_the_end() -> None:
    euro = CODEC.encode("€")
    assert stream(CODEC, [[token] for token in euro]) == ["", "", "€", ""]
    assert stream(CODEC, [CODEC.encode("a"), euro[:2]]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert stream(CODEC, [euro[:2], CODEC.encode("a")]) == ["", "\N{REPLACEMENT CHARACTER}a", ""]


def test_endless_broken_bytes_are_released_in_time() -> None:
    broken = CODEC.encode("€")[0]
    out = stream(CODEC, [[broken]] * (3 * MAX_BROKEN_CHARACTERS))
    assert "".join(out) == "\N{REPLACEMENT CHARACTER}" * (3 * MAX_BROKEN_CHARACTERS)
    assert len("".join(out[: 2 * MAX_BROKEN_CHARACTERS])) >= MAX_BROKEN_CHARACTERS


def test_the_beginning_of_a_stop_word_is_held_back() -> None:
    chunks = [CODEC.encode(piece) for piece in ("on", "e EN", "X two E", "N", "D three")]
    assert stream(CODEC, chunks, stop=("END",)) == ["on", "e ", "ENX two ", "", "", ""]
    assert stream(CODEC, chunks[:4], stop=("END",)) == ["on", "e ", "ENX two ", "", "EN"]


def test_a_stop_word_names_the_token_that_completed_it() -> None:
    texts = CODEC.stream([], ("wo", "two"))
    assert texts.push(CODEC.encode("one two three")) == (7, "one ")  # "two" begins before "wo"
    assert texts.stopped_by == "two"
    assert texts.finish() == ""


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_word_however_it_is_cut(text: str, stop: list[str]) -> None:
    ids = CODEC.encode(text)
    complete = next(
        (end for end in range(len(text) + 1) if any(word in text[:end] for word in stop)), None
    )
    expected = (
        text
        if complete is None
        else text[: min(text[:complete].index(word) for word in stop if word in text[:complete])]
    )
    assert "".join(stream(CODEC, [[token] for token in ids], stop=tuple(stop))) == expected
    assert "".join(stream(CODEC, [ids], stop=tuple(stop))) == expected


def test_encoding_adds_what_the_tokenizer_adds_and_has_no_limits(
    tmp_path: Path, tiny_pair: tuple[Path, Path]
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_pair[0] / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = TextCodec.from_file(tmp_path / "tokenizer.json").encode("a longer text")
    assert len(ids) == 1 + len("a longer text")
    assert ids[0] == tokenizer.token_to_id("<|bos|>")


def test_a_damaged_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TextCodec.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        TextCodec.from_file(tmp_path / "nowhere.json")


def test_other_threads_run_while_a_long_prompt_is_encoded() -> None:
    """With Python's lock held, the other thread would wake once, when the prompt is done."""
    wakes, stop = itertools.count(), threading.Event()

    def wake() -> None:
        while not stop.wait(0.001):
            next(wakes)

    text = "def read_config(path): return path\n" * 20_000
    thread = threading.Thread(target=wake)
    thread.start()
    CODEC.encode(text)
    stop.set()
    thread.join()
    assert next(wakes) > 5


@pytest.mark.parametrize(
    ("text", "word", "length"),
    [("a\n", "\n\n", 1), ("aab", "aabab", 3), ("abab", "babc", 3), ("x", "y", 0)],
)
def test_what_may_become_a_stop_word_is_held_back(text: str, word: str, length: int) -> None:
    stream = CODEC.stream([], (word,))
    _, released = stream.push(CODEC.encode(text))
    assert text == released + text[len(text) - length :]
    assert released + stream.finish() == text


def test_a_text_that_the_tokenizer_gives_up_is_refused_and_the_next_is_encoded() -> None:
    """The library's limit of tries ends as a PanicException, which is not an Exception."""
    codec = runaway_codec()
    with pytest.raises(RequestError, match=r"cannot encode this text: .*retry-limit") as refused:
        codec.encode(RUNAWAY_TEXT)
    assert not isinstance(refused.value.__cause__, Exception)
    assert codec.encode("abc") == CODEC.encode("abc")
    with pytest.raises(RequestError, match="cannot encode this text"):
        codec.encode("\ud800")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_process_is_no_refusal(error: type[BaseException]) -> None:
    class Interrupted:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise error

        def no_truncation(self) -> None: ...
        def no_padding(self) -> None: ...
        def get_vocab_size(self, with_added_tokens: bool) -> int:
            return 1

    with pytest.raises(error):
        TextCodec(Interrupted()).encode("a")  # type: ignore[arg-type]
