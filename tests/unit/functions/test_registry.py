"""Functions by name, as an executor described them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from callyard.errors import ErrorKind, ProtocolError, UsageError
from callyard.functions.bundle import Bundle
from callyard.functions.function import Promises
from callyard.functions.registry import FunctionSpec, Registry, UnknownFunction
from callyard.ids import Digest, FunctionId
from callyard.wire.messages import DescribedFunction, DescribedPayload, WireError

BUNDLE = Bundle("flights", {"flights.py": b"def assess(): ...\n"})


def described(*functions: DescribedFunction, digest: str = BUNDLE.digest) -> DescribedPayload:
    return DescribedPayload(Digest(digest), list(functions), installed_packages=["msgspec==1"])


def named(name: str, promises: bytes = b"{}") -> DescribedFunction:
    return DescribedFunction(
        FunctionId(name), f"flights:{name}", f"{name}()", promises=msgspec.Raw(promises), takes_row=True, line=3
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gen", "gen is a generator function: return a list"),
        ("later", "later is a generator function: return a list"),
        ("Plane", "Plane is a class: write a function that uses it"),
        ("_own", "_own begins with an underscore, so it is private: rename it"),
        ("outer", "there are: assess"),
        ("gone", "there are: assess"),
    ],
)
def test_what_cannot_be_called_says_why(name: str, reason: str) -> None:
    source = (
        b"def assess(): ...\ndef gen():\n  for x in []:\n    yield x\nasync def later(): yield 1\n"
        b"class Plane: ...\ndef _own(): ...\ndef outer():\n  def inner(): yield 1\n"
    )
    bundle = Bundle("flights", {"flights.py": source})
    registry = Registry.from_description(bundle, described(named("assess"), digest=bundle.digest))
    with pytest.raises(UnknownFunction) as caught:
        registry.get(name)
    assert str(caught.value).endswith(f"; {reason}")


def test_functions_in_the_order_of_their_description() -> None:
    registry = Registry.from_description(BUNDLE, described(named("distance"), named("assess", b'{"pure":true}')))
    assert registry.names() == ["distance", "assess"]
    assert [spec.name for spec in registry] == ["distance", "assess"]
    assert (len(registry), "assess" in registry, "gone" in registry) == (2, True, False)
    assert registry.installed_packages == ("msgspec==1",)
    assert registry.get("assess") == FunctionSpec(
        name=FunctionId("assess"),
        digest=BUNDLE.digest,
        entry_selector="flights:assess",
        signature="assess()",
        promises=Promises(pure=True),
        takes_row=True,
        line=3,
    )


def test_an_unknown_name_is_told_with_what_is_close() -> None:
    registry = Registry.from_description(BUNDLE, described(named("distance"), named("assess")))
    with pytest.raises(UnknownFunction) as caught:
        registry.get("asess")
    assert str(caught.value) == "no function 'asess' in flights.py; did you mean 'assess'?"
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownFunction, match=r"no function 'x' in flights\.py; there are: distance, assess"):
        registry.get("x")


def test_many_names_are_not_all_listed() -> None:
    registry = Registry.from_description(BUNDLE, described(*(named(f"name{n}") for n in range(25))))
    with pytest.raises(UnknownFunction, match=r"name9 and 15 more$"):
        registry.get("q")


def test_a_name_that_is_there_is_refused_unless_overridden() -> None:
    registry = Registry.from_description(BUNDLE, described(named("assess"), named("distance")))
    spec = msgspec.structs.replace(registry.get("assess"), line=9)
    with pytest.raises(UsageError, match="there is a function 'assess' already: pass override=True"):
        registry.add(spec)
    registry.add(spec, override=True)
    assert registry.get("assess").line == 9
    assert registry.names() == ["assess", "distance"]


def test_a_target_has_its_functions_once_it_is_described(tmp_path: Path) -> None:
    file = tmp_path / "flights.py"
    file.write_text("raise SystemExit('this process must not import it')\n")
    (tmp_path / "data.csv").write_text("a\n")
    registry = Registry.for_target(file, include=["*.csv"])
    assert list(registry.bundle.files) == ["data.csv", "flights.py"]
    assert (registry.is_described, registry.names()) == (False, [])
    with pytest.raises(UsageError, match=r"the functions of flights\.py are not known yet: start a Worker"):
        registry.get("assess")
    registry.adopt(described(named("assess"), digest=registry.bundle.digest))
    assert registry.is_described
    assert registry.get("assess").digest == registry.bundle.digest


def test_a_missing_target_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        Registry.for_target(tmp_path / "gone.py")


def test_a_bundle_that_cannot_be_loaded_is_a_usage_error() -> None:
    error = WireError(ErrorKind.INTERNAL, "flights.py:12: NameError: name 'x' is not defined")
    with pytest.raises(UsageError, match=r"^flights\.py:12: NameError: name 'x' is not defined$"):
        Registry.from_description(BUNDLE, DescribedPayload(BUNDLE.digest, error=error))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (described(named("a"), digest="0" * 64), "described digest '0+', expected"),
        (described(named("a"), named("a")), "described two functions of one name"),
        (described(named("a", b'{"timeout_ms":0}')), r"promises of 'a': timeout_ms must be in 1\.\."),
        (described(named("a", b'{"pure":"yes"}')), "promises of 'a': Expected `bool`"),
        (described(named("a", b"{")), "promises of 'a'"),
    ],
)
def test_an_answer_that_cannot_be_true_is_a_protocol_error(answer: DescribedPayload, message: str) -> None:
    """An executor runs user code: its word is checked."""
    registry = Registry(BUNDLE)
    with pytest.raises(ProtocolError, match=message):
        registry.adopt(answer)
    assert not registry.is_described
    assert len(registry) == 0
