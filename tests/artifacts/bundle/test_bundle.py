"""The bundle: same content same bytes, and everything that is not what was written is refused, naming both values."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save, save_file
from torch import Tensor

from kvcal.methods.data_free import Preset
from kvcal_artifacts import load_bundle, load_cache
from kvcal_artifacts.bundle import FORMAT, Bundle, Fingerprint
from kvcal_artifacts.bundle.canonical import canonical, sha256_text, tensor_bytes
from kvcal_artifacts.codecs import Predicted, ResidualVQ, Shape
from kvcal_artifacts.errors import CorruptBundle, IncompatibleBundle, KVCalError
from kvcal_artifacts.files import file_behind, write_atomically, write_together
from kvcal_artifacts.scheme import LayerCodecs, Scheme, Windows
from tests.support.architectures import TINY, build, initialise, rope
from tests.support.models_fixture import ROOT, denied, file_size_limit, small_disk
from tests.support.schemes import BLOCK, Fed, aqua, chained, tiny

PROVENANCE = {"method": "aqua-kv", "settings": {"ridge": 1e-05, "third": 1 / 3}, "text": {"source": "Straße ≠ 道"}}
METRICS = {"key_relative_error": 1.2345678901234567e-09, "layers": [{"a": 0.1}]}


def made(scheme: Scheme, model: Any, revision: str | None = None) -> Bundle:
    return Bundle(Fingerprint.of(model, revision), scheme, copy.deepcopy(PROVENANCE), copy.deepcopy(METRICS))


def fed() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Fed()


@cache
def content() -> bytes:
    """A bundle as small as can be with a predictor: 3 layers."""
    return made(aqua("llama"), tiny("llama"), "abc").to_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.kvcal.safetensors"


def loaded(data: bytes, path: Path) -> Bundle:
    path.write_bytes(data)
    return load_bundle(path)


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def forged(change: Change, *, relist: bool = True) -> bytes:
    """The small bundle with a header and tensors changed by somebody who knows how hashes are made.

    relist: the header's list of tensors follows what became of them.
    """
    header, tensors = json.loads(metadata(content()))["header"], load(content())
    change(header, tensors)
    if relist:
        header["tensors"] = {name: listed(t) for name, t in tensors.items()}
    return wrapped(header, tensors)


def metadata(data: bytes) -> str:
    return str(json.loads(data[8 : header_end(data)])["__metadata__"][FORMAT])


def listed(tensor: Tensor) -> dict[str, Any]:
    digest = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "sha256": digest}


def wrapped(header: Any, tensors: dict[str, Tensor]) -> bytes:
    text = canonical({"header": header, "sha256": sha256_text(canonical(header))})
    return bytes(save(tensors, metadata={FORMAT: text}))


def predictor_tensor(tensors: dict[str, Tensor]) -> str:
    return min(name for name in tensors if name.endswith("predictor.weight"))


# Same content, same bytes.


SCHEMES = {
    "aqua": lambda: (aqua("llama"), tiny("llama")),
    "mlp": lambda: (chained("mlp"), fed()),
    "uniform": lambda: (Preset("uniform-3", "uniform-2-channel").scheme(tiny("qwen2")), tiny("qwen2")),
    "exact": lambda: (Preset("exact-bf16", "exact-16", "pre_rope").scheme(tiny("qwen3")), tiny("qwen3")),
    "skipped": lambda: (skipping(), tiny("llama")),
}


def skipping() -> Scheme:
    plain = Preset("higgs-2", "higgs-2", block=BLOCK).scheme(tiny("llama"))
    return Scheme(plain.windows, plain.frame, (None, *plain.layers[1:]), {0: "left alone"})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_round_trip_changes_no_byte(name: str, path: Path) -> None:
    bundle = made(*SCHEMES[name]())
    digest = bundle.write(path)
    data = path.read_bytes()
    again = load_bundle(path)
    assert again.to_bytes() == data == bundle.to_bytes()
    assert digest == hashlib.sha256(data).hexdigest()
    assert (again.fingerprint, again.provenance, again.metrics) == (bundle.fingerprint, PROVENANCE, METRICS)
    assert again.scheme.bits_per_value() == bundle.scheme.bits_per_value()
    assert (again.scheme.windows, again.scheme.skipped) == (bundle.scheme.windows, bundle.scheme.skipped)
    assert again.name == "x"


def sha256_of(bundle: Bundle) -> str:
    return hashlib.sha256(bundle.to_bytes()).hexdigest()


def test_another_process_writes_the_same_bytes() -> None:
    """safetensors orders metadata by a hash that differs in each process, Python its sets too."""
    script = (
        "from tests.artifacts.bundle import test_bundle as t; print(t.sha256_of(t.made(t.chained('mlp'), t.fed())))"
    )
    path = [ROOT, ROOT / "kernels", ROOT / "artifacts", os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sha256_of(made(chained("mlp"), fed()))


def test_equal_tensors_are_stored_once(path: Path) -> None:
    bundle = loaded(content(), path)
    assert len(load(content())) < sum(len(c.tensors()) for p in bundle.scheme.layers if p for c in (p.key, p.value))


@pytest.mark.parametrize("parts", [lambda base: base[:2], lambda base: base.view(2, 16, 8)], ids=["a part", "all"])
def test_tensors_of_one_memory_are_stored_apart(parts: Callable[[Tensor], Tensor], path: Path) -> None:
    base = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)).half()
    shape = Shape(2, 8, 8)
    pair = LayerCodecs(
        ResidualVQ(shape, "key", [list(range(8))], [base], None),
        ResidualVQ(shape, "value", [list(range(8))], [parts(base)], None),
    )
    bundle = Bundle(Fingerprint("llama", 1, 2, 8, {}, ""), Scheme(Windows(0, 8, 8), "post_rope", (pair,)), {}, {})
    [again] = loaded(bundle.to_bytes(), path).scheme.layers
    assert again is not None
    for codec, before in ((again.key, base), (again.value, parts(base))):
        assert torch.equal(codec.tensors()["codebooks.0"], before)


def test_bytes_hold_no_nan(path: Path) -> None:
    scheme = copy.deepcopy(aqua("llama"))
    pair = scheme.layers[1]
    assert pair is not None and isinstance(pair.key, Predicted)
    pair.key.predictor.weights["bias"][3] = float("inf")
    with pytest.raises(
        KVCalError, match=r"layers\.1\.key\.predictor\.bias holds a NaN or infinity; nothing was written"
    ):
        made(scheme, tiny("llama")).write(path)
    assert not path.exists()


# Damage.


def test_case_and_parity_flips_anywhere_in_the_header_are_noticed(path: Path) -> None:
    """Bit 5 turns e into E: 1E-05 is the same number as 1e-05, and still not the same file.

    Each bit at every third byte; `test_every_flipped_bit_is_noticed` draws from all bits of all bytes."""
    data = content()
    path.write_bytes(data)
    with path.open("r+b") as file:  # in place: 5,000 files cut and written again wait for the disk
        for bit in (0, 5):
            for offset in range(bit % 3, header_end(data), 3):
                os.pwrite(file.fileno(), bytes([data[offset] ^ 1 << bit]), offset)
                with pytest.raises(KVCalError):
                    load_bundle(path)
                os.pwrite(file.fileno(), data[offset : offset + 1], offset)
    assert path.read_bytes() == data


def flipped(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


@settings(max_examples=300)
@given(data=st.data())
def test_every_flipped_bit_is_noticed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    position = data.draw(st.integers(0, 8 * len(content()) - 1))
    with pytest.raises((CorruptBundle, IncompatibleBundle)) as refused:
        loaded(flipped(content(), position), tmp_path_factory.getbasetemp() / "flip.kvcal.safetensors")
    if position // 8 >= header_end(content()):
        assert "has hash" in str(refused.value) and "header says" in str(refused.value)


@settings(max_examples=100)
@given(length=st.integers(0, len(content()) - 1) | st.integers(0, 64))
def test_every_truncation_is_noticed(length: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(CorruptBundle) as refused:
        loaded(content()[:length], tmp_path_factory.getbasetemp() / "short.kvcal.safetensors")
    assert refused.value.exit_code == 4
    if length <= header_end(content()) - 1:
        assert str(length) in str(refused.value)


def test_a_longer_file_is_noticed(path: Path) -> None:
    for surplus in (b"\0", b" " * 8, content()):
        with pytest.raises(CorruptBundle):
            loaded(content() + surplus, path)


def test_a_header_changed_by_hand_names_both_hashes(path: Path) -> None:
    good = json.loads(metadata(content()))
    bad = copy.deepcopy(good)
    bad["header"]["scheme"]["windows"]["sink"] = 64
    with pytest.raises(CorruptBundle) as refused:
        loaded(bytes(save(load(content()), metadata={FORMAT: canonical(bad)})), path)
    assert good["sha256"][:16] in str(refused.value)
    assert sha256_text(canonical(bad["header"]))[:16] in str(refused.value)


@pytest.mark.parametrize("repeated", ["tensor", "metadata", "inside"])
def test_duplicate_names_are_refused(repeated: str, path: Path) -> None:
    """safetensors and json take the last of two entries; another program may take the first."""
    data = content()
    text = data[8 : header_end(data)].decode().rstrip()
    outer = json.loads(text)
    name = next(name for name in outer if name != "__metadata__")
    if repeated == "tensor":
        text = text[:-1] + f",{json.dumps(name)}:{json.dumps(outer[name])}}}"
    elif repeated == "metadata":
        text = text[:-1] + f',"__metadata__":{json.dumps(outer["__metadata__"])}}}'
    else:
        inner = metadata(data).replace('{"header":{', '{"header":{"version":1,', 1)
        text = json.dumps({**outer, "__metadata__": {FORMAT: inner}})
    twice = text.encode()
    with pytest.raises(CorruptBundle, match="canonical" if repeated == "inside" else "occurs twice"):
        loaded(len(twice).to_bytes(8, "little") + twice + data[header_end(data) :], path)


# Files that are whole, and wrong.


def drop(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors[predictor_tensor(tensors)]


def add(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["more"] = torch.zeros(2)


def reshape(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = predictor_tensor(tensors)
    tensors[name] = tensors[name][:-1].contiguous()


def recast(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = predictor_tensor(tensors)
    tensors[name] = tensors[name].float()


def retype(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = predictor_tensor(tensors)
    tensors[name] = tensors[name].view(torch.int16)


def poison(value: float) -> Change:
    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[predictor_tensor(tensors)][1, 2] = value

    return change


def shorten(ending: str) -> Change:
    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = min(name for name in tensors if name.endswith(ending))
        tensors[name] = tensors[name][:-1].contiguous()

    return change


def extra_in_codec(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    refs = header["scheme"]["layers"][0]["key"]["tensors"]
    refs["more"] = next(iter(refs.values()))


def set_in(*keys: Any, to: Any) -> Change:
    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        at: Any = header
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = to

    return change


def predict_first_layer(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    layers = header["scheme"]["layers"]
    layers[0] = layers[1]


def skip_first_layer(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["scheme"]["layers"][0] = {"skipped": "for a try"}
    used = canonical(header["scheme"])
    for name in [name for name in tensors if f'"{name}"' not in used]:
        del tensors[name]


LAYER = ("scheme", "layers", 1, "key")


def from_package(name: str, package: str, version: str | None = "1", used: bool = True) -> Change:
    """A codec of that name, said to be of a package. used: whether a layer has it."""

    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        header["codecs"] = {name: {"package": package, "version": version}}
        if used:
            set_in(*LAYER, "codec", to=name)(header, tensors)

    return change


FORGERIES: dict[str, tuple[Change, bool, type[KVCalError], list[str]]] = {
    "future version": (set_in("version", to=3), True, IncompatibleBundle, ["version 3", "versions 1 and 2"]),
    "other format": (set_in("format", to="kvcal-x"), True, IncompatibleBundle, ["'kvcal-x'", "'kvcal'"]),
    "missing tensor": (drop, False, CorruptBundle, ["layers.1.key.predictor.weight", "listed but missing"]),
    "missing, unlisted": (drop, True, CorruptBundle, ["layers.1.key.predictor.weight"]),
    "surplus tensor": (add, False, CorruptBundle, ["'more'", "not listed"]),
    "surplus, listed": (add, True, CorruptBundle, ["'more'", "belongs to no layer"]),
    "surplus in codec": (extra_in_codec, True, CorruptBundle, ["'more'"]),
    "misshapen tensor": (reshape, False, CorruptBundle, ["[31, 32]", "[32, 32]"]),
    "misshapen, relisted": (reshape, True, CorruptBundle, ["linear predictor"]),
    "misshapen grid": (shorten("grid"), True, CorruptBundle, ["(255, 2)", "(256, 2)"]),
    "misshapen signs": (shorten("sign"), True, CorruptBundle, ["(31,)", "(32,)"]),
    "other dtype": (recast, False, CorruptBundle, ["float32", "float16"]),
    "same bytes, other dtype": (retype, False, CorruptBundle, ["int16", "float16"]),
    "other numbers": (poison(0.5), False, CorruptBundle, ["has hash", "header says"]),
    "NaN": (poison(float("nan")), True, CorruptBundle, ["layers.1.key.predictor.weight", "NaN or infinity"]),
    "infinity": (poison(float("-inf")), True, CorruptBundle, ["NaN or infinity"]),
    "unknown codec": (set_in(*LAYER, "codec", to="antigravity.Codec"), True, CorruptBundle, ["antigravity", "higgs"]),
    "codec of a package": (
        from_package("x.Codec", "antigravity"),
        True,
        IncompatibleBundle,
        ["codec 'x.Codec' is of package antigravity 1, which is not installed", "pip install antigravity==1"],
    ),
    "codec of a module": (
        from_package("x.Codec", "antigravity", None),
        True,
        IncompatibleBundle,
        ["'x.Codec' is of module antigravity", "register_codec"],
    ),
    "package of no codec": (from_package("x", "acme", used=False), True, CorruptBundle, ["'x' is no codec of another"]),
    "package of our codec": (from_package("higgs", "acme", used=False), True, CorruptBundle, ["'higgs' is no codec"]),
    "no packages": (set_in("codecs", to={}), True, CorruptBundle, ["codecs is empty: must be absent"]),
    "package as an option": (from_package("x", "--index-url=x"), True, CorruptBundle, ["must be a name of letters"]),
    "version as a command": (from_package("x", "acme", "1; rm x"), True, CorruptBundle, ["must be a version of"]),
    "unknown inner codec": (
        set_in(*LAYER, "config", "inner", "codec", to="this"),
        True,
        CorruptBundle,
        ["this", "higgs"],
    ),
    "unknown predictor": (
        set_in(*LAYER, "config", "predictor", "kind", to="antigravity"),
        True,
        CorruptBundle,
        ["antigravity", "linear"],
    ),
    "unknown setting": (
        set_in(*LAYER, "config", "inner", "config", "inner", "config", "n", to=7),
        True,
        CorruptBundle,
        ["higgs", "7"],
    ),
    "unknown frame": (set_in("scheme", "frame", to="mid_rope"), True, CorruptBundle, ["mid_rope", "pre_rope"]),
    "window of -1": (set_in("scheme", "windows", "sink", to=-1), True, CorruptBundle, ["-1", "at least 0"]),
    "other block": (set_in("scheme", "windows", "block", to=0), True, CorruptBundle, ["0", "at least 1"]),
    "other layer count": (set_in("model", "layers", to=5), True, CorruptBundle, ["3", "5"]),
    "first layer predicted": (predict_first_layer, True, CorruptBundle, ["layer"]),
    "predicted from skipped": (skip_first_layer, True, CorruptBundle, ["layer 1", "missing or not compressed"]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused_naming_both_values(name: str, path: Path) -> None:
    change, relist, error, fragments = FORGERIES[name]
    with pytest.raises(error) as refused:
        loaded(forged(change, relist=relist), path)
    assert refused.value.exit_code == 4
    assert str(path) in str(refused.value)
    for fragment in fragments:
        assert fragment in str(refused.value)
    assert not {"antigravity", "this"} & set(sys.modules)


def test_a_forgery_without_a_change_is_the_bundle() -> None:
    assert forged(lambda header, tensors: None) == content()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every entry of nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


ODD: list[Any] = [None, -1, 1.5, "x", [], {}, [[]], {"a": 1}, True, 10**30]


def test_odd_headers_are_refused_or_read_but_never_crash(path: Path) -> None:
    """Every entry of the header taken away, and replaced by something odd: well hashed, and made by a bad program."""
    header = json.loads(metadata(content()))["header"]
    tensors = load(content())
    for number, place in enumerate(places(header)):
        for odd in ("gone", ODD[number % len(ODD)], ODD[(3 * number + 1) % len(ODD)]):
            changed = copy.deepcopy(header)
            at: Any = changed
            for key in place[:-1]:
                at = at[key]
            if odd == "gone":
                del at[place[-1]]
            else:
                at[place[-1]] = odd
            with suppress(CorruptBundle, IncompatibleBundle):
                loaded(wrapped(changed, tensors), path)


@pytest.mark.parametrize("gone", ["format", "version", "model", "scheme", "provenance", "metrics", "tensors"])
def test_a_header_without_a_part_is_refused(gone: str, path: Path) -> None:
    with pytest.raises((CorruptBundle, IncompatibleBundle)):
        loaded(forged(lambda header, tensors: header.pop(gone), relist=False), path)


DEEP = "[" * 100_000 + "]" * 100_000
STRANGE_JSON = [b"[]", b"1", b"null", b'{"__metadata__": [1]}', b'{"__metadata__": {"kvcal": 1}}', b"\xff\xfe", b"{",
                b'{"__metadata__": {"kvcal": "[]"}}', b'{"__metadata__": {"kvcal": "{}"}}', DEEP.encode(),
                b'{"__metadata__": {"kvcal": "{\\"header\\": [], \\"sha256\\": 1}"}}',
                json.dumps({"__metadata__": {"kvcal": DEEP}}).encode(),
                b'{"__metadata__": {"kvcal": "{\\"header\\": {\\"a\\": NaN}, \\"sha256\\": \\"0\\"}"}}']  # fmt: skip


@pytest.mark.parametrize("number", range(len(STRANGE_JSON)))
def test_strange_headers_are_refused(number: int, path: Path) -> None:
    text = STRANGE_JSON[number]
    with pytest.raises((CorruptBundle, IncompatibleBundle)):
        loaded(len(text).to_bytes(8, "little") + text, path)


def test_files_that_are_no_bundles(path: Path, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "plain.safetensors")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("nothing of the kind, but long enough for a header")
    for name, error, says in [
        ("plain.safetensors", IncompatibleBundle, "not a kvcal bundle"),
        ("empty", CorruptBundle, "0 bytes"),
        ("text", CorruptBundle, "truncated or not safetensors"),
        ("none", CorruptBundle, "no such bundle"),
        (".", CorruptBundle, "a folder"),
    ]:
        with pytest.raises(error, match=says):
            load_bundle(tmp_path / name)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("sprung",))


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
def test_a_pickle_is_refused_and_not_run(
    dump: Callable[..., None], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with path.open("wb") as file:
        dump(Trap(), file)
    with pytest.raises(CorruptBundle):
        load_bundle(path)
    assert not (tmp_path / "sprung").exists()


# Another model.


OTHERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "architecture": (lambda: tiny("mistral"), ["architecture: bundle 'llama', model 'mistral'"]),
    "layers": (lambda: TINY["llama"](num_hidden_layers=4), ["layers: bundle 3, model 4"]),
    "heads": (lambda: TINY["llama"](num_key_value_heads=4), ["kv_heads: bundle 2, model 4"]),
    "head_dim": (lambda: TINY["llama"](head_dim=32), ["head_dim: bundle 16, model 32"]),
    "rope": (lambda: TINY["llama"](rope_parameters=rope("default", rope_theta=5e5)), ["10000.0", "500000.0"]),
    "rope kind": (lambda: tiny("llama-yarn"), ["'default'", "'yarn'"]),
    "hidden size": (lambda: TINY["llama"](intermediate_size=96), ["config_sha256"]),
    "weights": (lambda: other_weights(), ["key weights: bundle starts (0.15"]),
}


def other_weights() -> Any:
    model = build("Llama")
    initialise(model, seed=99)
    return model


@pytest.mark.transformers
def test_a_refusal_names_three_differences_and_how_many_more(path: Path) -> None:
    bundle, model = loaded(content(), path), TINY["llama"](num_hidden_layers=4, num_key_value_heads=4, head_dim=32)
    with pytest.raises(IncompatibleBundle) as refused:
        bundle.check(model)
    named = str(refused.value).removeprefix("x was made for another model: ").split("; ")
    assert [one.split(":")[0] for one in named[:3]] == ["layers", "kv_heads", "head_dim"]
    assert len(named) == 4 and re.fullmatch(r"and [1-9]\d* more", named[3])


@pytest.mark.transformers
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused_naming_both_values(name: str, path: Path) -> None:
    make, fragments = OTHERS[name]
    bundle, model = loaded(content(), path), make()
    with pytest.raises(IncompatibleBundle) as refused:
        bundle.check(model)
    for fragment in ("x was made for another model", *fragments):
        assert fragment in str(refused.value)
    with pytest.raises(IncompatibleBundle):
        load_cache(path, model)


def test_another_revision_is_refused_naming_both(path: Path) -> None:
    bundle = loaded(content(), path)
    bundle.check(tiny("llama"), "abc")
    bundle.check(tiny("llama"))
    with pytest.raises(IncompatibleBundle, match="revision: bundle 'abc', model 'abd'"):
        bundle.check(tiny("llama"), "abd")


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_the_same_model_in_another_dtype(dtype: torch.dtype) -> None:
    for name in ("llama", "phi3", "olmo2"):
        full, half = Fingerprint.of(tiny(name)), Fingerprint.of(copy.deepcopy(tiny(name)).to(dtype))
        assert full.config_sha256 == half.config_sha256
        assert full.differences(half) == half.differences(full) == []


GOLDEN = {  # first digits of config_sha256: equal on Transformers 5.17 and 5.23, so a bundle moves between them
    "llama": "2ccc63bd7adab3d8",
    "mistral": "521f1e9dc38404a1",
    "qwen2": "3f2178832c8a560b",
    "qwen3": "923533dcfd8f24cc",
    "phi3": "d41d7fbd0b746368",
    "smollm3": "1c385a4964c26447",
    "granite": "0b220582fc8c10df",
    "olmo2": "75fc4a1a932cdbdc",
    "phi3-partial": "088894da7555576b",
    "phi3-longrope": "7df07587181911d0",
    "llama-yarn": "4559c894bba4245f",
}


@pytest.mark.transformers
@pytest.mark.parametrize("name", GOLDEN)
def test_the_fingerprint_does_not_depend_on_the_version_of_transformers(name: str) -> None:
    assert Fingerprint.of(tiny(name)).config_sha256[:16] == GOLDEN[name]


def test_the_fingerprint_does_not_depend_on_how_a_model_is_run() -> None:
    model = copy.deepcopy(tiny("llama"))
    before = Fingerprint.of(model)
    model.config.update({"use_cache": False, "name_or_path": "elsewhere", "transformers_version": "4.0.0"})
    model.config.update({"attention_dropout": 0.1, "initializer_range": 0.5, "pad_token_id": 3, "dtype": "float16"})
    model.set_attn_implementation("eager")
    assert Fingerprint.of(model) == before


# Writing.


def no_space(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def assert_untouched(path: Path) -> None:
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("call", ["fdopen", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(call: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(KVCalError, match=r"x\.kvcal\.safetensors: cannot be written: No space left on device"):
        write_atomically(path, content())
    monkeypatch.undo()
    assert_untouched(path)


def test_a_file_too_large_leaves_the_old_file(path: Path) -> None:
    path.write_bytes(b"old")
    bundle = made(aqua("llama"), tiny("llama"))
    with file_size_limit(4096), pytest.raises(KVCalError, match="cannot be written: File too large"):
        bundle.write(path)
    assert_untouched(path)
    assert bundle.path is None


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        path = disk / "x.kvcal.safetensors"
        path.write_bytes(b"old")
        with pytest.raises(KVCalError, match="cannot be written: No space left on device"):
            write_atomically(path, content())
        assert_untouched(path)


def test_an_interrupt_while_writing_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, content())
    assert_untouched(path)


def test_a_folder_without_permission_leaves_the_old_file(path: Path) -> None:
    path.write_bytes(b"old")
    with denied(path.parent), pytest.raises(KVCalError, match="cannot be written: Permission denied"):
        write_atomically(path, content())
    assert_untouched(path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KVCalError, match="none is not a folder; create it"):
        write_atomically(tmp_path / "none" / "x.kvcal.safetensors", content())
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_replaces_the_old_one_and_others_may_read_it(path: Path) -> None:
    path.write_bytes(b"old")
    before = os.umask(0o022)
    try:
        write_atomically(path, content())
    finally:
        os.umask(before)
    assert path.read_bytes() == content()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert len(list(path.parent.iterdir())) == 1


def test_windows_and_pairs_are_checked_where_they_are_made() -> None:
    pair = aqua("llama").layers[0]
    assert pair is not None
    with pytest.raises(KVCalError, match="codec block 8, window block 32"):
        Scheme(Windows(), "pre_rope", (LayerCodecs(pair.key, pair.value),))
    with pytest.raises(KVCalError, match="no codecs and no reason"):
        Scheme(Windows(), "pre_rope", (None,))


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, there, dangling = tmp_path / "far" / "target", tmp_path / "there", tmp_path / "dangling"
    target.write_bytes(b"old")
    there.symlink_to(target)
    dangling.symlink_to("far/new")
    for link in (there, dangling):
        write_atomically(link, content())
        assert link.is_symlink() and link.resolve().read_bytes() == content()
    assert target.read_bytes() == content()
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["dangling", "far", "new", "target", "there"]


def test_files_that_belong_together_are_all_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"old")
    write_together({second: b"1", first: b"2"})
    assert (first.read_bytes(), second.read_bytes()) == (b"2", b"1")
    with pytest.raises(KVCalError, match="no-folder is not a folder"):
        write_together({first: b"3", tmp_path / "no-folder" / "x": b"3"})
    with file_size_limit(1), pytest.raises(KVCalError, match="second: cannot be written: File too large"):
        write_together({first: b"3", second: b"33"})
    assert (first.read_bytes(), second.read_bytes()) == (b"2", b"1")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["first", "second"]


def no_files(folder: Path) -> dict[str, Path]:
    """Nothing here is a device: a mistake would cost a pipe."""
    os.mkfifo(folder / "pipe")
    (folder / "to-pipe").symlink_to("pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / "socket"))  # at most 107 characters
    return {
        "pipe": folder / "pipe", "to-pipe": folder / "to-pipe", "loop": folder / "loop", "folder": folder / "folder",
        "socket": folder / "socket",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pipe", "a pipe"),
        ("to-pipe", "a pipe"),
        ("loop", "a link that leads to itself"),
        ("folder", "a folder"),
        ("socket", "a socket"),
    ],
)
def test_what_is_no_file_is_refused_and_stays(name: str, kind: str, tmp_path: Path) -> None:
    path = no_files(tmp_path)[name]
    before = _entries(tmp_path)
    with pytest.raises(KVCalError, match=f"{name} is {kind}: give a file name"):
        write_atomically(path, content())
    assert _entries(tmp_path) == before


def _entries(folder: Path) -> dict[str, tuple[int, ...]]:
    """What a folder holds, but for times of access: a link's changes where it is followed."""
    found = {entry.name: entry.lstat() for entry in folder.iterdir()}
    return {name: (s.st_mode, s.st_ino, s.st_nlink, s.st_size, s.st_mtime_ns) for name, s in found.items()}


def test_a_device_is_named_as_one() -> None:
    """Only looked at: `file_behind` writes nothing."""
    with pytest.raises(KVCalError, match=r"^--csv /dev/null is a device: give a file name$"):
        file_behind(Path("/dev/null"), "--csv")


def test_the_file_that_standard_output_goes_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvcal compare --csv /dev/stdout > rows.csv`: a rename would lose what is printed; in a pipeline there is no
    file.
    """
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        assert file_behind(printed) == printed
        monkeypatch.setattr("kvcal_artifacts.files.STANDARD_STREAMS", {file.fileno(): "standard output"})
        for place in (printed, Path(f"/dev/fd/{file.fileno()}")):
            with pytest.raises(KVCalError, match=f"{place} is this command's standard output: give another file name"):
                file_behind(place)
    ends = os.pipe()
    try:
        with pytest.raises(KVCalError, match=f"/dev/fd/{ends[1]} is a pipe"):
            file_behind(Path(f"/dev/fd/{ends[1]}"))
    finally:
        for end in ends:
            os.close(end)
