"""vLLM 0.24 for a machine without a network: what docs/benchmarks/vllm_engine.py imports, in pieces of a limited size.

    python docs/runs/vllm_pieces.py make FOLDER [--size 42500000]   # where there is a network: FOLDER/piece.NAME.N, SHA256
    python docs/runs/vllm_pieces.py join FOLDER SITE                # there, once the pieces of a name are all in FOLDER
    PYTHONPATH=SITE python docs/runs/vllm_pieces.py prove           # there: imports, FlashAttention, one kernel

Python 3.12, torch 2.11, Triton 3.6, Transformers 5.17 are taken to be there. Of vLLM's wheel (279 MB) go along: its Python
("core", with packages that it imports, 33 MB), the extension of its kernels ("c", 85 MB) and FlashAttention 3 ("fa3",
8 MB). FlashAttention 2 and the kernels of mixtures of experts stay behind: vLLM warns, and an H100 needs neither here.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

VLLM = "vllm==0.24.0"
EXTENSIONS = {  # piece -> file of the wheel
    "c": "vllm/_C_stable_libtorch.abi3.so",
    "fa3": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
}
SMALL = ("vllm/spinloop.abi3.so", "vllm/cumem_allocator.abi3.so")
SOURCES = (".h", ".hpp", ".cuh", ".cu", ".js", ".css", ".map")
PACKAGES = """
aiohappyeyeballs-2.7.1 aiohttp-3.14.5 aiosignal-1.4.0 annotated_doc-0.0.7 annotated_types-0.8.0 anyio-4.16.0
apache_tvm_ffi-0.1.15.post2 astor-0.8.1 attrs-26.1.0 blake3-1.0.11 cachetools-8.0.2 cbor2-6.3.0
certifi-2026.10.19.post1 charset_normalizer-3.5.3 click-8.5.1 cloudpickle-3.1.3 compressed_tensors-0.17.0 depyf-0.20.0
dill-0.4.1 diskcache-5.6.3 docstring_parser-0.18.0 einops-0.8.2 fastapi-0.136.3 frozenlist-1.8.0 h11-0.16.0
httpcore-1.0.9 httpcore2-2.16.2 httpx-0.28.1 httpx2-2.16.2 idna-3.20 ijson-3.6.0 interegular-0.3.3 jiter-0.19.0
jmespath-1.1.0 jsonschema-4.26.0 jsonschema_specifications-2025.9.1 lark-1.2.2 llguidance-1.7.6
lm_format_enforcer-0.11.3 msgspec-0.22.0 multidict-7.2.1 openai-3.57.0 openai_harmony-0.0.8 opentelemetry_api-1.45.2
opentelemetry_sdk-1.45.2 opentelemetry_semantic_conventions-0.66b2 packaging-26.4 partial_json_parser-0.2.1.1.post7
pillow-13.0.0 prometheus_client-0.26.0 prometheus_fastapi_instrumentator-8.1.0 propcache-0.5.4 protobuf-7.36.2
psutil-7.2.2 py_cpuinfo-9.0.0 pybase64-1.5.1 pydantic-2.14.4 pydantic_core-2.50.5 pydantic_extra_types-2.11.1
pyjwt-2.15.1 python_json_logger-4.2.0 python_multipart-0.0.34 pyzmq-27.3.0 referencing-0.37.0 requests-2.34.2
rpds_py-2026.9.1 sentencepiece-0.2.3 setproctitle-1.3.8 six-1.17.0 sniffio-1.3.1 starlette-1.10.0 tiktoken-0.14.0
truststore-0.10.5 typing_extensions-4.16.0 typing_inspection-0.4.5 urllib3-2.8.0 uvicorn-0.54.0 uvloop-0.23.0
xgrammar-0.2.8 yarl-1.25.1
"""
PLATFORMS = [f"manylinux_{version}_x86_64" for version in ("2_35", "2_34", "2_31", "2_28", "2_27", "2_17")]


def download(requirements: list[str], folder: Path) -> list[Path]:
    """Wheels for Python 3.12 on x86-64, without what they require."""
    platforms = [
        word for name in (*PLATFORMS, "manylinux2014_x86_64", "manylinux1_x86_64") for word in ("--platform", name)
    ]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    versions = ["--python-version", "3.12", "--implementation", "cp"]
    subprocess.run([*command, *versions, *platforms, *requirements], check=True)
    return sorted(folder.glob("*.whl"))


def goes_along(name: str) -> bool:
    """Whether a file of vLLM's wheel is in the core piece."""
    if name in SMALL:
        return True
    return ".so" not in PurePosixPath(name).name and not name.endswith((*SOURCES, "vllm-rs"))


