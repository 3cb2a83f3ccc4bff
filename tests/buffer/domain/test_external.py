"""The book of external payloads: what is let go, when, and once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.buffer.domain.external import ExternalBook, Externals
from services.buffer.domain.outputs import Payload
from services.runtime.errors import TurnoutError

A, B = Payload("a", 10, 1, store="ray"), Payload("b", 20, 2, store="ray")
KEY_A, KEY_B = ("ray", "a"), ("ray", "b")


def told(book: ExternalBook, store: str = "ray") -> list[str]:
    return [payload.id for payload in book.waiting(store, 0, 1000)[0]]


def reason(book: ExternalBook, payload: Payload) -> str:
    with pytest.raises(TurnoutError) as caught:
        book.check("p", payload)
    return caught.value.reason


def test_what_nobody_names_is_told_until_it_is_acknowledged() -> None:
    """An owner that crashes between hearing and deleting must hear it again."""
    book = ExternalBook()
    book.name(A)
    book.name(B)
    assert told(book) == []
    book.drop([KEY_A])
    assert told(book) == told(book) == ["a"]
    assert told(book, "file") == []
    assert book.acknowledge("ray", ["a", "a", "unknown"]) == ["a"]
    assert book.acknowledge("ray", ["a"]) == []
    assert told(book) == []


def test_a_reader_goes_on_behind_what_it_saw() -> None:
    """A follower that read everything anew after each change would cost the square of what is let go."""
    book = ExternalBook()
    for number in range(10):
        book.name(Payload(str(number), 1, 1, store="file" if number % 2 else "ray"))
        book.drop([("file" if number % 2 else "ray", str(number))])
    first, seen = book.waiting("ray", 0, 2)
    second, seen = book.waiting("ray", seen, 10)
    assert [payload.id for payload in [*first, *second]] == ["0", "2", "4", "6", "8"]
    assert book.waiting("ray", seen, 10)[0] == []
    book.acknowledge("ray", ["0", "2", "4", "6"])
    assert told(book) == ["8"]


def test_an_id_is_one_payload_and_not_used_again_before_it_is_deleted() -> None:
    """An owner that deletes a key late would delete the new bytes under it."""
    book = ExternalBook()
    book.name(A)
    assert reason(book, Payload("a", 11, 1, store="ray")) == "PAYLOAD_MISMATCH"
    assert reason(book, Payload("a", 10, 7, store="ray")) == "PAYLOAD_MISMATCH"
    book.check("p", A)
    book.drop([KEY_A])
    assert reason(book, A) == "PAYLOAD_RELEASED"
    book.acknowledge("ray", ["a"])
    book.check("p", A)


def test_two_books_that_name_a_payload_both_let_it_go() -> None:
    """While a restore is under way the old content and the new may name the same."""
    book = ExternalBook()
    book.name(A)
    book.name(A)
    book.drop([KEY_A])
    assert told(book) == []
    book.drop([KEY_A])
    assert told(book) == ["a"]


def test_a_checkpoint_holds_what_was_named_when_it_began() -> None:
    """A restore that finds references to deleted bytes has lost the groups it promised."""
    book = ExternalBook()
    book.name(A)
    book.hold("one")
    book.name(B)
    book.drop([KEY_A])
    book.drop([KEY_B])
    assert told(book) == ["b"]
    assert reason(book, Payload("a", 11, 1, store="ray")) == "PAYLOAD_MISMATCH"
    book.unhold("one")
    assert told(book) == ["b", "a"]


def test_a_restored_payload_is_held_as_before() -> None:
    """Named again from a checkpoint, it is still in that checkpoint."""
    book = ExternalBook()
    book.name(A)
    book.hold("one")
    book.drop([KEY_A])
    book.name(A)
    book.drop([KEY_A])
    assert told(book) == []
    book.unhold("one")
    assert told(book) == ["a"]


def test_a_run_that_nobody_watches_gives_up_the_oldest_and_counts_them() -> None:
    """Its releases must not fill the memory of the others, nor vanish uncounted."""
    book = ExternalBook(limit=2)
    for number in range(5):
        book.name(Payload(str(number), 1, 1, store="ray"))
        book.drop([("ray", str(number))])
    assert told(book) == ["3", "4"]
    assert book.given_up == 3


def test_listeners_hear_of_every_release() -> None:
    """Nothing polls."""
    book, heard = ExternalBook(), []
    book.listeners.add(lambda: heard.append(1))
    book.name(A)
    assert not heard
    book.drop([KEY_A])
    assert heard


def test_a_book_outlives_its_run_while_something_is_left() -> None:
    """An owner learns of the payloads of a deleted run; later the book is no longer kept."""
    externals = Externals()
    book = externals.of("run")
    book.name(A)
    book.drop([KEY_A])
    externals.discard_empty("run")
    assert externals.get("run") is book
    book.acknowledge("ray", ["a"])
    externals.discard_empty("run")
    assert externals.get("run") is None


MOVES = st.lists(st.tuples(st.sampled_from(["name", "drop", "hold", "unhold"]), st.integers(0, 3)), max_size=40)


@given(MOVES)
def test_nothing_is_let_go_while_it_is_named_or_in_a_checkpoint(moves: list[tuple[str, int]]) -> None:
    """Against a model that writes down what each checkpoint saw."""
    book = ExternalBook()
    named: set[str] = set()
    seen: dict[str, set[str]] = {}
    gone: set[str] = set()
    for kind, number in moves:
        name = str(number)
        if kind == "name" and name not in named and name not in gone:
            book.name(Payload(name, 1, 1, store="s"))
            named.add(name)
        elif kind == "drop" and name in named:
            named.discard(name)
            book.drop([("s", name)])
        elif kind == "hold" and name not in seen:
            seen[name] = set(named)
            book.hold(name)
        elif kind == "unhold" and name in seen:
            del seen[name]
            book.unhold(name)
        needed = named.union(*seen.values())
        now = set(told(book, "s"))
        assert not now & needed
        gone |= now
        assert gone == now
        held = {key[1] for key in book.held}
        # What was named again may be held by a checkpoint that began in between.
        assert held >= needed - named
        assert seen or not held
