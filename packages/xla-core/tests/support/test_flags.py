"""Declared environment variables: defaults, values, other options than the environment, wrong words."""

from __future__ import annotations

import pytest

from xla_core.support import flags


@pytest.fixture
def flag():
    made = flags.Flag("XLA_CORE_TESTS_NUMBER", flags.parse_positive, 3, "for a test")
    yield made
    del flags.FLAGS[made.name]


def test_a_value_is_read_when_it_is_asked_for(flag, monkeypatch):
    assert (flag.get(), flag.text()) == (3, "")
    monkeypatch.setenv(flag.name, " 7 ")
    assert (flag.get(), flag.text()) == (7, "7")
    monkeypatch.setenv(flag.name, "")
    assert (flag.get(), flag.text()) == (3, "")


def test_options_stand_for_the_environment(flag, monkeypatch):
    monkeypatch.setenv(flag.name, "7")
    assert flag.get({}) == 3
    assert flag.get({flag.name: "5"}) == 5
    assert flag.text({flag.name: " 5"}) == "5"


def test_a_wrong_value_names_the_variable(flag):
    with pytest.raises(ValueError, match=r"XLA_CORE_TESTS_NUMBER='0'.*whole number of at least 1"):
        flag.get({flag.name: "0"})


def test_fractions_are_in_order():
    assert flags.parse_fractions("0.9:0.5") == (0.5, 0.9)