def make(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        box = Path(temporary)
        [wheel] = download([VLLM], box / "vllm")
        packages = ["==".join(word.rsplit("-", 1)) for word in PACKAGES.split()]
        core = io.BytesIO()
        with tarfile.open(fileobj=core, mode="w") as archive:
            for path in [wheel, *download(packages, box / "packages")]:
                with zipfile.ZipFile(path) as members:
                    for name in members.namelist():
                        if not name.endswith("/") and (path != wheel or goes_along(name)):
                            add(archive, name, members.read(name))
        write_pieces(folder, "core", core.getvalue(), size)
        with zipfile.ZipFile(wheel) as members:
            for piece, name in EXTENSIONS.items():
                write_pieces(folder, piece, members.read(name), size)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(folder.glob("piece.*"))]
    (folder / "SHA256").write_text("\n".join(lines) + "\n")


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def write_pieces(folder: Path, piece: str, data: bytes, size: int) -> None:
    packed = lzma.compress(data, preset=6)
    for number, start in enumerate(range(0, len(packed), size)):
        path = folder / f"piece.{piece}.{number}"
        path.write_bytes(packed[start : start + size])
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def join(folder: Path, site: Path) -> None:
    """Unpack each name whose pieces are all there and whole."""
    expected = dict(reversed(line.split()) for line in (folder / "SHA256").read_text().splitlines())
    for piece in ("core", *EXTENSIONS):
        paths = [folder / name for name in sorted(expected) if name.startswith(f"piece.{piece}.")]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            print(f"{piece}: {', '.join(missing)} not here yet")
            continue
        for path in paths:
            if hashlib.sha256(path.read_bytes()).hexdigest() != expected[path.name]:
                sys.exit(f"{path}: not what SHA256 names; bring it again")
        data = lzma.decompress(b"".join(path.read_bytes() for path in paths))
        if piece == "core":
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(site, filter="data")
        else:
            target = site / EXTENSIONS[piece]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        print(f"{piece}: {len(data) / 1e6:.0f} MB", flush=True)


def prove() -> None:
    import torch
    import vllm
    import vllm._C_stable_libtorch
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    ones = torch.ones(64, device="cuda").half()
    states = torch.randn(4, 64, device="cuda").half()
    normed = torch.empty_like(states)
    _custom_ops.rms_norm(normed, states, ones, 1e-5)
    error = (normed - torch.nn.functional.rms_norm(states, (64,), ones, 1e-5)).abs().max().item()
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {current_platform.get_device_capability()}")
    print(f"FlashAttention {get_flash_attn_version()}, rms_norm off by {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("make")
    one.add_argument("folder", type=Path)
    one.add_argument("--size", type=int, default=42_500_000, help="bytes of a piece at most")
    other = actions.add_parser("join")
    other.add_argument("folder", type=Path)
    other.add_argument("site", type=Path)
    actions.add_parser("prove")
    args = parser.parse_args()
    if args.action == "make":
        make(args.folder, args.size)
    elif args.action == "join":
        join(args.folder, args.site)
    else:
        prove()


if __name__ == "__main__":
    main()
