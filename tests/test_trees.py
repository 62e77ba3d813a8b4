"""Finding, replacing and naming the tensors of a batch; finding the loss of a step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from gradprune.errors import PruneError
from gradprune.trees import leaves, lookup, loss_of, map_tensors

Pair = namedtuple("Pair", "first second")
A, B = torch.zeros(2), torch.ones(3)


@dataclass(frozen=True)
class Record:
    advantages: torch.Tensor
    label: str = "x"
    extra: dict[str, Any] = field(default_factory=dict)


class Batch:
    def __init__(self) -> None:
        self.tensors = {"mask": A}


class ReadOnly(Mapping):
    def __init__(self, data):
        self._data = data

    def __getitem__(self, key):
        return self._data[key]

    def __iter__(self):
        return iter(self._data)

    def __len__(self):
        return len(self._data)


class TensorDictLike:
    """The part of a TensorDict's interface that is used: it is no Mapping and iterates over rows."""

    batch_size = torch.Size([2])

    def __init__(self, source):
        self._source = dict(source)

    def keys(self):
        return self._source.keys()

    def to_dict(self):
        return dict(self._source)

    def __getitem__(self, key):
        return self._source[key]

    def __setitem__(self, key, value):
        self._source[key] = value

    def __iter__(self):
        raise AssertionError("rows")

    def __copy__(self):
        return TensorDictLike(self._source)


class AttributeDict(dict):
    def __getattr__(self, key):
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


TREES = [
    ({"a": A, "b": B}, ["t.a", "t.b"]),
    (OrderedDict(a=A, b=B), ["t.a", "t.b"]),
    (defaultdict(list, a=A, b=B), ["t.a", "t.b"]),
    (AttributeDict(a=A, b=B), ["t.a", "t.b"]),
    (ReadOnly({"a": A, "b": B}), ["t.a", "t.b"]),
    (MappingProxyType({"a": A, "b": B}), ["t.a", "t.b"]),
    (TensorDictLike({"a": A, "b": B}), ["t.a", "t.b"]),
    ([A, 1, (B,)], ["t[0]", "t[2][0]"]),
    (Pair(A, B), ["t.first", "t.second"]),
    (Record(A, extra={"ref": B}), ["t.advantages", "t.extra.ref"]),
    (SimpleNamespace(meta=SimpleNamespace(mask=A), ref=B), ["t.meta.mask", "t.ref"]),
    (Batch(), ["t.tensors.mask"]),
    (A, ["t"]),
]


@pytest.mark.parametrize("tree, names", TREES, ids=lambda value: type(value).__name__)
def test_names_and_replaces(tree, names):
    before = leaves(tree, "t")
    assert [name for name, _ in before] == names
    new = map_tensors(tree, lambda tensor: tensor + 10)
    assert type(new) is type(tree) or isinstance(tree, torch.Tensor)
    after = leaves(new, "t")
    assert [name for name, _ in after] == names
    assert all(torch.equal(a + 10, b) for (_, a), (_, b) in zip(before, after))
    assert all(a is b for (_, a), (_, b) in zip(before, leaves(tree, "t"))), "the original was changed"


def test_keeps_parts_without_tensors():
    config = {"eps": 0.2, "names": ["a"]}
    tree = {"config": config, "mask": A}
    assert map_tensors(tree, torch.clone)["config"] is config
    assert map_tensors(config, torch.clone) is config


def test_ends_on_a_cycle():
    batch = Batch()
    batch.owner = batch
    assert leaves(batch, "t") == [("t.tensors.mask", A)]
    assert torch.equal(map_tensors(batch, lambda tensor: tensor + 1).tensors["mask"], A + 1)


def test_shared_containers_are_walked_once():
    """A graph of objects that share others has too many names to walk each."""
    shared = {"mask": A}
    for _ in range(60):
        shared = {"left": shared, "right": shared}
    ((name, tensor),) = leaves(shared, "t")
    assert tensor is A and name == "t" + ".left" * 60 + ".mask"
    new = map_tensors(shared, lambda tensor: tensor + 1)
    assert new["left"] is new["right"] and new is not shared


def test_two_names_of_a_tensor_are_two_leaves():
    assert leaves({"a": A, "b": A}) == [("a", A), ("b", A)]


def test_does_not_open_modules_and_functions():
    assert leaves({"model": torch.nn.Linear(2, 2), "fn": len, "mask": A}) == [("mask", A)]


def test_model_output():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutput(loss=A.sum(), logits=B)
    assert [name for name, _ in leaves(output)] == ["loss", "logits"]
    new = map_tensors(output, lambda tensor: tensor + 1)
    assert type(new) is type(output)
    assert torch.equal(new.logits, B + 1) and torch.equal(new["logits"], B + 1) and torch.equal(output.logits, B)


def test_lookup_by_key_attribute_and_index():
    tree = {"meta": SimpleNamespace(mask=A), "parts": [B, Pair(A, B)], "keys": B}
    assert lookup(tree, "meta.mask") is A
    assert lookup(tree, "parts[0]") is B
    assert lookup(tree, "parts[1].second") is B
    assert lookup(tree, "keys") is B, "a key wins over a method of its name"


def test_lookup_lists_the_names():
    with pytest.raises(PruneError, match=r"no 'adv' in a dict: it has advantages, meta\.mask"):
        lookup({"advantages": A, "meta": {"mask": B}}, "adv")


LOSS = torch.tensor(1.0)


@pytest.mark.parametrize(
    "output",
    [LOSS, (LOSS, {}), [LOSS], {"loss": LOSS, "kl": B}, SimpleNamespace(loss=LOSS), Pair(LOSS, 3)],
    ids=lambda value: type(value).__name__,
)
def test_loss_of(output):
    assert loss_of(output) is LOSS


@pytest.mark.parametrize(
    "output, said",
    [
        (None, "a NoneType"),
        ({"kl": A}, "keys 'kl'"),
        (("x", LOSS), "a tuple of str, Tensor"),
        (B, "shape"),
        ({}, "none"),
    ],
    ids=str,
)
def test_loss_of_says_what_it_got(output, said):
    with pytest.raises(PruneError, match=said):
        loss_of(output)
